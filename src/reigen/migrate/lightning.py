"""Lightning's Trainer, from both of its packages: Reigen's strategy in the place of DDP's and Horovod's."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from reigen.migrate.findings import LineFinding
from reigen.migrate.syntax import NameUse, PythonSource

_PACKAGES = ("lightning.", "pytorch_lightning.")
_DDP = {"ddp", "ddp_spawn", "ddp_fork", "ddp_notebook"}
_FOUND_UNUSED = "_find_unused_parameters_true"
_STARTED = "`reigen run -np N` starts the processes, and devices= and num_nodes= do not count (docs/lightning.md)"


def find_in_lightning_script(source: PythonSource) -> Iterator[LineFinding]:
    """Yield findings about trainers that average with DDP, or did with Horovod."""
    for use in source.uses:
        name = use.dotted.rpartition(".")[2]
        call = source.parents.get(use.node)
        if not use.dotted.startswith(_PACKAGES) or not isinstance(call, ast.Call) or call.func is not use.node:
            continue
        if name == "Trainer":
            yield from _check_trainer(source, use, call)
        elif name in {"DDPStrategy", "HorovodStrategy"}:
            message = f'by hand: strategy="reigen" in its place, and `import reigen.lightning`: {_STARTED}'
            yield LineFinding(call.lineno, "change", name, message)


def _check_trainer(source: PythonSource, use: NameUse, call: ast.Call) -> Iterator[LineFinding]:
    by_hand = any(each.arg == "accelerator" and ast.unparse(each.value) == "'horovod'" for each in call.keywords)
    for keyword in call.keywords:
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        subject = f"{keyword.arg}={ast.unparse(keyword.value)}"
        if keyword.arg == "accelerator" and value == "horovod":
            message = 'by hand, as Lightning 2 has it: strategy="reigen", accelerator="gpu" or "cpu", and '
            yield LineFinding(
                keyword.value.lineno, "change", subject, f"{message}`import reigen.lightning`: {_STARTED}"
            )
        elif keyword.arg == "strategy" and _is_replaced(value) and not by_hand:
            statement = use.imported.statement
            if statement not in source.tree.body or not source.is_alone(statement):
                message = f'by hand: strategy="reigen", and `import reigen.lightning`: {_STARTED}'
                yield LineFinding(keyword.value.lineno, "change", subject, message)
                continue
            edits = [source.replace(keyword.value, '"reigen"')]
            if not _imports_strategy(source):
                edits.append(source.insert_after(statement, "import reigen.lightning"))
            yield LineFinding(keyword.value.lineno, "change", subject, _STARTED, tuple(edits))


def _imports_strategy(source: PythonSource) -> bool:
    """Return whether the file has ``import reigen.lightning``, or imports names of it."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import) and any(each.name == "reigen.lightning" for each in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "reigen":
            return any(each.name == "lightning" for each in node.names)
        if isinstance(node, ast.ImportFrom) and node.module == "reigen.lightning":
            return True
    return False


def _is_replaced(strategy: object) -> bool:
    return isinstance(strategy, str) and strategy.removesuffix(_FOUND_UNUSED) in {*_DDP, "horovod"}
