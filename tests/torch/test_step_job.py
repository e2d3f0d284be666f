"""`hvd.elastic.Job` in one process: a plain optimizer in place, weights of parts, and a loader that works ahead."""

from __future__ import annotations

import io
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import reigen.torch as hvd
from reigen import elastic
from reigen.context import Context
from reigen.elastic import state_transfer
from reigen.errors import ArgumentError, NotInitializedError, StepOrderError
from reigen.testing import RankPool
from reigen.torch.elastic import training as torch_training
from reigen.torch.elastic.training import TorchTraining


class Numbers(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((4,), float(index)), index


class Connection:
    """Something of a program's whose state means nothing to another process."""

    def state_dict(self) -> dict[str, object]:
        return {"weights": [torch.zeros(2)], "lock": threading.Lock()}

    def load_state_dict(self, state: object) -> None:
        raise AssertionError(state)


def train_in_parts(batch: int) -> tuple[list[float], list[int]]:
    """On each rank; returns the weights, and how many samples this rank has had in each step."""
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        if hvd.rank() == 0:
            for parameter in model.parameters():
                parameter.fill_(0.25)
    inputs = torch.randn(23, 4, generator=torch.Generator().manual_seed(1))
    counts: list[int] = []
    with hvd.elastic.Job(model, optimizer, data=hvd.elastic.Cursor(23, global_batch=batch, seed=2)) as job:
        for step in job.steps(2):
            with step:
                counts.append(sum(map(len, step.parts)))
                for part in step.parts:
                    model(inputs[part.indices]).square().mean().backward()
                optimizer.step()
    return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()], counts


def count_steps() -> tuple[list[int], dict[str, float]]:
    _, counts = train_in_parts(5)
    return counts, hvd.metrics()


def test_steps_and_samples_of_a_job_are_counted(rank_pool: Callable[[int], RankPool]) -> None:
    for counts, metrics in rank_pool(2).run(count_steps, init=True):
        assert metrics["reigen_steps_total"] == metrics["reigen_goal_steps"] == len(counts) == 10
        assert metrics["reigen_samples_total"] == sum(counts)


@pytest.mark.parametrize("batch", [2, 5, 23])
def test_the_gradient_is_that_of_the_mean_over_the_steps_samples(rank_pool: Callable[[int], RankPool], batch: int):
    """Whatever the ranks have of them, nothing even; the truth is a training of one process, in float64."""
    found = rank_pool(3).run(train_in_parts, batch, init=True)
    assert len({tuple(weights) for weights, _ in found}) == 1
    assert any(len(set(counts)) > 1 for counts in zip(*(counts for _, counts in found), strict=True))
    inputs = torch.randn(23, 4, generator=torch.Generator().manual_seed(1)).double()
    weights, velocity = torch.full((5,), 0.25).double(), torch.zeros(5).double()
    cursor = hvd.elastic.Cursor(23, global_batch=batch, seed=2)
    while (interval := cursor.next_interval(1)).epoch < 2:
        chosen = inputs[cursor.deal(interval, 0, 1)[0].indices]
        rows = torch.cat([chosen, torch.ones(len(chosen), 1).double()], dim=1)
        velocity = 0.9 * velocity + 2 * ((rows @ weights)[:, None] * rows).mean(0)
        weights = weights - 0.1 * velocity
        cursor.move_behind(interval)
    assert found[0][0] == pytest.approx(weights.tolist(), rel=1e-4, abs=1e-6)


@pytest.fixture
def alone() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def make(**options: object) -> tuple[torch.nn.Module, torch.optim.Optimizer, hvd.elastic.Job]:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = hvd.elastic.Cursor(23, global_batch=5, seed=2)
    return model, optimizer, hvd.elastic.Job(model, optimizer, data=data, **options)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.usefixtures("alone")
