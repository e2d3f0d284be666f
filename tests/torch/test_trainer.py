"""Trainer by itself, and with workers that are threads; tests/kv has it with servers."""

from __future__ import annotations

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import reigen.torch as hvd
from reigen import optim
from reigen.errors import ArgumentError, ConfigError, StepOrderError
from reigen.testing import run_threads
from reigen.torch import Trainer, clip_global_norm
from tests.torch.thread_store import Servers, ThreadStore


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("MXNET_UPDATE_ON_KVSTORE", "REIGEN_KV_UPDATE_ON_KVSTORE"):
        monkeypatch.delenv(name, raising=False)


def weight(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def with_workers(function, num_workers: int = 2, kind: str = "dist_sync"):
    """function(store) on each worker; what they returned, and the servers."""
    servers = Servers(num_workers)
    found = run_threads(lambda rank, _: function(ThreadStore(servers, rank, kind)), num_workers)
    return found, servers


# ---------------------------------------------------------------- one worker


TORCH_TWINS = {
    "sgd": ({"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": ({"learning_rate": 0.01}, torch.optim.Adam, {"lr": 0.01}),
}


@pytest.mark.parametrize("kvstore", [None, "local"])
@pytest.mark.parametrize("on_store", [None, True])
@pytest.mark.parametrize("name", TORCH_TWINS)
def test_alone_it_trains_as_torch_does(name, kvstore, on_store):
    if kvstore is None and on_store:
        with pytest.raises(ArgumentError, match="kvstore is None"):
            Trainer([weight(1.0)], name, kvstore=None, update_on_kvstore=True)
        return
    ours_params, twin, twin_params = TORCH_TWINS[name]
    decay = {"weight_decay": ours_params["wd"]} if "wd" in ours_params else {}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    truth = copy.deepcopy(model)
    theirs = twin(truth.parameters(), **twin_params, **decay)
    with Trainer(model.named_parameters(), name, ours_params, kvstore=kvstore, update_on_kvstore=on_store) as trainer:
        assert trainer.update_on_kvstore is bool(on_store)
        for _ in range(5):
            inputs = torch.randn(4, 5)
            trainer.zero_grad()
            theirs.zero_grad()
            model(inputs).square().sum().backward()
            truth(inputs).square().sum().div(4).backward()
            trainer.step(4)
            theirs.step()
    for mine, other in zip(model.parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_names_without_servers_need_no_store():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = Trainer([weight(1.0)], "sgd", kvstore="device")
    assert trainer.kvstore is None
    assert (trainer.rank, trainer.num_workers) == (0, 1)


def test_a_store_that_connects_nobody_is_a_warning_in_a_job_of_several(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.warns(UserWarning, match="one of 2 processes, which kvstore='device' does not connect") as caught:
        Trainer([weight(1.0)], "sgd", kvstore="device")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trainer([weight(1.0)], "sgd", kvstore=None)


def test_frozen_parameters_stay_and_may_thaw():
    frozen, moving = weight(1.0), weight(1.0)
    frozen.requires_grad_(False)
    trainer = Trainer([frozen, moving], "sgd", {"learning_rate": 0.5}, kvstore=None)
    moving.grad = torch.ones(1)
    trainer.step(1)
    assert (frozen.item(), moving.item()) == (1.0, 0.5)
    frozen.requires_grad_(True)
    frozen.grad = torch.ones(1)
    trainer.step(1)
    assert (frozen.item(), moving.item()) == (0.5, 0.0)


def test_factors_of_groups():
    plain, fast, undecayed = weight(1.0), weight(1.0), weight(1.0)
    groups = [{"params": [plain]}, {"params": [fast], "lr_mult": 2}, {"params": [undecayed], "wd_mult": 0.0}]
    trainer = Trainer(groups, "sgd", {"learning_rate": 0.25, "wd": 1.0}, kvstore=None)
    for each in (plain, fast, undecayed):
        each.grad = torch.ones(1)
    trainer.step(1)
    assert (plain.item(), fast.item(), undecayed.item()) == (0.5, 0.0, 0.75)


def test_half_weights_with_float32_masters():
    # 512 steps of 2**-10 from 1 come to 0.5; bfloat16 alone, with 8 bits, would never leave 1.
    for dtype in (torch.bfloat16, torch.float16):
        exact, rounded = weight(1.0, dtype=dtype), weight(1.0, dtype=dtype)
        params = {"learning_rate": 2.0**-10}
        with_master = Trainer([exact], "sgd", {**params, "multi_precision": True}, kvstore=None)
        without = Trainer([rounded], "sgd", params, kvstore=None)
        exact.grad, rounded.grad = torch.ones(1, dtype=dtype), torch.ones(1, dtype=dtype)
        for _ in range(512):
            with_master.step(1)
            without.step(1)
        assert exact.item() == 0.5
        if dtype is torch.bfloat16:
            assert rounded.item() == 1.0


def test_several_dtypes_layouts_and_views():
    base = torch.zeros(4, 6)
    odd = nn.Parameter(base[:, ::2])  # not contiguous
    parameters = [odd, weight(1.0, 2.0, dtype=torch.float64), weight(3.0, dtype=torch.bfloat16)]
    trainer = Trainer(parameters, "sgd", {"learning_rate": 1.0}, kvstore=None)
    for each in parameters:
        each.grad = torch.ones_like(each)
    trainer.step(1)
    assert torch.equal(base[:, ::2], -torch.ones(4, 3))
    assert torch.equal(base[:, 1::2], torch.zeros(4, 3))
    assert parameters[1].tolist() == [0.0, 1.0]
    assert parameters[2].item() == 2.0


def test_autograd_notices_the_update():
    parameter = weight(2.0)
    trainer = Trainer([parameter], "sgd", kvstore=None)
    loss = parameter.square().sum()
    parameter.grad = torch.ones(1)
    trainer.step(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---------------------------------------------------------------- gradients that are not there


def test_a_parameter_without_gradient_is_named_and_nothing_happens():
    used, unused = weight(1.0), weight(1.0)
    trainer = Trainer({"used": used, "unused": unused}, "sgd", {"learning_rate": 0.5, "wd": 1.0}, kvstore=None)
    used.grad = torch.ones(1)
    with pytest.raises(ArgumentError, match=r"1 of 2 parameters got no gradient since zero_grad\(\): unused"):
        trainer.step(1)
    assert used.item() == 1.0
    trainer.step(1, ignore_stale_grad=True)
    assert (used.item(), unused.item()) == (0.0, 1.0)
    trainer.zero_grad()
    assert used.grad is None


def test_nothing_is_sent_where_a_gradient_is_missing():
    def train(store):
        used, unused = weight(1.0), weight(1.0)
        trainer = Trainer({"used": used, "unused": unused}, "test", {"rescale_grad": -1.0}, kvstore=store)
        used.grad = torch.ones(1)
        with pytest.raises(ArgumentError, match="unused"):
            trainer.step(1)
        if store.rank == 1:
            unused.grad = torch.ones(1)
        trainer.step(1, ignore_stale_grad=True)
        return used.item(), unused.item()

    found, servers = with_workers(train)
    assert found == [(-1.0, 0.0)] * 2
    assert servers.applied == {"used": 1, "unused": 1}


# ---------------------------------------------------------------- several workers


@pytest.mark.parametrize("on_store", [True, False])
def test_sums_over_workers_divided_by_the_batch_size(on_store):
    def train(store):
        # Worker 0's weights count, frozen ones too. All numbers are exact in float32, whatever the order.
        moving, frozen = weight(1.0 - store.rank, 2.0), weight(7.0 + store.rank)
        frozen.requires_grad_(False)
        parameters = {"moving": moving, "frozen": frozen}
        trainer = Trainer(parameters, "sgd", {"learning_rate": 0.5}, kvstore=store, update_on_kvstore=on_store)
        assert moving.tolist() == [1.0, 2.0]
        assert trainer.update_on_kvstore is on_store
        for step in range(3):
            moving.grad = torch.tensor([1.0, step]) * (store.rank + 1)
            # The last batch is smaller.
            trainer.step(4 if step < 2 else 2)
        trainer.close()
        assert not store.closed  # it was made elsewhere
        return moving.tolist(), frozen.tolist()

    found, servers = with_workers(train)
    # Sums: 3 and 3 * step. 1 - 0.5 * (3/4 + 3/4 + 3/2); 2 - 0.5 * (3/4 + 6/2)
    assert found == [([-0.5, 0.125], [7.0])] * 2
    assert servers.applied == {"moving": 3}


def test_batch_sizes_may_differ_between_workers():
    def train(store):
        parameter = weight(0.0)
        trainer = Trainer([parameter], "test", {"rescale_grad": 1.0}, kvstore=store)
        for size in (4, 4, 2 if store.rank else 8):
            parameter.grad = torch.ones(1) * 8
            trainer.step(size)
        return parameter.item()

    found, _ = with_workers(train)
    assert found == [2 * 2 + 2 * 2 + 1 + 4] * 2


@pytest.mark.parametrize("on_store", [True, False])
def test_the_learning_rate_reaches_the_servers(on_store):
    def train(store):
        parameter = weight(0.0)
        trainer = Trainer([parameter], "sgd", {"learning_rate": 4.0}, kvstore=store, update_on_kvstore=on_store)
        seen = []
        trainer.set_learning_rate(1.0)  # before the servers have an optimizer
        for rate in (1.0, 0.5, 0.25):
            trainer.set_learning_rate(rate)
            store.barrier()
            assert trainer.learning_rate == rate
            parameter.grad = torch.ones(1)
            trainer.step(2)
            seen.append(parameter.item())
        return seen

    found, _ = with_workers(train)
    assert found == [[-1.0, -1.5, -1.75]] * 2


def test_a_schedule_decides_about_the_rate():
    parameter = weight(0.0)
    schedule = optim.FactorScheduler(step=1, factor=0.5, base_lr=1.0)
    trainer = Trainer([parameter], "sgd", {"lr_scheduler": schedule}, kvstore=None)
    parameter.grad = torch.ones(1)
    rates = []
    for _ in range(3):
        rates.append(trainer.learning_rate)
        trainer.step(1)
    assert rates == [1.0, 0.5, 0.25]
    assert parameter.item() == -1.75
    with pytest.raises(ArgumentError, match="schedule"):
        trainer.set_learning_rate(1.0)


def test_parameters_travel_in_one_call_in_their_order():
    def train(store):
        parameters = [weight(float(number)) for number in range(3)]
        trainer = Trainer(parameters, "test", kvstore=store)
        for each in parameters:
            each.grad = torch.ones(1)
        trainer.step(1)

    _, servers = with_workers(train)
    assert [entry[1] for entry in servers.log if entry[0] == "pushpull"] == [[0, 1, 2]] * 2


def test_clipping_between_the_halves():
    def train(store):
        parameter = weight(0.0, 0.0)
        trainer = Trainer([parameter], "sgd", {"learning_rate": 1.0}, kvstore=store, update_on_kvstore=False)
        parameter.grad = torch.tensor([3.0, 4.0]) * store.rank
        trainer.allreduce_grads()
        assert parameter.grad.tolist() == [3.0, 4.0]
        norm = clip_global_norm([parameter.grad], 2.5)
        trainer.update(1)
        return norm, parameter.tolist()

    found, _ = with_workers(train)
    assert found[0] == found[1]
    assert found[0][0] == pytest.approx(5.0)
    assert found[0][1] == pytest.approx([-1.5, -2.0])


def test_the_halves_need_an_update_in_the_worker():
    def train(store):
        trainer = Trainer([weight(0.0)], "sgd", kvstore=store)
        for call in (trainer.allreduce_grads, lambda: trainer.update(1)):
            with pytest.raises(ArgumentError, match="make the Trainer with update_on_kvstore=False"):
                call()

    with_workers(train, 1)


def test_compression_is_set_before_keys_exist():
    params = {"type": "2bit", "threshold": 0.5}

    def train(store):
        Trainer([weight(0.0)], "sgd", kvstore=store, compression_params=params)

    _, servers = with_workers(train)
    assert sorted(servers.log) == [("compression", 0, params), ("compression", 1, params)]
    for kvstore in (None, "device"):
        with pytest.raises(ArgumentError, match="compression_params need a store through which gradients travel"):
            Trainer([weight(0.0)], "sgd", kvstore=kvstore, compression_params=params)


def test_an_asynchronous_store_updates_and_misses_no_gradient():
    store = ThreadStore(Servers(1), 0, "dist_async")
    with pytest.raises(ArgumentError, match="does not work with an asynchronous store"):
        Trainer([weight(0.0)], "sgd", kvstore=store, update_on_kvstore=False)

    def train(store):
        used, unused = weight(0.0), weight(0.0)
        trainer = Trainer([used, unused], "test", kvstore=store)
        used.grad = torch.ones(1)
        trainer.step(1, ignore_stale_grad=True)

    _, servers = with_workers(train, 1, "dist_async")
    assert servers.applied == {0: 1}


def test_the_environment_chooses(monkeypatch):
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "0")
    found, _ = with_workers(lambda store: Trainer([weight(0.0)], "sgd", kvstore=store).update_on_kvstore, 1)
    assert found == [False]


def test_a_loop_that_fails_is_no_good_end(monkeypatch):
    ends = []

    class Watched(ThreadStore):
        def __exit__(self, kind, error, traceback):
            ends.append(kind)

    monkeypatch.setattr("reigen.kv.create", lambda name: Watched(Servers(1), 0, name))
    with pytest.raises(RuntimeError, match="in the loop"), Trainer([weight(0.0)], "sgd"):
        raise RuntimeError("in the loop")
    with Trainer([weight(0.0)], "sgd") as trainer:
        assert trainer.kvstore.type == "dist_sync"
    assert ends == [RuntimeError, None]


def test_parameters_that_get_their_shape_later():
    def train(store):
        torch.manual_seed(store.rank)
        model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
        trainer = Trainer(model, "sgd", {"learning_rate": 0.5}, kvstore=store)
        model(torch.ones(2, 4)).sum().backward()
        trainer.step(4)
        return [each.tolist() for each in model.parameters()]

    found, _ = with_workers(train)
    assert found[0] == found[1]


def test_a_worker_that_leaves():
    def train(store):
        parameter = weight(0.0)
        trainer = Trainer([parameter], "test", kvstore=store)
        for _ in range(2 + store.rank):
            parameter.grad = torch.ones(1)
            trainer.step(1)
        trainer.leave()
        trainer.leave()
        with pytest.raises(StepOrderError, match="has left"):
            trainer.step(1)
        return parameter.item()

    found, _ = with_workers(train)
    assert found == [5.0, 5.0]


def test_leaving_where_workers_update_warns():
    def train(store):
        trainer = Trainer([weight(0.0)], "sgd", kvstore=store, update_on_kvstore=False)
        trainer.leave()

    with pytest.warns(UserWarning, match="keeps the weights of its last step"):
        with_workers(train)


def test_one_that_takes_a_lost_workers_place_goes_on_in_the_middle_of_its_step():
    class Recovered(ThreadStore):
        is_recovery = True

        def rounds(self, key):
            return 3 if key == "first" else 2  # of the third step, the first key had been pushed

    first, second = weight(0.0), weight(0.0)
    trainer = Trainer({"first": first, "second": second}, "test", kvstore=Recovered(servers := Servers(1), 0))
    assert trainer.num_steps == 2
    for step in range(2, 4):
        assert trainer.num_steps == step
        first.grad, second.grad = torch.ones(1), torch.ones(1)
        trainer.step(1)
    assert servers.applied == {"first": 1, "second": 2}
    assert (first.item(), second.item()) == (1.0, 2.0)


def test_in_an_elastic_job_the_servers_update():
    class Elastic(ThreadStore):
        is_elastic = True

    with pytest.raises(ArgumentError, match="workers that come later take them from there"):
        Trainer([weight(0.0)], "sgd", kvstore=Elastic(Servers(1), 0), update_on_kvstore=False)
    assert Trainer([weight(0.0)], "sgd", kvstore=Elastic(Servers(1), 0)).update_on_kvstore


def trains_on_the_ring(on_store):
    rank = hvd.rank()
    torch.manual_seed(rank)
    moving, table = weight(1.0 - rank, 2.0), nn.Embedding(4, 1, sparse=True)
    nn.init.ones_(table.weight)
    parameters = {"moving": moving, "table": table.weight}
    with Trainer(parameters, "sgd", {"learning_rate": 0.5}, kvstore="ring", update_on_kvstore=on_store) as trainer:
        assert (trainer.rank, trainer.num_workers) == (rank, 2)
        for step in range(3):
            trainer.zero_grad()
            moving.grad = torch.tensor([1.0, step]) * (rank + 1)
            table(torch.tensor([rank, 3])).sum().backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the embedding's gradient is made dense
                trainer.step(4 if step < 2 else 2)
    return moving.tolist(), table.weight[:, 0].tolist()


@pytest.mark.parametrize("on_store", [None, True])
def test_without_servers_on_the_ring(rank_pool, on_store):
    found = rank_pool(2).run(trains_on_the_ring, on_store, init=True)
    assert found == [([-0.5, 0.125], [0.5, 0.5, 1.0, 0.0])] * 2


# ---------------------------------------------------------------- sparse gradients


def embedding(store, **how):
    torch.manual_seed(0)
    table = nn.Embedding(6, 2, sparse=True)
    nn.init.zeros_(table.weight)
    params = table if how.pop("whole", False) else [{"params": [table.weight], **how}]
    return table, Trainer(params, "sgd", {"learning_rate": 1.0}, kvstore=store)


def test_only_rows_of_the_batch_travel():
    def train(store):
        table, trainer = embedding(store, whole=True)
        table(torch.tensor([store.rank, 4, 4])).sum().backward()
        trainer.step(1)
        return table.weight[:, 0].tolist()

    found, servers = with_workers(train)
    assert found == [[-1.0, -1.0, 0.0, 0.0, -4.0, 0.0]] * 2
    assert sorted(entry[2] for entry in servers.log if entry[0] == "rows") == [[0, 4], [1, 4]]


def test_a_worker_without_rows_pushes_none():
    def train(store):
        table, trainer = embedding(store, grad_stype="row_sparse")
        if store.rank:
            table(torch.tensor([3])).sum().backward()
        trainer.step(1, ignore_stale_grad=True)
        return table.weight[:, 0].tolist()

    found, servers = with_workers(train)
    assert found == [[0.0, 0.0, 0.0, -1.0, 0.0, 0.0]] * 2
    assert sorted(entry[2] for entry in servers.log if entry[0] == "rows") == [[], [3]]


def test_rows_that_are_fetched_when_they_are_needed():
    def train(store):
        table, trainer = embedding(store, stype="row_sparse")
        table(torch.tensor([1, 2])).sum().backward()
        trainer.step(1)
        assert table.weight.detach().eq(0).all()  # a step brings nothing
        store.barrier()
        trainer.row_sparse_pull(table.weight, torch.tensor([[2], [5], [2]]))
        with pytest.raises(ArgumentError, match='was given with stype="row_sparse"'):
            trainer.row_sparse_pull(weight(0.0), torch.tensor([0]))
        return table.weight[:, 0].tolist()

    found, _ = with_workers(train)
    assert found == [[0.0, 0.0, -2.0, 0.0, 0.0, 0.0]] * 2


def test_a_trainer_that_was_not_told_makes_them_dense_and_says_so():
    def train(store):
        table, trainer = embedding(store)
        table(torch.tensor([store.rank, 4])).sum().backward()
        if store.rank == 0:
            with pytest.warns(UserWarning, match="gradient of parameter 0 is sparse, and travels as a dense one"):
                trainer.step(1)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trainer.step(1)
        return table.weight[:, 0].tolist()

    found, _ = with_workers(train, 1)
    assert found == [[-1.0, 0.0, 0.0, 0.0, -1.0, 0.0]]


def test_alone_sparse_gradients_update_their_rows_only():
    table = nn.Embedding(4, 1, sparse=True)
    nn.init.ones_(table.weight)
    trainer = Trainer(table, "sgd", {"learning_rate": 0.5, "wd": 1.0}, kvstore=None)
    table(torch.tensor([2, 2])).sum().backward()
    trainer.step(2)
    assert table.weight[:, 0].tolist() == [1.0, 1.0, 0.0, 1.0]  # the others do not decay


# ---------------------------------------------------------------- GradScaler


def test_an_overflow_skips_the_step_alone():
    parameter = weight(1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    trainer = Trainer([parameter], "sgd", {"learning_rate": 0.5}, kvstore=None)
    for value, expected, scale in ((torch.inf, 1.0, 4.0), (1.0, 0.5, 4.0)):
        trainer.zero_grad()
        scaler.scale((parameter * value).sum()).backward()
        scaler.step(trainer, 1)
        scaler.update()
        assert parameter.item() == expected
        assert scaler.get_scale() == scale
    trainer.zero_grad()
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(trainer)
    assert parameter.grad.item() == 1.0
    scaler.step(trainer, 1)
    assert parameter.item() == 0.0


@pytest.mark.parametrize("on_store", [True, False])
def test_scales_and_overflows_are_each_workers_own(on_store):
    def train(store):
        parameter = weight(0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (3 + store.rank))
        trainer = Trainer([parameter], "sgd", {"learning_rate": 1.0}, kvstore=store, update_on_kvstore=on_store)
        for step in range(3):
            trainer.zero_grad()
            overflows = step == 1 and store.rank == 1
            scaler.scale((parameter * (torch.inf if overflows else 1.0)).sum()).backward()
            scaler.step(trainer, 2)
            scaler.update()
        return parameter.item(), scaler.get_scale()

    found, _ = with_workers(train)
    # Two steps of both, and one of worker 0 alone, which nobody waits for in vain.
    assert found == [(-2.5, 8.0), (-2.5, 8.0)]


# ---------------------------------------------------------------- states


@pytest.mark.parametrize("on_store", [False, True])
def test_states_go_on_bit_for_bit(tmp_path, on_store):
    def gradients():
        generator = torch.Generator().manual_seed(3)
        return [torch.randn(5, generator=generator) for _ in range(6)]

    def run(trainer, parameter, some):
        for gradient in some:
            parameter.grad = gradient.clone()
            trainer.step(3)

    def make(parameter, rate=0.1):
        servers = Servers(1)
        params = {"learning_rate": rate}
        store = ThreadStore(servers, 0) if on_store else None
        return Trainer({"w": parameter}, "adam", params, kvstore=store)

    whole, half = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    through, before = make(whole), make(half)
    run(through, whole, gradients()[:3])
    through.set_learning_rate(0.2)
    run(through, whole, gradients()[3:])
    run(before, half, gradients()[:3])
    before.set_learning_rate(0.2)
    before.save_states(tmp_path / "states")
    after = make(half, rate=0.7)
    after.load_states(tmp_path / "states")
    assert after.learning_rate == 0.2
    run(after, half, gradients()[3:])
    assert torch.equal(whole, half)
    with pytest.raises(StepOrderError, match="before the first step"):
        after.load_states(tmp_path / "states")


def test_a_file_of_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (pytest.fail, ("loading states ran code",))

    (tmp_path / "evil").write_bytes(pickle.dumps(Evil()))
    trainer = Trainer([weight(0.0)], "sgd", kvstore=None)
    with pytest.raises(ConfigError, match="evil"):
        trainer.load_states(tmp_path / "evil")
    with pytest.raises(OSError, match="nothing"):
        trainer.load_states(tmp_path / "nothing")


# ---------------------------------------------------------------- another library's store


class Doubling:
    """What gluon.Trainer needs of a store: not more."""

    type = "doubling"
    rank, num_workers = 0, 2

    def is_capable(self, capability):
        return False

    def broadcast(self, key, value, out, priority=0):
        for each in out:
            each.data.fill_(4.0)

    def pushpull(self, key, value, out=None, priority=0):
        out.copy_(value * 2)


def test_a_store_of_somebody_else():
    parameter = weight(0.0)
    trainer = Trainer([parameter], "sgd", {"learning_rate": 1.0}, kvstore=Doubling())
    assert parameter.item() == 4.0
    parameter.grad = torch.ones(1)
    trainer.step(2)
    assert parameter.item() == 3.0
    with pytest.raises(ArgumentError, match="this store has no optimizers"):
        Trainer([parameter], "sgd", kvstore=Doubling(), update_on_kvstore=True)


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([], "at least one parameter"),
        (torch.nn.Linear(2, 1).state_dict(), "none of these parameters requires a gradient.*named_parameters"),
        (iter([]), "was an iterator used up"),
        (torch.zeros(1), "a list, a dict of names"),
        ([1], "with or without names, got 1"),
        ({"a": 1}, r"got \('a', 1\)"),
        ([("a", weight(0.0)), weight(0.0)], "some parameters were given with names and some without"),
        ([("a", weight(0.0)), ("a", weight(0.0))], "two parameters of the name 'a'"),
        ([{"params": [weight(0.0)], "lr": 1}], "any of grad_stype, lr_mult, stype, wd_mult; got lr"),
        ([{"lr_mult": 1.0}], "'params' is missing"),
        ([{"params": [weight(0.0)], "grad_stype": "csr"}], "grad_stype is 'default' or 'row_sparse', got 'csr'"),
        ([{"params": [weight(0.0)], "stype": "row_sparse", "grad_stype": "default"}], "row-sparse gradients, too"),
        ([{"params": [nn.Parameter(torch.tensor(1.0))], "grad_stype": "row_sparse"}], "has no rows"),
    ],
)
def test_parameters_that_make_no_sense(params, words):
    with pytest.raises(ArgumentError, match=words):
        Trainer(params, "sgd", kvstore=None)


def test_a_parameter_given_twice():
    parameter = weight(0.0)
    with pytest.raises(ArgumentError, match="parameter 1 was given before, as 0"):
        Trainer([parameter, parameter], "sgd", kvstore=None)


def test_optimizers_and_numbers_that_make_no_sense():
    with pytest.raises(ConfigError, match="speedy"):
        Trainer([weight(0.0)], "speedy", kvstore=None)
    with pytest.raises(ConfigError, match="no optimizer"):
        Trainer([weight(0.0)], torch.optim.SGD([weight(0.0)], lr=1.0), kvstore=None)
    with pytest.raises(ConfigError, match="learning_rate"):
        Trainer([weight(0.0)], optim.SGD(), {"learning_rate": 1.0}, kvstore=None)
    with pytest.raises(ArgumentError, match="did you mean 'dist_sync'"):
        Trainer([weight(0.0)], "sgd", kvstore="dist_snyc")
    trainer = Trainer([parameter := weight(0.0)], "sgd", kvstore=None)
    parameter.grad = torch.ones(1)
    for size in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match="batch_size must be a number above 0"):
            trainer.step(size)
    with pytest.raises(ConfigError, match="learning_rate"):
        trainer.set_learning_rate(float("nan"))
    assert parameter.item() == 0.0
    assert np.isfinite(trainer.learning_rate)
