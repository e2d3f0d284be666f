"""Decision whether a member that makes all steps slower is asked to leave. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from reigen.launch.elastic.options import ElasticOptions
from reigen.launch.elastic.slots import JobSlot, SlotState

#: Steps between two ejections of stragglers: the members that are left are to show their pace first.
EJECTION_STEPS = 100


class StragglerEjection:
    """Stragglers of a job that were ejected, or reported to the user.

    Args:
        options: of the job.
    """

    def __init__(self, options: ElasticOptions) -> None:
        self._options = options
        #: the step at which one was ejected last
        self._ejected_step = -EJECTION_STEPS
        #: whom the user has been told of, and why they stay
        self._reported: dict[tuple[int, int], str] = {}

    def note_ejection(self, step: int) -> None:
        """Take note that one is asked to leave."""
        self._ejected_step = step

    def is_news(self, slot: JobSlot, obstacle: str) -> bool:
        """Return whether this reason for a straggler to stay is a new one; it is not from now on."""
        is_new = self._reported.get(slot.id) != obstacle
        self._reported[slot.id] = obstacle
        return is_new

    def find_obstacle(
        self,
        slot: JobSlot,
        step: int,
        min_ranks: int,
        usable: Sequence[JobSlot],
        members: Sequence[tuple[int, int]],
        deciding_host: str,
    ) -> str:
        """Return why a straggler is not ejected; empty: it is.

        Args:
            slot: of the straggler.
            step: the latest that was slow.
            min_ranks: with fewer members the program makes no steps.
            usable: places that have a process, or may have one.
            members: of the present view.
            deciding_host: that of rank 0.
        """
        if not self._options.ejects_stragglers:
            return "--eject-stragglers would replace it"
        if step - self._ejected_step < EJECTION_STEPS:
            return f"another one was ejected less than {EJECTION_STEPS} steps ago"
        others = [each for each in usable if each is not slot]
        if any(each.state is SlotState.FREE or each.id not in members for each in others):
            return ""  # somebody takes its place
        least = max(self._options.min_ranks, min_ranks)
        if sum(each.id in members for each in others) < least:
            return f"no other process can take its place, and the job needs {least}"
        if slot.host == deciding_host and all(each.host != deciding_host for each in others):
            return "it is the last one on the host of rank 0, which decides where hosts lose each other"
        return ""
