"""Whether a job is tuned, from where it begins, and what its next view begins with."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import pytest

from reigen.autotune.job import TunableJob, TuningStart, can_tune, make_space, start_tuning, warn_if_not_tuned
from reigen.autotune.search_space import ParameterPoint
from reigen.config import Config, load_config
from reigen.engine.messages import TunedParameters
from reigen.errors import ConfigError
from tests.tuning import FakeEngine

MIB = 1 << 20
HOSTS: Sequence[Sequence[int]] = ((0, 1), (2, 3), (4, 5))
JOB = TunableJob(HOSTS, "tcp", True, 4 * MIB)
ONE_HOST = TunableJob(((0, 1),), None, True, 16 * MIB)
LATEST = TunedParameters(9, 8 * MIB, MIB, "direct", 4, True)


def config(**environ: str) -> Config:
    return load_config({"HOROVOD_AUTOTUNE": "1", **environ})


@pytest.mark.parametrize(
    ("job", "is_tuned"),
    [
        (JOB, True),
        (ONE_HOST, True),
        (TunableJob(((0,),), None, True, MIB), False),
        (TunableJob(HOSTS, "mpi", True, MIB), False),
    ],
)
def test_jobs_of_several_ranks_whose_sums_have_an_order_are_tuned(job: TunableJob, is_tuned: bool) -> None:
    assert can_tune(config(), job) == is_tuned
    assert not can_tune(Config(), job)


def test_over_mpi_a_line_says_that_nothing_is_tuned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for job in (JOB, ONE_HOST, TunableJob(HOSTS, "mpi", True, MIB)):
            warn_if_not_tuned(config(), job)
    assert [record.message for record in caplog.records if "mpi" in record.message] == [
        record.message for record in caplog.records
    ]
    assert len(caplog.records) == 1


def test_ranks_that_meet_on_the_network_are_hosts_where_those_of_a_host_share_memory() -> None:
    assert JOB.network_ranks == 3
    assert TunableJob(HOSTS, "tcp", False, MIB).network_ranks == 6
    assert ONE_HOST.network_ranks == 0


def test_a_tuned_job_begins_without_the_ring_and_with_sockets_to_spare() -> None:
    assert Config().network_parameters() == ("auto", 1)
    assert config().network_parameters() == ("ordered", 4)
    assert config(REIGEN_AUTOTUNE_ALLOW_RING="1").network_parameters() == ("auto", 4)
    assert config(REIGEN_TCP_ALGORITHM="ring", REIGEN_TCP_SOCKETS="2").network_parameters() == ("ring", 2)
    assert make_space(config(), JOB).base == ParameterPoint(128 * MIB, 4 * MIB, "ordered", 1)
    assert make_space(config(), ONE_HOST).base == ParameterPoint(128 * MIB, 16 * MIB)


def test_the_next_view_begins_with_what_was_chosen_last() -> None:
    start = TuningStart(config(HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES="6"), JOB, LATEST, is_first_view=False)
    engine = FakeEngine()
    engine.counters.tuned = LATEST
    session = start.begin(engine)
    assert session.point == ParameterPoint(8 * MIB, MIB, "direct", 4)
    assert engine.asked == [TunedParameters(10, 8 * MIB, MIB, "direct", 4)], "and newcomers hear of it"


def test_what_the_user_has_set_wins_over_the_view_before() -> None:
    space = make_space(config(REIGEN_BUCKET_BYTES="2MiB"), TunableJob(HOSTS, "tcp", True, 2 * MIB), LATEST)
    assert space.base.bucket_bytes == 2 * MIB


def test_the_first_view_asks_for_nothing() -> None:
    engine = FakeEngine()
    assert TuningStart(config(), JOB, None).begin(engine).point == make_space(config(), JOB).base
    assert engine.asked == []


def test_a_member_without_the_library_that_becomes_rank_0_does_not_end_the_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigError, match=r"pip install 'reigen\[autotune\]'"):
        start_tuning(config(), JOB, None, view=1)
    with caplog.at_level(logging.WARNING):
        assert start_tuning(config(), JOB, LATEST, view=2) is None
    assert "autotuning ends with this view" in caplog.text
