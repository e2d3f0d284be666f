"""Elastic members as real processes: they are killed and stopped, come and leave."""

from __future__ import annotations

import signal
import time

from tests.multiprocess.elastic_lab import elastic_lab


def test_first_view_runs() -> None:
    with elastic_lab(["a"] * 4) as lab:
        members = lab.alive()
        assert lab.run_view(members)[0] == 1
        lab.make_steps(members)


def test_death_of_one() -> None:
    with elastic_lab(["a"] * 4) as lab:
        members = lab.alive()
        lab.run_view(members)
        lab.make_steps(members)
        for victim in (members[3], members[0], members[1]):
            at = victim.signal(signal.SIGKILL)
            members.remove(victim)
            epoch, began = lab.run_view(members)
            print(epoch, began - at)
            lab.make_steps(members)
