"""An update in chunks: wherever its owner stops, another one finishes it, with the bits of the whole update."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch

from reigen import context
from reigen.api.gradients.sharding import ParameterRange
from reigen.torch.reducer.reducer import GradientShard
from reigen.torch.shared_parameters import update_chunks
from reigen.torch.shared_parameters.layout import SharedLayout, piece_elements
from reigen.torch.shared_parameters.runs import OwnedPiece, RunEntry, join_numbered, join_pieces
from reigen.torch.shared_parameters.state_layout import clone_optimizer, infer_state_layout, inner_step
from reigen.torch.shared_parameters.update_chunks import UpdateChunks, undo_slot_bytes
from tests.torch import test_shared_runs
from tests.torch.test_shared_parameters import OPTIMIZERS

#: Cut; joined, as long as they are whole vectors; with a remainder; a single number.
SHAPES = ((40, 40), (64,), (32, 3), (7,), ())
CHUNK_BYTES = 2048


class StoppedError(Exception):
    """The owner is dead."""


class Owner:
    """One owner of everything, in memory that survives it."""

    def __init__(self, name: str) -> None:
        generator = torch.Generator().manual_seed(1)
        initial = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        self.plain = getattr(torch.optim, name)(initial, **OPTIMIZERS[name])
        layouts = [infer_state_layout(self.plain, self.plain.param_groups[0], torch.float32) for _ in initial]
        self.pieces = [ParameterRange(number, 0, one.numel()) for number, one in enumerate(initial)]
        slot_bytes = undo_slot_bytes(initial, layouts, [self.pieces], cuts=True)
        self.layout = SharedLayout(initial, layouts, [self.pieces], slot_bytes)
        self.memory = np.zeros(self.layout.nbytes, np.uint8)
        self.gradients = np.zeros(self.layout.nbytes, np.uint8)
        self.initial, self.word = initial, self.layout.progress(self.memory)[0, 2:]
        for number, one in enumerate(initial):
            self.layout.weight(self.memory, number).copy_(one.detach())

    def set_gradients(self, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        gradients = [torch.randn(shape, generator=generator) for shape in SHAPES]
        for number, gradient in enumerate(gradients):
            self.layout.weight(self.gradients, number).copy_(gradient)
        return gradients

    def update(self, update: int) -> None:
        """What is left of an update, by a process that knows nothing of it."""
        has_state, entries = update > 1, []
        for number, piece in enumerate(self.pieces):
            gradient = self.layout.weight(self.gradients, number)
            weight = torch.nn.Parameter(piece_elements(self.layout.weight(self.memory, number), piece))
            weight.grad = gradient
            state = self.layout.state_of_piece(self.memory, number)
            owned = OwnedPiece(piece, weight, GradientShard(piece, gradient, is_direct=True), gradient, number, state)
            entries.append(RunEntry(owned, 0, state if has_state else {}))
        numbers = self.layout.run_numbers(self.memory)
        if update_chunks.is_update_begun(self.word, update):
            runs = join_numbered(entries, numbers.tolist(), self.memory, self.gradients)
        else:
            runs = join_pieces(entries, self.memory, self.gradients, CHUNK_BYTES)
            for number, run in enumerate(runs):
                numbers[[own.number for own in run.owns]] = number
        inner = clone_optimizer(self.plain, [{**self.plain.param_groups[0], "params": []}])
        if has_state:
            for run in runs:
                inner.state[run.weight] = dict(run.state)
        slot = self.layout.slot(self.memory, 0)
        chunks = UpdateChunks(runs, self.memory, self.gradients, slot, cuts=True)
        assert chunks.step(inner, update, self.word) is None

    def contents(self) -> list[torch.Tensor]:
        found = [self.layout.weight(self.memory, number) for number in range(len(SHAPES))]
        states = [self.layout.state_of_piece(self.memory, number) for number in range(len(SHAPES))]
        return found + [value for state in states for value in state.values() if value is not None]


def truth(name: str, num_updates: int) -> list[torch.Tensor]:
    """Weights, and then states, of torch's optimizer alone."""
    owner = Owner(name)
    for number in range(1, num_updates + 1):
        for parameter, gradient in zip(owner.initial, owner.set_gradients(number), strict=True):
            parameter.grad = gradient
        inner_step(owner.plain)
    states = [owner.plain.state[one] for one in owner.initial]
    names = [list(owner.layout.state_of_piece(owner.memory, number)) for number in range(len(SHAPES))]
    tensors = [state[key] for state, keys in zip(states, names, strict=True) for key in keys]
    return [*(one.detach() for one in owner.initial), *(value for value in tensors if value is not None)]


class Stop:
    """Stops at the n-th point: around words, in the copy to the slot, and behind half of a change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, point: int) -> None:
        self.left, self.count = point, 0
        self._store, self._step, self._save = update_chunks._store, update_chunks.inner_step, update_chunks._Chunk.save
        monkeypatch.setattr(update_chunks, "_store", self._stop_around_words)
        monkeypatch.setattr(update_chunks, "inner_step", self._stop_in_update)
        monkeypatch.setattr(update_chunks._Chunk, "save", lambda chunk: [self._come(*chunk.saved), self._save(chunk)])

    def _come(self, *spoilt: torch.Tensor | None) -> None:
        self.left, self.count = self.left - 1, self.count + 1
        if self.left == -1:
            for tensor in spoilt:
                if tensor is not None:
                    tensor.detach().view(-1)[::2] = 7.0
            raise StoppedError

    def _stop_around_words(self, *args: Any) -> None:
        self._come()
        self._store(*args)
        self._come()

    def _stop_in_update(self, optimizer: torch.optim.Optimizer) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        states = [value for weight in weights for value in optimizer.state.get(weight, {}).values()]
        self._come(*weights, *states)
        self._step(optimizer)
        self._come()


@pytest.mark.parametrize("last", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_another_finishes_what_the_owner_began_wherever_it_stopped(
    monkeypatch: pytest.MonkeyPatch, name: str, last: int
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(update_chunks, "CHUNK_BYTES", CHUNK_BYTES)
    expected, point = truth(name, last), 0
    while True:
        owner = Owner(name)
        if last == 2:
            owner.set_gradients(1)
            owner.update(1)
        owner.set_gradients(last)
        with monkeypatch.context() as patch:
            stop = Stop(patch, point)
            try:
                owner.update(last)
            except StoppedError:
                pass
            else:
                assert stop.count > 15, "several chunks"
                break
        with monkeypatch.context() as patch:  # who finishes it stops, too
            Stop(patch, 3)
            with contextlib.suppress(StoppedError):
                owner.update(last)
        owner.update(last)
        for found, value in zip(owner.contents(), expected, strict=True):
            assert torch.equal(found, value.view_as(found)), point
        point += 1


def trains_in_chunks(name: str) -> None:
    """As in an elastic job: the update is one that others could finish."""
    context.current().keeps_journals = True
    update_chunks.CHUNK_BYTES = CHUNK_BYTES
    test_shared_runs.trains(name)


@pytest.mark.parametrize("name", ["Adam"])
def test_the_bits_of_the_same_run_without_chunks(rank_pool: Any, name: str) -> None:
    rank_pool(2).run(trains_in_chunks, name, init=True)
