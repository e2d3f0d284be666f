"""Parameters of a Trainer: their keys in a store, and how each is treated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
    """The parameters that a user gave, in their order.

    Args:
        params: a module, whose sparse embeddings are found; a dict of names and parameters; parameters; pairs of names
            and parameters; or dicts with any of these under ``"params"`` and with options: ``lr_mult``, ``wd_mult``,
            ``stype``, ``grad_stype``.

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
