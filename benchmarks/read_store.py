"""How fast a hidden-state store is read, against plain reads of the same files in the same state of the page cache.

    speculators data store prepared --output store --taps 2,15,27
    python benchmarks/read_store.py store prepared

Plain reads go through each file from its start in blocks of 8 MiB and bring
all of it into memory. The store is read as training reads it: a batch of rows at a
time, in the order of an epoch, into the tensors that a training step gets. Both are repeated in turn, so that what else
the machine does meets both, and the medians compared; the ratio of the fastest stands beside it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import torch
from harness import Report

from speculators.data.hidden_states import StoreReader, read_store_header, rows_digest
from speculators.data.rows import pack, split_held_out
from speculators.data.storage import load_conversations
from speculators.training.order import EpochOrder
from speculators.training.source import StoreBatches

_memory = bytearray()


def read_plainly(files: list[Path]) -> int:
    """Bytes of all files, each read into memory as a whole; the memory is used again, so that none is spent on making it."""
    global _memory
    total, largest = 0, max(file.stat().st_size for file in files)
    if len(_memory) < largest:
        _memory = bytearray(largest)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            filled = 0
            while count := stream.readinto(memoryview(_memory)[filled : filled + (8 << 20)]):
                filled += count
        total += filled
    return total


def forget(files: list[Path]) -> None:
    """Ask the system to drop the files from its page cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("data", type=Path, help="the folder of conversations that the store was made of")
    parser.add_argument("--rows", type=int, default=8, help="of a batch")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "read_store")
    options = parser.parse_args()
    header = read_store_header(options.store)
    files = [options.store / shard["file"] for shard in header["shards"]]
    train, _ = split_held_out(load_conversations(options.data)[0], header["held_out"])
    rows = pack(train, header["row_length"], header["seed"])
    reader = StoreReader(options.store, rows_digest(rows))
    batches = StoreBatches(reader)
    order = EpochOrder(len(reader), seed=0)
    size = sum(reader.tokens(row) for row in range(len(reader))) * reader.layout.token_bytes

    def read_store() -> int:
        for start in range(0, len(reader) - options.rows + 1, options.rows):
            batches.states(order.rows(start, options.rows).tolist())
        return size * (len(reader) // options.rows * options.rows) // len(reader)

    report = Report("Reading a hidden-state store", torch.device("cpu"))
    for state in ("cached", "not cached"):
        rates: dict[str, list[float]] = {"plain": [], "store": []}
        for repetition in range(options.repetitions + 1):
            for name, read in (("plain", lambda: read_plainly(files)), ("store", read_store)):
                if state == "not cached":
                    forget(files)
                started = time.perf_counter()
                count = read()
                if repetition:  # the first fills the page cache
                    rates[name].append(count / (time.perf_counter() - started))
        plain, stored = (statistics.median(rates[name]) for name in ("plain", "store"))
        facts = {"plain_gb_per_second": plain / 1e9, "store_gb_per_second": stored / 1e9, "ratio": stored / plain}
        facts["ratio_of_fastest"] = max(rates["store"]) / max(rates["plain"])
        report.add(f"{header['dtype']}, {state}", None, **facts)
    report.write(options.output)


if __name__ == "__main__":
    main()
