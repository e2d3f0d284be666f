"""Rank of `reigen.run`: loads the function, calls it, and reports to the caller."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from reigen.cluster.environ import (
    ELASTIC_FINISHED_KEY,
    ELASTIC_VARIABLE,
    RENDEZVOUS_VARIABLE,
    SECRET_VARIABLE,
    SLOT_VARIABLE,
    detect_job,
    parse_secret,
)
from reigen.cluster.membership.rendezvous import RendezvousClient
from reigen.errors import PeerLostError, ReigenError
from reigen.launch.options import NetworkOptions
from reigen.runner.notes import send_notes_by
from reigen.runner.result_channel import RankNote, RankReport, ResultChannel
from reigen.runner.serialization import pack_object, pickle_exception, unpack_object

#: Seconds that a rank that has failed may take to end.
_LAST_SECONDS = 5.0


def main(arguments: Sequence[str]) -> int:
    """Run the task; ``arguments`` are the descriptors of payload and channel. Returns the exit code."""
    call, channel = map(int, arguments)
    os.set_inheritable(call, False)
    slot = os.environ.get(SLOT_VARIABLE) if ELASTIC_VARIABLE in os.environ else None
    rank = detect_job(os.environ).rank if slot is None else int(slot)
    with ResultChannel(channel) as caller:
        try:
            func, args, kwargs = _load(call)
            send_notes_by(lambda note: caller.post(RankNote(rank), note))
            result = func(*args, **kwargs)
            what = f"what the function returned in rank {rank} ({type(result).__name__})"
            report, payload = RankReport(rank), pack_object(result, what)
        except BaseException as error:  # noqa: BLE001  all of them are reported
            report, payload = failure_report(rank, error), pack_error(error)
        # Before this process begins to end: ranks that wait for this one fail later than it, and report it later.
        caller.post(report, payload)
        os.close(payload)
    if not report.failed:
        if slot is not None:
            _tell_finished(int(slot))
        return 0
    code = report.exit_code or 1  # sys.exit(0) in the function is no result: the others must not wait for one
    _end_within(_LAST_SECONDS, code)
    return code


def _tell_finished(slot: int) -> None:
    """Tell the launcher of an elastic job that this process's end is no death; it may know already."""
    secret = parse_secret(os.environ.get(SECRET_VARIABLE, ""))
    tls = NetworkOptions.from_environ(os.environ).make_tls()
    with suppress(OSError, ReigenError):  # the launcher has gone, and so will this process
        assert secret is not None, "the launcher has set it"
        client = RendezvousClient(os.environ[RENDEZVOUS_VARIABLE], secret, slot, _LAST_SECONDS, tls)
        client.put_first(ELASTIC_FINISHED_KEY, str(slot).encode())
        client.close()


def _end_within(seconds: float, code: int) -> None:
    """End this process even if a thread that the function started goes on: the others wait for this rank."""

    def end() -> None:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _load(call: int) -> tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]:
    try:
        func, args, kwargs = unpack_object(call)
    except Exception as error:
        error.add_note("reigen.run: the function, or an argument, cannot be loaded in the rank")
        raise
    finally:
        os.close(call)
    return func, args, kwargs


def failure_report(rank: int, error: BaseException) -> RankReport:
    """Make the report of an exception that the function raised."""
    code = 1
    if isinstance(error, SystemExit):
        code = 0 if error.code is None else error.code if isinstance(error.code, int) else 1
    text = traceback.format_exception_only(error)[0].strip()
    return RankReport(rank, failed=True, is_victim=_is_victim(error), exit_code=code & 0xFF, text=text)


def _is_victim(error: BaseException) -> bool:
    """Return whether this rank failed because another one had gone: PeerLostError is in the exception's chain."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        if isinstance(each, PeerLostError):
            return True
        seen.add(id(each))
        todo += [each.__cause__, each.__context__]
    return False


def pack_error(error: BaseException) -> int:
    """Pack the text of the traceback and, where it can be pickled, the exception."""
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without main()
    text = "".join(traceback.format_exception(type(error), error, trace))
    return pack_object((text, pickle_exception(error)), "a traceback")
