"""Every knob: its default, the variables that set it, its possible values, and the origin of its value.

Precedence: argument of ``init()``, REIGEN_*, HOROVOD_*, default. An option of `reigen run`, or its configuration file,
sets the REIGEN_* variable of the ranks: an option in place of the environment's, the file where the environment has
none; REIGEN_ORIGINS then shows which of them it was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from reigen.errors import ConfigError

#: Algorithms of the TCP backend; see `reigen.backends.tcp.algorithm`.
TCP_ALGORITHMS = ("auto", "ordered", "direct", "ring", "latency")
#: Connections between two ranks: each is a descriptor, and a handshake before the first collective.
MAX_TCP_SOCKETS = 64
#: Policies of the parameter server for the loss of a worker; see docs/kv-failures.md.
WORKER_LOSS_POLICIES = ("abort", "continue", "wait", "elastic")
#: Connections between two ranks of different hosts that a tuned job makes, to use as many of them as is best.
MAX_TUNED_SOCKETS = 4
LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
#: JSON: for variables that `reigen run` has set, the option or setting that made it do so.
ORIGINS_VARIABLE = "REIGEN_ORIGINS"

_MIB = 1 << 20
_UNITS = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", 1)
    for unit, base in ((letter, 1024), (f"{letter}ib", 1024), (f"{letter}b", 1000))
}


@dataclass(frozen=True)
class _Kind:
    """Kind of a knob's values: the words for it in errors, its parser, and a test of parsed values."""

    expected: str
    parse: Callable[[str], Any]
    accepts: Callable[[Any], bool] = lambda _: True

    def read(self, variable: str, text: str) -> object:
        """Return the value of a variable, or raise ConfigError."""
        try:
            if self.accepts(value := self.parse(text)):
                return value
        except (ValueError, OverflowError):
            pass
        raise ConfigError(f"{variable}={text}: expected {self.expected}")


def _parse_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([kmgt]?i?b?)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]


def _parse_switch(text: str) -> bool:
    text = text.strip().lower()
    if text not in _ON + _OFF:
        raise ValueError
    return text in _ON


def _choice_of(words: tuple[str, ...]) -> _Kind:
    return _Kind(f"{', '.join(words[:-1])} or {words[-1]}", str.lower, words.__contains__)


_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_TEXT = _Kind("a text", str)
_SECONDS = _Kind("a number of seconds greater than 0", float, lambda value: 0 < value < 1e9)
_SECONDS_FROM_ZERO = _Kind("a number of seconds, at least 0", float, lambda value: 0 <= value < 1e9)
_SECONDS_OR_OFF = _Kind("a number of seconds, 0 for off", float, lambda value: 0 <= value < 1e9)
_COUNT = _Kind("a whole number, at least 0", int, lambda value: value >= 0)
_COUNT_ABOVE_0 = _Kind("a whole number, at least 1", int, lambda value: value >= 1)
_REPLICAS = _Kind("1 or 2", int, lambda value: value in {1, 2})
_PERCENT = _Kind("a number of percent, at least 0 and less than 100", float, lambda value: 0 <= value < 100)
_FRACTION = _Kind("a number from 0 to 1", float, lambda value: 0 <= value <= 1)
_BYTES = _Kind(
    "a number of bytes, such as 0, 1048576, 64MiB (or 64m, both 2**20 each) or 64MB (10**6 each)", _parse_bytes
)
_BYTES_ABOVE_0 = _Kind(
    "a number of bytes greater than 0, such as 1048576, 64MiB (or 64m, 2**20 each) or 64MB (10**6)",
    _parse_bytes,
    lambda value: value >= 1,
)
_SWITCH = _Kind("1 or 0, true or false, yes or no, on or off", _parse_switch)
_CPUS = _Kind(
    "the number of a processor, or several with commas between them, one for each local rank",
    lambda text: tuple(map(int, text.split(","))),
    lambda value: min(value) >= 0,
)
_INTERFACES = _Kind(
    "the name of a network interface, or several with commas between them",
    lambda text: tuple(map(str.strip, text.split(","))),
    all,
)
_SOCKETS = _Kind(f"a whole number from 1 to {MAX_TCP_SOCKETS}", int, lambda value: 1 <= value <= MAX_TCP_SOCKETS)


def _knob(default: object, kind: _Kind, names: str) -> Any:
    return field(default=default, metadata={"kind": kind, "variables": tuple(names.split())})


