"""Which control groups a process is in, and what they leave it: trees of files as the kernel shows them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from reigen.resources.memory import AvailableMemory, available_memory, cgroup_directories, describe_memory_limit
from reigen.resources.oom import OomKillCounts, OomMonitor, count_oom_kills, explain_oom_kill

MIB = 1 << 20
#: What version 1 says where there is no limit.
NO_LIMIT = 9223372036854771712
DID_THAT = "the kernel's OOM killer did that: out of memory"
ENDED_ONE = "the kernel's OOM killer has ended a process of this control group meanwhile"


class Tree:
    """A made-up /proc, and control groups mounted at ``point`` (version 2) or ``point/memory`` (version 1)."""

    def __init__(self, top: Path) -> None:
        self.proc, self.point = top / "proc", top / "sys fs"
        (self.proc / "self").mkdir(parents=True)
        self.write({self.proc / "meminfo": "MemTotal: 25165824 kB\nMemAvailable: 23068672 kB\n"})
        self.write({self.proc / "vmstat": "pgfault 5\noom_kill 7\n"})

    def write(self, files: Mapping[Path, object]) -> None:
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{content}\n")

    def process(self, groups: str, *mounts: str) -> None:
        self.write({self.proc / "self/cgroup": groups, self.proc / "self/mountinfo": "\n".join(mounts)})

    def unified(self, root: str = "/", point: str = "") -> str:
        where = str(self.point / point).replace(" ", "\\040")
        return f"30 24 0:26 {root} {where} rw,nosuid shared:4 master:1 - cgroup2 cgroup2 rw,nsdelegate"

    def legacy(self, root: str = "/") -> str:
        where = str(self.point / "memory").replace(" ", "\\040")
        return f"35 31 0:32 {root} {where} rw,relatime - cgroup cgroup rw,memory"

    def group(self, path: str, limit: object, used: int, *, cached: int = 0, kills: int = 0) -> None:
        """A group of version 2."""
        here = self.point / path
        self.write(
            {
                here / "memory.max": limit,
                here / "memory.current": used,
                here / "memory.high": 1,
                here / "memory.stat": f"anon 1\ninactive_file {cached}\nactive_file 0\nslab_reclaimable 0\nshmem 5",
                here / "memory.events": f"low 0\noom 0\noom_kill {kills}\noom_group_kill 0",
            }
        )

    def group_1(self, path: str, limit: int, used: int, *, swap_limit: int = NO_LIMIT, kills: int = 0) -> None:
        """A group of version 1."""
        here = self.point / "memory" / path
        self.write(
            {
                here / "memory.limit_in_bytes": limit,
                here / "memory.usage_in_bytes": used,
                here / "memory.memsw.limit_in_bytes": swap_limit,
                here / "memory.memsw.usage_in_bytes": used + 50 * MIB,
                here / "memory.stat": f"inactive_file 0\ntotal_inactive_file {10 * MIB}\ntotal_active_file {5 * MIB}",
                here / "memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}",
            }
        )


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_without_control_groups_the_machine_says_what_there_is(tree: Tree) -> None:
    assert available_memory(tree.proc) == AvailableMemory(23068672 << 10)
    assert count_oom_kills(tree.proc) == OomKillCounts(None, 7)


def test_nobody_says_anything(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == AvailableMemory(None)
    assert count_oom_kills(tmp_path) == OomKillCounts(None, None)
    assert AvailableMemory(None).allows(1 << 60)


def test_the_least_of_a_group_and_those_above_it_counts(tree: Tree) -> None:
    tree.process("0::/a/b", tree.unified())
    tree.group("a", 300 * MIB, 100 * MIB)
    tree.group("a/b", "max", 60 * MIB, kills=2)
    assert cgroup_directories(tree.proc / "self") == [tree.point / "a/b", tree.point / "a"]  # the root has no limit
    assert available_memory(tree.proc) == AvailableMemory(200 * MIB, f"within {tree.point}/a/memory.max = 300.0 MiB")
    tree.group("a/b", 100 * MIB, 60 * MIB)
    assert available_memory(tree.proc) == AvailableMemory(40 * MIB, f"within {tree.point}/a/b/memory.max = 100.0 MiB")
    assert count_oom_kills(tree.proc) == OomKillCounts(0, 7)


def test_file_cache_is_not_counted_as_used(tree: Tree) -> None:
    tree.process("0::/a", tree.unified())
    tree.group("a", 300 * MIB, 290 * MIB, cached=250 * MIB)
    assert available_memory(tree.proc).num_bytes == 260 * MIB
    tree.group("a", 300 * MIB, 310 * MIB)
    assert available_memory(tree.proc).num_bytes == 0


def test_in_a_namespace_of_its_own_the_mount_begins_at_the_group(tree: Tree) -> None:
    tree.process("0::/", tree.unified())
    tree.group("", 300 * MIB, 100 * MIB)
    assert available_memory(tree.proc).num_bytes == 200 * MIB


def test_a_mount_of_a_part_of_the_hierarchy(tree: Tree) -> None:
    tree.process("0::/docker/1f/job", tree.unified("/docker/1f"))
    tree.group("", 300 * MIB, 100 * MIB)
    tree.group("job", 200 * MIB, 50 * MIB)
    assert cgroup_directories(tree.proc / "self") == [tree.point / "job", tree.point]
    assert available_memory(tree.proc).num_bytes == 150 * MIB


def test_the_mount_that_shows_most_counts(tree: Tree) -> None:
    tree.process("0::/x/y", tree.unified("/other", "1"), tree.unified("/x/y", "2"), tree.unified("/", "3"))
    for path in ("1", "2", "3/x", "3/x/y"):
        tree.group(path, 300 * MIB, 0)
    assert cgroup_directories(tree.proc / "self") == [tree.point / "3/x/y", tree.point / "3/x"]


@pytest.mark.parametrize(
    ("group", "root", "seen"),
    [("/", "/../..", True), ("/../sibling", "/", False), ("/elsewhere", "/here", False)],
)
def test_what_is_not_below_the_mount(tree: Tree, group: str, root: str, seen: bool) -> None:
    tree.process(f"0::{group}", tree.unified(root))
    tree.group("", 300 * MIB, 0)
    assert cgroup_directories(tree.proc / "self") == ([tree.point] if seen else [])


def test_version_1(tree: Tree) -> None:
    tree.process("9:name=systemd:/s\n4:cpu,memory:/job/step\n2:cpu:/", tree.legacy())
    tree.group_1("", NO_LIMIT, 4000 * MIB)
    tree.group_1("job", 300 * MIB, 100 * MIB)
    tree.group_1("job/step", NO_LIMIT, 90 * MIB, kills=3)
    limit = f"within {tree.point}/memory/job/memory.limit_in_bytes = 300.0 MiB"
    assert available_memory(tree.proc) == AvailableMemory(215 * MIB, limit)
    assert count_oom_kills(tree.proc) == OomKillCounts(3, 7)
    tree.group_1("job", 300 * MIB, 100 * MIB, swap_limit=300 * MIB)  # 50 MiB are swapped out, and count
    assert available_memory(tree.proc).num_bytes == 165 * MIB


def test_both_versions_where_the_first_has_memory(tree: Tree) -> None:
    tree.process("4:memory:/job\n0::/user.slice", tree.legacy(), tree.unified("/", "unified"))
    tree.write({tree.point / "unified/user.slice/cgroup.procs": 1})
    tree.group_1("job", 300 * MIB, 100 * MIB, kills=1)
    assert cgroup_directories(tree.proc / "self") == [tree.point / "memory/job"]
    assert available_memory(tree.proc).num_bytes == 215 * MIB
    assert count_oom_kills(tree.proc) == OomKillCounts(1, 7)


def test_a_group_without_the_controller_is_passed_over(tree: Tree) -> None:
    tree.process("0::/a/b/c", tree.unified())
    tree.write({tree.point / "a/b/c/cgroup.procs": 1})
    tree.group("a/b", 300 * MIB, 0, kills=4)
    assert available_memory(tree.proc).num_bytes == 300 * MIB
    assert count_oom_kills(tree.proc) == OomKillCounts(4, 7)


def test_the_lowest_limit_in_words(tree: Tree) -> None:
    assert describe_memory_limit(tree.proc) == ""
    tree.process("4:memory:/a/b", tree.legacy())
    tree.group_1("a", 300 * MIB, 290 * MIB)
    tree.group_1("a/b", NO_LIMIT, 0)
    assert describe_memory_limit(tree.proc) == f"{tree.point}/memory/a/memory.limit_in_bytes = 300.0 MiB"


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (OomKillCounts(1, 5), OomKillCounts(2, 6), f"{DID_THAT} (L)"),
        (OomKillCounts(1, 5), OomKillCounts(1, 6), ""),  # another container's
        (OomKillCounts(1, 5), OomKillCounts(1, 5), ""),
        (OomKillCounts(None, 5), OomKillCounts(None, 5), ""),
        (OomKillCounts(None, 5), OomKillCounts(None, 6), f"{ENDED_ONE.replace('control group', 'host')} (L)"),
        (OomKillCounts(None, None), OomKillCounts(None, None), ""),
        (OomKillCounts(3, 5), OomKillCounts(None, 6), f"{ENDED_ONE.replace('control group', 'host')} (L)"),
    ],
)
def test_what_the_counters_say_of_a_process_that_was_killed(
    before: OomKillCounts, now: OomKillCounts, words: str
) -> None:
    assert explain_oom_kill(before, now, "L", lately=before).startswith(words)
    later = explain_oom_kill(before, now, "L", lately=now)
    assert (
        later
        == explain_oom_kill(before, now, "L")
        == (words and f"{words.replace(DID_THAT, ENDED_ONE)}, perhaps this one")
    )


class Watched:
    """An OomMonitor whose clock and counter a test sets, looked at whenever that is due."""

    def __init__(self) -> None:
        self.seconds, self.kills = 100.0, 3
        self.watch = OomMonitor(lambda: OomKillCounts(self.kills, 7), lambda: self.seconds)

    def live(self, seconds: float) -> None:
        end = self.seconds + seconds
        while (due := self.watch.sample()) < end - self.seconds:
            assert due > 0
            self.seconds += due
        self.seconds = end

    def words(self) -> str:
        """Of an end."""
        told = self.watch.explain()
        return "did that" if "did that" in told else "perhaps" if "perhaps this one" in told else told


def test_only_what_was_counted_shortly_before_an_end_is_its_cause() -> None:
    watched = Watched()
    watched.live(60)
    watched.kills += 1  # a child of a rank, which goes on
    assert "perhaps this one" in watched.watch.probable_cause()
    watched.live(60)
    assert watched.words() == "perhaps"
    assert watched.words() == ""
    watched.live(60)
    assert watched.words() == ""
    watched.kills += 1
    assert watched.words() == "did that"
    assert watched.words() == ""


@pytest.mark.parametrize("seconds", [0, 0.5, 1])
def test_a_look_between_a_kill_and_the_news_of_the_end_hides_nothing(seconds: float) -> None:
    watched = Watched()
    for _ in range(20):
        watched.live(10.3)
        watched.kills += 2
        watched.live(seconds)
        assert [watched.words() for _ in range(3)] == ["did that", "did that", ""]
    watched.kills += 1
    watched.live(seconds)
    assert watched.words() == "did that"


def test_who_has_not_looked_for_long_does_not_know_when_it_was() -> None:
    """A launcher that was stopped, together with its job."""
    watched = Watched()
    watched.live(60)
    watched.kills += 1
    watched.seconds += 60
    assert watched.words() == "perhaps"
