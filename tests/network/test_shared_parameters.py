"""Parameters that exist once a host, on machines that share nothing: the bits of one process with plain torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.multiprocess import sharing_script as script
from tests.network.conftest import MakeHosts
from tests.network.test_ssh import on

pytestmark = pytest.mark.slow
SCRIPT = (sys.executable, str(Path(script.__file__)))


@pytest.mark.parametrize(
    ("hosts", "owned"),
    [
        ("h1:2,h2:2", [[0.5, 0.5], [0.5, 0.5]]),
        # One rank of a host that has more of them than the smallest has no counterpart there: it has nothing to update.
        ("h1:2,h2:1", [[1.0, 0.0], [1.0]]),
    ],
)
def test_every_host_has_one_copy(make_hosts: MakeHosts, hosts: str, owned: list[list[float]]) -> None:
    size = sum(map(len, owned))
    code, out, err = on(make_hosts(2, ssh_port=22), "-np", size, "-H", hosts, "--no-prefix", *SCRIPT).finish()
    assert code == 0, out + err
    lines = sorted(json.loads(line) for line in out.splitlines())
    assert [line[:3] for line in lines] == [[rank, size, 2] for rank in range(size)]
    assert {line[4] for line in lines} == {script.truth()}
    numel = sum(parameter.numel() for parameter in script.make_model().parameters())
    parts = [part for of_host in owned for part in of_host]
    for line, part in zip(lines, parts, strict=True):
        assert abs(line[3] / numel - part) < 0.1, lines
