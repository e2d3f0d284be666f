"""Parts of the launcher of elastic jobs: options, discovery programs, environments of processes."""

from __future__ import annotations

import os
import time

import pytest

from reigen.cluster.environ import (
    ELASTIC_CHANGE_KEY,
    ELASTIC_FINISHED_KEY,
    ELASTIC_PAUSE_KEY,
    ELASTIC_STRAGGLER_KEY,
    ELASTIC_VIEW_KEY,
)
from reigen.cluster.membership.views.history import CHANGE_NOTE_CODEC, ChangeNote, StepOutcome
from reigen.errors import ConfigError, ReigenError, WireError
from reigen.launch.base import PolledHost
from reigen.launch.elastic.discovery import (
    POLL_SECONDS,
    SETTLE_SECONDS,
    DiscoveryRuns,
    HostPolls,
    can_begin,
    describe_missing_slots,
    discovery_command,
    parse_discovered,
)
from reigen.launch.elastic.job import ChangeExplained, MemberFinished, MemberStraggles, PauseAnnounced, SlotStart
from reigen.launch.elastic.options import (
    MOST_RANKS,
    NEVER,
    Cooldown,
    ElasticOptions,
    ElasticRequest,
    check_elastic_hosts,
    resolve_elastic,
)
from reigen.launch.elastic.places import make_voter_memory, place_starts, plan_starts, without_elastic_variables
from reigen.launch.elastic.supervision import parse_announcement
from reigen.launch.hosts import HostInfo
from reigen.launch.local_plan import JobServices, ProcessOptions
from reigen.launch.supervision.event_loop import LauncherLoop

DEADLINE_SECONDS = 30.0


def resolved(**request: object) -> ElasticOptions:
    options = resolve_elastic(ElasticRequest(**request))  # type: ignore[arg-type]
    assert options is not None
    return options


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    "request_", [{"num_ranks": 2}, {"num_ranks": 2, "max_ranks": 2}, {"num_ranks": 2, "reset_limit": 1}]
)
def test_jobs_that_are_not_elastic(request_: dict[str, int]) -> None:
    assert resolve_elastic(ElasticRequest(**request_)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "bounds"),
    [
        ({"num_ranks": 4, "min_ranks": 2}, (2, 4)),
        ({"num_ranks": 2, "min_ranks": 2}, (2, 2)),
        ({"num_ranks": 4, "min_ranks": 2, "max_ranks": 8}, (2, 8)),
        ({"num_ranks": 4, "max_ranks": 8}, (4, 8)),
        ({"num_ranks": 4, "discovery": "x"}, (4, 4)),
        ({"min_ranks": 3, "discovery": "x"}, (3, MOST_RANKS)),
    ],
)
def test_bounds(request_: dict[str, object], bounds: tuple[int, int]) -> None:
    options = resolved(**request_)
    assert (options.min_ranks, options.max_ranks) == bounds


@pytest.mark.parametrize(
    ("request_", "num"),
    [
        ({"num_ranks": 4}, 4),
        ({"num_ranks": 4, "min_ranks": 2}, 4),
        ({"num_ranks": 4, "min_ranks": 2, "max_ranks": 8}, 4),
        ({"min_ranks": 2, "max_ranks": 8}, 8),
        ({"min_ranks": 2}, 2),
        ({"num_ranks": 4, "min_ranks": 2, "spares": 2}, 6),
        ({"min_ranks": 2, "max_ranks": 3, "spares": "1:warm"}, 4),
        ({}, 0),
    ],
)
def test_slots_of_this_host_where_no_host_is_named(request_: dict[str, object], num: int) -> None:
    assert ElasticRequest(**request_).num_places == num  # type: ignore[arg-type]


