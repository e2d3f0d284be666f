"""Hostile bytes, against everything that reads any: a bad peer is an error, of its own connection alone.

`targets.py` says what is promised. Here Hypothesis looks for a script that breaks it: the same ones each time, quickly,
and, where slow tests run, more of them; new ones with `--hypothesis-profile=explore`. Then the attacks that have
names.
"""

import ast
import importlib.util
import itertools
import os
import pickle
import random
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import reigen
from reigen.cluster.connection_pool import ConnectionPool
from reigen.cluster.membership.control_service import REQUEST_CODEC
from reigen.cluster.membership.messages import MAX_MESSAGE_BYTES
from reigen.cluster.membership.rendezvous import LocalRendezvous
from reigen.errors import AuthenticationError, WireError
from reigen.net.auth import AuthSession, ClientHandshake, Identity, ProcessRole
from reigen.net.bulk_connection import BulkConnection
from reigen.net.codec import FrameBuffer
from reigen.net.connection import open_connection
from tests.accepting import accept_connection
from tests.fuzz.targets import (
    BAD_PEER,
    LAUNCHER,
    RANK,
    SECRET,
    TARGETS,
    Script,
    Victim,
    conversations,
    tls,
    visit,
)
from tests.patience import patiently

QUICK = settings(derandomize=True, deadline=None, max_examples=120, suppress_health_check=list(HealthCheck))
LONG = settings(deadline=None, max_examples=3000, suppress_health_check=list(HealthCheck))
SCRIPTS = st.binary(max_size=600)
MIB = 1 << 20


def soon(seconds=60.0):
    return time.monotonic() + seconds


@pytest.fixture(params=["plain", "tls"])
def victim(request):
    one = Victim(encrypted=request.param == "tls")
    yield one
    one.close()