@dataclass(frozen=True)
class Config:
    """Knobs of one job.

    The reference shows what is said of each here (`tools.docs.code_pages`).

    Attributes:
        deadline_seconds: seconds that a collective may wait for its last rank, and a rank for the others' part in it.
        start_timeout_seconds: seconds that init() waits for the other ranks.
        fusion_threshold_bytes: allreduces of up to so many bytes in all travel together; 0 turns fusion off.
        disable_group_fusion: a group travels by itself, not together with other tensors.
        cache_capacity: operations whose negotiation is remembered; 0 turns the response cache off.
        bucket_bytes: size of a gradient bucket. If it is not set: 4 MiB between hosts, 16 MiB on one host, and there
            64 MiB with reigen.torch where ranks have one processor each.
        dynamic_process_sets: process sets may be added and removed after init().
        timeline: file into which the timeline is written, or ``DYNAMIC`` to start it by a call.
        timeline_mark_cycles: mark the engine's turns in the timeline.
        stall_check_disable: do not look for stalled collectives.
        stall_check_seconds: seconds that a collective may wait before a warning.
        stall_shutdown_seconds: seconds that a collective may stall before the job is ended; 0 for never.
        autotune: choose the fusion threshold, the size of buckets and the parameters of the network while the job runs;
            needs ``reigen[autotune]``.
        autotune_log: CSV file for what it measures; what an earlier job has found there is tried first.
        autotune_warmup_samples: samples that are thrown away at the beginning.
        autotune_steps_per_sample: steps of a sample, at most.
        autotune_bayes_opt_max_samples: points that are tried, at most.
        autotune_gaussian_process_noise: noise of measurements, in units of their spread. If it is not set, it
            is what is measured.
        autotune_seconds: seconds that tuning takes, at most, from the first step on.
        autotune_allow_ring: sums may go around a ring among many hosts, which adds in another order: tuning may change
            results.
        check_replicas: compare the parameters of all ranks before the first step, and every so many steps; 0: only warn
            where they begin differently. Of shared parameters, also look who else has changed them.
        thread_affinity: processor of the engine's thread: one for all, or by local rank. If it is not set, any.
        backend: what carries data between hosts, and on one host between all ranks: ``tcp`` or ``mpi``. ``shm`` is for
            jobs of one host, ``null`` for those of one rank. If it is not set, Reigen chooses.
        network_interfaces: names of the interfaces through which hosts may talk to each other, the first that exists is
            used. If none is named: the one of the route to the others.
        tls: encrypt every connection between hosts; needs ``reigen[tls]``.
        tcp_algorithm: how the TCP backend reduces; with ``ordered``, which is else like ``auto``, sums of all sizes are
            taken in rank order.
        tcp_sockets: connections between two ranks of different hosts; as many for each direction where both have one
            address.
        control_tree_ranks: jobs of so many ranks on several hosts negotiate through a tree by hosts; 0: never, each
            rank reports to rank 0 itself.
        peer_timeout_seconds: seconds that another host may be silent before it counts as lost.
        notice_grace_seconds: in an elastic job: seconds from SIGTERM to the end of a process, which leaves in good
            order; 0 for at once.
        host_id: replaces the host's identity: with different ones, ranks of one host count as ranks of several.
        nccl: reduce CUDA tensors with NCCL, where there is one; else they are staged through the host.
        tensorflow_native: collectives in graphs of TensorFlow are operations of our own: ``1`` without a self-test,
            ``auto`` with versions of TensorFlow that are known to work, or after a self-test, ``0`` never: functions of
            Python take their place.
        jax_native: collectives inside jax.jit are operations of XLA: ``1`` without a self-test, ``auto`` with versions
            of jaxlib that are known to work, or after a self-test, ``0`` never: they are host callbacks, which take
            longer.
        kv_bigarray_bound: a key of the parameter server of so many elements lies on all servers, a smaller one on one.
        kv_slice_bytes: a key's value is cut into pieces of at most so many bytes. If it is not set: 1 MiB between
            hosts, 4 MiB on one host, 12 MiB on one with fewer processors than workers and servers.
        kv_threads: threads of a server that compute. If it is not set: one less than the processors that it may use,
            but 1 to 4; with snapshots 4.
        kv_shared_memory: values travel through shared memory where worker and server are on one host.
        kv_verbose: what a store logs: with 1 the members of the job and their connections, with 2 every message, too.
        kv_resend: a message whose receipt is not acknowledged is sent again.
        kv_resend_timeout_ms: milliseconds after which a message whose receipt is not acknowledged is sent again.
        kv_drop_percent: percent of the received messages that are thrown away, for tests of losses.
        kv_heartbeat_seconds: seconds between two heartbeats of a worker or server to the scheduler; 0 for none.
        kv_heartbeat_timeout_seconds: seconds that a worker or server may be silent before it counts as lost; 0 for
            ever.
        kv_on_worker_loss: what becomes of a job that has lost a worker: ``abort``; ``continue`` with the others;
            ``wait`` for a replacement; ``elastic``, which elastic jobs set: others join in free places.
        kv_snapshot_dir: directory for servers' snapshots; without one there are none.
        kv_snapshot_seconds: seconds between two snapshots; 0: one before every acknowledgement.
        kv_replicas: with 2, what a server holds is also in the memory of another one, as with ``--replicate-servers``.
        kv_update_on_kvstore: a Trainer without that argument lets the store update the weights.
        log_level: the least severe messages that are shown.
        log_hide_time: messages do not begin with the time.
        origins: for each knob that was set, its option, setting or variable.
    """

    deadline_seconds: float = _knob(600.0, _SECONDS, "REIGEN_DEADLINE")
    start_timeout_seconds: float = _knob(
        30.0, _SECONDS, "REIGEN_START_TIMEOUT HOROVOD_START_TIMEOUT HOROVOD_GLOO_TIMEOUT_SECONDS"
    )
    fusion_threshold_bytes: int = _knob(128 * _MIB, _BYTES, "REIGEN_FUSION_THRESHOLD HOROVOD_FUSION_THRESHOLD")
    disable_group_fusion: bool = _knob(False, _SWITCH, "REIGEN_DISABLE_GROUP_FUSION HOROVOD_DISABLE_GROUP_FUSION")
    cache_capacity: int = _knob(1024, _COUNT, "REIGEN_CACHE_CAPACITY HOROVOD_CACHE_CAPACITY")
    bucket_bytes: int | None = _knob(None, _BYTES_ABOVE_0, "REIGEN_BUCKET_BYTES")
    dynamic_process_sets: bool = _knob(False, _SWITCH, "REIGEN_DYNAMIC_PROCESS_SETS HOROVOD_DYNAMIC_PROCESS_SETS")
    timeline: str | None = _knob(None, _TEXT, "REIGEN_TIMELINE HOROVOD_TIMELINE")
    timeline_mark_cycles: bool = _knob(False, _SWITCH, "REIGEN_TIMELINE_MARK_CYCLES HOROVOD_TIMELINE_MARK_CYCLES")
    stall_check_disable: bool = _knob(False, _SWITCH, "REIGEN_STALL_CHECK_DISABLE HOROVOD_STALL_CHECK_DISABLE")
    stall_check_seconds: float = _knob(
        60.0, _SECONDS, "REIGEN_STALL_CHECK_TIME_SECONDS HOROVOD_STALL_CHECK_TIME_SECONDS"
    )
    stall_shutdown_seconds: float = _knob(
        0.0, _SECONDS_OR_OFF, "REIGEN_STALL_SHUTDOWN_TIME_SECONDS HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
    )
    autotune: bool = _knob(False, _SWITCH, "REIGEN_AUTOTUNE HOROVOD_AUTOTUNE")
    autotune_log: str | None = _knob(None, _TEXT, "REIGEN_AUTOTUNE_LOG HOROVOD_AUTOTUNE_LOG")
    autotune_warmup_samples: int = _knob(3, _COUNT, "REIGEN_AUTOTUNE_WARMUP_SAMPLES HOROVOD_AUTOTUNE_WARMUP_SAMPLES")
    autotune_steps_per_sample: int = _knob(
        10, _COUNT, "REIGEN_AUTOTUNE_STEPS_PER_SAMPLE HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE"
    )
    autotune_bayes_opt_max_samples: int = _knob(
        20, _COUNT, "REIGEN_AUTOTUNE_BAYES_OPT_MAX_SAMPLES HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES"
    )
    autotune_gaussian_process_noise: float | None = _knob(
        None, _FRACTION, "REIGEN_AUTOTUNE_GAUSSIAN_PROCESS_NOISE HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE"
    )
    autotune_seconds: float = _knob(60.0, _SECONDS, "REIGEN_AUTOTUNE_SECONDS")
    autotune_allow_ring: bool = _knob(False, _SWITCH, "REIGEN_AUTOTUNE_ALLOW_RING")
    check_replicas: int = _knob(0, _COUNT, "REIGEN_CHECK_REPLICAS")
    thread_affinity: tuple[int, ...] = _knob((), _CPUS, "REIGEN_THREAD_AFFINITY HOROVOD_THREAD_AFFINITY")
    backend: str | None = _knob(None, _TEXT, "REIGEN_PLANE")
    network_interfaces: tuple[str, ...] = _knob(
        (), _INTERFACES, "REIGEN_NETWORK_INTERFACES HOROVOD_GLOO_IFACE DMLC_INTERFACE SM_NETWORK_INTERFACE_NAME"
    )
    tls: bool = _knob(False, _SWITCH, "REIGEN_TLS")
    tcp_algorithm: str = _knob("auto", _choice_of(TCP_ALGORITHMS), "REIGEN_TCP_ALGORITHM")
    tcp_sockets: int = _knob(1, _SOCKETS, "REIGEN_TCP_SOCKETS")
    control_tree_ranks: int = _knob(64, _COUNT, "REIGEN_CONTROL_TREE_RANKS")
    peer_timeout_seconds: float = _knob(20.0, _SECONDS, "REIGEN_PEER_TIMEOUT")
    notice_grace_seconds: float = _knob(30.0, _SECONDS_FROM_ZERO, "REIGEN_NOTICE_GRACE")
    host_id: str | None = _knob(None, _TEXT, "REIGEN_HOST_ID")
    nccl: bool = _knob(True, _SWITCH, "REIGEN_NCCL")
    tensorflow_native: str = _knob("auto", _choice_of(("auto", "0", "1")), "REIGEN_TENSORFLOW_NATIVE")
    jax_native: str = _knob("auto", _choice_of(("auto", "0", "1")), "REIGEN_JAX_NATIVE")
    kv_bigarray_bound: int = _knob(1_000_000, _COUNT, "REIGEN_KV_BIGARRAY_BOUND MXNET_KVSTORE_BIGARRAY_BOUND")
    kv_slice_bytes: int | None = _knob(None, _BYTES_ABOVE_0, "REIGEN_KV_SLICE_BYTES")
    kv_threads: int | None = _knob(None, _COUNT_ABOVE_0, "REIGEN_KV_THREADS MXNET_KVSTORE_REDUCTION_NTHREADS")
    kv_shared_memory: bool = _knob(True, _SWITCH, "REIGEN_KV_SHARED_MEMORY")
    kv_verbose: int = _knob(0, _COUNT, "REIGEN_KV_VERBOSE PS_VERBOSE")
    kv_resend: bool = _knob(False, _SWITCH, "REIGEN_KV_RESEND PS_RESEND")
    kv_resend_timeout_ms: int = _knob(1000, _COUNT_ABOVE_0, "REIGEN_KV_RESEND_TIMEOUT PS_RESEND_TIMEOUT")
    kv_drop_percent: float = _knob(0.0, _PERCENT, "REIGEN_KV_DROP_MSG PS_DROP_MSG")
    kv_heartbeat_seconds: float = _knob(2.0, _SECONDS_OR_OFF, "REIGEN_KV_HEARTBEAT_INTERVAL PS_HEARTBEAT_INTERVAL")
    kv_heartbeat_timeout_seconds: float = _knob(
        20.0, _SECONDS_OR_OFF, "REIGEN_KV_HEARTBEAT_TIMEOUT PS_HEARTBEAT_TIMEOUT"
    )
    kv_on_worker_loss: str = _knob("abort", _choice_of(WORKER_LOSS_POLICIES), "REIGEN_KV_ON_WORKER_LOSS")
    kv_snapshot_dir: str | None = _knob(None, _TEXT, "REIGEN_KV_SNAPSHOT_DIR")
    kv_snapshot_seconds: float = _knob(30.0, _SECONDS_OR_OFF, "REIGEN_KV_SNAPSHOT_SECONDS")
    kv_replicas: int = _knob(1, _REPLICAS, "REIGEN_KV_REPLICAS")
    kv_update_on_kvstore: bool = _knob(True, _SWITCH, "REIGEN_KV_UPDATE_ON_KVSTORE MXNET_UPDATE_ON_KVSTORE")
    log_level: str = _knob("warning", _choice_of(LOG_LEVELS), "REIGEN_LOG REIGEN_LOG_LEVEL HOROVOD_LOG_LEVEL")
    log_hide_time: bool = _knob(False, _SWITCH, "REIGEN_LOG_HIDE_TIME HOROVOD_LOG_HIDE_TIME")
    origins: Mapping[str, str] = field(default_factory=dict)

    def network_parameters(self) -> tuple[str, int]:
        """Return the algorithm with which the TCP network begins, and how many connections between two ranks it makes.

        A tuned job makes more of them than it begins with, and takes no ring unless sums may have another order.
        """
        algorithm, num_sockets = self.tcp_algorithm, self.tcp_sockets
        if self.autotune:
            num_sockets = MAX_TUNED_SOCKETS if num_sockets == 1 else num_sockets
            algorithm = "ordered" if algorithm == "auto" and not self.autotune_allow_ring else algorithm
        return algorithm, num_sockets

    def engine_cpu(self, local_rank: int) -> int | None:
        """Return the processor for the engine's thread; None: any. Raises ConfigError: none of several is for it."""
        if len(self.thread_affinity) < 2:
            return self.thread_affinity[0] if self.thread_affinity else None
        if local_rank >= len(self.thread_affinity):
            raise ConfigError(
                f"{self.origins.get('thread_affinity', 'thread_affinity')} gives the processors of "
                f"{len(self.thread_affinity)} ranks, but this is local rank {local_rank}"
            )
        return self.thread_affinity[local_rank]


