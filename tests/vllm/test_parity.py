"""`speculators parity` agrees where the pair is sound, and names the tensor where something between training and serving is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import served

from speculators.serving import plan
from speculators.serving.parity import Parity, compare

ENGINE: dict[str, Any] = {"block_size": 32, "num_gpu_blocks_override": 32, "max_num_seqs": 4}


def compared(name: str, checkpoint: Path | str) -> Parity:
    """Our engine with the sound drafter, vLLM with what lies in a folder."""
    served.drafter(name)
    return compare(plan(checkpoint), served.verifier(), served.drafter(name), served.prompts(), served.REPLY_TOKENS, **ENGINE)


def doctored(name: str, folder: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with other keys in its config.json."""
    shutil.copytree(served.checkpoint(name), folder / name)
    file = folder / name / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder / name


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_a_sound_pair_drafts_alike_in_every_round(name: str) -> None:
    found = compared(name, served.checkpoint(name))
    assert found.difference is None
    assert found.equal_rounds == found.rounds > len(served.prompts())
    assert found.identical_replies == found.prompts == len(served.prompts())
    assert found.accepted[0] == found.accepted[1] and found.acceptance_length[0] == found.acceptance_length[1] > 1.5


def test_a_tap_that_is_off_by_one_is_named(tmp_path: Path) -> None:
    found = compared("eagle3", doctored("eagle3", tmp_path, eagle_aux_hidden_state_layer_ids=[1, 2, 3]))
    assert found.identical_replies == found.prompts  # a wrong drafter costs speed, never the reply
    assert found.difference is not None and found.difference.tensor.startswith("aux hidden states, row 0 of ")
    assert found.acceptance_length[1] < found.acceptance_length[0]


def test_a_norm_that_only_one_side_applies_is_named_by_what_it_changes(tmp_path: Path) -> None:
    found = compared("eagle3", doctored("eagle3", tmp_path, norm_before_residual=True))
    assert found.difference is not None and found.difference.tensor.startswith("draft hidden states, row 0 of ")
