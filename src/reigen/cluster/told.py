"""How a rank tells the others, over whatever connects them, of the error with which it gives up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import msgspec

from reigen.errors import CollectiveError, DeadlineError, PeerLostError

_ERRORS: dict[str, type[CollectiveError]] = {
    kind.__name__: kind for kind in (CollectiveError, DeadlineError, PeerLostError)
}
_TOLD = " (told by "
#: Together less than 3950 bytes, whatever the numbers: as much as a page has room for beside other things.
_MAX_REASON_BYTES, _MAX_RANKS = 3400, 100


class Abort(msgspec.Struct, tag=9, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Why a rank cannot go on: the error that it raised."""

    kind: str
    ranks: tuple[int, ...]
    reason: str


def told(error: CollectiveError, rank: int) -> Abort:
    """The message about an error that rank ``rank`` gives up with."""
    kind = type(error).__name__ if type(error).__name__ in _ERRORS else CollectiveError.__name__
    reason = error.reason.encode(errors="replace")[:_MAX_REASON_BYTES].decode(errors="ignore")
    return Abort(kind, (error.ranks or (rank,))[:_MAX_RANKS], reason)


def raised(abort: Abort, teller: str) -> CollectiveError:
    """The error of a rank that gave up, as told by ``teller``; empty for this rank itself.

    Who tells what was told to it is not named: the first one knows.
    """
    kind = _ERRORS.get(abort.kind, CollectiveError)
    reason = abort.reason or f"rank(s) {listed(abort.ranks)} gave up"
    if teller and _TOLD not in reason:
        reason += f"{_TOLD}{teller})"
    return kind(reason, ranks=abort.ranks)


def left_error(ranks_text: str, ranks: Sequence[int]) -> PeerLostError:
    """What it means for whoever waits for ranks that they have left in good order."""
    error = PeerLostError(
        f"rank(s) {ranks_text} left the job (shutdown, or the end of the script) while others wait for them",
        ranks=ranks,
    )
    error.has_left = True
    return error


def has_left(error: CollectiveError | None) -> TypeGuard[PeerLostError]:
    """Whether an error says no more than that: what these ranks sent before may still come."""
    return isinstance(error, PeerLostError) and error.has_left


def listed(ranks: Sequence[int]) -> str:
    """``1, 4, 5``."""
    return ", ".join(map(str, ranks))
