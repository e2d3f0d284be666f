"""The end of a process by its own hand, at one point of one step of a job; and others that hesitate until they know."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from reigen import context
from reigen.elastic import state_transfer
from reigen.errors import PeerLostError

#: How long a process hesitates at most: then the test fails.
_DEADLINE_SECONDS = 60.0


class ViewEnds:
    """Ends of a job's views, as this process has taken note of them: from then on nothing is applied in them.

    Args:
        job: whose views.
    """

    def __init__(self, job: Any) -> None:
        self._changed, self._epoch = threading.Condition(), 0
        progress = job.progress

        def progress_then_tell(epoch: int) -> object:
            found = progress(epoch)
            with self._changed:
                self._epoch = max(self._epoch, epoch)
                self._changed.notify_all()
            return found

        job.progress = progress_then_tell

    def wait(self) -> None:
        """Return when the view has ended that the program has."""
        epoch = elastic_epoch()
        with self._changed:
            if not self._changed.wait_for(lambda: self._epoch >= epoch, _DEADLINE_SECONDS):
                raise AssertionError(f"view {epoch} has not ended within {_DEADLINE_SECONDS:g} s")


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
        """Die in a change of members, too, which exchanges objects.

        `digest`: when newcomers have read the state; `compared`: when all know of that.
        """
        exchange, ends = jobs.allgather_object, ViewEnds(job)

        def exchange_or_die(obj: object, name: str | None = None) -> list[object]:
            elastic = context.elastic_job()
            if elastic is not None and elastic.epoch > 1:
                self.at("change", job.number)
            if name == "elastic.digest" and job._arrival is not None:
                self.at("digest", self.number)
                found = exchange(obj, name)
                self.at("compared", self.number)
                hesitate(ends, "digests")
                return found
            return exchange(obj, name)

        jobs.allgather_object = state_transfer.allgather_object = exchange_or_die
        begin_update, transfer = job.begin_update, job.training.transfer

        def begin_update_late() -> None:
            hesitate(ends, f"update:{job.number}")
            begin_update()

        def transfer_or_die(source: int, *args: Any, **options: Any) -> Any:
            if job.rank == source and elastic_epoch() > 1:
                self.at("sends", self.number)
            return transfer(source, *args, **options)

        job.begin_update, job.training.transfer = begin_update_late, transfer_or_die


def elastic_epoch() -> int:
    elastic = context.elastic_job()
    return 0 if elastic is None else elastic.epoch


def hesitate(ends: ViewEnds, place: str) -> None:
    """Wait there, once, until the view has ended, if ``HESITATES`` says so; with ``MISSES``, as if nothing had come."""
    misses = place == os.environ.get("MISSES")
    if misses or place == os.environ.get("HESITATES"):
        del os.environ["MISSES" if misses else "HESITATES"]
        ends.wait()
        if misses:
            raise PeerLostError("a member has died before all had everything")
