"""The channel, payloads, and settings of `run`."""

import fcntl
import inspect
import os
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest

from reigen.errors import ConfigError, LaunchError, SharedMemoryError, UnsupportedTypeError
from reigen.launch import payload
from reigen.launch.hosts import HostInfo
from reigen.launch.job_state import ProcessExited
from reigen.resources import memory
from reigen.resources.memory import AvailableMemory
from reigen.runner import interpreter, run, serialization
from reigen.runner.options import resolve_arguments
from reigen.runner.result_channel import LauncherComplaint, RankReport, ReceivedMessage, ResultChannel

ARGUMENTS = dict.fromkeys(inspect.signature(run).parameters) | {"num_proc": 2, "num_servers": 0}


# ---------------------------------------------------------------- the line


def test_messages_stay_whole_and_in_order():
    ours, theirs = ResultChannel.pair()
    with ours:
        with theirs:
            theirs.post(ProcessExited(3, -9))
            theirs.post(LauncherComplaint("x" * 100_000))
            assert ours.receive() == ReceivedMessage(ProcessExited(3, -9), None)
            assert ours.receive() == ReceivedMessage(LauncherComplaint("x" * 4000), None)
            with pytest.raises(BlockingIOError):
                ours.receive()
        assert ours.receive() is None


def test_a_report_brings_its_payload():
    ours, theirs = ResultChannel.pair()
    sent = serialization.pack_object("hello", "a word")
    with ours, theirs:
        theirs.post(RankReport(0), sent)
        os.close(sent)
        arrival = ours.receive()
    assert arrival.message == RankReport(0)
    assert not os.get_inheritable(arrival.descriptor)
    assert serialization.unpack_object(arrival.descriptor) == "hello"
    os.close(arrival.descriptor)


# ---------------------------------------------------------------- calls


def test_a_function_and_its_arguments():
    assert serialization.check_call(len) == (len, (), {})
    assert serialization.check_call(len, None, None) == (len, (), {})
    assert serialization.check_call(len, [1, 2], {"x": 3}) == (len, (1, 2), {"x": 3})


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (("train.py",), "the function cannot be called: 'train.py'"),
        ((len, 0.1), "args has the function's arguments in a tuple or list, (0.1,), not 0.1"),
        ((len, "h1"), "args has the function's arguments in a tuple or list, ('h1',), not 'h1'"),
        ((len, (), [1]), "kwargs has the function's keyword arguments in a dictionary, not [1]"),
    ],
)
def test_what_is_no_call(call, complaint):
    with pytest.raises(ConfigError) as failed:
        serialization.check_call(*call)
    assert str(failed.value) == complaint


# ---------------------------------------------------------------- payloads


