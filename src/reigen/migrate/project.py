"""A project as a whole: every file's findings, which scripts belong together, and the text that edits make."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reigen.errors import ConfigError
from reigen.migrate.commands import NumValues, ProjectScripts, find_in_commands, find_in_package_list
from reigen.migrate.findings import LineFinding
from reigen.migrate.horovod import find_in_horovod_script
from reigen.migrate.kvstore import find_in_mxnet_script
from reigen.migrate.lightning import find_in_lightning_script
from reigen.migrate.notebooks import NotebookText
from reigen.migrate.syntax import PythonSource
from reigen.migrate.text_files import (
    PACKAGE_LISTS,
    TextFile,
    apply_edits,
    file_kind,
    find_files,
    read_text,
    replace_text,
    unified_diff,
)
from reigen.migrate.torch_distributed import check_conversion, find_in_torch_script
from reigen.migrate.torch_record import TorchFindings

#: Options of `reigen run` that lines which stay as they are may need.
_OPTIONS = ("--as-horovod", "--as-mxnet", "--torchrun-env")
#: In files without a word of these nothing can be found.
_RELEVANT = re.compile(r"horovod|torch|mxnet|kvstore|WORLD_SIZE", re.IGNORECASE)


@dataclass(slots=True)
class FileReport:
    """File of a project, its findings and its edited text.

    Attributes:
        path: as it was found.
        findings: in the order of lines.
        error: reason for which it could not be read, or not be changed.
        new_text: after all edits; None: there are none.
        applied: it has been replaced.
    """

    path: Path
    findings: list[LineFinding] = field(default_factory=list)
    error: str | None = None
    new_text: str | None = None
    applied: bool = False
    file: TextFile | None = None
    source: PythonSource | None = None
    notebook: NotebookText | None = None
    torch: TorchFindings = field(default_factory=TorchFindings)

    @property
    def diff(self) -> str:
        """Unified diff of the edits; empty: there are none."""
        if self.file is None or self.new_text is None:
            return ""
        return unified_diff(self.path, self.file.text, self.new_text)

    @property
    def options(self) -> list[str]:
        """Options that `reigen run` needs for a program of Python's, as messages about what works name them."""
        if self.source is None:
            return []
        messages = [finding.message for finding in self.findings if finding.status == "works"]
        return [option for option in _OPTIONS if any(option in message for message in messages)]

    def place(self, finding: LineFinding) -> tuple[int | None, int]:
        """Return the cell of a notebook, or None, and the line, of a finding."""
        return (None, finding.line) if self.notebook is None else self.notebook.place(finding.line)

    def apply(self) -> None:
        """Write the new text, if there is one; an error is kept in `error`."""
        if self.file is None or self.new_text is None:
            return
        try:
            replace_text(self.file, self.new_text)
            self.applied = True
        except ConfigError as error:
            self.error = str(error)


@dataclass(frozen=True, slots=True)
class Migration:
    """Findings about a project: a report for each file in which there is something, or that could not be read."""

    files: tuple[FileReport, ...]

    def count(self, status: str) -> int:
        """Return the number of lines that have a status."""
        return len({(id(file), each.line) for file in self.files for each in file.findings if each.status == status})

    @property
    def is_done(self) -> bool:
        """True if nothing is left to change, and all can work."""
        left = [
            finding
            for file in self.files
            for finding in file.findings
            if finding.status == "cannot" or (finding.status == "change" and not (finding.edits and file.applied))
        ]
        return not left

    @property
    def has_errors(self) -> bool:
        """True if a file could not be read or written."""
        return any(file.error is not None for file in self.files)


def analyse(paths: Sequence[Path], num_values: NumValues) -> Migration:
    """Read a project; nothing of it is run, and nothing is written.

    Args:
        paths: files, and directories with all that is in them.
        num_values: knows the options of `reigen run`: the number of values of one, None if there is none.

    Raises:
        ConfigError: a path does not exist.
    """
    reports = [_read(path) for path in find_files(paths)]
    _convert_torch(reports)
    scripts = _scripts(reports)
    for report in reports:
        _add_commands(report, scripts, num_values)
        report.findings.sort(key=lambda each: each.line)
        _edit(report)
    return Migration(tuple(report for report in reports if report.findings or report.error))


def _read(path: Path) -> FileReport:
    report = FileReport(path)
    try:
        report.file = read_text(path)
        kind = file_kind(path)
        if kind == "notebook":
            report.notebook = NotebookText(report.file.text)
            report.source = PythonSource(report.notebook.python, in_notebook=True)
        elif kind == "python" or (kind is None and "python" in report.file.text.partition("\n")[0]):
            report.source = PythonSource(report.file.text)
    except ConfigError as error:
        # a file of Python 2 that has nothing to do with all this does not matter
        if report.file is None or _RELEVANT.search(report.file.text):
            report.error = str(error)
    if report.source is not None:
        for find in (find_in_horovod_script, find_in_mxnet_script, find_in_lightning_script):
            report.findings += find(report.source)
        report.torch = find_in_torch_script(report.source)
        left = check_conversion(report.source, report.torch)
        report.torch.findings += [left] if left is not None else []
    return report


# -- torch.distributed: files that belong together ------------------------------------------------------------------