@contextmanager
def at_most(num_bytes):
    """No moment of this block has so much more memory in use than its beginning."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        yield
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < num_bytes, f"{peak} bytes were allocated"


# -- scripts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_no_script_breaks_a_promise(target):
    QUICK(given(SCRIPTS)(TARGETS[target]))()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("target", TARGETS)
def test_no_script_breaks_a_promise_when_looked_for_longer(target):
    LONG(given(SCRIPTS)(TARGETS[target]))()


@pytest.mark.parametrize("target", TARGETS)
def test_no_script_makes_anybody_keep_much(target):
    """Of memory that Python knows; what OpenSSL has for a connection is its own."""
    seeded = random.Random(target)
    scripts = [seeded.randbytes(600) for _ in range(60)]
    TARGETS[target](scripts[0])  # modules, caches, the certificate
    with at_most(2 * MIB):
        for script in scripts:
            TARGETS[target](script)


def test_a_rendezvous_that_is_attacked_serves_the_others(victim):
    @settings(QUICK, max_examples=40)
    @given(SCRIPTS)
    def attack(script):
        victim.attack(script)

    attack()


@pytest.mark.slow
@pytest.mark.nightly
def test_a_rendezvous_that_is_attacked_for_longer_serves_the_others(victim):
    @settings(LONG, max_examples=1500)
    @given(SCRIPTS)
    def attack(script):
        victim.attack(script)

    attack()


@pytest.mark.slow
@pytest.mark.parametrize("encrypted", [False, True])
def test_ranks_that_are_attacked_while_they_connect_find_each_other(encrypted):
    rendezvous, own = LocalRendezvous(), tls() if encrypted else None
    purposes = map(str, itertools.count())
    with ExitStack() as stack:
        zero, one = (ConnectionPool(rank, 2, rendezvous, SECRET, "127.0.0.1", 20.0, tls=own) for rank in range(2))
        stack.callback(zero.close)
        stack.callback(one.close)
        host, _, port = zero.address.rpartition(":")

        @settings(QUICK, max_examples=25)
        @given(SCRIPTS)
        def attack(script):
            with ExitStack() as strangers:
                visit((host, int(port)), Script(script), strangers, own)
                open_both(zero, one, next(purposes))

        attack()


def open_both(zero, one, purpose):
    found = []
    thread = threading.Thread(target=lambda: found.append(zero.open([1], purpose, soon())))
    thread.start()
    there = one.open([0], purpose, soon())[0]
    thread.join()
    here = found[0][1]
    there.send(b"hello", soon())
    assert here.receive(soon()) == b"hello"
    here.close()
    there.close()


# -- attacks that have names -----------------------------------------------------------------------------------------


def closed_by_peer(connection):
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def stranger(victim):
    return socket.create_connection(victim.address, timeout=10)


def test_an_old_version_is_refused_at_once(victim):
    with stranger(victim) as old:
        old.sendall(b"RGN1" + bytes(37))
        assert closed_by_peer(old)
    victim.check()


def test_somebody_with_another_secret_is_refused(victim):
    with pytest.raises(AuthenticationError):
        open_connection(victim.address, b"x" * 32, RANK, 100, soon(), victim.tls)
    victim.check()


def test_a_recorded_connection_cannot_be_played_again(victim):
    """Neither from its beginning, nor into a connection that is established."""
    recorded = record_of_a_put(victim)
    victim.check()
    with stranger(victim) as replay:
        with suppress(OSError):
            replay.sendall(recorded)
        assert closed_by_peer(replay)
    victim.check()


def record_of_a_put(victim):
    """All bytes that a rank sent which put a value, taken down on their way."""
    sent = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as tap:

        def relay():
            near = tap.accept()[0]
            with near, stranger(victim) as far:
                back = threading.Thread(target=pump, args=(far, near, bytearray()))
                back.start()
                pump(near, far, sent)
                back.join()

        thread = threading.Thread(target=relay)
        thread.start()
        rank = open_connection(tap.getsockname(), SECRET, RANK, 1 << 16, soon(), victim.tls)
        rank.send(b"\x94\x01\x01\xa3key\xc4\x05value", soon())
        rank.receive(soon())
        rank.close()
        thread.join()
    return bytes(sent)


def pump(source, target, copy):
    with suppress(OSError):
        while data := source.recv(1 << 16):
            copy += data
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("encrypted", [False, True])
def test_who_drips_bytes_is_closed_at_its_deadline(encrypted):
    """Each byte is progress, but a handshake has a deadline as a whole. Ranks come in all the while."""

    def attempt(seconds):
        with closing(Victim(encrypted=encrypted, handshake_seconds=seconds)) as victim, ExitStack() as stack:
            slow = [stack.enter_context(stranger(victim)) for _ in range(20)]
            hello = b"\x16\x03\x01\x00\xff" + bytes(300) if encrypted else ClientHandshake(SECRET, RANK).opening
            num_closed = 0
            for byte in hello:
                for connection in list(slow):
                    try:
                        connection.sendall(bytes([byte]))
                    except OSError:
                        slow.remove(connection)
                        num_closed += 1
                victim.check()
                if not slow:
                    break
                threading.Event().wait(seconds / 25)
            assert num_closed == 20

    patiently(attempt, 0.5)


def test_who_accepts_one_that_drips_bytes_is_back_at_its_deadline():
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        slow = stack.enter_context(socket.create_connection(listener.getsockname()))
        accepted = stack.enter_context(listener.accept()[0])
        stop = threading.Event()

        def drip():
            for byte in ClientHandshake(SECRET, RANK).opening:
                with suppress(OSError):
                    slow.sendall(bytes([byte]))
                if stop.wait(0.02):
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            accept_connection(accepted, SECRET, LAUNCHER, 100, soon(0.2))
        assert time.monotonic() - begin < 40
        stop.set()
        thread.join()


@pytest.mark.parametrize("length", [MAX_MESSAGE_BYTES + 17, 1 << 31, (1 << 32) - 1])
def test_a_length_that_is_too_large_is_refused_before_anything_is_kept(length):
    frames = FrameBuffer(MAX_MESSAGE_BYTES + 16)
    with at_most(MIB // 4), pytest.raises(WireError):
        feed(frames, struct.pack(">I", length))


def feed(frames, data):
    frames.feed(data)
    frames.pop()


@pytest.mark.parametrize("length", [11, 1 << 40, (1 << 64) - 1])
def test_a_length_that_is_not_the_one_of_its_place_is_refused_before_anything_is_kept(length):
    here, peer = AuthSession(LAUNCHER, b"b" * 32, b"a" * 32), AuthSession(RANK, b"a" * 32, b"b" * 32)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        link = BulkConnection(theirs, here)
        link.post_receive(memoryview(bytearray(10)))
        ours.sendall(peer.seal(struct.pack(">BQ", 1, length)) + bytes(1000))
        with at_most(MIB // 4), pytest.raises(WireError):
            link.advance_receives()


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
        b"\xdb\xff\xff\xff\xff",  # of text
        b"\xdd\xff\xff\xff\xff",  # 2**32 - 1 elements
        b"\xdf\xff\xff\xff\xff",  # pairs
        b"\x94\x01\x01\xdb\xff\xff\xff\xff",  # within a Put
        b"\x94\x01\x01\xa1k\xc6\xff\xff\xff\xff",
        b"\x93\x09\xa0\xdd\xff\xff\xff\xff",  # within an Abort
        b"\x91" * 500_000,
        b"\xdd\xff\xff\xff\xff" * 100_000,
    ],
)
def test_sizes_that_a_message_claims_are_not_believed(payload):
    with at_most(MIB), pytest.raises(WireError):
        REQUEST_CODEC.decode(payload)


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_stranger_that_talks_without_end_is_cut_off_at_once(encrypted):
    """Whatever it says next, not one byte of it is read."""
    for end in conversations(encrypted):
        with at_most(MIB), pytest.raises(AuthenticationError):
            end.receive(b"\xff" * end.num_wanted_bytes)


def test_a_rank_that_asks_and_never_reads_is_closed(victim):
    """Its answers are not piled up without bound, and the others are served."""
    rank = open_connection(victim.address, SECRET, Identity(ProcessRole.RANK, 1), MAX_MESSAGE_BYTES, soon(), victim.tls)
    rank.send(b"\x94\x01\x01\xa3big\xc6" + struct.pack(">I", MIB) + bytes(MIB), soon())
    with pytest.raises(BAD_PEER):
        ask_and_ask(rank)
    rank.close()
    victim.check()


def ask_and_ask(stream):
    until, pause = soon(), threading.Event()
    for number in itertools.count(2):
        assert time.monotonic() < until
        stream.send(b"\x93\x02" + struct.pack(">BI", 0xCE, number) + b"\xa3big", until)
        if number > 200:  # it is told soon that this is too much
            pause.wait(0.01)


# -- no code comes in ------------------------------------------------------------------------------------------------

#: What turns bytes into code or objects of any class.
DANGEROUS_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
DANGEROUS_CALLS = {"eval", "exec", "compile", "__import__"}


def dangerous(source):
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in DANGEROUS_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in DANGEROUS_MODULES:
            found.append(node.module)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in DANGEROUS_CALLS:
            found.append(node.func.id)
    return found


@pytest.mark.parametrize("room", ["net", "cluster", "backends", "engine", "kernels", "kv", "launch"])
def test_the_rooms_that_read_from_others_cannot_unpickle(room):
    paths = list(Path(reigen.__file__).parent.joinpath(room).rglob("*.py"))
    assert len(paths) > 1
    for path in paths:
        assert dangerous(path.read_text(encoding="utf-8")) == [], path


def test_that_would_be_found():
    assert dangerous("from pickle import loads\nimport marshal, os\neval('1')\nos.path") == [
        "pickle",
        "marshal",
        "eval",
    ]


class Evil:
    def __reduce__(self):
        return (os.mkdir, ("/tmp/reigen-was-unpickled",))


AUDITED = """
import pickle, random, sys
from tests.fuzz.targets import *
Victim(encrypted=True).close()
evil = bytes.fromhex(sys.argv[1])
seeded = random.Random(0)
scripts = [evil, b"\\1" + evil] + [seeded.randbytes(20) + evil + seeded.randbytes(50) for _ in range(30)]
victim = Victim()
for target in TARGETS.values():
    target(scripts[2])  # imports what it needs
