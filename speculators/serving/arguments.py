"""The user's own arguments of `vllm serve`: which would contradict ours, and the token budget they leave."""

from __future__ import annotations

from collections.abc import Sequence

from speculators.errors import ConfigError

# vLLM's own defaults leave this many tokens of a step's budget for every sequence (8192 for 1024, 2048 for 256).
DEFAULT_TOKENS_A_SEQUENCE = 8
LARGER_BATCH = 256
_OURS = ("--model", "--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens")
_SEQUENCES, _TOKENS = "--max-num-seqs", "--max-num-batched-tokens"


def refuse_ours(arguments: Sequence[str]) -> None:
    """Refuse arguments that this command writes itself.

    Raises:
        ConfigError: naming the first of them.
    """
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if name.partition(".")[0] in _OURS:  # vLLM takes keys of a dictionary as --name.key value, in place of what was given for --name
            raise ConfigError(f"{name} is what this command works out from the checkpoint; leave it out (see --verifier and --k)")


def budget_arguments(arguments: Sequence[str], num_draft_tokens: int, *, parallel: bool = False) -> tuple[list[str], list[str]]:
    """Make a step's budget hold K + 1 tokens of every sequence; below that vLLM delays sequences or refuses to start.

    Where all K drafts come from one pass, vLLM takes up to K slots off the budget for every sequence that may run, whether it does or
    not (`SpeculativeConfig.max_num_new_slots_for_drafting`): with its defaults three quarters of it.

    Args:
        arguments: of the user.
        num_draft_tokens: K.
        parallel: whether the drafts come from one pass.

    Returns:
        Arguments to add, and sentences saying why.

    Raises:
        ConfigError: the user's own numbers contradict each other, or are none.
    """
    width = num_draft_tokens + 1
    kept = num_draft_tokens if parallel else 0
    each = f"K + 1 = {width} tokens" + (f" and {kept} slots for drafts" if kept else "")
    sequences, tokens = _number(arguments, _SEQUENCES), _number(arguments, _TOKENS)
    if sequences is not None and tokens is not None:
        if tokens < sequences * width:
            raise ConfigError(
                f"{_TOKENS} {tokens} is below {_SEQUENCES} x (K + 1) = {sequences} x {width} = {sequences * width}: a step could not"
                " verify every sequence's drafts; raise the first or lower the second"
            )
        wanted = sequences * (width + kept)
        short = f"{_TOKENS} {tokens} is less than {each} for each of {sequences} sequences: {wanted} would let a step verify them all"
        return [], [short] if tokens < wanted else []
    if tokens is not None:
        fitting = min(LARGER_BATCH, max(1, tokens // (width + kept)))
        if tokens < width:
            raise ConfigError(f"{_TOKENS} {tokens} is below K + 1 = {width}, the tokens of one sequence; raise it")
        return [_SEQUENCES, str(fitting)], [f"{_SEQUENCES} {fitting}: so many sequences of {each} fit {_TOKENS} {tokens}"]
    if sequences is None and width + kept <= DEFAULT_TOKENS_A_SEQUENCE:
        return [], []
    wanted = max(8192, (sequences or LARGER_BATCH) * (width + kept))
    added = [] if sequences is not None else [_SEQUENCES, str(LARGER_BATCH)]
    return [*added, _TOKENS, str(wanted)], [f"{_TOKENS} {wanted}: a step needs {each} for each sequence"]


def number_of_sequences(arguments: Sequence[str]) -> int:
    """The most sequences that vLLM will run at once, as far as its arguments say."""
    return _number(arguments, _SEQUENCES) or LARGER_BATCH


def _number(arguments: Sequence[str], option: str) -> int | None:
    """The value of an option in either spelling, `--a 1` or `--a=1`; the last one counts."""
    value = None
    for position, argument in enumerate(arguments):
        name, equals, inline = argument.partition("=")
        if name.replace("_", "-") == option:
            value = inline if equals else arguments[position + 1] if position + 1 < len(arguments) else ""
    if value is None:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{option} {value!r} must be a whole number of at least 1")
    return int(value)
