"""Backward passes and steps: an optimizer that averages has to know how many passes a step is made of."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from reigen.migrate.syntax import PythonSource

#: What to write where a step is made of several passes.
PASSES = "DistributedOptimizer(..., backward_passes_per_step=N) sums N passes up before it averages"
_SEVERAL = f"a step for several passes: {PASSES}"
_IN_A_ROW = f"several passes before a step: one of their sum, (loss + other).backward(), or {PASSES}"
#: How the objects are called whose `step` changes weights.
_OPTIMIZER = re.compile(r"opt|scal", re.IGNORECASE)

#: Takes what is found: the node, and what to do.
Report = Callable[[ast.Call, str], None]


@dataclass(frozen=True, slots=True)
class CountedPasses:
    """Passes of which each step of a file is made: as many as loops say, `for _ in range(N)`.

    Attributes:
        number: N as it is written there.
        loops: them.
        passes: their calls of ``backward``: one in each.
    """

    number: ast.expr
    loops: tuple[ast.For, ...]
    passes: tuple[ast.Call, ...]

    def is_known_at(self, source: PythonSource, place: ast.stmt) -> bool:
        """Return whether the number is bound at a statement, and does not change after it."""
        if isinstance(self.number, ast.Constant):
            return True
        text = ast.unparse(self.number)
        owner = source.owner(text, self.loops[0])
        if owner is not source.owner(text, place) or any(source.owner(text, each) is not owner for each in self.loops):
            return False
        names = (node for node in ast.walk(source.tree) if isinstance(node, ast.Name | ast.Attribute))
        stores = [each for each in names if isinstance(each.ctx, ast.Store) and ast.unparse(each) == text]
        mine = [each for each in stores if source.owner(text, each) is owner]
        is_early = all(each.lineno < place.lineno for each in mine)
        if text.startswith("self."):
            return is_early and len(mine) == 1 and source.scope(mine[0]) is source.scope(place)
        return is_early and (bool(mine) or isinstance(self.number, ast.Attribute))


def find_counted_passes(source: PythonSource) -> CountedPasses | None:
    """Find the number of passes of each step; None: it is not written down as that of a loop, or not for all."""
    passes = list(_calls(source.tree, "backward"))
    loops: list[ast.For] = []
    for call in passes:
        statement = source.statement(call)
        loop = source.parents[statement]
        while isinstance(loop, ast.With):
            loop = source.parents[loop]
        if not isinstance(loop, ast.For) or loop.orelse or not _is_left_at_its_end(source, loop):
            return None
        if any(_calls(loop, "step")) or any(_calls(loop, "zero_grad")):
            return None
        if not any(each.lineno > loop.lineno for each in _steps_in(source, source.scope(loop))):
            return None  # a loop over steps, which are made in a function that it calls
        loops.append(loop)
    numbers = [_range_of(loop) for loop in loops]
    first = numbers[0] if numbers else None
    if first is None or len(set(loops)) != len(loops):
        return None
    if any(each is None or ast.unparse(each) != ast.unparse(first) for each in numbers):
        return None
    return CountedPasses(first, tuple(loops), tuple(passes))


def _range_of(loop: ast.For) -> ast.expr | None:
    """Return N of `for _ in range(N)`, a name, an attribute or a number."""
    call = loop.iter
    is_range = isinstance(call, ast.Call) and ast.unparse(call.func) == "range" and len(call.args) == 1
    number = call.args[0] if is_range and isinstance(call, ast.Call) else None
    return number if isinstance(number, ast.Name | ast.Attribute | ast.Constant) else None


def _is_left_at_its_end(source: PythonSource, loop: ast.For) -> bool:
    return not any(
        isinstance(node, ast.Break | ast.Continue | ast.Return)
        and next((each for each in source.ancestors(node) if isinstance(each, ast.For | ast.While)), loop) is loop
        for node in ast.walk(loop)
    )


def find_several_passes(source: PythonSource, report: Report) -> None:
    """Find steps that are made after several backward passes, or not after each."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            _passes_in_loops(source, node, report)
        if isinstance(node, ast.If):
            _step_of_some_passes(source, node, report)
        for field in ("body", "orelse", "finalbody"):
            if isinstance(statements := getattr(node, field, None), list) and not isinstance(node, ast.With):
                _passes_in_a_row(statements, report)


