"""MetricsLogger with the real TensorBoard: rank 0 alone writes, and what it wrote can be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from reigen.testing import RankPool


def test_tensorboard_has_the_metrics_of_rank_0(integration_pools: Callable[[int], RankPool], tmp_path: Path) -> None:
    def train(directory: str) -> int:
        import torch
        from torch.utils.tensorboard import SummaryWriter

        import reigen.torch as hvd

        model = torch.nn.Linear(4, 2)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), 0)
        writers: list[SummaryWriter] = []

        def log(values: dict[str, float], step: int) -> None:
            if not writers:
                writers.append(SummaryWriter(directory))
            for name, value in values.items():
                writers[0].add_scalar(name, value, step)

        logger = hvd.MetricsLogger(log, every=2)
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            logger()
        for writer in writers:
            writer.close()
        return len(writers)

    def read(directory: str) -> dict[str, list[tuple[int, float]]]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(directory)
        events.Reload()
        return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

    assert integration_pools(2).run(train, str(tmp_path), init=True) == [1, 0]
    [scalars] = integration_pools(1).run(read, str(tmp_path))
    assert scalars["reigen/steps_total"] == [(2, 2.0), (4, 4.0), (6, 6.0)]
    assert scalars["reigen/ranks"] == [(step, 2.0) for step in (2, 4, 6)]
