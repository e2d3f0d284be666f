"""What users' tools see of the functions that are made of the table of collectives."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch

import reigen
import reigen.torch as hvd
from reigen.api.dialects import MXNET, NUMPY, TORCH
from reigen.api.functions import FunctionSpec, list_functions
from reigen.engine.handle import Handle

PROJECT = Path(__file__).parents[2]

USER = """
from typing import assert_type

import numpy as np
import torch
from numpy.typing import NDArray
from typing import Any

import reigen
import reigen.torch as hvd
from reigen.engine.handle import Handle

t = torch.ones(3)
assert_type(hvd.allreduce(t, op=hvd.Sum, compression=hvd.Compression.fp16), torch.Tensor)
assert_type(hvd.allreduce_(t, name="t", process_set=hvd.global_process_set), torch.Tensor)
assert_type(hvd.allreduce_async_(t), Handle[torch.Tensor])
assert_type(hvd.synchronize(hvd.allreduce_async_(t)), torch.Tensor)
assert_type(hvd.synchronize(hvd.grouped_reducescatter_async([t, t])), list[torch.Tensor])
assert_type(hvd.grouped_allgather([t]), list[torch.Tensor])
assert_type(hvd.alltoall(t, splits=[3]), torch.Tensor | tuple[torch.Tensor, torch.Tensor])
assert_type(hvd.broadcast(t, root_rank=0), torch.Tensor)
assert_type(reigen.reducescatter([1.0, 2.0], "x", reigen.Sum), NDArray[Any])
assert_type(reigen.synchronize(reigen.allgather_async(np.ones(2))), NDArray[Any])
hvd.allreduce([1.0])  # E: arg-type
hvd.allreduce(t, opp=hvd.Sum)  # E: call-arg
hvd.allreduce(t, name=3)  # E: arg-type
hvd.broadcast(t)  # E: call-arg
hvd.grouped_allreduce(t, average="yes")  # E: arg-type
reigen.allreduce_([1.0])  # E: arg-type
hvd.scatter(t)  # E: attr-defined
"""


@pytest.mark.slow
def test_a_type_checker_sees_them(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(USER)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context", str(script)]
    done = subprocess.run(command, check=False, cwd=PROJECT, capture_output=True, text=True, timeout=170)
    found = {}
    for line in done.stdout.splitlines():
        if ": error: " in line:
            found[int(line.split(":")[1])] = line.rpartition("[")[2].rstrip("]")
    lines = enumerate(USER.splitlines(), start=1)
    assert found == {number: line.rpartition("# E: ")[2] for number, line in lines if "# E: " in line}, done.stdout


def test_the_stubs_are_those_of_the_table() -> None:
    spec = importlib.util.spec_from_file_location("make_stubs", PROJECT / "tools" / "make_stubs.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    stale = [path for path in tool.STUBS if (tool.SOURCE / path).read_text() != tool.write_stub(path)]
    assert not stale, f"run: python tools/make_stubs.py ({stale})"


@pytest.mark.parametrize(("module", "dialect"), [(reigen, NUMPY), (hvd, TORCH)], ids=["numpy", "torch"])
def test_every_function_is_there_with_its_docstring_and_types(module: typing.Any, dialect: typing.Any) -> None:
    for spec in list_functions(dialect):
        function = getattr(module, spec.name)
        assert spec.name in module.__all__
        assert function.__name__ == function.__qualname__ == spec.name
        assert getattr(sys.modules[function.__module__], spec.name) is function  # pickle finds it
        said = inspect.getdoc(function)
        assert said is not None
        assert said.splitlines()[0].endswith(".")
        for parameter in inspect.signature(function).parameters:
            assert f"\n    {parameter}: " in said
        assert "shape" in said.partition("\nReturns:\n")[2].partition("\nRaises:\n")[0]
        hints = typing.get_type_hints(function)
        assert hints["process_set"] is reigen.ProcessSet
        if spec.form.is_async:
            assert typing.get_origin(hints["return"]) is Handle


def test_a_traceback_shows_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    import traceback

    with pytest.raises(ValueError, match="init") as caught:
        hvd.allreduce(torch.ones(1))
    assert "return _run(tensor, _resolve(average, op," in "".join(traceback.format_exception(caught.value))


def test_a_function_of_mxnet_has_the_operator_where_horovod_has_it() -> None:
    def names(name: str) -> list[str]:
        [spec] = [each for each in list_functions(MXNET) if each.name == name]
        return [parameter.name for parameter in spec.parameters]

    assert names("allreduce")[-1] == "op"
    assert names("reducescatter")[1] == "op"
    assert all(isinstance(each, FunctionSpec) and not each.form.is_async for each in list_functions(MXNET))


def calls_of_an_allreduce() -> list[str]:
    """The Python functions that a blocking allreduce in place enters before it is with the engine."""
    tensor = torch.ones(1024)
    for _ in range(3):
        hvd.allreduce_(tensor, name="x", op=hvd.Sum)
    entered: list[str] = []

    def profile(frame: typing.Any, event: str, argument: object) -> None:
        if event == "call":
            entered.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        hvd.allreduce_(tensor, name="x", op=hvd.Sum)
    finally:
        sys.setprofile(None)
    return entered[: entered.index("Engine.submit")]


def test_the_way_to_the_engine_is_short(rank_pool: typing.Any) -> None:
    """Counted, since each costs what the sum of a small tensor costs."""
    [calls] = rank_pool(1).run(calls_of_an_allreduce, init=True)
    assert len(calls) <= 8, calls
