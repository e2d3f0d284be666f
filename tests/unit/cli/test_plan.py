"""`reigen plan`: what it prints, and what it says about files that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import yaml

from reigen.cli.main import main

CLUSTER: dict[str, Any] = {
    "currency": "EUR", "prices_of": "made up, today",
    "hosts": [{"name": "a", "count": 4, "ranks": 2, "processors": 8, "bandwidth": "1 Gbit/s", "price_per_hour": 3.6}],
}  # fmt: skip
PROFILE: dict[str, Any] = {
    "version": 1, "name": "small", "batch": 8, "samples_per_epoch": 8000, "processors": 1,
    "forward_seconds": 0.01, "backward_seconds": 0.02, "update_seconds": 0.001, "steps": 20,
    "tensors": [{"name": "w", "elements": 2_000_000, "dtype": "float32"}, {"name": "b", "elements": 100}],
}  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A directory with a cluster and a profile."""
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    (tmp_path / "train.json").write_text(json.dumps(PROFILE))
    return tmp_path


def plan(files: Path, *options: str) -> int:
    return main(["plan", str(files / "train.json"), "--cluster", str(files / "cluster.yaml"), *options])


def test_a_table_with_every_strategy_and_the_number_of_servers(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(files) == 0
    text = capsys.readouterr().out

    assert text.startswith("small: 8 ranks on 4 hosts, 8.0 MB of gradients; a rank alone takes 31 ms for 8 samples")
    rows = [line.split("  ")[0] for line in text.splitlines()[2:22]]
    assert rows[:4] == ["hierarchical", "ring", "1 server", "2 servers"]
    assert rows[17:19] == ["16 servers", "hierarchical + fp16"]
    assert "EUR" in text
    assert "How many servers? " in text
    assert "costs of messages and bytes are defaults" in text
    assert "Prices: made up, today." in text


def test_json_has_every_prediction(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(files, "--json", "--ranks", "2,8", "--servers", "1,4", "--compression", "none") == 0
    content = json.loads(capsys.readouterr().out)

    assert [job["ranks"] for job in content["jobs"]] == [2, 8]
    names = [each["name"] for each in content["jobs"][1]["predictions"]]
    assert names == ["allreduce", "ring", "1 server", "4 servers"]
    for each in content["jobs"][1]["predictions"]:
        assert sum(each["shares"].values()) == pytest.approx(1.0)
        assert each["epoch_cost"] == pytest.approx(4 * 3.6 / 3600 * 8000 / each["samples_per_second"])


def test_a_picture_is_svg_with_a_column_for_each_prediction(files: Path) -> None:
    for number, options in enumerate((["--servers", "1,2"], ["--ranks", "2,4,8", "--servers", "1,2"])):
        picture = files / f"{number}.svg"
        assert plan(files, "--picture", str(picture), "--compression", "none", *options) == 0
        root = ET.parse(picture).getroot()
        rectangles = [each for each in root if each.tag.endswith("rect") and each.get("fill-opacity")]
        assert len(rectangles) >= 4 * (1, 3)[number]


def test_built_in_models(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--cluster", str(files / "cluster.yaml"), "--samples-per-second", "350", "--servers", "4"]

    assert main(["plan", "--model", "resnet50", "--batch", "32", *options]) == 0
    assert "resnet50: 8 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hosts": [{"name": "a", "price_per_hour": 0}]}, "price_per_hour is 0"),
        ({"hosts": []}, "'hosts' must be a list"),
        ({"hosts": [{"name": "a", "bandwidth": "fast"}]}, "'fast' is not bytes a second"),
        ({"hosts": [{"name": "a", "bandwidth": 0}]}, "nothing could be sent"),
        ({"hosts": [{"name": "a", "ranks": 0, "servers": 1}]}, "0 ranks in all"),
        ({"hosts": [{"name": "a", "ranks": 0}]}, "neither ranks nor servers"),
        ({"hosts": [{"name": "a"}, {"name": "a"}]}, "two hosts named a"),
        ({"hosts": [{"name": "a", "gpus": 8}]}, "there is no 'gpus' here; there are bandwidth"),
        ({"hosts": [{"name": "a"}], "failures": [{"host": "a"}]}, "every host with ranks has failed"),
        ({"hosts": [{"name": "a"}], "failures": [{"host": "b"}]}, "there is no host 'b'"),
        ({"hosts": [{"name": "a"}], "stragglers": [{"rank": 1, "slowdown": 2}]}, "there is no rank 1"),
        ({"hosts": [{"name": "a"}], "stragglers": [{"rank": 0, "slowdown": 0.5}]}, "slowdown 0.5"),
        ({"hosts": [{"name": "a"}], "network": {"oversubscription": 0.5}}, "below 1"),
        ({"hosts": [{"name": "a", "count": 1.5}]}, "no whole number"),
        ({"hosts": [{"name": "a", "count": 10**9}]}, "there can be 65536 hosts at most"),
        ({"hosts": [{"name": "a", "latency": "-1 ms"}]}, "is not seconds"),
    ],
)
def test_a_wrong_cluster_is_refused(
    files: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    (files / "cluster.yaml").write_text(yaml.safe_dump(change))

    assert plan(files) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "a profile without steps"),
        ({"version": 2}, "is of version 2"),
        ({"tensors": []}, "'tensors' is empty"),
        ({"batch": 0}, "batch, and the time of a step"),
        ({"batch": None}, "batch is missing"),
        ({"forward_seconds": "soon"}, "is not seconds"),
        ({"tensors": [{"elements": 3, "dtype": "float8"}]}, "no element type 'float8'"),
        ({"tensors": [{"elements": 3, "ready_seconds": 1}]}, "is ready 1 s after backward began"),
        ({"tensors": [{"name": "w"}]}, "elements is missing"),
        ({"tensors": [{"elements": 10**12}]}, "more than a tensor can have"),
    ],
)
def test_a_wrong_profile_is_refused(
    files: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    (files / "train.json").write_text(json.dumps(PROFILE | change))

    assert plan(files) == 1
    assert message in capsys.readouterr().err


def test_other_wrong_input(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "costs.json").write_text(json.dumps({"version": 1, "costs": {"tcp_seconds": 1}}))

    for options, message in (
        (["--costs", str(files / "costs.json")], "there is no cost 'tcp_seconds'"),
        (["--costs", str(files / "train.json")], "there is no table 'costs'"),
        (["--costs", str(files / "missing.json")], "No such file"),
        (["--ranks", "9"], "the cluster cannot hold a job of 9 ranks"),
        (["--servers", "100000"], "there can be 16384 at most"),
        (["--compression", "3bit"], "unknown type of compression '3bit'"),
        (["--batch", "3"], "are for built-in models"),
        (["--picture", str(files / "no" / "where.svg")], "No such file"),
    ):
        assert plan(files, *options) == 1
        assert message in capsys.readouterr().err
    (files / "train.json").write_text("{")
    assert plan(files) == 1
    assert "it is no JSON" in capsys.readouterr().err
    (files / "cluster.yaml").write_text("hosts: [")
    (files / "train.json").write_text(json.dumps(PROFILE))
    assert plan(files) == 1
    assert "is no YAML" in capsys.readouterr().err


def test_a_profile_or_a_model(files: Path) -> None:
    with pytest.raises(SystemExit):
        plan(files, "--model", "resnet50")
    with pytest.raises(SystemExit):
        main(["plan", "--cluster", str(files / "cluster.yaml")])


@pytest.mark.parametrize("name", ["ec2-p3", "workstations"])
def test_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[3] / "examples" / "plan" / f"{name}.yaml"

    assert main(["plan", "--model", "vgg16", "--cluster", str(path), "--servers", "1,2"]) == 0
    assert "How many servers? " in capsys.readouterr().out
