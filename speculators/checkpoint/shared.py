"""Tensors a speculator shares with its verifier: the input embedding and the output head.

The full form of a checkpoint repeats them for engines that want them in the file. The compact form leaves them
out where they equal the verifier's bit for bit, and records a hash of the embedding, so that a drafter is never
paired with a look-alike of its verifier.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from speculators.config import SpeculatorConfig
from speculators.errors import CheckpointError, PairingError
from speculators.speculator import Speculator, VerifierWeights

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
SHARED_NAMES = (EMBEDDING, HEAD)
# Keys that say of an embedding and of a head that they are the drafter's own, in the configurations that have them.
EMBEDDING_KEY, HEAD_KEY = "embed_requires_grad", "lm_head_requires_grad"
_CHUNK_VALUES = 1 << 24  # compare and hash in pieces: a table of 150,000 tokens is never copied whole

_digests: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def embedding_sha256(table: Tensor) -> str:
    """sha256 (hexadecimal) over the little-endian bfloat16 bytes of an embedding table [vocabulary, hidden].

    bfloat16 models give the same hash whether they are loaded in bfloat16 or float32. float16 cannot hold every
    bfloat16 value, so a table loaded in float16 may hash differently. The result is remembered for each tensor
    until the tensor changes.
    """
    version = 0 if table.is_inference() else table._version
    known = _digests.get(table)
    if known is not None and known[0] == version:
        return str(known[1])
    digest = hashlib.sha256()
    for rows in _row_chunks(table):
        digest.update(rows.to(torch.bfloat16).cpu().contiguous().view(torch.uint8).numpy().data)
    _digests[table] = (version, digest.hexdigest())
    return digest.hexdigest()


def first_difference(stored: Tensor, own: Tensor) -> int | None:
    """The first row in which two tables [rows, columns] differ, or None.

    They are the same when rounding the finer one to the other's dtype gives equal values: a verifier loaded in
    bfloat16 matches a float32 file of it and the other way round.
    """
    offset = 0
    for ours, theirs in zip(_row_chunks(stored), _row_chunks(own), strict=True):
        theirs = theirs.to(ours.device)
        equal = (theirs.to(ours.dtype) == ours) | (ours.to(theirs.dtype) == theirs)
        different = (~equal).any(dim=-1)
        if different.any():
            return offset + int(different.nonzero()[0, 0])
        offset += ours.shape[0]
    return None


def _row_chunks(table: Tensor) -> Iterator[Tensor]:
    yield from table.detach().split(max(1, _CHUNK_VALUES // max(1, table.shape[1])))


def draft_token_ids(t2d: Tensor) -> Tensor:
    """[draft vocabulary] int64: the verifier ids that t2d [vocabulary] keeps, ascending."""
    return t2d.nonzero().flatten()


def verifier_tensor(name: str, verifier: VerifierWeights, t2d: Tensor | None = None) -> Tensor:
    """What the verifier has under a shared name: its embedding, or its head with the rows of the draft vocabulary.

    Args:
        name: one of `SHARED_NAMES`.
        verifier: whose tensors.
        t2d: [vocabulary] bool, None for the full vocabulary.
    """
    if name == EMBEDDING:
        return verifier.embedding
    return verifier.head if t2d is None else verifier.head[draft_token_ids(t2d).to(verifier.head.device)]


def stored_names(speculator: Speculator) -> tuple[str, ...]:
    """Shared tensors that the full form must hold.

    A head with the rows of a reduced draft vocabulary always is among them: no engine can alias it.
    """
    names = set(type(speculator).stored_verifier_tensors)
    if speculator.has_reduced_vocabulary:
        names.add(HEAD)
    return tuple(name for name in SHARED_NAMES if name in names)


def full_form(speculator: Speculator, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The speculator's own tensors and those of the verifier that the full form repeats.

    Raises:
        CheckpointError: a verifier's tensor is wanted and no verifier is attached.
    """
    tensors = dict(own)
    for name in stored_names(speculator):
        if name not in tensors:
            tensors[name] = _borrowed(speculator, name, own)
    return tensors


