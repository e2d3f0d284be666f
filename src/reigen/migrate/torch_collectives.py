"""Calls of torch.distributed's functions, and Reigen's in their place."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from reigen.migrate.syntax import Assignment, NameUse, assigned_target
from reigen.migrate.torch_record import TorchRecord

_PREFIX = "torch.distributed."
#: Functions about the job: torch's, Reigen's.
_QUERIES = {
    "get_rank": "rank",
    "get_world_size": "size",
    "is_initialized": "is_initialized",
    "destroy_process_group": "shutdown",
    "barrier": "barrier",
}
#: Operators: torch's name, Reigen's.
_OPERATORS = {"SUM": "Sum", "AVG": "Average", "MAX": "Max", "MIN": "Min", "PRODUCT": "Product"}
_NO_MESSAGES = "Reigen has no messages from one rank to another"
_ONE_KIND = "Reigen trains data-parallel only"
#: What has no edit: a pattern, whether it cannot be had at all, and what to do instead.
_BY_HAND: tuple[tuple[str, bool, str], ...] = (
    (
        r"new_(sub)?group.*",
        False,
        "process sets: hvd.init(process_sets=[hvd.ProcessSet([0, 1]), ...]), and process_set= in each call",
    ),
    (r"all_gather(_into_tensor|_coalesced)?", False, "hvd.allgather(tensor) returns it"),
    (r"reduce_scatter.*", False, "hvd.reducescatter(tensor, op=hvd.Sum) divides the first dimension"),
    (r"all_to_all.*", False, "hvd.alltoall(tensor, splits) divides the first dimension"),
    (r"gather_object", False, "hvd.allgather_object(object) gives the list to all ranks"),
    (r"gather", False, "hvd.allgather(tensor) gives it to all ranks"),
    (r"scatter.*", False, "hvd.broadcast(tensor, root_rank), of which each rank takes its part"),
    (
        r"monitored_barrier",
        False,
        "hvd.barrier(): REIGEN_DEADLINE bounds every wait, and the error names who is missing",
    ),
    (r"get_backend|get_group_rank|get_process_group_ranks", False, "it asks for torch's process groups"),
    (r"TCPStore|FileStore|HashStore|PrefixStore|Store", False, "hvd.broadcast_object and hvd.allgather_object"),
    (r"group|GroupMember|ProcessGroup", False, "process sets take the place of groups"),
    (r"i?send(_object_list)?|i?recv(_object_list)?|P2POp|batch_isend_irecv", True, _NO_MESSAGES),
    (
        r"fsdp|_composable",
        True,
        "Reigen needs whole parameters; DistributedOptimizer(..., share_parameters=True) keeps one copy a host",
    ),
    (
        r"optim",
        True,
        "there is no such optimizer; hvd.DistributedOptimizer(..., share_parameters=True) keeps its state once a host",
    ),
    (r"rpc|autograd", True, f"{_ONE_KIND}, and has no remote calls"),
    (r"pipeline.*|pipelining|tensor|_tensor|device_mesh|init_device_mesh|DeviceMesh", True, _ONE_KIND),
    (r"checkpoint", False, "rank 0 saves the state_dict, for all ranks have the same"),
    (r"algorithms", False, "hvd.DistributedOptimizer(..., compression=hvd.Compression.fp16), or docs/compression.md"),
)
#: Parts that need no process group.
_INDEPENDENT = {"is_available", "is_nccl_available", "is_gloo_available", "is_mpi_available", "elastic", "run"}
#: Expressions behind which an attribute can stand without parentheses.
_PRIMARY = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)


class CollectiveRules:
    """Rules for functions of torch.distributed, of one file."""

    def __init__(self, record: TorchRecord) -> None:
        self._record, self._source, self._hvd = record, record.source, record.hvd
        self._collectives: dict[str, Callable[[NameUse, ast.Call], None]] = {
            "all_reduce": self._all_reduce,
            "reduce": self._all_reduce,
            "broadcast": self._broadcast,
            "all_gather": self._all_gather,
            "all_gather_object": self._all_gather_object,
            "broadcast_object_list": self._broadcast_object_list,
        }

    def apply(self, use: NameUse) -> None:
        """Add findings about one use of torch.distributed."""
        name = use.dotted.removeprefix(_PREFIX)
        first = name.partition(".")[0]
        call = self._record.call(use)
        if first in _INDEPENDENT:
            self._record.remark(use.node, "works as it is")
        elif first == "ReduceOp":
            if not self._is_operator_of_call(use.node):
                self._record.block(use.node, "Reigen's operators are hvd.Sum, Average, Max, Min and Product")
        elif first in _QUERIES:
            self._query(use, _QUERIES[first], call)
        elif first == "init_process_group":
            self._init(use, call)
        elif first in self._collectives and call is not None:
            self._collectives[first](use, call)
        else:
            self._by_hand(use, first)

    def _by_hand(self, use: NameUse, name: str) -> None:
        for pattern, cannot, advice in _BY_HAND:
            if re.fullmatch(pattern, name):
                self._record.block(use.node, advice, cannot=cannot)
                return
        self._record.block(use.node, f"Reigen has no {_PREFIX}{name}")

    def _is_operator_of_call(self, node: ast.expr) -> bool:
        """Return whether an operator is the argument of a reduction, whose rule replaces or refuses both."""
        calls = (each for each in self._source.ancestors(node) if isinstance(each, ast.Call))
        names = {f"{_PREFIX}all_reduce", f"{_PREFIX}reduce"}
        return any(self._source.resolve(call.func) in names for call in calls)

    def _query(self, use: NameUse, meant: str, call: ast.Call | None) -> None:
        allowed = {"device_ids"} if meant == "barrier" else set()
        if call is None or call.args or any(each.arg not in allowed for each in call.keywords):
            self._record.block(use.node, f"hvd.{meant}(); a ProcessSet, in the place of a group, has rank() and size()")
            return
        new = f"{self._hvd}.{meant}()"
        self._record.change(call, new, *self._record.rewrite(call, new))

    def _init(self, use: NameUse, call: ast.Call | None) -> None:
        if call is None or not self._record.is_statement(call):
            self._record.block(use.node, "hvd.init()")
            return
        rank = next((each.value for each in call.keywords if each.arg == "rank"), None)
        if rank is not None and self._is_calculated(rank):
            text = self._source.text(rank)
            self._record.block(call, f"{text} is calculated from a host's number: use hvd.rank() and hvd.local_rank()")
            return
        self._record.found.starts = True
        message = "the launcher says who is in the job: backend, address and ranks are not needed"
        self._record.change(call, message, *self._record.rewrite(call, f"{self._hvd}.init()"))

    def _is_calculated(self, rank: ast.expr) -> bool:
        text = ast.unparse(rank)
        for node in ast.walk(self._source.scope(rank)):
            targets = node.targets if isinstance(node, ast.Assign) else [assigned_target(node)]
            is_set = any(target is not None and ast.unparse(target) == text for target in targets)
            if is_set and any(isinstance(each, ast.BinOp) for each in ast.walk(node)):
                return True
        return isinstance(rank, ast.BinOp)

    def _all_reduce(self, use: NameUse, call: ast.Call) -> None:
        is_reduce = use.dotted.endswith(".reduce")
        names = ("tensor", "dst", "op", "group", "async_op") if is_reduce else ("tensor", "op", "group", "async_op")
        given = self._record.arguments(call, *names)
        operator = None if given is None else self._operator(given.get("op"))
        if given is None or operator is None or not self._only(call, given, "tensor", "op", "dst"):
            self._record.block(call, "hvd.allreduce_(tensor, op=...), or hvd.allreduce_async_() and hvd.synchronize()")
            return
        parts = (f"{self._hvd}.allreduce_(", given["tensor"], f", op={self._hvd}.{operator})")
        message = "the operator is named, for Reigen's default is Average"
        message += "; all ranks get the result" if is_reduce else ""
        self._record.change(call, message, *self._record.rewrite(call, *parts))

    def _only(self, call: ast.Call, given: dict[str, ast.expr], *names: str) -> bool:
        """Return whether a call has its first argument and no others than these, and its result is not used."""
        defaults = {"async_op": "False", "group": "None"}
        chosen = {name for name, value in given.items() if ast.unparse(value) != defaults.get(name)}
        return names[0] in chosen and chosen <= {*names} and self._record.is_statement(call)

    def _operator(self, node: ast.expr | None) -> str | None:
        if node is None:
            return "Sum"
        return _OPERATORS.get((self._source.resolve(node) or "").removeprefix(f"{_PREFIX}ReduceOp."))

    def _broadcast(self, use: NameUse, call: ast.Call) -> None:
        given = self._record.arguments(call, "tensor", "src", "group", "async_op")
        if given is None or "src" not in given or not self._only(call, given, "tensor", "src"):
            self._record.block(call, "hvd.broadcast_(tensor, root_rank)")
            return
        parts = (f"{self._hvd}.broadcast_(", given["tensor"], ", root_rank=", given["src"], ")")
        self._record.change(call, "in place, as before", *self._record.rewrite(call, *parts))

    def _all_gather(self, use: NameUse, call: ast.Call) -> None:
        given = self._record.arguments(call, "tensor_list", "tensor", "group", "async_op")
        if (
            given is None
            or "tensor" not in given
            or not self._only(call, given, "tensor_list", "tensor")
            or not self._is_fresh_list(given["tensor_list"])
            or not isinstance(given["tensor"], _PRIMARY)
        ):
            advice = "tensors = list(hvd.allgather(tensor.unsqueeze(0)))"
            self._record.block(call, f"{advice}: new tensors, where torch writes into those of the list")
            return
        parts = (given["tensor_list"], f"[:] = {self._hvd}.allgather(", given["tensor"], ".unsqueeze(0))")
        self._record.change(call, "the list gets new tensors", *self._record.rewrite(call, *parts))

    def _is_fresh_list(self, node: ast.expr) -> bool:
        """Return whether a list was made for this call: of new tensors, which nothing else refers to."""
        made = re.compile(r"torch\.(zeros|empty|ones|tensor)(_like)?$")
        for each in ast.walk(self._source.scope(node)):
            target = assigned_target(each)
            if isinstance(each, Assignment) and target is not None and ast.unparse(target) == ast.unparse(node):
                element = each.value.elt if isinstance(each.value, ast.ListComp) else None
                return isinstance(element, ast.Call) and bool(made.match(self._source.resolve(element.func) or ""))
        return False

    def _all_gather_object(self, use: NameUse, call: ast.Call) -> None:
        given = self._record.arguments(call, "object_list", "obj", "group")
        if given is None or "obj" not in given or not self._only(call, given, "object_list", "obj"):
            self._record.block(call, "objects = hvd.allgather_object(object)")
            return
        parts = (given["object_list"], f"[:] = {self._hvd}.allgather_object(", given["obj"], ")")
        self._record.change(call, "a list by rank, as before", *self._record.rewrite(call, *parts))

    def _broadcast_object_list(self, use: NameUse, call: ast.Call) -> None:
        given = self._record.arguments(call, "object_list", "src", "group", "device")
        is_list = given is not None and isinstance(given.get("object_list"), ast.Name)
        if given is None or not is_list or not self._only(call, given, "object_list", "src", "device"):
            self._record.block(call, "objects = hvd.broadcast_object(objects, root_rank)")
            return
        name = self._source.text(given["object_list"])
        parts = (f"{name}[:] = {self._hvd}.broadcast_object({name}, root_rank=", given.get("src", "0"), ")")
        self._record.change(call, "the list of the root", *self._record.rewrite(call, *parts))
