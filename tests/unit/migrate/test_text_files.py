"""Files that are read and replaced: encodings, ends of lines, permissions, links, and what cannot be."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from reigen.errors import ConfigError
from reigen.migrate import text_files
from reigen.migrate.text_files import Edit, Lines, apply_edits, find_files, read_text, replace_text, unified_diff


def test_edits_are_applied_in_the_order_of_the_text_and_equal_ones_once() -> None:
    edits = [Edit(4, 7, "two"), Edit(0, 3, "one"), Edit(4, 7, "two"), Edit(3, 3, "!"), Edit(3, 3, "?")]

    assert apply_edits("abc def", edits) == "one!? two"


def test_columns_of_ast_are_bytes() -> None:
    lines = Lines("x = 1\r\ny = 'é', z\r\n")

    assert lines.text[lines.offset(2, 10) :] == "z\r\n"
    assert lines.number(lines.offset(2, 10)) == 2
    assert lines.line_end == "\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbfimport horovod.torch as hvd\r\nx = '\xc3\xa9'\r\n",
        b"# -*- coding: latin-1 -*-\nimport horovod.torch as hvd\nx = '\xe9'\n",
        b"import horovod.torch as hvd",
    ],
)
def test_encoding_mark_and_ends_of_lines_stay(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(data)
    path.chmod(0o751)
    file = read_text(path)

    replace_text(file, file.text.replace("horovod", "reigen"))

    assert path.read_bytes() == data.replace(b"horovod", b"reigen")
    assert stat.S_IMODE(path.stat().st_mode) == 0o751
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"x = '\xe9'\n", "not UTF-8, and in no encoding that it declares"),
        (b"# coding: klingon\n", "declares: unknown encoding: klingon"),
        (b"#" * (text_files.MAX_BYTES + 1), "4 MiB, more than the 4"),
    ],
)
def test_files_that_are_no_text(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(data)

    with pytest.raises(ConfigError, match=message):
        read_text(path)


def test_a_file_that_may_not_be_written_or_has_changed_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("a\n")
    file = read_text(path)
    path.chmod(0o444)
    with pytest.raises(ConfigError, match="read-only"):
        replace_text(file, "b\n")
    path.chmod(0o644)
    path.write_text("c\n")
    with pytest.raises(ConfigError, match="has changed since it was read"):
        replace_text(file, "b\n")

    assert path.read_text() == "c\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "real.py", tmp_path / "link.py"
    target.write_text("a\n")
    link.symlink_to(target)

    replace_text(read_text(link), "b\n")

    assert link.is_symlink()
    assert target.read_text() == "b\n"


def test_a_tree_with_loops_is_walked_once(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "pyvenv.cfg").touch()
    for name in ("src/train.py", ".git/hook.py", "env/lib.py", "src/notes.txt", "src/job.sh", "src/Dockerfile"):
        (tmp_path / name).write_text("x\n")
    (tmp_path / "src" / "loop").symlink_to(tmp_path)
    (tmp_path / "src" / "self.py").symlink_to(tmp_path / "src" / "self.py")
    (tmp_path / "src" / "again.py").symlink_to(tmp_path / "src" / "train.py")
    os.mkfifo(tmp_path / "src" / "pipe.py")

    found = [path.relative_to(tmp_path).as_posix() for path in find_files([tmp_path, tmp_path / "src"])]

    assert found == ["src/Dockerfile", "src/again.py", "src/job.sh"]  # again.py is train.py
    with pytest.raises(ConfigError, match="nothing: No such file"):
        list(find_files([tmp_path / "nothing"]))


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize(("old", "new"), [("a\nb", "a\nc\nd"), ("a\r\nb\r\n", "a\r\nc\r\n"), ("a\x0cb\n", "b\x0ca\n")])
def test_git_applies_the_diff(tmp_path: Path, old: str, new: str) -> None:
    (tmp_path / "x.py").write_text(old, newline="")

    diff = unified_diff(Path("./x.py"), old, new)
    subprocess.run(["git", "apply", "-"], input=diff.encode(), cwd=tmp_path, check=True, timeout=60)

    assert (tmp_path / "x.py").read_bytes().decode() == new