#: Size of a gradient bucket where it costs little to move one; where its last byte takes its time; and where backward
#: hides nothing, so that what each costs besides its sums should be little beside them.
BUCKET_BYTES, NETWORK_BUCKET_BYTES, SERIAL_BUCKET_BYTES = 16 * _MIB, 4 * _MIB, 64 * _MIB


def default_bucket_bytes(has_network: bool, overlaps: bool = True) -> int:
    """Return the size of a gradient bucket where the user does not say.

    Args:
        has_network: some bytes leave the host.
        overlaps: buckets are reduced while backward runs.
    """
    if not overlaps:
        return SERIAL_BUCKET_BYTES
    return NETWORK_BUCKET_BYTES if has_network else BUCKET_BYTES


#: Knob -> the variables that set it, the first that is set wins.
VARIABLES: dict[str, tuple[str, ...]] = {
    knob.name: knob.metadata["variables"] for knob in fields(Config) if knob.metadata
}

#: Reasons why known variables of Horovod (without the prefix) have no effect.
_REASONS = {
    "nothing waits for a cycle: an operation starts when its last rank has come": "CYCLE_TIME",
    "ranks of a host share its memory, then hosts talk: there is no other way": "HIERARCHICAL_ALLREDUCE "
    "HIERARCHICAL_ALLGATHER TORUS_ALLREDUCE",
    "CUDA tensors are reduced where they lie, on one stream, and nobody waits for it": "BATCH_D2D_MEMCOPIES "
    "NUM_NCCL_STREAMS ENABLE_ASYNC_COMPLETION",
    "there are neither NVTX ranges nor operations for XLA": "DISABLE_NVTX_RANGES ENABLE_XLA_OPS",
    "REIGEN_PLANE says what carries data, and there is one way to control a job": "CONTROLLER CPU_OPERATIONS "
    "MPI_THREADS_DISABLE CCL_CACHE ADASUM_MPI_CHUNK_SIZE GLOO_RENDEZVOUS_ADDR GLOO_RENDEZVOUS_PORT",
}
#: Variables of Horovod that are known, and have no effect -> why.
WITHOUT_EFFECT = {f"HOROVOD_{name}": reason for reason, names in _REASONS.items() for name in names.split()}

