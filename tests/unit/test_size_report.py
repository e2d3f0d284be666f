"""The size report counts what it says and fails only beyond the hard limits."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools import size_report


def function(num_statements: int, *, docstring_lines: int = 0) -> str:
    docstring = '    """' + "\n".join(["text"] * docstring_lines) + '"""\n' if docstring_lines else ""
    return "def f(a, b):\n" + docstring + "    a = b\n" * num_statements


@pytest.mark.parametrize(
    ("text", "findings", "code"),
    [
        (function(34), [], 0),
        (function(34, docstring_lines=50), [], 0),
        (function(35), ["large: {path}:1 f(): 36 lines"], 0),
        (function(70), ["TOO LARGE: {path}:1 f(): 71 lines"], 1),
        ("x = 1\n" * 500, [], 0),
        ("x = 1\n" * 501, ["large: {path}: 501 lines"], 0),
        ("class C:\n" + "    def f(self): ...\n" * 31, ["large: {path}:1 C: 31 methods"], 0),
        ("class C:\n" + "    def f(self): ...\n" * 46, ["TOO LARGE: {path}:1 C: 46 methods"], 1),
        ("def f(a, b, c, d, e, f, g, *, h): ...\n", ["large: {path}:1 f(): 8 parameters"], 0),
        ("class C:\n    def f(self, a, b, c, d, e, f, *g, h): ...\n", [], 0),
    ],
)
def test_findings(
    text: str,
    findings: list[str],
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "room" / "module.py"
    path.parent.mkdir()
    path.write_text(text)
    assert size_report.main([str(tmp_path)]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [str(text.count("\n")), "room"]
    assert lines[2:] == [finding.format(path=path) for finding in findings]


def test_parameters_without_self() -> None:
    [node] = ast.parse("async def f(self, a, /, b, *c, d, **e): ...").body
    assert size_report.num_parameters(node) == 3
