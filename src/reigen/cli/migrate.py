"""`reigen migrate PATH`: what of a project works with Reigen as it is, what to change, and what cannot work."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from reigen._version import __version__
from reigen.cli.run_options import make_parser
from reigen.errors import ConfigError
from reigen.migrate import FileReport, Migration, analyse
from reigen.migrate.commands import NumValues
from reigen.migrate.findings import LineFinding

_EPILOG = """\
Nothing of the project is run. Lines of Python (also in notebooks), shell scripts, batch files, YAML, Dockerfiles and
requirements files are read, and reported as one of:

  works   works unchanged, if `reigen run` gets the option that is named
  change  has to be changed: by the diff, which --apply applies, or manually
  cannot  cannot work; the reason, and what to do instead

Edits of DistributedDataParallel are made for all files of a program or for none. A second --apply changes nothing.

exit code: 0 nothing is left to do, or --check was not given; 1 with --check: something is left; 2 a file could not be
read or written

examples: reigen migrate train.py
          reigen migrate . --apply
          reigen migrate --check --json src scripts
"""


def main(arguments: Sequence[str]) -> int:
    """Print findings and the diff, or apply it; returns the exit code."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    try:
        migration = analyse(chosen.paths, make_num_values())
    except ConfigError as error:
        parser.error(str(error))
    if chosen.apply:
        for file in migration.files:
            file.apply()
    if chosen.json:
        json.dump(_as_json(migration), sys.stdout, indent=1)
        print()
    else:
        for line in _report(migration, with_diff=chosen.diff and not chosen.apply):
            print(line)
    if migration.has_errors:
        return 2
    return 1 if chosen.check and not migration.is_done else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="reigen migrate",
        description="Report for each line of a project that uses Horovod, torch.distributed or MXNet's KVStore whether "
        "it works with Reigen unchanged, has to be changed, or cannot work.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("paths", nargs="+", type=Path, metavar="PATH", help="files, or directories with everything in them")
    add("--apply", action="store_true", help="apply the diff")
    add("--check", action="store_true", help="exit with 1 if anything is left to do, for CI")
    add("--json", action="store_true", help="print one JSON document")
    add("--no-diff", dest="diff", action="store_false", help="do not print the diff")
    return parser


def make_num_values() -> NumValues:
    """Return a function that knows how many values an option of `reigen run` has; None: there is no such option."""
    known: dict[str, int] = {}
    for action in make_parser()._actions:
        number = action.nargs if isinstance(action.nargs, int) else 1 if action.nargs is None else 0
        known |= dict.fromkeys(action.option_strings, number)
    return known.get


def _report(migration: Migration, *, with_diff: bool) -> Iterator[str]:
    for file in migration.files:
        yield f"{file.path}"
        if file.error is not None:
            yield f"  error   {file.error}"
        for places, finding in _grouped(file):
            yield f"  {finding.status:7} {places}: {finding.subject}"
            yield f"          {finding.message}"
        yield ""
    if with_diff:
        yield from (file.diff for file in migration.files if file.diff)
    yield from _summary(migration)


def _grouped(file: FileReport) -> Iterator[tuple[str, LineFinding]]:
    """Yield findings with their lines; equal ones of several lines come once."""
    groups: dict[tuple[str, str, str], list[LineFinding]] = {}
    for finding in file.findings:
        groups.setdefault((finding.status, finding.subject, finding.message), []).append(finding)
    for members in groups.values():
        lines = [file.place(finding) for finding in members]
        places = [str(line) if cell is None else f"cell {cell} line {line}" for cell, line in dict.fromkeys(lines)]
        shown = ", ".join(places[:8]) + (f" and {len(places) - 8} more" if len(places) > 8 else "")
        yield (
            f"line{'s' if len(places) > 1 and lines[0][0] is None else ''} {shown}".replace("line cell", "cell"),
            members[0],
        )


def _summary(migration: Migration) -> Iterator[str]:
    works, change, cannot = (migration.count(status) for status in ("works", "change", "cannot"))
    automatic = sum(bool(each.edits) for file in migration.files for each in file.findings)
    by_hand = sum(each.status == "change" and not each.edits for file in migration.files for each in file.findings)
    if not migration.files:
        yield "nothing of Horovod, torch.distributed or MXNet's KVStore was found"
        return
    yield f"lines: {works} work as they are, {change} to be changed, {cannot} cannot work"
    applied = [file for file in migration.files if file.applied]
    if applied:
        yield f"changed: {', '.join(str(file.path) for file in applied)}"
    elif automatic:
        yield "`reigen migrate --apply` makes the changes of the diff"
    if by_hand:
        yield f"changes to be made by hand: {by_hand}"
    for option in ("--as-horovod", "--as-mxnet", "--torchrun-env"):
        if files := [file.path.name for file in migration.files if option in file.options]:
            yield f"`reigen run {option}` is needed for {', '.join(files)}"
    errors = sum(file.error is not None for file in migration.files)
    if errors:
        yield f"{errors} files could not be read or changed"


def _as_json(migration: Migration) -> dict[str, Any]:
    return {
        "reigen": __version__,
        "counts": {status: migration.count(status) for status in ("works", "change", "cannot")},
        "done": migration.is_done,
        "files": [
            {
                "path": str(file.path),
                "error": file.error,
                "applied": file.applied,
                "options": file.options,
                "findings": [_finding_as_json(file, each) for each in file.findings],
                "diff": file.diff,
            }
            for file in migration.files
        ],
    }


def _finding_as_json(file: FileReport, finding: LineFinding) -> dict[str, Any]:
    cell, line = file.place(finding)
    return {
        "line": line,
        **({} if cell is None else {"cell": cell}),
        "status": finding.status,
        "subject": finding.subject,
        "message": finding.message,
        "automatic": bool(finding.edits),
    }