def method_of(call: ast.Call) -> str:
    """Return the name of the method that is called; empty: a function is."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _step_of_some_passes(source: PythonSource, node: ast.If, report: Report) -> None:
    """Find a step in a branch behind a pass that is made in any case: of a remainder, or of what loops change."""
    steps = [each for each in _calls(node, "step") if "opt" in ast.unparse(each).lower()]
    if not steps or any(_calls(node, "backward")):
        return
    if any(isinstance(each, ast.Mod) for each in ast.walk(node.test)):
        report(steps[0], _SEVERAL)
        return
    in_else = any(step in set(ast.walk(other)) for other in node.orelse for step in steps)
    loop = next((each for each in source.ancestors(node) if isinstance(each, ast.For | ast.While)), None)
    if in_else or loop is None or source.scope(loop) is not source.scope(node):
        return
    test = ast.unparse(node.test)
    passes = [each for each in _calls(loop, "backward") if test not in _conditions(source, each)]
    if passes and not _set_in(loop).isdisjoint(map(ast.unparse, ast.walk(node.test))):
        report(steps[0], _SEVERAL)


def _conditions(source: PythonSource, node: ast.AST) -> set[str]:
    return {ast.unparse(each.test) for each in source.ancestors(node) if isinstance(each, ast.If)}


def _set_in(loop: ast.For | ast.While) -> set[str]:
    """Return the names and attributes that a loop sets."""
    nodes = (each for each in ast.walk(loop) if isinstance(each, ast.Name | ast.Attribute))
    return {ast.unparse(each) for each in nodes if isinstance(each.ctx, ast.Store)}


def _passes_in_a_row(statements: list[ast.stmt], report: Report) -> None:
    """Find passes one after the other, with a step beside them, but none between: what only tests a model has none."""
    num_passes = 0
    for statement in _without_with(statements):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.For | ast.While):
            continue
        if any(_calls(statement, "step")) or any(_calls(statement, "synchronize")):
            num_passes = 0
        elif passes := list(_calls(statement, "backward")):
            num_passes += 1
            if num_passes == 2 and any(any(_calls(each, "step")) for each in statements):
                report(passes[0], _IN_A_ROW)


def _without_with(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, and of ``with`` those within."""
    for each in statements:
        if isinstance(each, ast.With):
            yield from _without_with(each.body)
        else:
            yield each


def _calls(node: ast.AST, method: str) -> Iterator[ast.Call]:
    return (each for each in ast.walk(node) if isinstance(each, ast.Call) and method_of(each) == method)


def _steps_in(source: PythonSource, scope: ast.AST) -> list[ast.Call]:
    """Return the steps that a function or module makes itself, but those of schedulers."""
    return [
        each
        for each in _calls(scope, "step")
        if source.scope(each) is scope and "sched" not in ast.unparse(each).lower()
    ]


def _passes_in_loops(
    source: PythonSource, scope: ast.FunctionDef | ast.AsyncFunctionDef | ast.Module, report: Report
) -> None:
    """Find loops of backward passes behind which a step is made: it stands beside the loop, and not in it."""
    calls = [each for each in ast.walk(scope) if isinstance(each, ast.Call) and source.scope(each) is scope]
    steps = _steps_in(source, scope)
    of_optimizers = {each for each in steps if _OPTIMIZER.search(ast.unparse(each))}  # and not a profiler's
    for call in calls:
        loop = next((each for each in source.ancestors(call) if isinstance(each, ast.For | ast.While)), None)
        if method_of(call) != "backward" or loop is None or source.scope(loop) is not scope:
            continue
        inside = set(ast.walk(loop))
        behind = [each for each in steps if each not in inside and each.lineno > loop.lineno]
        if behind and inside.isdisjoint(of_optimizers):
            report(call, _SEVERAL)
