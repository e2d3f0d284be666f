"""What is asked of Ray, and what is made of its answers; without Ray."""

from __future__ import annotations

import pickle

import pytest

from reigen.errors import ConfigError
from reigen.ray import ElasticRayExecutor, RayExecutor
from reigen.ray.settings import (
    NodeSeats,
    Place,
    PlacementRequest,
    RaySettings,
    check_gpus,
    count_slots,
    explain_death,
    explain_timeout,
    group_by_node,
    place_ranks,
    rank_variables,
    request_elastic,
    request_workers,
)


def node(address: str, *, alive: bool = True, **resources: float) -> dict[str, object]:
    return {"Alive": alive, "NodeManagerAddress": address, "Resources": resources}


def test_workers_have_a_bundle_each_and_are_packed():
    request = request_workers(num_workers=4, cpus_per_worker=2)
    assert (request.num_bundles, request.bundle, request.strategy) == (4, {"CPU": 2}, "PACK")
    assert str(request) == "4 bundles of {'CPU': 2}, PACK"


def test_hosts_have_a_bundle_each_and_are_spread():
    request = request_workers(num_hosts=3, num_workers_per_host=2, use_gpu=True, gpus_per_worker=4)
    assert (request.num_workers, request.num_bundles) == (6, 3)
    assert (request.bundle, request.strategy) == ({"CPU": 2, "GPU": 8}, "STRICT_SPREAD")


def test_a_gpu_is_one_unless_more_are_wanted():
    assert request_workers(num_workers=1, use_gpu=True).bundle == {"CPU": 1, "GPU": 1}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "how many"),
        ({"num_workers": 2, "max_workers": 3}, "without min_workers"),
        ({"min_workers": 0, "max_workers": 3}, "without min_workers"),
        ({"num_workers": 2, "min_workers": 2}, "give one of them"),
        ({"num_workers": 2, "num_hosts": 2}, "give one of them"),
        ({"num_workers": 2, "gpus_per_worker": 1}, "use_gpu=True"),
        ({"num_workers": 2, "use_gpu": True, "gpus_per_worker": 0}, "at least 1, not 0"),
        ({"num_workers": 0}, "num_workers must be at least 1, not 0"),
        ({"num_workers": "two"}, "must be a number, not 'two'"),
        ({"num_hosts": 2, "num_workers_per_host": 0}, "num_workers_per_host must be at least 1"),
        ({"num_workers": 2, "cpus_per_worker": -1}, "cpus_per_worker must be a number"),
        ({"num_workers": 2, "cpus_per_worker": 0}, "cannot place what needs nothing"),
        ({"min_workers": 4, "max_workers": 2}, "min_workers 4 is more than max_workers 2"),
        ({"min_workers": 2, "cooldown_range": [5]}, "cooldown_range 5: it must be two numbers"),
        ({"min_workers": 2, "reset_limit": -1}, "the reset limit must be at least 0"),
        ({"min_workers": 2, "override_discovery": False}, "needs settings.discovery"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, object], words: str):
    with pytest.raises(ValueError, match=words):
        RayExecutor(RayExecutor.create_settings(), **arguments)  # type: ignore[arg-type]  # a user's mistakes


def test_bounds_make_an_elastic_job():
    options = request_elastic(min_workers=2, max_workers=4, reset_limit=3, cooldown_range=(1, 5), elastic_timeout=7)
    assert options is not None
    assert (options.min_ranks, options.max_ranks, options.reset_limit, options.timeout_seconds) == (2, 4, 3, 7)
    assert (options.cooldown.least_seconds, options.cooldown.max_failures) == (1, None)
    assert request_elastic(min_workers=None) is None
    assert RayExecutor(None, min_workers=3, max_workers=3).num_workers == 3


def test_settings_can_be_pickled_and_ignore_ssh():
    settings = RayExecutor.create_settings(5, ssh_identity_file="key", ssh_str="secret", nics={"eth0"})
    assert pickle.loads(pickle.dumps(settings)) == settings == RaySettings(5, 100, ("eth0",))
    assert "secret" not in repr(settings)
    with pytest.raises(ConfigError, match="timeout_s must be a number of seconds greater than 0"):
        RayExecutor.create_settings(timeout_s=0)


def test_the_older_executor_is_deprecated():
    settings = ElasticRayExecutor.create_settings(min_np=2, max_np=4, reset_limit=3, some_other=1)
    with pytest.warns(DeprecationWarning, match="RayExecutor"):
        ElasticRayExecutor(settings)
    with pytest.warns(DeprecationWarning, match="RayExecutor"), pytest.raises(ConfigError, match="min_workers 4"):
        ElasticRayExecutor(ElasticRayExecutor.create_settings(4, 2))


