"""`reigen bench` of a checkout, and of an installed package, which has no benchmarks."""

import pytest

from reigen.cli import bench


def test_a_checkout_has_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["--help"])
    assert ended.value.code == 0
    assert "train-step" in capsys.readouterr().out


def test_an_installed_package_says_where_they_are(monkeypatch, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "_ROOT", tmp_path)
    assert bench.main(["allreduce"]) == 2
    assert "come with a checkout" in capsys.readouterr().err