def compact_form(speculator: Speculator, own: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """The tensors of the compact form, and the sha256 of the verifier's embedding.

    Raises:
        CheckpointError: no verifier is attached, or the speculator trained its own embedding.
    """
    if not speculator.is_attached:
        raise CheckpointError(
            f"form = 'compact' leaves out what the verifier has, and this {speculator.method} speculator has none to compare with:"
            " attach its verifier or save form='full'"
        )
    verifier, t2d = speculator.verifier, own.get("t2d")
    tensors = dict(own)
    if EMBEDDING in tensors:
        row = first_difference(tensors[EMBEDDING], verifier.embedding)
        if row is not None:
            raise CheckpointError(
                f"form = 'compact' leaves out the embedding, but this {speculator.method} speculator trained its own"
                f" ({EMBEDDING} differs from that of {verifier.name_or_path!r} in row {row}); save form='full'"
            )
        del tensors[EMBEDDING]
    if HEAD in tensors and t2d is None and first_difference(tensors[HEAD], verifier.head) is None:
        del tensors[HEAD]
    if speculator.has_reduced_vocabulary and HEAD not in tensors:
        tensors[HEAD] = verifier_tensor(HEAD, verifier, t2d)
    return tensors, embedding_sha256(verifier.embedding)


def _borrowed(speculator: Speculator, name: str, own: Mapping[str, Tensor]) -> Tensor:
    if speculator.is_attached:
        return verifier_tensor(name, speculator.verifier, own.get("t2d"))
    if name in speculator.unchecked_shared_tensors:
        return speculator.unchecked_shared_tensors[name]
    raise CheckpointError(
        f"form = 'full' stores the verifier's {name} with this {speculator.method} speculator, and no verifier is attached: attach it first"
    )


def check_embedding_hash(expected: str, made_for: str | None, verifier: VerifierWeights) -> None:
    """Refuse a verifier whose embedding is not the one that a compact checkpoint was saved with.

    Raises:
        PairingError: naming both verifiers.
    """
    found = embedding_sha256(verifier.embedding)
    if found == expected:
        return
    hint = " in bfloat16 or float32 (float16 rounds it)" if verifier.embedding.dtype == torch.float16 else ""
    raise PairingError(
        f"this compact checkpoint borrows the embedding of {made_for!r} (sha256 {expected[:12]}...), but that of"
        f" {verifier.name_or_path!r} is another (sha256 {found[:12]}...); load it with {made_for!r}{hint}"
    )


def check_shared_tensors(stored: Mapping[str, Tensor], made_for: str | None, verifier: VerifierWeights, t2d: Tensor | None) -> None:
    """Refuse a verifier whose embedding or head is not the one that a full checkpoint repeats.

    Args:
        stored: tensors by shared name, as a checkpoint holds them.
        made_for: the verifier named by the checkpoint.
        verifier: the one to pair with.
        t2d: [vocabulary] bool of the speculator, None for the full vocabulary.

    Raises:
        PairingError: naming the tensor, the row and both verifiers.
    """
    for name, tensor in stored.items():
        row = first_difference(tensor, verifier_tensor(name, verifier, t2d))
        if row is not None:
            raise PairingError(
                f"{name} of this checkpoint (made for {made_for!r}) differs from that of {verifier.name_or_path!r} in row {row}:"
                f" the drafter would read another table than it was trained on; load it with {made_for!r}"
            )


def with_own_head(
    config: SpeculatorConfig, tensors: Mapping[str, Tensor], verifier: VerifierWeights, *, same_embedding: bool
) -> SpeculatorConfig:
    """The configuration, saying that the stored head is the drafter's own where it is and nothing says so.

    Version 0.9 of the format has no key for it, yet files of drafters with a trained head exist. Where the embedding is the
    verifier's and the head is not, the pair is right and the head was trained.

    Args:
        config: of the checkpoint.
        tensors: what it stores, of any shape.
        verifier: what it is paired with.
        same_embedding: whether the embedding is known to be the verifier's, by its hash.

    Raises:
        PairingError: the head differs from the verifier's, and nothing tells a trained head from a wrong verifier.
    """
    knows = type(config).model_fields
    if HEAD not in tensors or HEAD_KEY not in knows or getattr(config, HEAD_KEY):
        return config
    t2d = tensors.get("t2d")
    if t2d is not None and t2d.shape != (verifier.vocab_size,):
        return config  # validation says more
    theirs = verifier_tensor(HEAD, verifier, t2d)
    row = first_difference(tensors[HEAD], theirs) if tensors[HEAD].shape == theirs.shape else None
    if row is None:
        return config
    borrowed = tensors.get(EMBEDDING) if not getattr(config, EMBEDDING_KEY, False) else None
    if borrowed is not None:
        same_embedding = borrowed.shape == verifier.embedding.shape and first_difference(borrowed, verifier.embedding) is None
        if not same_embedding:
            return config  # the comparison of the embeddings tells that this is the wrong verifier
    if not same_embedding:
        made_for = config.speculators_config.verifier.name_or_path
        raise PairingError(
            f"{HEAD} of this checkpoint (made for {made_for!r}) differs from that of {verifier.name_or_path!r} in row {row}: it belongs to"
            f" another verifier, or the drafter trained its own head; load it with {made_for!r}, or set {HEAD_KEY} to true in config.json"
        )
    return config.model_copy(update={HEAD_KEY: True})
