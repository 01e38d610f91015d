"""The outcome of a round: the kernel and the definition against the rules, told row by row in plain Python."""

from __future__ import annotations

import pytest
import torch

from speculators.kernels.round_outcome import RowState, round_outcome

pytestmark = pytest.mark.usefixtures("garbage_in_new_memory")  # no result may depend on what memory held

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize(("rows", "width", "stop_ids"), [(1, 0, []), (64, 0, [3]), (64, 1, [1]), (300, 7, [2, 5]), (7, 16, [])])
def test_rows_keep_what_was_accepted_up_to_a_stop_token_or_their_limit(
    implementation: str, rows: int, width: int, stop_ids: list[int]
) -> None:
    generator, limit = torch.Generator().manual_seed(rows + width), 20

    def below(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator)

    drafts, next_token, anchor = below(8, rows, 2 * width)[:, :width], below(8, rows), below(8, rows)
    proposed = below(width + 1, rows)
    accepted = (torch.rand(rows, generator=generator) * (proposed + 1)).long()
    emitted, lengths, finished = 1 + below(limit - 1, rows), below(100, rows), below(4, rows) == 0
    on_device = [x.to(DEVICE) for x in (anchor, emitted, finished, lengths, drafts, proposed, accepted, next_token)]
    stops = torch.tensor(stop_ids, dtype=torch.int64, device=DEVICE)
    outcome = round_outcome(RowState(*on_device[:4]), *on_device[4:], stops, limit, implementation=implementation)  # type: ignore[arg-type]
    after = outcome.after
    for row in range(rows):
        kept = [*drafts[row, : accepted[row]].tolist(), int(next_token[row])]
        stop = next((place for place, token in enumerate(kept) if token in stop_ids), None)
        was_finished = bool(finished[row])
        new = [] if was_finished else kept if stop is None else kept[: stop + 1]
        stopped = not was_finished and stop is not None
        total = int(emitted[row]) + len(new)
        is_finished = was_finished or stopped or total >= limit
        whole = len(new) == len(kept)
        counts = [int(proposed[row]) if whole else len(new), int(accepted[row]) if whole else len(new), len(new), stopped, is_finished]
        assert outcome.packed[row, :5].tolist() == counts
        assert outcome.tokens[row, : len(new)].tolist() == new
        committed = 0 if is_finished else len(new)
        assert int(outcome.committed[row]) == committed and int(after.lengths[row]) == int(lengths[row]) + committed
        assert int(after.emitted[row]) == total and bool(after.finished[row]) == is_finished
        assert int(after.anchor[row]) == int((anchor if is_finished else next_token)[row])
