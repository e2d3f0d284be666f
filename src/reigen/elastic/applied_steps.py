"""Question of one rank, whether all have applied a step, while they go on: so it may save a state alone.

a. Rank 0 sends the others a note with the number of steps that it has applied (`Topic.APPLIED_STEPS`), and submits an
   exchange whose name has that number. It waits for the exchange, which is complete when all ranks have submitted it.
b. A rank that gets the note submits the exchange, too: at once, if it has applied so many steps, by the thread that
   reads the note; else when it has. Its program need not do anything, and may be in the next step.
c. Another rank that wants to know sends such a note to rank 0, submits the exchange and waits. Rank 0 does (a) when its
   own program asks, or has gone on to the next step or to the end. Before that it does not: it is the one that writes
   checkpoints, and who waits for it is the next rank 0 if it dies.
d. No rank submits a number twice in a view. A rank that has submitted it waits for the exchange that is there.

A step cannot end while a rank waits, so there is one number at a time. Deaths and deadlines are those of the exchange.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress

from reigen.context import Context
from reigen.engine.handle import Handle
from reigen.engine.messages import Topic
from reigen.errors import ReigenError


class AppliedSteps:
    """One rank's part."""

    def __init__(self) -> None:
        #: steps that this rank has applied
        self._number = 0
        #: guards what follows; nobody waits for another rank while he holds it
        self._lock = threading.Lock()
        self._context: Context | None = None
        #: for which number another rank has asked in this view, and which one this rank has submitted
        self._asked = self._submitted = -1
        #: on rank 0: the number from which its program has gone on
        self._passed = -1
        self._exchange: Handle | None = None

    def enter_view(self, context: Context) -> None:
        """Begin in a view, before rank 0 can ask there."""
        with self._lock:
            self._context, self._exchange = context, None
            self._asked = self._submitted = self._passed = -1
        own = weakref.ref(self)

        def listen(_: int, data: bytes) -> None:
            if (applied := own()) is not None:
                applied._note_question(context, int.from_bytes(data))

        context.listen(Topic.APPLIED_STEPS, listen)

    def wait_for_all(self) -> None:
        """Return when all ranks are known to have applied as many steps as this one.

        Raises:
            CollectiveError: a rank was lost, or did not apply them before the deadline.
        """
        with self._lock:
            context, number = self._context, self._number
            assert context is not None, "the job has begun"
            if self._submitted < number:
                if context.rank != 0:
                    context.post(Topic.APPLIED_STEPS, number.to_bytes(8))
                self._submit(context, number)
            exchange = self._exchange
        assert exchange is not None, "it was submitted"
        exchange.wait()

    def note(self, number: int) -> None:
        """Take note that this rank has applied so many steps: others may wait for that."""
        self._number = number  # before the look: who asks meanwhile sees it
        if self._asked > self._submitted:
            self._answer()

    def go_on(self) -> None:
        """Take note that the program begins another step, or is at the end: on rank 0, it does not ask any more."""
        self._passed = self._number
        if self._asked > self._submitted:
            self._answer()

    def _note_question(self, context: Context, number: int) -> None:
        with self._lock:
            if context is not self._context:
                return
            self._asked = max(self._asked, number)
        self._answer()

    def _answer(self) -> None:
        """Submit the exchange if it is time; steps (b) and (c)."""
        with self._lock, suppress(ReigenError):  # a view that has ended: nobody waits for an answer there
            if (context := self._context) is None:
                return
            limit = self._number if context.rank else self._passed
            if self._submitted < self._asked <= limit:
                self._submit(context, self._asked)

    def _submit(self, context: Context, number: int) -> None:
        if context.rank == 0:
            context.post(Topic.APPLIED_STEPS, number.to_bytes(8))
        self._exchange = context.exchange(b"", name=f"job.applied.{number}", blocking=False)
        self._submitted = number
