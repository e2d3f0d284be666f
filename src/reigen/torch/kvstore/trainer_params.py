"""Parameters of a Trainer, with their keys in a store, and their gradients as the store wants them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from reigen.errors import ArgumentError
from reigen.kv.values import Key

DENSE, ROW_SPARSE = "default", "row_sparse"

_OPTIONS = {"params", "lr_mult", "wd_mult", "stype", "grad_stype"}


@dataclass(frozen=True)
class TrainerParam:
    """One parameter.

    Attributes:
        key: what it is called in the store: its name where names were given, else its number.
        parameter: the tensor.
        lr_mult: its learning rate is so many times the optimizer's.
        wd_mult: so is its weight decay.
        stype: ``row_sparse``: the weights are pulled row by row, when they are asked for.
        grad_stype: ``row_sparse``: of the gradient, only rows that are not zero are pushed.
    """

    key: Key
    parameter: torch.Tensor
    lr_mult: float = 1.0
    wd_mult: float = 1.0
    stype: str = DENSE
    grad_stype: str = DENSE

    @property
    def is_deferred(self) -> bool:
        """Return whether the shape is known only after the first forward pass."""
        return bool(is_lazy(self.parameter))

    @property
    def has_sparse_rows(self) -> bool:
        """Return whether the store holds it by rows."""
        return self.grad_stype == ROW_SPARSE


def parse_trainer_params(params: Any) -> list[TrainerParam]:
    """The parameters that a user gave, in their order: see `reigen.torch.Trainer`.

    Raises:
        ArgumentError: it is something else; nothing is there, or nothing that could be trained; a parameter or name is
            there twice; an option is unknown.
    """
    sparse: set[int] = set()
    if isinstance(params, torch.nn.Module):
        sparse = {id(each) for each in _sparse_weights(params)}
        params = dict(params.named_parameters())
    found = list(_iterate_params(params, {}))
    if not found:
        raise ArgumentError("a Trainer needs at least one parameter; was an iterator used up before?")
    named = [name is not None for name, _, _ in found]
    if any(named) and not all(named):
        raise ArgumentError("some parameters were given with names and some without; give all of them names, or none")
    entries = []
    for number, (name, parameter, options) in enumerate(found):
        if id(parameter) in sparse:
            options.setdefault("grad_stype", ROW_SPARSE)
        entries.append(TrainerParam(number if name is None else name, parameter, **options))
    _check(entries)
    return entries


def _sparse_weights(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for each in module.modules():
        if isinstance(each, torch.nn.Embedding | torch.nn.EmbeddingBag) and each.sparse:
            yield each.weight


def _iterate_params(params: Any, options: dict[str, Any]) -> Iterator[tuple[str | None, torch.Tensor, dict[str, Any]]]:
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise ArgumentError(
            "a Trainer needs parameters: a list, a dict of names, named_parameters() or a module; got "
            f"{type(params).__name__}"
        )
    if isinstance(params, Mapping):
        params = params.items()
    for item in params:
        if isinstance(item, Mapping):
            yield from _iterate_params(item.get("params", ()), {**options, **_options(item)})
            continue
        name, parameter = item if isinstance(item, tuple) and len(item) == 2 else (None, item)
        if not isinstance(parameter, torch.Tensor) or not isinstance(name, str | None):
            raise ArgumentError(f"a Trainer needs parameters, with or without names, got {item!r}")
        yield name, parameter, dict(options)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in group.items() if name != "params"}
    unknown = sorted(map(str, set(group) - _OPTIONS))
    if unknown or "params" not in group:
        raise ArgumentError(
            f"a group of parameters is a dict with 'params' and any of {', '.join(sorted(_OPTIONS - {'params'}))}; "
            + (f"got {', '.join(unknown)}" if unknown else "'params' is missing")
        )
    for name in ("stype", "grad_stype"):
        if options.get(name, DENSE) not in {DENSE, ROW_SPARSE}:
            raise ArgumentError(f"{name} is {DENSE!r} or {ROW_SPARSE!r}, got {options[name]!r}")
    if options.get("stype") == ROW_SPARSE:
        options.setdefault("grad_stype", ROW_SPARSE)
        if options["grad_stype"] != ROW_SPARSE:
            raise ArgumentError("row-sparse weights have row-sparse gradients, too")
    return options


def _check(entries: list[TrainerParam]) -> None:
    if not any(entry.parameter.requires_grad for entry in entries):
        raise ArgumentError(
            "none of these parameters requires a gradient, so nothing would be trained. (Tensors of a state_dict() "
            "never do: give named_parameters() or the module.)"
        )
    keys: dict[Key, TrainerParam] = {}
    tensors: dict[int, Key] = {}
    for entry in entries:
        if entry.key in keys:
            raise ArgumentError(f"there are two parameters of the name {entry.key!r}")
        if id(entry.parameter) in tensors:
            raise ArgumentError(f"parameter {entry.key!r} was given before, as {tensors[id(entry.parameter)]!r}")
        if entry.has_sparse_rows and not entry.is_deferred and entry.parameter.dim() < 1:
            raise ArgumentError(f"parameter {entry.key!r} has no rows, so it cannot be row-sparse")
        keys[entry.key], tensors[id(entry.parameter)] = entry, entry.key


class TrainerGradients:
    """The gradients of a Trainer's parameters.

    Args:
        entries: the parameters.
        on_store: the store updates the weights.
        keeps_sparse: sparse gradients may stay sparse, since they go nowhere.
        counts: rounds count workers, so that everyone has to contribute something.
    """

    def __init__(self, entries: Sequence[TrainerParam], *, on_store: bool, keeps_sparse: bool, counts: bool) -> None:
        self._entries = entries
        self._on_store, self._keeps_sparse, self._counts = on_store, keeps_sparse, counts
        self._warned: set[int] = set()

    def gradients(self, ignore_stale: bool) -> list[tuple[int, torch.Tensor | None]]:
        """The gradient of each parameter that requires one, with the parameter's index.

        Raises:
            ArgumentError: some have none, and that is not to be ignored.
        """
        trained = [(index, entry) for index, entry in enumerate(self._entries) if entry.parameter.requires_grad]
        stale = [str(entry.key) for _, entry in trained if entry.parameter.grad is None]
        if stale and not ignore_stale:
            raise ArgumentError(
                f"{len(stale)} of {len(trained)} parameters got no gradient since zero_grad(): {', '.join(stale[:5])}"
                f"{', ...' if len(stale) > 5 else ''}. If that is meant, call step(..., ignore_stale_grad=True)."
            )
        return [(index, entry.parameter.grad) for index, entry in trained]

    def of(self, index: int, gradient: torch.Tensor | None, factor: float, overflow: bool) -> torch.Tensor | None:
        """Return this worker's contribution for a parameter, of the store's kind: the gradient times ``factor``.

        Zeros where there is no gradient, or ``overflow``: some gradient of this worker is not finite. None where these
        would not be missed.
        """
        entry = self._entries[index]
        by_rows = self._on_store and entry.has_sparse_rows
        if gradient is None or overflow:
            if not self._counts:
                return None
            return _empty_rows(entry.parameter) if by_rows else torch.zeros_like(entry.parameter, requires_grad=False)
        gradient = gradient.detach()
        if by_rows and not gradient.is_sparse:
            gradient = gradient.to_sparse(1)
        if gradient.is_sparse and not by_rows and not self._keeps_sparse:
            if self._on_store and index not in self._warned:
                self._warned.add(index)
                warnings.warn(
                    f"the gradient of parameter {entry.key!r} is sparse, and travels as a dense one: the Trainer was "
                    'not told. Give it the module, or {"params": [...], "grad_stype": "row_sparse"}.',
                    UserWarning,
                    stacklevel=4,
                )
            gradient = gradient.to_dense()
        return gradient if factor == 1.0 else gradient * factor


def _empty_rows(parameter: torch.Tensor) -> torch.Tensor:
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.detach().new_empty((0, *parameter.shape[1:]))
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
