"""Pictures of benchmarks: they are drawn from what benchmarks write, and hold its figures and those of the page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from benchmarks import allreduce, calls, frameworks, kv, mxnet_step, network, ps_vs_ring, train_step
from benchmarks.harness.figures import Overhead, summarize
from benchmarks.harness.report import Document, Row
from tools.docs import charts
from tools.docs.charts import CHARTS, DATA, PICTURES, ROOT, Chart, Series, describe, groups_of
from tools.docs.results import ResultsError, read_results
from tools.docs.tables import TABLES

BY_NAME = {chart.name: chart for chart in CHARTS}


def drawn(results: Path, pictures: Path) -> dict[str, str]:
    """The pictures of a directory, drawn by a process of its own: matplotlib keeps its fonts open."""
    pytest.importorskip("matplotlib")
    subprocess.run([sys.executable, "-m", "tools.docs.charts", results, pictures], cwd=ROOT, check=True, timeout=300)
    return {path.stem: path.read_text(encoding="utf-8") for path in pictures.glob("*.svg")}


def written(path: Path, rows: dict[str, dict[str, float]], nbytes: int = 0) -> Path:
    """A file as a benchmark writes it."""
    document = Document("reigen bench x", 2, 1)
    for title, modes in rows.items():
        document.rows.append(Row(title, nbytes, {name: summarize([[each]]) for name, each in modes.items()}, "reigen"))
        document.overheads[title] = {name: Overhead(each, (each,), 0.0) for name, each in modes.items()}
    document.save(path)
    return path


def test_what_a_benchmark_writes_is_what_a_picture_reads(tmp_path: Path) -> None:
    file = written(tmp_path / "a.json", {"mlp": {"one rank alone": 0.5, "reigen": 0.75, "ddp": 2.0}})
    found = read_results(file)
    assert (found.command, found.num_ranks, found.rounds) == ("reigen bench x", 2, 1)
    assert found.machine.num_cores >= 1
    assert found.versions["python"]
    (group,) = groups_of(BY_NAME["train-step"], found)
    assert {series.label: value for series, value in group.values.items()} == {
        "one rank alone": 0.5, "Reigen": 0.75, "DDP": 2.0
    }  # fmt: skip
    assert "Reigen: mlp: 25 M parameters 750 ms." in describe(BY_NAME["train-step"], found, [group])


def test_of_several_settings_of_a_peer_the_fastest_is_drawn(tmp_path: Path) -> None:
    modes = {"ddp": 2.0, "ddp, gradients as bucket views": 1.0}
    (group,) = groups_of(BY_NAME["train-step"], read_results(written(tmp_path / "a.json", {"cnn": modes})))
    assert list(group.values.values()) == [1.0]


def test_sizes_are_lines_and_other_rows_are_not(tmp_path: Path) -> None:
    rows = {"1 KiB": {"gloo": 1.0}, "1 KiB, loopback": {"gloo": 2.0}, "ResNet-50, 161 gradients": {"gloo": 3.0}}
    found = read_results(written(tmp_path / "a.json", rows, nbytes=1024))
    assert [(each.nbytes, *each.values.values()) for each in groups_of(BY_NAME["allreduce"], found)] == [(1024, 1.0)]
    assert [(each.nbytes, *each.values.values()) for each in groups_of(BY_NAME["network"], found)] == [(1024, 2.0)]


def test_efficiency_is_the_time_alone_in_that_of_a_step(tmp_path: Path) -> None:
    file = written(tmp_path / "a.json", {"4 workers": {"a worker alone": 0.5, "ring": 2.0}})
    (group,) = groups_of(BY_NAME["ps_vs_ring"], read_results(file))
    assert list(group.values.values()) == [25.0]


def test_overheads_may_be_negative(tmp_path: Path) -> None:
    file = written(tmp_path / "a.json", {"mlp, jax": {"reigen.jax": 0.5}})
    content = json.loads(file.read_text())
    content["overheads"]["mlp, jax"]["reigen.jax"]["median"] = -0.001
    file.write_text(json.dumps(content))
    (group,) = groups_of(BY_NAME["frameworks"], read_results(file))
    assert list(group.values.values()) == [-0.001]


def test_benchmarks_with_rows_of_their_own_write_the_same_files(tmp_path: Path) -> None:
    rows = [
        {"workers": 2, "mode": mode, "rounds": [seconds, seconds], "busiest_host_sends_mib": 4.7}
        for mode, seconds in ((ps_vs_ring.ONE, 2.0), (ps_vs_ring.RING, 1.0))
    ]
    settings = ps_vs_ring.Settings(2e8, 0.5, 10, 2)
    ps_vs_ring.document(rows, settings, "python").save(tmp_path / "ps_vs_ring.json")
    (group,) = groups_of(BY_NAME["ps_vs_ring"], read_results(tmp_path / "ps_vs_ring.json"))
    assert {series.label: value for series, value in group.values.items()} == {"ring": 50.0, "one server": 25.0}


#: Modes of the benchmarks, by the file that each writes.
_SERVERS = [store.name for store in kv.stores((kv.REIGEN, kv.MXNET))]
KNOWN: dict[str, set[str]] = {
    "allreduce.json": {
        *(allreduce.REGISTERED, allreduce.ORDINARY, allreduce.COPY, allreduce.GLOO_SUM, allreduce.MPI_SUM),
        *(allreduce.BUCKETS, allreduce.SEPARATE, allreduce.GLOO_BUCKETS, allreduce.GLOO_SEPARATE),
        *(allreduce.MPI_SEPARATE, allreduce.BACKEND),
    },
    "calls.json": {calls.SEPARATE, calls.GROUPED, calls.UNCACHED, calls.GLOO_SEPARATE, calls.GLOO_BUCKETS},
    "train-step.json": {train_step.ALONE, train_step.REIGEN, train_step.DDP_DEFAULT, train_step.DDP_VIEW},
    "frameworks.json": {
        *(frameworks.TAPE, frameworks.FIT, frameworks.OPTAX, frameworks.STRATEGY, frameworks.STRATEGY_FIT),
        *(frameworks.JAX_GLOO, frameworks.JAX_FLAT, frameworks.TORCH),
    },
    "network.json": {network.REIGEN, network.GLOO, network.PLAIN, network.PIPELINED},
    "kv.json": {*_SERVERS, kv.COPYING},
    "mxnet-step.json": {"alone", *mxnet_step.ways("mlp", 1)},
    "ps_vs_ring.json": {*ps_vs_ring.MODES, ps_vs_ring.ALONE},
}  # fmt: skip
SHOWN = [(chart.name, chart.data, chart.series) for chart in CHARTS]
SHOWN += [(f"table {table.name}", table.chart.data, table.columns()) for table in TABLES]


@pytest.mark.parametrize(("file", "series"), [each[1:] for each in SHOWN], ids=[each[0] for each in SHOWN])
def test_pictures_and_tables_use_the_names_of_the_benchmarks(file: str, series: Sequence[Series]) -> None:
    assert {name for each in series for name in each.names} <= KNOWN[file]


def test_what_efficiency_is_held_against_is_a_mode_of_the_benchmark() -> None:
    assert {chart.alone for chart in CHARTS if chart.alone} <= KNOWN["ps_vs_ring.json"]


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
def test_published_files_have_all_that_is_drawn(chart: Chart) -> None:
    groups = groups_of(chart, read_results(DATA / chart.data))
    assert {each.label for each in groups} >= set(chart.rows.values())
    assert {series for each in groups for series in each.values} == set(chart.series)


BAD: dict[str, tuple[Any, str]] = {
    "not JSON": ("{", "truncated"),
    "another document": ({"found": []}, r"missing required field `command`"),
    "no times": ({"rows": [{"title": "mlp", "nbytes": 0, "modes": {"ddp": {}}}]}, r"`median` - at `\$.rows"),
    "a text": ({"rows": [{"title": "mlp", "nbytes": 0, "modes": {"ddp": {"median": "5 ms"}}}]}, "got `str`"),
    "no time at all": ({"rows": [{"title": "mlp", "nbytes": 0, "modes": {"ddp": {"median": 0}}}]}, "> 0"),
    "other rows": ({"rows": [{"title": "ml", "nbytes": 0, "modes": {"ddp": {"median": 1}}}]}, r"\['mlp', .*'ml'"),
    "other modes": ({"rows": [{"title": "mlp", "nbytes": 0, "modes": {"dp": {"median": 1}}}]}, r"'ddp', .*'dp'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path: Path, case: str) -> None:
    content, reason = BAD[case]
    file = written(tmp_path / "train-step.json", {"mlp": {"ddp": 1.0}})
    whole = {} if "found" in content else json.loads(file.read_text())
    file.write_text(content if isinstance(content, str) else json.dumps(whole | content))
    with pytest.raises(ResultsError, match=reason) as caught:
        draw_or_read(file)
    assert case.startswith("other") or str(file) in str(caught.value)


def draw_or_read(file: Path) -> None:
    groups_of(BY_NAME["train-step"], read_results(file))


def test_a_directory_without_results_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert charts.main([str(tmp_path)]) == 1
    assert f"{tmp_path}: there is nothing to draw; files are called ['allreduce.json'" in capsys.readouterr().err
    assert charts.main([]) == 2
    with pytest.raises(ResultsError, match="No such file"):
        read_results(tmp_path / "kv.json")


def test_a_bad_file_ends_the_drawing_of_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "calls.json").write_text("{}")
    assert charts.main([str(tmp_path)]) == 1
    assert f"charts: {tmp_path / 'calls.json'} is not what `reigen bench --json` writes" in capsys.readouterr().err


def test_results_of_a_part_of_a_benchmark_are_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    written(tmp_path / "network.json", {"25 MiB, 2 hosts": {"gloo": 1.0}})
    assert charts.main([str(tmp_path)]) == 1, "there is no other file"
    assert f"charts: {tmp_path / 'network.json'}: nothing to draw for network" in capsys.readouterr().err


def test_a_picture_is_a_part_of_its_page(tmp_path: Path) -> None:
    written(tmp_path / "train-step.json", {"mlp": {"one rank alone": 0.5, "reigen": 0.75, "ddp": 2.0}})
    text = drawn(tmp_path, tmp_path)["train-step"]
    tree = ET.fromstring(text)
    assert "750 ms" in tree.attrib["aria-label"]
    assert {"viewBox", "role", "class"} <= tree.attrib.keys()
    assert not {"width", "height"} & tree.attrib.keys()
    letters = "".join(each.text or "" for each in tree.iter("{http://www.w3.org/2000/svg}text"))
    assert all(word in letters for word in ("one rank alone", "Reigen", "750 ms", "2.00 s"))
    assert "currentColor" in text
    assert charts._INK not in text
    assert "#ffffff" not in text, "the page's ground is seen"


def test_the_repository_has_the_pictures_of_its_files(tmp_path: Path) -> None:
    found = drawn(DATA, tmp_path)
    assert found == {path.stem: path.read_text(encoding="utf-8") for path in PICTURES.glob("*.svg")}
    assert set(found) == set(BY_NAME)


def test_every_picture_is_in_the_page() -> None:
    page = (DATA.parent / "benchmarks.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\(images/benchmarks/([\w-]+)\.svg\)", page)) == set(BY_NAME)
