"""Verdicts of self-tests: when one runs, what is kept of it, and what is not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from reigen.api import self_tests
from reigen.api.self_tests import SelfTest

PROGRAM = """
import os, sys
with open(os.environ["RUNS"], "a") as file:
    file.write("x")
print("first", file=sys.stderr)
print(os.environ.get("REASON", ""), file=sys.stderr)
sys.exit(int(os.environ["CODE"]))
"""


@pytest.fixture
def make_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A program that counts its runs, and ends with a code."""
    (tmp_path / "program_of_self_test.py").write_text(PROGRAM)
    library = tmp_path / "library.so"
    library.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(code: int = 0, version: str = "9.9") -> SelfTest:
        environment = (("RUNS", str(tmp_path / "runs")), ("CODE", str(code)))
        return SelfTest("Runtime", version, library, "program_of_self_test", ("1.0",), environment)

    self_tests._remembered_verdict.cache_clear()
    return make


def num_runs(test: SelfTest) -> int:
    path = Path(dict(test.environment)["RUNS"])
    return len(path.read_text()) if path.exists() else 0


def test_a_known_version_needs_none(make_test, monkeypatch) -> None:
    monkeypatch.setattr(self_tests, "_TESTED_ARCHITECTURES", (self_tests.platform.machine(),))
    test = make_test(1, "1.0")
    assert test.judge() is None
    assert num_runs(test) == 0
    monkeypatch.setattr(self_tests, "_TESTED_ARCHITECTURES", ())
    assert test.judge() is not None


@pytest.mark.parametrize("code", [0, 3])
def test_the_verdict_is_kept_for_the_build(make_test, code) -> None:
    test = make_test(code)
    found = []
    for _ in range(2):
        self_tests._remembered_verdict.cache_clear()  # as another process
        found.append(test.judge())
    assert found == [None if code == 0 else "the self-test with Runtime 9.9 ended with exit code 3: first"] * 2
    assert num_runs(test) == 1

    test.library.write_text("another build")
    self_tests._remembered_verdict.cache_clear()
    assert test.judge() == found[0]
    assert num_runs(test) == 2


def test_one_that_does_not_end_is_run_again(make_test, monkeypatch) -> None:
    def never(*args: object, **options: object) -> None:
        raise subprocess.TimeoutExpired("it", 120.0)

    test = make_test()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", never)
        assert "did not end" in (test.judge() or "")
    self_tests._remembered_verdict.cache_clear()
    assert test.judge() is None
    assert num_runs(test) == 1


def test_a_damaged_verdict_is_made_anew(make_test) -> None:
    test = make_test()
    test.verdict_path.parent.mkdir(parents=True)
    test.verdict_path.write_text("{")
    assert test.judge() is None
    assert test.verdict_path.read_text() == '"ok"'


def test_without_the_library_nothing_is_kept(make_test) -> None:
    test = make_test()
    test.library.unlink()
    for _ in range(2):
        self_tests._remembered_verdict.cache_clear()
        assert test.judge() is None
    assert num_runs(test) == 2


def test_the_last_line_of_a_self_test_is_its_reason(make_test, monkeypatch) -> None:
    monkeypatch.setenv("REASON", "no handler is taken" + "." * 1000)
    verdict = make_test(1).judge()
    assert verdict is not None
    assert "exit code 1: no handler is taken..." in verdict
    assert len(verdict) < 400
