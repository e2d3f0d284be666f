"""What the package shows, and what importing it costs."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import reigen

ROOT = Path(reigen.__file__).parent
PROJECT = Path(__file__).parents[2]

#: Packages whose __init__ re-exports the public face of what lies in their modules.
FACES = ["reigen.data", "reigen.kv", "reigen.optim", "reigen.testing", "reigen.torch"]

#: Rooms that handle bytes from other processes.
NETWORK_ROOMS = ["net", "cluster", "backends", "engine", "launch"]
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


@pytest.mark.parametrize("name", FACES)
def test_all_is_sorted_and_complete(name: str) -> None:
    module = importlib.import_module(name)
    assert list(module.__all__) == sorted(set(module.__all__))
    tree = ast.parse(Path(str(module.__file__)).read_text())
    imported = {
        name
        for node in ast.walk(tree)  # also what is imported for type checkers alone, and loaded when it is used
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reigen")
        for alias in node.names
        for name in (
            importlib.import_module(str(node.module)).__all__ if alias.name == "*" else [alias.asname or alias.name]
        )
    }
    public = {each for each in imported if not each.startswith("_")}
    assert public == {each for each in module.__all__ if each != "__version__"}
    for each in module.__all__:
        assert getattr(module, each) is not None


def test_the_face_of_reigen_is_the_list_of_numpy_ops() -> None:
    from reigen import numpy_ops

    listed = numpy_ops.__all__
    assert listed == sorted(set(listed))
    assert reigen.__all__ == sorted([*listed, "__version__", "run"])  # type: ignore[attr-defined]
    assert set(dir(reigen)) >= {*listed, "run"}
    for each in listed:
        assert getattr(reigen, each) is getattr(numpy_ops, each)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = reigen.nothing  # type: ignore[attr-defined]
    assert reigen.run.__module__ == "reigen.runner.call"
    code = "from reigen import *; assert run and allreduce and grouped_allreduce and ProcessSet and __version__"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_stores_optimizers_and_shards_need_no_import_of_their_own() -> None:
    code = "import reigen; assert reigen.kv.create and reigen.optim.create('sgd') and reigen.data.SplitSampler"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_looking_for_a_submodule_does_not_load_the_functions() -> None:
    code = "import sys; from reigen import errors; assert 'reigen.numpy_ops' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def packages() -> list[str]:
    """All but reigen.compat: a module beside its __init__.py would hide a user's module of the same name."""
    found = [info.name for info in pkgutil.walk_packages([str(ROOT)], "reigen.") if info.ispkg]
    return [name for name in found if name != "reigen.compat"]


@pytest.mark.parametrize("name", packages())
def test_package_files_only_re_export(name: str) -> None:
    path = ROOT.joinpath(*name.split(".")[1:]) / "__init__.py"
    for node in ast.parse(path.read_text()).body:
        re_exports = isinstance(node, ast.Import | ast.ImportFrom)
        # a framework that is missing: what to do
        re_exports |= isinstance(node, ast.Try) and [type(each) for each in node.body] == [ast.Import]
        # what is imported when it is used, for type checkers and for others
        guards = ("if _typing.TYPE_CHECKING:\n    from ", "if not _typing.TYPE_CHECKING:\n    __getattr__, __dir__ = ")
        re_exports |= ast.unparse(node).startswith(guards)
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        names = {"__all__", "__getattr__", "__version__"}
        is_name = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in names
        is_name |= ast.unparse(node).startswith(("__all__ += ", "__all__.sort()"))
        assert re_exports or is_text or is_name, f"{path}:{node.lineno}: {ast.unparse(node)[:80]}"


_IMPORT = """
import json, os, sys, threading
before, environment = set(os.listdir("/proc/self/fd")), dict(os.environ)
import signal
handlers = [signal.getsignal(number) for number in signal.valid_signals()]
{statement}
print(json.dumps({{
    "modules": sorted(sys.modules),
    "threads": [thread.name for thread in threading.enumerate()],
    "descriptors": sorted(set(os.listdir("/proc/self/fd")) - before),
    "same_environment": environment == dict(os.environ),
    "same_handlers": handlers == [signal.getsignal(number) for number in signal.valid_signals()],
}}))
"""


def import_alone(statement: str) -> dict[str, object]:
    code = _IMPORT.format(statement=statement)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_import_is_free() -> None:
    found, numpy = import_alone("import reigen"), import_alone("import numpy")
    loaded = set(found["modules"])  # type: ignore[call-overload]
    heavy = {"torch", "tensorflow", "keras", "jax", "mxnet", "numba", "rich", "asyncio", "cloudpickle"}
    assert not loaded & heavy
    assert len(loaded - set(numpy["modules"])) < 150  # type: ignore[call-overload]
    assert found["threads"] == ["MainThread"]
    assert found["descriptors"] == []
    assert found["same_environment"]
    assert found["same_handlers"]


def test_the_version_is_written_once() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", reigen.__version__)
    assert importlib.metadata.version("reigen") == reigen.__version__
    code = [*ROOT.rglob("*.py"), PROJECT / "pyproject.toml", PROJECT / "Makefile"]
    where = [path.name for path in code if f'"{reigen.__version__}"' in path.read_text()]
    assert where == ["_version.py"]


def test_the_package_is_marked_as_typed() -> None:
    assert (ROOT / "py.typed").is_file()


@pytest.mark.parametrize("room", NETWORK_ROOMS)
def test_no_byte_from_a_peer_becomes_code(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not {alias.name.partition(".")[0] for alias in node.names} & FORBIDDEN_MODULES, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] not in FORBIDDEN_MODULES, path
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in FORBIDDEN_CALLS, f"{path}:{node.lineno}: {called}()"
                assert not called.endswith(("np.load", "numpy.load", "torch.load")), f"{path}:{node.lineno}: {called}()"
                shell = [keyword for keyword in node.keywords if keyword.arg == "shell"]
                assert not shell, f"{path}:{node.lineno}: a shell"
