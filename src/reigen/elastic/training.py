"""Model, optimizer and what belongs to them, as a job with undone steps needs them; a framework implements it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np

from reigen.elastic.cursor import Part
from reigen.elastic.state_transfer import OfferAddress, OverlappedTransfer, StateOffer
from reigen.errors import ArgumentError, CollectiveError


class LocalState(Protocol):
    """State that forward passes change besides random generators, each member's own; warm spares do not follow it."""

    def find_problem(self) -> str:
        """Return why a rank that takes no samples for many steps would not be fit to go on; empty: it would."""

    @property
    def is_empty(self) -> bool:
        """Return whether there is none; the same on all members."""

    def copy(self) -> Any:
        """Return a copy, for `load`."""

    def load(self, local: Any) -> None:
        """Take what `copy` has returned on another member; a step that is undone goes back to that."""


class TrainingState(Protocol):
    """State of a training. All methods are called by the thread that trains.

    *Small state* is what a step changes besides weights and the optimizer's state: random number generators, buffers
    such as BatchNorm's, learning rate schedulers, the loss scale.

    Attributes:
        local: see there.
    """

    local: LocalState

    def attach(self, update: AbstractContextManager[None], complete: Callable[[CollectiveError], bool]) -> None:
        """Connect the optimizer with the job.

        Args:
            update: entered for each update of the weights, when its sums are there.
            complete: called where the sums of all gradients have failed; True: they are complete where they lie.
        """

    def detach(self) -> None:
        """Take off what `attach` and `begin_step` have put on model and optimizer."""

    def registered_bytes(self) -> int:
        """Return how much registered memory the gradients will need, at most, on a host with other ranks; 0: none."""

    def warm_up(self) -> None:
        """Load and start libraries for the first gradient, before members wait for it; changes no state."""

    def change_view(self, change: Callable[[], None]) -> None:
        """Call ``change``, which leaves the view and enters another, when nothing of the framework's is under way."""

    def collective_error(self, error: BaseException) -> BaseException:
        """Return the CollectiveError that the framework has made another error of; or the error itself."""

    def begin_step(self) -> None:
        """Clear the gradients, and keep a copy of the small state."""

    def finish_gradients(self) -> None:
        """Collective: wait for gradients that are on their way, and will not be used."""

    def failed_update(self) -> bool | None:
        """Return if an update that raised was made all the same; None: in part, so that the state is lost.

        Parts of weights that members of a host share are updated by their owners, one of which may have died.
        """

    def begin_part(self, part: Part, step: int, size: int) -> None:
        """Weight gradients by the part's share from now on, so that the average over ranks is that over samples.

        Args:
            part: of this rank.
            step: its number.
            size: number of ranks.
        """

    def end_parts(self) -> None:
        """Take note that the gradients of all parts of this rank are there; collective for some."""

    def undo_step(self) -> None:
        """Go back to the copy of the small state, and drop all gradients; the weights have not been changed."""

    def drop_gradients(self) -> None:
        """Drop all gradients, also those on their way."""

    def describe(self) -> Mapping[str, list[str]]:
        """Return what must be the same on all members, by name, in lines."""

    def describe_view(self) -> Any:
        """Return facts about this member that the others need to enter a view; called once there."""

    def enter_view(self, described: Sequence[Any], *, keeps_gradients: bool) -> None:
        """Begin in a view as if made there; who keeps its gradients calls `renew` later.

        Args:
            described: what `describe_view` has returned on all members.
            keeps_gradients: see above.
        """

    def renew(self) -> None:
        """Begin in the view of `enter_view`, which has kept gradients."""

    def gradients(self) -> Any:
        """Return the gradients, which are complete, for `set_gradients`."""

    def set_gradients(self, gradients: Any) -> None:
        """Go on with these gradients: members have changed."""

    def backup(self) -> Any:
        """Return what `recover` needs to undo an unfinished `transfer` to this member."""

    def recover(self, backup: Any) -> None:
        """Undo an unfinished transfer."""

    def offer(self) -> StateOffer | None:
        """Return where others of this host can read this member's state, as it is now; None: nowhere, or not yet."""

    def transfer(
        self,
        source: int,
        receivers: frozenset[int],
        *,
        may_overlap: bool = False,
        offers: Sequence[OfferAddress | None] = (),
        message: Any = None,
    ) -> OverlappedTransfer | None:
        """Collective: weights and optimizer state of receivers become the source's; all others have them.

        Args:
            source: whose state it is.
            receivers: who get it.
            may_overlap: the members may go on before receivers have it, if that is worth it.
            offers: of all ranks, which receivers may read; a digest may say that one could not (`UNREAD`).
            message: of the source, to all ranks; it comes with what is returned, or not at all.

        Returns:
            What receivers still have to read; None: they have everything.
        """

    def digest(self) -> bytes:
        """Return a hash of weights and optimizer state; behind `transfer`, `UNREAD` where nothing could be read."""

    def small_state(self) -> Any:
        """Return a copy of what of the small state must be equal on all members, for `load_small_state`."""

    def load_small_state(self, small: Any) -> None:
        """Take what `small_state` has returned on another member."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything, for a checkpoint."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take everything from a checkpoint."""


def generator_states() -> dict[str, Any]:
    """Return the states of the random generators of Python and NumPy, for `set_generator_states`."""
    return {"python": random.getstate(), "numpy": np.random.get_state()}


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Set the random generators of Python and NumPy."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])


@contextmanager
def reading_checkpoint(path: str | os.PathLike[str]) -> Iterator[None]:
    """Context in which a checkpoint is read: whatever libraries raise about its bytes becomes one error.

    Raises:
        ArgumentError: it cannot be read; says what to do. Those of the block stay as they are.
        OSError: of the block.
    """
    try:
        yield
    except (OSError, ArgumentError):
        raise
    except Exception as error:  # a file may hold anything
        text = str(error).partition("\n")[0] or type(error).__name__
        raise ArgumentError(
            f"{os.fspath(path)} cannot be read as the checkpoint of a job: it is truncated, damaged or another file "
            f"({text}). Name an older one, or remove it to start over"
        ) from error
