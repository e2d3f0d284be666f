"""A worker or a server that does nothing but what it is told, a line of stdin for each: a program for tests.

    servers | barrier NAME [SECONDS] | events | serve | dead [SECONDS] | leave

Each is answered with a line of JSON. At the end of stdin it closes its membership, and exits.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from typing import Any

from reigen.config import Config, load_config
from reigen.errors import CollectiveError, ReigenError
from reigen.kv.membership.discovery import choose_listen_host
from reigen.kv.membership.environment import read_process_config
from reigen.kv.membership.scheduler_client import EventFeed, SchedulerClient
from reigen.net.listener import join_address

DEADLINE_SECONDS = 30.0


def main() -> int:
    config = load_config(os.environ)
    settings = read_process_config(os.environ, config)
    try:
        address = join_address(choose_listen_host(settings)[0], os.getpid()) if settings.role == "server" else ""
        member = SchedulerClient(settings, address, time.monotonic() + config.start_timeout_seconds)
    except ReigenError as error:
        say(told(error))
        return 1
    say({"joined": member.number, "recovers": member.is_recovery, "secret": hash(member.secret)})
    feed = member.feed()
    for line in sys.stdin:
        try:
            say(answer(member, feed, config, *line.split()))
        except ReigenError as error:
            say(told(error))
    member.close()
    return 0


def answer(member: SchedulerClient, feed: EventFeed, config: Config, what: str, *arguments: str) -> Any:
    now = time.monotonic()
    if what == "servers":
        seconds = float(os.environ.get("SERVERS_SECONDS", config.start_timeout_seconds))
        return [[peer.number, peer.address] for peer in member.servers(now + seconds)]
    if what == "barrier":
        seconds = float(arguments[1]) if len(arguments) > 1 else DEADLINE_SECONDS
        member.barrier(arguments[0], now + seconds)
        return "done"
    if what == "events":
        assert select.select([feed], [], [], DEADLINE_SECONDS)[0], "nothing happened"
        return [str(event) for event in feed.take()]
    if what == "serve":  # until the job is over
        told: list[str] = []
        while not told or not told[-1].startswith("the job is over"):
            told += answer(member, feed, config, "events")
        return told
    if what == "leave":
        return member.leave()
    assert what == "dead"
    return member.num_dead_nodes(float(arguments[0]) if arguments else 60.0)


def told(error: ReigenError) -> dict[str, Any]:
    ranks = error.ranks if isinstance(error, CollectiveError) else ()
    return {"error": type(error).__name__, "text": str(error), "ranks": ranks}


def say(what: object) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main())