def test_rules_for_failures_are_horovods_under_its_name() -> None:
    ours, horovods = resolved(min_ranks=1), resolved(min_ranks=1, as_horovod=True)
    assert (ours.blacklist, ours.counts_resizes, ours.cooldown) == ("seat", False, Cooldown())
    assert (ours.accepts_early_end, horovods.accepts_early_end) == (False, True)
    assert (horovods.blacklist, horovods.counts_resizes, horovods.cooldown) == ("host", True, NEVER)
    chosen = resolved(min_ranks=1, as_horovod=True, blacklist="seat", cooldown_range=(2, 3))
    assert (chosen.blacklist, chosen.cooldown) == ("seat", Cooldown(2, 3, max_failures=None))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"num_ranks": 2, "min_ranks": 3}, "--min-np 3 is more than -np 2"),
        ({"min_ranks": 3, "max_ranks": 2}, "--min-np 3 is more than --max-np 2"),
        ({"num_ranks": 3, "max_ranks": 2}, "-np 3 is more than --max-np 2"),
        ({"min_ranks": 0}, "--min-np must be at least 1, not 0"),
        ({"discovery": "x"}, "an elastic job needs --min-np"),
        ({"min_ranks": 1, "slots_per_host": 0}, "slots per host must be at least 1, not 0"),
        ({"min_ranks": 1, "reset_limit": -1}, "the reset limit must be at least 0, not -1"),
        ({"min_ranks": 1, "timeout_seconds": 0}, "the elastic timeout must be a number of seconds greater than 0"),
        ({"min_ranks": 1, "cooldown_range": (0, 5)}, "--blacklist-cooldown-range 0 5: it must be two numbers"),
        ({"min_ranks": 1, "cooldown_range": (6, 5)}, "1 <= MIN <= MAX <= 3600"),
        ({"min_ranks": 1, "cooldown_range": (1, 3601)}, "1 <= MIN <= MAX <= 3600"),
        ({"min_ranks": 1, "cooldown_range": (1,)}, "two numbers of seconds"),
        ({"min_ranks": 1, "blacklist": "rack"}, "--blacklist rack: there is seat and host"),
        ({"num_ranks": 2, "min_ranks": 1, "spares": -1}, "the number of spares must be at least 0, not -1"),
        ({"num_ranks": 2, "min_ranks": 1, "spares": "1:hot"}, "--spares 1:hot: it must be a whole number, as in 1, or"),
        ({"num_ranks": 2, "min_ranks": 1, "spares": "warm"}, "--spares warm: it must be a whole number"),
        ({"num_ranks": 2, "min_ranks": 1, "spares": "1:"}, "--spares 1:: it must be a whole number"),
        ({"min_ranks": 1, "spares": "1:warm"}, "which processes are spares depends on -np or --max-np: give one"),
        ({"num_ranks": 1024, "min_ranks": 1, "spares": "1:warm"}, "a view would have more than 1024 members"),
        ({"num_ranks": 2, "min_ranks": 1, "spares": "1:warm", "as_horovod": True}, "--spares 1 starts spares that get"),
        ({"min_ranks": 1, "eject_stragglers": "slow"}, "--eject-stragglers slow: it must be FACTOR or FACTOR/STEPS"),
    ],
)
def test_options_that_make_no_sense(request_: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(**request_)


def test_stragglers_are_ejected_where_the_user_wants_it() -> None:
    assert (resolved(min_ranks=1).ejects_stragglers, str(resolved(min_ranks=1).stragglers)) == (False, "3/50")
    chosen = resolved(min_ranks=1, eject_stragglers="2.5/20")
    assert (chosen.ejects_stragglers, str(chosen.stragglers)) == (True, "2.5/20")
    [start] = place_starts([SlotStart(0, 0, "h1", 0)], chosen, {"h1": 0})
    assert start.variables["REIGEN_STRAGGLERS"] == "2.5/20"


@pytest.mark.parametrize("spares", [1, "1", "1:warm"])
def test_warm_spares_are_members(spares: int | str) -> None:
    chosen = resolved(num_ranks=3, min_ranks=2, spares=spares)
    is_warm = spares == "1:warm"
    assert (chosen.spares, chosen.has_warm_spares) == (1, is_warm)
    assert (chosen.max_ranks, chosen.max_members, chosen.max_processes) == (3, 3 + is_warm, 4)
    [start] = place_starts([SlotStart(3, 0, "h1", 3)], chosen, {"h1": 0})
    assert start.variables["REIGEN_MAX_SIZE"] == ("4" if is_warm else "3")
    assert start.variables.get("REIGEN_WARM_SPARES") == ("1" if is_warm else None)
    assert "REIGEN_WARM_SPARES" not in without_elastic_variables({"REIGEN_WARM_SPARES": "1"})


def test_no_warm_spares_are_none() -> None:
    assert resolved(num_ranks=3, min_ranks=2, spares="0:warm").has_warm_spares is False


def test_horovods_jobs_need_two_hosts() -> None:
    options = resolved(min_ranks=2, as_horovod=True)
    with pytest.raises(ConfigError, match="Cannot run in fault tolerance mode with fewer than 2 hosts"):
        check_elastic_hosts(options, [HostInfo("h", 4)], as_horovod=True)
    check_elastic_hosts(options, [HostInfo("h", 1), HostInfo("g", 1)], as_horovod=True)
    check_elastic_hosts(resolved(min_ranks=2, as_horovod=True, discovery="x"), [], as_horovod=True)
    check_elastic_hosts(resolved(min_ranks=2), [HostInfo("h", 4)], as_horovod=False)


# ---------------------------------------------------------------- discovery


def test_parsing_discovered_hosts() -> None:
    assert parse_discovered("h1:2\n\n  h2  \nh3:0\n[fe80::1]:3\n", 4) == (("h1", 2), ("h2", 4), ("fe80::1", 3))
    assert parse_discovered("", 4) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h1 2", "'h1 2', which is neither"),
        ("h1:x", "'h1:x', which is neither"),
        ("h1:-1", "'h1:-1', which is neither"),
        ("{}", None),
        ("h1:2\nh1:3", "it has named host h1 twice"),
        ("x" * 9999 + " y", "neither"),
        ("h:9999999", "too many"),
    ],
)
def test_rubbish_is_no_host(text: str, message: str | None) -> None:
    if message is None:
        assert parse_discovered(text, 1) == ((text, 1),), "any word may be a name; whoever cannot be reached is told of"
        return
    with pytest.raises(ConfigError, match=message) as raised:
        parse_discovered(text, 1)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("text", "least", "problem"),
    [
        ("", 2, "lists no slots, and 2 processes are needed at least; it must print host or host:slots for each "),
        ("localhost:0", 1, "lists no slots, and 1 process is needed at least; it must print host or host:slots for e"),
        ("h1:1", 2, "lists 1 slot, and 2 processes are needed at least"),
        ("h1:1\nh2:2", 4, "lists 3 slots, and 4 processes are needed at least"),
        ("h1:1\nh2:2", 3, ""),
    ],
)
def test_a_program_that_lists_too_few_slots(text: str, least: int, problem: str) -> None:
    said = describe_missing_slots(parse_discovered(text, 1), ElasticOptions(least, discovery="./hosts.sh"))
    assert said.startswith(f"the discovery script ./hosts.sh {problem}" if problem else "")
    assert bool(said) == bool(problem)
    assert describe_missing_slots((), ElasticOptions(least)) == "", "an engine may have no slots for a while"


