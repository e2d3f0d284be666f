"""Agreement of the ranks on a list of gradients, some of which may be missing on some ranks."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from reigen.api.gradients.plan_agreement import first_differences
from reigen.api.objects import allgather_object
from reigen.context import Context
from reigen.errors import MismatchError


class GradientKind(enum.IntEnum):
    """Kind of a variable's gradient."""

    MISSING = 0
    DENSE = 1
    SPARSE = 2


def agree_on_gradients(
    context: Context, description: Sequence[str], kinds: Sequence[GradientKind], name: str, process_set: int = 0
) -> list[GradientKind]:
    """Collective over the set: as which kind each gradient is reduced, the same on every rank.

    One that is missing on all ranks is left out; one that is missing on some of them, or sparse on some only, is dense:
    a rank that has none contributes zeros.

    Args:
        context: of the job.
        description: a line for each variable, and for the options that must be the same everywhere.
        kinds: by variable, those of this rank.
        name: matches the ranks' calls.
        process_set: number of the set.

    Raises:
        MismatchError: the descriptions differ. Every rank raises it; it says where each one first differs.
    """
    proposals = allgather_object(context, (tuple(description), tuple(map(int, kinds))), name, process_set)
    descriptions = [lines for lines, _ in proposals]
    if any(lines != descriptions[0] for lines in descriptions):
        ranks = context.process_sets[process_set]
        details = dict(zip(ranks, first_differences(descriptions), strict=True))
        raise MismatchError("the ranks have different variables or options", tensor=name, ranks=(), details=details)
    return [_combine(column) for column in zip(*(kinds for _, kinds in proposals), strict=True)]


def _combine(kinds: Sequence[int]) -> GradientKind:
    return GradientKind(kinds[0]) if len(set(kinds)) == 1 else GradientKind.DENSE
