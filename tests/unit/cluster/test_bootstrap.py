"""How ranks that somebody else has started find their control service: the decision, and each part of the ways."""

import os
import socket
import struct
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from reigen.cluster.addresses import choose_listen_address, is_local_address
from reigen.cluster.bootstrap.control import DiscoveryMethod, ServiceOptions, choose_discovery_method, locate_service
from reigen.cluster.bootstrap.job_credentials import JobCredentials, derive_job_secret, derive_ports, read_secret
from reigen.cluster.bootstrap.local import (
    LocalBootstrapServer,
    ServiceEndpoint,
    bootstrap_socket_name,
    fetch_endpoints,
    identify_launcher_process,
)
from reigen.cluster.environ import JobInfo, detect_job
from reigen.cluster.membership.control_service import ControlService
from reigen.cluster.membership.rendezvous import RendezvousClient
from reigen.errors import AuthenticationError, ConfigError, DeadlineError, WireError
from reigen.net.auth import SECRET_BYTES
from reigen.net.interfaces import local_addresses
from reigen.testing import run_threads
from tests.patience import patiently

SECRET = b"s" * 32
OTHER_USER = 65534
HERE = JobInfo(1, 4, None, None, "somebody", "RANK=1", local=(1, 4))
ELSEWHERE = JobInfo(1, 4, None, None, "somebody", "RANK=1", local=(1, 2), coordinator="h1")
NOWHERE = JobInfo(1, 4, None, None, "somebody", "RANK=1")


# -- the decision -----------------------------------------------------------------------------------------------------


NO_MPI = (False, "mpi4py is not installed")


def means(job, *, secret=False, here=False, mpi=(False, "")):
    return choose_discovery_method(job, has_secret=secret, coordinator_is_here=here, mpi=mpi)


def test_a_launcher_that_hosts_the_service_is_believed():
    given = JobInfo(1, 4, "h1:4242", SECRET, "reigen run", "", coordinator="h1")
    assert means(given, secret=True, here=True) == (DiscoveryMethod.GIVEN, "the launcher hosts the control service")


def test_ranks_of_one_host_need_nothing():
    for secret in (False, True):
        assert means(HERE, secret=secret) == (
            DiscoveryMethod.HANDOVER,
            "all 4 ranks are on one host: rank 0 hosts the control service",
        )


def test_ranks_of_several_hosts_need_a_secret():
    assert means(ELSEWHERE, secret=True) == (
        DiscoveryMethod.KNOWN,
        "rank 0 hosts the control service on h1; the secret was given",
    )
    with pytest.raises(ConfigError) as caught:
        means(ELSEWHERE)
    text = str(caught.value)
    for part in ("somebody started this process as rank 1 of 4 (RANK=1)", "REIGEN_SECRET:", "REIGEN_SECRET_FILE:"):
        assert part in text
    assert "MASTER_ADDR" not in text


def test_without_a_coordinator_it_must_be_set():
    with pytest.raises(ConfigError, match=r"MASTER_ADDR: name or address") as caught:
        means(NOWHERE, secret=True)
    assert "REIGEN_SECRET:" not in str(caught.value)


def test_a_coordinator_on_this_host_hands_over_where_there_is_no_secret_and_maybe_no_other_host():
    unknown = replace(ELSEWHERE, local=None)
    assert means(unknown, here=True) == (
        DiscoveryMethod.HANDOVER,
        "rank 0 hosts the control service on h1, which is this host",
    )
    assert means(unknown, secret=True, here=True)[0] is DiscoveryMethod.KNOWN
    with pytest.raises(ConfigError):
        means(ELSEWHERE, here=True)  # the launcher says that there are others


def test_mpi_carries_what_no_secret_can_authenticate():
    usable = (True, "started by MPI")
    assert means(ELSEWHERE, mpi=usable) == (
        DiscoveryMethod.MPI,
        "rank 0 hosts the control service and tells the others over MPI: started by MPI",
    )
    assert means(NOWHERE, secret=True, mpi=usable)[0] is DiscoveryMethod.MPI
    assert means(ELSEWHERE, secret=True, mpi=usable)[0] is DiscoveryMethod.KNOWN
    assert means(HERE, mpi=usable)[0] is DiscoveryMethod.HANDOVER
    with pytest.raises(ConfigError, match="now they cannot: mpi4py is not installed"):
        means(ELSEWHERE, mpi=NO_MPI)


