"""`reigen check --elastic`: bounds of an elastic job, its rule, and the single losses that it would survive."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from reigen.cli.tables import print_table
from reigen.cluster.membership.elastic.voter_memory import VOTER_MEMORY_BYTES, VoterMemory
from reigen.errors import ConfigError, ReigenError
from reigen.launch.elastic.discovery import discovery_command, first_discovery_error, parse_discovered
from reigen.launch.elastic.options import ElasticOptions, ElasticRequest, check_elastic_hosts, resolve_elastic
from reigen.launch.elastic.survival import ElasticForecast
from reigen.launch.hosts import HostInfo, resolve_hosts

_DISCOVERY_SECONDS = 30.0


def add_elastic_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--elastic``, and the options of `reigen run` that describe the job."""
    group = parser.add_argument_group("elastic jobs (docs/elastic.md)")
    add = group.add_argument
    add("--elastic", action="store_true", help="show which losses an elastic job with these options would survive")
    add("-np", "--num-proc", dest="num_ranks", type=int, metavar="N")
    add("--min-np", dest="min_ranks", type=int, metavar="N")
    add("--max-np", dest="max_ranks", type=int, metavar="N")
    add("--host-discovery-script", metavar="COMMAND", help="run once, to find the hosts")
    add("--slots-per-host", type=int, metavar="N")
    add("--on-launcher-loss", choices=("end", "continue"), default="end")
    add("--witness-dir", metavar="DIR", help="a directory that all hosts share; it is not opened")


def check_elastic(chosen: argparse.Namespace) -> int:
    """Print the report; returns 0 if such a job can run, and 1 if not.

    Raises:
        ConfigError: the options contradict each other.
        LaunchError: the discovery script fails.
    """
    options = _options(chosen)
    hosts = _find_hosts(chosen, options)
    check_elastic_hosts(options, hosts, as_horovod=False)
    most = min(options.max_ranks, sum(host.slots for host in hosts))
    forecast = ElasticForecast(
        [(host.name, host.slots) for host in hosts],
        options.min_ranks,
        most,
        continues=chosen.on_launcher_loss == "continue",
        has_witness=chosen.witness_dir is not None,
    )
    problem = _try_voter()
    enough = forecast.num_ranks >= options.min_ranks
    rows = [
        ("this host", "memory of a voter, locks, pidfd", problem or "ok"),
        ("hosts", "name:slots", ", ".join(f"{host.name}:{host.slots}" for host in hosts) or "none"),
        ("bounds", "--min-np", f"{options.min_ranks}: with fewer, steps wait for {options.timeout_seconds:g} s"),
        ("bounds", "--max-np", str(options.max_ranks)),
        ("bounds", "begins with", f"{forecast.num_ranks}" if enough else f"nothing: {forecast.num_ranks} slots"),
        ("quorum", "who may go on", forecast.rule),
    ]
    losses = [(f"loss of {loss.lost}", "goes on" if loss.goes_on else "ends", loss.what) for loss in forecast.losses()]
    bad = [number for number, loss in enumerate(forecast.losses(), len(rows)) if not loss.goes_on]
    print_table([], [*rows, *(losses if enough else [])], bad if enough else [])
    if problem or not enough:
        print(f"problem: {problem or f'the hosts have {forecast.num_ranks} slots, --min-np asks for more'}")
        return 1
    num_survived = sum(loss.goes_on for loss in forecast.losses())
    print(f"an elastic job can run here, and survives {num_survived} of these {len(losses)} single losses")
    return 0


def _options(chosen: argparse.Namespace) -> ElasticOptions:
    least = chosen.min_ranks
    if least is None and chosen.num_ranks is None and chosen.max_ranks is None:
        least = 1
    request = ElasticRequest(
        chosen.num_ranks,
        least or chosen.num_ranks,
        chosen.max_ranks,
        chosen.host_discovery_script,
        chosen.slots_per_host,
    )
    options = resolve_elastic(request)
    if options is None:
        raise ConfigError("an elastic job needs --min-np: with how many processes may it run at least?")
    return options


def _find_hosts(chosen: argparse.Namespace, options: ElasticOptions) -> Sequence[HostInfo]:
    if options.discovery is not None:
        return [HostInfo(*each) for each in _discover(options)]
    default = chosen.num_ranks or chosen.max_ranks or max(options.min_ranks, len(os.sched_getaffinity(0)))
    return resolve_hosts(chosen.hosts, chosen.hostfile, default)


def _discover(options: ElasticOptions) -> Sequence[tuple[str, int]]:
    """Run the discovery script once."""
    script = options.discovery or ""
    try:
        done = subprocess.run(
            discovery_command(script), capture_output=True, text=True, timeout=_DISCOVERY_SECONDS, check=True
        )
        return parse_discovered(done.stdout, options.slots_per_host)
    except subprocess.TimeoutExpired:
        problem = f"it has not ended in {_DISCOVERY_SECONDS:g} s"
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:]
        problem = f"it has failed (exit code {error.returncode}){': ' + last[0] if last else ''}"
    except (OSError, ConfigError) as error:
        problem = str(error)
    raise first_discovery_error(script, problem)


def _try_voter() -> str:
    """Try the first actions of a member; returns the problem, or an empty text."""
    fd = -1
    try:
        os.close(os.pidfd_open(os.getpid()))
        fd = os.memfd_create("reigen-check")
        os.ftruncate(fd, VOTER_MEMORY_BYTES)
        VoterMemory(fd, "check").close()
    except (OSError, ReigenError) as error:
        return str(error)
    finally:
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)
    return ""
