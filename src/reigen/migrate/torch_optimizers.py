"""Statements that make optimizers: of torch's classes, of classes of others, and by functions that return one."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from functools import cached_property

from reigen.migrate.syntax import Assignment, PythonSource, assigned_target

#: How one optimizer is called, and functions that make one; and what has such a name, and is another thing.
_OPTIMIZER = re.compile(r"optimi[sz]er|(^|[._])(opt|optim)(_?\w)?$", re.IGNORECASE)
_MAKER = re.compile(r"optim|(^|_)opt($|_)", re.IGNORECASE)
_OTHERS = re.compile(r"optimi[sz]ers$|sched|state|conf|cfg|arg|option|param|group|name|class|cls|type", re.IGNORECASE)

Function = ast.FunctionDef | ast.AsyncFunctionDef


class OptimizerStatements:
    """Statements of one file that bind an optimizer to a name or an attribute."""

    def __init__(self, source: PythonSource) -> None:
        self._source = source

    @cached_property
    def statements(self) -> list[tuple[Assignment, set[str]]]:
        """Statements, and the texts of the models of whose parameters each of their optimizers is made."""
        found = []
        for node in ast.walk(self._source.tree):
            target = assigned_target(node)
            if target is not None and isinstance(node, Assignment):
                names = self._models_of(target, node)
                found += [(node, names)] if names is not None else []
        inner = self.makers_called_by({statement for statement, _ in found})
        return [(each, names) for each, names in found if self._source.scope(each) not in inner]

    @cached_property
    def torchs_calls(self) -> list[ast.Call]:
        """Calls of the classes of torch.optim."""
        return [node for node in ast.walk(self._source.tree) if isinstance(node, ast.Call) and self._is_torchs(node)]

    def makers_called_by(self, statements: Collection[Assignment]) -> set[ast.AST]:
        """Return functions of this file that make one optimizer, where all calls of them are in these statements."""
        found: set[ast.AST] = set()
        for name, maker in self._makers.items():
            named = [each for each in ast.walk(self._source.tree) if _last_name(each) == name]
            callers = [self._source.parents.get(each) for each in named]
            if callers and all(call is not None and self._source.parents.get(call) in statements for call in callers):
                found.add(maker)
        return found

    def _models_of(self, target: ast.expr, statement: Assignment) -> set[str] | None:
        """Return the models of an optimizer that a statement makes; None: it makes none."""
        value = statement.value
        calls = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
        found: set[str] = set()
        for call in calls:
            models = self._models_of_call(target, call) if isinstance(call, ast.Call) else None
            if models is None:
                return None
            found |= models
        return found

    def _models_of_call(self, target: ast.expr, call: ast.Call) -> set[str] | None:
        function = ast.unparse(call.func).rpartition(".")[2]
        if function == "DistributedOptimizer":
            return None
        is_named = "opt" in ast.unparse(target).lower()
        inside = [each for each in ast.walk(call) if each is not call]
        inside += [each for name in inside for value in self._assigned(name) for each in ast.walk(value)]
        names = {name for each in inside if isinstance(each, ast.Call) and (name := parameters_of(each))}
        if self._is_torchs(call):
            return names | self._handed_models(inside)
        if maker := self._makers.get(function):
            within = self._models_within(maker, call)
            return names | within | set(_arguments(call)) | _object_of(call)
        is_one = _OPTIMIZER.search(ast.unparse(target)) and not _OTHERS.search(ast.unparse(target))
        if not names and is_one and _MAKER.search(function) and function not in self._functions:
            return set(_arguments(call)) | _object_of(call)
        return names if is_named else None

    def _handed_models(self, inside: list[ast.AST]) -> set[str]:
        """Return arguments of calls whose results torch's optimizer gets: `groups(model, weight_decay)`."""
        calls = (each for each in inside if isinstance(each, ast.Call))
        return {text for call in calls for text in _arguments(call)}

    def _models_within(self, maker: Function, call: ast.Call) -> set[str]:
        """Return the models of whose parameters a function makes an optimizer, and which its caller knows as well."""
        calls = (each for each in ast.walk(maker) if isinstance(each, ast.Call))
        names = {(name, each) for each in calls if (name := parameters_of(each))}
        return {name for name, each in names if self._source.owner(name, each) is self._source.owner(name, call)}

    @cached_property
    def _functions(self) -> dict[str, Function | None]:
        """Functions and methods of this file by name; None: several have it."""
        found: dict[str, Function | None] = {}
        for node in ast.walk(self._source.tree):
            if isinstance(node, Function):
                found[node.name] = None if node.name in found else node
        return found

    @cached_property
    def _makers(self) -> dict[str, Function]:
        """Functions that return one optimizer of torch's, whatever way they take."""
        functions = {name: each for name, each in self._functions.items() if each is not None}
        return {name: each for name, each in functions.items() if self._makes_one(each)}

    def _makes_one(self, function: Function) -> bool:
        nodes = [each for each in ast.walk(function) if self._source.scope(each) is function]
        if any(isinstance(each, ast.Yield | ast.YieldFrom) for each in nodes):
            return False
        returned = [each.value for each in nodes if isinstance(each, ast.Return)]
        made = [each.value for each in nodes if isinstance(each, Assignment)]
        num_inside = sum(value is not None and self._is_torchs(value) for value in [*returned, *made])
        num_calls = sum(each in set(ast.walk(function)) for each in self.torchs_calls)
        return bool(returned) and num_inside == num_calls and all(self._is_one(function, each) for each in returned)

    def _is_one(self, function: Function, value: ast.expr | None) -> bool:
        if isinstance(value, ast.IfExp):
            return self._is_one(function, value.body) and self._is_one(function, value.orelse)
        if isinstance(value, ast.Name):
            values = list(self._assigned_in(function, value))
            return bool(values) and all(self._is_torchs(each) for each in values)
        return value is not None and self._is_torchs(value)

    def _is_torchs(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call):
            return False
        kind = self._source.resolve(node.func) or ""
        is_class = kind.startswith("torch.optim.") and kind.rpartition(".")[2][:1].isupper()
        return is_class and not kind.startswith(("torch.optim.lr_", "torch.optim.swa_"))

    def _assigned(self, name: ast.AST) -> Iterator[ast.expr]:
        """Yield values of a variable in its function, in which parameters may have been chosen or grouped before."""
        return self._assigned_in(self._source.scope(name), name) if isinstance(name, ast.Name) else iter(())

    def _assigned_in(self, scope: ast.AST, name: ast.Name) -> Iterator[ast.expr]:
        for node in ast.walk(scope):
            target = assigned_target(node)
            if isinstance(node, Assignment) and isinstance(target, ast.Name) and target.id == name.id:
                yield from [node.value] if node.value is not None else []
            elif isinstance(node, ast.NamedExpr) and node.target.id == name.id:
                yield node.value


def parameters_of(call: ast.Call) -> str:
    """Return the text of the model whose parameters a call returns; empty: it is another call."""
    is_wanted = isinstance(call.func, ast.Attribute) and call.func.attr in {"parameters", "named_parameters"}
    return ast.unparse(call.func).rpartition(".")[0] if is_wanted else ""


def _arguments(call: ast.Call) -> Iterator[str]:
    """Yield the texts of arguments that are names, or attributes of names."""
    for value in [*call.args, *(each.value for each in call.keywords)]:
        if isinstance(value, ast.Name | ast.Attribute):
            yield ast.unparse(value)


def _object_of(call: ast.Call) -> set[str]:
    """Return the text of the object whose method is called: `model.configure_optimizers(...)`."""
    return {ast.unparse(call.func.value)} if isinstance(call.func, ast.Attribute) else set()


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