def test_a_payload_is_read_by_many_and_changed_by_nobody():
    sent = serialization.pack_object(lambda x: x + 1, "a function")
    try:
        assert [serialization.unpack_object(sent)(each) for each in range(3)] == [1, 2, 3]
        with pytest.raises(PermissionError):
            os.write(sent, b"x")
        with pytest.raises(PermissionError):
            os.ftruncate(sent, 1)
        assert fcntl.fcntl(sent, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    finally:
        os.close(sent)


def test_arrays_arrive_as_they_were():
    array = np.random.default_rng(1).normal(size=(300, 1000))
    sent = serialization.pack_object({"a": array, "b": array.T}, "arrays")
    got = serialization.unpack_object(sent)
    os.close(sent)
    assert (got["a"] == array).all()
    assert (got["b"] == array.T).all()
    got["a"][0] = 0  # it is the receiver's own


def test_what_cannot_be_sent():
    with pytest.raises(UnsupportedTypeError, match=r"^the thing cannot be sent: TypeError: .*lock"):
        serialization.pack_object(threading.Lock(), "the thing")


def test_a_shortage_of_memory_is_an_error(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: AvailableMemory(17 << 20))
    os.close(serialization.pack_object(np.zeros(10_000), "a small array"))
    words = r"a large array: 2\.\d MiB needed by this process, 17\.0 MiB available, less 16\.0 MiB that are kept free"
    with pytest.raises(SharedMemoryError, match=words):
        serialization.pack_object(np.zeros(1 << 21, np.uint8), "a large array")
    monkeypatch.setattr(memory, "available_memory", [AvailableMemory(17 << 20), AvailableMemory(20 << 20)].pop)
    words = r"two arrays \(3 MiB are there\): 5\.\d MiB needed by this process, 17\.0 MiB available"
    with pytest.raises(SharedMemoryError, match=words):
        serialization.pack_object([np.zeros(3 << 20, np.uint8), np.ones(2 << 20, np.uint8)], "two arrays")


def test_a_shortage_of_memory_for_a_payload_from_another_host_is_an_error(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: AvailableMemory(17 << 20, "within L"))
    incoming = payload.PayloadFile()
    incoming.write(b"x" * 100)
    words = r"a payload of more than 100 bytes: 17\.0 MiB available within L, less 16\.0 MiB that are kept free"
    with pytest.raises(LaunchError, match=words):
        incoming.write(bytes(2 << 20))
    os.close(incoming.descriptor)


class Picky(Exception):
    def __init__(self, one, two):
        super().__init__(one)


def test_exceptions_that_travel_and_those_that_do_not():
    error = ValueError("a", 3)
    error.add_note("n")
    got = serialization.unpickle_exception(serialization.pickle_exception(error))
    assert (type(got), got.args, got.__notes__) == (ValueError, ("a", 3), ["n"])
    assert serialization.unpickle_exception(serialization.pickle_exception(Picky(1, 2))) is None
    assert serialization.pickle_exception(ValueError(threading.Lock())) is None


# ---------------------------------------------------------------- interpreters


def test_a_new_interpreter_finds_what_this_one_finds(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    (tmp_path / "wanted.py").write_text("import sys\ndef main(arguments): print(arguments, sys.argv); return 7")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    for executable in (None, sys.executable):
        command = interpreter.module_command("wanted", ["a", "b c"], executable)
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (7, "['a', 'b c'] ['-c']\n", "")


# ---------------------------------------------------------------- arguments


def test_the_plain_case_warns_of_nothing():
    settings, warning = resolve_arguments(ARGUMENTS)
    here = (HostInfo("localhost", 2),)
    assert msgspec.structs.astuple(settings)[:10] == (2, None, None, False, None, here, None, None, None, "ssh")
    assert warning == ""


def test_what_has_no_effect_is_named_once():
    arguments = ARGUMENTS | {"use_gloo": True, "use_mpi": False, "slots": 2}
    assert resolve_arguments(arguments)[1] == "no effect: use_gloo, slots"


def test_hosts_and_how_they_are_reached(tmp_path):
    (tmp_path / "hosts").write_text("h1 slots=1\nh2:4\n")
    changes = {"hostfile": tmp_path / "hosts", "ssh_port": 2222, "ssh_identity_file": "/key"}
    changes |= {"network_interface": "eth0,eth1", "network_interfaces": ["ib0"]}
    settings, warning = resolve_arguments(ARGUMENTS | changes)
    assert settings.hosts == (HostInfo("h1", 1), HostInfo("h2", 4))
    assert (settings.ssh_port, settings.ssh_identity_file) == (2222, "/key")
    assert (settings.network_interfaces, warning) == ("eth0,eth1,ib0", "")


def test_bounds_that_leave_no_choice():
    assert resolve_arguments(ARGUMENTS | {"max_num_proc": 2}) == resolve_arguments(ARGUMENTS)


def test_elastic_jobs():
    settings, warning = resolve_arguments(ARGUMENTS | {"min_num_proc": 1, "max_num_proc": 4, "reset_limit": 3})
    assert settings.elastic is not None
    assert (settings.elastic.min_ranks, settings.elastic.max_ranks, settings.elastic.reset_limit) == (1, 4, 3)
    assert (settings.elastic.blacklist, settings.hosts, warning) == ("seat", (HostInfo("localhost", 2),), "")
    settings, _ = resolve_arguments(ARGUMENTS | {"host_discovery_script": "x.sh", "cooldown_range": (1, 2), "slots": 4})
    assert settings.elastic is not None
    assert (settings.elastic.discovery, settings.elastic.slots_per_host, settings.hosts) == ("x.sh", 4, ())
    assert settings.elastic.cooldown.max_failures is None
    assert resolve_arguments(ARGUMENTS | {"slots": 4})[1] == "no effect: slots"


@pytest.mark.parametrize(
    ("changes", "num_slots", "max_ranks"),
    [
        ({"num_proc": 1, "min_num_proc": 2}, 2, 2),  # 1 is the default of num_proc
        ({"num_proc": 1, "min_num_proc": 1, "max_num_proc": 3}, 3, 3),
        ({"min_num_proc": 1, "max_num_proc": 4}, 2, 4),
        ({"min_num_proc": 1, "spares": 1}, 3, 2),
        ({"min_num_proc": 1, "spares": "2:warm"}, 4, 2),
        ({"num_proc": 1, "min_num_proc": 1, "max_num_proc": 3, "spares": 1}, 4, 3),
    ],
)
def test_this_host_has_slots_for_all_processes_of_an_elastic_job(changes, num_slots, max_ranks):
    settings, warning = resolve_arguments(ARGUMENTS | changes)
    assert settings.elastic is not None
    assert (settings.hosts, settings.elastic.max_ranks) == ((HostInfo("localhost", num_slots),), max_ranks)
    assert warning == ""


def test_spares_of_a_job_that_is_not_elastic_get_no_slot():
    settings, warning = resolve_arguments(ARGUMENTS | {"spares": 1})
    assert (settings.hosts, warning) == ((HostInfo("localhost", 2),), "no effect: spares")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hosts": "localhost:2", "hostfile": "x"}, "two ways to say the same"),
        ({"ssh_port": 0}, "from 1 to 65535, not 0"),
        ({"hosts": "localhost:1"}, "have 1 slots, and 2 processes"),
        ({"hostfile": "/nonexistent"}, "'/nonexistent' cannot be read"),
        ({"min_num_proc": 3}, "min_num_proc 3 is more than num_proc 2"),
        ({"max_num_proc": 1}, "num_proc 2 is more than max_num_proc 1"),
        ({"min_num_proc": "x"}, "min_num_proc must be a number of processes, not 'x'"),
        ({"min_num_proc": 2, "hosts": "localhost:1"}, "have 1 slots, and 2 processes are needed at least"),
        ({"min_num_proc": 1, "cooldown_range": (0, 1)}, "cooldown_range 0 1: it must be two numbers of seconds"),
        ({"min_num_proc": 1, "reset_limit": -1}, "the reset limit must be at least 0"),
        ({"num_proc": 0}, "at least 1, not 0"),
        ({"num_proc": "2"}, "a number of processes, not '2'"),
        ({"start_timeout": 0}, "greater than 0, not 0"),
        ({"num_servers": "one"}, "num_servers must be a number of servers, not 'one'"),
        ({"num_servers": -1}, "num_servers must be at least 0, not -1"),
        ({"num_servers": 1, "max_servers": 2}, "max_servers=2 with num_servers=1: it is for elastic jobs"),
        ({"min_num_proc": 1, "max_servers": 2}, "max_servers=2 with num_servers=0: it is for elastic jobs"),
        ({"min_num_proc": 1, "num_servers": 3, "max_servers": 2}, "max_servers=2 with num_servers=3: .* at least"),
        ({"min_num_proc": 1, "num_servers": 1, "max_servers": "2"}, "a number of server processes, not '2'"),
        (
            {"min_num_proc": 1, "num_servers": 2, "max_servers": 2, "replicate_servers": 2},
            "max_servers and replicate_servers=2",
        ),
    ],
)
def test_what_makes_no_sense(changes, message):
    with pytest.raises(ConfigError, match=message):
        resolve_arguments(ARGUMENTS | changes)