#: Variables that are no knobs: the place in the job, services, other tools, Horovod's build and its integrations.
_OTHER_VARIABLES = re.compile(
    r"(REIGEN|HOROVOD)_(LOCAL_|CROSS_)?(RANK|SIZE)"
    r"|REIGEN_(RENDEZVOUS(_PORT)?|SECRET(_FILE)?|TERMINAL|PREFIXED|ORIGINS|TORCHRUN_ENV|CREW|SLURM_STEPS|NODES|GRACE)"
    r"|(REIGEN|HOROVOD)_ELASTIC(_TIMEOUT)?|REIGEN_(ELASTIC_CANDIDATE|SLOT|INCARNATION|M(IN|AX)_SIZE|FIRST_WORKERS)"
    r"|REIGEN_(MAX_SERVERS|KV_HANDOVER_DIR)"
    r"|REIGEN_((VOTER|ENDED|LEFT|ROSTER|SERVER_CONTROL)_FD|WARM_SPARES|PORT_IS_HELD|NODE_INDEX|LEADER|SPARK_GPUS_PER_TASK)"
    r"|REIGEN_(WITNESS|STRAGGLERS|METRICS_(SECONDS|TOKEN|SERVICE|SECRET)|DASHBOARD_TOKEN|YARN_MASTER_FD|(BENCH|TEST|SIM)_.*)"
    r"|HOROVOD_(HOSTNAME|SECRET_KEY|SPARK_.*|TEST_.*|MIXED_INSTALL|WITH_.*|WITHOUT_.*|GPU.*|ALLOW_MIXED_GPU_IMPL)"
    r"|HOROVOD_(CUDA|ROCM|NCCL|NVTX)_.*|HOROVOD_(BUILD_.*|CMAKE|DEBUG|SKIP_COMPILE|LOCAL_VERSION)"
)


