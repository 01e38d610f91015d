"""Checkpoints: folders in the speculators format, whole or absent, checked before they are written and when they are read.

`native` saves and loads, `shared` knows the tensors that belong to the verifier, `validation` the rules between
configuration, tensors and verifier, `inspection` what can be told of a checkpoint without using it, `verifier_files` what
is borrowed of a verifier without building it, `card` the model card, `hub` uploads, `storage` files.
"""

from speculators.checkpoint.card import Acceptance, ModelCard
from speculators.checkpoint.hub import push_to_hub
from speculators.checkpoint.inspection import Inspection, inspect
from speculators.checkpoint.native import load, read_config, save
from speculators.checkpoint.shared import embedding_sha256
from speculators.checkpoint.storage import weight_files, weights_sha256

__all__ = [
    "Acceptance",
    "Inspection",
    "ModelCard",
    "embedding_sha256",
    "inspect",
    "load",
    "push_to_hub",
    "read_config",
    "save",
    "weight_files",
    "weights_sha256",
]
