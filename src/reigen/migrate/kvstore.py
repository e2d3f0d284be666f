"""Scripts for MXNet's KVStore: they run unmodified by ``--as-mxnet``; what does not is said, with what to do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import cast

from reigen.kv.factory import STORE_TYPES
from reigen.migrate.findings import LineFinding
from reigen.migrate.public_names import read_literal
from reigen.migrate.syntax import NameUse, PythonSource

_CREATE = {"mxnet.kv.create", "mxnet.kvstore.create"}
_TRAINERS = {"mxnet.gluon.Trainer"}
_WORKS = "works as it is, by `reigen run -np N -s M --as-mxnet` or `reigen launch --as-mxnet`"
_LET_WORKERS = "let the workers update: update_on_kvstore=False, or MXNET_UPDATE_ON_KVSTORE=0 for Module"


def find_in_mxnet_script(source: PythonSource) -> Iterator[LineFinding]:
    """Yield findings about stores, and about trainers and optimizers that use them."""
    is_distributed = _mentions_distributed_store(source)
    for use in source.uses:
        call = source.parents.get(use.node)
        if not isinstance(call, ast.Call) or call.func is not use.node:
            continue
        if use.dotted in _CREATE:
            yield _check_store(source, call, _argument(call, "name", 0))
        elif use.dotted in _TRAINERS:
            yield from _check_trainer(source, call, is_distributed)
        elif use.dotted.startswith("mxnet.optimizer.") and is_distributed and not _uses_horovod(source):
            yield from _check_optimizer(source, use, call)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fit":
            store = _argument(node, "kvstore", None)
            if store is not None and _imports_mxnet(source):
                yield _check_store(source, node, store)
        if isinstance(node, ast.keyword) and node.arg == "profile_process" and "server" in ast.unparse(node.value):
            message = "servers have no profiler: profile_process='worker'"
            yield LineFinding(node.lineno, "cannot", ast.unparse(node), message)


def _imports_mxnet(source: PythonSource) -> bool:
    return any(each.dotted.partition(".")[0] == "mxnet" for each in source.imports)


def _uses_horovod(source: PythonSource) -> bool:
    return any(each.dotted.partition(".")[0] in {"horovod", "reigen"} for each in source.imports)


def _mentions_distributed_store(source: PythonSource) -> bool:
    if not _imports_mxnet(source):
        return False
    constants = (node.value for node in ast.walk(source.tree) if isinstance(node, ast.Constant))
    return any(isinstance(value, str) and _is_distributed(value) for value in constants)


def _is_distributed(name: str) -> bool:
    kind = STORE_TYPES.get(name.lower())
    return kind is not None and kind.where != "local"


def _argument(call: ast.Call, name: str, position: int | None) -> ast.expr | None:
    if position is not None and len(call.args) > position:
        return call.args[position]
    return next((each.value for each in call.keywords if each.arg == name), None)


def _check_store(source: PythonSource, call: ast.Call, store: ast.expr | None) -> LineFinding:
    subject = _subject(source, call)
    if not isinstance(store, ast.Constant):
        message = f"{_WORKS}, where the name is that of a distributed store"
        return LineFinding(call.lineno, "works", subject, message)
    name = str(store.value)
    if _is_distributed(name):
        return LineFinding(call.lineno, "works", subject, _WORKS)
    if "dist" in name:
        known = ", ".join(sorted(each for each in STORE_TYPES if _is_distributed(each)))
        return LineFinding(call.lineno, "cannot", subject, f"there is no store {name!r}; there are {known}")
    return LineFinding(call.lineno, "works", subject, "a store of one process stays MXNet's")


def _check_trainer(source: PythonSource, call: ast.Call, is_distributed: bool) -> Iterator[LineFinding]:
    store = _argument(call, "kvstore", 3)
    if store is not None and not (isinstance(store, ast.Constant) and store.value is None):
        yield _check_store(source, call, store)
    optimizer = _argument(call, "optimizer", 1)
    in_workers = _argument(call, "update_on_kvstore", None)
    is_named = isinstance(optimizer, ast.Constant) and isinstance(optimizer.value, str)
    if is_named and is_distributed and store is not None and ast.unparse(in_workers or ast.Constant(True)) != "False":
        name = str(cast(ast.Constant, optimizer).value)
        if name.lower() not in _optimizers():
            yield LineFinding(call.lineno, "change", _subject(source, call), _no_counterpart(name))


def _check_optimizer(source: PythonSource, use: NameUse, call: ast.Call) -> Iterator[LineFinding]:
    name = use.dotted.removeprefix("mxnet.optimizer.")
    if name in {"create", "Optimizer.create_optimizer"}:
        first = _argument(call, "name", 0)
        name = str(first.value) if isinstance(first, ast.Constant) else ""
    is_class = name.isidentifier() and not any(word in name.lower() for word in ("updater", "register", "optimizer"))
    if is_class and name.lower() not in _optimizers():
        yield LineFinding(call.lineno, "change", _subject(source, call), _no_counterpart(name))


def _optimizers() -> set[str]:
    table = read_literal("reigen.mxnet.optimizer_conversion", "_COUNTERPARTS")
    return {name.lower() for name in cast(dict[str, object], table)}


def _no_counterpart(name: str) -> str:
    return f"servers have no optimizer {name}, which is an error with a distributed store: {_LET_WORKERS}"


def _subject(source: PythonSource, call: ast.Call) -> str:
    text = " ".join(source.text(call).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
