"""The environment of these tests has what they are about, in versions that can be imported beside each other."""

from __future__ import annotations

from collections.abc import Callable

from reigen.testing import RankPool


def test_the_libraries_can_be_imported_together(integration_pools: Callable[[int], RankPool]) -> None:
    def versions() -> list[str]:
        import accelerate
        import lightning
        import transformers
        from torch.utils.tensorboard import SummaryWriter

        assert transformers.Trainer.__name__ == "Trainer"  # it is imported when it is asked for
        assert SummaryWriter is not None
        return [each.__version__ for each in (accelerate, lightning, transformers)]

    assert all(integration_pools(1).run(versions)[0])
