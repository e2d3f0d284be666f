"""Sampler that deals the rest of an epoch anew when the members of the job change."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

import torch

from reigen.api.job import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Deals a dataset's indices to the ranks; after a change of members, those that were not processed in this epoch.

    As an attribute of a `TorchState` it is saved, restored, synchronized and dealt anew with the state. All ranks get
    equally many indices: where they do not come out even, some of the first are dealt once more.

    Args:
        dataset: anything that has a length.
        shuffle: in another order each epoch, the same on all ranks.
        seed: of the order, together with the epoch.

    Attributes:
        epoch: as `set_epoch` said last.
        processed_num: indices of this epoch that all ranks together have processed, none counted twice.
        num_replicas: number of ranks.
        rank: this one.
        remaining_indices: what is dealt, in order.
        num_samples: indices for each rank.
        total_size: indices for all of them.

    Example::

        sampler = hvd.elastic.ElasticSampler(dataset)
        state = hvd.elastic.TorchState(model, optimizer, epoch=0, sampler=sampler)
        ...
        for state.epoch in range(state.epoch, epochs):
            for number, (images, labels) in enumerate(DataLoader(dataset, batch_size, sampler=sampler)):
                train_one_batch(images, labels)
                sampler.record_batch(number, len(labels))
                state.commit()
            sampler.set_epoch(state.epoch + 1)
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        #: of this rank's indices, those that are processed since they were dealt
        self._num_recorded = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; call it at the end of the one before, so that a restored state does not begin it anew."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch that every rank has processed.

        Args:
            batch_idx: accepted for Horovod's sake.
            batch_size: indices in this rank's batch; the batch size of the others may stand for that of a shorter last
                one, for no more is counted than was dealt.
        """
        del batch_idx
        self._num_recorded = min(self._num_recorded + batch_size, self.num_samples)
        dealt = min(self._num_recorded * self.num_replicas, len(self.remaining_indices))
        self.processed_num = len(self.dataset) - len(self.remaining_indices) + dealt

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the indices of one of this rank's batches."""
        return self._own()[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and how much of it is processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, whatever the number of ranks was there."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal the indices that are not processed to the present ranks."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.processed_num = min(self.processed_num, len(order))
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self._num_recorded = 0

    def __iter__(self) -> Iterator[int]:
        """Iterate over this rank's indices."""
        return iter(self._own())

    def __len__(self) -> int:
        """Number of indices that each rank gets."""
        return self.num_samples

    def _own(self) -> list[int]:
        rest = self.remaining_indices
        missing = self.total_size - len(rest)
        again = [rest[place % len(rest)] for place in range(missing)]  # fewer may be left than there are ranks
        return [*rest, *again][self.rank :: self.num_replicas]
