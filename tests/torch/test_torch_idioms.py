"""How scripts use a DistributedOptimizer: clipping, mixed precision, closures, schedulers, and mistakes."""

from __future__ import annotations

import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import reigen
import reigen.torch as hvd
from reigen.errors import ArgumentError
from reigen.testing import RankError
from tests.torch.training import assert_identical_everywhere, assert_same, batches, make_net, mean_loss, mine

CLIP = 0.05


def pair(**options: object) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, torch.optim.Optimizer]:
    """The truth with its optimizer, and the same model with a distributed one."""
    truth, model = make_net(), make_net()
    reference = torch.optim.SGD(truth.parameters(), lr=0.1, momentum=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return truth, reference, model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def clips() -> None:
    """The documented idiom; the second half leaves out skip_synchronize(), which warns and changes nothing."""
    truth, reference, model, optimizer = pair()
    for step, (x, y) in enumerate(batches(6)):
        reference.zero_grad()
        mean_loss(truth, x, y).backward()
        expected = nn.utils.clip_grad_norm_(truth.parameters(), CLIP)
        reference.step()
        optimizer.zero_grad()
        mean_loss(model, mine(x), mine(y)).backward()
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        torch.testing.assert_close(norm, expected)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if step < 3:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        assert len(caught) == (step >= 3)
        assert all("without optimizer.skip_synchronize()" in str(warning.message) for warning in caught)
        assert_same(model, truth)
    assert_identical_everywhere(model)


@pytest.mark.parametrize("size", [1, 2])
def test_gradient_clipping(rank_pool, size):
    rank_pool(size).run(clips, init=True)


def clips_as_with_ddp(idiom: str) -> None:
    """synchronize_in_backward: what code that knows of DistributedDataParallel alone does with the gradients."""
    truth, reference, model, optimizer = pair(synchronize_in_backward=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=idiom == "scaler")
    num_passes = 2 if idiom == "accumulates" else 1
    for step, (x, y) in enumerate(batches(4)):
        reference.zero_grad()
        (num_passes * mean_loss(truth, x, y)).backward()
        expected = nn.utils.clip_grad_norm_(truth.parameters(), CLIP)
        reference.step()
        optimizer.zero_grad()
        if idiom == "fails" and step % 2 == 0:
            gradient = model.conv.weight.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                mean_loss(model, mine(x), mine(y)).backward()
            gradient.remove()
            optimizer.synchronize()
            optimizer.zero_grad()
        for _ in range(num_passes):
            scaler.scale(mean_loss(model, mine(x), mine(y))).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scaler.unscale_(optimizer)
            if idiom == "open_clip":
                optimizer.synchronize()
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            torch.testing.assert_close(norm, expected)
            if idiom == "open_clip":
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                scaler.step(optimizer)
        scaler.update()
        assert_same(model, truth)
    assert_identical_everywhere(model)


@pytest.mark.parametrize("idiom", ["plain", "scaler", "open_clip", "accumulates", "fails"])
def test_gradients_are_averaged_when_backward_returns(rank_pool, idiom):
    rank_pool(2).run(clips_as_with_ddp, idiom, init=True)


def steps_that_differ() -> None:
    """Half of the model on rank 0: it contributes zeros to the rest, as with any DistributedOptimizer."""
    truth, reference, model, optimizer = pair(synchronize_in_backward=True)
    for x, y in batches(3):
        reference.zero_grad()
        losses = [((truth(x, use_extra=rank > 0) - y) ** 2).mean() for rank in range(hvd.size())]
        (sum(losses) / hvd.size()).backward()
        reference.step()
        optimizer.zero_grad()
        ((model(x, use_extra=hvd.rank() > 0) - y) ** 2).mean().backward()
        for parameter, other in zip(model.parameters(), truth.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad)
        optimizer.step()
        assert_same(model, truth)


def test_gradients_that_some_ranks_do_not_have_when_backward_returns(rank_pool):
    rank_pool(2).run(steps_that_differ, init=True)


def test_averaging_in_backward_needs_averages():
    hvd.init()
    for options in ({"op": hvd.Sum}, {"op": hvd.Adasum}, {"share_parameters": True}, {"share_parameters": "auto"}):
        with pytest.raises(ArgumentError, match="op=Average only"):
            pair(synchronize_in_backward=True, **options)
    hvd.shutdown()


def converts(set_to_none: bool) -> None:
    """float64 to float32 before the first step, and back between others: memory and plan are made anew."""
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        truth, model = make_net(), make_net()
        reference = torch.optim.SGD(truth.parameters(), lr=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression)
        for step, (x, y) in enumerate(batches(7)):
            if step in (0, 2, 5):
                for each in (model, truth):
                    each.to(torch.float64 if step == 2 else torch.float32)
            dtype = model.head.bias.dtype
            for each, opt, part in ((model, optimizer, mine), (truth, reference, torch.Tensor.clone)):
                opt.zero_grad(set_to_none=set_to_none)
                mean_loss(each, part(x).to(dtype), part(y).to(dtype)).backward()
                opt.step()
            rounding = 1e-3 if compression is hvd.Compression.fp16 else 1e-5
            for value, other in zip(model.parameters(), truth.parameters(), strict=True):
                torch.testing.assert_close(value, other, rtol=rounding, atol=rounding)
        assert_identical_everywhere(model)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_model_may_be_converted_when_its_optimizer_has_been_made(rank_pool, set_to_none):
    rank_pool(2).run(converts, set_to_none, init=True)


def compiles() -> None:
    truth, reference, model, optimizer = pair()

    @torch.compile(backend="eager")
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = mean_loss(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    for x, y in batches(4):
        train(mine(x), mine(y))
        reference.zero_grad()
        mean_loss(truth, x, y).backward()
        reference.step()
        assert_same(model, truth)
    assert_identical_everywhere(model)


@pytest.mark.slow
def test_a_compiled_function_may_hold_the_whole_step(rank_pool):
    rank_pool(2).run(compiles, init=True)


def synchronized_then_more() -> None:
    """A gradient that comes after synchronize() makes step() reduce again."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    for expected in (-4.5, -9.0):
        optimizer.zero_grad()
        (weight * (hvd.rank() + 1)).sum().backward()
        optimizer.synchronize()
        (weight * 2 * (hvd.rank() + 1)).sum().backward()  # adds to the averaged 1.5
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
        assert weight.item() == expected


def test_a_gradient_after_synchronize_is_reduced_too(rank_pool):
    rank_pool(2).run(synchronized_then_more, init=True)


def scaled(idiom: str) -> None:
    """Infinities appear on the last rank alone, in step 2: no rank may take that step."""
    truth, reference, model, optimizer = pair()
    last = hvd.rank() == hvd.size() - 1
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step, (x, y) in enumerate(batches(6)):
        if step != 2:
            reference.zero_grad()
            mean_loss(truth, x, y).backward()
            if idiom in ("unscale", "documented"):
                nn.utils.clip_grad_norm_(truth.parameters(), CLIP)
            reference.step()
        optimizer.zero_grad()
        loss = mean_loss(model, mine(x), mine(y))
        scaler.scale(loss * float("inf") if step == 2 and last else loss).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if idiom == "documented":
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            else:
                if idiom == "unscale":
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                scaler.step(optimizer)
        scaler.update()
        assert_same(model, truth)
    assert len(set(hvd.allgather_object(scaler.get_scale()))) == 1
    assert_identical_everywhere(model)


@pytest.mark.parametrize("idiom", ["documented", "unscale", "naive"])
@pytest.mark.parametrize("size", [1, 2])
def test_gradient_scaler(rank_pool, size, idiom):
    rank_pool(size).run(scaled, idiom, init=True)


def fused_scaled() -> None:
    """Fused optimizers unscale by themselves; the scaler only looks for infinities."""
    model = make_net()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), fused=True))
    truth = make_net()
    reference = torch.optim.Adam(truth.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step, (x, y) in enumerate(batches(4)):
        optimizer.zero_grad()
        factor = float("nan") if step == 1 and hvd.rank() == 0 else 1.0
        scaler.scale(mean_loss(model, mine(x), mine(y)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        if step != 1:
            reference.zero_grad()
            mean_loss(truth, x, y).backward()
            reference.step()
        assert_same(model, truth)


def test_gradient_scaler_with_a_fused_optimizer(rank_pool):
    rank_pool(2).run(fused_scaled, init=True)


def autocast() -> None:
    model = make_net().float()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in batches(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(mine(x).float()) - mine(y).float()).square().mean()
        loss.backward()
        optimizer.step()
    assert_identical_everywhere(model)


def test_autocast(rank_pool):
    rank_pool(2).run(autocast, init=True)


def closures() -> None:
    """backward inside the closure; a closure that only reports; and one on a rank that had no gradient."""
    truth, reference, model, optimizer = pair()
    for x, y in batches(3):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = mean_loss(model, mine(x), mine(y))
            loss.backward()
            return loss

        reference.zero_grad()
        mean_loss(truth, x, y).backward()
        reference.step()
        loss = optimizer.step(closure)
        assert loss.requires_grad  # what the closure returned, on this rank's rows
        assert_same(model, truth)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    for step in (1, 2):
        optimizer.zero_grad()
        if hvd.rank() == 0:
            (weight * hvd.size()).sum().backward()
        assert optimizer.step(lambda: 42) == 42
        assert weight.item() == -step


def test_closures(rank_pool):
    rank_pool(2).run(closures, init=True)


def scheduled() -> None:
    truth, reference, model, optimizer = pair()
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=5, cycle_momentum=True)
        for o in (reference, optimizer)
    ]
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in batches(4):
            for o, m, part in ((reference, truth, lambda t: t), (optimizer, model, mine)):
                o.zero_grad()
                mean_loss(m, part(x), part(y)).backward()
                o.step()
            for scheduler in schedulers:
                scheduler.step()
            assert_same(model, truth)
    assert schedulers[1].get_last_lr() == schedulers[0].get_last_lr() == [optimizer.param_groups[0]["lr"]]
    assert calls == ["after"] * 4  # once a step


def wrapped_after_the_scheduler() -> None:
    model = make_net()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
    optimizer = hvd.DistributedOptimizer(plain)
    mean_loss(model, *map(mine, next(batches(1)))).backward()
    optimizer.step()
    assert_identical_everywhere(model)  # it was our step(), not the one that the scheduler had put there
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("func", [scheduled, wrapped_after_the_scheduler])
def test_schedulers(rank_pool, func):
    rank_pool(2).run(func, init=True)


def saves_and_loads() -> None:
    truth, reference, model, optimizer = pair()
    stream = list(batches(4))
    for x, y in stream[:2]:
        for o, m, part in ((reference, truth, lambda t: t), (optimizer, model, mine)):
            o.zero_grad()
            mean_loss(m, part(x), part(y)).backward()
            o.step()
    plain = torch.optim.SGD(model.parameters(), lr=0.7)
    plain.load_state_dict(optimizer.state_dict())  # exchangeable with the plain optimizer's
    fresh = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.7))
    mean_loss(model, *map(mine, stream[3])).backward()  # on its way while the state is loaded: completed, then dropped
    fresh.load_state_dict(optimizer.state_dict())
    optimizer.synchronize()
    del optimizer
    for x, y in stream[2:]:
        for o, m, part in ((reference, truth, lambda t: t), (fresh, model, mine)):
            o.zero_grad()
            mean_loss(m, part(x), part(y)).backward()
            o.step()
        assert_same(model, truth)


def test_state_dict_round_trip(rank_pool):
    rank_pool(2).run(saves_and_loads, init=True)


# -- mistakes ---------------------------------------------------------------------------------------------------------


def wrong_arguments() -> None:
    model = make_net()

    def wrap(**options: object) -> None:
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)

    named = list(model.named_parameters())
    cases: dict[str, dict[str, object]] = {
        r"tuples \(name, parameter\)": {"named_parameters": model.parameters()},
        "unique": {"named_parameters": [*named, named[0]]},
        "not named": {"named_parameters": named[:-1]},
        "backward_passes_per_step": {"backward_passes_per_step": 0},
        "gradient_predivide_factor is supported only": {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
        "must be positive": {"gradient_predivide_factor": 0.0},
        "op must be": {"op": 9},
        "positive integer or a list": {"groups": -1},
        "list of lists": {"groups": [named[0][1]]},
        "one of the groups": {"groups": [[named[0][1]], [named[0][1]]]},
        "compression": {"compression": "fp16"},
        "process_set": {"process_set": 3},
    }
    for message, options in cases.items():
        with pytest.raises(ValueError, match=message):
            wrap(**options)
    with pytest.raises(ValueError, match="complex64"):
        hvd.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(1, dtype=torch.complex64))], lr=0.1))
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)))
    wrap(groups=[[named[0][1], named[1][1]]])
    wrap(groups=3, named_parameters=iter(named))
    with pytest.warns(DeprecationWarning, match="num_groups"):
        wrap(num_groups=2)
    with pytest.warns(DeprecationWarning, match="num_groups"), pytest.raises(ValueError, match="positive integer"):
        wrap(num_groups=-1)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())  # nothing is left on the parameters


@pytest.mark.parametrize("size", [1, 2])
def test_wrong_arguments(rank_pool, size):
    rank_pool(size).run(wrong_arguments, init=True)


def different_models() -> None:
    parameters = [("first", nn.Parameter(torch.ones(2))), ("second", nn.Parameter(torch.ones(2 + hvd.rank())))]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in parameters], lr=0.1), parameters)
    sum(p.sum() for _, p in parameters).backward()
    with pytest.raises(hvd.HorovodInternalError, match=r"rank 0: second.*\(2,\)[\s\S]*rank 1: second.*\(3,\)"):
        optimizer.step()
    assert all(p.tolist() == [1.0] * p.numel() for _, p in parameters)
    assert hvd.allreduce(torch.ones(1)).item() == 1


def test_ranks_with_different_parameters_learn_where_they_differ(rank_pool):
    rank_pool(2).run(different_models, init=True)


def peer_leaves() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
    weight.sum().backward()
    optimizer.step()
    after_one_step = weight.detach().clone()
    if hvd.rank() == 1:
        return  # and shuts down

    def another_step() -> None:
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()

    with pytest.raises(hvd.HorovodInternalError, match="rank 1"):
        another_step()
    assert torch.equal(weight.detach(), after_one_step)  # no step with half a gradient


def test_a_lost_rank_surfaces_in_backward_or_step(rank_pool):
    rank_pool(2).run(peer_leaves, init=True)


def gives_gradients_other_memory(how: str) -> None:
    """``p.grad.data = ...``, as scripts for Horovod clip by value, and as conversions of a model do."""
    truth, reference, model, optimizer = pair(synchronize_in_backward=how == "in backward")
    for step, (x, y) in enumerate(batches(4)):
        reference.zero_grad()
        mean_loss(truth, x, y).backward()
        reference.step()
        optimizer.zero_grad(set_to_none=how != "in backward")
        mean_loss(model, mine(x), mine(y)).backward()
        if how == "between" and step == 1:
            optimizer.synchronize()
            for p in model.parameters():
                p.grad.data = p.grad.data.clamp(-100, 100)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            if how == "in backward" and step == 1:
                for p in model.parameters():
                    p.grad.data = p.grad.data.clamp(-100, 100)
            optimizer.step()
        if how == "conversion" and step == 1:
            model._apply(torch.clone)  # what to(), cpu() and cuda() are made of, there and back
        if how == "after" and step == 1:
            for p in model.parameters():
                p.grad.data = torch.zeros_like(p.grad)
    assert_same(model, truth)
    assert_identical_everywhere(model)


@pytest.mark.parametrize("how", ["between", "in backward", "conversion", "after"])
def test_gradients_that_got_other_memory_are_reduced_as_before(rank_pool, how):
    rank_pool(2).run(gives_gradients_other_memory, how, init=True)


def keeps_handles() -> None:
    array = np.ones(1000)
    given = weakref.ref(array)
    handle = reigen.allreduce_async(array, name="kept")
    result = reigen.synchronize(handle)
    assert result is not None
    returned = weakref.ref(result)
    del array, result
    assert (given(), returned()) == (None, None)
    assert reigen.synchronize(handle) is None


def test_a_handle_that_is_kept_keeps_no_tensor(rank_pool):
    rank_pool(2).run(keeps_handles, init=True)


@pytest.mark.parametrize("splits", [[1.5, 0.5], ["1", "1"]])
def test_rows_that_are_no_whole_numbers(rank_pool, splits):
    with pytest.raises(RankError, match="splits must be whole numbers"):
        rank_pool(1).run(hvd.alltoall, torch.ones(2), splits, init=True)
