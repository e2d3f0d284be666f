"""`run`: one function in several processes that form a job; its results, by rank."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import msgspec

from reigen.errors import LaunchError, RankFailedError
from reigen.launch.supervision.process_tree import signal_name
from reigen.resources.stdio import occupy_standard_descriptors
from reigen.runner.interpreter import module_command
from reigen.runner.job_monitor import JobMonitor
from reigen.runner.options import RunSettings, resolve_arguments
from reigen.runner.outcome import (
    Outcome,
    RankProcessDied,
    decide_elastic_outcome,
    decide_outcome,
    list_complaints,
    rank_died_error,
)
from reigen.runner.result_channel import LauncherComplaint, LauncherFinished, RankReport, ResultChannel
from reigen.runner.serialization import check_call, pack_object, unpack_object, unpickle_exception


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | os.PathLike[str] | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    launcher: str | None = None,
    num_servers: int = 0,
    eject_stragglers: str | None = None,
    replicate_servers: int | None = None,
    dashboard: bool | int | str | None = None,
    metrics_port: int | str | None = None,
    metrics_file: str | os.PathLike[str] | None = None,
    spares: int | str | None = None,
    max_servers: int | None = None,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` in ``num_proc`` new processes that form a job, and wait for all of them.

    ``func`` calls ``init()`` itself, as a script does. Function, arguments and results are pickled by cloudpickle:
    lambdas, closures, and classes of ``__main__`` work. Modules are imported by name, from this process's ``sys.path``.
    The processes have this one's environment and working directory; their output comes out here, line by line, with the
    rank in front. They cannot read this process's stdin.

    May be called from any thread, from several at the same time, and from a function that itself was started so.

    Args:
        func: the function.
        args: its arguments, the same in all processes.
        kwargs: its keyword arguments.
        num_proc: the number of processes; if left out in an elastic job, ``max_num_proc``, or else ``min_num_proc``.
        min_num_proc: makes an elastic job: processes that die are replaced, and those that are left go on, while there
            are so many. The loop of ``func`` is in a function that ``elastic.run`` decorates; one without it may only
            return everywhere.
        max_num_proc: the greatest number of processes of an elastic job; by default ``num_proc``.
        slots: of an elastic job: of hosts that the discovery script prints without a number, by default 1.
        reset_limit: of an elastic job: how many changes because of failures it survives.
        cooldown_range: of an elastic job: least and greatest seconds for which a failed process's place rests.
        hosts: hosts and greatest numbers of processes: ``"h1:4,h2:4"``; by default this host. Others are reached by
            ssh, without a password, and need the same Python, Reigen, modules and working directory.
        hostfile: a file with such hosts, a line each: ``h1 slots=4``.
        host_discovery_script: a program that prints an elastic job's hosts, ``h1:4`` each, and is run every second.
        start_timeout: seconds that ``init()`` waits for all ranks.
        ssh_port: sshd's port there, by default as ssh is configured.
        ssh_identity_file: private key, by default the same.
        disable_cache: no effect.
        output_filename: a directory that keeps rank N's output, too: ``rank.N/stdout`` and ``rank.N/stderr``.
        verbose: report on stderr which processes are started, where, and why there.
        use_gloo: no effect.
        use_mpi: no effect.
        mpi_args: no effect.
        network_interface: interfaces through which hosts may talk to each other: ``"eth0,eth1"``.
        network_interfaces: the same, as a text or as a list.
        executable: the Python to run, with Reigen installed; by default this process's.
        np: deprecated, ``num_proc``.
        min_np: deprecated, ``min_num_proc``.
        max_np: deprecated, ``max_num_proc``.
        launcher: how processes are started, as ``reigen run --launcher`` has it; by default on other hosts by ssh.
        num_servers: parameter servers that run beside the ranks, on their hosts in turn, for `reigen.kv`.
        eject_stragglers: of an elastic job, ``"FACTOR/STEPS"``, as ``"3/50"``: replace a process that has made so many
            steps in a row so much slower for all; by default that is only reported.
        replicate_servers: 2: what a server holds is in the memory of another one, too, from which it is started again
            when it dies.
        dashboard: serve a dashboard of the job to browsers, at a URL that is printed on stderr: True, a port, or
            ``"ADDRESS:PORT"``, as ``reigen run --dashboard`` has it.
        metrics_port: serve metrics for Prometheus: a port, or ``"ADDRESS:PORT"``, as ``reigen run --metrics-port``.
        metrics_file: write metrics there, as JSON lines.
        spares: of an elastic job: how many more processes are started, which wait to take the places of those that
            die; ``"1:warm"``: they make the steps of a ``Job`` of `reigen.torch.elastic` meanwhile, without samples, so
            that they have its state.
        max_servers: of an elastic job: the greatest number of processes in which its servers run; there are as many
            servers. They begin in ``num_servers`` processes, and ``kv.resize_servers`` changes that number.

    Returns:
        The values that the processes returned, by rank; of an elastic job, those of the last members.

    Raises:
        RankFailedError: a rank raised, exited or was killed: the first one that failed by itself. Its ``__cause__`` is
            the exception of that rank, where it can be loaded here. The other ranks were stopped.
        ConfigError: (a ValueError) arguments make no sense, or contradict each other.
        UnsupportedTypeError: ``func`` or an argument cannot be pickled.
        SharedMemoryError: the host has not enough memory for the pickle of ``func`` and its arguments.
        LaunchError: processes cannot be started, or the launcher was stopped by a signal.

    Example::

        def train(learning_rate):
            import reigen.torch as hvd

            hvd.init()
            ...
            return loss

        losses = reigen.run(train, (0.1,), num_proc=4)
    """
    given = {name: value for name, value in locals().items() if name not in {"func", "args", "kwargs"}}
    call = check_call(func, args, kwargs)
    for old, name in (("np", "num_proc"), ("min_np", "min_num_proc"), ("max_np", "max_num_proc")):
        if (value := given.pop(old)) is not None:
            warnings.warn(f"run(): {old} is deprecated, use {name}", DeprecationWarning, stacklevel=2)
            given[name] = value
    settings, warning = resolve_arguments(given)
    if warning:
        warnings.warn(f"run(): {warning}", stacklevel=2)
    return _run(call, settings)


