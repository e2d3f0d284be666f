"""Findings about a file of torch.distributed, as they are collected."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from reigen.migrate.findings import LineFinding
from reigen.migrate.syntax import NameUse, PythonSource
from reigen.migrate.text_files import Edit

#: Classes and functions that start processes, some of which may be those that train.
PROCESSES = {
    "concurrent.futures.ProcessPoolExecutor",
    "torch.multiprocessing.start_processes",
    *(
        f"{module}.{name}"
        for module in ("multiprocessing", "torch.multiprocessing")
        for name in ("Pool", "Process", "get_context")
    ),
}
_BY_TORCHRUN_ENV = "it runs unchanged by `reigen run --torchrun-env`, and torch averages"
_BY_ITSELF = "it starts its processes by itself, as before, and torch averages"
#: About variables of torchrun's, in scripts that `reigen run` starts, and in others.
BY_TORCHRUN_ENV = "works as it is, by `reigen run --torchrun-env`, which sets it"
_AS_BEFORE = "works as before, for the script starts its processes by itself"


@dataclass(slots=True)
class TorchFindings:
    """Findings about one file that uses torch.distributed.

    Attributes:
        findings: as they are if the file is converted.
        starts: it calls init_process_group, or mp.spawn.
        used: anything of torch.distributed is used.
        stays: words for what happens if nothing is changed.
        of_group: findings that block where files that belong together call init_process_group: of processes that are
            started, and of passes.
        of_models: findings that block where another file of the same program has a model and an optimizer, too.
    """

    findings: list[LineFinding] = field(default_factory=list)
    starts: bool = False
    used: bool = False
    stays: str = _BY_TORCHRUN_ENV
    of_group: list[LineFinding] = field(default_factory=list)
    of_models: list[LineFinding] = field(default_factory=list)

    @property
    def blocking(self) -> list[LineFinding]:
        """Findings without which the file could be converted."""
        return [finding for finding in self.findings if finding.blocks]

    def unconverted(self, reason: str) -> list[LineFinding]:
        """Return the findings of a file that stays torch's, because of something else."""
        message = f"not converted ({reason}): {self.stays}"
        blocked = {each.line for each in self.blocking}
        return [
            self._unconverted_line(each, message)
            for each in self.findings
            if not each.of_conversion and not (each.edits and each.line in blocked)
        ]

    def _unconverted_line(self, finding: LineFinding, message: str) -> LineFinding:
        if finding.edits:
            return LineFinding(finding.line, "works", finding.subject, message)
        if finding.message == BY_TORCHRUN_ENV and self.stays == _BY_ITSELF:
            return LineFinding(finding.line, "works", finding.subject, _AS_BEFORE)
        return finding


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield names that a module uses or defines."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(name) | ast.arg(name) | ast.FunctionDef(name) | ast.ClassDef(name):
                yield name


