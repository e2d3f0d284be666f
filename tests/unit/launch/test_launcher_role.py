"""Whom an agent obeys, and what it keeps without a launcher."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from reigen.errors import ConfigError, LaunchError
from reigen.launch import job_directory
from reigen.launch.agent.launcher_role import LauncherRole, RoleState
from reigen.launch.agent.unattended import UnattendedHost, read_results
from reigen.launch.job_directory import JobFile, has_launcher, list_jobs, read_record
from reigen.launch.job_state import ProcessExited

# -- the role ----------------------------------------------------------------------------------------------------------


def test_without_the_option_the_loss_of_the_launcher_is_the_end():
    role = LauncherRole()
    assert role.lose(has_processes=True) == (False, "--on-launcher-loss stop")
    assert role.state is RoleState.ENDING


def test_processes_go_on_and_later_launchers_take_over():
    role = LauncherRole(1)
    role.continues = True
    assert role.lose(has_processes=True)[0]
    assert role.state is RoleState.ORPHANED
    assert role.claim(2)[0]
    assert (role.state, role.generation) == (RoleState.HERE, 2)
    assert role.claim(5)[0]  # the one before it is still there, and is obeyed no more
    for older in (5, 4, 1, 0):
        obeys, reason = role.claim(older)
        assert not obeys
        assert "launcher 5" in reason
    assert role.generation == 5


def test_nothing_is_left_to_go_on():
    role = LauncherRole(1)
    role.continues = True
    assert role.lose(has_processes=False) == (False, "nothing runs here")
    assert not role.claim(2)[0]


# -- output and ends ---------------------------------------------------------------------------------------------------


def test_output_is_appended_and_the_ends_are_written(tmp_path: Path):
    output = tmp_path / "output"
    (output / "rank.01").mkdir(parents=True)
    (output / "rank.01" / "stdout").write_bytes(b"before\n")
    host = UnattendedHost(tmp_path / "job", output, 12)
    host.write(1, 0, b"one\n")
    host.close_stream(1, 0)
    host.write(1, 0, b"two\n")
    host.write(1, 1, b"x" * 10_000 + b"\nlast\n")
    host.exits.append(ProcessExited(1, 3, "out of memory"))
    host.close()
    host.write_result(finished=None)
    assert (output / "rank.01" / "stdout").read_bytes() == b"before\none\ntwo\n"
    [result] = read_results(tmp_path / "job")
    [process] = result.processes
    assert (process.slot, process.exit_code, process.cause) == (1, 3, "out of memory")
    assert process.last_words.endswith("\nlast\n")
    assert len(process.last_words) <= 4096
    assert stat.S_IMODE((tmp_path / "job").stat().st_mode) == 0o700


def test_output_that_cannot_be_kept_ends_nothing(tmp_path: Path):
    (tmp_path / "output").write_text("a file")
    host = UnattendedHost(tmp_path, tmp_path / "output", 2)
    host.write(0, 1, b"words")
    assert "cannot be kept" in host.problem
    host.exits.append(ProcessExited(0, 1, ""))
    host.write_result(finished=None)
    assert read_results(tmp_path)[0].processes[0].last_words == "words"


# -- the record --------------------------------------------------------------------------------------------------------


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "reigen" / "jobs"


def test_the_record_is_this_users_alone_and_held_by_one_launcher(jobs: Path):
    file = JobFile.create(("-np", "2", "prog"), {"A": "b"}, b"s" * 32)
    try:
        directory = jobs / file.record.job
        assert stat.S_IMODE((directory / "job").stat().st_mode) == 0o600
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert (b"s" * 32).hex() not in repr(file.record)
        assert has_launcher(directory)
        with pytest.raises(LaunchError, match="has a launcher"):
            JobFile.take_over(file.record.job)
    finally:
        file.close()
    assert not has_launcher(directory)
    assert [record.job for record, _ in list_jobs()] == [file.record.job]
    taken = JobFile.take_over(file.record.job)
    assert taken.record.generation == 2
    assert read_record(directory) == taken.record
    taken.remove()
    taken.close()
    assert list_jobs() == []


def test_a_record_that_others_may_write_is_not_read(jobs: Path):
    file = JobFile.create(("prog",), {}, b"s" * 32)
    file.close()
    path = jobs / file.record.job / "job"
    path.chmod(0o644)
    assert read_record(path.parent) is None
    path.chmod(0o600)
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.chmod(0o600)
    path.unlink()
    path.symlink_to(other)
    assert read_record(path.parent) is None


def test_the_record_of_another_host(jobs: Path, monkeypatch: pytest.MonkeyPatch):
    file = JobFile.create(("prog",), {}, b"s" * 32)
    file.close()
    monkeypatch.setattr(job_directory.socket, "gethostname", lambda: "elsewhere")
    with pytest.raises(LaunchError, match="attach there"):
        JobFile.take_over(file.record.job)


@pytest.mark.parametrize("name", ["../x", "", "a/b", ".."])
def test_names_that_are_no_jobs(jobs: Path, name: str):
    with pytest.raises(ConfigError, match="no name of a job"):
        JobFile.take_over(name)


def test_a_damaged_record_is_none(jobs: Path):
    file = JobFile.create(("prog",), {}, b"s" * 32)
    file.close()
    path = jobs / file.record.job / "job"
    data = path.read_bytes()
    for damaged in (data[: len(data) // 2], b"", msgspec.json.encode({"job": 1}), os.urandom(64)):
        path.write_bytes(damaged)
        assert read_record(path.parent) is None
