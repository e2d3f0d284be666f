"""Reigen: data-parallel training of one model on many processes. This is the face for NumPy arrays.

The functions (`reigen.numpy_ops` has the list) are loaded when the first of them is used: the launcher and the command
line are part of this package, too, and start without NumPy.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from reigen._version import __version__ as __version__

if TYPE_CHECKING:
    from reigen import data as data
    from reigen import kv as kv
    from reigen import optim as optim
    from reigen.numpy_ops import *  # noqa: F403 - the list is there
    from reigen.runner import run as run

#: What programs use as `reigen.kv.create(...)` after no more than `import reigen`.
_SUBPACKAGES = ("data", "kv", "optim")


def __getattr__(name: str) -> object:
    if name == "run":
        return import_module(f"{__name__}.runner").run
    if name in _SUBPACKAGES:
        return import_module(f"{__name__}.{name}")
    is_ours = name == "__all__" or not (name.startswith("_") or find_spec(f"{__name__}.{name}"))
    face = import_module(f"{__name__}.numpy_ops") if is_ours else None
    if face is None or name not in (*face.__all__, "__all__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = sorted([*face.__all__, "__version__", "run"]) if name == "__all__" else getattr(face, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module(f"{__name__}.numpy_ops").__all__, "run"})
