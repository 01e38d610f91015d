"""From another drafter's configuration and a few options to that of a drafter which starts from its weights.

Weights mean something only for the taps, the draft vocabulary, the anchor rule and the shape they were trained with.
So these come from the checkpoint, and an option that says otherwise is refused instead of obeyed or ignored.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from speculators.algorithms.options import DrafterOptions
from speculators.config import SpeculatorConfig
from speculators.errors import ConfigError
from speculators.speculator import Speculator, VerifierWeights

# Keys that say which method a checkpoint is of and how it was stored and trained, never what its weights depend on.
_OWN_KEYS = ("speculators_model_type", "speculators_version", "architectures", "dtype", "training_options")


def continued_config(
    speculator_class: type[Speculator],
    options_class: type[DrafterOptions],
    source: SpeculatorConfig,
    verifier: VerifierWeights,
    options: dict[str, Any],
) -> SpeculatorConfig:
    """`Speculator.continued_config` of the algorithms that take `DrafterOptions`.

    Continued training of the same method keeps the training settings of the checkpoint where no option changes them;
    a drafter of another method starts with its own. None as an option's value leaves it to the checkpoint.

    Raises:
        ConfigError: an option is unknown, out of range, or contradicts the checkpoint.
    """
    method, same = speculator_class.method, source.speculators_model_type == speculator_class.method
    chosen = options_class.parse(method, options)
    named = {name: value for name in chosen.model_fields_set if (value := getattr(chosen, name)) is not None}
    if same and not named:
        return source
    known = options_class.stored_in(source)
    settled = {name: value for name, value in known.items() if name not in options_class.adjustable}
    for name in settled.keys() & named.keys():
        if named[name] != settled[name]:
            raise ConfigError(
                f"{method} option {name} = {named[name]!r} contradicts the {source.speculators_model_type} checkpoint that training starts"
                f" from, which was trained with {name} = {settled[name]!r}; leave the option out, or train a new drafter"
            )
    fresh = speculator_class.default_config(verifier, **{**(known if same else settled), **named})
    fields = fresh.model_dump(mode="json")
    inherited = source.model_dump(mode="json", exclude_unset=True)
    adjusted = {key for option, key in options_class.adjustable.items() if option in named or not same}
    fields |= {key: value for key, value in inherited.items() if key not in _OWN_KEYS and key not in adjusted}
    fields["speculators_config"] = {**fields["speculators_config"], "algorithm": method}
    if same:
        # Some training settings follow from K, so a new K brings its own.
        said: BaseModel = getattr(fresh, "training_options") if "num_draft_tokens" in named else getattr(chosen, "training")  # noqa: B009
        kept = inherited.get("training_options", {})
        fields["training_options"] = {**kept, **said.model_dump(mode="json", exclude_unset=True)}
    return speculator_class.config_class.parse(fields, f"{method} started from a {source.speculators_model_type} drafter")