def run_on_this_host(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], num_proc: int, environ: Mapping[str, str]
) -> list[Any]:
    """Call a function as `run` does, on this host, with these variables above this process's."""
    defaults = {name: parameter.default for name, parameter in signature(run).parameters.items()}
    settings, _ = resolve_arguments({**defaults, "num_proc": num_proc, "launcher": "local"})
    return _run((func, tuple(args), dict(kwargs)), settings, {**os.environ, **environ})


def _run(
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
    settings: RunSettings,
    environ: Mapping[str, str] | None = None,
) -> list[Any]:
    occupy_standard_descriptors()
    payload = pack_object(call, "the function, or one of its arguments,")
    try:
        own, inherited = ResultChannel.pair()
        with own:
            with inherited:
                descriptors = payload, inherited.fileno()
                arguments = msgspec.json.encode(settings).decode(), *map(str, (os.getpid(), *descriptors))
                command = module_command("reigen.runner.launcher_process", arguments)
                monitor = JobMonitor(command, own, descriptors, environ)
            with monitor:
                monitor.wait()
                return collect_results(monitor, settings.num_ranks)
    finally:
        os.close(payload)


def collect_results(monitor: JobMonitor, size: int, hosts: Sequence[str] = ()) -> list[Any]:
    """Return the results by rank, or raise RankFailedError, or LaunchError; ``hosts`` by rank, where they are known."""
    ended = next((message for message in monitor.messages if isinstance(message, LauncherFinished)), None)
    if ended is None or ended.slots is None:
        outcome: Outcome = decide_outcome(monitor.messages, size)
    else:
        outcome = decide_elastic_outcome(monitor.messages, ended)
    match outcome:
        case tuple(slots):
            return [_result(monitor, slot, len(slots)) for slot in slots]
        case None:
            for complaint in list_complaints(monitor.messages):
                warnings.warn(f"run(): {complaint}", RuntimeWarning, stacklevel=4)
            return [_result(monitor, rank, size) for rank in range(size)]
        case RankReport(rank) as report:
            text, frozen = unpack_object(monitor.payloads[rank])
            raise rank_raised_error(report, size, text, host_of(rank, hosts)) from unpickle_exception(frozen)
        case RankProcessDied() as death:
            raise rank_died_error(death, size, list_complaints(monitor.messages), host_of(death.rank, hosts))
        case LauncherFinished(signum):
            assert signum is not None, "it was stopped"
            raise LaunchError(f"the job was stopped: its launcher was sent {signal_name(signum)}", 128 + signum)
        case LauncherComplaint(reason):
            raise LaunchError(reason or "the job's launcher was killed, and so were the ranks", monitor.exit_code or 1)


def host_of(rank: int, hosts: Sequence[str]) -> str:
    """Return the host of a rank; empty: it is not known."""
    return hosts[rank] if rank < len(hosts) else ""


def rank_raised_error(report: RankReport, size: int, text: str, host: str = "") -> RankFailedError:
    """Make the error for a function that raised; ``text`` is the traceback."""
    where = f" (host {host})" if host else ""
    message = f"rank {report.rank} of {size}{where} raised {report.text}\n\n{text.rstrip()}"
    return RankFailedError(message, report.exit_code, rank=report.rank, traceback=text, host=host)


def _result(monitor: JobMonitor, rank: int, size: int) -> Any:
    payload = monitor.payloads.pop(rank)
    try:
        return unpack_object(payload)
    except Exception as error:
        what = f"what the function returned in rank {rank} of {size} cannot be loaded here"
        raise RankFailedError(f"{what}: {type(error).__name__}: {error}", 0, rank=rank) from error
    finally:
        os.close(payload)
