"""A training in an `hvd.elastic.Job` of which ranks kill themselves at points of steps that they are told.

This process forks the ranks, so that what they need is imported once. All write lines to its output: ``PID rank pid``
at the beginning; ``TRY number view rank size indices`` when a step begins; ``STEP number view digest`` when the weights
have changed; ``DONE undone passes`` at the end. Arguments: the number of steps, and for each rank nothing, or its
points, ``PLACE NUMBER STEP``, with commas between them:

* ``gradient n``: when the n-th gradient of the step comes;
* ``filled n``: before or behind the word that says that a bucket is filled, 2 n or 2 n + 1;
* ``sums n``: at the n-th instruction of the reductions that others can see: words of the journal, and both halves of
  what is written into a copy of a bucket;
* ``update 0``: when all sums are there, and the weights are to be changed;
* ``owner n``: at the n-th point of the update of this rank's slice of shared weights: around words that others see, in
  the middle of the copy to the slot, and behind a change that has spoilt half of a chunk;
* ``moment n``: n microseconds after the update has begun, whatever instruction that is;
* ``hesitates 0``: it does not die, but waits in front of the update until the view has ended;
* ``late 0``: the same behind an update of shared weights, as if it had not heard that all others have made it;
* ``knows 0``: it waits in front of the optimizer until it knows of a spare;
* ``sends 0``: when it is to give others its state, behind that step.

``SPARES``: so many of the last processes are spares. ``SHARE``: weights exist once a host. ``ONE_CPU``: buckets are
reduced when backward is over. ``CLIPS``: the norm of the sums is limited.
"""

import hashlib
import itertools
import json
import os
import signal
import sys
import threading
import time

import torch
import torch._dynamo.trace_rules  # loaded later otherwise, by each process

import reigen.torch as hvd
from reigen import context
from reigen.api.gradients.reduce_group import ReduceGroup
from reigen.backends.shm import reduction_journal
from reigen.errors import PeerLostError
from reigen.torch.shared_parameters import parameters, update_chunks
from tests.elastic.job_death import ViewEnds, elastic_epoch
from tests.multiprocess.launcher import until

BATCH, CLIPS = 16, os.environ.get("CLIPS") == "1"


