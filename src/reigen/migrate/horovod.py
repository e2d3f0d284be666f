"""Scripts for Horovod: which of their names and parameters Reigen has, and imports of Reigen in Horovod's place.

Unmodified they run by ``reigen run --as-horovod``. Imports are edited where the module of Reigen's has all that the
file uses of it; elsewhere they stay, and need that option.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from difflib import get_close_matches

from reigen.config import format_ignored_variables, format_unknown_variables
from reigen.migrate import public_names
from reigen.migrate.findings import LineFinding
from reigen.migrate.syntax import NameUse, PythonSource
from reigen.migrate.text_files import Edit

_AS_IT_IS = "works as it is, by `reigen run --as-horovod`"
_ON_ENGINES = "works as it is, with PYTHONPATH=$(python -m reigen.compat)"
_NOT_ALL = "no module of Reigen's has all that this file uses of it under these names"
_OF_KERAS_2 = "the file makes calls of Keras 2, which Keras 3 accepts by Horovod's names alone"
#: Names that behave in another way here: what to do. Of others docs/horovod.md tells.
_DIFFERENT = {
    "mpi_threads_supported": "raises a ValueError, as in a Horovod without MPI: leave the check out",
}
#: The same where nothing has to be done.
_NOTES = {
    "nccl_built": "0 here: nothing is compiled, NCCL is torch's own",
    "cuda_built": "False here: nothing is compiled",
    "mpi_built": "False here: jobs need no MPI",
    "mpi_enabled": "False here: jobs need no MPI",
    "gloo_built": "True here, though there is no Gloo inside: scripts take the path without MPI",
    "gloo_enabled": "True here, though there is no Gloo inside: scripts take the path without MPI",
}
_VARIABLE = re.compile(r"\b(?:HOROVOD|REIGEN)_[A-Z0-9_]+\b")
_COMMAND = re.compile(r"horovodrun(?=$| -)")
_OF_BUILD = re.compile(r"HOROVOD_((WITH|WITHOUT|GPU|CUDA|ROCM|NCCL|BUILD)_?\w*|CMAKE|DEBUG)")
_CLIPPING = {"torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_", "torch.nn.utils.clip_grad_norm"}


def find_in_horovod_script(source: PythonSource) -> Iterator[LineFinding]:
    """Yield findings about imports and uses of Horovod, and its variables."""
    uses = [use for use in source.uses if _is_horovods(use.dotted)]
    for statement in _import_statements(source):
        yield from _check_import(source, statement, uses)
    for use in uses:
        yield from _check_use(source, use)
    if any(use.dotted == "horovod.torch.DistributedOptimizer" for use in uses):
        yield from _check_clipping(source)
    yield from _check_dynamic_imports(source)
    yield from find_variables(_constants(source, _VARIABLE))
    for text, line in _constants(source, _COMMAND):
        message = "by hand, if a program starts it: the command is `reigen run --as-horovod`"
        yield LineFinding(line, "change", text, message)


def find_variables(texts: Iterator[tuple[str, int]]) -> Iterator[LineFinding]:
    """Yield findings about variables of Horovod's in texts, each with its line."""
    for text, line in texts:
        for name in dict.fromkeys(_VARIABLE.findall(text)):
            if _OF_BUILD.fullmatch(name):
                yield LineFinding(line, "works", name, "not needed: nothing is compiled here")
            elif ignored := format_ignored_variables({name: "1"}):
                yield LineFinding(line, "works", name, ignored[0].removeprefix(f"{name} "))
            elif format_unknown_variables({name: "1"}):
                yield LineFinding(line, "works", name, "means nothing here, and would be ignored with a warning")
            elif name.startswith("HOROVOD_"):
                yield LineFinding(line, "works", name, "works as it is")