def test_discovery_commands(tmp_path, monkeypatch) -> None:
    (tmp_path / "my script").touch()
    monkeypatch.chdir(tmp_path)
    assert discovery_command("my script") == [str(tmp_path / "my script")]
    assert discovery_command("python find.py --zone 'a b'") == ["python", "find.py", "--zone", "a b"]
    for text in ("", "'"):
        with pytest.raises(ConfigError, match="--host-discovery-script"):
            discovery_command(text)


class Runs:
    """Runs of a shell command as a discovery program, and what has come of them."""

    def __init__(self, loop: LauncherLoop, command: str) -> None:
        self.loop, self.found, self.excluded = loop, [], set[int]()
        self.runs = DiscoveryRuns(
            ["/bin/sh", "-c", command], os.environ, 2, loop, self.found.append, self.found.append, self.excluded
        )

    def wait(self, num: int) -> list[object]:
        end = time.monotonic() + DEADLINE_SECONDS
        while len(self.found) < num:
            assert time.monotonic() < end
            self.loop.wait(self.runs.turn())
        return self.found


@pytest.fixture
def loop():
    with LauncherLoop() as loop:
        yield loop


def test_a_program_is_run_again_and_again(loop, tmp_path) -> None:
    runs = Runs(loop, f"echo x >>{tmp_path}/count; wc -l <{tmp_path}/count | sed s/^/h:/")
    assert runs.wait(2) == [(("h", 1),), (("h", 2),)]
    runs.runs.close()
    runs.runs.close()
    assert runs.runs.turn() is None
    assert not runs.excluded


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("echo a b", "it has printed 'a b', which is neither 'host' nor 'host:slots'"),
        ("echo no >&2; exit 3", "it has failed (exit code 3): no"),
        ("kill -9 $$", "it has failed (killed by SIGKILL)"),
        ("yes", "it has printed more than 1 MiB, and was killed"),
    ],
)
def test_runs_that_fail(loop, command: str, problem: str) -> None:
    runs = Runs(loop, command)
    assert runs.wait(1) == [problem]
    runs.runs.close()


