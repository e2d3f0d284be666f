"""Tracebacks that several ranks print alike: the first is shown, the other ranks are named. No I/O, no clock.

Lines that repeat another rank's traceback are held back while it is shown elsewhere, for at most `HOLD_SECONDS`. They
are dropped where their rank's stderr ends with them, and shown otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

HOLD_SECONDS, AHEAD_SECONDS = 5.0, 1.0
#: A traceback is compared with those that began at most so long before it.
_RECENT_SECONDS = 10.0
_MAX_LINES = 1000
_BEGIN = b"Traceback (most recent call last):"
#: The last line but one before another traceback of a chain.
_CHAIN = (
    [b"During handling of the above exception, another exception occurred:"],
    [b"The above exception was the direct cause of the following exception:"],
)


@dataclass(eq=False, slots=True)
class _Traceback:
    """A traceback, and everything that its rank printed after it.

    Attributes:
        rank: the rank.
        began: when, in seconds.
        original: the one that is shown, and that this one may repeat; None: this one is shown.
        has_ended: the rank's stderr is closed.
        repeats: ranks that ended with the same one, and are not named yet.
        is_repeat: this one is dropped.
        num_agreed: lines that are known to agree with the original's.
    """

    rank: int
    began: float
    original: _Traceback | None = None
    lines: list[bytes] = field(default_factory=list)
    has_ended: bool = False
    is_repeat: bool = False
    repeats: list[int] = field(default_factory=list)
    num_agreed: int = 1


class RepeatedErrors:
    """Filter of the stderr of a job's ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        #: The last traceback of each rank.
        self._latest: dict[int, _Traceback] = {}
        #: Tracebacks with repeats; their ranks may have printed others since.
        self._repeated: list[_Traceback] = []

    def feed(self, rank: int, lines: list[bytes], now: float) -> list[bytes]:
        """Take complete lines of a rank; return those to show now."""
        shown: list[bytes] = []
        for line in lines:
            current = self._latest.get(rank)
            if current is not None and (current.has_ended or len(current.lines) == _MAX_LINES):
                shown += _release(self._latest.pop(rank))
                current = None
            is_chained = current is not None and current.lines[-2:-1] in _CHAIN
            if (line == _BEGIN or (line.endswith(_BEGIN) and b"\r" in line)) and not is_chained:
                shown += [] if current is None else _release(current)
                current = self._latest[rank] = _Traceback(rank, now)
                current.original = self._find_original(current)
            if current is None:
                shown.append(line)
                continue
            current.lines.append(line)
            if current.original is None:
                shown.append(line)
            elif not _still_agrees(current, current.original):
                other = self._find_original(current)
                shown += [] if other else _release(current)
                current.original, current.num_agreed = other, 1
        return shown

    def end(self, rank: int) -> None:
        """End a rank's stderr."""
        if rank in self._latest:
            self._latest[rank].has_ended = True

    def settle(self, now: float) -> list[tuple[int, list[bytes]]]:
        """Decide about held lines; return ranks and their lines to show."""
        shown: list[tuple[int, list[bytes]]] = []
        for current in self._held:
            original = current.original
            assert original is not None, "it would be shown"
            is_whole = not current.lines[-1].startswith(b" ") and not current.lines[-1].endswith(_BEGIN)
            is_covered = len(original.lines) >= len(current.lines) and _still_agrees(current, original)
            after = len(current.lines) + 1
            is_covered = is_covered and original.lines[after : after + 1] not in _CHAIN
            if current.has_ended and is_whole and is_covered:
                current.is_repeat = True
                original.repeats.append(current.rank)
                if original not in self._repeated:
                    self._repeated.append(original)
            elif now >= _held_until(current) or (current.has_ended and original.has_ended):
                shown.append((current.rank, _release(current)))
        return shown

    def take_repeats(self, now: float) -> list[tuple[int, list[int]]]:
        """Return ranks whose traceback was shown, with those that ended with the same one and are to be named now."""
        due = [each for each in self._repeated if each.repeats and now >= each.began + HOLD_SECONDS]
        taken = [(each.rank, sorted(each.repeats)) for each in due]
        for each in due:
            each.repeats = []
        self._repeated = [each for each in self._repeated if each.repeats]
        return taken

    def wait_seconds(self, now: float) -> float | None:
        """Return the seconds until the next `settle` and `take_repeats` if nothing is printed; None: no limit."""
        notes = [each.began + HOLD_SECONDS for each in self._repeated if each.repeats]
        ends = [*map(_held_until, self._held), *notes]
        return max(0.0, min(ends) - now) if ends else None

    def find_shared(self, rank: int) -> int | None:
        """Return the rank that has shown the traceback with which ``rank`` ended, if all or several ranks ended so."""
        current = self._latest.get(rank)
        if current is None:
            return None
        original = current.original or current
        is_shared = self._num_ranks == 1 or any(each.original is original for each in self._latest.values())
        return original.rank if is_shared else None

    def take_sharing(self, rank: int) -> list[int]:
        """Return the other ranks that ended with the traceback with which ``rank`` ended; they count as named."""
        if (current := self._latest.get(rank)) is None:
            return []
        original = current.original or current
        same = [each for each in self._latest.values() if original in (each, each.original)]
        for each in (original, *same):
            each.repeats = []
        return sorted(each.rank for each in same if each.rank != rank)

    @property
    def _held(self) -> list[_Traceback]:
        return [each for each in self._latest.values() if each.original is not None and not each.is_repeat]

    def _find_original(self, current: _Traceback) -> _Traceback | None:
        """Find the traceback of another rank that this one may repeat."""
        others = [each for each in self._latest.values() if each is not current and each.original is None]
        recent = [each for each in others if each.began >= current.began - _RECENT_SECONDS]
        return next((each for each in recent if _agree(current, each)), None)


def _agree(one: _Traceback, other: _Traceback, begin: int = 1) -> bool:
    """Return whether one may be the beginning of the other, from a line on. A progress bar may be in the first line."""
    end = min(len(one.lines), len(other.lines))
    return one.lines[begin:end] == other.lines[begin:end]


def _still_agrees(current: _Traceback, original: _Traceback) -> bool:
    """Return whether it may still repeat its original; compares only lines that are new."""
    is_same = _agree(current, original, current.num_agreed)
    if is_same:
        current.num_agreed = max(current.num_agreed, min(len(current.lines), len(original.lines)))
    return is_same


def _held_until(current: _Traceback) -> float:
    """Return until when its lines may be held: shorter where the other rank has not printed as many."""
    is_ahead = current.original is not None and len(current.lines) > len(current.original.lines)
    return current.began + (AHEAD_SECONDS if is_ahead else HOLD_SECONDS)


def _release(current: _Traceback) -> list[bytes]:
    """Return the held lines of a traceback; it is its rank's own from now on."""
    if current.original is None or current.is_repeat:
        return []
    current.original = None
    return list(current.lines)
