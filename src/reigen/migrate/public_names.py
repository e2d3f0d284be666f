"""Names and parameters that modules have, read of their source: no framework is imported, and no table can go stale.

`horovod.NAME` stands for `reigen.compat.horovod.NAME`, which is what `--as-horovod` gives a script. Where a module has
a stub, that is read instead: the collectives are made when they are imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from reigen.compat import DIRECTORY

_ROOT = Path(__file__).parents[1]
#: Packages whose names scripts may import: others are Reigen's own affair.
_PUBLIC = ("torch", "tensorflow", "keras", "mxnet", "ray", "spark", "elastic", "errors", "run")


@dataclass(frozen=True, slots=True)
class CallParameters:
    """Parameters of a function or class.

    Attributes:
        names: those that a call may name.
        takes_any: there is a ``**kwargs``.
    """

    names: frozenset[str]
    takes_any: bool


@dataclass(frozen=True, slots=True)
class _Binding:
    """Meaning of a name in a module: a definition, or a name (None: the module itself) of another module."""

    node: ast.stmt
    module: str = ""
    name: str | None = None


def find_module(name: str) -> Path | None:
    """Return the file of a module of Reigen's, or of Horovod's as scripts import it; None: there is none."""
    first, *rest = name.split(".")
    if first not in {"reigen", "horovod"}:
        return None
    base = (_ROOT if first == "reigen" else Path(DIRECTORY) / "horovod").joinpath(*rest)
    files = (base / "__init__.pyi", base / "__init__.py", base.with_suffix(".pyi"), base.with_suffix(".py"))
    return next((file for file in (files if rest else files[:2]) if file.is_file()), None)


def import_error(name: str) -> str | None:
    """Return the text of the ImportError that importing a module always raises, or None."""
    for statement in _parse(name).body:
        if isinstance(statement, ast.Raise) and isinstance(statement.exc, ast.Call):
            return "".join(ast.literal_eval(argument) for argument in statement.exc.args)
    return None


@cache
def attribute_names(module: str) -> frozenset[str]:
    """Return the names that an import of the module gives access to: MODULE.NAME."""
    found = {*_bindings(module), *_lazy_names(module)}
    path = find_module(module)
    if path is not None and path.stem == "__init__":
        beside = (*path.parent.glob("*.py"), *(file.parent for file in path.parent.glob("*/__init__.py")))
        found |= {each.stem for each in beside}
    return frozenset(found)


@cache
def star_names(module: str) -> frozenset[str]:
    """Return the names that ``from MODULE import *`` binds."""
    listed: set[str] = set()
    has_list, of_stub = False, set()
    for statement in _statements(_parse(module).body):
        match statement:
            case ast.Assign([ast.Name("__all__")], value) | ast.AugAssign(ast.Name("__all__"), _, value):
                has_list = True
                listed |= set(_listed(value, module))
            case ast.ImportFrom(_, aliases) if str(find_module(module)).endswith(".pyi"):
                of_stub |= {alias.name for alias in aliases if alias.asname is None}  # for its annotations alone
    public = {name for name in _bindings(module) if not name.startswith("_")} - of_stub
    return frozenset(listed if has_list else public)


def definition(module: str, name: str) -> ast.stmt | None:
    """Return the definition of a name of a module, wherever it stands; None: not found, or no function or class."""
    place = place_of_definition(module, name)
    node = _bindings(place[0])[place[1]].node if place is not None else None
    return node if isinstance(node, ast.FunctionDef | ast.ClassDef) else None


def place_of_definition(module: str, name: str) -> tuple[str, str] | None:
    """Return the module of Reigen's that defines a name of a module, and the name there; None: there is none."""
    for _ in range(20):
        binding = _bindings(module).get(name) if find_module(module) else None
        if binding is None or (binding.module and binding.name is None):
            return None
        if not binding.module:
            return module, name
        module, name = binding.module, str(binding.name)
    return None


def call_parameters(module: str, name: str) -> CallParameters | None:
    """Return the parameters of a function, or of a class that has a constructor of its own; None: unknown."""
    node = definition(module, name)
    if isinstance(node, ast.ClassDef):
        node = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    if not isinstance(node, ast.FunctionDef):
        return None
    arguments = node.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return CallParameters(frozenset(names) - {"self"}, arguments.kwarg is not None)


