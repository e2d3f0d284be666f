"""``import mxnet`` where this directory comes first in PYTHONPATH: MXNet itself, with Reigen's distributed stores.

In a process whose role is server or scheduler (DMLC_ROLE) MXNet's import would serve, and not return. So does this one:
with Reigen's server, and without loading MXNet.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def _load() -> None:
    here = Path(__file__).resolve().parent
    spec = PathFinder.find_spec("mxnet", [place for place in sys.path if Path(place or ".").resolve() != here])
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError("No module named 'mxnet' (reigen run --as-mxnet needs MXNet itself)", name="mxnet")
    module = importlib.util.module_from_spec(spec)
    sys.modules["mxnet"] = module  # what `import mxnet` gives is what stands here when this file has been run
    spec.loader.exec_module(module)


if os.environ.get("DMLC_ROLE", "").lower() in {"server", "scheduler"}:
    from reigen.kv import create

    create("dist_sync")  # serves for stores of all types, and ends the process

_load()

from reigen.mxnet.kvstore import register_kvstores  # noqa: E402  MXNet has to be there

register_kvstores()
