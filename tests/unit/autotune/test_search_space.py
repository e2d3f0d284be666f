"""What may be tuned, and what would change bits or is the user's."""

from __future__ import annotations

from reigen.autotune.search_space import ParameterPoint, make_search_space

MIB = 1 << 20
ONE_HOST = ParameterPoint(128 * MIB, 16 * MIB)
HOSTS = ParameterPoint(128 * MIB, 4 * MIB, "ordered", 1)


def values(base: ParameterPoint, **options: object) -> dict[str, set[object]]:
    space = make_search_space(base, {}, **options)  # type: ignore[arg-type]
    return {dimension.name: set(dimension.values) for dimension in space.dimensions}


def test_on_one_host_there_is_no_network_to_tune() -> None:
    assert set(values(ONE_HOST)) == {"fusion_threshold_bytes", "bucket_bytes"}


def test_no_algorithm_adds_in_another_order_unless_that_is_allowed() -> None:
    for size in (2, 4, 8, 64):
        algorithms = values(HOSTS, network_ranks=size, num_sockets=4)["tcp_algorithm"]
        assert algorithms == {"ordered", "direct"} | ({"latency"} if size <= 3 else set())
    ring = values(ParameterPoint(1, 1, "auto", 1), network_ranks=9, num_sockets=4, allows_ring=True)
    assert {"auto", "ring"} <= ring["tcp_algorithm"]
    assert "ordered" not in ring["tcp_algorithm"]


def test_the_report_says_that_the_ring_was_left_out() -> None:
    assert "another order" in make_search_space(HOSTS, {}, network_ranks=8).fixed["ring"]
    assert "ring" not in make_search_space(HOSTS, {}, network_ranks=7).fixed


def test_what_the_user_has_set_is_not_tuned() -> None:
    origins = {"bucket_bytes": "REIGEN_BUCKET_BYTES", "deadline_seconds": "REIGEN_DEADLINE"}
    space = make_search_space(HOSTS, origins, network_ranks=2, num_sockets=2)
    assert {dimension.name for dimension in space.dimensions} == {
        "fusion_threshold_bytes",
        "tcp_algorithm",
        "tcp_sockets",
    }
    assert space.fixed == {"bucket_bytes": "set by REIGEN_BUCKET_BYTES"}
    assert {point.bucket_bytes for point in space.points()} == {4 * MIB}


def test_no_more_sockets_are_used_than_were_made() -> None:
    assert values(HOSTS, network_ranks=2, num_sockets=2)["tcp_sockets"] == {1, 2}


def test_a_base_of_its_own_is_a_point_like_the_others() -> None:
    base = ParameterPoint(3 * MIB, 5 * MIB)
    space = make_search_space(base, {})
    assert space.points()[0] == base
    assert space.contains(base)
    assert space.coordinates(base)[0] == space.coordinates(ParameterPoint(2 * MIB, 5 * MIB))[0] + 1 / 8


def test_sizes_that_make_no_difference_are_left_out() -> None:
    space = make_search_space(ONE_HOST, {}).limited(3 * MIB)
    sizes = {dimension.name: dimension.values for dimension in space.dimensions}
    assert sizes["fusion_threshold_bytes"] == (MIB, 2 * MIB, 128 * MIB), "the base holds all of a step"
    assert sizes["bucket_bytes"] == (MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB), "and the first bucket is a quarter"
    assert make_search_space(ONE_HOST, {}).limited(100).dimensions == ()
    assert make_search_space(ONE_HOST, {}).limited(0) == make_search_space(ONE_HOST, {}), "nothing is known"


def test_coordinates_tell_points_apart() -> None:
    space = make_search_space(HOSTS, {}, network_ranks=3, num_sockets=4)
    assert len({space.coordinates(point) for point in space.points()}) == len(space.points())
    assert all(0 <= number <= 1 for point in space.points() for number in space.coordinates(point))
