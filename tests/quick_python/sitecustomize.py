"""For processes of tests that import a framework: looking for garbage is a third of the time to start and to end one.

In PYTHONPATH. Not for tests of how a process ends: what is in cycles then is not finalized. Python imports one
`sitecustomize` only: the next in the path is run from here.
"""

import atexit
import gc
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

gc.set_threshold(100_000)
atexit.register(gc.freeze)  # the last of all functions that are registered so

_others = [each for each in sys.path if Path(each).resolve() != Path(__file__).resolve().parent]
_spec = PathFinder.find_spec("sitecustomize", _others)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
