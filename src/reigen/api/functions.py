"""Horovod's functions: those of the table of collectives, made for a framework, and those that are alike for all.

A framework gives its `Collectives`, made of its adapter, and its `Dialect`: what its users expect of the signatures.
`make_functions` makes the functions, with real signatures and docstrings; what type checkers see of them is in stubs
that ``tools/make_stubs.py`` writes of the same table.
"""

from __future__ import annotations

import linecache
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from reigen import context
from reigen.api import objects
from reigen.api.collectives import Collectives, Form, resolve_reduction
from reigen.api.operations import COLLECTIVES, Collective, Parameter, as_root
from reigen.api.process_sets import ProcessSet, global_process_set, process_set_number


@dataclass(frozen=True, slots=True)
class Dialect:
    """Signatures of a framework's functions, as its users expect them.

    Attributes:
        tensor: its tensors' type, as text.
        takes: the type of what is taken as a tensor where nothing is written into it; None: the same.
        forms: which forms of each collective it has.
        arrange: given a collective, a form and the parameters behind the tensor, returns them with the framework's own
            among them, in its order. Those are handed on to `Collectives.implementation`.
        arrange_grouped: the same for functions of several tensors; None: as for one.
        notes: a sentence for the docstring of a collective in a form.
    """

    tensor: str = "Any"
    takes: str | None = None
    forms: tuple[Form, ...] = (Form(), Form(in_place=True), Form(is_async=True), Form(in_place=True, is_async=True))
    arrange: Callable[[Collective, Form, list[Parameter]], list[Parameter]] = lambda _, __, parameters: parameters
    arrange_grouped: Callable[[Collective, Form, list[Parameter]], list[Parameter]] | None = None
    notes: Callable[[Collective, Form], str] = lambda _, __: ""


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """A function of a framework: a collective, of one tensor or of a group, in a form, as its dialect has it."""

    collective: Collective
    grouped: bool
    form: Form
    dialect: Dialect

    @property
    def name(self) -> str:
        """Name of the function."""
        prefix = "grouped_" if self.grouped else ""
        return prefix + self.collective.name + "_async" * self.form.is_async + "_" * self.form.in_place

    @property
    def value(self) -> Parameter:
        """The tensor, or the tensors."""
        dialect = self.dialect
        kind = dialect.tensor if self.form.in_place else dialect.takes or dialect.tensor
        if self.grouped:
            doc = "as for one; they may differ in shape and dtype, but are on one kind of device."
            return Parameter("tensors", f"Sequence[{kind}]", doc)
        return Parameter("tensor", kind, self.collective.tensor)

    @property
    def parameters(self) -> list[Parameter]:
        """All of them."""
        arrange = self.dialect.arrange_grouped if self.grouped else None
        arrange = arrange or self.dialect.arrange
        return [self.value, *arrange(self.collective, self.form, list(self.collective.parameters))]

    @property
    def returns(self) -> str:
        """Type of its result."""
        tensor = self.dialect.tensor
        result = f"list[{tensor}]" if self.grouped else tensor
        if self.collective.returns_splits:
            pair = f"tuple[{tensor}, {tensor}]"
            return f"Handle[{pair}]" if self.form.is_async else f"{tensor} | {pair}"
        return f"Handle[{result}]" if self.form.is_async else result

    def annotation(self, parameter: Parameter) -> str:
        """A parameter's type."""
        return parameter.annotation.format(tensor=self.dialect.takes or self.dialect.tensor)

    @property
    def doc(self) -> str:
        """Docstring of the function."""
        collective, form = self.collective, self.form
        if form.is_async:
            gives = "gives the pair" if collective.returns_splits else "gives a new tensor"
            gives = "completes it" if form.in_place else "gives a list of new tensors" if self.grouped else gives
            summary = f"Begin :func:`{self.name.replace('_async', '')}`; ``synchronize`` {gives}."
            if form.in_place:
                summary += f" {self.value.name.capitalize()} must not be touched before."
        elif form.in_place:
            written = "result is written into ``tensor``, which is returned"
            if self.grouped:
                written = "results are written into ``tensors``, which are returned as a list"
            summary = f"Run :func:`{self.name[:-1]}` in place: the {written}."
        elif self.grouped:
            summary = (
                f"Run :func:`{collective.name}` of several tensors, all or none of them, and return a list of new ones."
            )
        else:
            summary = f"{collective.summary}."
        parts = [summary + self.dialect.notes(collective, form)]
        if not (self.grouped or form.is_async or form.in_place) and collective.notes:
            parts.append(collective.notes)
        described = [f"    {parameter.name}: {parameter.doc}" for parameter in self.parameters]
        parts.append("\n".join(["Args:", *described]))
        parts.append("Returns:\n" + textwrap.indent(textwrap.fill(self._returned, 112), 4 * " "))
        parts.append(
            "Raises:\n    ArgumentError, UnsupportedTypeError: an argument is wrong here; nothing was sent.\n"
            "    CollectiveError: see `reigen.errors` for its kinds."
        )
        return "\n\n".join(parts)

    @property
    def _returned(self) -> str:
        """Sentence of the docstring about the result."""
        result = self.collective.returns
        if self.form.in_place:
            tensor = "``tensors`` as a list" if self.grouped else "``tensor``"
            result = f"{tensor}, overwritten with a result of the same shape and dtype"
        elif self.grouped:
            result = f"a list with, for each of ``tensors``, {result}"
        if self.form.is_async:
            result = f"a handle; ``synchronize`` makes of it {result}"
        return f"{result[0].upper()}{result[1:]}."