events = []
forbidden = ("pickle.", "marshal.", "exec", "compile", "os.system", "subprocess.", "os.mkdir")
sys.addaudithook(lambda event, _: events.append(event) if event.startswith(forbidden) else None)
for script in scripts:
    for target in TARGETS.values():
        target(script)
    victim.attack(script)
rank = open_connection(victim.address, SECRET, RANK, 1 << 16, time.monotonic() + 10)
rank.send(evil, time.monotonic() + 10)
try:
    print("answered", rank.receive(time.monotonic() + 10))
except ConnectionError:
    print("closed")
rank.close()
victim.close()
print(events)
pickle.loads(b"cos\\nsep\\n.")
print(events)
"""


def test_nothing_is_ever_unpickled_or_executed():
    """The interpreter itself says so: audit events of a process that is attacked, also by one that knows the secret."""
    evil = pickle.dumps(Evil())
    done = subprocess.run(
        [sys.executable, "-c", AUDITED, evil.hex()],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2], timeout=150,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["closed", "[]", "['pickle.find_class']"], done.stderr
    assert not Path("/tmp/reigen-was-unpickled").exists()


# -- libFuzzer -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
@pytest.mark.parametrize("target", TARGETS)
def test_libfuzzer_finds_nothing(target, tmp_path):
    options = ["-max_total_time=10", "-seed=1", f"-artifact_prefix={tmp_path}/"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.explore", target, *options],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2], timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