# -- what is given ----------------------------------------------------------------------------------------------------


def secret_file(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_secret_in_a_file(tmp_path):
    path = secret_file(tmp_path / "secret", "ab" * 32 + "\n")
    assert read_secret(path) == b"\xab" * 32
    assert JobCredentials.of({"REIGEN_SECRET_FILE": path}) == JobCredentials(b"\xab" * 32, None)
    assert JobCredentials.of({"REIGEN_SECRET": "cd" * 32, "REIGEN_SECRET_FILE": path}).secret == b"\xcd" * 32
    assert "xab" not in repr(JobCredentials.of({"REIGEN_SECRET_FILE": path}))


@pytest.mark.parametrize(
    ("text", "mode", "complaint"),
    [
        ("ab" * 32, 0o640, r"may be used by others \(mode 0640\): chmod 600"),
        ("ab" * 32, 0o602, "may be used by others"),
        ("ab" * 31, 0o600, "does not hold 64 hexadecimal digits"),
        ("ab " * 21 + "a", 0o600, "does not hold 64 hexadecimal digits"),
        ("\xff" * 64, 0o600, "does not hold 64 hexadecimal digits"),
        ("", 0o600, "does not hold"),
    ],
)
def test_a_file_that_is_no_secret(tmp_path, text, mode, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_secret(secret_file(tmp_path / "secret", text, mode))
    assert "ab" * 8 not in str(caught.value)


def test_what_is_no_file_of_ours(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe", "/dev/null"):
        with pytest.raises(ConfigError, match="is not a file"):
            read_secret(str(path))
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(str(tmp_path / "missing"))
    if os.geteuid() == 0:
        path = secret_file(tmp_path / "theirs", "ab" * 32)
        os.chown(path, OTHER_USER, OTHER_USER)
        with pytest.raises(ConfigError, match=f"belongs to user {OTHER_USER}"):
            read_secret(path)


@pytest.mark.parametrize(
    "environ",
    [{"REIGEN_SECRET": "tiny"}, {"REIGEN_RENDEZVOUS_PORT": "0"}, {"REIGEN_RENDEZVOUS_PORT": "70000"},
     {"REIGEN_RENDEZVOUS_PORT": "x"}],
)  # fmt: skip
def test_given_values_that_make_no_sense(environ):
    with pytest.raises(ConfigError) as caught:
        JobCredentials.of(environ)
    assert next(iter(environ)) in str(caught.value)
    assert "tiny" not in str(caught.value)


def test_jobs_that_share_a_secret_have_secrets_and_ports_of_their_own():
    one, two = derive_job_secret(SECRET, "1"), derive_job_secret(SECRET, "2")
    assert len({SECRET, one, two}) == 3
    assert one == derive_job_secret(SECRET, "1")
    ports = derive_ports(one)
    assert ports == derive_ports(one) != derive_ports(two)
    assert len(set(ports)) == 8
    assert all(20_000 <= port < 29_000 for port in ports)


# -- handing over -----------------------------------------------------------------------------------------------------


@pytest.fixture
def name():
    return b"\0reigen-test/" + os.urandom(8).hex().encode()


def test_what_rank_0_hands_over_is_fetched(name):
    assert fetch_endpoints(name) == []
    pointer = ServiceEndpoint("127.0.0.1:4242", SECRET)
    handover = LocalBootstrapServer(name, pointer)
    assert [fetch_endpoints(name) for _ in range(3)] == [[pointer]] * 3
    handover.close()
    handover.close()
    assert fetch_endpoints(name) == []
    assert "sss" not in repr(pointer)


def test_the_name_is_taken(name):
    first = LocalBootstrapServer(name, ServiceEndpoint("", b""))
    with pytest.raises(OSError, match="in use"):
        LocalBootstrapServer(name, ServiceEndpoint("", b""))
    first.close()


def test_an_end_of_another_user_gets_nothing_and_is_not_believed(name):
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    handover = LocalBootstrapServer(name, ServiceEndpoint("127.0.0.1:1", SECRET))
    steal = (
        f"import os, socket; os.setuid({OTHER_USER}); s = socket.socket(socket.AF_UNIX); s.connect({name!r}); "
        "print(s.recv(1024))"
    )
    assert subprocess.run([sys.executable, "-c", steal], capture_output=True, check=True).stdout == b"b''\n"
    handover.close()
    squat = (
        f"import os, socket; os.setuid({OTHER_USER}); s = socket.socket(socket.AF_UNIX); s.bind({name!r}); s.listen(); "
        "print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", squat], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as squatter:
        squatter.stdout.readline()
        with pytest.raises(AuthenticationError, match=f"user {OTHER_USER} listens"):
            fetch_endpoints(name)


@pytest.mark.parametrize("data", [b"x", b"\x92\xa1a", b"y" * 5000, b"\xff\xff\xff\x7f" + b"RGN3" * 50])
def test_what_a_stranger_says_is_no_pointer(name, data):
    def serve(listener):
        connection, _ = listener.accept()
        with connection:
            connection.sendall(data)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()

        def run(rank, _):
            if rank == 0:
                serve(listener)
                return
            assert fetch_endpoints(name) == []

        run_threads(run, 2)


@pytest.mark.parametrize("pointer", [5, "x", ["a"], ["a", b"", "more"]])
def test_what_is_no_pointer(name, pointer):
    with closing(LocalBootstrapServer(name, pointer)), pytest.raises(WireError, match="no pointer"):
        fetch_endpoints(name)


def test_a_given_secret_is_what_both_ends_must_know(name):
    pointer = ServiceEndpoint("127.0.0.1:4242", SECRET)
    with closing(LocalBootstrapServer(name, pointer, b"g" * 32)):
        assert fetch_endpoints(name, b"g" * 32) == [pointer]
        with pytest.raises(AuthenticationError, match="does not know this job's secret"):
            fetch_endpoints(name, b"h" * 32)
        with pytest.raises(AuthenticationError, match=r"this process was not given a secret \(REIGEN_SECRET or"):
            fetch_endpoints(name)
    with (
        closing(LocalBootstrapServer(name, pointer)),
        pytest.raises(AuthenticationError, match=r"this process was given a secret .* was not given one$"),
    ):
        fetch_endpoints(name, b"g" * 32)


def test_what_rank_0_proves_on_another_connection_proves_nothing(name):
    """Whoever stands in between has had the process id that the asking rank has now: rank 0 looks at that one."""
    number = struct.Struct("i")

    def stand_in_between(listener):
        asking, _ = listener.accept()
        with asking, socket.socket(socket.AF_UNIX) as to_rank_0, ExitStack() as stack:
            to_rank_0.connect(name)
            to_rank_0.sendall(asking.recv(number.size))
            to_rank_0.recv(number.size)
            own = os.memfd_create("reigen-" + "ab" * SECRET_BYTES)
            stack.callback(os.close, own)
            asking.sendall(number.pack(own))
            to_rank_0.sendall(asking.recv(4096))  # HELLO
            asking.sendall(to_rank_0.recv(4096))  # CHALLENGE
            assert asking.recv(4096) == b""

    with (
        closing(LocalBootstrapServer(name, ServiceEndpoint("127.0.0.1:4242", SECRET))),
        socket.socket(socket.AF_UNIX) as listener,
    ):
        listener.bind(name + b"!")
        listener.listen()

        def run(rank, _):
            if rank == 0:
                stand_in_between(listener)
                return
            with pytest.raises(AuthenticationError, match="does not know this job's secret"):
                fetch_endpoints(name + b"!")

        run_threads(run, 2)


def test_who_asks_and_says_nothing_keeps_nobody_out_for_long(name, monkeypatch):
    monkeypatch.setattr("reigen.cluster.bootstrap.local._HANDSHAKE_SECONDS", 0.2)
    pointer = ServiceEndpoint("127.0.0.1:4242", SECRET)
    with closing(LocalBootstrapServer(name, pointer)), socket.socket(socket.AF_UNIX) as silent:
        silent.connect(name)
        found = []
        until = time.monotonic() + 60.0
        while not found and time.monotonic() < until:
            found = fetch_endpoints(name)
        assert found == [pointer]


def test_jobs_of_other_names_sizes_and_launchers_do_not_meet():
    names = {
        bootstrap_socket_name("torchrun", "1", 2),
        bootstrap_socket_name("torchrun", "2", 2),
        bootstrap_socket_name("torchrun", "1", 3),
    }
    assert len(names | {bootstrap_socket_name("mpirun", "1", 2)}) == 4
    assert (
        len(
            {
                bootstrap_socket_name("x", "", 2),
                bootstrap_socket_name("x", "", 2),
                bootstrap_socket_name("x", identify_launcher_process(), 2),
            }
        )
        == 1
    )
    assert all(name.startswith(f"\0reigen/{os.geteuid()}/".encode()) and len(name) < 108 for name in names)


def test_the_ancestor_is_who_gave_the_rank():
    code = "from reigen.cluster.bootstrap.local import identify_launcher_process; print(identify_launcher_process())"
    shell = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"

    def told(rank, program):
        environ = {**os.environ, "PMI_RANK": str(rank)}
        return subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, env=environ).stdout

    found = {told(0, code), told(1, code), told(1, shell)}
    assert len(found) == 1
    assert f"process {os.getpid()} ".encode() in found.pop()


# -- where rank 0 listens ---------------------------------------------------------------------------------------------


def test_which_names_are_this_host():
    assert is_local_address("127.0.0.1")
    assert is_local_address("::1")
    assert is_local_address("localhost")
    assert not is_local_address("192.0.2.1")
    assert not is_local_address("no-such-host.invalid")
    for addresses in local_addresses().values():
        assert all(is_local_address(address) for address in addresses)


def test_the_own_address_is_no_loopback_unless_it_is_asked_for():
    assert choose_listen_address(["lo"], None)[0] in {"127.0.0.1", "::1"}
    assert choose_listen_address([], "127.0.0.1")[0] == "127.0.0.1"
    assert choose_listen_address([], "::1")[0] == "::1"
    assert choose_listen_address([], "localhost")[0] in {"127.0.0.1", "::1"}
    with pytest.raises(ConfigError, match="no-such-interface"):
        choose_listen_address(["no-such-interface"], None)
    outside = [one for name, found in local_addresses().items() if name != "lo" for one in found]
    if not outside:
        pytest.skip("this machine has no network")
    for coordinator in (None, socket.gethostname(), "no-such-host.invalid"):
        assert choose_listen_address([], coordinator)[0] in outside


# -- all of it --------------------------------------------------------------------------------------------------------


def torch_job(rank, size, environ):
    return detect_job({"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", **environ})


def use(access, rank, tls=None):
    """What every rank does with its access: tell the others, and hear of them."""
    client = RendezvousClient(access.address, access.secret, rank, 60.0, tls)
    client.put(f"x/{rank}", b"")
    client.get(f"x/{1 - rank}", 60.0)
    client.put(f"done/{rank}", b"")
    if rank == 0:  # it hosts the service
        client.get("done/1", 60.0)
    client.close()
    access.close()


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("given", [{}, {"REIGEN_SECRET": "ab" * 32}])
def test_ranks_meet_whoever_comes_first(given, late, monkeypatch):
    environ = {"MASTER_PORT": os.urandom(4).hex(), **given}
    monkeypatch.setattr(
        "reigen.cluster.bootstrap.control.claim_rank", lambda *_: 0
    )  # threads of one process are no ranks to it

    def run(rank, rendezvous):
        if rank == late:
            rendezvous.get("waiting", 60.0)
        else:
            rendezvous.put("waiting", b"")
        manner = ServiceOptions(60.0)
        access = locate_service(torch_job(rank, 2, environ), environ, manner)
        assert "rank 0 hosts the control service on 127.0.0.1" in access.reason
        assert "xab" not in repr(access)
        use(access, rank)

    run_threads(run, 2)


def test_ranks_meet_by_tls(monkeypatch):
    pytest.importorskip("cryptography")
    from reigen.net.tls import TlsContext

    monkeypatch.setattr("reigen.cluster.bootstrap.control.claim_rank", lambda *_: 0)
    environ = {"MASTER_PORT": os.urandom(4).hex(), "REIGEN_SECRET": os.urandom(32).hex()}

    def run(rank, _):
        tls = TlsContext()
        access = locate_service(torch_job(rank, 2, environ), environ, ServiceOptions(60.0, tls=tls))
        with pytest.raises(AuthenticationError):
            RendezvousClient(access.address, access.secret, rank, 60.0)
        use(access, rank, tls)

    run_threads(run, 2)


@pytest.mark.slow
def test_ports_that_are_taken_are_passed_over_and_strangers_there_are_not_believed(monkeypatch):
    monkeypatch.setattr("reigen.cluster.bootstrap.control.claim_rank", lambda *_: 0)
    environ = {"MASTER_PORT": os.urandom(4).hex(), "REIGEN_SECRET": os.urandom(32).hex()}
    first, second, third, *_ = derive_ports(
        derive_job_secret(bytes.fromhex(environ["REIGEN_SECRET"]), environ["MASTER_PORT"])
    )
    stranger = ControlService(os.urandom(32), "127.0.0.1", first)  # another job
    stranger.start()
    with socket.create_server(("127.0.0.1", second)):  # never answers

        def run(rank, _):
            access = locate_service(torch_job(rank, 2, environ), environ, ServiceOptions(60.0))
            assert access.address == f"127.0.0.1:{third}"
            use(access, rank)

        run_threads(run, 2)
    stranger.close()


@pytest.mark.slow
def test_all_ports_are_taken():
    environ = {"MASTER_PORT": "1", "REIGEN_SECRET": "ab" * 32}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        environ["REIGEN_RENDEZVOUS_PORT"] = str(taken.getsockname()[1])
        with pytest.raises(ConfigError, match=r"Address already in use\); REIGEN_RENDEZVOUS_PORT"):
            locate_service(torch_job(0, 2, environ), environ, ServiceOptions(1.0))


def test_another_secret_at_a_port_that_was_given():
    server = ControlService(os.urandom(32))
    server.start()
    environ = {"REIGEN_SECRET": "ab" * 32, "REIGEN_RENDEZVOUS_PORT": server.address.rpartition(":")[2]}
    with pytest.raises(AuthenticationError):
        locate_service(torch_job(1, 2, environ), environ, ServiceOptions(60.0))
    server.close()


def test_another_job_has_the_name():
    environ = {"MASTER_PORT": os.urandom(4).hex()}
    job = torch_job(0, 2, environ)
    other = LocalBootstrapServer(
        bootstrap_socket_name(job.launcher, job.job_id, 2), ServiceEndpoint("127.0.0.1:1", SECRET)
    )
    with pytest.raises(ConfigError, match="another process is already rank 0 of a job like this one"):
        locate_service(job, environ, ServiceOptions(0.3))
    other.close()


@pytest.mark.parametrize("given", [{}, {"REIGEN_SECRET": os.urandom(32).hex()}])
def test_rank_0_never_comes(given):
    def attempt(seconds):
        environ = {"MASTER_PORT": os.urandom(4).hex(), **given}
        with pytest.raises(DeadlineError, match=rf"rank 0 did not call init\(\) within {seconds:g} s") as caught:
            locate_service(torch_job(1, 2, environ), environ, ServiceOptions(seconds))
        assert caught.value.ranks == (0,)
        assert str(caught.value).count("127.0.0.1:") == (8 if given else 0)
        assert str(caught.value).count("Connection refused") == (1 if given else 0)

    patiently(attempt, 0.3)
