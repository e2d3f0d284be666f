"""Command lines of ssh and rsync, what their failures mean, and the messages that go through them."""

import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reigen._version import __version__
from reigen.errors import ConfigError, WireError
from reigen.launch.agent.agent_protocol import MAX_BANNER_BYTES, GreetingParser, StartRequest, greeting
from reigen.launch.agent.remote_start import find_scripts, format_problems
from reigen.launch.agent.rsync import rsync_command
from reigen.launch.base import AgentCommand, HostProblem
from reigen.launch.hosts import HostAssignment
from reigen.launch.local_plan import JobServices, ProcessOptions
from reigen.launch.ssh.command import SshOptions
from reigen.launch.ssh.launcher import SshAgentStarter


def test_the_command_line_of_an_agent():
    ssh = SshOptions(("ssh", "-F", "my config"), port=2222, identity_file="/k")
    agent = AgentCommand.with_modules_of("/opt/my python", {"PYTHONPATH": "/a b", "SECRET": "s"})
    line = ssh.remote("h2", agent.argv_with_environ)
    assert line[:3] == ["ssh", "-F", "my config"]
    assert line[-3:-1] == ["--", "h2"]
    assert shlex.split(line[-1]) == ["env", "PYTHONPATH=/a b", "/opt/my python", "-P", "-m", "reigen.launch.agent"]
    options = " ".join(line[3:-3])
    assert "BatchMode=yes" in options
    assert "-p 2222 -i /k" in options
    assert "StrictHostKeyChecking" not in options
    assert "SECRET" not in " ".join(line)


def test_relative_directories_mean_the_same_elsewhere():
    agent = AgentCommand.with_modules_of("python", {"PYTHONPATH": "src::/lib"})
    assert agent.argv_with_environ[:2] == ["env", f"PYTHONPATH={Path.cwd() / 'src'}:/lib"]
    assert AgentCommand.with_modules_of("python", {}).argv_with_environ == agent.argv


def test_host_keys_are_checked_unless_the_user_says_otherwise():
    assert "StrictHostKeyChecking=no" in SshOptions(check_host_keys=False).base()


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_ports_that_there_are_not(port):
    with pytest.raises(ConfigError, match="from 1 to 65535"):
        SshOptions(port=port)


@pytest.mark.parametrize(
    ("exit_code", "said", "what"),
    [
        (255, "ssh: Could not resolve hostname h9: Name or service not known", "its name cannot be resolved"),
        (255, "ssh: connect to host h9 port 22: Connection refused", "refuses the connection"),
        (255, "ssh: connect to host h9 port 22: Connection timed out", "does not answer"),
        (255, "ssh: connect to host h9 port 22: No route to host", "cannot be reached"),
        (255, "No ED25519 host key is known for h9 and ...\nHost key verification failed.", "key is not known"),
        (255, "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "not the one"),
        (255, "root@h9: Permission denied (publickey).", "refuses the login"),
        (255, "something new", "ssh failed: something new"),
        (255, "", "ssh failed: it did not say why"),
        (127, "env: '/opt/python': No such file or directory", "there is no /opt/python"),
        (1, "/opt/python: No module named reigen", "Reigen is not installed"),
        (1, "/opt/python: No module named reigen.launch", "another Reigen"),
        (1, "ModuleNotFoundError: No module named 'msgspec'", "a library that Reigen needs"),
        (2, "Unknown option: -P", "older than 3.11"),
        (3, "boom", "exit code 3: boom"),
    ],
)
def test_what_a_failure_means(exit_code, said, what):
    problem = SshAgentStarter(SshOptions(python="/opt/python")).explain_exit("h9", exit_code, said)
    assert problem.host == "h9"
    assert what in problem.what


def test_a_table_of_what_failed():
    text = format_problems([HostProblem("h2", "it is on fire", "run"), HostProblem("host3", "it is wet")], 4)
    assert text.splitlines() == [
        "2 of 4 other hosts cannot take part; nothing was started",
        "  h2     it is on fire",
        "         run",
        "  host3  it is wet",
    ]


def test_the_command_line_of_a_copy():
    words = rsync_command("h2", "my dir", SshOptions(port=2222).base())
    assert words[0] == "rsync"
    assert words[-3:] == ["--", "./", "h2:my dir/"]
    assert "--rsync-path=mkdir -p 'my dir' && rsync" in words
    assert "-p 2222" in words[words.index("-e") + 1]
    assert rsync_command("fd00::2", "/d", SshOptions().base())[-1] == "[fd00::2]:/d/"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["python", __file__], (__file__,)),
        (["/venv/bin/python3.11", "-u", __file__, "--x"], (__file__,)),
        (["python", "-m", __file__], ()),
        (["python", "not-here.py"], ()),
        (["sh", __file__], ()),
    ],
)
def test_which_script_a_command_runs(words, found):
    assert find_scripts(words) == found


def test_what_stands_before_the_greeting_is_noise():
    preface = GreetingParser()
    data = b"Welcome!\n" + greeting() + b"frames"
    assert b"".join(preface.feed(data[at : at + 1]) for at in range(len(data) - 6)) == b""
    assert preface.version == __version__
    assert preface.banner == "Welcome!"


def test_another_version_is_named_before_anything_of_it_is_parsed():
    with pytest.raises(WireError, match=r"Reigen 0\.0\.9 there, "):
        GreetingParser().feed(greeting().replace(__version__.encode(), b"0.0.9"))


@given(st.binary())
def test_garbage_is_no_greeting(data):
    preface = GreetingParser()
    try:
        preface.feed(data)
    except WireError:
        return
    assert preface.version is None


def test_endless_noise_is_refused():
    preface = GreetingParser()
    preface.feed(bytes(MAX_BANNER_BYTES))
    with pytest.raises(WireError, match="something else"):
        preface.feed(b"x")


def test_the_secret_is_not_shown():
    services = JobServices("a:1", b"\xab" * 32, 1)
    start = StartRequest(1, HostAssignment("a", False, ()), ProcessOptions(("true",)), services, {"TOKEN": "mine"}, "")
    assert "xab" not in repr(start)
    assert "mine" not in repr(start)
