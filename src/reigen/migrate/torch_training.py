"""DistributedDataParallel, its optimizers and samplers, and how the processes start: Reigen's way in their place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from reigen.launch.local_plan import PER_RANK_VARIABLES
from reigen.migrate.syntax import Assignment, NameUse, assigned_target
from reigen.migrate.text_files import Edit
from reigen.migrate.torch_optimizers import OptimizerStatements, parameters_of
from reigen.migrate.torch_passes import PASSES, CountedPasses, find_counted_passes, find_several_passes, method_of
from reigen.migrate.torch_record import BY_TORCHRUN_ENV, TorchRecord

#: Variables of torchrun's: those that `reigen run --torchrun-env` sets.
_TORCHRUN = {name for name in PER_RANK_VARIABLES if not name.startswith(("REIGEN_", "HOROVOD_"))}
#: Arguments of DDP's that mean nothing here: what they ask for happens anyway, or concerns DDP's own buckets.
_HARMLESS = {
    "module",
    "device_ids",
    "output_device",
    "dim",
    "broadcast_buffers",
    "bucket_cap_mb",
    "find_unused_parameters",
    "check_reduction",
    "gradient_as_bucket_view",
    "static_graph",
    "init_sync",
    "forward_sync_buffers",
}
#: Methods of DDP's that are called on the model, and an attribute that has the effect of one.
_METHODS = {
    "no_sync": PASSES,
    "require_backward_grad_sync": PASSES,
    "join": "with hvd.uneven_data(optimizer, model): ...",
    "register_comm_hook": "DistributedOptimizer(..., compression=...), see docs/compression.md",
}
_LOCAL_RANK = {"--local_rank", "--local-rank"}
#: Names that read gradients between backward and step, where they have to be averages.
_READERS = {"clip_grad_norm_", "clip_grad_value_", "unscale_", "GradScaler", "grad"}
_INIT = "torch.distributed.init_process_group"
_BEFORE_INIT = "the optimizer is made before init_process_group: it needs hvd.init() first"
#: Packages whose DistributedOptimizer averages.
_AVERAGING = ("horovod.", "reigen.", "byteps.")
_SEVERAL_MODELS = (
    "several models with optimizers of their own, as in a GAN: what a loss leaves in the other model's gradients is an "
    "error in its next zero_grad() here. Wrap each optimizer in hvd.DistributedOptimizer(), and have "
    "other.requires_grad_(False) before a loss that passes through the other model, and True after its backward()"
)
#: A name, or an attribute of one; and methods that return the model itself.
_NAME = re.compile(r"\w+(\.\w+)*")
_SAME = {"to", "cuda", "cpu", "float", "double", "half", "bfloat16", "train"}


@dataclass(frozen=True, slots=True)
class ModelInDDP:
    """Model that a statement puts into DDP.

    Attributes:
        statement: which does it.
        name: of the result, as it is written.
        inner: the model, as it is written.
        owner: see `PythonSource.owner`, of the name.
    """

    statement: Assignment
    name: str
    inner: str
    owner: ast.AST

    @property
    def key(self) -> tuple[str, ast.AST]:
        """Equal for statements of one model, which is put into DDP in several ways."""
        return self.name, self.owner


class TrainingRules:
    """Rules for models, optimizers, data and the start, of one file."""

    def __init__(self, record: TorchRecord) -> None:
        self._record, self._source, self._hvd = record, record.source, record.hvd
        self._models: list[ModelInDDP] = []
        #: calls that convert batch norms, and the models in them
        self._conversions: list[tuple[ast.Call, ast.expr]] = []
        self._made = OptimizerStatements(record.source)
        #: the passes of each step, where they are several and their number is written down
        self._counted: CountedPasses | None = None
        #: statements in functions that get a model in DDP
        self._of_callees: set[Assignment] = set()

    # -- models and optimizers ----------------------------------------------------------------------------------------

    def data_parallel(self, use: NameUse) -> None:
        """Add findings about DistributedDataParallel."""
        call = self._record.call(use)
        statement = self._source.parents.get(call) if call is not None else None
        target = assigned_target(statement) if statement is not None else None
        if call is None or target is None or not isinstance(statement, Assignment):
            if not self._is_only_named(use.node):
                advice = "hvd.broadcast_parameters(model.state_dict(), 0) and hvd.DistributedOptimizer(optimizer)"
                self._record.block(use.node, advice)
            return
        model = (
            call.args[0] if call.args else next((each.value for each in call.keywords if each.arg == "module"), None)
        )
        unknown = [str(each.arg) for each in call.keywords if each.arg not in _HARMLESS]
        if model is None or unknown or not self._source.is_alone(statement):
            self._record.block(call, f"DistributedDataParallel with {', '.join(unknown) or 'these arguments'}")
            return
        name, inner = self._source.text(target), self._source.text(model)
        owner = self._source.owner(name, statement)
        self._models.append(ModelInDDP(statement, name, self._source.text(_without_moves(model)), owner))
        broadcast = f"{self._hvd}.broadcast_parameters({name}.state_dict(), root_rank=0)"
        parts: tuple[str | ast.expr, ...] = (broadcast,)
        if name != inner:
            parts = (f"{name}{self._annotation(statement)} = ", model, f"{self._record.new_line(statement)}{broadcast}")
        message = "the model stays itself, and all ranks begin with rank 0's; its buffers stay each rank's own"
        self._record.change(statement, message, *self._record.rewrite(statement, *parts))

    def _annotation(self, statement: Assignment) -> str:
        """Return the annotation of an assignment, with its colon; empty: there is none, or it says DDP."""
        if not isinstance(statement, ast.AnnAssign):
            return ""
        names = (self._source.resolve(each) or "" for each in ast.walk(statement.annotation))
        if any(name.endswith(".DistributedDataParallel") for name in names):
            return ""
        return f": {self._source.text(statement.annotation)}"

    def _is_only_named(self, node: ast.expr) -> bool:
        """Return whether a class is compared with, or an annotation: isinstance(model, DistributedDataParallel)."""
        ancestors = list(self._source.ancestors(node))
        for child, parent in zip([node, *ancestors], ancestors, strict=False):
            if isinstance(parent, ast.arg | ast.AnnAssign) and parent.annotation is child:
                return True
            if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef) and parent.returns is child:
                return True
        calls = (each for each in ancestors if isinstance(each, ast.Call))
        return any(ast.unparse(call.func) == "isinstance" for call in calls)

    def finish(self) -> None:
        """Add findings about what belongs to models that were in DDP."""
        wrapped: dict[Assignment, list[ModelInDDP]] = {}
        given: dict[Assignment, list[ModelInDDP]] = {}
        for call, module in self._conversions:
            self._convert(call, module)
        if self._both():
            return
        for model in self._models:
            mine = list(self._optimizers(model))
            if not mine and (kept := self._given_optimizer(model)) is not None:
                given.setdefault(kept, []).append(model)
                continue
            mine = mine or list(self._optimizers_of_callers(model)) or list(self._optimizers_of_callees(model))
            for each in mine:
                wrapped.setdefault(each, []).append(model)
            if not mine:
                message = (
                    f"no optimizer of {model.name}'s parameters is made beside it: "
                    "wrap it in hvd.DistributedOptimizer()"
                )
                self._record.block(model.statement, message)
        self._counted = self._counted_passes(wrapped | given)
        for each, models in wrapped.items():
            self._wrap(each, models)
        for each, models in given.items():
            self._wrap_given(each, models)
        self._several_models(wrapped | given)
        self._other_optimizers(wrapped, given)
        self._module_attributes()
        self._model_methods()
        self._passes()

    def _passes(self) -> None:
        """Find passes and steps that are no pairs; without a model here they matter to files that belong together."""
        counted = self._counted.passes if self._counted is not None else ()
        report = self._record.block if self._models else self._record.block_with_others
        find_several_passes(self._source, lambda node, message: None if node in counted else report(node, message))

    def _counted_passes(self, optimizers: Mapping[Assignment, Sequence[ModelInDDP]]) -> CountedPasses | None:
        """Return the passes of a step where each optimizer can be given their number."""
        found = find_counted_passes(self._source)
        places = [
            max(each, *(model.statement for model in models), key=lambda node: node.lineno)
            for each, models in optimizers.items()
        ]
        is_known = found is not None and all(found.is_known_at(self._source, each) for each in [*optimizers, *places])
        return found if is_known and optimizers else None

    def _both(self) -> bool:
        """Find optimizers that average by themselves, beside models in DDP; returns whether there are."""
        uses = (use for use in self._source.uses if use.dotted.startswith(_AVERAGING))
        found = [use for use in uses if use.dotted.rpartition(".")[2] == "DistributedOptimizer"]
        for use in found if self._models else ():
            message = "DistributedDataParallel averages, too: leave it and init_process_group out of this script"
            self._record.block(use.node, message)
        return bool(found and self._models)

    def _several_models(self, wrapped: Mapping[Assignment, Sequence[ModelInDDP]]) -> None:
        """Find optimizers of several models, whose losses may leave gradients in each other's models."""
        first: dict[frozenset[tuple[str, ast.AST]], Assignment] = {}
        for optimizer in sorted(wrapped, key=lambda each: each.lineno):
            first.setdefault(frozenset(model.key for model in wrapped[optimizer]), optimizer)
        scopes = [self._source.scope(each) for each in first.values()]
        open_ones = [each for each in first.values() if not self._keeps_inside(each)]
        if len(first) > 1 and (open_ones or len(set(scopes)) < len(scopes)):
            for optimizer in first.values():
                self._record.block(optimizer, _SEVERAL_MODELS)
        elif open_ones:
            self._record.block_with_models(open_ones[0], _SEVERAL_MODELS)

    def _keeps_inside(self, optimizer: Assignment) -> bool:
        """Return whether an optimizer is a function's own, which returns nothing: its loop is no part of another's."""
        scope = self._source.scope(optimizer)
        returned = [each for each in ast.walk(scope) if isinstance(each, ast.Return | ast.Yield | ast.YieldFrom)]
        is_local = isinstance(assigned_target(optimizer), ast.Name) and not isinstance(scope, ast.Module)
        return is_local and all(each.value is None for each in returned)

    def _other_optimizers(
        self, wrapped: Mapping[Assignment, object], given: Mapping[Assignment, Sequence[ModelInDDP]]
    ) -> None:
        """Find optimizers of torch's that nothing wraps: their gradients would stay each rank's own."""
        covered = {*wrapped, *self._made.makers_called_by(wrapped)}
        left = [
            call
            for call in self._made.torchs_calls
            if not any(each in covered for each in self._source.ancestors(call))
        ]
        classes = {self._source.owner("self", kept) for kept in given} - {self._source.tree}
        # one that is handed to the function that has the model is wrapped there
        several = bool(wrapped) or len(left) > 1
        for call in left if self._models else ():
            target = assigned_target(self._source.statement(call))
            is_kept = isinstance(target, ast.Attribute) and self._source.owner("self", call) in classes
            if several or is_kept:
                message = "another optimizer, which has to be wrapped in hvd.DistributedOptimizer(), too"
                self._record.block(call, message)

    def _optimizers(self, model: ModelInDDP) -> Iterator[Assignment]:
        """Yield statements that make an optimizer of a model's parameters, by a name that means it there, too."""
        owners = {model.name: model.owner, f"{model.name}.module": model.owner}
        if _NAME.fullmatch(model.inner):
            owners |= {model.inner: self._source.owner(model.inner, model.statement)}
        for statement, names in self._made.statements:
            if any(self._source.owner(name, statement) is owners[name] for name in names if name in owners):
                yield statement

    def _optimizers_of_callers(self, model: ModelInDDP) -> Iterator[Assignment]:
        """Yield statements that make an optimizer of a model that is then handed to the function that has DDP."""
        scope = self._source.scope(model.statement)
        if not isinstance(scope, ast.FunctionDef) or model.inner not in {each.arg for each in scope.args.args}:
            return
        called = self._source.parents[scope] if scope.name == "__init__" else scope
        name = called.name if isinstance(called, ast.ClassDef | ast.FunctionDef) else ""
        handed = {
            self._source.owner(model.inner, call)
            for call in ast.walk(self._source.tree)
            if isinstance(call, ast.Call)
            and ast.unparse(call.func).rpartition(".")[2] == name
            and model.inner in map(ast.unparse, [*call.args, *(each.value for each in call.keywords)])
        }
        for statement, names in self._made.statements:
            if model.inner in names and self._source.owner(model.inner, statement) in handed:
                yield statement

    def _optimizers_of_callees(self, model: ModelInDDP) -> Iterator[Assignment]:
        """Yield statements that make an optimizer of an argument, of the model's name, that always is the model."""
        for statement, names in self._made.statements:
            function = self._source.scope(statement)
            if model.name not in names or not isinstance(function, ast.FunctionDef):
                continue
            if self._source.parents[function] is not self._source.tree:
                continue  # a method: who calls it is not seen
            place = next((at for at, each in enumerate(function.args.args) if each.arg == model.name), None)
            calls = [each for each in ast.walk(self._source.tree) if isinstance(each, ast.Call)]
            calls = [each for each in calls if ast.unparse(each.func) == function.name]
            given = [_argument(each, place, model.name) for each in calls] if place is not None else []
            owners = {self._source.owner(model.name, each) for each in calls}
            if given and owners == {model.owner} and all(each == model.name for each in given):
                self._of_callees.add(statement)
                yield statement

    def _given_optimizer(self, model: ModelInDDP) -> Assignment | None:
        """Return the statement by which a function keeps the one optimizer that it gets, beside the model.

        Whether it is the model's is seen when the script runs: `DistributedOptimizer` compares the parameters.
        """
        found = [
            node
            for node in ast.walk(self._source.scope(model.statement))
            if isinstance(node, Assignment)
            and isinstance(node.value, ast.Name)
            and isinstance(target := assigned_target(node), ast.Attribute)
            and "optim" in ast.unparse(target).lower()
        ]
        return found[0] if len(found) == 1 and self._source.is_alone(found[0]) else None

    def _wrap_given(self, kept: Assignment, models: Sequence[ModelInDDP]) -> None:
        optimizer = self._target(kept)
        place = max(kept, *(model.statement for model in models), key=lambda each: each.lineno)
        names = {model.name for model in models}
        line = self._wrapping(optimizer, f"{names.pop()}.named_parameters()" if len(names) == 1 else "")
        self._record.change(kept, "averages the gradients", self._source.insert_after(place, *line))

    def _wrap(self, statement: Assignment, models: Sequence[ModelInDDP]) -> None:
        if not self._source.is_alone(statement):
            self._record.block(statement, "hvd.DistributedOptimizer(optimizer)")
        elif self._is_before_start(statement, models):
            self._record.block(statement, _BEFORE_INIT)
        else:
            # the name that the optimizer is made of exists there; that of the result of DDP may not, or not yet
            value = statement.value
            params = value.args[0] if isinstance(value, ast.Call) and value.args else None
            owner = parameters_of(params) if isinstance(params, ast.Call) else ""
            if owner.removesuffix(".module") in {model.name for model in models}:
                owner = owner.removesuffix(".module")
            names = f"{owner}.named_parameters()" if owner else ""
            lines = self._wrapping(self._target(statement), names)
            message = "averages the gradients in backward"
            self._record.change(statement, message, self._source.insert_after(statement, *lines))

    def _target(self, statement: Assignment) -> str:
        """Return the name or attribute that a statement binds, as it is written."""
        target = assigned_target(statement)
        assert target is not None
        return self._source.text(target)

    def _is_before_start(self, optimizer: Assignment, models: Sequence[ModelInDDP]) -> bool:
        """Return whether an optimizer is made before init_process_group, as far as one function tells."""
        scope = self._source.scope(optimizer)
        starts = [each.lineno for each in self._starts(scope) if self._source.scope(each) is scope]
        if optimizer in self._of_callees:
            return False
        others = [model for model in models if self._source.scope(model.statement) is not scope]
        later = [model for model in others if model.key[1] is not self._source.owner(model.name, optimizer)]
        later += [model for model in others if optimizer.lineno < model.statement.lineno]
        in_others = any(True for model in later for _ in self._starts(self._source.scope(model.statement)))
        return min(starts) > optimizer.lineno if starts else in_others

    def _wrapping(self, optimizer: str, named_parameters: str) -> list[str]:
        """Return the lines that wrap an optimizer."""
        arguments = [optimizer]
        arguments += [f"named_parameters={named_parameters}"] if named_parameters else []
        passes = ast.unparse(self._counted.number) if self._counted is not None else ""
        arguments += [f"backward_passes_per_step={passes}"] if passes else []
        arguments += ["synchronize_in_backward=True"] if self._reads_gradients() else []
        line = f"{optimizer} = {self._hvd}.DistributedOptimizer({', '.join(arguments)})"
        return [f"if {self._hvd}.is_initialized():", f"    {line}"] if self._is_conditional() else [line]

    def _starts(self, scope: ast.AST) -> Iterator[ast.Call]:
        """Yield calls of init_process_group, and of functions of this file that do."""
        for node in ast.walk(scope):
            if isinstance(node, ast.Call):
                is_own = ast.unparse(node.func).rpartition(".")[2] in self._starters
                if is_own or self._source.resolve(node.func) == _INIT:
                    yield node

    @cached_property
    def _starters(self) -> frozenset[str]:
        """Names of functions that call init_process_group, and of classes that do so when an object is made."""
        found: set[str] = set()
        for node in ast.walk(self._source.tree):
            if isinstance(node, ast.Call) and self._source.resolve(node.func) == _INIT:
                function = self._source.scope(node)
                if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                    parent = self._source.parents[function]
                    is_made = function.name == "__init__" and isinstance(parent, ast.ClassDef)
                    found.add(parent.name if is_made and isinstance(parent, ast.ClassDef) else function.name)
        return frozenset(found)

    def _is_conditional(self) -> bool:
        """Return whether the script can also run without DDP."""
        nodes = [*(model.statement for model in self._models), *self._starts(self._source.tree)]
        conditions = (each for node in nodes for each in self._source.ancestors(node) if isinstance(each, ast.If))
        return any("__name__" not in ast.unparse(each.test) for each in conditions)

    def _reads_gradients(self) -> bool:
        """Return whether gradients may be read before the step: they are, or passes are made in another file."""
        nodes = (node for node in ast.walk(self._source.tree) if isinstance(node, ast.Attribute | ast.Name))
        names = {node.attr if isinstance(node, ast.Attribute) else node.id for node in nodes}
        return not names.isdisjoint(_READERS) or "backward" not in names

    def _is_asked_for(self, node: ast.Attribute) -> bool:
        """Return whether a condition asks first: `model.module if hasattr(model, "module") else model`, or isinstance.

        A model that is no DDP any more has the answer no, for which there must be another branch.
        """
        text = ast.unparse(node.value)
        for child, parent in zip([node, *self._source.ancestors(node)], self._source.ancestors(node), strict=False):
            if not isinstance(parent, ast.If | ast.IfExp) or child is parent.test:
                continue
            test = parent.test
            is_asked = isinstance(test, ast.Call) and ast.unparse(test.func) in {"hasattr", "isinstance"}
            in_body = child is parent.body if isinstance(parent, ast.IfExp) else child in parent.body
            is_whole = isinstance(parent, ast.IfExp) or bool(parent.orelse) or _only_unwraps(parent.body, text)
            is_asked = is_asked and in_body and is_whole
            if is_asked and isinstance(test, ast.Call) and ast.unparse(test.args[0]) == text:
                return True
        return False

    def _is_own_module(self, node: ast.Attribute) -> bool:
        """Return whether an attribute is that of an object of a class of its own, and no DDP's."""
        text = ast.unparse(node.value)
        values = []
        for each in ast.walk(self._source.tree):
            target = assigned_target(each)
            is_same = target is not None and ast.unparse(target) == text
            if is_same and self._source.owner(text, each) is self._source.owner(text, node):
                values.append(each.value if isinstance(each, Assignment) else None)
        return bool(values) and all(isinstance(each, ast.Call) and self._is_of_other_class(each) for each in values)

    def _is_of_other_class(self, call: ast.Call) -> bool:
        """Return whether a call makes an object of a class that has nothing to do with DDP, as its name tells."""
        name = ast.unparse(call.func).rpartition(".")[2]
        own = next(
            (each for each in ast.walk(self._source.tree) if isinstance(each, ast.ClassDef) and each.name == name), None
        )
        bases = " ".join(map(ast.unparse, own.bases)) if own is not None else ""
        return name[:1].isupper() and not re.search(
            r"parallel|ddp", f"{self._source.resolve(call.func) or name} {bases}", re.IGNORECASE
        )

    def _module_attributes(self) -> None:
        """Take ``.module`` away behind models that are no DDP any more."""
        names = {model.name for model in self._models}
        modules = [
            node for node in ast.walk(self._source.tree) if isinstance(node, ast.Attribute) and node.attr == "module"
        ]
        own = {ast.unparse(node) for node in modules if isinstance(node.ctx, ast.Store)}  # and none of DDP's
        for node in modules:
            if ast.unparse(node) in own or self._is_asked_for(node):
                continue
            text = self._source.text(node.value)
            start, end = self._source.range(node)
            if text in names:
                edit = Edit(start + len(text), end, "")
                self._record.change(node, "the model itself", edit)
            elif (self._models or self._record.found.starts) and not self._is_own_module(node):
                self._record.block(node, f"{text}: leave .module out if that is a model that was in DDP")

    def _model_methods(self) -> None:
        names = {model.name for model in self._models}
        for node in ast.walk(self._source.tree):
            if isinstance(node, ast.Attribute) and self._source.text(node.value) in names:
                if node.attr in _METHODS and not self._leave_out_pauses(node):
                    self._record.block(node, _METHODS[node.attr])
                elif node.attr in {"state_dict", "load_state_dict"}:
                    message = "keys do not begin with `module.` any more: those of older files do"
                    self._record.remark(node, message, of_conversion=True)

    def _leave_out_pauses(self, node: ast.Attribute) -> bool:
        """Leave out what tells DDP not to average yet, where passes are counted; returns whether that was done."""
        parent = self._source.parents[node]
        if self._counted is None or not any(loop in self._source.ancestors(node) for loop in self._counted.loops):
            return False
        message = "the optimizer counts the passes"
        is_set = isinstance(parent, Assignment) and assigned_target(parent) is node and self._source.is_alone(parent)
        if node.attr == "require_backward_grad_sync" and is_set and isinstance(parent, Assignment):
            self._record.change(parent, message, *self._record.rewrite(parent, "pass"))
            return True
        known = [each for each in self._source.imports if each.dotted in {"contextlib", "contextlib.nullcontext"}]
        if node.attr == "no_sync" and isinstance(parent, ast.Call) and known:
            name = known[0].bound if known[0].dotted != "contextlib" else f"{known[0].bound}.nullcontext"
            self._record.change(parent, message, *self._record.rewrite(node, name))
            return True
        return False

    def convert_batch_norm(self, use: NameUse) -> None:
        """Add findings about the conversion of a model's batch norms."""
        call = self._record.call(use)
        given = self._record.arguments(call, "module", "process_group") if call is not None else None
        if given is None or ast.unparse(given.pop("process_group", ast.Constant(None))) != "None" or len(given) != 1:
            message = "hvd.SyncBatchNorm.convert_sync_batchnorm(model); its process_set takes the place of a group"
            self._record.block(use.node, message)
            return
        assert call is not None
        self._conversions.append((call, given["module"]))

    def _convert(self, call: ast.Call, module: ast.expr) -> None:
        """Add the edit of a conversion; without a job, torch's layer is a plain one, and Reigen's needs hvd.init()."""
        message, otherwise = "over the batches of all ranks, as before", ""
        if self._is_conditional() and not self._is_where_ddp_is(call):
            if not (isinstance(module, ast.Name) and isinstance(self._source.parents[call], Assignment)):
                advice = "hvd.SyncBatchNorm.convert_sync_batchnorm(model) only if hvd.is_initialized()"
                self._record.block(call, advice)
                return
            message = f"{message}; not where the script runs without DDP"
            otherwise = f" if {self._hvd}.is_initialized() else {module.id}"
        parts = (f"{self._hvd}.SyncBatchNorm.convert_sync_batchnorm(", module, f"){otherwise}")
        self._record.change(call, message, *self._record.rewrite(call, *parts))

    def _is_where_ddp_is(self, node: ast.expr) -> bool:
        """Return whether a branch has a node in it and also a model that gets DDP, or the start of the job."""
        others = {*(model.statement for model in self._models), *self._starts(self._source.tree)}
        for child, parent in zip([node, *self._source.ancestors(node)], self._source.ancestors(node), strict=False):
            if isinstance(parent, ast.If) and "__name__" not in ast.unparse(parent.test):
                branch = parent.body if child in parent.body else parent.orelse
                if any(each in others for statement in branch for each in ast.walk(statement)):
                    return True
        return False

    # -- data ---------------------------------------------------------------------------------------------------------

    def sampler(self, use: NameUse) -> None:
        """Add findings about DistributedSampler."""
        call = self._record.call(use)
        advice = "DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())"
        if call is None:
            if not self._is_only_named(use.node):
                self._record.block(use.node, advice)
            return
        is_computed = any(each.arg is None for each in call.keywords)  # may name both, or one
        if not self._record.found.used and (is_computed or _names_ranks(call)):
            return  # Horovod's way, or a caller's
        if not call.args or is_computed or any(isinstance(each, ast.Starred) for each in call.args):
            self._record.block(call, advice)
            return
        edits, missing = [], ""
        for place, (name, meant) in enumerate((("num_replicas", "size"), ("rank", "rank")), 1):
            new = f"{self._hvd}.{meant}()"
            given = call.args[place] if len(call.args) > place else None
            given = given or next((each.value for each in call.keywords if each.arg == name), None)
            if given is None:
                missing += f", {name}={new}"
            elif self._source.text(given) != new:
                edits += self._record.rewrite(given, new)
        last = max(self._source.range(each)[1] for each in [*call.args, *(keyword.value for keyword in call.keywords)])
        edits += [Edit(last, last, missing)] if missing else []
        if edits:
            message = "torch's sampler would ask torch.distributed for rank and size"
            self._record.change(call, message, *edits)

    # -- start --------------------------------------------------------------------------------------------------------

    def spawn(self, use: NameUse) -> None:
        """Add findings about torch.multiprocessing.spawn."""
        call = self._record.call(use)
        names = ("fn", "args", "nprocs", "join", "daemon", "start_method")
        given = self._record.arguments(call, *names) if call is not None else None
        arguments = (given or {}).get("args", ast.Tuple([]))
        statement = self._source.statement(use.node)
        is_plain = isinstance(statement, ast.Expr) and statement.value is call and self._source.is_alone(statement)
        waits = given is not None and ast.unparse(given.get("join", ast.Constant(True))) == "True"
        if given is None or "fn" not in given or not is_plain or not waits or not isinstance(arguments, ast.Tuple):
            advice = "`reigen run -np N` starts the processes: call the function itself, with hvd.rank()"
            self._record.block(use.node, advice)
            return
        number = self._source.text(given["nprocs"]) if "nprocs" in given else None
        tests = [each.test for each in self._source.ancestors(statement) if isinstance(each, ast.If)]
        if number is not None and any(number in map(ast.unparse, ast.walk(test)) for test in tests):
            message = f"call the function with hvd.rank() in both cases: {number} is none of `reigen run`'s numbers"
            self._record.block(use.node, message)
            return
        texts = [self._source.text(each) for each in arguments.elts]
        passed = [f"{self._hvd}.rank()", *(f"{self._hvd}.size()" if text == number else text for text in texts)]
        function = self._source.text(given["fn"])
        new = f"{self._hvd}.init(){self._record.new_line(statement)}{function}({', '.join(passed)})"
        message = f"`reigen run -np N` starts the processes, where N is what {number or 'their number'} is here"
        message += "; on several hosts a device's number is hvd.local_rank()"
        self._record.found.starts = True
        self._record.change(statement, message, *self._record.rewrite(statement, new))

    def variables(self) -> None:
        """Add findings about variables of torchrun's."""
        for node in ast.walk(self._source.tree):
            if not isinstance(node, ast.Constant) or node.value not in _TORCHRUN:
                continue
            parent = self._source.parents.get(node)
            if isinstance(parent, ast.Subscript) and self._source.resolve(parent.value) == "os.environ":
                is_read = isinstance(parent.ctx, ast.Load)
                self._record.remark(
                    parent, BY_TORCHRUN_ENV if is_read else "`reigen run` says where ranks meet: not needed"
                )
            elif isinstance(parent, ast.Call) and self._source.resolve(parent.func) in _GETTERS:
                self._record.remark(parent, BY_TORCHRUN_ENV)

    def local_rank_option(self) -> None:
        """Give ``--local_rank`` a value, which torch.distributed.launch passes and `reigen run` does not."""
        calls = [node for node in ast.walk(self._source.tree) if isinstance(node, ast.Call)]
        options = [call for call in calls if method_of(call) == "add_argument" and _names_local_rank(call)]
        if all(self._reads_local_rank(call) for call in options):
            return  # --torchrun-env sets the variable
        parsed = [self._source.parents[call] for call in calls if method_of(call) == "parse_args"]
        statement = parsed[0] if len(parsed) == 1 else None
        if (
            not isinstance(statement, ast.Assign)
            or not isinstance(statement.targets[0], ast.Name)
            or not self._source.is_alone(statement)
        ):
            self._record.block(options[0], "`reigen run` passes no --local_rank: use hvd.local_rank()")
            return
        name = statement.targets[0].id
        lines = (f"{self._hvd}.init()", f"{name}.local_rank = {self._hvd}.local_rank()")
        message = "`reigen run` passes no such option"
        self._record.change(options[0], message, self._source.insert_after(statement, *lines))

    def _reads_local_rank(self, call: ast.Call) -> bool:
        """Return whether an option of argparse's has a default of the variable LOCAL_RANK."""
        default = next((each.value for each in call.keywords if each.arg == "default"), None)
        nodes = list(ast.walk(default)) if default is not None else []
        reads = any((self._source.resolve(each) or "").startswith(("os.environ", "os.getenv")) for each in nodes)
        return reads and any(isinstance(each, ast.Constant) and each.value == "LOCAL_RANK" for each in nodes)