def test_a_program_that_hangs_is_killed(loop, monkeypatch) -> None:
    monkeypatch.setattr("reigen.launch.elastic.discovery.RUN_SECONDS", 0.2)
    runs = Runs(loop, "sleep 1000")
    assert runs.wait(1) == ["it has not ended within 0.2 s, and was killed"]
    assert not runs.excluded
    runs.runs.close()


def test_a_child_that_a_program_leaves_behind_does_not_keep_it_up(loop) -> None:
    runs = Runs(loop, "echo h; sleep 1000 &")
    assert runs.wait(1) == [(("h", 2),)]
    runs.runs.close()


def test_a_program_that_cannot_be_run(loop) -> None:
    found: list[object] = []
    runs = DiscoveryRuns(["/nowhere/script"], os.environ, 2, loop, found.append, found.append, set())
    assert runs.turn() == 0, "the problem is heard of at once"
    assert found == ["it cannot be run: No such file or directory"]
    assert 0 < (runs.turn() or 0) <= POLL_SECONDS, "it is tried again as soon as one that has failed"
    runs.close()


@pytest.mark.parametrize(
    ("num_slots", "unchanged_seconds", "begins"),
    [(1, 100.0, False), (2, SETTLE_SECONDS - 0.1, False), (2, SETTLE_SECONDS, True), (3, 0.0, False), (4, 0.0, True)],
)
def test_a_job_waits_a_little_for_slots_that_come_one_by_one(num_slots, unchanged_seconds, begins) -> None:
    assert can_begin(num_slots, ElasticOptions(2, 4), unchanged_seconds) is begins


def test_an_engine_is_asked_each_second_and_hosts_that_have_gone_are_remembered(loop, monkeypatch) -> None:
    now, there, found = [100.0], [PolledHost("h1", 2, "10.0.0.1"), PolledHost("h2", 0)], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    polls = HostPolls(lambda given: list(there), loop, found.append)
    assert polls.turn() == 1.0
    del there[:]
    now[0] += 0.75
    assert polls.turn() == 0.25
    now[0] += 0.25
    polls.turn()
    assert found == [(("h1", 2),), ()]
    assert polls.hosts["h1"].address == "10.0.0.1"
    polls.close()
    assert polls.turn() is None


# ---------------------------------------------------------------- processes

SERVICES = JobServices("127.0.0.1:1", bytes(32), 2)


def environs(*starts: SlotStart, offsets: dict[str, int] | None = None, **environ: str) -> list[dict[str, str]]:
    offsets = offsets or dict.fromkeys((start.host for start in starts), 0)
    placed = place_starts(starts, ElasticOptions(2, 4, timeout_seconds=60), offsets)
    specs = plan_starts(placed, 4, ProcessOptions(("true",)), SERVICES, environ, 7)
    assert [spec.number for spec in specs] == [start.slot for start in starts]
    assert all(spec.descriptors == (7,) and spec.is_restartable for spec in specs)
    return [dict(spec.environ) for spec in specs]


def test_environment_of_the_first_view() -> None:
    starts = [SlotStart(0, 0, "h1", 0, 3), SlotStart(1, 0, "h1", 1, 3), SlotStart(2, 0, "h2", 0, 3)]
    first, second, third = environs(*starts, offsets={"h1": 0, "h2": 2})
    numbers = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert [first[f"REIGEN_{name}"] for name in numbers] == ["0", "3", "0", "2", "0", "2"]
    assert [second[f"HOROVOD_{name}"] for name in numbers] == ["1", "3", "1", "2", "0", "1"]
    assert [third[f"REIGEN_{name}"] for name in numbers] == ["2", "3", "0", "1", "1", "2"]
    names = ("ELASTIC", "SLOT", "INCARNATION", "MIN_SIZE", "MAX_SIZE", "ELASTIC_TIMEOUT", "VOTER_FD", "RENDEZVOUS")
    assert [third[f"REIGEN_{name}"] for name in names] == ["1", "2", "0", "2", "4", "60", "7", "127.0.0.1:1"]
    assert (third["HOROVOD_ELASTIC"], third["HOROVOD_HOSTNAME"], third["HOROVOD_LOCAL_RANK"]) == ("1", "h2", "0")
    assert "REIGEN_ELASTIC_CANDIDATE" not in third


