"""The directory by which servers move, of launchers that live and of those that were killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from reigen.launch.elastic import server_controls
from reigen.launch.elastic.server_controls import ServerControls
from reigen.launch.local_plan import ProcessSpec
from reigen.launch.ps_processes import PsProcess, PsRole

_LAUNCHER = """
import sys
from pathlib import Path
from reigen.launch.elastic import server_controls
server_controls._SHARED_MEMORY = Path(sys.argv[1])
print(server_controls._HandoverDirectory().path, flush=True)
input()
"""


def attach(controls: ServerControls, process: int) -> ProcessSpec:
    spec = ProcessSpec(None, (), {}, ps_process=PsProcess(process, PsRole.SERVER, process))
    return controls.attach(spec)


def test_the_directory_of_a_launcher_that_was_killed_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_controls, "_SHARED_MEMORY", tmp_path)
    (tmp_path / "reigen-handover-file").write_text("no directory")
    (tmp_path / "reigen-handover-link").symlink_to(tmp_path)
    command = [sys.executable, "-c", _LAUNCHER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        left = Path(other.stdout.readline().strip())
        (left / "store").write_text("values")
        controls = ServerControls({})
        own = Path(attach(controls, 0).environ["REIGEN_KV_HANDOVER_DIR"])
        assert own.parent == tmp_path
        assert own.stat().st_mode & 0o777 == 0o700
        assert left.exists(), "its launcher lives"
        other.kill()
    controls.close()
    assert not own.exists()
    assert left.exists()
    attach(controls, 0)
    assert not left.exists()
    controls.close()
    controls.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["reigen-handover-file", "reigen-handover-link"]


def test_servers_that_keep_snapshots_need_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_controls, "_SHARED_MEMORY", tmp_path)
    controls = ServerControls({"REIGEN_KV_SNAPSHOT_DIR": str(tmp_path)})
    assert "REIGEN_KV_HANDOVER_DIR" not in attach(controls, 0).environ
    controls.close()
    assert not list(tmp_path.iterdir())
