"""Error with which a rank gives up, as a message to the others over any connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import msgspec

from reigen.errors import CollectiveError, DeadlineError, PeerLostError, format_ranks

#: What a rank may give up with, by the names that messages carry.
ERRORS_BY_NAME: dict[str, type[CollectiveError]] = {
    kind.__name__: kind for kind in (CollectiveError, DeadlineError, PeerLostError)
}
_REPORTED_BY = " (told by "
#: Together less than 3950 bytes, whatever the numbers: as much as a page has room for beside other things.
_MAX_REASON_BYTES, _MAX_TENSOR_BYTES, _MAX_RANKS = 3240, 160, 100


class AbortMessage(msgspec.Struct, tag=9, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Error with which a rank gave up; ``tensor`` is the one that the reason speaks of; empty: it speaks of none."""

    kind: str
    ranks: tuple[int, ...]
    reason: str
    tensor: str = ""


def make_abort_message(error: CollectiveError, rank: int) -> AbortMessage:
    """Make the message about an error that rank ``rank`` gives up with."""
    kind = type(error).__name__ if type(error).__name__ in ERRORS_BY_NAME else CollectiveError.__name__
    tensor = "" if isinstance(error, PeerLostError) else error.tensor or ""  # a death is about any tensor
    ranks = (error.ranks or (rank,))[:_MAX_RANKS]
    return AbortMessage(kind, ranks, _cut(error.reason, _MAX_REASON_BYTES), _cut(tensor, _MAX_TENSOR_BYTES))


def _cut(text: str, num_bytes: int) -> str:
    return text.encode(errors="replace")[:num_bytes].decode(errors="ignore")


def error_from_abort(abort: AbortMessage, reporter: str) -> CollectiveError:
    """Make the error of a rank that gave up; ``reporter`` reported it; empty: this rank itself.

    A rank that forwards another's report is not named: the first reporter is.
    """
    kind = ERRORS_BY_NAME.get(abort.kind, CollectiveError)
    reason = abort.reason or f"rank(s) {format_ranks(abort.ranks)} gave up"
    if reporter and _REPORTED_BY not in reason:
        reason += f"{_REPORTED_BY}{reporter})"
    return kind(reason, tensor=abort.tensor or None, ranks=abort.ranks)


def left_error(ranks_text: str, ranks: Sequence[int]) -> PeerLostError:
    """Make the error of waiting for ranks that have left in good order."""
    error = PeerLostError(
        f"rank(s) {ranks_text} left the job (shutdown, or the end of the script) while others wait for them",
        ranks=ranks,
    )
    error.has_left = True
    return error


def has_left(error: CollectiveError | None) -> TypeGuard[PeerLostError]:
    """Return whether an error says no more than that: earlier messages of these ranks may still come."""
    return isinstance(error, PeerLostError) and error.has_left