def list_functions(dialect: Dialect) -> Iterator[FunctionSpec]:
    """Yield every function of a framework."""
    for collective in COLLECTIVES:
        for grouped in (False, True)[: 1 + collective.grouped]:
            for form in dialect.forms:
                if collective.in_place or not form.in_place:
                    yield FunctionSpec(collective, grouped, form, dialect)


def make_functions(
    collectives: Collectives[Any],
    dialect: Dialect = Dialect(),
    namespace: dict[str, Any] | None = None,
    **defaults: object,
) -> dict[str, Callable[..., Any]]:
    """Make a framework's functions of the table, by name.

    Args:
        collectives: what runs them.
        dialect: the framework's.
        namespace: of the module that the functions are to belong to, where the names in their annotations are known.
        defaults: of the dialect's own parameters.
    """
    namespace = {"__name__": __name__} if namespace is None else namespace
    return {spec.name: _make_function(spec, collectives, namespace, defaults) for spec in list_functions(dialect)}


def _make_function(
    spec: FunctionSpec, collectives: Collectives[Any], namespace: dict[str, Any], own_defaults: dict[str, object]
) -> Callable[..., Any]:
    """Make a function whose signature is real, as `dataclasses` makes ``__init__``: of its source.

    Nothing is looked up by a name, and no arguments are bound, when it is called.
    """
    parameters = spec.parameters
    defaults = {each.name: each.default for each in parameters if not each.is_required} | own_defaults
    names = [parameter.name for parameter in parameters]
    signature = ", ".join(
        f"{each.name}: {spec.annotation(each)}" + ("" if each.is_required else f" = _defaults[{each.name!r}]")
        for each in parameters
    )
    own = {parameter.name for parameter in spec.collective.parameters}
    if "op" in own:
        average = "average" if "average" in own else "None"
        argument = f"_resolve({average}, op, prescale_factor, postscale_factor)"
    else:
        argument = next(iter(own - {"name", "process_set"}), "None")
    extra = [name for name in names[1:] if name not in own]
    handed_on = ", ".join([names[0], argument, "name", "process_set", *extra])
    waits = spec.form.in_place and not spec.form.is_async and collectives.in_place_waits
    source = f"""
def _make(_run, _resolve, _defaults):
    def {spec.name}({signature}) -> {spec.returns}:
        return _run({handed_on}){".wait()" * waits}
    return {spec.name}
"""
    filename = f"<{namespace['__name__']}.{spec.name}>"
    linecache.cache[filename] = len(source), None, source.splitlines(keepends=True), filename  # for tracebacks
    made: dict[str, Any] = {}
    exec(compile(source, filename, "exec"), namespace, made)  # noqa: S102 - of the table alone
    run = collectives.implementation(spec.collective, spec.grouped, spec.form)
    function: Callable[..., Any] = made["_make"](run, resolve_reduction, defaults)
    function.__module__, function.__qualname__, function.__doc__ = namespace["__name__"], spec.name, spec.doc
    return function


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has come here. Outstanding operations need not be complete."""
    context.current().barrier(process_set=process_set_number(process_set), blocking=True).wait()


def join(device: int = -1) -> int:
    """Wait until all ranks have called this: this one has no more data.

    Until then it takes part in the others' allreduces, as if with tensors of zeros (ones for Product, and so on), while
    an average still divides by the number of all ranks. Any other collective of theirs raises an error there.

    Args:
        device: accepted for Horovod's sake.

    Returns:
        The last rank that joined: the one that has seen the most data. The same on every rank.
    """
    return context.current().join(blocking=True).wait().value


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's object, on every rank.

    Args:
        obj: read on the root alone; anything that pickle (or cloudpickle, if it is installed) can write.
        root_rank: whose object all get.
        name: matches the ranks' calls.
        process_set: whose ranks take part; ``root_rank`` is a rank of the job all the same.
    """
    current = context.current()
    return objects.broadcast_object(current, obj, as_root(root_rank), name, process_set_number(process_set))


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Every rank's object, as a list by rank."""
    return objects.allgather_object(context.current(), obj, name)
