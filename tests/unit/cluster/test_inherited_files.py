"""Descriptors that a launcher has passed: they are used only where they are still its files."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from reigen.cluster.inherited_files import describe_inherited, find_inherited
from reigen.errors import ConfigError


def without_proc(_: str) -> str:
    raise FileNotFoundError


def find(text: str) -> int:
    return find_inherited({"REIGEN_LEFT_FD": text}, "REIGEN_LEFT_FD", "the launcher's pipe")


def test_it_is_found_by_its_number_and_file() -> None:
    ends = os.pipe()
    for end in ends:
        assert find(describe_inherited(end)) == end
    memory = os.memfd_create("reigen-roster")
    assert find(describe_inherited(memory)) == memory
    for each in (*ends, memory):
        os.close(each)


@pytest.mark.parametrize("text", ["", "rubbish", "-1", ":1:2"])
def test_there_may_be_none(text: str) -> None:
    assert find(text) == -1
    assert find_inherited({}, "REIGEN_LEFT_FD", "the launcher's pipe") == -1


def test_one_that_is_closed_is_none() -> None:
    described = describe_inherited(closed := os.memfd_create("reigen-roster"))
    os.close(closed)
    assert find(described) == -1


@pytest.mark.parametrize("has_proc", [True, False])
@pytest.mark.parametrize("kind", ["file", "socket", "memory of that name", "pipe"])
def test_another_file_with_its_number_is_refused(
    tmp_path: Path, kind: str, *, has_proc: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script has closed descriptors, and its own files have their numbers."""
    (path := tmp_path / "file").write_bytes(b"text")
    ours, theirs = socket.socketpair()
    reader, writer = os.pipe()
    makers: dict[str, Callable[[], int]] = {
        "file": lambda: os.open(path, os.O_RDWR),
        "socket": lambda: os.dup(ours.fileno()),
        "memory of that name": lambda: os.memfd_create("reigen-roster"),
        "pipe": lambda: os.dup(writer),
    }
    descriptor, passed = makers[kind](), os.memfd_create("reigen-roster")
    described = describe_inherited(passed)
    text = f"{descriptor}:{described.partition(':')[2]}"
    if not has_proc:
        monkeypatch.setattr(os, "readlink", without_proc)
    with pytest.raises(ConfigError, match=f"REIGEN_LEFT_FD={text}: .* not the launcher's pipe, .* must leave descrip"):
        find(text)
    for each in (descriptor, passed, reader, writer):
        os.close(each)
    ours.close()
    theirs.close()
