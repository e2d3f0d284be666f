"""Which single losses an elastic job survives, and `reigen check --elastic`, which says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from reigen.cli import check
from reigen.launch.elastic.survival import ElasticForecast


def survived(*hosts: tuple[str, int], least: int = 1, most: int = 100, **facts: bool) -> dict[str, bool]:
    forecast = ElasticForecast(hosts, least, most, **facts)
    return {loss.lost.partition(",")[0]: loss.goes_on for loss in forecast.losses()}


def test_one_host() -> None:
    assert survived(("h1", 4), least=2) == {"any rank": True, "rank 0": True, "host h1": False, "the launcher": False}
    assert not survived(("h1", 1))["any rank"], "nobody else has the state"


def test_two_hosts_have_one_that_decides_alone() -> None:
    both = ("h1", 2), ("h2", 2)
    assert survived(*both) == {
        "any rank": True, "rank 0": True, "host h1": False, "host h2": True, "the launcher": False,
    }  # fmt: skip
    assert not survived(*both, continues=True)["host h1"], "host h2 is not a quorum"
    with_witness = survived(*both, continues=True, has_witness=True)
    assert all(with_witness.values())
    assert "the witness" in with_witness


def test_three_hosts_survive_any_of_them_without_their_launcher() -> None:
    hosts = ("h1", 2), ("h2", 1), ("h3", 1)
    assert survived(*hosts)["host h2"]
    assert not survived(*hosts)["host h1"], "the launcher is there"
    assert all(survived(*hosts, continues=True).values())


def test_fewer_than_the_least_wait() -> None:
    losses = {loss.lost: loss for loss in ElasticForecast([("h1", 2), ("h2", 2), ("h3", 2)], 6, 6).losses()}
    assert losses["any rank"].what == "5 wait until another one is started: steps need 6 (--min-np)"
    assert losses["host h2"].what == "4 wait, steps need 6: more hosts must come"
    spare = {loss.lost: loss for loss in ElasticForecast([("h1", 2), ("h2", 2), ("h3", 2)], 3, 4).losses()}
    assert spare["host h2"].what == "2 wait, steps need 3: others are started on the hosts that are left"


def test_check_prints_bounds_the_rule_and_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho h1:2; echo h2\n")
    script.chmod(0o755)

    options = ["--elastic", "--min-np", "2", "--host-discovery-script", str(script), "--slots-per-host", "3"]
    assert check.main(options) == 0

    text = capsys.readouterr().out
    lines = [line.split("  ") for line in text.splitlines()]
    rows = {tuple(filter(None, (word.strip() for word in line))) for line in lines}
    assert ("hosts", "name:slots", "h1:2, h2:3") in rows
    assert ("bounds", "begins with", "5") in rows
    assert ("this host", "memory of a voter, locks, pidfd", "ok") in rows
    assert ("loss of host h2", "goes on", "2 processes go on") in rows
    assert text.splitlines()[-1] == "an elastic job can run here, and survives 3 of these 5 single losses"


@pytest.mark.parametrize(
    ("script", "options", "problem"),
    [
        ("echo nothing >&2; exit 3", (), "it has failed (exit code 3): nothing; nothing was started"),
        ("echo h1:x", (), "it has printed 'h1:x', which is neither 'host' nor 'host:slots'"),
        ("echo h1; echo h1", (), "it has named host h1 twice"),
        ("echo h1", ("--min-np", "4", "--max-np", "2"), "--max-np"),
    ],
)
def test_check_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, script: str, options: tuple[str, ...], problem: str
) -> None:
    file = tmp_path / "hosts.sh"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    bounds = options or ("--min-np", "1")
    with pytest.raises(SystemExit) as ended:
        check.main(["--elastic", *bounds, "--host-discovery-script", str(file)])
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err


def test_check_knows_a_witness(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--elastic", "-H", "h1:1,h2:1", "--min-np", "1", "--on-launcher-loss", "continue"]
    assert check.main(options) == 0
    assert "4 of these 5 single losses" in capsys.readouterr().out
    assert check.main([*options, "--witness-dir", "/shared"]) == 0
    assert "6 of these 6 single losses" in capsys.readouterr().out


def test_check_finds_too_few_places(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "hosts.sh"
    file.write_text("#!/bin/sh\necho h1:2\n")
    file.chmod(0o755)
    assert check.main(["--elastic", "--min-np", "4", "--host-discovery-script", str(file)]) == 1
    assert "problem: the hosts have 2 slots, --min-np asks for more" in capsys.readouterr().out
