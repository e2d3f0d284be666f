"""Trial of optimizers: may they update parts of parameters, or some of the parameters, by themselves?

An optimizer is *element-wise* where the new value of every element follows from that element's own gradient and state,
and from numbers that are the same for the whole parameter. Adam is, Adafactor (which looks at rows and columns) is not.
For such a one it makes no difference who updates which elements, down to the last bit: vector kernels and their scalar
remainders may round differently, so that cuts must lie where vectors begin, and this is tried out, too.

Some look at whole parameters, but at each by itself. Of those it makes no difference who updates which parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from reigen.api.gradients.sharding import ShardGranularity
from reigen.errors import ArgumentError
from reigen.torch.shared_parameters.state_layout import clone_optimizer, group_options, inner_step, make_example_state

#: Shapes of the parameters that are tried: matrices, whole vectors and remainders, a single number.
_SHAPES = ((24, 97), (5, 7, 9), (160,), ())
#: As many steps as RAdam needs to come to its second formula.
_NUM_STEPS = 8
_NUM_THREADED_STEPS = 4
#: One that is cut into many pieces of few vectors and long remainders.
_THREADED_SHAPES = ((8192,),)
#: torch divides tensors of 32,768 elements and more among threads: at any element, but in fused kernels at cache lines.
_FUSED_THREAD_BYTES = 64
#: For optimizers that look at whole parameters: two of each number of dimensions; more than three are as three.
_WHOLE_SHAPES = ((24, 97), (8, 3), (5, 7, 9), (2, 3, 4), (160,), (6,), (), ())
#: For optimizers whose learning rate is so small, or 0 before a warm-up, that nothing would move.
_TRIAL_LEARNING_RATE = 1e-2

#: Classes of torch that look at whole parameters, each by itself: at rows, columns and norms, or at the whole matrix.
_PARAMETERWISE = ("Adafactor", "Muon")
#: Classes of torch for which parameters cannot be divided, and why.
_UNSUPPORTED = {
    "LBFGS": "its closure is called several times a step, and its directions come from all parameters together",
    "SparseAdam": "it takes sparse gradients, of which only the rows that occur are updated",
}


def choose_division(optimizer: torch.optim.Optimizer, *, asserted: bool, alignment_bytes: int) -> ShardGranularity:
    """Into what its parameters may be divided so that the bits stay the same.

    Its class steps on small parameters with the options of each of its groups, all together and divided, and all
    weights are compared. That takes some milliseconds for each set of options. The optimizer and the state of torch's
    generator are not changed.

    Args:
        optimizer: a plain one.
        asserted: the user says that the class is element-wise. It need not be torch's own then, and may depend on how
            torch divides a parameter among threads, which changes bits without being wrong. What is seen to be wrong
            is refused all the same.
        alignment_bytes: cuts lie at multiples of so many bytes from the beginning of a parameter.

    Raises:
        ArgumentError: it looks at whole tensors, needs a closure, is of an unknown class and not asserted to be, or
            did not do the same on parts as on the whole. Says which.
    """
    name = type(optimizer).__name__
    for refused, reason in _UNSUPPORTED.items():
        if isinstance(optimizer, getattr(torch.optim, refused, ())):
            raise _indivisible_error(name, reason)
    if type(optimizer) in [getattr(torch.optim, known, None) for known in _PARAMETERWISE]:
        for group, dtype in _option_sets(optimizer):
            dimensions = {min(one.dim(), 3) for one in group["params"] if one.dtype == dtype}
            shapes = [shape for shape in _WHOLE_SHAPES if len(shape) in dimensions]
            if reason := _DivisionTrial(optimizer, group, dtype).differs(shapes, _NUM_STEPS, None):
                raise _indivisible_error(name, reason)
        return ShardGranularity.PARAMETERS
    if inspect.signature(type(optimizer).step).parameters.get("closure", _OPTIONAL).default is inspect.Parameter.empty:
        raise _indivisible_error(name, "its step() needs a closure")
    if not asserted and not type(optimizer).__module__.startswith("torch.optim."):
        raise _indivisible_error(
            name,
            "its class is not one of torch's own; if it updates every element from that element's own gradient and "
            "state, say so: elementwise=True",
        )
    for group, dtype in _option_sets(optimizer):
        trial = _DivisionTrial(optimizer, group, dtype)
        if reason := trial.differs(_SHAPES, _NUM_STEPS, alignment_bytes):
            raise _indivisible_error(name, reason)
        threads = torch.get_num_threads()
        if asserted or threads == 1:
            continue
        thread_bytes = _FUSED_THREAD_BYTES if group.get("fused") else dtype.itemsize
        if reason := trial.differs(_THREADED_SHAPES, _NUM_THREADED_STEPS, thread_bytes):
            raise _indivisible_error(
                name,
                f"torch divides large tensors among {threads} threads, and with this class the bits depend on where: "
                f"{reason}. Call torch.set_num_threads(1), or accept it: elementwise=True",
            )
    return ShardGranularity.ELEMENTS


_OPTIONAL = inspect.Parameter("closure", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)


def _indivisible_error(name: str, reason: str) -> ArgumentError:
    return ArgumentError(f"the parameters of {name} cannot be updated in parts: {reason}")


def _option_sets(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Mapping[str, Any], torch.dtype]]:
    """Every set of options, with every dtype that occurs with it, once."""
    seen: set[tuple[str, torch.dtype]] = set()
    for group in optimizer.param_groups:
        options = repr(sorted((key, repr(value)) for key, value in group_options(group).items()))
        for dtype in dict.fromkeys(parameter.dtype for parameter in group["params"]):
            if (options, dtype) not in seen:
                seen.add((options, dtype))
                yield group, dtype


class _DivisionTrial:
    """Steps of one set of options on parameters of one dtype, all together and divided."""

    def __init__(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> None:
        self._optimizer, self._group, self._dtype = optimizer, group, dtype

    def differs(self, shapes: Sequence[tuple[int, ...]], num_steps: int, alignment_bytes: int | None) -> str:
        """Return why dividing is not allowed; empty: all bits were the same.

        Cuts lie at multiples of ``alignment_bytes``; None: every parameter stays whole, and has another optimizer.
        """
        unit = None if alignment_bytes is None else max(1, alignment_bytes // self._dtype.itemsize)
        with torch.random.fork_rng(devices=[]):
            moved, reason = self._compare({}, shapes, num_steps, unit)
            if not moved and not reason and "lr" in self._group:
                moved, reason = self._compare({"lr": _TRIAL_LEARNING_RATE}, shapes, num_steps, unit)
        return reason if moved or reason else "it did not change the weights on which it was tried"

    def _compare(
        self, options: Mapping[str, Any], shapes: Sequence[tuple[int, ...]], num_steps: int, unit: int | None
    ) -> tuple[bool, str]:
        generator = torch.Generator().manual_seed(20)
        initial = [self._values(shape, generator) for shape in shapes]
        whole = [torch.nn.Parameter(one.clone()) for one in initial]
        whole_again = [one.clone() for one in initial]
        cut = [torch.nn.Parameter(piece) for one in whole_again for piece in _pieces(one, unit)]
        for parameters in (whole, cut):
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
        try:
            parts = [cut] if unit is not None else [[one] for one in cut]
            optimizers = [self._on(part, options, resumes=unit is not None) for part in (whole, *parts)]
            for step in range(1, num_steps + 1):
                gradients = [self._values(shape, generator) for shape in shapes]
                _set_gradients(whole, gradients)
                _set_gradients(cut, [piece for one in gradients for piece in _pieces(one, unit)])
                random = torch.get_rng_state()
                for optimizer in optimizers:
                    inner_step(optimizer)
                if not torch.equal(random, torch.get_rng_state()):
                    return True, "it draws random numbers, and every rank would draw others"
                numel = sum(one.numel() for one in initial)
                unequal = sum(_num_unequal(one.detach(), other) for one, other in zip(whole, whole_again, strict=True))
                if unequal:
                    return True, (
                        f"tried on {self._dtype}, {unequal} of {numel} weights were others than "
                        f"those of {'whole tensors' if unit is not None else 'all together'} after step {step}"
                    )
        except ArgumentError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the user's class raises is the reason
            return False, f"tried on {self._dtype}, it failed: {type(error).__name__}: {error}"
        return any(_num_unequal(one.detach(), other) for one, other in zip(whole, initial, strict=True)), ""

    def _on(
        self, parameters: list[torch.nn.Parameter], options: Mapping[str, Any], *, resumes: bool
    ) -> torch.optim.Optimizer:
        states = {one: make_example_state(self._optimizer, self._group, one) for one in parameters if resumes}
        held = {one: state for one, state in states.items() if state}
        return clone_optimizer(self._optimizer, [{**group_options(self._group), **options, "params": parameters}], held)

    def _values(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Numbers of either sign and of many sizes, and some zeros."""
        sizes = 10 ** (-3 * torch.rand(shape, generator=generator, dtype=torch.float64))
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * sizes
        return torch.where(torch.rand(shape, generator=generator) < 0.05, 0.0, values).to(self._dtype)


def _pieces(tensor: torch.Tensor, unit: int | None) -> list[torch.Tensor]:
    """Return flat views: one unit, two, three, and so on, and the rest. A single number stays whole.

    Tensors without dimensions promote types differently. Without a unit the tensor stays whole.
    """
    if unit is None or not tensor.dim():
        return [tensor]
    ends: list[int] = []
    end = 0
    while (end := end + unit * (len(ends) + 1)) < tensor.numel():
        ends.append(end)
    return list(tensor.view(-1).tensor_split(ends))


def _set_gradients(parameters: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is not None
        parameter.grad.copy_(gradient)


def _num_unequal(one: torch.Tensor, other: torch.Tensor) -> int:
    """Count elements that differ in their bits; NaNs are equal to themselves, 0 is not -0."""
    bits = [each.contiguous().reshape(-1, 1).view(torch.uint8) for each in (one, other)]
    return int((bits[0] != bits[1]).any(dim=1).sum())