def counterpart(module: str, name: str | None = None) -> str | None:
    """Return the module of Reigen's in whose place a module of Horovod's stands, for one name of it or as a whole.

    None: there is none outside of ``--as-horovod``, or it is none that scripts should import.
    """
    if module in {"horovod", "horovod.runner"}:
        return "reigen" if name in {None, "run", "__version__"} else None
    parts = module.split(".")[1:]
    same = ".".join(["reigen", *parts])
    if name is None:
        return same if parts[0] in _PUBLIC and find_module(same) else None
    candidates = [same, *(".".join(["reigen", *parts[:end]]) for end in range(len(parts) - 1, 0, -1))]
    candidates += ["reigen.errors", "reigen.elastic"]
    target = definition(module, name)
    for candidate in candidates:
        if candidate.split(".")[1] not in _PUBLIC or find_module(candidate) is None:
            continue
        if name in attribute_names(candidate) and (target is None or definition(candidate, name) is target):
            return candidate
    return None


def changes_framework(module: str) -> bool:
    """Return whether importing a module of Horovod's makes a framework accept more than it does: calls of Keras 2."""
    imports = (each for each in _parse(module).body if isinstance(each, ast.ImportFrom))
    return any(each.module == "reigen.compat" for each in imports)


def read_literal(module: str, name: str) -> object:
    """Return the value of a constant of a module that cannot be imported without its framework.

    Raises:
        LookupError: there is no such constant.
    """
    for statement in _parse(module).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
            value: object = ast.literal_eval(statement.value)
            return value
    raise LookupError(f"{module} has no constant {name}")


@cache
def _parse(module: str) -> ast.Module:
    path = find_module(module)
    if path is None:
        raise LookupError(f"no module {module}")
    return ast.parse(path.read_text(encoding="utf-8"))


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements of a module, those under conditions too."""
    for statement in body:
        yield statement
        for inner in ("body", "handlers", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.ExceptHandler):
                yield from _statements(getattr(statement, inner, []))


@cache
def _bindings(module: str) -> Mapping[str, _Binding]:
    found: dict[str, _Binding] = {}
    for statement in _statements(_parse(module).body):
        match statement:
            case ast.FunctionDef(name) | ast.ClassDef(name):
                found[name] = _Binding(statement)
            case ast.Assign(targets):
                found |= {each.id: _Binding(statement) for each in targets if isinstance(each, ast.Name)}
            case ast.AnnAssign(ast.Name(name)):
                found[name] = _Binding(statement)
            case ast.Import(aliases):
                for each in aliases:
                    found[each.asname or each.name.partition(".")[0]] = _Binding(statement, each.name)
            case ast.ImportFrom(_, aliases):
                found |= _imported(statement, aliases, module)
    return found


def _imported(statement: ast.ImportFrom, aliases: list[ast.alias], module: str) -> dict[str, _Binding]:
    source = _source(statement, module)
    found: dict[str, _Binding] = {}
    for alias in aliases:
        if alias.name == "*":
            names = star_names(source) if find_module(source) else frozenset()
            found |= {name: _Binding(statement, source, name) for name in names}
        elif find_module(f"{source}.{alias.name}"):
            found[alias.asname or alias.name] = _Binding(statement, f"{source}.{alias.name}")
        else:
            found[alias.asname or alias.name] = _Binding(statement, source, alias.name)
    return found


def _source(statement: ast.ImportFrom, module: str) -> str:
    if not statement.level:
        return str(statement.module)
    path = find_module(module)
    is_package = path is not None and path.stem == "__init__"
    parts = module.split(".")
    base = parts[: len(parts) - statement.level + is_package]
    return ".".join([*base, *filter(None, [statement.module])])


def _listed(value: ast.expr, module: str) -> Iterator[str]:
    """Yield the names of a list, or of the ``__all__`` of another module."""
    match value:
        case ast.List(items) | ast.Tuple(items):
            yield from (item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str))
        case ast.Attribute(ast.Name(alias), "__all__"):
            binding = _bindings(module).get(alias)
            if binding is not None and find_module(binding.module):
                yield from star_names(binding.module)


def _lazy_names(module: str) -> Iterator[str]:
    """Yield the names that a module loads when they are used: the keys of a table, or those of another module."""
    for statement in _statements(_parse(module).body):
        match statement:
            case ast.Assign([ast.Tuple([ast.Name("__getattr__"), _])], ast.Call(_, arguments)):
                for table in arguments:
                    if isinstance(table, ast.Dict):
                        yield from (str(key.value) for key in table.keys if isinstance(key, ast.Constant))
            case ast.Assign([ast.Name("__getattr__")], ast.Attribute(ast.Name(alias))):
                binding = _bindings(module).get(alias)
                if binding is not None and find_module(binding.module):
                    yield from _lazy_names(binding.module)
            case ast.ImportFrom(_, aliases) if any(alias.asname == "__getattr__" for alias in aliases):
                yield from star_names(module)