def say(*words: object) -> None:
    """Write a line at once, so that those of several processes do not mix."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Countdown:
    """Kills this process at its n-th call while it is on."""

    def __init__(self, number: int) -> None:
        self.left, self.is_on = number, False

    def __call__(self, *_: object) -> None:
        if self.is_on:
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1


def patch_journal(count: Countdown, *, fills: bool) -> None:
    store, copy = reduction_journal._store, reduction_journal._copy_block

    def counted_store(word: memoryview, value: int) -> None:
        counts = fills is not bool(value & 0xFFFFFFFF)
        if counts:
            count()
        store(word, value)
        if counts:
            count()

    def counted_copy(target, total) -> None:
        if not fills:
            count()
            target[: total.size // 2] = total[: total.size // 2]
            count()
        copy(target, total)

    reduction_journal._store, reduction_journal._copy_block = counted_store, counted_copy


def patch_owner(count: Countdown) -> None:
    """Count points of the update of shared weights, and divide them into more chunks than there would be."""
    update_chunks.CHUNK_BYTES = parameters.CHUNK_BYTES = 1 << 16
    store, step, save = update_chunks._store, update_chunks.inner_step, update_chunks._Chunk.save

    def counted_store(*args: object) -> None:
        count()
        store(*args)
        count()

    def counted_save(chunk: update_chunks._Chunk) -> None:
        chunk.saved[0].view(-1)[::2] = 3.0
        count()
        save(chunk)

    def counted_step(optimizer: torch.optim.Optimizer) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        if count.is_on and count.left == 0:
            with torch.no_grad():
                for tensor in (weights[0], *optimizer.state[weights[0]].values()):
                    tensor.view(-1)[::2] = 7.0
        count()
        step(optimizer)
        count()

    update_chunks._store, update_chunks.inner_step = counted_store, counted_step
    update_chunks._Chunk.save = counted_save


class Moment:
    """Kills this process so many microseconds after an update has begun."""

    def __init__(self, job: object, microseconds: int) -> None:
        self.is_on, self._microseconds = False, microseconds
        begin = job.begin_update

        def begin_update() -> None:
            begin()
            if self.is_on:
                threading.Thread(target=self._kill, args=(time.perf_counter(),), daemon=True).start()

        job.begin_update = begin_update

    def _kill(self, begun: float) -> None:
        while time.perf_counter() - begun < self._microseconds / 1e6:
            pass
        os.kill(os.getpid(), signal.SIGKILL)


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    widths = [64, 700, 300, 1]
    layers = [torch.nn.Linear(*pair) for pair in itertools.pairwise(widths)]
    return torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2])


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def make_samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(count, 64, generator=torch.Generator().manual_seed(5))
    return inputs, inputs.sum(1, keepdim=True)


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
        found.update(optimizer.state[parameter]["momentum_buffer"].numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    pids: list[int] = []
    size = len(sys.argv) - 2 - int(os.environ.get("SPARES", "0"))
    for rank, points in enumerate(sys.argv[2:]):
        pid = os.fork()
        if not pid:
            os.environ["REIGEN_SLOT"] = str(rank)
            places = {"RANK": rank, "LOCAL_RANK": rank, "SIZE": size, "LOCAL_SIZE": size}
            if rank < size:
                os.environ |= {f"REIGEN_{name}": str(number) for name, number in places.items()}
            else:
                os.environ["REIGEN_ELASTIC_CANDIDATE"] = "1"
                for name in (*places, "CROSS_RANK", "CROSS_SIZE"):
                    del os.environ[f"REIGEN_{name}"]
            train(int(sys.argv[1]), Points(points))
            return
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    say("ENDED", codes)


class Points:
    """The points of a rank."""

    def __init__(self, text: str) -> None:
        self._found = {place: (int(n), int(at)) for place, n, at in (each.split() for each in text.split(",") if each)}

    def number(self, *places: str) -> tuple[str, int, int]:
        """Place, number and step of the first of these that is named; otherwise nothing, in no step."""
        return next(((place, *self._found[place]) for place in places if place in self._found), ("", 0, -1))

    def are_at(self, place: str, step: int) -> bool:
        """Whether a place in this step is named."""
        return self.number(place)[2] == step


def watch(job: hvd.elastic.Job, points: Points) -> None:
    """Have the process hesitate, and die when it sends, as its points say."""
    ends, begin, transfer, barrier = ViewEnds(job), job.begin_update, job.training.transfer, ReduceGroup.barrier

    def begin_late() -> None:
        if points.are_at("hesitates", job.number) and elastic_epoch() == 1:
            ends.wait()
        begin()

    def pass_late(group: ReduceGroup, name: str) -> None:
        barrier(group, name)
        if name == "updated" and points.are_at("late", job.number) and elastic_epoch() == 1:
            until(lambda: not context.current().is_operational)  # what the job says waits for the end of the update
            raise PeerLostError("a member has died before it said that it has made the update")

    def transfer_or_die(source: int, *args: object, **options: object) -> object:
        if job.rank == source and job.number >= points.number("sends")[2] >= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return transfer(source, *args, **options)

    job.begin_update, job.training.transfer, ReduceGroup.barrier = begin_late, transfer_or_die, pass_late


def train(num_steps: int, points: Points) -> None:
    place, number, at = points.number("gradient", "filled", "sums", "update", "owner", "moment")
    count = Countdown(number)
    say("PID", os.environ["REIGEN_SLOT"], os.getpid())
    torch.set_num_threads(1)
    if os.environ.get("ONE_CPU") == "1":
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["REIGEN_SLOT"]) % 2]})
    hvd.init()
    inputs, targets = make_samples(num_steps * BATCH)
    model = make_model()
    share = os.environ.get("SHARE") == "1"
    optimizer = hvd.DistributedOptimizer(make_optimizer(model), model.named_parameters(), share_parameters=share)
    patch_owner(count if place == "owner" else Countdown(0))  # all divide alike
    if place in {"filled", "sums"}:
        patch_journal(count, fills=place == "filled")
    elif place == "gradient":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(count)
    elif place == "update":
        optimizer.register_step_pre_hook(count)
    data = hvd.elastic.Cursor(num_steps * BATCH, global_batch=BATCH, seed=3)
    with hvd.elastic.Job(model, optimizer, data=data) as job:
        watch(job, points)
        if place == "moment":
            count = Moment(job, number)
        for step in job.steps(1):
            elastic = context.elastic_job()
            assert elastic is not None
            where = f"{step.number} {elastic.epoch}"
            with step:
                indices = [index for part in step.parts for index in part.indices.tolist()]
                say("TRY", where, hvd.rank(), hvd.size(), json.dumps(indices))
                count.is_on = step.number == at
                for part in step.parts:
                    batch = torch.from_numpy(part.indices)
                    torch.nn.functional.mse_loss(model(inputs[batch]), targets[batch]).backward()
                if points.are_at("knows", step.number):
                    until(lambda driver=elastic._driver: driver._machine._candidates)
                if CLIPS:
                    optimizer.clip_grad_norm_(0.5)
                optimizer.step()
                count.is_on = False
                say("STEP", where, digest(model, optimizer))
    say("DONE", job.num_undone, optimizer._reducer.num_passes)


if __name__ == "__main__":
    main()