_GETTERS = {"os.environ.get", "os.getenv", "os.environ.pop"}


def _argument(call: ast.Call, place: int, name: str) -> str:
    """Return the text of an argument; empty: it is not named, or by ``*`` or ``**``."""
    if len(call.args) > place and not any(isinstance(each, ast.Starred) for each in call.args[: place + 1]):
        return ast.unparse(call.args[place])
    return next((ast.unparse(each.value) for each in call.keywords if each.arg == name), "")


def _without_moves(model: ast.expr) -> ast.expr:
    """Return the model of ``model.to(device)``, which is the same object."""
    while isinstance(model, ast.Call) and isinstance(model.func, ast.Attribute) and model.func.attr in _SAME:
        model = model.func.value
    return model


def _names_ranks(call: ast.Call) -> bool:
    """Return whether a sampler is given the number of ranks and its own."""
    return len(call.args) + len({"num_replicas", "rank"} & {keyword.arg for keyword in call.keywords}) > 2


def _names_local_rank(call: ast.Call) -> bool:
    return any(isinstance(each, ast.Constant) and each.value in _LOCAL_RANK for each in call.args)


def _only_unwraps(body: list[ast.stmt], text: str) -> bool:
    """Return whether all that statements do is ``model = model.module``."""
    return all(
        isinstance(each, ast.Assign)
        and [ast.unparse(target) for target in each.targets] == [text]
        and ast.unparse(each.value) == f"{text}.module"
        for each in body
    )