#: Knobs on which ranks that talk to each other must agree.
_SHARED_KNOBS = ("backend", "tcp_algorithm", "tcp_sockets", "control_tree_ranks", "autotune", "autotune_allow_ring")


def shared_settings(config: Config) -> tuple[str, ...]:
    """Return the settings that must be the same for all ranks, as ``VARIABLE=value``."""
    return tuple(f"{VARIABLES[name][0]}={getattr(config, name) or 'not set'}" for name in _SHARED_KNOBS)


def load_config(environ: Mapping[str, str], arguments: Mapping[str, object] | None = None) -> Config:
    """Make the configuration of ``environ``. Empty variables count as unset.

    ``arguments`` are knobs that a program has set itself, by name; they win over ``environ``.

    Raises:
        ConfigError: a variable's value makes no sense; names the variable, the value and what is expected.
    """
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    kinds: dict[str, _Kind] = {knob.name: knob.metadata["kind"] for knob in fields(Config) if knob.metadata}
    launcher = _origins_of_launcher(environ)
    for name, variables in VARIABLES.items():
        if variable := next(filter(environ.get, variables), None):
            values[name] = kinds[name].read(variable, environ[variable])
            origins[name] = launcher.get(variable, variable)
    for name, value in (arguments or {}).items():
        values[name], origins[name] = value, "argument of init()"
    return Config(**values, origins=origins)  # type: ignore[arg-type]  # each parse function gives its field's type


