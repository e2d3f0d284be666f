"""Tables of benchmarks: what they show of files of results, and that the pages have those of the published files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness.figures import Overhead, summarize
from benchmarks.harness.report import Document, Row, Verdict
from tools.docs import tables
from tools.docs.results import ResultsError, read_results
from tools.docs.tables import BUDGETS, PAGES, RECORD_NAMES, TABLES, Table, draw, draw_budgets, draw_headlines, write

BY_NAME = {table.name: table for table in TABLES}


def shown(table: Table, path: Path, *rows: Row, **attributes: object) -> list[dict[str, str]]:
    """The lines of a table that is made of what a benchmark writes: heading -> cell."""
    document = Document("reigen bench x", 2, 3, rows=[*rows])
    for name, value in attributes.items():
        setattr(document, name, value)
    document.save(path / "a.json")
    headings, _, *lines = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in draw(table, read_results(path / "a.json")).splitlines()
        if line.startswith("|")
    )
    return [dict(zip(headings, line, strict=True)) for line in lines]


def row(title: str, nbytes: int = 0, **seconds: float) -> Row:
    modes = {name.replace("_", " "): summarize([[each]]) for name, each in seconds.items()}
    return Row(title, nbytes, modes, next(iter(modes)))


def test_a_line_has_times_and_how_often_one_goes_into_the_other(tmp_path: Path) -> None:
    table = replace(BY_NAME["allreduce"], more=(), ratios=(("Gloo / Reigen", "Gloo", "Reigen, registered memory"),))
    big = row("25 MiB", 25 << 20, reigen_registered=0.002, gloo=0.015)
    [line] = shown(table, tmp_path, big, row("ResNet-50, 161 gradients", 1, reigen_registered=1.0))
    assert line == {
        "bytes": "25 MiB", "Reigen, registered memory": "2.00 ms", "Gloo": "15.0 ms", "Gloo / Reigen": "7.50"
    }  # fmt: skip


def test_of_several_settings_of_a_peer_the_fastest_counts(tmp_path: Path) -> None:
    modes = {"reigen": 1.0, "ddp": 4.0, "ddp, gradients as bucket views": 2.0}
    [line] = shown(BY_NAME["train-step"], tmp_path, row("cnn", **modes))
    assert (line["DDP"], line["DDP / Reigen"]) == ("2.00 s", "2.00")


def test_an_overhead_within_the_noise_is_no_divisor(tmp_path: Path) -> None:
    found = {
        "mlp": {"reigen": Overhead(0.02, (0.02,), 0.001), "ddp": Overhead(0.04, (0.04,), 0.001)},
        "cnn": {"reigen": Overhead(0.002, (0.002,), 0.003), "ddp": Overhead(-0.001, (-0.001,), 0.003)},
    }
    clear, noisy = shown(BY_NAME["train-step-overhead"], tmp_path, overheads=found)
    assert (clear["Reigen"], clear["DDP"], clear["Reigen / DDP"]) == ("20.0 ms", "40.0 ms", "0.50")
    assert noisy["Reigen"] == "2.00 ms, within the noise of 3.00 ms"
    assert noisy["Reigen / DDP"] == ""


def test_efficiencies_stand_beside_times(tmp_path: Path) -> None:
    [line] = shown(BY_NAME["ps_vs_ring"], tmp_path, row("4 workers", a_worker_alone=0.5, ring=2.0))
    assert line["ring"] == "2.00 s, 25 %"


def test_a_figure_beside_its_budget_is_found_by_the_row(tmp_path: Path) -> None:
    title = "25 MiB, 2 hosts, 200 Mbit/s, 0 ms"
    verdicts = [Verdict(f"{title}: part of the wire's limit", 0.9561, 0.9, at_least=True)]
    [line] = shown(BY_NAME["hosts"], tmp_path, row(title, 25 << 20, reigen=1.0, gloo=1.5), verdicts=verdicts)
    assert (line["25 MiB"], line["part of the wire"]) == ("2 hosts, 200 Mbit/s", "0.956")


def test_budgets_are_found_by_how_their_claims_begin(tmp_path: Path) -> None:
    verdicts = [Verdict("sum: a", 1.5, 2.0, at_least=False, note="us"), Verdict("import", 1.0, 2.0, at_least=True)]
    Document("reigen bench x", 2, 3, verdicts=verdicts).save(tmp_path / "a.json")
    text = draw_budgets(read_results(tmp_path / "a.json"), ("sum",))
    assert "| sum: a | 1.5 us | at most 2 |" in text
    assert "import" not in text
    with pytest.raises(ResultsError, match=r"no budget of \['sum: a', 'import'\] begins so"):
        draw_budgets(read_results(tmp_path / "a.json"), ("step",))


def test_the_origin_is_told(tmp_path: Path) -> None:
    document = Document("reigen bench x", 2, 3, rows=[row("cnn", reigen=1.0)])
    document.save(tmp_path / "a.json")
    text = draw(BY_NAME["train-step"], read_results(tmp_path / "a.json"))
    assert f"`reigen bench x`, {document.created[:10]}: 2 ranks, medians of 3 rounds; {document.machine.cpu}" in text
    assert f"load before the run {document.machine.load:.1f}" in text


def test_a_table_that_has_nothing_to_show_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="nothing to show for train-step: none of"):
        shown(BY_NAME["train-step"], tmp_path, row("cnn", other=1.0))


def test_an_unknown_table_in_a_page_is_an_error() -> None:
    with pytest.raises(ResultsError, match=r"there is no table alreduce; there are \['allreduce'"):
        write("<!-- table alreduce -->\n<!-- end of table -->")


def test_a_headline_without_its_mode_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in tables.DATA.glob("*.json"):
        content = json.loads(path.read_text())
        for each in content["rows"]:
            each["modes"].pop("gloo", None)
        (tmp_path / path.name).write_text(json.dumps(content))
    monkeypatch.setattr(tables, "DATA", tmp_path)
    with pytest.raises(ResultsError, match=r"allreduce.json: the row '25 MiB' lacks a mode"):
        draw_headlines()


def test_the_pages_have_the_tables_of_the_published_files() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert write(text) == text, f"{page.name}: run python -m tools.docs.tables"
    shown_names = {*BY_NAME, *BUDGETS, *RECORD_NAMES, "headlines"}
    assert {name for page in PAGES for name, _ in tables._TABLE.findall(page.read_text())} == shown_names


def test_every_record_is_in_a_page() -> None:
    assert {path.stem for path in tables.RECORDS.glob("*.json")} == {*RECORD_NAMES}


def test_a_record_is_drawn_from_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gpu.json").write_text((tables.RECORDS / "gpu.json").read_text().replace("67.85397", "71.5"))
    monkeypatch.setattr(tables, "RECORDS", tmp_path)
    assert "| 71.5 |" in write("<!-- table gpu -->\n<!-- end of table -->")
    with pytest.raises(ResultsError, match=r"autotune.json: No such file"):
        write("<!-- table autotune -->\n<!-- end of table -->")
