"""`reigen run` on several hosts: real agents, and in the place of ssh a script that runs them on this machine."""

import stat

import pytest
from tests.multiprocess.launcher import python, run

#: Runs what it is given as sshd does: by a shell, in the home directory. $FAKE_SSH_DOES is run first.
FAKE_SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
export SSH_CONNECTION="127.0.0.1 50000 127.0.0.1 22" FAKE_HOST="$2"
cd
eval "$FAKE_SSH_DOES"
exec sh -c "$3"
"""
WHERE = "print(rank, os.environ['FAKE_HOST'] if 'FAKE_HOST' in os.environ else 'here', flush=True); "


@pytest.fixture
def ssh(tmp_path):
    script = tmp_path / "ssh"
    script.write_text(FAKE_SSH)
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return ("--ssh-command", str(script))


HOSTS = ("-H", "localhost:1,a.invalid:2,b.invalid:1", "-np", "4")


def test_ranks_run_on_their_hosts_and_the_output_comes_home(ssh):
    code = python(WHERE + "sys.stderr.write(f'{rank} says so\\n')")
    status, out, err = run(*HOSTS, *ssh, *code)
    assert status == 0
    assert sorted(out.splitlines()) == ["[0] 0 here", "[1] 1 a.invalid", "[2] 2 a.invalid", "[3] 3 b.invalid"]
    assert sorted(err.splitlines()) == [f"[{rank}] {rank} says so" for rank in range(4)]
