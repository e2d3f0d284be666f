"""How fast one core encodes and decodes gradients, for each codec, compared with a copy of as many float32.

    python -m benchmarks.compression                   two sizes, all codecs; about a minute
    python -m benchmarks.compression --mib 4 --codecs 2bit,1bit
    python -m benchmarks.compression --mib 64 --json docs/data/records/compression-speed.json

Everything is measured within one run, in processor time of the one thread that works: in each round every codec has one
turn, in an order that rotates, and a figure is the median over rounds. An array is cut into cells of 4 MiB, as servers
hold them. Encoding includes error feedback where the codec has it; decoding is what a receiver does with the first
rank's codes (write) and with the others' (add).
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.machine import Machine, this_machine
from benchmarks.harness.record import Column, Quantity, Record, make_record
from reigen.compression import from_params
from reigen.types import DTYPES

CELL = 1 << 20  # elements
CODECS: dict[str, dict[str, Any]] = {
    "2bit": {"type": "2bit"},
    "1bit": {"type": "1bit", "threshold": 0.0},
    "fp16": {"type": "fp16"},
    "bf16": {"type": "bf16"},
    "int8": {"type": "int8"},
    "int8 with feedback": {"type": "int8", "ef": True},
    "topk 1 %": {"type": "topk", "ratio": 0.01},
    "topk 1 % as fp16": {"type": "topk", "ratio": 0.01, "values": "fp16"},
}
Action = Callable[[], None]


class Arrays:
    """A gradient, its codes, and where they are decoded to, for one codec."""

    def __init__(self, params: dict[str, Any], length: int) -> None:
        self.codec = from_params(params)
        self.gradient = np.random.default_rng(0).normal(0, 0.3, length).astype(np.float32)
        self.out = np.zeros(length, np.float32)
        self.cells = [slice(begin, min(begin + CELL, length)) for begin in range(0, length, CELL)]
        self.states = [self.codec.begin(len(self.gradient[cell]), DTYPES["float32"]) for cell in self.cells]
        self.codes = [bytearray(self.codec.max_bytes(len(self.gradient[cell]))) for cell in self.cells]

    def encode(self) -> None:
        for cell, state, codes in zip(self.cells, self.states, self.codes, strict=True):
            self.codec.encode(self.gradient[cell], state, codes)

    def decode(self, accumulate: bool = False) -> None:
        for cell, codes in zip(self.cells, self.codes, strict=True):
            self.codec.decode(codes, self.out[cell], accumulate)

    @property
    def ratio(self) -> float:
        return self.gradient.nbytes / sum(map(len, self.codes))


def measure(actions: Sequence[Action], rounds: int) -> list[float]:
    """Median seconds of each, in turns."""
    times: list[list[float]] = [[] for _ in actions]
    for action in actions:
        action()  # pages, tables
    for number in range(rounds):
        for place in range(len(actions)):
            which = (place + number) % len(actions)
            begin = time.thread_time()
            actions[which]()
            times[which].append(time.thread_time() - begin)
    return [statistics.median(each) for each in times]


#: What is found of each codec: of float32 for each byte of codes, GB/s three times, and encoding in copies.
Figures = tuple[float, float, float, float, float]


def report(mib: int, names: Sequence[str], rounds: int) -> tuple[float, dict[str, Figures]]:
    """Measure, and print a table; returns GB/s of a copy, and what was found of each codec."""
    length = mib << 18
    source, target = np.ones(length, np.float32), np.zeros(length, np.float32)
    arrays = [Arrays(CODECS[name], length) for name in names]
    actions: list[Action] = [lambda: np.copyto(target, source)]
    for each in arrays:
        actions += [each.encode, each.decode, lambda each=each: each.decode(accumulate=True)]  # type: ignore[misc]
    copying, *times = measure(actions, rounds)
    gigabytes = 4e-9 * length
    found: dict[str, Figures] = {}
    print(f"\n{mib} MiB of float32; a copy: {gigabytes / copying:.1f} GB/s\n")
    print(f"| {'codec':18} | bytes | encode GB/s | decode GB/s | decode and add GB/s | encode: copies |")
    print(f"|{'-' * 20}|-------|-------------|-------------|---------------------|----------------|")
    for number, (name, each) in enumerate(zip(names, arrays, strict=True)):
        encode, decode, add = (gigabytes / seconds for seconds in times[3 * number : 3 * number + 3])
        copies = times[3 * number] / copying
        print(f"| {name:18} | 1/{each.ratio:<3.3g} | {encode:11.2f} | {decode:11.2f} | {add:19.2f} | {copies:14.1f} |")
        found[name] = (each.ratio, encode, decode, add, copies)
    return gigabytes / copying, found


def make_table(
    mib: int, rounds: int, copy: float, found: Mapping[str, Figures], command: str, machine: Machine
) -> Record:
    """Return what was found, as a table.

    Args:
        mib: size of the gradient.
        rounds: turns of each codec.
        copy: GB/s of a copy.
        found: what `report` has returned.
        command: what was run.
        machine: as it was before.
    """
    columns = [
        Column(name) for name in ("bytes", "encode GB/s", "decode GB/s", "decode and add GB/s", "encode: copies")
    ]
    lines: dict[str, dict[str, Quantity | str]] = {}
    for name, (ratio, *speeds, copies) in found.items():
        cells = [f"1/{ratio:.3g}", *(Quantity(each) for each in speeds), Quantity(copies, 1)]
        lines[name] = {column.name: cell for column, cell in zip(columns, cells, strict=True)}
    conditions = f"{mib} MiB of float32; a copy: {copy:.1f} GB/s; medians of {rounds} rounds"
    return make_record(command, conditions, "codec", columns, lines, machine, {"numpy": np.__version__})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, nargs="+", default=[4, 64], help="sizes of the gradient")
    parser.add_argument("--codecs", default=",".join(CODECS), help="which, separated by commas")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, of one size")
    options = parser.parse_args()
    if options.json is not None and len(options.mib) != 1:
        parser.error("--json needs one size: --mib N")
    before = this_machine()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    print(f"{this_machine()}; numpy {np.__version__}")
    for mib in options.mib:
        copy, found = report(mib, options.codecs.split(","), options.rounds)
        if options.json is not None:
            arguments = ["--mib", str(mib), "--codecs", options.codecs, "--rounds", str(options.rounds)]
            command = shlex.join(["python", "-m", "benchmarks.compression", *arguments])
            make_table(mib, options.rounds, copy, found, command, before).save(options.json)


if __name__ == "__main__":
    main()
