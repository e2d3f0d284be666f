"""horovodrun's options and its configuration file: what they come to in the ranks' environment."""

from __future__ import annotations

import json
import re
from argparse import Namespace

import pytest
import yaml

from reigen.cli.run_options import make_parser
from reigen.config import VARIABLES, load_config
from reigen.errors import ConfigError
from reigen.launch.horovodrun import HOROVODRUN_OPTIONS, TranslatedOptions, translate_options

#: Every option of horovodrun, as its documentation spells them, with a value where it takes one.
SPELLINGS = """
-np 2 | --num-proc 2 | -cb | --check-build | --disable-cache | --start-timeout 9 | --network-interfaces a,b
--network-interface lo | --output-filename DIR | --verbose | --config-file F.yaml | -p 22 | --ssh-port 22 | -i ID
--ssh-identity-file ID | -H localhost:2 | --hosts localhost:2 | -hostfile F | --hostfile F | --host-discovery-script S
--fusion-threshold-mb 32 | --cycle-time-ms 3.5 | --cache-capacity 9 | --hierarchical-allreduce
--no-hierarchical-allreduce | --hierarchical-allgather | --no-hierarchical-allgather | --torus-allreduce
--no-torus-allreduce | --autotune | --no-autotune | --autotune-log-file F | --autotune-warmup-samples 3
--autotune-steps-per-sample 10 | --autotune-bayes-opt-max-samples 20 | --autotune-gaussian-process-noise 0.8
--min-np 2 | --min-num-proc 2 | --max-np 2 | --max-num-proc 2 | --slots-per-host 1 | --elastic-timeout 600
--reset-limit 3 | --blacklist-cooldown-range 1 2 | --timeline-filename F | --timeline-mark-cycles
--no-timeline-mark-cycles | --stall-check | --no-stall-check | --stall-check-warning-time-seconds 60
--stall-check-shutdown-time-seconds 0 | --mpi-threads-disable | --no-mpi-threads-disable | --mpi-args=-x | --tcp
--binding-args=-x | --num-nccl-streams 1 | --thread-affinity 0 | --gloo-timeout-seconds 30 | --log-level DEBUG
--log-with-timestamp | --log-without-timestamp | --log-hide-timestamp | -prefix-timestamp
--prefix-output-with-timestamp | --gloo | --mpi | --jsrun
"""

FILE = """
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 2.5
  cache_capacity: 512
  hierarchical_allreduce: true
autotune: {enabled: false, log_file: a.csv, warmup_samples: 5, gaussian_process_noise: 0.5}
timeline: {filename: t.json, mark_cycles: true}
stall_check: {enabled: false, warning_time_seconds: 120, shutdown_time_seconds: 240}
library_options: {mpi_threads_disable: true, num_nccl_streams: 2, thread_affinity: 1, gloo_timeout_seconds: 60}
logging: {level: INFO, with_timestamp: false}
controller: gloo
"""


def options(line: str) -> dict[str, object]:
    return vars(make_parser().parse_args([*line.split(), "--", "command"]))


def translated(line: str = "", document: object = None, environ: dict[str, str] | None = None) -> TranslatedOptions:
    return translate_options(options(line), document, environ or {})


@pytest.mark.parametrize("spelling", [one.strip() for one in re.split(r"[|\n]", SPELLINGS) if one.strip()])
def test_every_option_is_accepted(spelling: str) -> None:
    chosen = make_parser().parse_args([*spelling.split(), "command", "-np", "x"])
    assert chosen.command == ["command", "-np", "x"]
    translate_options(vars(chosen), None, {})


def test_what_options_come_to() -> None:
    line = (
        "--fusion-threshold-mb 2 --cache-capacity 0 --timeline-filename t --no-timeline-mark-cycles --no-stall-check "
    )
    line += "--stall-check-warning-time-seconds 7.5 --stall-check-shutdown-time-seconds 9 --thread-affinity 1,2 "
    line += "--gloo-timeout-seconds 60 --log-level DEBUG --log-hide-timestamp"
    variables = dict(translated(line).variables)
    origins = json.loads(variables.pop("REIGEN_ORIGINS"))
    assert variables == {
        "REIGEN_FUSION_THRESHOLD": "2097152",
        "REIGEN_CACHE_CAPACITY": "0",
        "REIGEN_TIMELINE": "t",
        "REIGEN_TIMELINE_MARK_CYCLES": "0",
        "REIGEN_STALL_CHECK_DISABLE": "1",
        "REIGEN_STALL_CHECK_TIME_SECONDS": "7.5",
        "REIGEN_STALL_SHUTDOWN_TIME_SECONDS": "9",
        "REIGEN_THREAD_AFFINITY": "1,2",
        "REIGEN_START_TIMEOUT": "60",
        "REIGEN_LOG": "debug",
        "REIGEN_LOG_HIDE_TIME": "1",
    }
    assert set(origins) == set(variables)
    assert origins["REIGEN_STALL_CHECK_DISABLE"] == "--no-stall-check"
    assert origins["REIGEN_LOG_HIDE_TIME"] == "--log-without-timestamp"
    load_config(variables)  # all of them make sense there
    assert translated("--stall-check --log-with-timestamp").variables["REIGEN_STALL_CHECK_DISABLE"] == "0"
    assert translated("--gloo-timeout-seconds 60 --start-timeout 5").variables["REIGEN_START_TIMEOUT"] == "5"


def test_nothing_asked_for_sets_nothing() -> None:
    assert translated() == TranslatedOptions({}, (), ())


