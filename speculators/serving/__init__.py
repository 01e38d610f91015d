"""Serving in vLLM: the speculative config, the checked command, the plugin that extends vLLM, and parity with our engine.

`config` and `plan` need no vLLM; `deployment` writes a plan down for other hosts. `plugin` runs inside vLLM and walks the
registry; `proposer`, `markov_model` and `markov_speculator` draft there. `rounds` and `parity` watch a running engine.
"""

from speculators.serving.config import speculative_config
from speculators.serving.plan import ServingPlan, plan

__all__ = ["ServingPlan", "plan", "speculative_config"]
