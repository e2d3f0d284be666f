"""Jobs on a real cluster of Ray's with three nodes, which are stand-in machines."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from reigen.compat import DIRECTORY
from tests.docs.programs import PROGRAMS
from tests.engines.ray.cluster import CPUS, GPUS, RayCluster
from tests.lab import HostProcess, Hosts, Unavailable
from tests.network.waiting import wait_for

pytestmark = pytest.mark.slow

BEGINNING = """
import json, os, signal, socket, sys, time
import ray
for attempts_left in (2, 1, 0):
    try:
        ray.init(log_to_driver=False, logging_level="error")
        break
    except ConnectionAbortedError:  # the server that Ray starts for each client did not start in Ray's own time
        if not attempts_left:
            raise
import reigen.ray
from reigen.ray import RayExecutor
def say(**facts):
    print("FACT " + json.dumps(facts), flush=True)
def place():
    import reigen
    reigen.init()
    return reigen.rank(), reigen.size(), reigen.local_rank(), socket.gethostname()
def total(number):
    import numpy, reigen
    reigen.init()
    return reigen.allreduce(numpy.full(2, number + reigen.rank()), op=reigen.Sum).tolist()
def hang():
    import reigen
    reigen.init()
    print("READY", reigen.rank(), os.getpid(), flush=True)
    time.sleep(600)
def caught(call, *errors):
    started = time.monotonic()
    try:
        call()
    except errors or Exception as error:
        cause = type(error.__cause__).__name__ if error.__cause__ else None
        facts = {name: getattr(error, name, None) for name in ("rank", "host", "signum")}
        return {"type": type(error).__name__, "text": str(error), "cause": cause,
                "seconds": time.monotonic() - started, "is_value_error": isinstance(error, ValueError), **facts}
    return {"type": None}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    directory = tmp_path_factory.mktemp("ray")
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts(3, shared=[directory]))
        except Unavailable as error:
            pytest.skip(str(error))
        yield RayCluster(hosts, directory)


def facts_of(cluster: RayCluster, program: str, *, is_empty: bool = True, **options: object) -> dict[str, object]:
    """Runs a driver; what it has said, in one table."""
    code, out = cluster.run(BEGINNING + program, **options)  # type: ignore[arg-type]
    assert code == 0, out
    if is_empty:
        cluster.wait_until_empty()
    found: dict[str, object] = {}
    for line in out.splitlines():
        if line.startswith("FACT "):
            found |= json.loads(line.removeprefix("FACT "))
    return {**found, "out": out}


def wait_until_ready(driver: HostProcess) -> None:
    """Waits until three ranks of `hang` have said that they are there."""
    wait_for(lambda: driver.output()[0].count("READY") == 3, "the ranks")


SERVERS = """
def on_servers(timeline):
    import numpy, reigen
    reigen.init()
    if timeline:
        reigen.start_timeline(timeline)
        reigen.allreduce(numpy.ones(2), name="seen")
        reigen.stop_timeline()
    with reigen.kv.create("dist_sync") as store:
        summed = numpy.empty(4, "f4")
        store.init("w", numpy.zeros(4, "f4"))
        store.push("w", numpy.full(4, store.rank + 1, "f4"))
        store.pull("w", summed)
        return store.num_workers, float(summed[0]), os.environ["DMLC_NUM_SERVER"]
"""


def test_parameter_servers_and_a_timeline(cluster: RayCluster):
    timeline = cluster.directory / "timeline.json"
    facts = facts_of(
        cluster,
        SERVERS
        + f"say(results=reigen.ray.run(on_servers, ({str(timeline)!r},), num_workers=3, num_servers=2))\n"
        + """
with_servers = RayExecutor(num_workers=2, num_servers=1)
with_servers.start()
say(again=with_servers.run(on_servers, [""]), total=with_servers.run(total, [1]))
with_servers.shutdown()
""",
    )
    assert facts["results"] == [[3, 6.0, "2"]] * 3
    assert facts["again"] == [[2, 3.0, "1"]] * 2
    assert facts["total"] == [[3, 3]] * 2
    assert "seen" in timeline.read_text()