def format_changed_knobs(config: Config) -> list[str]:
    """Return one line for each knob that differs from its default: its value and its origin."""
    lines = []
    for knob in fields(config):
        value = getattr(config, knob.name)
        if knob.name != "origins" and value != knob.default:
            origin = config.origins.get(knob.name, "the program")
            lines.append(f"{knob.name} = {value} (default: {knob.default}), set by {origin}")
    return lines


def format_ignored_variables(environ: Mapping[str, str]) -> list[str]:
    """Return one line for each variable of Horovod that is set and known, but has no effect here."""
    return [f"{name} has no effect: {reason}" for name, reason in WITHOUT_EFFECT.items() if environ.get(name)]


def format_unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return unknown REIGEN_* and HOROVOD_* variables, each with the closest name of a known one."""
    known = {*WITHOUT_EFFECT, *(variable for variables in VARIABLES.values() for variable in variables)}
    found = []
    for name in sorted(environ):
        if name.startswith(("REIGEN_", "HOROVOD_")) and name not in known and not _OTHER_VARIABLES.fullmatch(name):
            by_stem = {_stem(one): one for one in sorted(known, key=lambda one: one[0] == name[0])}
            close = get_close_matches(_stem(name), by_stem, 1, cutoff=0.75)
            found.append(f"{name} (did you mean {by_stem[close[0]]}?)" if close else name)
    return found


def _stem(variable: str) -> str:
    return variable.partition("_")[2]


def _origins_of_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    try:
        origins = json.loads(environ.get(ORIGINS_VARIABLE) or "{}")
    except ValueError:
        return {}
    return origins if isinstance(origins, dict) else {}
