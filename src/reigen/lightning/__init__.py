"""Reigen for PyTorch Lightning (2.2 or later): ``import reigen.lightning`` makes ``Trainer(strategy="reigen")`` work.

For both packages that Lightning comes in, ``lightning`` and ``pytorch_lightning``.
"""

from reigen.lightning.packages import load_strategy_class as __getattr__  # noqa: F401  of the package that is in use
from reigen.lightning.packages import make_strategy_class, register_strategies

__all__ = ["ReigenStrategy", "make_strategy_class", "register_strategies"]
