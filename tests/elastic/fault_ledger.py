"""Ledger of an elastic job, as processes of `fault_program` have written it: is each sample in exactly one step?"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

#: Samples of a step, whatever the number of ranks.
GLOBAL_BATCH = 24
#: Steps behind the latest one that are not looked at yet: they may be made anew.
_UNSETTLED = 3


class LedgerError(AssertionError):
    """Samples are lost or taken twice, or ranks differ."""


class Step(NamedTuple):
    """A step that a process has made."""

    view: str
    number: int
    size: int
    rank: int
    before: str
    chain: str
    at: float

    @property
    def key(self) -> tuple[str, int, int, str]:
        """Key under which the samples are that were taken for it."""
        return self.view, self.number, self.size, self.before


@dataclass
class ProcessLines:
    """What a process has written."""

    name: str
    path: Path
    offset: int = 0
    last: Step | None = None
    is_done: bool = False

    @property
    def slot(self) -> int:
        """Place of the process."""
        return int(self.name.partition(".")[0])

    @property
    def id(self) -> str:
        """``slot.incarnation``."""
        return self.name.rpartition(".")[0]


@dataclass
class Ledger:
    """The ledger of a directory; `read` takes in what is new.

    Attributes:
        processes: by name of their files.
        num_steps: that were verified, each in the one history of the job.
        num_anew: times that ranks have begun a step which is not in the history, so that it was made anew.
    """

    directory: Path
    processes: dict[str, ProcessLines] = field(default_factory=dict)
    num_steps: int = 0
    num_anew: int = 0
    #: (view, step, size, chain before): by rank, where its samples begin
    _takes: dict[tuple[str, int, int, str], dict[int, int]] = field(default_factory=dict)
    #: by chain, the step that led to it; and the sum that a rank has found
    _made: dict[str, Step] = field(default_factory=dict)
    _sums: dict[str, int] = field(default_factory=dict)
    _verified: str = "begin"

    def read(self, alive: Collection[str] | None = None) -> None:
        """Take in what was written since, by processes of these ids or by all."""
        for path in self.directory.iterdir():
            if path.name.count(".") == 2 and (alive is None or path.name.rpartition(".")[0] in alive):
                self._read(self.processes.setdefault(path.name, ProcessLines(path.name, path)))

    def _read(self, process: ProcessLines) -> None:
        with process.path.open("rb") as file:
            file.seek(process.offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        process.offset += len(whole)
        for line in whole.decode().splitlines():
            kind, *words = line.split()
            if kind == "DONE":
                process.is_done = True
            elif kind == "TAKES":
                view, number, size, rank, before, position = words
                shares = self._takes.setdefault((view, int(number), int(size), before), {})
                if shares.setdefault(int(rank), int(position)) != int(position):
                    raise LedgerError(f"two processes are rank {rank} in view {view}, step {number}")
            else:
                self._add(process, words)

    def _add(self, process: ProcessLines, words: list[str]) -> None:
        view, number, size, rank, before, chain, total, at = words
        step = process.last = Step(view, int(number), int(size), int(rank), before, chain, float(at))
        known = self._made.setdefault(chain, step)
        if (known.view, known.number, known.before) != (step.view, step.number, step.before):
            raise LedgerError(f"ranks differ: {known}, {step}")
        if self._sums.setdefault(chain, int(total)) != int(total):
            raise LedgerError(f"sums differ in {step}: {total}, {self._sums[chain]}")

    def latest(self) -> Step | None:
        """Return the latest step."""
        return max((p.last for p in self.processes.values() if p.last is not None), key=lambda s: s.at, default=None)

    def verify(self, *, is_over: bool = False) -> None:
        """Follow the history back from the latest step to where it was verified last, and forget what is settled.

        Raises:
            LedgerError: samples are missing or taken twice in it.
        """
        self.read()
        tip = self.latest()
        for _ in range(0 if is_over else _UNSETTLED):
            tip = None if tip is None else self._made.get(tip.before)
        if tip is None or tip.chain == self._verified:
            return
        self.read()  # who was read first may have written meanwhile what belongs to this step
        history, chain = [], tip.chain
        while chain != self._verified:
            step = self._made.get(chain)
            if step is None:
                raise LedgerError(f"the history of step {tip} leads to {chain}, which nobody has made since")
            history.append(step)
            chain = step.before
        for step in reversed(history):
            self._verify(step)
        self._forget({step.key for step in history}, tip)

    def _verify(self, step: Step) -> None:
        if step.number != self.num_steps:
            raise LedgerError(f"step {self.num_steps} is missing before {step}")
        shares = self._takes.get(step.key, {})
        first = step.number * GLOBAL_BATCH
        if sorted(shares) != list(range(step.size)) or set(shares.values()) != {first}:
            raise LedgerError(f"samples of {step} are taken by {shares}, and begin at {first}")
        samples = range(first, first + GLOBAL_BATCH)
        if self._sums[step.chain] != sum(samples):
            raise LedgerError(f"the sum of {step} is {self._sums[step.chain]}, and should be {sum(samples)}")
        self.num_steps += 1

    def _forget(self, history: set[tuple[str, int, int, str]], tip: Step) -> None:
        """Forget all steps up to the one that was verified last; others of them were made anew."""
        self.num_anew += len({key for key in self._takes if key[1] <= tip.number} - history)
        settled = {chain for chain, step in self._made.items() if step.number <= tip.number}
        for chain in settled - {tip.chain}:
            del self._made[chain], self._sums[chain]
        self._takes = {key: shares for key, shares in self._takes.items() if key[1] > tip.number}
        self._verified = tip.chain
