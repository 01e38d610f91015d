"""Each broken checkpoint, made from one that loads, gives its one clear sentence; none loads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_drafters import drafter, verifier_weights
from torch import Tensor

from speculators.checkpoint import load, save, storage
from speculators.errors import CheckpointError, ConfigError, PairingError, SpeculatorsError


class Checkpoint:
    """A checkpoint folder that can be broken, and the folder of the good ones."""

    def __init__(self, folder: Path, others: Path) -> None:
        self.folder, self.others = folder, others

    def config(self, **changes: Any) -> None:
        """Change top-level keys; `...` removes one."""
        self._edit(lambda data: data, changes)

    def layers(self, **changes: Any) -> None:
        """Change keys of transformer_layer_config."""
        self._edit(lambda data: data["transformer_layer_config"], changes)

    def _edit(self, part: Callable[[dict[str, Any]], dict[str, Any]], changes: dict[str, Any]) -> None:
        file = self.folder / "config.json"
        data = json.loads(file.read_text())
        for key, value in changes.items():
            if value is ...:
                del part(data)[key]
            else:
                part(data)[key] = value
        file.write_text(json.dumps(data))

    def tensors(self, change: Callable[[dict[str, Tensor]], Any], name: str = "model.safetensors") -> None:
        """Change the dict of stored tensors in place."""
        file = self.folder / name
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    def file(self, name: str, content: bytes | None) -> None:
        """Replace a file's bytes, or remove it."""
        if content is None:
            (self.folder / name).unlink()
        else:
            (self.folder / name).write_bytes(content)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One good checkpoint a kind, which the tests copy."""
    root = tmp_path_factory.mktemp("originals")
    for method in ("dflash", "dspark", "eagle3", "peagle"):
        save(drafter(method), root / method)
    small = drafter("dspark", draft_vocab_size=20, markov_rank=8)
    small.set_draft_vocabulary(torch.arange(1, 60, 3))
    save(small, root / "reduced")
    save(drafter("dspark"), root / "sharded", max_shard_bytes=60_000)
    save(drafter("dflash"), root / "compact", form="compact")
    return root


def with_nan(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"][1, 2] = float("nan")


def swap_markov_tables(tensors: dict[str, Tensor]) -> None:
    first, second = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
    tensors[first], tensors[second] = tensors[second], tensors[first]


def split_index(checkpoint: Checkpoint, change: Callable[[dict[str, str]], Any]) -> None:
    file = checkpoint.folder / "model.safetensors.index.json"
    data = json.loads(file.read_text())
    change(data["weight_map"])
    file.write_text(json.dumps(data))


def swap_shards(checkpoint: Checkpoint) -> None:
    first, second, *_ = sorted(checkpoint.folder.glob("model-*.safetensors"))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def drop_shard(checkpoint: Checkpoint) -> None:
    next(checkpoint.folder.glob("model-00002-*")).unlink()


def truncate(checkpoint: Checkpoint) -> None:
    file = checkpoint.folder / "model.safetensors"
    checkpoint.file(file.name, file.read_bytes()[:-100])


# Each row: original, what breaks it, fragments of the one sentence (file, key, value, limit or remedy).
BROKEN: dict[str, tuple[str, Callable[[Checkpoint], Any], list[str]]] = {
    "no config": ("dflash", lambda c: c.file("config.json", None), ["holds no config.json", "name the folder"]),
    "config cut short": ("dflash", lambda c: c.file("config.json", b'{"a": '), ["config.json is not valid JSON", "download it again"]),
    "config not text": ("dflash", lambda c: c.file("config.json", b"\xff\xfe\x00"), ["config.json is not valid JSON"]),
    "config is a list": ("dflash", lambda c: c.file("config.json", b"[]"), ["config.json holds a JSON list"]),
    "not a drafter": (
        "dflash",
        lambda c: c.config(speculators_model_type=...),
        ["no speculators_model_type", "no drafter in the speculators format", "name another folder"],
    ),
    "unknown method": (
        "dflash",
        lambda c: c.config(speculators_model_type="medusa9"),
        ["speculators_model_type = 'medusa9'", "dflash", "dspark", "eagle3", "peagle"],
    ),
    "no layer config": ("dflash", lambda c: c.config(transformer_layer_config=...), ["transformer_layer_config", "required"]),
    "no proposal": ("dflash", lambda c: c.config(speculators_config=...), ["speculators_config", "required"]),
    "negative block": ("dflash", lambda c: c.config(block_size=-5), ["block_size = -5", "greater than or equal to 1"]),
    "K above the block": ("dflash", lambda c: c.config(block_size=3), ["speculative_tokens 5", "exceeds the 2 tokens"]),
    "K above the block that samples its anchor": (
        "dspark",
        lambda c: c.config(block_size=4),
        ["speculative_tokens 5", "exceeds the 4 tokens"],
    ),
    "mask token outside": ("dflash", lambda c: c.config(mask_token_id=61), ["mask_token_id 61", "vocabulary of 61 tokens"]),
    "no mask token": ("dflash", lambda c: c.config(mask_token_id=None), ["config.json: mask_token_id = None", "name the one"]),
    "mask token stops": (
        "dflash",
        lambda c: c.config(mask_token_id=2),
        ["config.json: mask_token_id = 2", "stop token of 'tiny-verifier' [2]"],
    ),
    "mask token pads": ("peagle", lambda c: c.config(mask_token_id=0), ["config.json: mask_token_id = 0", "pad token of 'tiny-verifier'"]),
    "taps unsorted": (
        "dflash",
        lambda c: c.config(aux_hidden_state_layer_ids=[2, 1, 4]),
        ["aux_hidden_state_layer_ids [2, 1, 4]", "ascending"],
    ),
    "taps repeated": ("eagle3", lambda c: c.config(eagle_aux_hidden_state_layer_ids=[1, 1, 4]), ["[1, 1, 4]", "unique"]),
    "taps too deep": (
        "dflash",
        lambda c: c.config(aux_hidden_state_layer_ids=[1, 2, 7]),
        ["[1, 2, 7] reads layer 7", "6 layers (ids 0 to 6)"],
    ),
    "one tap too many": (
        "dflash",
        lambda c: c.config(aux_hidden_state_layer_ids=[1, 2, 4, 5]),
        ["model.safetensors: fc.weight = shape [32, 96]", "4 taps [1, 2, 4, 5] of hidden size 32 need 128", "aux_hidden_state_layer_ids"],
    ),
    "draft vocabulary too large": ("dflash", lambda c: c.config(draft_vocab_size=99999999), ["draft_vocab_size 99999999", "61 tokens"]),
    "draft vocabulary of another size": ("reduced", lambda c: c.config(draft_vocab_size=19), ["[20]", "[19]"]),
    "heads do not divide": ("dflash", lambda c: c.layers(num_key_value_heads=3), ["num_attention_heads 4", "num_key_value_heads 3"]),
    "layer types too few": ("dflash", lambda c: c.layers(layer_types=["full_attention"]), ["layer_types has 1 entries for 2 layers"]),
    "no rope base": (
        "dflash",
        lambda c: c.layers(rope_parameters={"rope_type": "default"}, rope_theta=...),
        ["transformer_layer_config", "rope_theta"],
    ),
    "two rope bases": (
        "dflash",
        lambda c: c.layers(rope_theta=5.0),
        ["transformer_layer_config.rope_theta = 5.0", "rope_parameters.rope_theta = 10000"],
    ),
    "rope type unknown here": (
        "dflash",
        lambda c: c.layers(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
        ["rope_type = 'dynamic'", "yarn"],
    ),
    "another MLP width": (
        "dflash",
        lambda c: c.layers(intermediate_size=64),
        ["model.safetensors: layers.0.mlp", "shape [32, 48]", "[32, 64]", "correct config.json"],
    ),
    "both head norms": ("eagle3", lambda c: c.config(fc_norm=True), ["config.json: fc_norm and norm_before_fc"]),
    "Markov rank without head": ("dspark", lambda c: c.config(markov_rank=0), ["markov_rank"]),
    "Markov kind unknown": (
        "dspark",
        lambda c: c.config(markov_head_type="linear"),
        ["markov_head_type = 'linear'", "'vanilla', 'gated' or 'rnn'"],
    ),
    "Markov tables swapped": (
        "reduced",
        lambda c: c.tensors(swap_markov_tables),
        ["model.safetensors: markov_head.markov_w1.weight = shape [20, 8]", "shape [61, 8]"],
    ),
    "no weights": ("dflash", lambda c: c.file("model.safetensors", None), ["neither model.safetensors nor model.safetensors.index.json"]),
    "only pickles": (
        "dflash",
        lambda c: (c.file("model.safetensors", None), c.file("pytorch_model.bin", b"")),
        ["only pickled weights (pytorch_model.bin)", "safetensors"],
    ),
    "weights cut short": ("dflash", truncate, ["model.safetensors is no complete safetensors file", "download it again"]),
    "weights empty": ("dflash", lambda c: c.file("model.safetensors", b""), ["model.safetensors is no complete safetensors file"]),
    "Git LFS pointer": (
        "dflash",
        lambda c: c.file("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        ["model.safetensors is a Git LFS pointer", "git lfs pull"],
    ),
    "tensor missing": (
        "dflash",
        lambda c: c.tensors(lambda t: t.pop("layers.0.mlp.down_proj.weight")),
        ["model.safetensors: layers.0.mlp.down_proj.weight = missing", "dflash"],
    ),
    "shared hidden state missing": (
        "peagle",
        lambda c: c.tensors(lambda t: t.pop("mask_hidden")),
        ["model.safetensors: mask_hidden = missing"],
    ),
    "own embedding missing": ("peagle", lambda c: c.tensors(lambda t: t.pop("embed_tokens.weight")), ["embed_tokens.weight = missing"]),
    "tensor unexpected": (
        "dflash",
        lambda c: c.tensors(lambda t: t.update({"verifier_norm.weight": torch.ones(32)})),
        ["model.safetensors: verifier_norm.weight = shape [32]", "no such tensor"],
    ),
    "bias unexpected": ("dflash", lambda c: c.tensors(lambda t: t.update({"fc.bias": torch.ones(32)})), ["fc.bias = shape [32]"]),
    "not finite": (
        "dflash",
        lambda c: c.tensors(with_nan),
        ["model.safetensors: fc.weight = nan at [1, 2]", "1 of 3072", "earlier checkpoint"],
    ),
    "packed weights": (
        "dflash",
        lambda c: c.tensors(lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)})),
        ["fc.weight = float8_e4m3fn", "bfloat16, float16, float32"],
    ),
    "head of another size": (
        "eagle3",
        lambda c: c.tensors(lambda t: t.update({"lm_head.weight": torch.ones(60, 32)})),
        ["lm_head.weight", "[60, 32]", "[61, 32]"],
    ),
    "offsets are ids": (
        "reduced",
        lambda c: c.tensors(lambda t: t.update(d2t=torch.arange(1, 60, 3))),
        ["model.safetensors: d2t[1] = 4", "nonzero(t2d) - arange", "d2t[1] = 3", "instead of offsets"],
    ),
    "constant offsets": ("reduced", lambda c: c.tensors(lambda t: t["d2t"].fill_(1)), ["d2t[1] = 1", "d2t[1] = 3"]),
    "mapping keeps too many": (
        "reduced",
        lambda c: c.tensors(lambda t: t["t2d"].fill_(True)),
        ["t2d = 61 true entries", "draft_vocab_size = 20"],
    ),
    "offset leaves the vocabulary": (
        "reduced",
        lambda c: c.tensors(lambda t: (t.pop("t2d"), t["d2t"].add_(3))),
        ["d2t[19] = 42", "token 61, outside 0 to 60"],
    ),
    "mapping of the wrong kind": ("reduced", lambda c: c.tensors(lambda t: t.update(d2t=t["d2t"].float())), ["d2t = float32", "integer"]),
    "mapping missing": ("reduced", lambda c: c.tensors(lambda t: t.pop("d2t")), ["d2t = missing"]),
    "tensor in no shard": (
        "sharded",
        lambda c: (
            [c.tensors(lambda t: t.pop("fc.weight", None), file.name) for file in c.folder.glob("*.safetensors")]
            and split_index(c, lambda m: m.pop("fc.weight"))
        ),
        ["model.safetensors.index.json: fc.weight = missing"],
    ),
    "shard missing": ("sharded", drop_shard, ["model.safetensors.index.json: weight_map = 'model-00002-of-", "missing from the folder"]),
    "shard outside": (
        "sharded",
        lambda c: split_index(c, lambda m: m.update({"fc.weight": "../model.safetensors"})),
        ["index.json: weight_map = '../model.safetensors'", "file of this folder"],
    ),
    "index names a tensor that is not there": (
        "sharded",
        lambda c: split_index(c, lambda m: m.update({"ghost": m["fc.weight"]})),
        ["index.json: ghost = 'model-0000", "does not hold this tensor"],
    ),
    "index forgets a tensor": (
        "sharded",
        lambda c: split_index(c, lambda m: m.pop("fc.weight")),
        ["fc.weight = in model-0000", "the index puts it in None"],
    ),
    "index empty": ("sharded", lambda c: split_index(c, lambda m: m.clear()), ["weight_map = {}"]),
    "compact without its hash": (
        "compact",
        lambda c: c.config(unified_speculators={"form": "compact"}),
        ["verifier_embedding_sha256 = None"],
    ),
    "form unknown": (
        "compact",
        lambda c: c.config(unified_speculators={"form": "tiny"}),
        ["unified_speculators.form = 'tiny'", "'full' and 'compact'"],
    ),
    "no draft token": (
        "eagle3",
        lambda c: _proposal(c, proposal_methods=[{"proposal_type": "greedy", "speculative_tokens": 0}]),
        ["proposal_methods.0.speculative_tokens = 0", "greater than or equal to 1"],
    ),
    "no proposal method": ("eagle3", lambda c: _proposal(c, proposal_methods=[]), ["proposal_methods = []", "at least 1 item"]),
    "default method unknown": (
        "dspark",
        lambda c: _proposal(c, default_proposal_method="tree"),
        ["default_proposal_method 'tree'", "['greedy']"],
    ),
    "weights of another drafter": (
        "dspark",
        lambda c: c.file("model.safetensors", (c.others / "eagle3" / "model.safetensors").read_bytes()),
        ["model.safetensors", "= missing", "a dspark speculator", "unexpectedly holds"],
    ),
    "shards swapped": ("sharded", swap_shards, ["model-0000", "the index puts it in model-0000"]),
    "infinite": (
        "peagle",
        lambda c: c.tensors(lambda t: t["mask_hidden"].view(-1)[5:7].fill_(float("-inf"))),
        ["mask_hidden = -inf at [0, 0, 5]", "2 of 96"],
    ),
    "whole numbers as weights": (
        "dspark",
        lambda c: c.tensors(lambda t: t.update({"norm.weight": torch.ones(32, dtype=torch.int8)})),
        ["norm.weight = int8", "bfloat16, float16, float32"],
    ),
    "mapping as numbers": ("reduced", lambda c: c.tensors(lambda t: t.update(t2d=t["t2d"].long())), ["t2d = int64", "stored as bool"]),
    "shared hidden state of another width": (
        "peagle",
        lambda c: c.tensors(lambda t: t.update({"mask_hidden": torch.zeros(1, 1, 64)})),
        ["mask_hidden = shape [1, 1, 64]", "shape [1, 1, 96]"],
    ),
    "another Markov rank": (
        "dspark",
        lambda c: c.config(markov_rank=4),
        ["confidence_head.proj.weight = shape [1, 288]", "shape [1, 36]"],
    ),
    "confidence without the Markov embedding": (
        "dspark",
        lambda c: c.config(confidence_head_with_markov=False),
        ["confidence_head.proj.weight = shape [1, 288]", "shape [1, 32]"],
    ),
    "embedding of another verifier": (
        "eagle3",
        lambda c: c.tensors(lambda t: t["embed_tokens.weight"][17].add_(1)),
        ["embed_tokens.weight", "'tiny-verifier' in row 17", "load it with 'tiny-verifier'"],
    ),
    "vocabulary of another verifier": (
        "dflash",
        lambda c: (c.layers(vocab_size=99), c.config(draft_vocab_size=99)),
        ["with vocabulary 99", "'tiny-verifier' has 61"],
    ),
    "hash of another verifier": (
        "compact",
        lambda c: c.config(unified_speculators={"form": "compact", "verifier_embedding_sha256": "0" * 64}),
        ["borrows the embedding of 'tiny-verifier' (sha256 000000000000", "is another"],
    ),
    "a billion layers": (
        "dflash",
        lambda c: c.layers(num_hidden_layers=10**9),
        ["num_hidden_layers = 1000000000", "less than or equal to 1024"],
    ),
    "unknown activation": ("dspark", lambda c: c.layers(hidden_act="relu"), ["config.json: hidden_act = 'relu'", "'silu' only"]),
    "odd head": ("dflash", lambda c: c.layers(head_dim=7), ["head_dim 7", "must be even"]),
    "epsilon infinite": ("peagle", lambda c: c.layers(rms_norm_eps=float("inf")), ["rms_norm_eps = inf", "finite"]),
    "unknown layer type": ("dflash", lambda c: _layer_types(c, "chunked"), ["layer_types holds 'chunked'", "'full_attention'"]),
    "window without a width": ("dflash", lambda c: _layer_types(c, "sliding_attention"), ["sliding_window None", "at least 1"]),
    "negative window": ("dflash", lambda c: _layer_types(c, "sliding_attention", sliding_window=-5), ["sliding_window -5", "at least 1"]),
    "theta is text": ("dflash", lambda c: _rope(c, rope_theta="a"), ["rope_theta 'a'", "positive number"]),
    "theta is not a number": ("dspark", lambda c: _rope(c, rope_theta=float("nan")), ["rope_theta nan", "positive number"]),
    "unknown rope": (
        "eagle3",
        lambda c: _rope(c, rope_type="spiral"),
        ["rope_type = 'spiral' is unknown", "default, linear, llama3 or yarn"],
    ),
    "rope type is a list": ("dflash", lambda c: _rope(c, rope_type=["yarn"]), ["rope_type = ['yarn'] is unknown"]),
    "rope grows": (
        "dflash",
        lambda c: _rope(c, rope_type="dynamic", factor=2.0),
        ["rope_type = 'dynamic' changes with the sequence length"],
    ),
    "rope lacks its keys": ("peagle", lambda c: _rope(c, rope_type="llama3"), ["cannot be used", "low_freq_factor"]),
    "rope factor is text": ("dflash", lambda c: _rope(c, rope_type="yarn", factor="x"), ["'factor': 'x'", "cannot be used"]),
    "rope factor is zero": ("dflash", lambda c: _rope(c, rope_type="linear", factor=0), ["'factor': 0", "no finite rotation"]),
    "rope factor is not a number": ("dspark", lambda c: _rope(c, rope_type="linear", factor=float("nan")), ["no finite rotation"]),
}


def _rope(checkpoint: Checkpoint, **rope: Any) -> None:
    checkpoint.layers(rope_theta=..., rope_parameters={"rope_theta": 10000.0, **rope})


def _proposal(checkpoint: Checkpoint, **changes: Any) -> None:
    config = json.loads((checkpoint.folder / "config.json").read_text())
    checkpoint.config(speculators_config=config["speculators_config"] | changes)


def _layer_types(checkpoint: Checkpoint, kind: str, **changes: Any) -> None:
    layers = json.loads((checkpoint.folder / "config.json").read_text())["transformer_layer_config"]["num_hidden_layers"]
    checkpoint.layers(layer_types=[kind] * layers, **changes)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_gives_one_clear_sentence(name: str, originals: Path, tmp_path: Path) -> None:
    original, breaks, fragments = BROKEN[name]
    verifier = replace(verifier_weights(), config=verifier_weights().config | {"pad_token_id": 0})
    for file in (originals / original).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    load(tmp_path, verifier)
    breaks(Checkpoint(tmp_path, originals))
    with pytest.raises((CheckpointError, PairingError)) as caught:
        load(tmp_path, verifier)
    sentence = str(caught.value)
    assert "\n" not in sentence and all(fragment in sentence for fragment in fragments), sentence
    assert len(sentence) - len(str(tmp_path)) < 400, "the offending value is shown, not the whole file"
    assert str(tmp_path) in sentence, "the file is named"


def test_there_is_a_case_for_every_method() -> None:
    assert {original for original, _, _ in BROKEN.values()} >= {"dflash", "dspark", "eagle3", "peagle"}


@pytest.mark.parametrize(
    ("path", "fragment"),
    [
        ("nothing-here", "does not exist"),
        ("a/b/c", "does not exist"),
        ("/no/such/folder", "does not exist"),
        ("org/name", "cannot be downloaded"),
    ],
)
def test_a_missing_folder_is_named(path: str, fragment: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{re.escape(path)}.*{fragment}"):
        load(path)


def test_a_path_below_an_existing_folder_is_not_taken_for_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(storage, "snapshot_download", lambda *_, **__: pytest.fail("asked the Hub"))
    with pytest.raises(CheckpointError, match="checkpoints/typo does not exist"):
        load("checkpoints/typo")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file"):
        load(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="it is a file; name a folder"):
        save(drafter("dflash"), tmp_path / "model.safetensors")


@pytest.mark.parametrize(("what", "change"), [("vocabulary 61", {"rows": 60}), ("hidden size 32", {"columns": 16})])
def test_a_verifier_of_another_size_is_refused_naming_both(what: str, change: dict[str, int], tmp_path: Path) -> None:
    save(drafter("dflash"), tmp_path)
    own = verifier_weights()
    table = own.embedding[: change.get("rows", 61), : change.get("columns", 32)]
    other = replace(own, embedding=table, head=table, name_or_path="other/model")
    with pytest.raises(PairingError, match=rf"{what}, but 'other/model' has .* pair it with 'tiny-verifier'"):
        load(tmp_path, other)


def test_values_that_leave_the_range_of_a_dtype_are_refused(tmp_path: Path) -> None:
    speculator = drafter("dflash")
    with torch.no_grad():
        speculator.get_parameter("fc.weight")[0, 0] = 1e6
    save(speculator, tmp_path, dtype="float32")
    with pytest.raises(CheckpointError, match=r"fc.weight = up to 1e\+06: its values leave the range of float16"):
        load(tmp_path, dtype=torch.float16)
    with pytest.raises(CheckpointError, match=r"fc.weight = inf at \[0, 0\]"):
        save(speculator, tmp_path / "half", dtype="float16")
    assert not (tmp_path / "half").exists()


def test_what_would_not_load_is_not_saved(tmp_path: Path) -> None:
    diverged = drafter("dspark")
    with torch.no_grad():
        diverged.get_parameter("markov_head.markov_w2.weight")[3, 1] = float("inf")
    unmapped = drafter("dflash", draft_vocab_size=20)
    alone = drafter("eagle3")
    alone._verifier = []
    cases: list[tuple[Any, dict[str, Any], type[SpeculatorsError], str]] = [
        (diverged, {}, CheckpointError, r"markov_w2.weight = inf at \[3, 1\]"),
        (unmapped, {}, CheckpointError, "t2d = 0 true entries: it must keep exactly draft_vocab_size = 20"),
        (alone, {}, CheckpointError, r"embed_tokens.weight with this eagle3 speculator, and no verifier is attached"),
        (alone, {"form": "compact"}, CheckpointError, "attach its verifier or save form='full'"),
        (drafter("dflash"), {"form": "small"}, ConfigError, "form = 'small': .* 'full' or 'compact'"),
        (drafter("dflash"), {"dtype": "int8"}, ConfigError, "dtype = 'int8': .* bfloat16, float16, float32"),
    ]
    for speculator, options, kind, message in cases:
        with pytest.raises(kind, match=message):
            save(speculator, tmp_path / "x", **options)
        assert not list(tmp_path.iterdir())
