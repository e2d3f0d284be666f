"""Which optimizers may update parts of parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from reigen.api.gradients.sharding import ShardGranularity  # noqa: E402
from reigen.errors import ArgumentError  # noqa: E402
from reigen.torch.shared_parameters.elementwise import choose_division  # noqa: E402
from tests.unit.torch.optimizer_cases import DTYPES, OPTIMIZERS  # noqa: E402

ALIGNMENT = 128


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def matrix(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.linspace(-1, 1, 12, dtype=dtype).reshape(3, 4))


def check(optimizer: torch.optim.Optimizer, *, asserted: bool = False) -> ShardGranularity:
    return choose_division(optimizer, asserted=asserted, alignment_bytes=ALIGNMENT)


def stepped(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


class Norm(torch.optim.SGD):
    """Divides every gradient by its norm, as LARS does: it looks at whole tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=group["lr"])


class LikeAdafactor(torch.optim.Adafactor):
    """Somebody's own; nobody knows whether it still looks at each parameter by itself."""


class Sign(torch.optim.Optimizer):
    """signSGD: element-wise, and not one of torch's."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


class Noise(Sign):
    """Adds noise to every weight."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=group["lr"])


class Positions(Sign):
    """Updates the elements of a parameter by where they stand in it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.view(-1).sub_(torch.arange(parameter.numel(), dtype=parameter.dtype))


class Outside(Sign):
    """Lookahead's shape: an optimizer around another one."""

    def __init__(self, params: Any, lr: float) -> None:
        params = list(params)
        super().__init__(params, lr)
        self.inner = torch.optim.SGD(params, lr=lr)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_torch_may_be_cut(name: str, dtype: torch.dtype) -> None:
    cls, options = OPTIMIZERS[name]
    assert check(cls([matrix(dtype)], **options)) is ShardGranularity.ELEMENTS


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: torch.optim.LBFGS([p]), "closure"),
        (lambda p: LikeAdafactor([p], lr=0.1), r"weights were others than those of whole tensors after step 1"),
        (lambda p: torch.optim.SparseAdam([p]), "sparse"),
        (lambda p: Norm([p], lr=0.1), r"weights were others than those of whole tensors after step 1"),
        (lambda p: Positions([p], lr=0.1), r"weights were others than those of whole tensors after step 1"),
        (lambda p: Noise([p], lr=0.1), "random"),
        (lambda p: Outside([p], lr=0.1), "another optimizer in its attribute 'inner'"),
        (lambda p: torch.optim.Adam([p], capturable=True), "it failed"),
    ],
    ids=[
        "lbfgs",
        "derived from adafactor",
        "sparse adam",
        "norm",
        "positions",
        "noise",
        "optimizer inside",
        "cannot step here",
    ],
)
def test_what_looks_at_whole_tensors_is_refused_whoever_vouches(make: Any, why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        check(make(matrix()), asserted=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_what_looks_at_each_parameter_by_itself_gets_it_whole(name: str, dtype: torch.dtype) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    others = [] if name == "Muon" else [torch.nn.Parameter(torch.ones(5, dtype=dtype))]
    assert check(getattr(torch.optim, name)([matrix(dtype), *others])) is ShardGranularity.PARAMETERS


def test_an_unknown_class_needs_somebody_who_vouches() -> None:
    optimizer = Sign([matrix()], lr=0.1)
    with pytest.raises(ArgumentError, match="elementwise=True"):
        check(optimizer)
    check(optimizer, asserted=True)


def test_every_group_is_tried_with_its_own_options() -> None:
    """The first group has no learning rate yet; the second one's options cannot work on a processor."""
    groups = [{"params": [matrix()], "lr": 0.0}, {"params": [matrix()], "capturable": True}]
    check(torch.optim.Adam(groups[:1]))
    with pytest.raises(ArgumentError, match="it failed"):
        check(torch.optim.Adam(groups))


def test_a_learning_rate_of_nothing_hides_nothing() -> None:
    with pytest.raises(ArgumentError, match="whole tensors"):
        check(Norm([matrix()], lr=0.0), asserted=True)


def test_the_user_s_optimizer_is_not_changed() -> None:
    parameter = matrix()
    optimizer = torch.optim.Adam([parameter])
    calls: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    stepped([parameter], optimizer)
    before = copy.deepcopy((optimizer.state_dict(), parameter.data, torch.get_rng_state()))
    check(optimizer)
    after = (optimizer.state_dict(), parameter.data, torch.get_rng_state())
    assert repr(before[0]) == repr(after[0])
    assert all(torch.equal(x, y) for x, y in zip(before[1:], after[1:], strict=True))
    assert len(calls) == 1


def test_threads_that_cut_elsewhere_are_seen() -> None:
    """What two threads do with float16 in RMSprop depends on where each one's part ends; with float32 it does not."""
    torch.set_num_threads(2)
    check(torch.optim.RMSprop([matrix()], centered=True))
    half = torch.optim.RMSprop([matrix(torch.float16)], lr=0.01, centered=True, momentum=0.9)
    with pytest.raises(ArgumentError, match=r"2 threads.*set_num_threads"):
        check(half)
    check(half, asserted=True)
