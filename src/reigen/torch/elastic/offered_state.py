"""State that members offer to newcomers of their host: weights and optimizer state, where they lie in memory.

What is offered, and how it is read, is stated in `reigen.elastic.state_transfer`; here are the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from reigen.elastic.state_transfer import (
    OfferAddress,
    OfferedState,
    OverlappedTransfer,
    StateOffer,
    begin_offered_transfer,
    find_offered_state,
)
from reigen.torch.adapter import tensor_bytes
from reigen.torch.shared_parameters.optimizer import SharedParametersOptimizer
from reigen.torch.state import is_dense, pack_optimizer_state, unpack_optimizer_state


def memory_of(tensors: Sequence[torch.Tensor]) -> tuple[list[NDArray[np.uint8]], str]:
    """Return arrays and layout for `read_from_source`; the layout is empty if some memory cannot be read as it is."""
    if not all(tensor.device.type == "cpu" and is_dense(tensor) for tensor in tensors):
        return [], ""
    layout = [f"{each.dtype} {tuple(each.shape)} {each.stride()}" for each in tensors]
    return [tensor_bytes(tensor) for tensor in tensors], "\n".join(layout)


def offer_state(optimizer: torch.optim.Optimizer, weights: Sequence[torch.Tensor]) -> StateOffer | None:
    """Return the offer of this rank's state; None: it cannot be read where it lies, or moves before it is read.

    Args:
        optimizer: whose state it is.
        weights: what else belongs to it, in the same order on all ranks.
    """
    if isinstance(optimizer, torch.optim.LBFGS | SharedParametersOptimizer):
        return None
    details, states = pack_optimizer_state(optimizer)
    arrays, layout = memory_of([*weights, *states])
    return StateOffer(arrays, layout, details) if layout else None


class ReadableState:
    """State that a member offers, and this rank's tensors for it.

    Args:
        offered: the state.
        arrays: of this rank's weights, and of new tensors for the optimizer's state.
        install: makes those the optimizer's state.
    """

    def __init__(self, offered: OfferedState, arrays: list[NDArray[np.uint8]], install: Callable[[], None]) -> None:
        self.offered, self.arrays, self.install = offered, arrays, install

    @classmethod
    def find(
        cls,
        optimizer: torch.optim.Optimizer,
        weights: Sequence[torch.Tensor],
        offers: Sequence[OfferAddress | None],
        source: int,
        receivers: frozenset[int],
    ) -> Self | None:
        """Return the state that this rank may read; None: there is none, or it lies in memory of another layout.

        Args:
            optimizer: of this rank.
            weights: see `offer_state`.
            offers: of all ranks.
            source: rank whose state it is.
            receivers: ranks that get it.
        """
        offered = find_offered_state(offers, source, receivers)
        if offered is None:
            return None
        states, install = unpack_optimizer_state(optimizer, offered.details)
        arrays, layout = memory_of([*weights, *states])
        return cls(offered, arrays, install) if layout == offered.layout else None

    def read(self) -> bool:
        """Read it; return whether that was possible."""
        if not self.offered.read(self.arrays):
            return False
        self.install()
        return True


def begin_reading(
    state: ReadableState | None,
    source: int,
    receivers: frozenset[int],
    contents: Callable[[], Iterable[NDArray[np.uint8]]],
    version: Callable[[], object],
    message: Any,
) -> OverlappedTransfer | None:
    """Collective: begin to read while the members go on; see `reigen.elastic.state_transfer.begin_offered_transfer`.

    Args:
        state: what a receiver reads; None: nothing.
        source: see there.
        receivers: see there.
        contents: see there.
        version: see there.
        message: see there.
    """
    offered, arrays = (None, []) if state is None else (state.offered, state.arrays)
    overlapped = begin_offered_transfer(offered, arrays, source, receivers, contents, version, message)
    if overlapped is not None and state is not None:
        state.install()
    return overlapped