def test_environment_of_a_candidate() -> None:
    [environ] = environs(SlotStart(5, 3, "h1", 1), RANK="1", REIGEN_RANK="1", HOROVOD_SIZE="2", OTHER="x")
    assert not {"RANK", "REIGEN_RANK", "REIGEN_SIZE", "HOROVOD_RANK", "HOROVOD_SIZE"} & set(environ)
    wanted = {"REIGEN_SLOT": "5", "REIGEN_INCARNATION": "3", "REIGEN_ELASTIC_CANDIDATE": "1", "HOROVOD_LOCAL_RANK": "1"}
    assert wanted.items() <= environ.items()
    assert environ["OTHER"] == "x"


def test_shares_of_a_host_do_not_depend_on_how_many_are_started() -> None:
    together = environs(*(SlotStart(slot, 0, "h1", slot, 4) for slot in range(4)))
    [alone] = environs(SlotStart(2, 1, "h1", 2))
    assert alone["OMP_NUM_THREADS"] == together[2]["OMP_NUM_THREADS"]


def test_a_job_within_an_elastic_job_is_its_own() -> None:
    assert without_elastic_variables({"REIGEN_SLOT": "1", "HOROVOD_ELASTIC": "1", "HOME": "/"}) == {"HOME": "/"}
    assert without_elastic_variables({"REIGEN_MAX_SERVERS": "4", "HOME": "/"}) == {"HOME": "/"}, "its servers stay"
    assert not without_elastic_variables({"REIGEN_KV_ON_WORKER_LOSS": "elastic"}), "nor do its workers come and go"
    assert without_elastic_variables({"REIGEN_KV_ON_WORKER_LOSS": "wait"}), "that is the user's"


def test_the_voters_memory_is_inherited() -> None:
    descriptor = make_voter_memory()
    try:
        assert os.fstat(descriptor).st_size == 128 << 10
    finally:
        os.close(descriptor)


def test_announcements_of_changes() -> None:
    note = ChangeNote(3, "rank 1: x", seconds=0.5, outcome=StepOutcome.UNDONE, step=7, samples=(0, 16, 32))
    assert parse_announcement(ELASTIC_CHANGE_KEY, CHANGE_NOTE_CODEC.encode(note)) == ChangeExplained(note)
    for bad in (b"", b"x", CHANGE_NOTE_CODEC.encode(note)[:-2]):
        with pytest.raises(WireError):
            parse_announcement(ELASTIC_CHANGE_KEY, bad)


def test_announcements() -> None:
    assert parse_announcement(ELASTIC_FINISHED_KEY, b"12") == MemberFinished(12)
    straggler = MemberStraggles(2, 0, 150, 50, 3, 0.25, 0.1)
    assert parse_announcement(ELASTIC_STRAGGLER_KEY, b"2 0 150 50 3 0.25 0.1") == straggler
    assert parse_announcement(ELASTIC_PAUSE_KEY, b"2.13 2400000000 3 4") == PauseAnnounced(2.13, 2400000000, (3, 4))
    bad = [(ELASTIC_STRAGGLER_KEY, value) for value in (b"", b"2 0 150 50 3 0.25", b"2 0 150 50 3 0.25 x")]
    bad += [(ELASTIC_PAUSE_KEY, value) for value in (b"", b"1", b"x 1 1", b"1 1.5 1", b"1 1 x")]
    bad += [(ELASTIC_PAUSE_KEY, value) for value in (b"nan 1 1", b"inf 1 1", b"-1 1 1", b"1e308 1 1", b"1 -1 1")]
    bad.append((ELASTIC_PAUSE_KEY, b"1 1%s 1" % (b"0" * 400)))
    for key, value in (*bad, (ELASTIC_FINISHED_KEY, b"x"), (ELASTIC_VIEW_KEY, b"x"), (ELASTIC_VIEW_KEY, b"")):
        with pytest.raises((ReigenError, ValueError)):
            parse_announcement(key, value)