def test_more_gpus_than_any_node_has_are_refused():
    nodes = [node("a", CPU=8, GPU=2), node("b", CPU=8), node("c", alive=False, GPU=8)]
    check_gpus(PlacementRequest(4, 1, 1, 2), nodes)
    with pytest.raises(
        ValueError, match="workers with 4 GPUs were asked for, and no node of the cluster has more than 2"
    ):
        check_gpus(PlacementRequest(4, 1, 1, 4), nodes)
    with pytest.raises(ValueError, match="hosts with 4 GPUs"):
        check_gpus(PlacementRequest(4, 2, 1, 2, spread=True), nodes)


def test_a_timeout_says_what_was_asked_for_and_what_there_is():
    text = explain_timeout(PlacementRequest(9), 100, {"CPU": 2.0, "node:10.0.0.1": 1.0}, {"CPU": 8.0, "memory": 1e9})
    assert "within 100 s what was asked for: 9 bundles of {'CPU': 1}, PACK" in text
    assert "Available: CPU 2; the whole cluster has CPU 8" in text
    assert "Available: nothing" in explain_timeout(PlacementRequest(9), 100, {}, {})


def test_discovery_counts_what_each_living_node_could_have():
    nodes = [node("a", CPU=8, GPU=2), node("b", CPU=3), node("c", alive=False, CPU=8), node("d", GPU=8), node("e")]
    assert count_slots(nodes, use_gpu=False, cpus_per_worker=2, gpus_per_worker=1) == {"a": 4, "b": 1}
    assert count_slots(nodes, use_gpu=True, cpus_per_worker=2, gpus_per_worker=1) == {"a": 2}


def test_places_become_one_seat_a_node_in_the_order_of_ranks():
    places = [
        Place("n2", "10.0.0.2", "h2", 1, ("3",)),
        Place("n1", "10.0.0.1", "h1", 1, ("10", "9")),
        Place("n2", "10.0.0.2", "h2", 2, ("1", "GPU-a")),
    ]
    assert group_by_node(places) == [
        NodeSeats("h2", "10.0.0.2", 3, (0, 2), ("1", "3", "GPU-a")),
        NodeSeats("h1", "10.0.0.1", 1, (1,), ("9", "10")),
    ]


def test_nodes_of_the_same_name_are_told_apart():
    by_address = group_by_node([Place("n1", "10.0.0.1", "h", 1), Place("n2", "10.0.0.2", "h", 1)])
    assert [seat.name for seat in by_address] == ["10.0.0.1", "10.0.0.2"]
    by_node = group_by_node([Place("abcdef12", "10.0.0.1", "h", 1), Place("abcdef34", "10.0.0.1", "h", 1)])
    assert [seat.name for seat in by_node] == ["h-abcdef1", "h-abcdef3"]


def test_rays_cause_of_death_is_one_line():
    text = """The actor died unexpectedly before finishing this task.
\tclass_name: AgentActor
\tactor_id: 0f5
\tpid: 12
\tnamespace: 8e1
\tip: 10.77.0.2
The actor died because its node has died. Node Id: 3f
\tthe actor's node was terminated unexpectedly: health check failed"""
    assert explain_death(text) == (
        "The actor died because its node has died. Node Id: 3f the actor's node was terminated unexpectedly: "
        "health check failed"
    )
    assert explain_death("") == "Ray does not say why its actor has died"


def test_workers_of_ray_train_have_their_places_by_node():
    places = place_ranks(["a", "a", "b", "c", "c"])
    numbers = [(each.rank, each.size, each.local_rank, each.local_size) for each in places]
    assert numbers == [(0, 5, 0, 2), (1, 5, 1, 2), (2, 5, 0, 1), (3, 5, 0, 2), (4, 5, 1, 2)]
    assert [(each.cross_rank, each.cross_size) for each in places] == [(0, 3), (0, 2), (1, 3), (2, 3), (1, 2)]
    variables = rank_variables(places[4])
    assert (variables["REIGEN_RANK"], variables["REIGEN_CROSS_SIZE"], variables["HOROVOD_LOCAL_RANK"]) == (
        "4",
        "2",
        "1",
    )


def test_workers_of_one_node_that_are_apart_are_refused():
    with pytest.raises(ConfigError, match="a, b, a"):
        place_ranks(["a", "b", "a"])