def _convert_torch(reports: list[FileReport]) -> None:
    """Take over the findings of files with torch.distributed: with edits if all that belong together can have them."""
    users = [report for report in reports if report.torch.used or report.torch.findings or report.torch.of_group]
    imported = {id(report): [*_imported_files(report, reports)] for report in reports} if users else {}
    for group in _groups(users, reports, imported):
        for report in group if any(each.torch.starts for each in group) else ():
            report.torch.findings += report.torch.of_group
            report.torch.used |= bool(report.torch.of_group)
        for report in _with_several_models(group, reports, imported):
            report.torch.findings += report.torch.of_models
        torch = [report for report in group if report.torch.used]
        blocked = [report for report in torch if report.torch.blocking]
        reason = ""
        if blocked:
            first = blocked[0].torch.blocking[0]
            cell, line = blocked[0].place(first)
            reason = f"because of {blocked[0].path}, {'' if cell is None else f'cell {cell} '}line {line}"
        elif torch and not any(report.torch.starts for report in torch):
            reason = "init_process_group is called nowhere here: name all files of the project"
        for report in group:
            report.findings += report.torch.unconverted(reason) if reason else report.torch.findings


def _with_several_models(
    group: list[FileReport], reports: list[FileReport], imported: Mapping[int, list[FileReport]]
) -> Iterator[FileReport]:
    """Yield files that have a model with an optimizer each, and belong to one program: some file imports them all."""
    having = [report for report in group if report.torch.of_models]
    found: set[int] = set()
    for program in reports if len(having) > 1 else ():
        reached: dict[int, FileReport] = {}
        waiting = [program]
        while waiting:
            report = waiting.pop()
            if id(report) not in reached:
                reached[id(report)] = report
                waiting += imported[id(report)]
        mine = {id(report) for report in having} & set(reached)
        found |= mine if len(mine) > 1 else set()
    return (report for report in having if id(report) in found)


def _groups(
    users: list[FileReport], reports: list[FileReport], imported: Mapping[int, list[FileReport]]
) -> Iterator[list[FileReport]]:
    """Yield the files that use torch.distributed, those together that imports connect, through others too."""
    connected: dict[int, set[int]] = {id(report): set() for report in reports}
    by_id = {id(report): report for report in reports}
    for report in reports:
        for other in imported.get(id(report), ()):
            connected[id(report)].add(id(other))
            connected[id(other)].add(id(report))
    seen: set[int] = set()
    wanted = {id(report) for report in users}
    for report in users:
        members, waiting = [], [id(report)]
        while waiting:
            number = waiting.pop()
            if number not in seen:
                seen.add(number)
                members += [by_id[number]] if number in wanted else []
                waiting += connected[number]
        if members:
            yield members


def _imported_files(report: FileReport, reports: list[FileReport]) -> Iterator[FileReport]:
    """Yield the project's files that a file imports, as far as names tell."""
    if report.source is None:
        return
    modules: set[tuple[str, ...]] = set()
    for node in ast.walk(report.source.tree):
        if isinstance(node, ast.Import):
            modules |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = tuple((node.module or "").split(".")) if node.module else ()
            modules |= {base, *((*base, alias.name) for alias in node.names)}
    for other in reports:
        parts = other.path.with_suffix("").parts
        parts = parts[:-1] if parts[-1:] == ("__init__",) else parts
        if other is not report and any(module and parts[-len(module) :] == module for module in modules):
            yield other


# -- commands, edits ------------------------------------------------------------------------------------------------


def _scripts(reports: list[FileReport]) -> ProjectScripts:
    scripts = ProjectScripts()
    for report in reports:
        name = report.path.name
        if report.file is not None and PACKAGE_LISTS.fullmatch(name) and any(find_in_package_list(report.file.text)):
            scripts.package_lists.add(name)
        if report.source is None:
            continue
        if any(each.dotted.startswith("horovod") for each in report.source.imports):
            scripts.horovod.add(name)
        if report.torch.used:
            is_converted = any(each.edits for each in report.torch.findings if each in report.findings)
            (scripts.torch if is_converted else scripts.torch_kept).add(name)
        if any("--torchrun-env" in each.message for each in report.findings if each.status == "works"):
            scripts.reads_torchrun_variables.add(name)
    return scripts


def _add_commands(report: FileReport, scripts: ProjectScripts, num_values: NumValues) -> None:
    if report.file is None:
        return
    if report.notebook is not None:
        report.findings += find_in_commands(report.notebook.commands, scripts, num_values)
    elif report.source is None and report.error is None:
        report.findings += find_in_commands(report.file.text, scripts, num_values)
    if PACKAGE_LISTS.fullmatch(report.path.name):
        report.findings += find_in_package_list(report.file.text)


def _edit(report: FileReport) -> None:
    """Make the new text, and make sure that Python still reads it."""
    edits = [edit for finding in report.findings for edit in finding.edits]
    if report.file is None or not edits:
        return
    try:
        if report.notebook is not None:
            report.new_text = report.notebook.edit(edits)
            PythonSource(NotebookText(report.new_text).python, in_notebook=True)
        else:
            report.new_text = apply_edits(report.file.text, edits)
            if report.source is not None:
                PythonSource(report.new_text)
    except ConfigError as error:
        report.new_text, report.error = None, f"cannot be changed automatically: {error}"
