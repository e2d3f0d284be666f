"""The end of a process by its own hand, at one point of one step of a job."""

from __future__ import annotations

import os
import signal
from typing import Any

from reigen import context


class Death:
    """Where ``DIES_AT`` says: ``POINT:NUMBER`` of the step."""

    def __init__(self) -> None:
        self._point, _, number = os.environ.get("DIES_AT", ":-1").partition(":")
        self.number = int(number)

    def at(self, point: str, number: int) -> None:
        """The program has come to this point; with `change`, in the next view behind this step."""
        if point == self._point and (number == self.number or (point == "change" and number >= self.number)):
            os.kill(os.getpid(), signal.SIGKILL)

    def watch_changes(self, jobs: Any, job: Any) -> None:
        """Die in a change of members, too, which exchanges objects; `digest`: when newcomers have read the state."""
        exchange = jobs.allgather_object

        def exchange_or_die(obj: object, name: str | None = None) -> list[object]:
            elastic = context.elastic_job()
            if elastic is not None and elastic.epoch > 1:
                self.at("change", job.number)
            if name == "elastic.digest" and job._arrival is not None:
                self.at("digest", self.number)
            return exchange(obj, name)

        jobs.allgather_object = exchange_or_die
