"""A second optimizer of the user's class, and what such a class keeps for a parameter."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: E402

from reigen.errors import ArgumentError  # noqa: E402
from reigen.torch.shared_parameters.state_layout import (  # noqa: E402
    StateEntry,
    StateKind,
    clone_optimizer,
    infer_state_layout,
    inner_step,
    make_example_shape,
)
from tests.unit.torch.optimizer_cases import DTYPES, OPTIMIZERS  # noqa: E402

LIKE, NUMBER = StateKind.LIKE_PARAMETER, StateEntry(StateKind.SCALAR, torch.float32)


def parameter(numel: int = 5, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.linspace(-1, 1, numel, dtype=dtype))


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.grad = torch.ones_like(one)
    optimizer.step()
    return optimizer


class Keeping(torch.optim.Optimizer):
    """Keeps what it is told to make."""

    def __init__(self, params: Any, make: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.make = make

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one]["what"] = self.make()


def test_what_adam_keeps() -> None:
    adam = torch.optim.Adam([parameter()], amsgrad=True)
    averages = {name: StateEntry(LIKE, torch.bfloat16) for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
    assert infer_state_layout(adam, adam.param_groups[0], torch.bfloat16) == {"step": NUMBER, **averages}


def test_options_of_a_group_decide() -> None:
    sgd = torch.optim.SGD([{"params": [parameter()]}, {"params": [parameter()], "momentum": 0.9}], lr=0.1)
    layouts = [infer_state_layout(sgd, group, torch.float32) for group in sgd.param_groups]
    assert [entry.kind for entry in layouts[0].values() if entry.kind is not StateKind.NONE] == []
    assert layouts[1] == {"momentum_buffer": StateEntry(LIKE, torch.float32)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_layout_is_what_the_class_keeps_for_a_real_parameter(name: str, dtype: torch.dtype) -> None:
    cls, options = OPTIMIZERS[name]
    one = torch.nn.Parameter(torch.ones(6, 7, dtype=dtype))
    optimizer = cls([one], **options)
    layout = infer_state_layout(optimizer, optimizer.param_groups[0], dtype)
    held = stepped(optimizer).state[one]
    assert {
        key: (value.dtype, value.shape) for key, value in held.items() if value is not None
    } == {
        key: (entry.dtype, one.shape if entry.kind is LIKE else torch.Size([]))
        for key, entry in layout.items()
        if entry.kind is not StateKind.NONE
    }  # fmt: skip


@pytest.mark.parametrize("shape", [(6, 7), (6, 6), (5, 1, 3, 3), (1, 9), (8,), (1,), ()], ids=str)
def test_the_layout_for_whole_parameters_is_that_of_their_dimensions(shape: tuple[int, ...]) -> None:
    one = torch.nn.Parameter(torch.ones(shape))
    optimizer = torch.optim.Adafactor([one])
    layout = infer_state_layout(optimizer, optimizer.param_groups[0], torch.float32, make_example_shape(shape))
    held = stepped(optimizer).state[one]
    shapes = {key: (value.dtype, tuple(value.shape)) for key, value in held.items()}
    assert shapes == {key: (entry.dtype, entry.shape(one)) for key, entry in layout.items()}


def test_entries_that_a_checkpoint_brought_are_part_of_the_layout() -> None:
    adam = torch.optim.Adam([parameter()])
    stepped(adam).state[adam.param_groups[0]["params"][0]]["mine"] = torch.zeros(5, dtype=torch.float64)
    layout = infer_state_layout(adam, adam.param_groups[0], torch.float32)
    assert layout["mine"] == StateEntry(LIKE, torch.float64)


@pytest.mark.parametrize(
    ("value", "what"),
    [([1.0], "a list under 'what'"), (torch.zeros(3, 2), r"a tensor of shape \(3, 2\)"), (7, "a int under")],
    ids=["list", "other shape", "number"],
)
def test_what_cannot_be_divided_is_an_error(value: Any, what: str) -> None:
    optimizer = Keeping([parameter()], lambda: value)
    with pytest.raises(ArgumentError, match=what):
        infer_state_layout(optimizer, optimizer.param_groups[0], torch.float32)


def test_neither_instance_changes_the_other() -> None:
    one, other = parameter(), parameter(7)
    first = torch.optim.Adam([one], lr=0.1)
    second = clone_optimizer(first, [{**first.param_groups[0], "params": [other]}])
    assert type(second) is torch.optim.Adam
    stepped(second)
    assert not first.state
    assert set(second.state) == {other}
    assert torch.equal(one, parameter())
    second.param_groups[0]["lr"] = 0.5
    assert first.param_groups[0]["lr"] == 0.1


def test_a_scheduler_s_step_and_the_user_s_hooks_stay_with_the_first() -> None:
    one, other = parameter(), parameter()
    first = torch.optim.SGD([one], lr=0.1)
    torch.optim.lr_scheduler.StepLR(first, 1)
    calls: list[object] = []
    first.register_step_post_hook(lambda *_: calls.append(1))
    second = clone_optimizer(first, [{**first.param_groups[0], "params": [other]}])
    stepped(second)
    assert not calls
    assert torch.equal(one, parameter())
    assert not torch.equal(other, parameter())


def test_an_inner_step_runs_nobody_s_hooks() -> None:
    calls: list[object] = []
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append(1))
    try:
        adam = torch.optim.Adam([parameter()], lr=0.1)
        adam.param_groups[0]["params"][0].grad = torch.ones(5)
        inner_step(adam)
        assert not calls
        assert float(adam.state[adam.param_groups[0]["params"][0]]["step"]) == 1
        adam.step()
        assert calls
    finally:
        handle.remove()


def test_state_goes_on_where_it_is() -> None:
    one = parameter(dtype=torch.float64)
    first = stepped(torch.optim.Adam([one], lr=0.1))
    other = torch.nn.Parameter(one.detach().clone())
    group = {**first.param_groups[0], "params": [other]}
    second = clone_optimizer(first, [group], {other: copy.deepcopy(first.state[one])})
    stepped(first)
    stepped(second)
    assert torch.equal(one, other)
