"""What holds of the whole source: one name for one thing, no circles of modules, words of the field."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import reigen

SOURCE = Path(reigen.__file__).parent
#: The same names in each framework's package, because users write `hvd.Compression`, whatever the framework.
FACES = ("torch", "mxnet", "tensorflow", "keras", "jax", "kv")
#: A summary stands alone, and begins with a verb or a noun of the field.
FORBIDDEN = re.compile(
    r"^(what|who|how|whether|where|why|when|which|that|this|its?|and|but|so|nothing|everything|as|is|are|there|see)\b"
    r"|\b(nobody|somebody|anybody|everybody|whoever|whom|told|none is)\b"
    r"|\bwhat (is|are|was|it|they|a|an|the|there|else|all|this|these|one)\b|(?<!state )\bmachines?\b",
    re.IGNORECASE,
)

#: Words of identifiers that have a term of the field: a `host_id` is no machine, a process set has ranks and no team.
METAPHORS = re.compile(
    r"amid|bells?|blamed?|claimant|commons|everybody|farewell|fruitless|grain|hurried|improvise|inquiry|lacking|lanes?"
    r"|life|lifeline|lots|machines|mail|meanwhile|meeting|nap|newcomer|nobody|owed|owing|patience|remarks|rooms?|rung"
    r"|said|seat|sleeper|sleepless|spared|strangers|talk|teams?|teller|theirs|told|troubled?|undisturbed"
    r"|untimely|vacated|vouched|whereabouts"
)


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text())
    return found


def imported_by(name: str) -> Iterator[str]:
    """The modules of the package that a module imports, for type checkers and within functions, too."""
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom) and node.module in modules():
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in modules() else str(node.module)


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected components of two nodes and more (Tarjan, 1972)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for neighbour in graph[node]:
            if neighbour not in order:
                visit(neighbour)
                lowest[node] = min(lowest[node], lowest[neighbour])
            elif neighbour in stack:
                lowest[node] = min(lowest[node], order[neighbour])
        if lowest[node] == order[node]:
            component = set(stack[stack.index(node) :])
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(component)

    for node in graph:
        if node not in order:
            visit(node)
    return found


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {name: set(imported_by(name)) - {name} for name in modules()}

    assert circles(graph) == []


def test_a_public_class_name_has_one_meaning() -> None:
    defined = defaultdict(set)
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined[node.name].add(name)
    twice = {name: where for name, where in defined.items() if len(where) > 1}
    of_users = {name for name, where in twice.items() if {module.split(".")[1] for module in where} <= set(FACES)}
    callbacks = {"BestModelCheckpoint", "BroadcastGlobalVariablesCallback", "MetricAverageCallback"}
    callbacks |= {"LearningRateScheduleCallback", "LearningRateWarmupCallback"}
    callbacks |= {"CommitStateCallback", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "KerasState", "Job"}
    assert of_users - callbacks == {"Compression", "Compressor", "GradientReducer", "KVStore", "ReduceOptions"}
    assert set(twice) == of_users, {name: sorted(where) for name, where in twice.items() if name not in of_users}


def summaries(tree: ast.Module) -> Iterator[str]:
    """The first paragraphs of a module's docstrings, each in one line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())


def test_forbidden_words_are_found() -> None:
    bad = ("What a rank keeps.", "Whether it waits.", "Return who is told of it.", "See `Backend.split`.")
    assert all(FORBIDDEN.search(text) for text in bad)
    assert not any(FORBIDDEN.search(text) for text in ("Return the rank's host.", "Bounded queue of messages."))


def test_summary_lines_stand_alone_and_use_words_of_the_field() -> None:
    texts = [f"{name}: {text}" for name, tree in modules().items() for text in summaries(tree)]
    assert [text for text in texts if FORBIDDEN.search(text.partition(": ")[2])] == []


def identifiers(tree: ast.Module) -> Iterator[str]:
    """Names that a module defines or uses, attributes and keywords of calls, too."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(name) | ast.Attribute(_, name) | ast.arg(name) | ast.keyword(str(name)):
                yield name
            case ast.FunctionDef(name) | ast.ClassDef(name):
                yield name


def words_of(identifier: str) -> set[str]:
    """The words of a name in snake case or camel case, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)}


def test_words_of_identifiers_are_found() -> None:
    assert words_of("_num_TCPSockets_MAX") == {"num", "tcp", "sockets", "max"}
    assert {*identifiers(ast.parse("def f(a): self.b(c=d)"))} == {"f", "a", "self", "b", "c", "d"}
    assert METAPHORS.fullmatch("team")
    assert not METAPHORS.fullmatch("steam")


def test_identifiers_are_words_of_the_field() -> None:
    used = {(name, found) for name, tree in modules().items() for found in identifiers(tree)}
    assert sorted((name, found) for name, found in used if any(map(METAPHORS.fullmatch, words_of(found)))) == []
