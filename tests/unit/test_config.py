"""Knobs: defaults, variables, origins, errors."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import reigen
from reigen.config import VARIABLES as NAMES
from reigen.config import Config, format_changed_knobs, format_ignored_variables, format_unknown_variables, load_config
from reigen.errors import ConfigError

VARIABLES = {
    "REIGEN_DEADLINE": ("deadline_seconds", "1.5", 1.5),
    "REIGEN_START_TIMEOUT": ("start_timeout_seconds", "7", 7.0),
    "HOROVOD_START_TIMEOUT": ("start_timeout_seconds", "8", 8.0),
    "REIGEN_FUSION_THRESHOLD": ("fusion_threshold_bytes", "0", 0),
    "HOROVOD_FUSION_THRESHOLD": ("fusion_threshold_bytes", "1024", 1024),
    "REIGEN_CACHE_CAPACITY": ("cache_capacity", "0", 0),
    "HOROVOD_CACHE_CAPACITY": ("cache_capacity", "5", 5),
    "HOROVOD_GLOO_TIMEOUT_SECONDS": ("start_timeout_seconds", "90", 90.0),
    "REIGEN_BUCKET_BYTES": ("bucket_bytes", "4096", 4096),
    "REIGEN_DISABLE_GROUP_FUSION": ("disable_group_fusion", "1", True),
    "HOROVOD_DISABLE_GROUP_FUSION": ("disable_group_fusion", "1", True),
    "REIGEN_DYNAMIC_PROCESS_SETS": ("dynamic_process_sets", "true", True),
    "HOROVOD_DYNAMIC_PROCESS_SETS": ("dynamic_process_sets", "1", True),
    "REIGEN_TIMELINE": ("timeline", "/tmp/a.json", "/tmp/a.json"),
    "HOROVOD_TIMELINE": ("timeline", "DYNAMIC", "DYNAMIC"),
    "REIGEN_TIMELINE_MARK_CYCLES": ("timeline_mark_cycles", "yes", True),
    "HOROVOD_TIMELINE_MARK_CYCLES": ("timeline_mark_cycles", "1", True),
    "REIGEN_STALL_CHECK_DISABLE": ("stall_check_disable", "on", True),
    "HOROVOD_STALL_CHECK_DISABLE": ("stall_check_disable", "1", True),
    "REIGEN_STALL_CHECK_TIME_SECONDS": ("stall_check_seconds", "0.5", 0.5),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": ("stall_check_seconds", "10", 10.0),
    "REIGEN_STALL_SHUTDOWN_TIME_SECONDS": ("stall_shutdown_seconds", "120", 120.0),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": ("stall_shutdown_seconds", "2", 2.0),
    "REIGEN_AUTOTUNE": ("autotune", "1", True),
    "HOROVOD_AUTOTUNE": ("autotune", "true", True),
    "REIGEN_AUTOTUNE_LOG": ("autotune_log", "a.csv", "a.csv"),
    "HOROVOD_AUTOTUNE_LOG": ("autotune_log", "b.csv", "b.csv"),
    "REIGEN_AUTOTUNE_WARMUP_SAMPLES": ("autotune_warmup_samples", "0", 0),
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": ("autotune_warmup_samples", "5", 5),
    "REIGEN_AUTOTUNE_STEPS_PER_SAMPLE": ("autotune_steps_per_sample", "1", 1),
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": ("autotune_steps_per_sample", "20", 20),
    "REIGEN_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": ("autotune_bayes_opt_max_samples", "7", 7),
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": ("autotune_bayes_opt_max_samples", "8", 8),
    "REIGEN_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": ("autotune_gaussian_process_noise", "0.5", 0.5),
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": ("autotune_gaussian_process_noise", "0.8", 0.8),
    "REIGEN_AUTOTUNE_SECONDS": ("autotune_seconds", "120", 120.0),
    "REIGEN_AUTOTUNE_ALLOW_RING": ("autotune_allow_ring", "1", True),
    "REIGEN_CHECK_REPLICAS": ("check_replicas", "50", 50),
    "REIGEN_THREAD_AFFINITY": ("thread_affinity", "3", (3,)),
    "HOROVOD_THREAD_AFFINITY": ("thread_affinity", "0,2, 4", (0, 2, 4)),
    "REIGEN_LOG": ("log_level", "INFO", "info"),
    "REIGEN_LOG_LEVEL": ("log_level", "debug", "debug"),
    "HOROVOD_LOG_LEVEL": ("log_level", "fatal", "fatal"),
    "REIGEN_LOG_HIDE_TIME": ("log_hide_time", "1", True),
    "HOROVOD_LOG_HIDE_TIME": ("log_hide_time", "1", True),
    "REIGEN_PLANE": ("backend", "shm", "shm"),
    "REIGEN_NETWORK_INTERFACES": ("network_interfaces", "eth0", ("eth0",)),
    "HOROVOD_GLOO_IFACE": ("network_interfaces", "ib0, eth1", ("ib0", "eth1")),
    "DMLC_INTERFACE": ("network_interfaces", "lo", ("lo",)),
    "SM_NETWORK_INTERFACE_NAME": ("network_interfaces", "eth0", ("eth0",)),
    "REIGEN_TLS": ("tls", "1", True),
    "REIGEN_TCP_ALGORITHM": ("tcp_algorithm", "Ring", "ring"),
    "REIGEN_TCP_SOCKETS": ("tcp_sockets", "4", 4),
    "REIGEN_CONTROL_TREE_RANKS": ("control_tree_ranks", "2", 2),
    "REIGEN_NOTICE_GRACE": ("notice_grace_seconds", "0", 0.0),
    "REIGEN_PEER_TIMEOUT": ("peer_timeout_seconds", "5", 5.0),
    "REIGEN_HOST_ID": ("host_id", "rack-1", "rack-1"),
    "REIGEN_TENSORFLOW_NATIVE": ("tensorflow_native", "0", "0"),
    "REIGEN_JAX_NATIVE": ("jax_native", "0", "0"),
    "REIGEN_NCCL": ("nccl", "0", False),
    "REIGEN_KV_BIGARRAY_BOUND": ("kv_bigarray_bound", "5000", 5000),
    "MXNET_KVSTORE_BIGARRAY_BOUND": ("kv_bigarray_bound", "6000", 6000),
    "REIGEN_KV_SLICE_BYTES": ("kv_slice_bytes", "1MiB", 1 << 20),
    "REIGEN_KV_THREADS": ("kv_threads", "2", 2),
    "MXNET_KVSTORE_REDUCTION_NTHREADS": ("kv_threads", "8", 8),
    "REIGEN_KV_SHARED_MEMORY": ("kv_shared_memory", "0", False),
    "REIGEN_KV_VERBOSE": ("kv_verbose", "2", 2),
    "PS_VERBOSE": ("kv_verbose", "1", 1),
    "REIGEN_KV_RESEND": ("kv_resend", "1", True),
    "PS_RESEND": ("kv_resend", "1", True),
    "REIGEN_KV_RESEND_TIMEOUT": ("kv_resend_timeout_ms", "50", 50),
    "PS_RESEND_TIMEOUT": ("kv_resend_timeout_ms", "200", 200),
    "REIGEN_KV_DROP_MSG": ("kv_drop_percent", "2.5", 2.5),
    "PS_DROP_MSG": ("kv_drop_percent", "10", 10.0),
    "REIGEN_KV_HEARTBEAT_INTERVAL": ("kv_heartbeat_seconds", "0.5", 0.5),
    "PS_HEARTBEAT_INTERVAL": ("kv_heartbeat_seconds", "0", 0.0),
    "REIGEN_KV_HEARTBEAT_TIMEOUT": ("kv_heartbeat_timeout_seconds", "3", 3.0),
    "PS_HEARTBEAT_TIMEOUT": ("kv_heartbeat_timeout_seconds", "60", 60.0),
    "REIGEN_KV_ON_WORKER_LOSS": ("kv_on_worker_loss", "Continue", "continue"),
    "REIGEN_KV_SNAPSHOT_DIR": ("kv_snapshot_dir", "/tmp/s", "/tmp/s"),
    "REIGEN_KV_SNAPSHOT_SECONDS": ("kv_snapshot_seconds", "0", 0.0),
    "REIGEN_KV_REPLICAS": ("kv_replicas", "2", 2),
    "REIGEN_KV_UPDATE_ON_KVSTORE": ("kv_update_on_kvstore", "0", False),
    "MXNET_UPDATE_ON_KVSTORE": ("kv_update_on_kvstore", "0", False),
}


def test_without_variables_everything_is_at_its_default() -> None:
    assert load_config({}) == Config()
    assert load_config({}).origins == {}
    assert load_config({"HOME": "/", "REIGEN_RANK": "3"}) == Config()


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_variable_sets_its_knob_alone_and_is_its_origin(variable: str) -> None:
    knob, text, value = VARIABLES[variable]
    config = load_config({variable: text})
    assert getattr(config, knob) == value
    assert config.origins == {knob: variable}
    for other in {f.name for f in fields(Config)} - {knob, "origins"}:
        assert getattr(config, other) == getattr(Config(), other)


def test_every_variable_of_every_knob_is_tried_above() -> None:
    assert set(VARIABLES) == {variable for names in NAMES.values() for variable in names}
    assert set(NAMES) == {f.name for f in fields(Config)} - {"origins"}


def sources() -> Iterator[tuple[Path, ast.Module]]:
    package = Path(reigen.__file__).parent
    yield from ((path.relative_to(package), ast.parse(path.read_text())) for path in sorted(package.rglob("*.py")))


def test_every_variable_in_the_code_is_a_knobs_or_known_to_be_none() -> None:
    named = {
        node.value
        for _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and re.fullmatch(r"(REIGEN|HOROVOD)_[A-Z0-9_]+", str(node.value))
    }
    assert {"REIGEN_RENDEZVOUS", "HOROVOD_RANK", "REIGEN_DEADLINE"} <= named
    assert format_unknown_variables(dict.fromkeys(named, "1")) == []


def test_every_knob_is_read_of_a_configuration() -> None:
    attributes = [node for _, tree in sources() for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    read = {each.attr for each in attributes if re.search(r"(^|[._])config$|\bload_config\(", ast.unparse(each.value))}
    own = [each for path, tree in sources() if path.name == "config.py" for each in ast.walk(tree)]
    read |= {each.attr for each in own if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self"}
    assert set(NAMES) - read == set()


def test_reigens_variable_wins() -> None:
    config = load_config({"REIGEN_CACHE_CAPACITY": "1", "HOROVOD_CACHE_CAPACITY": "2"})
    assert (config.cache_capacity, config.origins["cache_capacity"]) == (1, "REIGEN_CACHE_CAPACITY")


def test_an_empty_variable_counts_as_unset() -> None:
    config = load_config({"REIGEN_CACHE_CAPACITY": "", "HOROVOD_CACHE_CAPACITY": "2", "REIGEN_PLANE": ""})
    assert config.origins == {"cache_capacity": "HOROVOD_CACHE_CAPACITY"}


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("REIGEN_DEADLINE", "0"),
        ("REIGEN_DEADLINE", "-1"),
        ("REIGEN_DEADLINE", "nan"),
        ("REIGEN_DEADLINE", "inf"),
        ("REIGEN_DEADLINE", "soon"),
        ("HOROVOD_START_TIMEOUT", "0"),
        ("REIGEN_FUSION_THRESHOLD", "-1"),
        ("HOROVOD_FUSION_THRESHOLD", "64XB"),
        ("HOROVOD_FUSION_THRESHOLD", "-1MB"),
        ("HOROVOD_FUSION_THRESHOLD", "64i"),
        ("REIGEN_TIMELINE_MARK_CYCLES", "2"),
        ("REIGEN_THREAD_AFFINITY", "1,"),
        ("REIGEN_THREAD_AFFINITY", "-1"),
        ("HOROVOD_LOG_LEVEL", "loud"),
        ("REIGEN_CACHE_CAPACITY", "1.5"),
        ("REIGEN_BUCKET_BYTES", "0"),
        ("REIGEN_TCP_SOCKETS", "0"),
        ("REIGEN_TCP_SOCKETS", "65"),
        ("REIGEN_KV_THREADS", "0"),
        ("REIGEN_KV_ON_WORKER_LOSS", "retry"),
        ("PS_DROP_MSG", "100"),
        ("PS_RESEND_TIMEOUT", "0.5"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{variable}={value}: expected "):
        load_config({variable: value})


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("64k", 64 << 10),
        ("64KiB", 64 << 10),
        ("64kB", 64_000),
        ("64MB", 64_000_000),
        ("64 MiB", 64 << 20),
        ("1.5G", 3 << 29),
        ("2b", 2),
    ],
)
def test_sizes_have_units(text: str, num_bytes: int) -> None:
    assert load_config({"HOROVOD_FUSION_THRESHOLD": text}).fusion_threshold_bytes == num_bytes


def test_arguments_win_and_say_so() -> None:
    config = load_config({"REIGEN_DYNAMIC_PROCESS_SETS": "0"}, {"dynamic_process_sets": True})
    assert config.dynamic_process_sets
    assert config.origins == {"dynamic_process_sets": "argument of init()"}


def test_what_differs_from_its_default_is_told_with_its_origin() -> None:
    environ = {
        "REIGEN_CACHE_CAPACITY": "5",
        "HOROVOD_START_TIMEOUT": "30",  # the default
        "HOROVOD_TIMELINE": "t.json",
        "REIGEN_ORIGINS": json.dumps({"REIGEN_CACHE_CAPACITY": "--cache-capacity"}),
    }
    assert format_changed_knobs(load_config(environ)) == [
        "cache_capacity = 5 (default: 1024), set by --cache-capacity",
        "timeline = t.json (default: None), set by HOROVOD_TIMELINE",
    ]
    assert load_config({"REIGEN_ORIGINS": "{", "REIGEN_LOG": "info"}).origins == {"log_level": "REIGEN_LOG"}


def test_known_variables_without_effect_say_why() -> None:
    lines = format_ignored_variables({"HOROVOD_CYCLE_TIME": "5", "HOROVOD_CONTROLLER": "gloo", "HOROVOD_ELASTIC": ""})
    assert [line.partition(": ")[0] for line in lines] == [
        "HOROVOD_CYCLE_TIME has no effect",
        "HOROVOD_CONTROLLER has no effect",
    ]


def test_a_misspelt_variable_is_told_with_the_closest_name() -> None:
    environ = {
        "HOROVOD_FUSION_TRESHOLD": "1",
        "HOROVOD_BUCKET_BYTES": "1",
        "REIGEN_FROBNICATE": "1",
        "REIGEN_RANK": "0",
        "REIGEN_SECRET": "",
        "REIGEN_METRICS_SERVICE": "",
        "REIGEN_METRICS_SECRET": "",
        "REIGEN_DASHBOARD_TOKEN": "",
        "HOROVOD_CYCLE_TIME": "1",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_CROSS_SIZE": "1",
        "REIGEN_LOG": "info",
        "PATH": "/bin",
    }
    assert format_unknown_variables(environ) == [
        "HOROVOD_BUCKET_BYTES (did you mean REIGEN_BUCKET_BYTES?)",
        "HOROVOD_FUSION_TRESHOLD (did you mean HOROVOD_FUSION_THRESHOLD?)",
        "REIGEN_FROBNICATE",
    ]


def test_the_engines_thread_is_placed_by_local_rank() -> None:
    assert [load_config({}).engine_cpu(rank) for rank in (0, 5)] == [None, None]
    assert [load_config({"HOROVOD_THREAD_AFFINITY": "4"}).engine_cpu(rank) for rank in (0, 5)] == [4, 4]
    config = load_config({"HOROVOD_THREAD_AFFINITY": "4,2"})
    assert [config.engine_cpu(rank) for rank in (0, 1)] == [4, 2]
    with pytest.raises(ConfigError, match=r"HOROVOD_THREAD_AFFINITY gives the processors of 2 ranks, .* local rank 2"):
        config.engine_cpu(2)
