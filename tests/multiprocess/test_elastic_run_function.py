"""`reigen.run` of elastic jobs: results of those who are left, and errors where the job fails."""

from __future__ import annotations

import os
import signal
import threading

import msgspec
import pytest

import reigen
from reigen.cluster.environ import ELASTIC_VIEW_KEY
from reigen.cluster.membership.rendezvous import RendezvousClient
from reigen.cluster.membership.views.record import StepBase, View, ViewHost, ViewMember
from reigen.errors import LaunchError, RankFailedError

pytestmark = pytest.mark.slow


def rendezvous() -> RendezvousClient:
    secret = bytes.fromhex(os.environ["REIGEN_SECRET"])
    return RendezvousClient(os.environ["REIGEN_RENDEZVOUS"], secret, int(os.environ["REIGEN_SLOT"]), 30.0)


def who() -> tuple[int, int]:
    return int(os.environ["REIGEN_SLOT"]), int(os.environ["REIGEN_INCARNATION"])


def test_a_place_is_filled_again_and_the_results_are_those_of_the_last_processes():
    def func(base):
        slot, incarnation = who()
        if (slot, incarnation) == (1, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        client = rendezvous()
        if incarnation:
            members = (ViewMember(0, 0, 1), ViewMember(2, 0, 1), ViewMember(1, 1, 2))
            host = ViewHost("h", 1, "127.0.0.1", members)
            view = View.make(2, [host], base=StepBase(), sizes=(2, 3))
            client.put(ELASTIC_VIEW_KEY, msgspec.msgpack.encode(view))
            client.put("second", b"")
        client.get("second", 30.0)
        return base + slot, incarnation, "REIGEN_ELASTIC_CANDIDATE" in os.environ

    results = reigen.run(func, (10,), num_proc=3, min_num_proc=2, cooldown_range=(1, 1))
    assert results == [(10, 0, False), (12, 0, False), (11, 1, True)]  # by rank


def test_the_error_of_the_process_whose_end_was_the_jobs():
    def func():
        slot, _ = who()
        if slot:
            raise ValueError("this one was first")
        client = rendezvous()
        threading.Thread(target=client.get, args=("nothing", 1.0), daemon=True).run()

    def fail():
        try:
            func()
        except TimeoutError:
            raise KeyError("and this one second") from None

    with pytest.raises(RankFailedError, match=r"rank 1 of 2 raised ValueError: this one was first") as raised:
        reigen.run(fail, num_proc=2, min_num_proc=1)
    assert (raised.value.rank, raised.value.exit_code) == (1, 1)
    assert isinstance(raised.value.__cause__, ValueError)


def test_a_job_without_enough_processes_and_without_hope():
    def func():
        rendezvous().get("nothing", 0.1)

    with pytest.raises(LaunchError, match="number of resets during elastic job exceeded limit: 0"):
        reigen.run(func, num_proc=2, min_num_proc=1, reset_limit=0)
