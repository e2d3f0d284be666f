"""Prints what has grown: long files, long functions, big classes, many parameters, lines per package.

Fails (exit 1) beyond the hard limits, of functions and classes. A file ends where its subject ends: long ones are
reported, and are a reason to look.

    python tools/size_report.py [directory ...]      # default: src/reigen
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FILE_LINES = 500
FUNCTION_LINES, FUNCTION_LINES_HARD = 35, 70
CLASS_METHODS, CLASS_METHODS_HARD = 30, 45
PARAMETERS = 7

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Finding:
    """One thing that is larger than it should be."""

    place: str
    what: str
    fails: bool


def code_lines(node: FunctionNode) -> int:
    """Lines of a function without its docstring."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def num_parameters(node: FunctionNode) -> int:
    """Parameters that a caller can pass by position or name; self, cls, * and ** do not count."""
    names = [argument.arg for argument in node.args.posonlyargs + node.args.args + node.args.kwonlyargs]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def examine(path: Path) -> Iterator[Finding]:
    """Everything in one file that is too large."""
    text = path.read_text(encoding="utf-8")
    num_lines = text.count("\n")
    if num_lines > FILE_LINES:
        yield Finding(str(path), f"{num_lines} lines", False)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, FunctionNode):
            yield from _examine_function(node, path)
        elif isinstance(node, ast.ClassDef):
            methods = sum(isinstance(item, FunctionNode) for item in node.body)
            if methods > CLASS_METHODS:
                yield Finding(f"{path}:{node.lineno} {node.name}", f"{methods} methods", methods > CLASS_METHODS_HARD)


def _examine_function(node: FunctionNode, path: Path) -> Iterator[Finding]:
    place = f"{path}:{node.lineno} {node.name}()"
    lines = code_lines(node)
    if lines > FUNCTION_LINES:
        yield Finding(place, f"{lines} lines", lines > FUNCTION_LINES_HARD)
    parameters = num_parameters(node)
    if parameters > PARAMETERS:
        yield Finding(place, f"{parameters} parameters", False)


def room_of(path: Path, root: Path) -> str:
    """The package directly below ``root`` that a file belongs to, or the file itself."""
    return path.relative_to(root).parts[0]


def main(arguments: list[str]) -> int:
    """Prints the report.

    Returns:
        0, or 1 where something is beyond a hard limit.
    """
    roots = [Path(argument) for argument in arguments] or [Path("src/reigen")]
    findings: list[Finding] = []
    lines_by_room: Counter[str] = Counter()
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            findings += examine(path)
            lines_by_room[room_of(path, root)] += path.read_text(encoding="utf-8").count("\n")
    for room, lines in lines_by_room.most_common():
        print(f"{lines:6d}  {room}")
    print(f"{lines_by_room.total():6d}  lines in all")
    for finding in findings:
        print(f"{'TOO LARGE' if finding.fails else 'large'}: {finding.place}: {finding.what}")
    return int(any(finding.fails for finding in findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
