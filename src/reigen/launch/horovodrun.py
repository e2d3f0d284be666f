"""The options of `horovodrun` and its configuration file, translated into the ranks' environment. Decides, no I/O.

a. Each option is a line of OPTIONS: its spelling, where it stands in the file, what it may hold, and the variable of
   the knob that it sets, or none where it has no meaning in a job on one host.
b. What the command line says wins over the environment, and that over the file.
c. What has no meaning is accepted; `translate_options` lists it, so that the user is told once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from reigen.errors import ConfigError
from reigen.launch.base import DEFAULT_LAUNCHER

#: JSON: variable -> the option that set it.
ORIGINS_VARIABLE = "REIGEN_ORIGINS"

#: Values of ``controller``, each an option of its own.
CONTROLLERS = ("gloo", "mpi", "jsrun")

#: Options that mean something where mpirun starts the ranks, and nothing elsewhere.
MPIRUN_OPTIONS = ("controller", "mpi_args", "binding_args")

#: Options that mean something in elastic jobs, and nothing elsewhere.
ELASTIC_OPTIONS = ("elastic_timeout", "reset_limit", "slots_per_host", "blacklist_cooldown_range")

_LEVELS = "TRACE, DEBUG, INFO, WARNING, ERROR, FATAL"
#: Names of a knob's variable, where they are not REIGEN_X and HOROVOD_X alone.
_OTHER_NAMES = {"START_TIMEOUT": ("HOROVOD_GLOO_TIMEOUT_SECONDS",), "LOG": ("REIGEN_LOG_LEVEL", "HOROVOD_LOG_LEVEL")}


def _count(text: str) -> str:
    value = int(text)
    if value < 0:
        raise ConfigError("must be >= 0")
    return str(value)


def _number(text: str, *, above_0: bool = False) -> str:
    value = float(text)
    if not 0 <= value < float("inf") or (above_0 and value == 0):
        raise ConfigError("must be > 0" if above_0 else "must be >= 0")
    return f"{value:.12g}"


def _above_0(text: str) -> str:
    return _number(text, above_0=True)


def _fraction(text: str) -> str:
    if not 0 <= float(text) <= 1:
        raise ConfigError("must be in [0, 1]")
    return text


def _mebibytes(text: str) -> str:
    return str(int(_count(text)) << 20)


def _cpus(text: str) -> str:
    return ",".join(map(_count, text.split(",")))


def _level(text: str) -> str:
    if text.upper() not in _LEVELS.split(", "):
        raise ConfigError(f"must be one of {_LEVELS}")
    return text.lower()


def _switch(text: str) -> str:
    if text not in {"True", "False"}:
        raise ConfigError("must be true or false")
    return "1" if text == "True" else "0"


def _inverse(text: str) -> str:
    return "0" if _switch(text) == "1" else "1"


def _controller(text: str) -> str:
    if text not in CONTROLLERS:
        raise ConfigError(f"must be one of {', '.join(CONTROLLERS)}")
    return text


@dataclass(frozen=True, slots=True)
class HorovodrunOption:
    """Option of `horovodrun` that sets a knob, or has no effect.

    Attributes:
        flag: its spelling; ``--[no-]x`` is a switch with two.
        parse: makes the variable's text of the option's, or of the file's value; raises ValueError.
        path: its place in the configuration file; empty: none.
        variable: the knob's, without its prefix; empty: no effect.
    """

    flag: str
    parse: Callable[[str], str]
    path: str = ""
    variable: str = ""

    @property
    def name(self) -> str:
        """Name of the attribute: ``--[no-]stall-check`` is stall_check."""
        return self.flag.replace("[no-]", "").strip("-").replace("-", "_")

    @property
    def is_switch(self) -> bool:
        """True if it is a flag without a value."""
        return self.parse in {_switch, _inverse}


#: Group -> option -> its description in ``--help``; all others have no effect without mpirun.
OPTION_HELP = {
    "start": {
        "gloo_timeout_seconds": "the same as --start-timeout, which takes precedence",
        "start_timeout": "seconds that init() waits for all ranks",
        "thread_affinity": "processor of the engine's thread, or a list by local rank: 0,4",
    },
    "elastic jobs": {
        "elastic_timeout": "most seconds with fewer than --min-np processes (default: 600)",
        "reset_limit": "end the job when failures have changed its members more than X times (default: no limit)",
        "slots_per_host": "slots of a host that the discovery script prints without a number (default: 1)",
        "blacklist_cooldown_range": "shortest and longest time in seconds for which a failed place is not used: MIN "
        "MAX",
    },
    "network": {"network_interfaces": "network interfaces to use, the first that exists: eth0,eth1"},
    "tunables": {
        "fusion_threshold_mb": "most MiB of small tensors that are fused; 0: no fusion",
        "cache_capacity": "entries of the response cache; 0: off",
    },
    "autotuning": {
        "autotune": "choose buckets, fusion and parameters of the network while the job runs; results do not change",
        "autotune_log_file": "CSV file of the measurements; the best point of an earlier job in it is tried first",
        "autotune_warmup_samples": "samples that are discarded at the beginning (default: 3)",
        "autotune_steps_per_sample": "most steps of a sample (default: 10)",
        "autotune_bayes_opt_max_samples": "most points that are tried (default: 20)",
        "autotune_gaussian_process_noise": "noise of measurements, 0 to 1 of their spread (default: as measured)",
        "autotune_seconds": "most seconds that tuning takes; long steps need more (default: 60)",
        "autotune_allow_ring": "try the ring among many hosts, which sums in another order: results may change",
    },
    "timeline": {
        "timeline_filename": "file for the timeline",
        "timeline_mark_cycles": "mark the engine's cycles in it",
    },
    "stalled collectives": {
        "stall_check": "look for stalled collectives",
        "stall_check_warning_time_seconds": "seconds until a warning",
        "stall_check_shutdown_time_seconds": "seconds until a stall ends the job; 0: never",
    },
    "log": {
        "log_level": f"lowest level of messages that are shown: {_LEVELS}",
        "log_with_timestamp": "put the time before each message",
    },
}
_Option = HorovodrunOption
HOROVODRUN_OPTIONS = (
    _Option("--gloo-timeout-seconds", _above_0, "library_options.gloo_timeout_seconds", "START_TIMEOUT"),
    _Option("--start-timeout", _above_0, "", "START_TIMEOUT"),
    _Option("--thread-affinity", _cpus, "library_options.thread_affinity", "THREAD_AFFINITY"),
    _Option("--network-interfaces", str, "", "NETWORK_INTERFACES"),
    _Option("--fusion-threshold-mb", _mebibytes, "params.fusion_threshold_mb", "FUSION_THRESHOLD"),
    _Option("--cache-capacity", _count, "params.cache_capacity", "CACHE_CAPACITY"),
    _Option("--[no-]autotune", _switch, "autotune.enabled", "AUTOTUNE"),
    _Option("--autotune-log-file", str, "autotune.log_file", "AUTOTUNE_LOG"),
    _Option("--autotune-warmup-samples", _count, "autotune.warmup_samples", "AUTOTUNE_WARMUP_SAMPLES"),
    _Option("--autotune-steps-per-sample", _count, "autotune.steps_per_sample", "AUTOTUNE_STEPS_PER_SAMPLE"),
    _Option(
        "--autotune-bayes-opt-max-samples",
        _count,
        "autotune.bayes_opt_max_samples",
        "AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
    ),
    _Option(
        "--autotune-gaussian-process-noise",
        _fraction,
        "autotune.gaussian_process_noise",
        "AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
    ),
    _Option("--autotune-seconds", _above_0, "", "AUTOTUNE_SECONDS"),
    _Option("--[no-]autotune-allow-ring", _switch, "", "AUTOTUNE_ALLOW_RING"),
    _Option("--timeline-filename", str, "timeline.filename", "TIMELINE"),
    _Option("--[no-]timeline-mark-cycles", _switch, "timeline.mark_cycles", "TIMELINE_MARK_CYCLES"),
    _Option("--[no-]stall-check", _inverse, "stall_check.enabled", "STALL_CHECK_DISABLE"),
    _Option(
        "--stall-check-warning-time-seconds",
        _above_0,
        "stall_check.warning_time_seconds",
        "STALL_CHECK_TIME_SECONDS",
    ),
    _Option(
        "--stall-check-shutdown-time-seconds",
        _number,
        "stall_check.shutdown_time_seconds",
        "STALL_SHUTDOWN_TIME_SECONDS",
    ),
    _Option("--log-level", _level, "logging.level", "LOG"),
    _Option("--log-with-timestamp", _inverse, "logging.with_timestamp", "LOG_HIDE_TIME"),
    _Option("--cycle-time-ms", _number, "params.cycle_time_ms"),
    _Option("--[no-]hierarchical-allreduce", _switch, "params.hierarchical_allreduce"),
    _Option("--[no-]hierarchical-allgather", _switch, "params.hierarchical_allgather"),
    _Option("--[no-]torus-allreduce", _switch, "params.torus_allreduce"),
    _Option("--[no-]mpi-threads-disable", _switch, "library_options.mpi_threads_disable"),
    _Option("--mpi-args", str),
    _Option("--tcp", _switch),
    _Option("--binding-args", str),
    _Option("--num-nccl-streams", _count, "library_options.num_nccl_streams"),
    _Option("--disable-cache", _switch),
    _Option("--elastic-timeout", _count),
    _Option("--reset-limit", _count),
    _Option("--slots-per-host", _count),
    _Option("--blacklist-cooldown-range", str),
    _Option("--controller", _controller, "controller"),
)


@dataclass(frozen=True, slots=True)
class TranslatedOptions:
    """Variables and options that command line and configuration file come to.

    Attributes:
        variables: for the ranks' environment.
        without_effect: options, and settings of the file, that were accepted and have no effect.
        unknown: settings of the file that mean nothing.
        launcher_options: those of `MPIRUN_OPTIONS`, by name, where mpirun starts the ranks.
    """

    variables: dict[str, str]
    without_effect: tuple[str, ...]
    unknown: tuple[str, ...]
    launcher_options: dict[str, str] = field(default_factory=dict)


def choose_launcher(chosen: Mapping[str, object], document: object) -> str:
    """Return the launcher's name: as given; mpi for `--mpi` or the configuration file's ``controller``; the default."""
    if launcher := chosen.get("launcher"):
        return str(launcher)
    controller = chosen.get("controller") or dict(_flat(document)).get("controller")
    return "mpi" if controller == "mpi" else DEFAULT_LAUNCHER


def translate_options(chosen: Mapping[str, object], document: object, environ: Mapping[str, str]) -> TranslatedOptions:
    """Translate options and configuration file into the environment.

    Args:
        chosen: options of the command line by name, None where they were not given.
        document: the configuration file as YAML parses it; None for no file.
        environ: the launcher's environment.

    Raises:
        ConfigError: a value makes no sense; names the option or the setting.
    """
    settings = dict(_flat(document))
    variables: dict[str, str] = {}
    origins: dict[str, str] = {}
    without_effect: list[str] = []
    launcher_options: dict[str, str] = {}
    supported = MPIRUN_OPTIONS if choose_launcher(chosen, document) == "mpi" else ()
    is_elastic = any(chosen.get(name) is not None for name in ("min_ranks", "host_discovery_script"))
    is_elastic |= chosen.get("max_ranks") not in {None, chosen.get("num_ranks")}
    for option in HOROVODRUN_OPTIONS:
        option_value, file_value = chosen.get(option.name), settings.pop(option.path, None)
        value = file_value if option_value is None else option_value
        if value is None:
            continue
        in_file = option_value is None
        name = f"{option.path} in the configuration file" if in_file else _format_option(option, option_value)
        text = _parse_value(option, value, option.path if in_file else option.name)
        variable = f"REIGEN_{option.variable}"
        if option.name in supported:
            launcher_options[option.name] = text
        elif is_elastic and option.name in ELASTIC_OPTIONS:
            continue  # read elsewhere
        elif not option.variable:
            without_effect.append(name)
        elif not in_file or not _is_set(option.variable, environ):
            variables[variable], origins[variable] = text, name
    if origins:
        variables[ORIGINS_VARIABLE] = json.dumps(origins)
    return TranslatedOptions(variables, tuple(without_effect), tuple(settings), launcher_options)


def _flat(document: object) -> Iterator[tuple[str, object]]:
    """Yield the file's settings by path: ``params.cache_capacity``."""
    if document is None:
        return
    if not isinstance(document, dict):
        raise ConfigError("the configuration file must hold sections such as 'params:', each with its settings")
    for section, content in document.items():
        if not isinstance(content, dict):
            yield str(section), content
            continue
        for key, value in content.items():
            yield f"{section}.{key}", value


def _parse_value(option: HorovodrunOption, value: object, name: str) -> str:
    try:
        return option.parse(str(value))
    except ConfigError as error:
        raise ConfigError(f"{name}={value} {error}") from None
    except ValueError:
        kind = "a whole number" if option.parse in {_count, _mebibytes, _cpus} else "a number"
        raise ConfigError(f"{name}={value} must be {kind}") from None


def _format_option(option: HorovodrunOption, value: object) -> str:
    """Format the option as the user wrote it."""
    if option.name == "controller":
        return f"--{value}"
    if value is False and option.name == "log_with_timestamp":
        return "--log-without-timestamp"
    return option.flag.replace("[no-]", "no-" if value is False else "")


def _is_set(variable: str, environ: Mapping[str, str]) -> bool:
    names = (f"REIGEN_{variable}", f"HOROVOD_{variable}", *_OTHER_NAMES.get(variable, ()))
    return any(map(environ.get, names))
