"""Writes the stubs of the functions that are made of the table of collectives: what type checkers see of them.

    python tools/make_stubs.py            # writes them
    python tools/make_stubs.py --check    # exit code 1 if one is not as it would be written

The frameworks need not be installed. CONTRIBUTING.md says when to run it; a test does the check.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path

from reigen.api import dialects
from reigen.api.functions import Dialect, FunctionSpec, list_functions

SOURCE = Path(__file__).parents[1] / "src" / "reigen"
HEAD = "# Written by tools/make_stubs.py of the table in reigen/api/operations.py; not to be edited.\n\n"
_SEQUENCE = "from collections.abc import Sequence\n"
_PROCESS_SET = "from reigen.api.process_sets import ProcessSet\n"
_HANDLE = "from reigen.engine.handle import Handle\n"
#: Of each stub, the dialect of its functions and the imports that these need; {} are a module's re-exports.
STUBS: dict[str, tuple[Dialect, str]] = {
    "jax/ops.pyi": (
        dialects.JAX,
        f"{_SEQUENCE}from typing import Any\n\n{_PROCESS_SET}{_HANDLE}from reigen.jax.compression import Compressor\n",
    ),
    "mxnet/ops.pyi": (
        dialects.MXNET,
        f"{_SEQUENCE}from typing import Any, TypeAlias\n\n{_PROCESS_SET}\nNDArray: TypeAlias = Any\n",
    ),
    "tensorflow/ops.pyi": (
        dialects.TENSORFLOW,
        (
            f"{_SEQUENCE}from typing import Any, TypeAlias\n\nimport tensorflow as tf\n\n{_PROCESS_SET}"
            "from reigen.tensorflow.compression import Compressor\n\nTensorLike: TypeAlias = Any\n"
        ),
    ),
    "torch/ops.pyi": (
        dialects.TORCH,
        f"{_SEQUENCE}\nimport torch\n\n{_PROCESS_SET}{_HANDLE}from reigen.torch.compression import Compressor\n",
    ),
    "numpy_ops.pyi": (
        dialects.NUMPY,
        f"{_SEQUENCE}\nfrom numpy.typing import ArrayLike\n\nfrom reigen.api.adapter import Array\n{{}}{_HANDLE}",
    ),
}


def write_function(spec: FunctionSpec) -> str:
    """Return the stub of a function."""
    lines = [f"def {spec.name}("]
    for parameter in spec.parameters:
        is_shown = isinstance(parameter.default, int | float) or "None" in parameter.annotation
        default = "" if parameter.is_required else f" = {parameter.default!r}" if is_shown else " = ..."
        lines.append(f"    {parameter.name}: {spec.annotation(parameter)}{default},")
    return "\n".join([*lines, f") -> {spec.returns}: ..."])


def write_re_exports(module: Path) -> str:
    """Return the imports of what a module re-exports, in the form that says so in a stub."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    listed = {
        element.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List)
        for element in node.value.elts
        if isinstance(element, ast.Constant)
    }
    lines = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names = import_module(str(node.module)).__all__ if names == ["*"] else [*filter(listed.__contains__, names)]
            lines += [f"from {node.module} import {name} as {name}\n" for name in names]
    return "".join(lines)


def write_stub(path: str) -> str:
    """Return the stub of a module."""
    dialect, imports = STUBS[path]
    if "{}" in imports:
        imports = imports.format(write_re_exports(SOURCE / path.removesuffix("i")))
    specs = list(list_functions(dialect))
    listed = "".join(f'    "{name}",\n' for name in sorted(spec.name for spec in specs))
    names = "" if path == "numpy_ops.pyi" else f"\n__all__ = [\n{listed}]\n"
    return "\n".join([HEAD + imports + names, *map(write_function, specs), ""])


def main(arguments: list[str]) -> int:
    """Write the stubs, or compare them."""
    stale = [path for path in STUBS if not (file := SOURCE / path).is_file() or file.read_text() != write_stub(path)]
    for path in stale:
        if arguments != ["--check"]:
            (SOURCE / path).write_text(write_stub(path))
        print(f"{'stale' if arguments == ['--check'] else 'written'}: src/reigen/{path}")
    return int(arguments == ["--check"] and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