def test_every_variable_is_a_knob_of_the_configuration() -> None:
    known = {name for names in VARIABLES.values() for name in names}
    used = {f"REIGEN_{option.variable}" for option in HOROVODRUN_OPTIONS if option.variable}
    assert used <= known


def test_the_file_says_the_same_as_options_do() -> None:
    result = translate_options({}, yaml.safe_load(FILE), {})
    variables = dict(result.variables)
    assert json.loads(variables.pop("REIGEN_ORIGINS"))["REIGEN_LOG"] == "logging.level in the configuration file"
    assert variables == {
        "REIGEN_FUSION_THRESHOLD": str(32 << 20),
        "REIGEN_CACHE_CAPACITY": "512",
        "REIGEN_AUTOTUNE": "0",
        "REIGEN_AUTOTUNE_LOG": "a.csv",
        "REIGEN_AUTOTUNE_WARMUP_SAMPLES": "5",
        "REIGEN_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.5",
        "REIGEN_TIMELINE": "t.json",
        "REIGEN_TIMELINE_MARK_CYCLES": "1",
        "REIGEN_STALL_CHECK_DISABLE": "1",
        "REIGEN_STALL_CHECK_TIME_SECONDS": "120",
        "REIGEN_STALL_SHUTDOWN_TIME_SECONDS": "240",
        "REIGEN_THREAD_AFFINITY": "1",
        "REIGEN_START_TIMEOUT": "60",
        "REIGEN_LOG": "info",
        "REIGEN_LOG_HIDE_TIME": "1",
    }
    assert len(result.without_effect) == 5
    assert "controller in the configuration file" in result.without_effect
    assert not result.unknown


def test_options_win_over_the_environment_and_that_over_the_file() -> None:
    document = {"params": {"cache_capacity": 1, "fusion_threshold_mb": 1}, "logging": {"level": "error"}}
    environ = {"HOROVOD_CACHE_CAPACITY": "2", "REIGEN_LOG_LEVEL": "info", "HOROVOD_FUSION_THRESHOLD": ""}
    alone = translated("", document, environ)
    assert load_config({**environ, **alone.variables}).cache_capacity == 2
    assert load_config({**environ, **alone.variables}).log_level == "info"
    assert load_config({**environ, **alone.variables}).fusion_threshold_bytes == 1 << 20
    config = load_config({**environ, **translated("--cache-capacity 3", document, environ).variables})
    assert (config.cache_capacity, config.origins["cache_capacity"]) == (3, "--cache-capacity")


def test_what_has_no_effect_is_listed_as_it_was_written() -> None:
    line = "--gloo --no-torus-allreduce --tcp --blacklist-cooldown-range 1 2 --disable-cache"
    listed = set(translated(line).without_effect)
    assert listed == {
        "--gloo",
        "--no-torus-allreduce",
        "--tcp",
        "--blacklist-cooldown-range",
        "--disable-cache",
    }


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("--fusion-threshold-mb=-1", "fusion_threshold_mb=-1 must be >= 0"),
        ("--fusion-threshold-mb 1.5", "fusion_threshold_mb=1.5 must be a whole number"),
        ("--cycle-time-ms=-0.1", "cycle_time_ms=-0.1 must be >= 0"),
        ("--cycle-time-ms=nan", "cycle_time_ms=nan must be >= 0"),
        ("--cache-capacity=-1", "cache_capacity=-1 must be >= 0"),
        ("--autotune-gaussian-process-noise 1.1", r"autotune_gaussian_process_noise=1.1 must be in \[0, 1\]"),
        ("--autotune-warmup-samples=-1", "autotune_warmup_samples=-1 must be >= 0"),
        ("--start-timeout 0", "start_timeout=0 must be > 0"),
        ("--start-timeout soon", "start_timeout=soon must be a number"),
        ("--thread-affinity=-1", "thread_affinity=-1 must be >= 0"),
        ("--log-level LOUD", "log_level=LOUD must be one of TRACE, DEBUG"),
    ],
)
def test_values_that_make_no_sense(line: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        translated(line)


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ({"params": {"cache_capacity": -1}}, "params.cache_capacity=-1 must be >= 0"),
        ({"params": {"cache_capacity": "many"}}, "params.cache_capacity=many must be a whole number"),
        ({"timeline": {"mark_cycles": 3}}, "timeline.mark_cycles=3 must be true or false"),
        ({"controller": "smoke"}, "controller=smoke must be one of gloo, mpi, jsrun"),
        (["params"], "must hold sections"),
    ],
)
def test_files_that_make_no_sense(document: object, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        translated("", document)


def test_settings_of_the_file_that_mean_nothing_are_listed() -> None:
    document = {"params": {"cache_capacty": 1}, "weather": "fine", "timeline": None}
    assert translated("", document).unknown == ("params.cache_capacty", "weather", "timeline")


@pytest.mark.parametrize("line", ["--gloo --mpi", "--autotune --no-autotune", "-H localhost:2 -hostfile f"])
def test_options_that_exclude_each_other(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args([*line.split(), "command"])
    assert "not allowed with argument" in capsys.readouterr().err


def test_the_command_keeps_its_own_options() -> None:
    chosen: Namespace = make_parser().parse_args(["-np", "2", "python", "x.py", "--autotune", "-p", "3", "-v"])
    assert chosen.command == ["python", "x.py", "--autotune", "-p", "3", "-v"]
    assert chosen.autotune is None
