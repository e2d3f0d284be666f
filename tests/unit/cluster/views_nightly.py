"""Schedules of elastic jobs by the million: `make nightly-elastic`, or

    python -m tests.unit.cluster.views_nightly --count 1000000

What was played is kept in a file, a line for each block of seeds; the next run plays what is missing. A schedule that
breaks an invariant is told in a file of its own, and does not stop the others. ``--replay SEED`` plays one again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.unit.cluster.views_simulator import FAULTS, Plan, Simulator, make_plan, play

#: Seeds of one block: what is played anew after an interruption, at most, by each process.
BLOCK_SIZE = 1_000
#: Every such seed has more hosts, and more faults, than those of the test suite.
_LARGE_EVERY = 4


@dataclass
class Block:
    """Schedules of consecutive seeds that were played.

    Attributes:
        first: seed; and how many there are.
        seconds: of processor time.
        seen: in how many schedules each thing has happened.
        violations: seeds, with the first line of what is broken.
    """

    first: int
    count: int
    seconds: float = 0.0
    num_events: int = 0
    simulated_seconds: float = 0.0
    seen: dict[str, int] = field(default_factory=dict)
    violations: dict[str, str] = field(default_factory=dict)


def plan_of(seed: int) -> Plan:
    """Return the plan of a seed: the suite's, and for every fourth a larger one."""
    plan = make_plan(random.Random(seed))
    if seed % _LARGE_EVERY == 0:
        rng = random.Random(~seed)
        plan.hosts = rng.choice(((2, 2, 2), (3, 3), (1,) * 6, (1,) * 7, (4, 1, 1), (2, 2, 1, 1)))
        plan.max_size = sum(plan.hosts) + rng.choice((0, 2))
        plan.min_size = rng.choice((1, 1, 2))
        plan.faults = rng.choices([*FAULTS], [*FAULTS.values()], k=rng.choice((6, 12, 20)))
        plan.fault_seconds = rng.choice((0.5, 4.0, 10.0))
    return plan


def play_block(first: int, count: int, stories: Path | None = None) -> Block:
    """Play schedules; what one of them breaks is written to a file beside ``stories``."""
    began, seen, block = time.process_time(), Counter[str](), Block(first, count)
    for seed in range(first, first + count):
        try:
            simulator = Simulator(seed, plan=plan_of(seed)).run()
        except Exception as error:  # noqa: BLE001  an error of the machines is as bad as a broken invariant
            block.violations[str(seed)] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            if stories is not None:
                stories.with_name(f"{stories.name}.{seed}").write_text(_tell(seed))
            continue
        seen.update(dict.fromkeys(simulator.seen, 1))
        block.num_events += simulator.num_events
        block.simulated_seconds += simulator.now
    block.seen, block.seconds = dict(seen), time.process_time() - began
    return block


def _tell(seed: int) -> str:
    log: list[str] = []
    with suppress(Exception):
        Simulator(seed, plan=plan_of(seed), log=log).run()
    return "\n".join(log)


def _work(task: tuple[int, int, Path]) -> Block:
    return play_block(*task)


def read_blocks(path: Path) -> list[Block]:
    """Read what was played; a last line that was cut off is dropped."""
    blocks = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError, TypeError):
            blocks.append(Block(**json.loads(line)))
    return blocks


def blocks_to_play(done: Sequence[Block], first: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield (first seed, count) of blocks that are missing among those of these seeds."""
    played = {block.first for block in done if block.count == BLOCK_SIZE}
    for seed in range(first - first % BLOCK_SIZE, first + count, BLOCK_SIZE):
        if seed not in played:
            yield seed, BLOCK_SIZE


def summarize(blocks: Sequence[Block]) -> str:
    """Describe what was played: schedules, events, what happened in them, what was broken."""
    count, seconds = sum(block.count for block in blocks), sum(block.seconds for block in blocks)
    events, simulated = sum(b.num_events for b in blocks), sum(b.simulated_seconds for b in blocks)
    broken = {seed: text for block in blocks for seed, text in block.violations.items()}
    seen = Counter[str]()
    for block in blocks:
        seen.update(block.seen)
    lines = [
        f"{count} schedules, {events} events, {simulated / 3600:.0f} simulated hours",
        f"{seconds:.0f} s of processor time, {count / max(seconds, 1e-9):.0f} schedules a second and core",
        "schedules with: " + ", ".join(f"{what} {number}" for what, number in seen.most_common()),
        f"{len(broken)} violation(s)",
        *(f"  seed {seed}: {text}" for seed, text in broken.items()),
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Play what is missing; returns 1 if an invariant was broken in any of the file's schedules."""
    parser = argparse.ArgumentParser(prog="views_nightly", description=__doc__)
    parser.add_argument("--first", type=int, default=1_000_000, help="seed of the first schedule")
    parser.add_argument("--count", type=int, default=1_000_000, help="of schedules; those that were played count")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--file", type=Path, default=Path(".elastic-schedules.jsonl"), help="what was played")
    parser.add_argument("--replay", type=int, metavar="SEED", help="play one schedule, and tell all that happens")
    options = parser.parse_args(arguments)
    if options.replay is not None:
        play(options.replay, plan=plan_of(options.replay))
        return 0
    done = read_blocks(options.file)
    tasks = [(*each, options.file) for each in blocks_to_play(done, options.first, options.count)]
    began, told = time.monotonic(), 0.0
    workers = multiprocessing.get_context("spawn").Pool(options.jobs, os.nice, (10,))
    with workers as pool, options.file.open("a") as file:
        for number, block in enumerate(pool.imap_unordered(_work, tasks), 1):
            done.append(block)
            file.write(json.dumps(asdict(block)) + "\n")
            file.flush()
            if block.violations or time.monotonic() - told > 10 or number == len(tasks):
                told = time.monotonic()
                rest = (told - began) / number * (len(tasks) - number)
                broken = sum(len(each.violations) for each in done)
                print(f"{number * BLOCK_SIZE} of {len(tasks) * BLOCK_SIZE}, {rest:.0f} s left, {broken} violation(s)")
                sys.stdout.flush()
    mine = [block for block in done if options.first - BLOCK_SIZE < block.first < options.first + options.count]
    print(summarize(mine))
    return 1 if any(block.violations for block in mine) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
