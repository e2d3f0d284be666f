"""The strategy's class for each of the packages that Lightning comes in, and its names there."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import Any

from reigen.errors import ArgumentError
from reigen.lightning.job_environment import JobEnvironment
from reigen.lightning.strategy import JobStrategy

#: Package of the Trainer, and that of what it shares with Fabric: two copies of one code, whose classes differ.
PACKAGES = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
#: Names of the strategy. Scripts of Horovod's time ask for the second.
NAMES = ("reigen", "horovod")


def register_strategies() -> tuple[str, ...]:
    """Make ``Trainer(strategy="reigen")`` known, and ``"horovod"`` for scripts that say so.

    Done by ``import reigen.lightning`` for the packages that are imported already. If there is none it imports all that
    are installed, because the script may go on to use either.

    Returns:
        The packages whose Trainer knows the names now.

    Raises:
        ModuleNotFoundError: Lightning is not installed.
    """
    chosen = _packages_in_use()
    for package in chosen:
        registry = importlib.import_module(f"{package}.strategies").StrategyRegistry
        for name in NAMES:
            if name not in registry:
                registry.register(
                    name, make_strategy_class(package), description="Reigen's collectives in place of DDP's"
                )
    return chosen


@functools.cache
def make_strategy_class(package: str = "lightning.pytorch") -> Any:
    """Return the class of ``ReigenStrategy`` for ``lightning.pytorch`` or ``pytorch_lightning``.

    Args:
        package: where the Trainer is from.

    Returns:
        A subclass of that package's ``ParallelStrategy``.

    Raises:
        ArgumentError: there is no such package of Lightning's.
        ModuleNotFoundError: it is not installed.
    """
    if package not in PACKAGES:
        raise ArgumentError(f"package must be one of {', '.join(PACKAGES)}, got {package!r}")
    base = importlib.import_module(f"{package}.strategies").ParallelStrategy
    environment_base = importlib.import_module(f"{PACKAGES[package]}.plugins.environments").ClusterEnvironment
    environment = type("JobEnvironment", (JobEnvironment, environment_base), {"__doc__": JobEnvironment.__doc__})
    attributes = {"__doc__": JobStrategy.__doc__, "__module__": "reigen.lightning", "environment_class": environment}
    return type("ReigenStrategy", (JobStrategy, base), attributes)


def load_strategy_class(name: str) -> Any:
    """Return ``reigen.lightning.ReigenStrategy``: the class for the package that this process has imported."""
    if name != "ReigenStrategy":
        raise AttributeError(f"module 'reigen.lightning' has no attribute {name!r}")
    return make_strategy_class(_packages_in_use()[0])


def _packages_in_use() -> tuple[str, ...]:
    if imported := tuple(package for package in PACKAGES if package in sys.modules):
        return imported
    installed = tuple(package for package in PACKAGES if importlib.util.find_spec(package.partition(".")[0]))
    if not installed:
        raise ModuleNotFoundError("reigen.lightning needs PyTorch Lightning: pip install lightning", name="lightning")
    return installed


register_strategies()  # an import is all that Lightning's registry lets a package do to be found by name