def test_the_whole_surface_as_horovod_has_it(cluster: RayCluster):
    facts = facts_of(
        cluster,
        """
from horovod.ray import RayExecutor, RayHostDiscovery, ray_logger
say(slots=RayHostDiscovery(cpus_per_worker=2).find_available_hosts_and_slots())
class Counter:
    def __init__(self, start, step=1):
        self.number, self.step = start, step
    def add(self):
        self.number += self.step
        return self.number
def log(factor, plus):
    import horovod.ray, reigen
    reigen.init()
    horovod.ray.ray_logger.log({"rank": reigen.rank(), "value": factor * reigen.rank() + plus})
    return os.environ["MINE"]
executor = RayExecutor(RayExecutor.create_settings(timeout_s=30), num_hosts=3, num_workers_per_host=2)
executor.start(Counter, [10], {"step": 5}, extra_env_vars={"MINE": "a b"})
say(places=executor.run(place))
seen = []
say(mine=executor.run(log, [ray.put(10)], {"plus": 1}, callbacks=[seen.append]))
say(seen=sorted(note["value"] for note in seen))
say(added=executor.execute(Counter.add), single=executor.execute_single(Counter.add))
say(numbers=executor.execute(lambda counter: counter.number))
refs = executor.run_remote(total, [ray.put(1)])
say(refs=[type(ref).__name__ for ref in refs][0], totals=ray.get(refs))
say(twice=caught(executor.start))
executor.shutdown()
executor.shutdown()
say(after=caught(lambda: executor.run(place)))
# another one after it, packed, in the resources that were given back
executor = RayExecutor(num_workers=CPUS * 3)
executor.start()
say(all=executor.run(total, [0]))
refs = executor.run_remote(hang)
executor.shutdown()
say(cancelled=caught(lambda: ray.get(refs)))
""".replace("CPUS", str(CPUS)),
        env={"PYTHONPATH": f"{DIRECTORY}:{Path(__file__).parents[3] / 'src'}"},
    )
    assert facts["slots"] == {host.address: CPUS // 2 for host in cluster.hosts}
    places = facts["places"]
    assert [place[:3] for place in places] == [[rank, 6, rank % 2] for rank in range(6)]  # type: ignore[attr-defined]
    assert [place[3] for place in places][::2] == [place[3] for place in places][1::2]  # type: ignore[attr-defined]
    assert {place[3] for place in places} == {host.name for host in cluster.hosts}  # type: ignore[attr-defined]
    assert facts["mine"] == ["a b"] * 6
    assert facts["seen"] == [1, 11, 21, 31, 41, 51]
    assert (facts["added"], facts["single"], facts["numbers"]) == ([15] * 6, 20, [20, *[15] * 5])
    assert (facts["refs"], facts["totals"]) == ("ObjectRef", [[21.0, 21.0]] * 6)
    assert facts["twice"]["type"] == facts["after"]["type"] == "LaunchError"  # type: ignore[index]
    num = CPUS * 3
    assert "shutdown() was called before" in facts["cancelled"]["text"]  # type: ignore[index]
    assert facts["all"] == [[num * (num - 1) / 2] * 2] * num


def test_failures_reach_the_driver_soon_with_rank_host_and_traceback(cluster: RayCluster):
    facts = facts_of(
        cluster,
        """
import threading
def raises():
    import reigen
    reigen.init()
    if reigen.rank() == 1:
        raise KeyError("no such thing")
    time.sleep(600)
def dies():
    import reigen
    reigen.init()
    reigen.barrier()
    if reigen.rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
for name, function in (("raised", raises), ("died", dies)):
    executor = RayExecutor(num_hosts=3)
    executor.start()
    executor.run(place)
    say(**{name: caught(lambda: executor.run(function))})
    executor.shutdown()
executor = RayExecutor(num_hosts=3)
executor.start()
hosts = executor.run(socket.gethostname)
actor = executor._job._job._placement._actors[1]
threading.Timer(1, lambda: ray.kill(actor)).start()
say(actor=caught(lambda: executor.run(hang)), hosts=hosts)
executor.shutdown()
say(remote=caught(lambda: ray.get(reigen.ray.RayExecutor(num_workers=1).run_remote(hang))))
""",
    )
    raised, died, actor = facts["raised"], facts["died"], facts["actor"]
    assert (raised["type"], raised["rank"], raised["cause"]) == ("RankFailedError", 1, "KeyError")  # type: ignore[index]
    assert "raise KeyError" in raised["text"]  # type: ignore[index]
    assert raised["host"] in {host.name for host in cluster.hosts}  # type: ignore[index]
    assert (died["type"], died["rank"], died["signum"]) == ("RankFailedError", 2, 9)  # type: ignore[index]
    assert actor["type"] == "RankFailedError"  # type: ignore[index]
    assert actor["host"] == facts["hosts"][1]  # type: ignore[index]
    assert "ray.kill" in actor["text"]  # type: ignore[index]
    print({name: facts[name]["seconds"] for name in ("raised", "died", "actor")})  # type: ignore[index]


def test_what_cannot_be_is_said_at_once_or_in_time(cluster: RayCluster):
    facts = facts_of(
        cluster,
        """
settings = RayExecutor.create_settings(placement_group_timeout_s=1)
say(many=caught(RayExecutor(settings, num_workers=99).start))
say(gpu=caught(RayExecutor(settings, num_workers=1, use_gpu=True, gpus_per_worker=5).start))
say(pickle=caught(lambda: reigen.ray.run(lambda lock: None, [__import__("threading").Lock()], num_workers=1)))
ray.shutdown()
say(no_ray=caught(RayExecutor(settings, num_workers=1).start))
""",
    )
    many, gpu = facts["many"], facts["gpu"]
    assert many["type"] == "TimeoutError"  # type: ignore[index]
    assert f"the whole cluster has CPU {3 * CPUS}" in many["text"]  # type: ignore[index]
    assert gpu["is_value_error"]  # type: ignore[index]
    assert f"no node of the cluster has more than {GPUS}" in gpu["text"]  # type: ignore[index]
    assert facts["pickle"]["type"] == "UnsupportedTypeError"  # type: ignore[index]
    assert facts["no_ray"]["type"] == "RuntimeError"  # type: ignore[index]
    assert "ray.init()" in facts["no_ray"]["text"]  # type: ignore[index]


def test_workers_of_a_node_see_all_gpus_of_the_job_there(cluster: RayCluster):
    facts = facts_of(
        cluster,
        """
def visible():
    import reigen
    reigen.init()
    return reigen.local_rank(), socket.gethostname(), os.environ["CUDA_VISIBLE_DEVICES"]
held = ray.remote(num_gpus=1)(lambda: (os.environ["CUDA_VISIBLE_DEVICES"], time.sleep(600))[0]).remote()
while ray.available_resources().get("GPU") != 3:
    time.sleep(0.05)
say(packed=reigen.ray.run(visible, num_workers=2, gpus_per_worker=1))
say(hosts=reigen.ray.run(visible, num_hosts=1, num_workers_per_host=3, gpus_per_worker=1))
ray.cancel(held, force=True)
""",
    )
    host = cluster.hosts[2].name
    for places, size in ((facts["packed"], 2), (facts["hosts"], 3)):
        assert [place[:2] for place in places] == [[rank, host] for rank in range(size)]  # type: ignore[attr-defined]
        (gpus,) = {place[2] for place in places}  # type: ignore[attr-defined]
        assert len({*gpus.split(",")} & {*map(str, range(GPUS))}) == size


def test_a_trial_uses_the_placement_group_that_it_is_in(cluster: RayCluster):
    facts = facts_of(
        cluster,
        f"""
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
group = placement_group([{{"CPU": {CPUS}}}] * 3, strategy="STRICT_SPREAD")
ray.get(group.ready())
strategy = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
trial = ray.remote(lambda **options: reigen.ray.run(place, placement_timeout=options.pop("seconds"), **options))
trial = trial.options(num_cpus=1, scheduling_strategy=strategy)
say(found=ray.get(trial.remote(num_workers=2, seconds=60)))
say(outside=caught(lambda: ray.get(trial.remote(num_workers=2, seconds=1, use_current_placement_group=False))))
say(too_many=caught(lambda: ray.get(trial.remote(num_workers=3 * {CPUS} + 1, seconds=1))))
ray.util.remove_placement_group(group)
""",
    )
    assert [place[:2] for place in facts["found"]] == [[0, 2], [1, 2]]  # type: ignore[attr-defined]
    # The group has all there is: what is not given out of it is given never.
    assert "TimeoutError" in facts["outside"]["type"]  # type: ignore[index]
    assert "TimeoutError" in facts["too_many"]["type"]  # type: ignore[index]


def test_secrets_are_nowhere_and_the_runtime_environment_reaches_the_ranks(cluster: RayCluster):
    facts = facts_of(
        cluster,
        """
ray.shutdown()
os.environ["OTHER"] = "of the driver"
ray.init(log_to_driver=False, logging_level="error", runtime_env={"env_vars": {"OTHER": "of the environment"}})
def look():
    import glob
    secret = os.environ["REIGEN_SECRET"].encode()
    own = os.path.realpath("/proc/self")
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
        try:
            data = open(path, "rb").read()
        except OSError:
            continue
        if secret in data and b"REIGEN_RANK" not in data:
            found.append((path, data[:200].decode(errors="replace")))
    for directory, _, files in os.walk("/run/ray"):
        for name in files:
            path = os.path.join(directory, name)
            if os.path.isfile(path) and secret in open(path, "rb").read():
                found.append(path)
    return found, os.environ["OTHER"]
say(found=reigen.ray.run(look, num_hosts=3))
""",
    )
    assert facts["found"] == [[[], "of the environment"]] * 3


def test_nothing_is_left_of_a_driver_that_was_killed_and_two_jobs_do_not_meet(cluster: RayCluster):
    program = BEGINNING + "say(started=True)\nreigen.ray.run(hang, num_hosts=3)\n"
    with closing(cluster.start(program)) as one, closing(cluster.start(program)) as other:
        wait_until_ready(one)
        wait_until_ready(other)
        both = len(cluster.left_of_jobs())
        os.kill(one.pid, signal.SIGKILL)
        wait_for(lambda: len(cluster.left_of_jobs()) == both // 2, "the end of the first job, and of no other")
        os.kill(other.pid, signal.SIGKILL)
    cluster.wait_until_empty()


def test_nothing_is_left_of_drivers_that_end_without_a_word(cluster: RayCluster):
    program = "executor = RayExecutor(num_hosts=3)\nexecutor.start()\nsay(places=executor.run(place))\n"
    assert len(facts_of(cluster, program)["places"]) == 3  # type: ignore[arg-type]
    client = {"RAY_ADDRESS": f"ray://{cluster.hosts[0].address}:10001", "RAY_CLIENT_RECONNECT_GRACE_PERIOD": "5"}
    with closing(cluster.start(BEGINNING + program + "say(done=1)\ntime.sleep(600)", env=client)) as driver:
        wait_for(lambda: '"done"' in driver.output()[0] or driver.returncode is not None, "the job of the client", 120)
        assert driver.returncode is None, driver.output()
        assert cluster.left_of_jobs()
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    cluster.wait_until_empty(60)


#: What is killed in the middle of a job, by a word of its command line ("": the driver), and how.
ENDS = [
    (word, signal.SIGKILL)
    for word in ("", "reigen.runner.task", "reigen.launch.agent", "AgentActor", "launcher_process")
]
ENDS += [("", signal.SIGINT), ("", signal.SIGTERM), ("reigen.launch.agent", signal.SIGTERM)]


def test_nothing_is_left_after_any_end(cluster: RayCluster):
    """RAY_ENDS=100 for more than there is time for in every run."""
    chances = random.Random(int(os.environ.get("RAY_ENDS_SEED", "19")))
    for number in range(int(os.environ.get("RAY_ENDS", "4"))):
        word, signum = chances.choice(ENDS)
        print(f"end {number}: {signum.name} for {word or 'the driver'}")
        with closing(cluster.start(BEGINNING + "reigen.ray.run(hang, num_hosts=3)\n")) as driver:
            wait_until_ready(driver)
            targets = cluster.processes(word) if word else [driver.pid]
            os.kill(chances.choice(targets), signum)
            driver.wait()
        cluster.wait_until_empty()
    facts = facts_of(
        cluster,
        "say(free=ray.available_resources()['CPU'], places=reigen.ray.run(place, num_workers=CPUS * 3))".replace(
            "CPUS", str(CPUS)
        ),
    )
    assert len(facts["places"]) == 3 * CPUS  # type: ignore[arg-type]  # all of it was given back


TRAINING = """
import os, signal, sys, tempfile, time
import ray, ray.train
from ray.train import (Checkpoint, CheckpointConsistencyMode, FailureConfig, RunConfig, ScalingConfig,
                       get_all_reported_checkpoints)
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from reigen.ray import ReigenConfig
ray.init(logging_level="error")

def train(config):
    import torch
    import reigen.torch as hvd
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first, checkpoint = 0, ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            state = torch.load(directory + "/state.pt")
        model.load_state_dict(state["model"])
        first = state["epoch"] + 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for epoch in range(first, 4):
        if epoch == 2 and checkpoint is None and hvd.rank() == 1:
            get_all_reported_checkpoints(consistency_mode=CheckpointConsistencyMode.COMMITTED)  # waits for Ray
            os.kill(os.getpid(), signal.SIGKILL)
        inputs = torch.full((8, 4), 1.0 + ray.train.get_context().get_world_rank())
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        facts = {"epoch": epoch, "first": first, "size": hvd.size(), "environ": os.environ["MINE"],
                 "weights": hvd.allgather(model.weight.detach()).tolist(), "local": hvd.local_rank()}
        with tempfile.TemporaryDirectory() as directory:
            torch.save({"model": model.state_dict(), "epoch": epoch}, directory + "/state.pt")
            ray.train.report(facts, checkpoint=Checkpoint.from_directory(directory) if hvd.rank() == 0 else None)

trainer = DataParallelTrainer(
    train,
    backend_config=ReigenConfig(environ={"MINE": "yes"}),
    scaling_config=ScalingConfig(num_workers=3),
    run_config=RunConfig(storage_path=os.getcwd() + "/store", failure_config=FailureConfig(max_failures=1)),
)
result = trainer.fit()
import json
print("FACT " + json.dumps(dict(metrics=result.metrics, error=repr(result.error))))
"""


def test_a_training_of_ray_train_goes_on_from_its_checkpoint_after_a_death(cluster: RayCluster):
    code, out = cluster.run(TRAINING, timeout=150)
    assert code == 0, out
    facts = json.loads(next(line for line in out.splitlines() if line.startswith("FACT ")).removeprefix("FACT "))
    metrics = facts["metrics"]
    assert (metrics["epoch"], metrics["size"], metrics["environ"]) == (3, 3, "yes")
    assert metrics["first"] == 2
    assert metrics["weights"][0] == metrics["weights"][1] == metrics["weights"][2]
    assert facts["error"] == "None"


def test_the_python_blocks_of_the_documentation(cluster: RayCluster):
    code, out = cluster.run("from tests.docs.run_programs import main\nmain('ray')\n", timeout=150)
    assert code == 0, out
    assert {f"ran {program.name}" for program in PROGRAMS["ray"]} <= set(out.splitlines()), out
    cluster.wait_until_empty()


def test_a_driver_outside_of_the_cluster_has_the_same_surface(cluster: RayCluster):
    facts = facts_of(
        cluster,
        """
executor = RayExecutor(num_hosts=3)
seen = []
executor.start(dict, [], {"a": 1})
def log():
    reigen.ray.ray_logger.log({"a": 1})
    return 7
say(places=executor.run(place), logged=executor.run(log, callbacks=[seen.append]), seen=seen)
say(totals=ray.get(executor.run_remote(total, [ray.put(1)])), single=executor.execute_single(lambda state: state["a"]))
def raises():
    raise KeyError("no such thing")
say(raised=caught(lambda: executor.run(raises)))
executor.shutdown()
""",
        env={"RAY_ADDRESS": f"ray://{cluster.hosts[0].address}:10001"},
    )
    assert [place[:2] for place in facts["places"]] == [[0, 3], [1, 3], [2, 3]]  # type: ignore[attr-defined]
    assert (facts["logged"], facts["seen"]) == ([7] * 3, [{"a": 1}] * 3)
    assert (facts["totals"], facts["single"]) == ([[6.0, 6.0]] * 3, 1)
    assert (facts["raised"]["type"], facts["raised"]["cause"]) == ("RankFailedError", "KeyError")  # type: ignore[index]


def test_a_node_that_crashes_is_named(cluster: RayCluster):
    """The last one: the cluster has a node less after it."""
    lost = cluster.hosts[2]
    program = BEGINNING + "say(lost=caught(lambda: reigen.ray.run(hang, num_hosts=3)))\n"
    with closing(cluster.start(program, env={"REIGEN_PEER_TIMEOUT": "4"})) as driver:
        wait_until_ready(driver)
        lost.crash()
        assert driver.wait(60) == 0
        out = driver.output()[0]
    facts = json.loads(next(line for line in out.splitlines() if line.startswith("FACT ")).removeprefix("FACT "))
    assert facts["lost"]["type"] == "RankFailedError"
    assert facts["lost"]["host"] == lost.name
