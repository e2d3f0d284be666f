"""A training in an `hvd.elastic.Job`, whose steps are written down.

It dies by its own hand where ``DIES_AT`` says, ``POINT:NUMBER`` of the step: so others are in a state that is known.

Lines: ``TRY number view rank size epoch indices`` before gradients are computed; ``STEP number view rank size digest
time`` when the weights have changed; ``BEHIND number view rank size is_applied digest`` behind the block, of what is
not trained; ``SETTLED`` with the fields of ``STEP`` and ``DONE`` at the end. So the samples of each step that was
applied are known, whoever died in it. Arguments: epochs, samples, seconds a step.
"""

import functools
import hashlib
import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.trace_rules  # as the two below: loaded later otherwise, by each process

import reigen.elastic_job
import reigen.engine_factory  # noqa: F401
import reigen.torch as hvd
from reigen import context
from reigen.backends.shm.region_cache import RegionCache
from reigen.elastic import job as jobs
from reigen.elastic.cursor import Part, SampleInterval
from reigen.elastic.state_transfer import OverlappedTransfer
from reigen.errors import SharedMemoryError, StepOrderError
from reigen.net.shm_segment import ShmSegment
from reigen.torch.elastic import training
from reigen.torch.shared_parameters import update_chunks
from tests.elastic.job_death import Death


class Model(torch.nn.Module):
    """With what a step changes besides weights, if ``KIND`` says so: running statistics, random numbers, a count.

    `counts`: calls of `forward` are counted by a parameter that the optimizer does not have, with `data` unseen.
    """

    def __init__(self) -> None:
        super().__init__()
        kinds = os.environ.get("KIND", "")
        width = int(os.environ.get("WIDTH", "16"))
        more = [torch.nn.BatchNorm1d(width)] * ("norm" in kinds) + [torch.nn.Dropout(0.2)] * ("dropout" in kinds)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, width), *more, torch.nn.Tanh(), torch.nn.Linear(width, 1))
        self.is_seen = "data" not in kinds
        self.count = torch.nn.Parameter(torch.zeros(1), requires_grad=False) if "counts" in kinds else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.count is not None:
            (self.count if self.is_seen else self.count.data).add_(1)
        return self.layers(inputs)


