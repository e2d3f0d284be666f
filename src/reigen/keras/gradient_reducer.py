"""Reduction of an optimizer's gradients, inside of whichever program Keras's backend has traced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
from keras import ops

from reigen import context as contexts
from reigen.api.compression import CastCompression
from reigen.api.gradients.gradient_agreement import GradientKind, agree_on_gradients
from reigen.api.process_sets import ProcessSet, global_process_set, process_set_number
from reigen.elastic import membership
from reigen.engine.operation_builders import ReductionSpec
from reigen.errors import ArgumentError
from reigen.keras.backend import load_backend
from reigen.types import ReduceOp


@dataclass(frozen=True)
class ReduceOptions:
    """Options of a wrapped optimizer.

    Attributes:
        reduction: operator and factors.
        compressor: makes tensors smaller on their way.
        sparse_as_dense: reduce sparse gradients as dense ones.
        backward_passes: gradients that are added up before they are reduced.
        average_passes: divide their sum by that number.
        groups: a number of operations, or lists of variables that are reduced together; None: one operation.
        process_set: whose ranks take part.
        scale_local_gradients: divide gradients of local variables by the number of ranks.
    """

    reduction: ReductionSpec
    compressor: Any
    sparse_as_dense: bool = False
    backward_passes: int = 1
    average_passes: bool = False
    groups: int | list[list[Any]] | None = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True


@dataclass(frozen=True)
class ReducePlan:
    """Plan of the operations for a list of variables, the same on all ranks.

    Attributes:
        name: of its operations.
        kinds: by variable.
        groups: places of the dense ones, an operation each.
    """

    name: str
    kinds: tuple[GradientKind, ...]
    groups: tuple[tuple[int, ...], ...]


@dataclass
class GradientReducer:
    """Gradients of one optimizer, on this rank.

    The ranks agree on the list of gradients when a list of variables is applied for the first time, while the program
    that does it is traced. What runs later is in the program.

    Args:
        options: the same on every rank.
        local_layers: layers whose variables are not reduced; they need not be built yet.
    """

    options: ReduceOptions
    local_layers: Sequence[Any] = ()
    #: keys of variables that are not reduced
    _local: set[int] = field(default_factory=set)
    #: by the keys of the variables
    _plans: dict[tuple[int, ...], ReducePlan] = field(default_factory=dict)
    #: of the job to which the plans belong
    _context: contexts.Context | None = None
    _name: str = ""
    #: what `begin` was called with
    _variables: list[Any] = field(default_factory=list)
    _reduced: list[Any] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientReducer:
        """Return one that has agreed on nothing yet."""
        return GradientReducer(self.options, self.local_layers, set(self._local))

    @property
    def factor(self) -> float:
        """Factor by which Keras's average over the passes is multiplied."""
        return 1.0 if self.options.average_passes else float(self.options.backward_passes)

    def register_local(self, variable: Any) -> None:
        """Do not reduce a variable's gradients."""
        self._local.add(_key(variable))

    def begin(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients with zeros for those that are missing here, and not elsewhere.

        Raises:
            ArgumentError: a gradient has come that no rank had the first time; or the job has warm spares.
            MismatchError: the ranks' variables differ.
        """
        membership.check_plain_step()
        found, self._variables = list(gradients), list(variables)
        backend = load_backend()
        if not self._is_shared():
            # What the optimizer does with them, clipping for example, must not depend on the number of ranks.
            for place, gradient in enumerate(found if self.options.sparse_as_dense else ()):
                if backend.is_sparse(gradient) and not self._is_local(variables[place]):
                    found[place] = backend.to_dense(gradient)
            return found
        plan = self._plan(found)
        for place, kind in enumerate(plan.kinds):
            if self._is_local(variables[place]):
                continue
            if kind is GradientKind.MISSING and found[place] is not None:
                raise ArgumentError(
                    f"{_path(variables[place])} has a gradient now, and had none on any rank when the ranks agreed, "
                    "which they did when its optimizer was first applied: begin with a step in which it has one"
                )
            if kind is not GradientKind.MISSING and found[place] is None:
                found[place] = ops.zeros(variables[place].shape, variables[place].dtype)
            if kind is GradientKind.DENSE and backend.is_sparse(found[place]):
                found[place] = backend.to_dense(found[place])
        return found

    def expect(self, variables: Iterable[Any]) -> None:
        """Remember the variables of the gradients that `reduce` gets next."""
        self._reduced = list(variables)

    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients of the variables that `expect` got, reduced."""
        variables, results = self._reduced, list(gradients)
        if not self._is_shared():
            return self._scale(results, range(len(results)), self.factor)
        options, plan = self.options, self._plans[self._plan_key()]
        places = {_key(variable): place for place, variable in enumerate(variables)}
        reduction = options.reduction._replace(postscale=options.reduction.postscale * self.factor)
        for number, group in enumerate(plan.groups):
            members = [places[_key(self._variables[place])] for place in group]
            if reduced := self._reduce_group([results[place] for place in members], f"{plan.name}.{number}"):
                for place, gradient in zip(members, reduced, strict=True):
                    results[place] = gradient
        for place, kind in enumerate(plan.kinds):
            variable = self._variables[place]
            if kind is GradientKind.SPARSE and not self._is_local(variable):
                here = places[_key(variable)]
                name = f"{plan.name}.sparse.{place}"
                results[here] = load_backend().reduce_sparse(results[here], reduction, name, options.process_set)
        local = [place for place, variable in enumerate(variables) if self._is_local(variable)]
        size = len(self._ranks()) if options.scale_local_gradients else 1
        return self._scale(results, local, self.factor / size)

    def all_finite(self, finite: Any) -> Any:
        """Return whether a truth value (a tensor) is true on all ranks."""
        if not self._is_shared():
            return finite
        flag = ops.reshape(ops.cast(finite, "int32"), (1,))
        reduction = ReductionSpec(ReduceOp.MIN, 1.0, 1.0)
        name = f"{self._current_name()}.finite"
        (everywhere,) = load_backend().reduce_gradients([flag], reduction, name, self.options.process_set)
        return ops.cast(ops.reshape(everywhere, ()), "bool")

    def reduce_maximum(self, gradient: Any, variable: Any) -> Any:
        """Return the largest values of any rank: for variables that are overwritten with their gradient."""
        if not self._is_shared() or self._is_local(variable):
            return gradient
        place = [_key(each) for each in self._variables].index(_key(variable))
        reduction = ReductionSpec(ReduceOp.MAX, 1.0, 1.0)
        name = f"{self._current_name()}.overwrite.{place}"
        return load_backend().reduce_gradients([gradient], reduction, name, self.options.process_set)[0]

    def _reduce_group(self, gradients: list[Any], name: str) -> list[Any]:
        options = self.options
        reduction = options.reduction._replace(postscale=options.reduction.postscale * self.factor)
        pairs = [options.compressor.compress(gradient) for gradient in gradients]
        tensors = [tensor for tensor, _ in pairs]
        reduced = load_backend().reduce_gradients(tensors, reduction, name, options.process_set)
        return [options.compressor.decompress(each, ctx) for each, (_, ctx) in zip(reduced, pairs, strict=True)]

    def _plan(self, gradients: Sequence[Any]) -> ReducePlan:
        current = self._current_name()  # in another job than before, the plans go
        key = self._plan_key()
        if key in self._plans:
            return self._plans[key]
        name = f"{current}.{len(self._plans)}"
        kinds = [self._kind(*pair) for pair in zip(gradients, self._variables, strict=True)]
        number = process_set_number(self.options.process_set)
        agreed = agree_on_gradients(contexts.current(), self._describe(), kinds, f"{name}.agreement", number)
        places = [
            place
            for place, kind in enumerate(agreed)
            if kind is GradientKind.DENSE and not _is_overwritten(self._variables[place])
        ]
        groups = tuple(tuple(group) for group in self._group(places) if group)
        self._plans[key] = ReducePlan(name, tuple(agreed), groups)
        return self._plans[key]

    def _group(self, places: list[int]) -> list[list[int]]:
        groups = self.options.groups
        if groups is None:
            return [places]
        if isinstance(groups, int):
            step, rest = divmod(len(places), groups)
            ends = [(number + 1) * step + min(number + 1, rest) for number in range(groups)]
            return [places[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        keys = [_key(variable) for variable in self._variables]
        listed = [[place for place in places if keys[place] in set(map(_key, group))] for group in groups]
        rest_of_all = [place for place in places if not any(place in group for group in listed)]
        return [*listed, rest_of_all]

    def _kind(self, gradient: Any, variable: Any) -> GradientKind:
        if gradient is None or self._is_local(variable):
            return GradientKind.MISSING
        sparse = load_backend().is_sparse(gradient) and not self.options.sparse_as_dense
        return GradientKind.SPARSE if sparse else GradientKind.DENSE

    def _describe(self) -> list[str]:
        options = self.options
        compressor = options.compressor
        wire = compressor.wire if isinstance(compressor, CastCompression) else type(compressor).__name__
        how = f"{options.reduction.op.name}, factors {options.reduction[1:]}, travels as {wire or 'it is'}"
        lines = [f"{how}, {options.backward_passes} backward passes"]
        for place, variable in enumerate(self._variables):
            local = ", local" if self._is_local(variable) else ""
            dtype = keras.backend.standardize_dtype(variable.dtype)
            lines.append(f"variable {place}: {dtype} {tuple(variable.shape)}{local}")
        return lines

    def _plan_key(self) -> tuple[int, ...]:
        return tuple(map(_key, self._variables))

    def _current_name(self) -> str:
        """Name of the optimizer: a number, the same on all ranks if they first apply their optimizers in one order."""
        context = contexts.current()
        if self._context is not context:
            number = process_set_number(self.options.process_set)
            self._context, self._name = context, f"keras.{next(context.gradient_sets[number])}"
            self._plans.clear()
        return self._name

    def _ranks(self) -> tuple[int, ...]:
        context = contexts.current()
        return tuple(context.process_sets[process_set_number(self.options.process_set)])

    def _is_shared(self) -> bool:
        """Return whether there are other ranks, and this one takes part."""
        ranks = self._ranks()
        return len(ranks) > 1 and contexts.current().rank in ranks

    def _is_local(self, variable: Any) -> bool:
        if _key(variable) in self._local:
            return True
        return any(_key(each) == _key(variable) for layer in self.local_layers for each in layer.trainable_variables)

    @staticmethod
    def _scale(gradients: list[Any], places: Iterable[int], factor: float) -> list[Any]:
        if factor != 1.0:
            for place in places:
                if gradients[place] is not None:
                    gradients[place] = gradients[place] * factor
        return gradients


def _key(variable: Any) -> int:
    """Identity of a variable; the same for Keras's and for the backend's own that it holds."""
    holds = keras.backend.backend() == "tensorflow" and isinstance(variable, keras.Variable)
    return id(variable.value if holds else variable)


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", None) or getattr(variable, "name", variable))


def _is_overwritten(variable: Any) -> bool:
    return bool(getattr(variable, "overwrite_with_gradient", False))
