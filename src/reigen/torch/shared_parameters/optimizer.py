"""DistributedOptimizer with parameters that exist once a host, step by step as in `reigen.api.gradients.sharding`."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from reigen import context as contexts
from reigen.api.gradients.sharding import ShardGranularity
from reigen.errors import ArgumentError, CollectiveError, ReplicaError, StepOrderError
from reigen.torch.optimizers.allreduce_optimizer import AllreduceOptimizer
from reigen.torch.optimizers.gradient_sync import FinishedBy
from reigen.torch.optimizers.optimizer_wrapper import Closure, OptimizerReducer, unwrap_optimizer
from reigen.torch.reducer.reducer import Reducer, gradient_version
from reigen.torch.shared_parameters.parameters import SharedParameters
from reigen.torch.shared_parameters.state_layout import (
    StateEntry,
    clone_optimizer,
    group_options,
    infer_state_layout,
    inner_step,
    make_example_shape,
)

#: As in `torch.nn.utils.clip_grad_norm_`.
_CLIP_EPSILON = 1e-6


class SharedParametersOptimizer(AllreduceOptimizer):
    """Base of ``DistributedOptimizer(..., share_parameters=True)``, in front of an optimizer's own class.

    A second optimizer of that class updates what this rank owns. The groups' options go to it before each step and come
    back after it; ``state`` holds views of what all ranks keep.
    """

    #: updates this rank's pieces; made in the first step
    _inner: torch.optim.Optimizer | None
    _shared: list[SharedParameters]
    #: which groups and parameters there were in the last step, and in which group each parameter was
    _placed: tuple[object, ...]
    _group_of: dict[torch.Tensor, int]
    #: every p.grad is the whole reduced gradient, so the pieces' are to be taken from there
    _is_gathered: bool
    #: what p.grad was when a part of it was reduced before step(): who changes it changes nothing
    _seen: list[tuple[int, int]]
    #: the pieces have their gradients for the next update
    _is_taken: bool

    def attach(self, reducer: OptimizerReducer) -> None:
        """Use this reducer from now on, and release it and the shared memory with this object."""
        super().attach(reducer)
        self._inner, self._shared, self._placed, self._group_of = None, [], (), {}
        self._forget_gradients()
        weakref.finalize(self, _release_shared, self._shared).atexit = False

    def _before_unscaling(self) -> None:
        self._gather()

    def abandon(self) -> None:
        """Drop an unfinished step with its gradients; weights and state become this rank's own."""
        super().abandon()
        self._forget_gradients()
        self._unshare()
        self.weights_are_whole = True

    def renew(self) -> None:
        """Begin in the current job like an optimizer that is made now; weights and state become this rank's own."""
        self._unshare()
        super().renew()

    def _unshare(self) -> None:
        states = self.__dict__["state"]
        for parameter in (parameter for shared in self._shared for parameter in shared.parameters):
            if held := states.get(parameter):
                states[parameter] = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in held.items()}
        _release_shared(self._shared)
        self._inner = None

    def synchronize(self) -> None:
        """Wait until every ``p.grad`` is the reduced gradient, as without shared parameters.

        It takes a copy of what the other ranks of this host own, which ``step()`` alone and `clip_grad_norm_` do not.

        Raises:
            CollectiveError: a reduction failed; gradients are undefined then.
        """
        self._finish_early(FinishedBy.USER)
        self._gather()

    def step(self, closure: Closure | None = None) -> Any:
        """Reduce the gradients if that has not been done, and update the parameters: this rank does its part.

        Afterwards every ``p.grad`` is None, unless `synchronize` was called: averages exist in parts only.

        Raises:
            ArgumentError: there is a closure.
            StepOrderError: see `AllreduceOptimizer.step`; or the module was moved.
            CollectiveError: the job is broken. A note says whether the weights are whole, as `weights_are_whole` does.
            ReplicaError: hosts hold different parameters (REIGEN_CHECK_REPLICAS), or ranks did at the first step.
        """
        if closure is not None:
            raise ArgumentError("step() takes no closure with share_parameters: weights may change once a step only")
        if self.__dict__["_optimizer_step_pre_hooks"] and not self._skips:
            self._gather()  # the user's hooks see gradients as everywhere
        self._hooked_step()

    # torch wraps every class's step() once with profiling and the user's step hooks; here `_hooked_step` has them.
    step.hooked = True  # type: ignore[attr-defined]

    @torch.optim.Optimizer.profile_hook_step
    def _hooked_step(self) -> None:
        synchronizer = self._reducer
        is_synchronized = synchronizer.finished is not FinishedBy.NONE or self._skips
        from_parameters = self._skips
        try:
            self._reduce_for_step(wanted=True, stacklevel=5)
            from_parameters = self._is_gathered or self._skips
            with self._applying():
                self._update(is_synchronized, from_parameters=from_parameters)
        except CollectiveError as error:
            if not self._is_completed(error):
                raise
            with self._applying():
                self._give_results(from_parameters=from_parameters)
        synchronizer.updated(self._parameters())
        contexts.mark("STEP")

    @contextmanager
    def _applying(self) -> Iterator[None]:
        """The weights change; then the gradients have been used, or are dropped."""
        try:
            with self.update_context:
                yield
        finally:
            self._reducer.stepped()
            self._forget_gradients()

    def _is_completed(self, error: CollectiveError) -> bool:
        """Complete an update in which a rank was lost, together with those who are left; returns whether that was done.

        Whoever is in front of the update comes here, too: others may have begun it.
        """
        complete = self._reducer.complete
        return complete is not None and self._is_recoverable and complete(error)

    @property
    def _is_recoverable(self) -> bool:
        return bool(self._shared) and all(shared.is_recoverable for shared in self._shared)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; raises StepOrderError if complete ones are on their way."""
        super().zero_grad(set_to_none=set_to_none)
        self._forget_gradients()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip as `AllreduceOptimizer.clip_grad_norm_`; each rank looks at its part, and one number each is exchanged.

        The norm is that of the parts' norms, so its last bits may differ from those of torch's, which is of tensors'.
        """
        if self._reducer.finished is FinishedBy.NONE:
            self._finish_early(FinishedBy.READER)
        if self._is_gathered or not self._shared:
            return super().clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)
        self._take(from_parameters=False)
        own = [own.weight.grad for one in self._shared for own in one.own]
        gradients = [gradient for gradient in own if gradient is not None and gradient.numel()]
        norm = self._shared[0].norm_of_all(torch.nn.utils.get_total_norm(gradients, norm_type), norm_type)
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(f"the norm of order {norm_type} of the gradients is {norm}, so they cannot be clipped")
        has_doubles = any(parameter.dtype is torch.float64 for parameter in self._parameters())
        total = torch.tensor(norm, dtype=torch.float64 if has_doubles else torch.float32)
        if gradients:
            scale = torch.clamp(max_norm / (total + _CLIP_EPSILON), max=1.0)
            torch._foreach_mul_(gradients, scale)
        return total

    def _forget_gradients(self) -> None:
        self._is_gathered, self._is_taken, self._seen = False, False, []

    def _finish(self, by: FinishedBy) -> None:
        self._is_taken = self._is_gathered = False
        try:
            super()._finish(by)
            self._share()
        except CollectiveError as error:
            self._tell_progress(error, [shared.num_updates for shared in self._shared])
            raise

    def _finish_early(self, by: FinishedBy) -> None:
        """Finish before ``step()``, so that a change of gradients between the two is found."""
        self._finish(by)
        self._seen = [gradient_version(p) for shared in self._shared for p in shared.parameters]

    def _gather(self) -> None:
        if self._reducer.finished is FinishedBy.NONE:
            self._finish_early(FinishedBy.READER)
        if not self._is_gathered:
            for reducer in self._reducer.reducers:
                if reducer.reduce_group.size > 1:
                    reducer.gather()
            self._is_gathered = True

    def _share(self) -> None:
        """Put the parameters into shared memory that are not there yet. Collective where there are any."""
        groups = [reducer.reduce_group for reducer in self._reducer.reducers]
        current = [shared for shared in self._shared if shared.reduce_group in groups]
        if len(current) < len(self._shared):  # others are of a job that is over: state is taken from the user's object
            self._shared[:] = current
            self._inner = None
        known = {id(shared.reduce_group) for shared in current}
        for reducer in self._reducer.reducers:
            if reducer.reduce_group.size == 1 or id(reducer.reduce_group) in known:
                continue
            is_torch_s = type(unwrap_optimizer(self)).__module__.startswith("torch.optim.")
            joins = is_torch_s and reducer.owned_memory.division is ShardGranularity.ELEMENTS
            survives = self._reducer.complete is not None and reducer.reduce_group.survives_deaths
            recovery = self._for_recovery if survives and is_torch_s and reducer.is_direct else None
            self._shared.append(SharedParameters(reducer, self._layouts(reducer), joins=joins, recovery=recovery))

    def _for_recovery(self) -> tuple[torch.optim.Optimizer, Mapping[torch.Tensor, int]]:
        """Return an optimizer for the pieces of another owner, with the options of the step under way."""
        plain = unwrap_optimizer(self)
        optimizer = clone_optimizer(plain, [{**group, "params": []} for group in plain.param_groups])
        self._pass_scaling(optimizer)
        return optimizer, self._group_numbers()

    def _layouts(self, reducer: Reducer) -> list[dict[str, StateEntry]]:
        plain = unwrap_optimizer(self)
        is_cut = reducer.owned_memory.division is ShardGranularity.ELEMENTS
        found: dict[tuple[int, torch.dtype, tuple[int, ...] | None], dict[str, StateEntry]] = {}
        group_of = self._group_numbers()
        layouts: list[dict[str, StateEntry]] = []
        for parameter in reducer.parameters:
            key = group_of[parameter], parameter.dtype, None if is_cut else make_example_shape(parameter.shape)
            if key not in found:
                found[key] = infer_state_layout(plain, plain.param_groups[key[0]], *key[1:])
            layouts.append(found[key])
        return layouts

    def _group_numbers(self) -> dict[torch.Tensor, int]:
        groups = self.__dict__["param_groups"]
        return {parameter: number for number, group in enumerate(groups) for parameter in group["params"]}

    def _update(self, is_synchronized: bool, *, from_parameters: bool) -> None:
        if not self._shared:  # nothing has a gradient, or there is one rank by now
            inner_step(unwrap_optimizer(self))
            return
        updates = [shared.num_updates + 1 for shared in self._shared]
        changed: list[int] = []
        try:
            inner = self._prepared(from_parameters=from_parameters)
            if is_synchronized:
                changed = self._ranks_that_changed(from_parameters=from_parameters)
            if not changed:
                self._update_pieces(inner)
        except BaseException as error:
            if not isinstance(error, ReplicaError):  # which all ranks get
                self._shared[0].reduce_group.context.give_up(error)
            self._tell_progress(error, updates)
            raise
        if changed:
            raise StepOrderError(
                f"gradients were changed on rank(s) {', '.join(map(str, changed))} after they had been reduced, and "
                "each rank has only its part of them: clip with optimizer.clip_grad_norm_(), or call "
                "optimizer.synchronize() first: p.grad is whole after it"
            )
        self._exchange_options(inner, back=True)
        self._give_results(from_parameters=from_parameters)

    def _give_results(self, *, from_parameters: bool) -> None:
        """All owners have updated their pieces: the user's optimizer has the state, and gradients have been used."""
        states = self.__dict__["state"]
        for shared in self._shared:
            shared.give_state(states)
            shared.remember(shared.reduce_group.context.config.check_replicas)
            torch.autograd.graph.increment_version(shared.parameters)
            if not from_parameters:
                for parameter in shared.parameters:
                    parameter.grad = None

    def _update_pieces(self, inner: torch.optim.Optimizer) -> None:
        """Update this rank's pieces, and wait until all ranks have updated theirs."""
        every = self._shared[0].reduce_group.context.config.check_replicas
        self._shared[0].check_options(inner.param_groups, every)
        for shared in self._shared:
            shared.check_unmodified(every)
        if may_begin := all(shared.begin() for shared in self._shared):
            if self._is_recoverable:
                for shared in self._shared:
                    shared.step(inner)
            else:
                inner_step(inner)
            for shared in self._shared:
                shared.end(inner)
        reduce_group = self._shared[0].reduce_group
        reduce_group.barrier("updated")
        if not may_begin:  # the others had come to the barrier before they gave up
            raise CollectiveError(
                f"{reduce_group.name}.updated: other ranks gave up the job while this one stood still"
            )

    def _prepared(self, *, from_parameters: bool) -> torch.optim.Optimizer:
        """The optimizer of this rank's pieces, with options, state and gradients for this step."""
        if self._inner is None:
            plain = unwrap_optimizer(self)
            self._inner = clone_optimizer(plain, [{**group, "params": []} for group in plain.param_groups])
            self._placed = ()
        inner = self._inner
        self._follow_groups(inner)
        self._exchange_options(inner, back=False)
        for shared in self._shared:
            shared.check()
            shared.take_state(self.__dict__["state"], inner)
        if not self._is_taken:
            self._take(from_parameters=from_parameters)
        self._place_runs(inner)
        self._pass_scaling(inner)
        return inner

    def _pass_scaling(self, inner: torch.optim.Optimizer) -> None:
        """Let the inner optimizer have what GradScaler has put on a fused one."""
        for name in ("grad_scale", "found_inf"):
            if name in vars(self):
                setattr(inner, name, vars(self)[name])
            elif name in vars(inner):
                delattr(inner, name)

    def _take(self, *, from_parameters: bool) -> None:
        """Give every piece its gradient."""
        for shared in self._shared:
            for own in shared.own:
                parameter = shared.parameters[own.piece.parameter]
                if parameter.grad is None:
                    own.weight.grad = None
                else:
                    own.take(parameter, from_parameter=from_parameters)
        self._is_taken = True

    def _follow_groups(self, inner: torch.optim.Optimizer) -> None:
        """Follow the groups of the user's optimizer; where they have changed, runs are made anew."""
        groups = self.__dict__["param_groups"]
        placed = tuple((id(group["params"]), len(group["params"])) for group in groups), len(self._shared)
        if placed == self._placed:
            return
        self._placed, self._group_of = placed, self._group_numbers()
        del inner.param_groups[len(groups) :]
        for group in groups[len(inner.param_groups) :]:
            inner.param_groups.append({**group, "params": []})
        for shared in self._shared:
            shared.part(inner)

    def _place_runs(self, inner: torch.optim.Optimizer) -> None:
        """Every run is in the group in which its parameters are."""
        are_new = [shared.join(inner, self._group_of) for shared in self._shared]
        if not any(are_new):
            return
        members: list[list[torch.nn.Parameter]] = [[] for _ in inner.param_groups]
        for shared in self._shared:
            for run in shared.runs:
                if run.group is not None:
                    members[run.group].append(run.weight)
        for group, weights in zip(inner.param_groups, members, strict=True):
            group["params"] = weights

    def _exchange_options(self, inner: torch.optim.Optimizer, *, back: bool) -> None:
        for outer, own in zip(self.__dict__["param_groups"], inner.param_groups, strict=True):
            source, target = (own, outer) if back else (outer, own)
            target.update(group_options(source))

    def _ranks_that_changed(self, *, from_parameters: bool) -> list[int]:
        """Collective: return the ranks whose gradients changed since the reduction; no rank reads weights then."""
        now = [gradient_version(p) for shared in self._shared for p in shared.parameters]
        return self._shared[0].reduce_group.where(not from_parameters and now != self._seen, "before update")

    def _tell_progress(self, error: BaseException, updates: Sequence[int]) -> None:
        if self._is_recoverable and isinstance(error, CollectiveError):
            self.failed_update = False  # as far as is known: they look who are left, when all have stopped
            return
        outcomes: set[bool | None] = set()
        for shared, update in zip(self._shared, updates, strict=True):
            progress = shared.progress(update)
            error.add_note(f"With share_parameters: {progress.describe()}.")
            self.weights_are_whole = self.weights_are_whole and progress.weights is not None
            outcomes.add(None if progress.weights is None else progress.weights == update)
        self.failed_update = outcomes.pop() if len(outcomes) == 1 else None

    #: of an update that has failed: it was made all the same, or nothing of it; None: a part of it
    failed_update: bool | None = False

    #: False after an error in the middle of an update: a part of the weights is of another step than the rest
    weights_are_whole: bool = True


def _release_shared(shared: list[SharedParameters]) -> None:
    for one in shared:
        one.release()
    shared.clear()