def test_batches_are_those_of_the_cursor(num_workers: int):
    model, optimizer, job = make()
    seen: list[int] = []
    with job:
        loader = hvd.elastic.StepLoader(job, Numbers(), num_workers=num_workers)
        for step in job.steps(2):
            with step:
                for inputs, indices in loader.batches(step):
                    assert indices.tolist() == step.parts[0].indices.tolist()
                    assert inputs[:, 0].tolist() == indices.tolist()
                    seen += indices.tolist()
                    model(inputs / 23).mean().backward()
                optimizer.step()
        workers = loader.num_restarts
    assert Counter(seen) == Counter([*range(23)] * 2)
    assert workers == 1, "the iterator of the DataLoader was never made anew"


@pytest.mark.usefixtures("alone")
def test_a_step_that_comes_again_is_loaded_again():
    _, _, job = make()
    with job:
        loader = hvd.elastic.StepLoader(job, Numbers())
        first = next(iter(job.steps(1)))
        once = [indices.tolist() for _, indices in loader.batches(first)]
        again = [indices.tolist() for _, indices in loader.batches(first)]
        assert once == again == [first.parts[0].indices.tolist()]
        assert loader.num_restarts == 2


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_batches_are_those_of_a_step_that_is_dealt_to_fewer_than_all(rank: int):
    """A newcomer, rank 2, takes no samples of the step in which it gets the state; what follows is dealt to it, too."""
    cursor, restarts = hvd.elastic.Cursor(36, global_batch=3, seed=2), 0
    loader = hvd.elastic.StepLoader(SimpleNamespace(data=cursor, num_parts=None), Numbers())
    ahead = None  # to how many what is loaded ahead was dealt
    dealt_of_sharing = [(2, 2), (2, 2), (2, 3), (3, 3), (3, 3), (2, 3), (3, 3), (2, 3), (2, 3), (3, 3), (2, 2)]
    for number, (num_dealt, num_sharing) in enumerate(dealt_of_sharing):
        interval = cursor.next_interval(num_dealt)
        place = rank if rank < num_sharing else None
        parts = cursor.deal(interval, rank, num_dealt) if rank < num_dealt else ()
        step = SimpleNamespace(number=number, interval=interval, num_epochs=1, place=place, parts=parts)
        step.num_dealt, step.num_sharing = num_dealt, num_sharing
        loaded = [indices.tolist() for _, indices in loader.batches(step)]
        assert loaded == [part.indices.tolist() for part in parts], number
        cursor.move_behind(interval)
        if ahead != (place, num_dealt):
            restarts, ahead = restarts + 1, (place, num_sharing)
        assert loader.num_restarts == restarts, number


@pytest.mark.parametrize("name", ["batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"])
@pytest.mark.usefixtures("alone")
def test_the_order_is_the_jobs(name: str):
    with make()[2] as job, pytest.raises(ArgumentError, match=name):
        hvd.elastic.StepLoader(job, Numbers(), **{name: 1})


