"""Checkpoints: folders in the speculators format, whole or absent, checked before they are written and when they are read.

`native` saves and loads, `shared` knows the tensors that belong to the verifier, `validation` the rules between
configuration, tensors and verifier, `card` the model card, `storage` files.
"""

from speculators.checkpoint.card import Acceptance, ModelCard
from speculators.checkpoint.native import load, read_config, save
from speculators.checkpoint.shared import embedding_sha256
from speculators.checkpoint.storage import weight_files, weights_sha256

__all__ = ["Acceptance", "ModelCard", "embedding_sha256", "load", "read_config", "save", "weight_files", "weights_sha256"]