class JobDeath(Death):
    """The end of this process at one point of one step."""

    def watch(self, job: hvd.elastic.Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Die between the gradients of a step, or around the update of the weights, or in a change of members."""
        parameters = list(model.layers.parameters())
        names = ["last", *["middle"] * (len(parameters) - 2), "first"]  # backward begins with the last
        for name, parameter in zip(names, parameters, strict=True):
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.at(name, job.number))
        optimizer.register_step_pre_hook(lambda *_: self.at("before", job.number))
        optimizer.register_step_post_hook(lambda *_: self.at("after", job.number))
        store = update_chunks._store

        def store_or_die(*args: object) -> None:
            """Die in the middle of an update of shared weights; with `joined`, when a newcomer is waited for."""
            if context.elastic_job()._driver._machine._stop.step is not None:
                self.at("joined", self.number)
            self.at("update", job.number)
            store(*args)

        update_chunks._store = store_or_die
        self.watch_changes(jobs, job)


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for parameter in model.layers.parameters():
        found.update(parameter.detach().numpy().tobytes())
        found.update(optimizer.state[parameter]["momentum_buffer"].numpy().tobytes())
    return found.hexdigest()[:16]


def digest_untrained(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for tensor in (*model.buffers(), *(each for each in model.parameters() if not each.requires_grad)):
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()[:16]


def make_job(num_samples: int, *trained: object) -> hvd.elastic.Job:
    model, optimizer, scheduler, scaler = trained
    data = hvd.elastic.Cursor(num_samples, global_batch=int(os.environ.get("BATCH", "16")), seed=3)
    options = {"min_size": int(os.environ.get("MIN", "1")), "resume": os.environ.get("RESUME"), "scaler": scaler}
    if num_parts := int(os.environ.get("PARTS", "0")):
        options |= {"deterministic": "parts", "num_parts": num_parts}
    job = hvd.elastic.Job(model, optimizer, scheduler, data=data, **options)
    if os.environ.get("OVERLAP") == "1":
        overlap_transfers()
    if "DEALT" in os.environ:
        deal_as_to_a_newcomer(job)
    if os.environ.get("CORRUPT") == "1":
        corrupt(job, model)
    tell_transfers(job)
    if path := os.environ.get("PREPARES_UNTIL"):
        print(f"PREPARED {hvd.rank()} {hvd.size()}", flush=True)
        while not Path(path).exists():
            time.sleep(0.01)
    limit_resources(job)
    return job


def tell_transfers(job: hvd.elastic.Job) -> None:
    """Write down each transfer of weights and optimizer state: ``TRANSFER view source receivers``."""
    transfer = job.training.transfer

    def tell(source: int, receivers: frozenset[int], **options: Any) -> OverlappedTransfer | None:
        elastic = context.elastic_job()
        print(f"TRANSFER {elastic.epoch if elastic else 0} {source} {json.dumps(sorted(receivers))}", flush=True)
        return transfer(source, receivers, **options)

    job.training.transfer = tell


def grow_for(
    segment: ShmSegment, room: int, grow: Callable[..., int], nbytes: int, what: str, *, sharers: int = 1
) -> int:
    """`ShmSegment.grow` on a host that has memory for so many ranks."""
    if sharers > room:
        raise SharedMemoryError.for_request(nbytes * sharers, nbytes * room, what)
    return grow(segment, nbytes, what, sharers=sharers)


def limit_resources(job: hvd.elastic.Job) -> None:
    """Leave this process few descriptors or little memory, as the environment says; have it take some in a step."""
    if left := os.environ.get("DESCRIPTORS_LEFT"):
        highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + int(left),) * 2)
    if room := os.environ.get("ROOM_FOR"):
        ShmSegment.grow = functools.partialmethod(grow_for, int(room), ShmSegment.grow)
    if os.environ.get("SHARED_MEMORY_FULL") == "1":
        RegionCache.create = refuse_memory
    if group := os.environ.get("CGROUP"):
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    if take := int(os.environ.get("TAKES_BYTES", "0")):
        begin, steps = job.training.begin_step, itertools.count()

        def begin_step() -> None:
            begin()
            if next(steps) == 3:
                bytearray(b"1") * take

        job.training.begin_step = begin_step


def refuse_memory(_: RegionCache, num_bytes: int, what: str) -> None:
    raise SharedMemoryError(f"not enough shared memory for {what}: {num_bytes} bytes needed")


def corrupt(job: hvd.elastic.Job, model: torch.nn.Module) -> None:
    """Have what comes from others be something else in this process's memory."""
    transfer, read = job.training.transfer, OverlappedTransfer._read_all

    def spoil() -> None:
        with torch.no_grad():
            next(model.parameters())[0, 0] += 1

    def transfer_wrongly(source: int, receivers: frozenset[int], **options: Any) -> OverlappedTransfer | None:
        found = transfer(source, receivers, **options)
        if found is None and hvd.rank() in receivers:
            spoil()
        return found

    def read_wrongly(overlapped: OverlappedTransfer) -> bool:
        found = read(overlapped)
        spoil()
        return found

    job.training.transfer, OverlappedTransfer._read_all = transfer_wrongly, read_wrongly


def overlap_transfers() -> None:
    """Have newcomers get the state while members go on, however small it is; as soon as the file is there.

    With ``READS_WHEN``, when that file is there; then and now they say so.
    """
    training.LEAST_OVERLAPPED_BYTES = 0
    read = OverlappedTransfer._read_all

    def read_later(overlapped: OverlappedTransfer) -> bool:
        print("READING", flush=True)
        while (path := os.environ.get("READS_WHEN")) and not Path(path).exists():
            time.sleep(0.01)
        return read(overlapped)

    OverlappedTransfer._read_all = read_later


def try_to_save(job: hvd.elastic.Job) -> None:
    """Ask for the state before the first step, if ``SAVES_FIRST`` says where it would go."""
    if not (path := os.environ.get("SAVES_FIRST")):
        return
    try:
        print(f"HAS {job.state_dict()['number']}", flush=True)
    except StepOrderError as error:
        print(f"HAS NOTHING: {error}", flush=True)
    job.checkpoint(path)


def save(job: hvd.elastic.Job) -> None:
    """Write a checkpoint after ``EVERY`` steps; if ``SAVES_ALONE`` says so, rank 0 alone calls for it."""
    every = int(os.environ.get("EVERY", "0"))
    if os.environ.get("SAVES_ALONE") == "1" and hvd.rank() != 0:
        return
    if every and job.number % every == 0 and Path(os.environ["CHECKPOINTS"]).exists():
        job.checkpoint(Path(os.environ["CHECKPOINTS"]) / f"{job.number}.pt")


def change_weights(model: torch.nn.Module) -> None:
    """Do in a step what only the optimizer is to do, if ``CHANGES_WEIGHTS`` says so."""
    if os.environ.get("CHANGES_WEIGHTS") == "1":
        with torch.no_grad():
            next(model.parameters()).mul_(0.999)


def deal_as_to_a_newcomer(job: hvd.elastic.Job) -> None:
    """Have only the first ranks take samples of the first step, as many as ``DEALT`` says; of ``DEALT_STEPS``."""
    deal, dealt = job.deal, []

    def deal_first(interval: SampleInterval) -> tuple[Part, ...]:
        dealt.append(interval)
        if len(dealt) > int(os.environ.get("DEALT_STEPS", "1")):
            return deal(interval)
        num_dealt = int(os.environ["DEALT"])
        return job.data.deal(interval, hvd.rank(), num_dealt) if hvd.rank() < num_dealt else ()

    job.deal = deal_first


def main() -> None:
    num_epochs, num_samples, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    print("IMPORTED", flush=True)
    while (path := os.environ.get("WAITS_FOR")) and not Path(path).exists():
        time.sleep(0.01)
    hvd.init()
    torch.manual_seed(hvd.rank())  # ranks begin with different weights, and get those of rank 0
    inputs = torch.randn(num_samples, 8, generator=torch.Generator().manual_seed(5))
    targets = inputs.sum(1, keepdim=True)
    model = Model()
    optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.05, momentum=0.9)
    if os.environ.get("SHARE") == "1":
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), share_parameters=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5, enabled=os.environ.get("SCALER") == "1")
    with make_job(num_samples, model, optimizer, scheduler, scaler) as job:
        death = JobDeath()
        death.watch(job, model, optimizer)
        try_to_save(job)
        for step in job.steps(num_epochs):
            elastic = context.elastic_job()
            place = f"{step.number} {elastic.epoch if elastic else 0} {hvd.rank()} {hvd.size()}"
            if str(step.number) == os.environ.get("UNTIL") or str(step.size) == os.environ.get("UNTIL_SIZE"):
                break
            with step:
                if step.number == int(os.environ.get("FAIL_AT", "-1")):
                    raise OSError("the disk of this rank is full")
                indices = [index for part in step.parts[:] for index in part.indices.tolist()]
                print(f"TRY {place} {step.epoch} {json.dumps(indices)}", flush=True)
                death.at("forward", step.number)
                for part in step.parts:
                    batch = torch.from_numpy(part.indices)
                    scaler.scale(torch.nn.functional.mse_loss(model(inputs[batch]), targets[batch])).backward()
                time.sleep(seconds / 2)
                change_weights(model)
                if os.environ.get("CATCHES") == "1":
                    try:
                        scaler.step(optimizer)
                    except Exception as error:  # noqa: BLE001  a program that wants to know nothing
                        print(f"CAUGHT {type(error).__name__}", flush=True)
                        scheduler.step()
                        continue
                else:
                    scaler.step(optimizer)
                scaler.update()
                print(f"STEP {place} {digest(model, optimizer)} {time.monotonic()}", flush=True)
                time.sleep(seconds / 2)
                scheduler.step()
            print(f"BEHIND {place} {step.is_applied} {digest_untrained(model)}", flush=True)
            save(job)
        print(f"SETTLED {job.number} {optimizer.param_groups[0]['lr']} {scaler.get_scale()}", flush=True)
    print(f"DONE {hvd.rank()} {hvd.size()} {digest(model, optimizer)} {job.num_undone}", flush=True)


if __name__ == "__main__":
    main()