@pytest.mark.usefixtures("alone")
def test_a_plain_optimizer_is_a_distributed_one_under_its_name_also_for_its_scheduler():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    plain = torch.optim.SGD((twin := torch.nn.Linear(4, 1)).parameters(), lr=0.1, momentum=0.9)
    twin.load_state_dict(model.state_dict())
    decay = torch.optim.lr_scheduler.StepLR(plain, 2, 0.5)
    inputs = torch.randn(23, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with hvd.elastic.Job(model, optimizer, scheduler, data=hvd.elastic.Cursor(23, global_batch=5)) as job:
            for step in job.steps(1):
                with step:
                    for part in step.parts:
                        model(inputs[part.indices]).square().mean().backward()
                        plain.zero_grad()
                        twin(inputs[part.indices]).square().mean().backward()
                    optimizer.step()
                    scheduler.step()
                plain.step()
                decay.step()
    assert isinstance(optimizer, torch.optim.SGD)
    assert hasattr(optimizer, "skip_synchronize")
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"] == 0.1 * 0.5**2
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


@pytest.mark.usefixtures("alone")
def test_a_step_without_an_update_counts():
    _, _, job = make()
    with job:
        for step in job.steps(1):
            with step:
                pass
            assert step.is_applied
    assert job.number == 5


@pytest.mark.usefixtures("alone")
def test_a_scaler_is_where_the_weights_of_its_kind_of_device_are():
    """Whatever lies before them; without samples it sees no loss that would say so."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2, device=device)) for device in ("meta", "cpu")])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    training = TorchTraining(model, torch.optim.SGD(model.parameters(), lr=0.1), {"scaler": scaler})
    training.begin_step()
    assert scaler.scale(torch.ones(())).item() == 8.0
    assert scaler.get_scale() == 8.0


@pytest.mark.usefixtures("alone")
def test_wrong_order_is_refused():
    model, optimizer, job = make()
    with pytest.raises(StepOrderError, match="`with` block"):
        next(iter(job.steps(1)))
    with job:
        steps = job.steps(1)
        next(steps)
        with pytest.raises(StepOrderError, match="without `with step:`"):
            next(steps)
        with next(iter(job.steps(1))):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            with pytest.raises(StepOrderError, match="called twice"):
                optimizer.step()


@pytest.mark.parametrize("place", ["gradients", "step", "between", "end"])
def test_a_job_that_is_shut_down_in_its_block_says_so(place: str):
    hvd.init()
    _, optimizer, job = make()

    def run() -> None:
        with job:
            for step in job.steps(1):
                with step:
                    if place == "gradients":
                        hvd.shutdown()
                    optimizer.step()
                    if place == "step":
                        hvd.shutdown()
                if place == "between":
                    hvd.shutdown()
            hvd.shutdown()

    with pytest.raises(NotInitializedError, match=r"hvd\.shutdown\(\) was called within the `with` block"):
        run()
    with pytest.raises(NotInitializedError, match=r"use hvd\.init\(\)"), make()[2]:
        pass


def save_on_one_rank(directory: str, writer: int) -> list[int]:
    """Rank 0 writes a checkpoint, or another one asks for the state, after each step; no other rank does."""
    model, optimizer, job = make()
    found: list[int] = []
    with job:
        for step in job.steps(2):
            with step:
                for part in step.parts:
                    model(torch.ones(len(part), 4)).mean().backward()
                optimizer.step()
            if step.is_applied and hvd.rank() == writer:
                found.append(job.state_dict()["number"])
                job.checkpoint(Path(directory) / f"{job.number}.pt")
    return found


@pytest.mark.parametrize("writer", [0, 1])
def test_a_rank_may_save_the_state_alone(rank_pool: Callable[[int], RankPool], tmp_path: Path, writer: int):
    """The others are in the next step, or at the end of the job, whose barrier has another name."""
    found = rank_pool(3).run(save_on_one_rank, str(tmp_path), writer, init=True)
    assert found[writer] == [*range(1, 11)]
    states = {int(path.stem): torch.load(path, weights_only=True) for path in tmp_path.iterdir()}
    assert sorted(states) == ([*range(1, 11)] if writer == 0 else [])
    positions = [(epoch, position) for epoch in range(2) for position in (5, 10, 15, 20, 23)]
    for number, state in states.items():
        assert state["number"] == number
        assert (state["data"]["epoch"], state["data"]["position"]) == positions[number - 1]


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_is_gone_on_from(tmp_path: Path):
    path = tmp_path / "job.pt"
    model, optimizer, job = make(resume=path)
    with job:
        for step in job.steps(1):
            with step:
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
            if step.number == 2:
                job.checkpoint(path)
                kept = [parameter.clone() for parameter in model.parameters()]
    again, _, job = make(resume=path)
    with job:
        assert job.number == 3
        assert (job.data.epoch, job.data.position) == (0, 15)
        for mine, other in zip(again.parameters(), kept, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)
        with pytest.raises(StepOrderError, match="before"):
            job.load(path)


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path: Path):
    path = tmp_path / "job.pt"
    with make()[2] as job:
        job.checkpoint(path)
    whole = path.read_bytes()
    other = io.BytesIO()
    torch.save({"weights": torch.zeros(2)}, other)
    for content in (b"", b"no checkpoint", whole[: len(whole) // 2], whole[:-10], other.getvalue()):
        path.write_bytes(content)
        said = r"job\.pt cannot be read as the checkpoint of a job: .*Name an older one, or remove it to start over"
        with pytest.raises(ArgumentError, match=said), make(resume=path)[2]:
            pass
    path.write_bytes(whole)
    with make(resume=path)[2] as job:
        assert job.number == 0


@pytest.mark.usefixtures("alone")
def test_arguments_that_make_no_sense():
    model, optimizer, job = make()
    for options in ({"deterministic": "parts"}, {"num_parts": 2}, {"deterministic": "parts", "num_parts": 0}):
        with pytest.raises(ArgumentError, match="parts"):
            make(**options)
    with pytest.raises(ArgumentError, match="takes an optimizer"):
        hvd.elastic.Job(model, optimizer, data=job.data, deterministic="parts", num_parts=2)
    with pytest.raises(ArgumentError, match="for a object"):
        elastic.Job(object(), optimizer, data=job.data)
    assert isinstance(elastic.Job(model, optimizer, data=job.data), hvd.elastic.Job)
    assert elastic.Cursor is hvd.elastic.Cursor
    with pytest.raises(ArgumentError, match="min_size is 2"), make(min_size=2)[2]:
        pass
    with pytest.raises(ArgumentError, match="min_size"):
        make(min_size=0)
    with pytest.raises(ArgumentError, match="state_dict"):
        make(scaler=object())
    with pytest.raises(ArgumentError, match=r"the state_dict\(\) of scaler can be neither copied nor given"):
        make(scaler=Connection())
    other = torch.optim.Adam(torch.nn.Linear(4, 1).parameters())
    for second in (other, hvd.DistributedOptimizer(torch.optim.SGD(torch.nn.Linear(4, 1).parameters(), lr=0.1))):
        with pytest.raises(ArgumentError, match=r"second is an optimizer .*and a Job has one.*as parameter groups"):
            make(second=second)
    with pytest.raises(ArgumentError, match="Module"):
        hvd.elastic.Job(optimizer, optimizer, data=job.data)
    with pytest.raises(ArgumentError, match="optimizer must be"):
        hvd.elastic.Job(model, model, data=job.data)


@pytest.mark.usefixtures("alone")
def test_any_weight_or_momentum_that_differs_is_seen_when_state_has_been_sent():
    model = torch.nn.Linear(40, 60)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 40)).sum().backward()
    job = hvd.elastic.Job(model, optimizer, data=hvd.elastic.Cursor(23, global_batch=4))
    optimizer.step()
    before = job.training.digest()
    assert job.training.digest() == before
    for tensor in (model.weight, model.bias, optimizer.state[model.weight]["momentum_buffer"]):
        for place in (0, -1):
            value = tensor.detach().view(-1)[place]
            kept = value.clone()
            value.add_(1.0)
            assert job.training.digest() != before
            value.copy_(kept)
    assert job.training.digest() == before


def transfer_to_newcomer(kind: str, memory_format: torch.memory_format, reads: bool) -> list[bytes]:
    """Rank 2 gets the state of the others; returns the digests before and after."""
    torch.manual_seed(hvd.rank() // 2)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(6, 2))
    model.to(memory_format=memory_format)
    model[2].bias.requires_grad_(False)
    options = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
    training = TorchTraining(model, optimizer, {})
    if hvd.rank() < 2:
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape))
        with optimizer.skip_synchronize():
            optimizer.step()
    before = training.digest()
    readable = state_transfer._is_readable
    state_transfer._is_readable = lambda source: reads and readable(source)
    try:
        training.transfer(1, frozenset({2}))
    finally:
        state_transfer._is_readable = readable
    assert model[1].running_mean.tolist() == [0.0] * 4
    return [before, training.digest()]


def transfer_offered(kind: str, may_read: bool, overlaps: bool) -> tuple[list[bytes], list[str]]:
    """Ranks 0 and 1 offer their state to rank 2; returns the digests, and which exchanges were made meanwhile."""
    torch.manual_seed(hvd.rank() // 2)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(6, 2))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01 * (1 + hvd.rank() // 2), weight_decay=0.1)
    training = TorchTraining(model, optimizer, {})
    if hvd.rank() < 2:
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape)
        with optimizer.skip_synchronize():
            optimizer.step()
    before, offer = training.digest(), training.offer() if hvd.rank() < 2 else None
    offers = hvd.allgather_object(offer and offer.address)
    exchanged: list[str] = []
    readable, exchange, least = state_transfer._is_readable, Context.exchange, torch_training.LEAST_OVERLAPPED_BYTES

    def note_and_exchange(context: Context, *arguments: Any, name: str | None = None, **options: Any) -> Any:
        exchanged.append(str(name))
        return exchange(context, *arguments, name=name, **options)

    state_transfer._is_readable = lambda offer: may_read and readable(offer)
    Context.exchange, torch_training.LEAST_OVERLAPPED_BYTES = note_and_exchange, 0
    try:
        message = "of the source" if hvd.rank() == 1 else None
        overlapped = training.transfer(1, frozenset({2}), may_overlap=overlaps, offers=offers, message=message)
    finally:
        state_transfer._is_readable, Context.exchange = readable, exchange
        torch_training.LEAST_OVERLAPPED_BYTES = least
    if overlapped is not None:
        assert overlapped.message == "of the source"
        if hvd.rank() == 2:
            overlapped.read()
    found = (overlapped or training).digest()
    hvd.barrier()  # until then the members have to live
    assert may_read == (optimizer.param_groups[0]["lr"] == 0.01) or hvd.rank() < 2 or overlaps
    return [before, found], exchanged


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize(("overlaps", "exchanges"), [(False, []), (True, ["elastic.may_read.size"])])
def test_a_newcomer_reads_what_members_offer_without_waiting_for_their_answers(
    rank_pool: Callable[[int], RankPool], kind: str, overlaps: bool, exchanges: list[str]
):
    """One exchange at most, and the next one is that of the digests."""
    found = rank_pool(3).run(transfer_offered, kind, True, overlaps, init=True)
    assert [exchanged for _, exchanged in found] == [exchanges] * 3
    (_, source), (before, received) = found[1][0], found[2][0]
    assert source == received != before


def test_a_newcomer_that_cannot_read_what_is_offered_says_so(rank_pool: Callable[[int], RankPool]):
    found = rank_pool(3).run(transfer_offered, "SGD", False, False, init=True)
    assert [digests[1] == state_transfer.UNREAD for digests, _ in found] == [False, False, True]
    found = rank_pool(3).run(transfer_offered, "SGD", False, True, init=True)
    (_, source), (before, received) = found[1][0], found[2][0]
    assert source == received != before, "the state has come in the other way"


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_newcomer_gets_the_bits_of_the_others(
    rank_pool: Callable[[int], RankPool], kind: str, memory_format: torch.memory_format, reads: bool
):
    """Read from their memory, or sent; also where tensors lie in another order than that of their dimensions."""
    found = rank_pool(3).run(transfer_to_newcomer, kind, memory_format, reads, init=True)
    (first, *_), (second, *_), (third, *_) = found
    assert first == second != third
    assert [after for _, after in found] == [first] * 3


@pytest.mark.parametrize("layer", [torch.nn.BatchNorm1d, torch.nn.SyncBatchNorm, hvd.SyncBatchNorm])
@pytest.mark.usefixtures("alone")
def test_members_go_on_before_newcomers_have_the_state_unless_forward_needs_all_ranks(
    layer: type[torch.nn.Module], monkeypatch: pytest.MonkeyPatch
):
    """A newcomer has no samples then, and calls no `forward`."""
    monkeypatch.setattr(torch_training, "LEAST_OVERLAPPED_BYTES", 0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Sequential(layer(3)))
    training = TorchTraining(model, torch.optim.SGD(model.parameters(), lr=0.1), {})
    overlapped = training.transfer(0, frozenset(), may_overlap=True)
    assert (overlapped is None) == (layer is not torch.nn.BatchNorm1d)
    if overlapped is not None:
        assert overlapped.digest()


class TeacherAndStudent(torch.nn.Module):
    """The teacher's weights are no business of the optimizer: they follow those of the student."""

    def __init__(self) -> None:
        super().__init__()
        self.student = torch.nn.Linear(5, 3)
        self.teacher = torch.nn.Linear(5, 3).requires_grad_(False)
        self.register_buffer("num_steps", torch.zeros(1))

    def follow(self) -> None:
        for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            own.data.lerp_(other.data, 0.25)  # as many programs do: the tensor's version stays the same


def weights_of(*modules: torch.nn.Module) -> list[float]:
    return [float(value) for module in modules for each in module.parameters() for value in each.detach().flatten()]


def overlap(has_teacher: bool, changes: str) -> tuple[list[float], bytes, list[float]]:
    """Rank 2 gets the state of rank 1; returns what it was, the digests that are compared, and what this rank has."""
    torch.manual_seed(hvd.rank() // 2)
    model, loss = TeacherAndStudent() if has_teacher else torch.nn.Linear(5, 3), torch.nn.Linear(3, 1)
    trained = [*(p for p in model.parameters() if p.requires_grad), *loss.parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(trained, lr=0.1))
    training = TorchTraining(model, optimizer, {})
    before = weights_of(model, loss)
    least, torch_training.LEAST_OVERLAPPED_BYTES = torch_training.LEAST_OVERLAPPED_BYTES, 0
    try:
        overlapped = training.transfer(1, frozenset({2}), may_overlap=True)
    finally:
        torch_training.LEAST_OVERLAPPED_BYTES = least
    assert (overlapped is None) == has_teacher
    hvd.barrier()
    if changes == "teacher" and hvd.rank() < 2:
        assert isinstance(model, TeacherAndStudent)
        model.follow()
    if changes == "loss" and hvd.rank() < 2:
        with torch.no_grad():
            next(loss.parameters()).add_(1)
    hvd.barrier()
    if overlapped is not None and hvd.rank() == 2:
        overlapped.read()
    hvd.barrier()  # until then the source has to live
    return before, (overlapped or training).digest(), weights_of(model, loss)


def test_a_newcomer_gets_weights_outside_of_the_optimizer_as_they_were_before_the_program_changed_them(
    rank_pool: Callable[[int], RankPool],
):
    """Members wait for it: they may change them in `forward`, which it would not call in a step without samples."""
    _, source, newcomer = rank_pool(3).run(overlap, True, "teacher", init=True)
    assert source[2] != source[0], "the teacher was changed while the newcomer had not read"
    assert newcomer[0] != source[0] == newcomer[2]
    assert newcomer[1] == source[1] != b""


def test_weights_that_the_optimizer_has_and_the_model_has_not_are_the_newcomers_too(
    rank_pool: Callable[[int], RankPool],
):
    _, source, newcomer = rank_pool(3).run(overlap, False, "", init=True)
    assert newcomer[0] != source[0] == source[2] == newcomer[2]
    assert newcomer[1] == source[1] != b""
    _, source, newcomer = rank_pool(3).run(overlap, False, "loss", init=True)
    assert newcomer[1] != source[1], "they were changed while it had not read: it has to get them again"
