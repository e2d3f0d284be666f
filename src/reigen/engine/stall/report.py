"""A stall in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reigen.engine.stall.inspector import ANSWER_TIMEOUT_SECONDS, PendingCollective, Stall, name_ranks
from reigen.engine.stall.stack_sampler import StackFrame, StackSample
from reigen.errors import DeadlineError

#: Names that are told of one group of collectives, and ranks whose place is told.
_MOST_NAMES, _MOST_RANKS = 5, 16
#: Characters of an error for each of them; all together travel in one control message.
_MAX_DETAILS = 2000

_ADVICE = (
    "  Every rank must call the same collectives: look for code that only some ranks run, or that takes some of them "
    "longer, "
    "and for ranks that have fewer batches (join(), or uneven_data() of reigen.torch, lets the others go on)."
)


def format_stall(
    stall: Stall, process_sets: Mapping[int, Sequence[int]], states: Mapping[int, str], relays: str = ""
) -> str:
    """The warning.

    Args:
        stall: what is known.
        process_sets: the ranks of each set.
        states: for silent ranks, what the kernel knows of their processes.
        relays: `describe_relays` of the silent ranks.
    """
    lines = ["Stall: collectives wait for ranks that do not come."]
    for group in _group_pending(stall.waits):
        lines += _format_group(group, process_sets, stall.now)
    lines += [f"  {line}" for line in _format_cycle(stall)]
    if stall.is_deadlock:
        lines.append(
            "  Every rank waits in one of them, so none can submit what the others lack: they wait for nothing."
        )
    ranks = [*stall.missing, *(rank for rank in (*stall.answers, *stall.silent) if rank not in stall.missing)]
    texts = {rank: _format_rank(rank, stall, states) for rank in ranks[:_MOST_RANKS]}
    for text in texts.values():
        lines += [f"  {line}" for line in text]
    if len(ranks) > _MOST_RANKS:
        lines.append(f"  and {len(ranks) - _MOST_RANKS} more ranks")
    lines += [f"  {line}" for line in relays.removeprefix("; ").split("; ") if line]
    return "\n".join([*lines, _ADVICE])


def stall_error(stall: Stall, states: Mapping[int, str]) -> DeadlineError:
    """The error that ends the job: names the collective that waits longest, and its missing ranks."""
    first = stall.waits[0]
    seconds = stall.now - first.since
    what = "did not take their part in it" if first.is_running else "did not submit it"
    reason = (
        f"{name_ranks(first.missing)} {what} within {seconds:.3g} s ({name_ranks(first.ready)} did), "
        f"so the job is ended; "
        "REIGEN_STALL_SHUTDOWN_TIME_SECONDS sets after how long"
    )
    details = {
        rank: "\n  ".join(_format_rank(rank, stall, states)).removeprefix(f"rank {rank} ")[:_MAX_DETAILS]
        for rank in first.missing[:_MOST_RANKS]
    }
    return DeadlineError(reason, tensor=first.name, ranks=first.missing, details=details)


def format_resolved(waits: Sequence[PendingCollective], now: float) -> str:
    """Format the report that a stall is over."""
    groups: dict[tuple[str, bool], list[PendingCollective]] = {}
    for wait in waits:
        groups.setdefault((wait.kind, wait.is_running), []).append(wait)
    texts = []
    for (kind, is_running), group in groups.items():
        seconds = max(now - wait.since for wait in group)
        what = "its data has been moved" if is_running else "no rank is missing any more"
        texts.append(f"Stall over: {kind} {_format_names(group)}: {what}, after {seconds:.3g} s.")
    return "\n".join(texts)


def format_coordinator_silence(name: str, seconds: float, states: Mapping[int, str]) -> str:
    """Format the report, of another rank that has waited in ``name`` for so long, that rank 0 does not answer."""
    return (
        f"Stall: {_format_no_answer(0, states)}\n  {name} has waited for {seconds:.3g} s. Rank 0 "
        f"coordinates: until it goes "
        "on no collective can begin."
    )


def _group_pending(waits: Sequence[PendingCollective]) -> list[list[PendingCollective]]:
    groups: dict[object, list[PendingCollective]] = {}
    for wait in waits:
        groups.setdefault((wait.kind, wait.process_set, wait.ready, wait.missing, wait.is_running), []).append(wait)
    return list(groups.values())


def _format_names(waits: Sequence[PendingCollective]) -> str:
    names = ", ".join(wait.name.removesuffix(f" (process set {wait.process_set})") for wait in waits[:_MOST_NAMES])
    return names if len(waits) <= _MOST_NAMES else f"{names} and {len(waits) - _MOST_NAMES} more"


def _format_group(
    waits: Sequence[PendingCollective], process_sets: Mapping[int, Sequence[int]], now: float
) -> list[str]:
    first = waits[0]
    members = f" of process set {first.process_set} ({name_ranks(process_sets.get(first.process_set, ()))})"
    ready = "in the middle of it" if first.is_running else "waiting"
    return [
        f"  {first.kind} {_format_names(waits)}{members if first.process_set else ''} for {now - first.since:.3g} s",
        f"    {ready}: {name_ranks(first.ready)}; missing: {name_ranks(first.missing)}",
    ]


def _format_cycle(stall: Stall) -> list[str]:
    steps = stall.cycle()
    if not steps:
        return []
    around = [*steps[1:], steps[0]]
    text = "; ".join(
        f"{wait.name} lacks rank {rank}, which waits in {following.name}"
        for (wait, rank), (following, _) in zip(steps, around, strict=True)
    )
    return [f"They wait for each other in a circle: {text}."]


def _format_rank(rank: int, stall: Stall, states: Mapping[int, str]) -> list[str]:
    """Format where a rank is, in lines."""
    answer = stall.answers.get(rank)
    if answer is None:
        return [_format_no_answer(rank, states)]
    who = f"rank {rank} (process {answer.pid} on {answer.host})"
    own = next((place for place in answer.stack if not place.is_library), None)
    where = own or next(iter(answer.stack), None)
    lines = [f"{who} has no Python frames" if where is None else f"{who} is at {_format_frame(where)}"]
    for index, place in enumerate(answer.stack):
        if place is not where:
            before = own is not None and index < answer.stack.index(own)
            lines.append(f"    {'inside' if before else 'called from'} {_format_frame(place)}")
    lines += [f"    its thread {name} is at {_format_frame(place)}" for name, place in answer.threads]
    return [*lines, *(f"    {line}" for line in _format_pending_of(rank, answer, stall))]


def _format_no_answer(rank: int, states: Mapping[int, str]) -> str:
    why = f"its process {states[rank]}" if states.get(rank) else "it is stopped, or busy in native code"
    return f"rank {rank} does not answer within {ANSWER_TIMEOUT_SECONDS:g} s: {why}"


def _format_frame(place: StackFrame) -> str:
    source = f": {place.source}" if place.source else ""
    return f"{place.file}:{place.line} in {place.function}{source}"


def _format_pending_of(rank: int, answer: StackSample, stall: Stall) -> list[str]:
    """Format the wait of a rank that is itself missing."""
    lines = []
    waits = {wait.name: wait for wait in (*stall.others, *stall.waits)}
    if answer.running:
        lines.append(f"it is in the middle of {answer.running}")
    if answer.blocked_in:
        wait = waits.get(answer.blocked_in)
        lacks = "" if wait is None or rank in wait.missing else f", for which {_format_missing(wait)}"
        kind = "" if wait is None else f"{wait.kind} "
        lines.append(f"it waits in {kind}{answer.blocked_in}{lacks}")
    elif answer.outstanding:
        more = answer.num_outstanding - len(answer.outstanding)
        names = ", ".join(answer.outstanding) + (f" and {more} more" if more else "")
        lines.append(f"it has submitted, and not waited for, {names}")
    return lines


def _format_missing(wait: PendingCollective) -> str:
    return f"{name_ranks(wait.missing)} {'is' if len(wait.missing) == 1 else 'are'} missing"