class TorchRecord:
    """Findings of one file, and what rules need to make them.

    Attributes:
        hvd: the name of reigen.torch in this file.
        imports_reigen: it has that name already.
        replaced: nodes of the syntax tree that edits take away.
    """

    def __init__(self, source: PythonSource) -> None:
        self.source = source
        spawns = any(use.dotted in {"torch.multiprocessing.spawn", *PROCESSES} for use in source.uses)
        self.found = TorchFindings(stays=_BY_ITSELF if spawns else _BY_TORCHRUN_ENV)
        bound = {each.bound for each in source.imports} | set(_names(source.tree))
        ours = (each for each in source.imports if each.dotted == "reigen.torch")
        mine = [each.bound for each in ours if each.statement in source.tree.body]
        self.imports_reigen = bool(mine)
        self.hvd = mine[0] if mine else "hvd" if "hvd" not in bound else "reigen_hvd"
        self.replaced: set[ast.AST] = set()

    def change(self, node: ast.expr | ast.stmt, message: str, *edits: Edit, subject: str = "") -> None:
        """Add a finding with edits; its subject, where one is given, is a line that comes."""
        self.found.used = True
        found = subject or self._subject(node)
        self.found.findings.append(
            LineFinding(node.lineno, "change", found, message, tuple(edits), of_conversion=bool(subject))
        )

    def block(self, node: ast.expr | ast.stmt, message: str, *, cannot: bool = False) -> None:
        """Add a finding without an edit, because of which the file is not converted."""
        self.found.used = True
        self.found.findings.append(self._blocking(node, message, cannot=cannot))

    def launch(self, node: ast.expr | ast.stmt) -> None:
        """Add a finding about a process that is started, perhaps one of those that train."""
        message = "`reigen run -np N` starts the processes: call the function itself, with hvd.rank()"
        self.block_with_others(node, message)

    def block_with_others(self, node: ast.expr | ast.stmt, message: str) -> None:
        """Add a finding that blocks where the file belongs to others that use torch.distributed."""
        self.found.of_group.append(self._blocking(node, message, cannot=False))

    def block_with_models(self, node: ast.expr | ast.stmt, message: str) -> None:
        """Add a finding that blocks where another file of the program has a model with an optimizer of its own."""
        self.found.of_models.append(self._blocking(node, message, cannot=False))

    def _blocking(self, node: ast.expr | ast.stmt, message: str, *, cannot: bool) -> LineFinding:
        text = (
            f"{message}. The script stays torch's: {self.found.stays}"
            if cannot
            else f"by hand: {message}. Until then {self.found.stays}"
        )
        return LineFinding(node.lineno, "cannot" if cannot else "change", self._subject(node), text, blocks=True)

    def remark(self, node: ast.expr | ast.stmt, message: str, *, of_conversion: bool = False) -> None:
        """Add a finding about what works as it is."""
        finding = LineFinding(node.lineno, "works", self._subject(node), message, of_conversion=of_conversion)
        self.found.findings.append(finding)

    def _subject(self, node: ast.expr | ast.stmt) -> str:
        text = " ".join(self.source.text(node).split())
        return text if len(text) <= 60 else f"{text[:57]}..."

    def call(self, use: NameUse) -> ast.Call | None:
        """Return the call of a function that was found; None: it is used in another way."""
        parent = self.source.parents.get(use.node)
        return parent if isinstance(parent, ast.Call) and parent.func is use.node else None

    def is_statement(self, call: ast.Call) -> bool:
        """Return whether nothing is done with a call's result."""
        return isinstance(self.source.parents.get(call), ast.Expr)

    def arguments(self, call: ast.Call, *names: str) -> dict[str, ast.expr] | None:
        """Return a call's arguments by name; None: there are others, or * and **."""
        if len(call.args) > len(names) or any(isinstance(each, ast.Starred) for each in call.args):
            return None
        found = dict(zip(names, call.args, strict=False))
        for keyword in call.keywords:
            if keyword.arg is None or keyword.arg not in names:
                return None
            found[keyword.arg] = keyword.value
        return found

    def rewrite(self, node: ast.expr | ast.stmt, *parts: str | ast.expr) -> list[Edit]:
        """Return edits that put texts and inner expressions in a node's place; these keep the edits within them.

        The expressions must be in the order of the source.
        """
        position, end = self.source.range(node)
        kept = [part for part in parts if isinstance(part, ast.expr)]
        self.replaced |= set(ast.walk(node)) - {each for part in kept for each in ast.walk(part)}
        edits, text = [], ""
        for part in parts:
            if isinstance(part, str):
                text += part
                continue
            start, stop = self.source.range(part)
            edits.append(Edit(position, start, text))
            position, text = stop, ""
        return [*edits, Edit(position, end, text)]

    def new_line(self, statement: ast.stmt) -> str:
        """Return the end of a line and the indentation of a statement."""
        return self.source.lines.line_end + self.source.lines.indentation(statement.lineno)
