"""`run`: one function in several processes that form a job; its results, by rank."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from reigen.errors import LaunchError
from reigen.launch.process_tree import signal_name
from reigen.resources.stdio import occupy_standard_descriptors
from reigen.runner.interpreter import module_command
from reigen.runner.job_monitor import JobMonitor
from reigen.runner.launcher_process import LauncherConfig
from reigen.runner.options import RunArguments, RunSettings, resolve_arguments
from reigen.runner.outcome import (
    AllReturned,
    FunctionRaised,
    LauncherLost,
    LauncherStopped,
    RankProcessDied,
    decide_outcome,
    list_complaints,
)
from reigen.runner.rank_errors import function_raised_error, rank_died_error, unreadable_result_error
from reigen.runner.result_channel import ResultChannel
from reigen.runner.serialization import pack_object, unpack_object, unpickle_exception


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
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` in ``num_proc`` new processes that form a job, and wait for all of them.

    ``func`` calls ``init()`` itself, as a script does. Function, arguments and results are pickled by cloudpickle:
    lambdas, closures, and classes of ``__main__`` work. Modules are imported by name, from this process's ``sys.path``.
    The processes have this one's environment and working directory; what they print comes out here, line by line, with
    the rank in front. They cannot read this process's stdin.

    May be called from any thread, from several at the same time, and from a function that itself was started so.

    Args:
        func: what to call.
        args: its arguments, the same in all processes.
        kwargs: its keyword arguments.
        num_proc: how many processes.
        min_num_proc: of an elastic job, which is not possible yet; ``num_proc`` is allowed.
        max_num_proc: the same.
        slots: no effect.
        reset_limit: no effect.
        cooldown_range: no effect.
        hosts: where, and how many processes at most: ``"h1:4,h2:4"``; by default this host. Others are reached by ssh,
            without a password, and need the same Python, Reigen, modules and working directory.
        hostfile: a file with such hosts, a line each: ``h1 slots=4``.
        host_discovery_script: not possible yet.
        start_timeout: how many seconds ``init()`` waits for all ranks.
        ssh_port: where sshd listens there, by default what ssh's configuration says.
        ssh_identity_file: private key, by default the same.
        disable_cache: no effect.
        output_filename: a directory; what rank N prints is kept in ``rank.N/stdout`` and ``rank.N/stderr`` there, too.
        verbose: tell on stderr what is started, where, and why there.
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

    Returns:
        What the processes returned, by rank.

    Raises:
        RankFailedError: a rank raised, exited or was killed. It tells of the first one that failed by itself; its
            ``__cause__`` is the exception of that rank, where it can be loaded here. The other ranks were stopped.
        ConfigError: (a ValueError) arguments make no sense, or ask for what is not possible yet.
        UnsupportedTypeError: ``func`` or an argument cannot be pickled.
        SharedMemoryError: the machine has not enough memory for the pickle of ``func`` and its arguments.
        LaunchError: processes cannot be started, or the launcher was stopped by a signal.

    Example::

        def train(learning_rate):
            import reigen.torch as hvd

            hvd.init()
            ...
            return loss

        losses = reigen.run(train, (0.1,), num_proc=4)
    """
    deprecated = {"num_proc": np, "min_num_proc": min_np, "max_num_proc": max_np}
    for name, value in deprecated.items():
        if value is not None:
            old = name.replace("num_proc", "np")
            warnings.warn(f"run(): {old} is deprecated, use {name}", DeprecationWarning, stacklevel=2)
    settings, warning = resolve_arguments(
        RunArguments(
            num_proc=num_proc if np is None else np,
            min_num_proc=min_num_proc if min_np is None else min_np,
            max_num_proc=max_num_proc if max_np is None else max_np,
            slots=slots,
            reset_limit=reset_limit,
            cooldown_range=cooldown_range,
            hosts=hosts,
            hostfile=hostfile,
            host_discovery_script=host_discovery_script,
            start_timeout=start_timeout,
            ssh_port=ssh_port,
            ssh_identity_file=ssh_identity_file,
            disable_cache=disable_cache,
            output_filename=output_filename,
            verbose=verbose,
            use_gloo=use_gloo,
            use_mpi=use_mpi,
            mpi_args=mpi_args,
            network_interface=network_interface,
            network_interfaces=network_interfaces,
            executable=executable,
            launcher=launcher,
        )
    )
    if warning:
        warnings.warn(f"run(): {warning}", stacklevel=2)
    return _run((func, tuple(args), dict(kwargs or {})), settings)


def _run(call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]], settings: RunSettings) -> list[Any]:
    occupy_standard_descriptors()
    parcel = pack_object(call, "the function, or one of its arguments,")
    try:
        ours, theirs = ResultChannel.pair()
        with ours:
            with theirs:
                watch = JobMonitor(
                    _launcher_command(settings, parcel, theirs.fileno()), ours, (parcel, theirs.fileno())
                )
            with watch:
                watch.wait()
                return _collect_results(watch, settings.num_ranks)
    finally:
        os.close(parcel)


def _launcher_command(settings: RunSettings, parcel: int, line: int) -> tuple[str, ...]:
    order = LauncherConfig(
        caller=os.getpid(),
        call=parcel,
        line=line,
        num_ranks=settings.num_ranks,
        start_timeout_seconds=settings.start_timeout_seconds,
        output_directory=settings.output_directory,
        verbose=settings.verbose,
        executable=settings.executable,
        hosts=tuple((host.name, host.slots) for host in settings.hosts),
        launcher=settings.launcher,
        ssh_port=settings.ssh_port,
        ssh_identity_file=settings.ssh_identity_file,
        network_interfaces=settings.network_interfaces,
    )
    return module_command("reigen.runner.launcher_process", [msgspec.json.encode(order).decode()])


def _collect_results(watch: JobMonitor, size: int) -> list[Any]:
    """The results by rank.

    Raises:
        RankFailedError: a rank failed, or what it returned cannot be loaded here.
        LaunchError: the launcher failed.
    """
    match decide_outcome(watch.messages, size):
        case AllReturned():
            for complaint in list_complaints(watch.messages):
                warnings.warn(f"run(): {complaint}", RuntimeWarning, stacklevel=4)
            return [_result(watch, rank, size) for rank in range(size)]
        case FunctionRaised(report):
            text, frozen = unpack_object(watch.parcels[report.rank])
            raise function_raised_error(report, size, text) from unpickle_exception(frozen)
        case RankProcessDied() as death:
            raise rank_died_error(death, size, list_complaints(watch.messages))
        case LauncherStopped(signum):
            raise LaunchError(f"the job was stopped: its launcher was sent {signal_name(signum)}", 128 + signum)
        case LauncherLost(reason):
            raise LaunchError(reason or "the job's launcher was killed, and so were the ranks", watch.exit_code or 1)


def _result(watch: JobMonitor, rank: int, size: int) -> Any:
    parcel = watch.parcels.pop(rank)
    try:
        return unpack_object(parcel)
    except Exception as error:
        raise unreadable_result_error(rank, size, error) from error
    finally:
        os.close(parcel)