def _constants(source: PythonSource, pattern: re.Pattern[str]) -> Iterator[tuple[str, int]]:
    """Yield matches of a pattern at the begin of texts, with lines; docstrings do not count."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Constant) or isinstance(source.parents.get(node), ast.Expr):
            continue
        if isinstance(node.value, str) and (match := pattern.match(node.value)):
            yield match[0], node.lineno


def _is_horovods(dotted: str) -> bool:
    return dotted == "horovod" or dotted.startswith("horovod.")


def _import_statements(source: PythonSource) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.walk(source.tree):
        if (isinstance(node, ast.Import) and any(_is_horovods(alias.name) for alias in node.names)) or (
            isinstance(node, ast.ImportFrom) and not node.level and _is_horovods(node.module or "")
        ):
            yield node


def _check_import(
    source: PythonSource, statement: ast.Import | ast.ImportFrom, uses: list[NameUse]
) -> Iterator[LineFinding]:
    subject = " ".join(ast.unparse(statement).split())
    modules = _imported_modules(statement)
    for module in modules:
        if problem := _module_problem(module):
            yield LineFinding(statement.lineno, "cannot", subject, problem)
            return
    if isinstance(statement, ast.ImportFrom):
        for alias in statement.names:
            known = public_names.attribute_names(str(statement.module))
            if alias.name != "*" and alias.name not in known:
                yield LineFinding(statement.lineno, "cannot", subject, _unknown_name(str(statement.module), alias.name))
                return
    way = _ON_ENGINES if modules[0].startswith(("horovod.spark", "horovod.ray")) else _AS_IT_IS
    edits = _import_edits(source, statement, uses)
    if edits is None:
        is_keras2 = _needs_keras2(source, statement)
        yield LineFinding(
            statement.lineno, "works", subject, f"{way}, and is left: {_OF_KERAS_2 if is_keras2 else _NOT_ALL}"
        )
    else:
        yield LineFinding(statement.lineno, "change", subject, f"{way}; without that by the diff", edits)


def _needs_keras2(source: PythonSource, statement: ast.Import | ast.ImportFrom) -> bool:
    return any(map(public_names.changes_framework, _imported_modules(statement))) and _calls_keras2(source)


def _imported_modules(statement: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names if _is_horovods(alias.name)]
    module = statement.module or ""
    inner = [f"{module}.{alias.name}" for alias in statement.names]
    return [module, *(each for each in inner if public_names.find_module(each) is not None)]


def _module_problem(module: str) -> str | None:
    if public_names.find_module(module) is None:
        return f"Reigen has no module {module}: leave out what needs it"
    return public_names.import_error(module)


def _import_edits(
    source: PythonSource, statement: ast.Import | ast.ImportFrom, uses: list[NameUse]
) -> tuple[Edit, ...] | None:
    """Return edits that import Reigen in the place of Horovod; None: this cannot be, or not safely."""
    if _needs_keras2(source, statement):
        return None
    if isinstance(statement, ast.Import):
        edits: list[Edit] = []
        for alias in statement.names:
            found = _plain_import_edits(source, statement, alias, uses) if _is_horovods(alias.name) else []
            if found is None:
                return None
            edits += found
        return tuple(edits)
    return _from_import_edits(source, statement, uses)


def _plain_import_edits(
    source: PythonSource, statement: ast.Import, alias: ast.alias, uses: list[NameUse]
) -> list[Edit] | None:
    target = public_names.counterpart(alias.name)
    if target is None:
        return None
    mine = [use for use in uses if use.imported.alias is alias]
    others = [each for each in source.imports if each.bound == "horovod" and each.alias is not alias]
    if alias.asname is None and (others or not mine):
        return None  # several imports bind `horovod`; or its use cannot be seen
    for use in mine:
        rest = use.dotted.removeprefix(alias.name).removeprefix(".")
        if use.dotted != alias.name and not use.dotted.startswith(f"{alias.name}."):
            return None
        if rest and not _has_attributes(target, rest):
            return None
    edits = [source.replace(alias, target if alias.asname is None else f"{target} as {alias.asname}")]
    if alias.asname is None:
        num_names = alias.name.count(".") + 1
        edits += (source.replace(_chain_part(use.node, num_names), target) for use in mine)
    return edits


def _chain_part(node: ast.expr, num_names: int) -> ast.expr:
    """Return the part of a chain of attributes that has so many names."""
    length = 1
    inner = node
    while isinstance(inner, ast.Attribute):
        inner, length = inner.value, length + 1
    for _ in range(length - num_names):
        assert isinstance(node, ast.Attribute)
        node = node.value
    return node


def _has_attributes(module: str, rest: str) -> bool:
    """Return whether MODULE.REST means something: modules are followed, and one name of the last one."""
    for part in rest.split("."):
        if part not in public_names.attribute_names(module):
            return False
        inner = f"{module}.{part}"
        if public_names.find_module(inner) is None:
            return True  # attributes of a class or an object
        module = inner
    return True


def _from_import_edits(source: PythonSource, statement: ast.ImportFrom, uses: list[NameUse]) -> tuple[Edit, ...] | None:
    module = str(statement.module)
    targets: dict[str, list[str]] = {}
    for alias in statement.names:
        if alias.name == "*":
            target = public_names.counterpart(module)
            if target is None or not public_names.star_names(module) <= public_names.star_names(target):
                return None
        else:
            target = public_names.counterpart(module, alias.name)
        if target is None:
            return None
        inner = f"{target}.{alias.name}"
        if public_names.find_module(inner) is not None and not all(
            _has_attributes(inner, use.dotted.removeprefix(f"{module}.{alias.name}").removeprefix("."))
            for use in uses
            if use.imported.alias is alias and use.dotted != f"{module}.{alias.name}"
        ):
            return None
        targets.setdefault(target, []).append(ast.unparse(alias))
    if len(targets) == 1:
        (target,) = targets
        start, _ = source.range(statement)
        at = source.lines.text.index(module, start)
        return (Edit(at, at + len(module), target),)
    if not source.is_alone(statement):
        return None
    indentation, end = source.lines.indentation(statement.lineno), source.lines.line_end
    new = f"{end}{indentation}".join(f"from {target} import {', '.join(names)}" for target, names in targets.items())
    return (source.replace(statement, new),)


def _calls_keras2(source: PythonSource) -> bool:
    """Return whether there are calls of Keras 2 that Horovod's names make Keras 3 accept; see `compat.keras2_calls`."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.keyword) and node.arg == "experimental_run_tf_function":
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "variables":
            return True
    return False


