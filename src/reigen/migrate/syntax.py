"""Python source with positions: what names are imported from where, and which expressions mean them."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from reigen.errors import ConfigError
from reigen.migrate.text_files import Edit, Lines

#: Messages of the parser's about what only Python 2 understands.
_PYTHON_2 = re.compile(
    r"Missing parentheses in call to '(print|exec)'|multiple exception types|leading zeros in decimal"
)
_PYTHON_2_TEXT = re.compile(
    r"^\s*(print\s+['\"\w]|except\s+[\w.]+\s*,\s*\w+\s*:|exec\s+['\"])|<>|\b\d+L\b", re.MULTILINE
)

#: A statement that binds one name or attribute, with an annotation or without.
Assignment = ast.Assign | ast.AnnAssign
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module


@dataclass(frozen=True, slots=True)
class ImportedName:
    """Name that an import statement binds.

    Attributes:
        bound: the name in this file.
        dotted: what it means: ``torch.distributed``.
        statement, alias: where.
        scope: the function in which it is imported, or the module.
    """

    bound: str
    dotted: str
    statement: ast.Import | ast.ImportFrom
    alias: ast.alias
    scope: Scope


@dataclass(frozen=True, slots=True)
class NameUse:
    """Expression that means something imported: a name, or attributes of one, as long as possible."""

    node: ast.Name | ast.Attribute
    dotted: str
    imported: ImportedName


def assigned_target(node: ast.AST) -> ast.expr | None:
    """Return the one name or attribute that a statement binds; None: it binds several, or none, or has no value."""
    if isinstance(node, ast.AnnAssign):
        return node.target if node.value is not None else None
    return node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None


class PythonSource:
    """Source of a module or a notebook, parsed.

    Args:
        text: of the file.
        in_notebook: ``await`` may stand outside of functions.

    Raises:
        ConfigError: it is no Python 3; says where.
    """

    def __init__(self, text: str, *, in_notebook: bool = False) -> None:
        self.lines = Lines(text)
        self.tree = _parse(text, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if in_notebook else 0)
        self.parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
        self.imports = list(self._imports())
        self._locals: dict[Scope, frozenset[str]] = {}
        self.uses = list(self._uses())

    def text(self, node: ast.expr | ast.stmt) -> str:
        """Return the text of a node."""
        return self.lines.text[slice(*self.range(node))]

    def range(self, node: ast.expr | ast.stmt | ast.keyword | ast.alias) -> tuple[int, int]:
        """Return the offsets of a node's begin and end."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.lines.offset(node.lineno, node.col_offset)
        return start, self.lines.offset(node.end_lineno, node.end_col_offset)

    def replace(self, node: ast.expr | ast.stmt | ast.keyword | ast.alias, new: str) -> Edit:
        """Return the edit that puts a text in a node's place."""
        return Edit(*self.range(node), new)

    def insert_after(self, statement: ast.stmt, *lines: str) -> Edit:
        """Return the edit that puts lines behind a statement, with its indentation."""
        assert statement.end_lineno is not None
        content = self.lines.line(statement.end_lineno)
        at = self.lines.starts[statement.end_lineno - 1] + len(content.rstrip("\r\n"))
        indentation, end = self.lines.indentation(statement.lineno), self.lines.line_end
        return Edit(at, at, "".join(f"{end}{indentation}{line}" for line in lines))

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the statement that a node is in."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def is_alone(self, statement: ast.stmt) -> bool:
        """Return whether nothing else stands on the lines of a statement."""
        assert statement.end_lineno is not None
        start, end = self.range(statement)
        before = self.lines.text[self.lines.starts[statement.lineno - 1] : start]
        last = self.lines.line(statement.end_lineno)
        after = last[end - self.lines.starts[statement.end_lineno - 1] :].strip()
        return not before.strip() and (not after or after.startswith("#"))

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that a node is in, the nearest first."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def scope(self, node: ast.AST) -> Scope:
        """Return the function, or the module, that a node is in."""
        return next((each for each in self.ancestors(node) if isinstance(each, Scope)), self.tree)

    def owner(self, text: str, node: ast.AST) -> ast.AST:
        """Return the scope that binds a name, or the first one of a chain of attributes: equal if the object is.

        For ``self`` that is the class, else a function or the module.
        """
        name = text.partition(".")[0]
        if name == "self":
            return next((each for each in self.ancestors(node) if isinstance(each, ast.ClassDef)), self.tree)
        scopes = (each for each in self.ancestors(node) if isinstance(each, Scope))
        return next((each for each in scopes if name in self._local_names(each)), self.tree)

    def resolve(self, node: ast.AST) -> str | None:
        """Return the dotted name of an expression that means something imported; None: it does not."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        imported = self._meaning(node) if isinstance(node, ast.Name) else None
        return None if imported is None else ".".join([imported.dotted, *reversed(parts)])

    def _meaning(self, node: ast.Name) -> ImportedName | None:
        """Return the import that a name stands for: the last one before it, unless a function has another of it."""
        scopes: list[ast.AST] = [node, *self.ancestors(node)]
        found = [each for each in self.imports if each.bound == node.id and each.scope in scopes]
        if not found:
            return None
        for scope in scopes:
            if isinstance(scope, Scope) and not isinstance(scope, ast.Module) and node.id in self._local_names(scope):
                found = [each for each in found if each.scope is scope]
        before = [each for each in found if each.statement.lineno <= node.lineno]
        return before[-1] if before else next(iter(found), None)

    def _local_names(self, scope: Scope) -> frozenset[str]:
        if scope not in self._locals:
            arguments = scope.args if not isinstance(scope, ast.Module) else None
            names = set()
            if arguments is not None:
                every = (
                    *arguments.posonlyargs,
                    *arguments.args,
                    *arguments.kwonlyargs,
                    arguments.vararg,
                    arguments.kwarg,
                )
                names = {each.arg for each in every if each is not None}
            shared: set[str] = set()
            for node in ast.walk(scope):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and self.scope(node) is scope:
                    names.add(node.id)
                elif isinstance(node, ast.Global | ast.Nonlocal):
                    shared |= set(node.names)
            self._locals[scope] = frozenset(names - shared)
        return self._locals[scope]

    def _imports(self) -> Iterator[ImportedName]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    dotted = alias.name if alias.asname else alias.name.partition(".")[0]
                    yield ImportedName(alias.asname or dotted, dotted, node, alias, self.scope(node))
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                for alias in node.names:
                    dotted = f"{node.module}.{alias.name}"
                    yield ImportedName(alias.asname or alias.name, dotted, node, alias, self.scope(node))

    def _uses(self) -> Iterator[NameUse]:
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
                continue
            imported = self._meaning(node)
            if imported is None:
                continue
            outer: ast.Name | ast.Attribute = node
            while isinstance(parent := self.parents.get(outer), ast.Attribute):
                outer = parent
            dotted = self.resolve(outer)
            if dotted is not None:
                yield NameUse(outer, dotted, imported)


def _parse(text: str, flags: int) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes
            tree = compile(text, "<source>", "exec", ast.PyCF_ONLY_AST | flags, dont_inherit=True)
    except SyntaxError as error:
        place = f"line {error.lineno}: {error.msg}"
        if _PYTHON_2.search(str(error.msg)) or _PYTHON_2_TEXT.search(text):
            raise ConfigError(f"Python 2 ({place}): convert it to Python 3 first, by 2to3 or futurize") from None
        raise ConfigError(f"no Python that {_version()} can read: {place}") from None
    except ValueError as error:  # null bytes
        raise ConfigError(f"no Python: {error}") from None
    except (RecursionError, MemoryError):
        raise ConfigError("nested more deeply than Python's parser can read") from None
    assert isinstance(tree, ast.Module)
    return tree


def _version() -> str:
    import platform

    return f"Python {platform.python_version()}"