def _check_use(source: PythonSource, use: NameUse) -> Iterator[LineFinding]:
    statement = use.imported.statement
    if isinstance(statement, ast.ImportFrom) and public_names.find_module(str(statement.module)) is None:
        return  # said of the import
    module, name = _split(use.dotted)
    if name is None or public_names.import_error(module):
        return
    subject, line = source.text(use.node), use.node.lineno
    if name not in public_names.attribute_names(module):
        yield LineFinding(line, "cannot", subject, _unknown_name(module, name))
        return
    if name in _DIFFERENT:
        yield LineFinding(line, "change", subject, _DIFFERENT[name])
        return
    call = source.parents.get(use.node)
    if isinstance(call, ast.Call) and call.func is use.node and (unknown := _unknown_keywords(module, name, call)):
        message = f"{name}() has no parameter {', '.join(unknown)} here"
        yield LineFinding(line, "cannot", subject, message)
        return
    yield LineFinding(line, "works", subject, _NOTES.get(name, "works as it is"))


def _unknown_name(module: str, name: str) -> str:
    close = get_close_matches(name, public_names.attribute_names(module), 1)
    hint = f"; it has {close[0]}" if close else ""
    return f"{module} has no {name} here{hint}: see docs/horovod.md"


def _split(dotted: str) -> tuple[str, str | None]:
    """Split ``horovod.torch.elastic.run`` into a module and a name of it; None: it is a module."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        if public_names.find_module(module) is not None:
            return module, parts[end] if end < len(parts) else None
    raise AssertionError(dotted)


def _unknown_keywords(module: str, name: str, call: ast.Call) -> list[str]:
    known = public_names.call_parameters(module, name)
    if known is None or known.takes_any:
        return []
    return [each.arg for each in call.keywords if each.arg is not None and each.arg not in known.names]


def _check_clipping(source: PythonSource) -> Iterator[LineFinding]:
    """Yield findings about gradients that are clipped before they are averaged: an error here."""
    for use in source.uses:
        if use.dotted not in _CLIPPING:
            continue
        scope = source.scope(use.node)
        before = (node for node in ast.walk(scope) if isinstance(node, ast.Call) and node.lineno <= use.node.lineno)
        calls = [node.func.attr for node in before if isinstance(node.func, ast.Attribute)]
        if "backward" in calls and "synchronize" not in calls:
            message = (
                "clips gradients that are not averaged yet, which is an error here: call optimizer.synchronize() "
                "before it (step() then needs no skip_synchronize()), or "
                "hvd.DistributedOptimizer(..., synchronize_in_backward=True)"
            )
            yield LineFinding(use.node.lineno, "change", source.text(use.node), message)


def _check_dynamic_imports(source: PythonSource) -> Iterator[LineFinding]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and node.args and isinstance(first := node.args[0], ast.Constant):
            name = source.resolve(node.func) or ast.unparse(node.func)
            if name in {"importlib.import_module", "__import__"} and _is_horovods(str(first.value)):
                module = str(first.value)
                problem = _module_problem(module)
                message = problem or f"{_AS_IT_IS}, and is left: it is imported by a text"
                yield LineFinding(node.lineno, "cannot" if problem else "works", f"import of {module!r}", message)
