"""`reigen attach [JOB]`: take the place of a launcher that was lost; without a job, list those that there are."""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import Sequence

from reigen.cli.run import run_arguments
from reigen.errors import ConfigError, LaunchError
from reigen.launch.agent.unattended import HostResult, read_results
from reigen.launch.elastic.continuation import ContinuedJob
from reigen.launch.exit_report import describe_exit
from reigen.launch.job_directory import (
    JobFile,
    JobRecord,
    has_launcher,
    job_directory,
    list_jobs,
    read_record,
)
from reigen.launch.options import complain


def main(arguments: Sequence[str]) -> int:
    """Attach to a job, or list the jobs; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="reigen attach",
        description="Take the place of the lost launcher of a `reigen run --on-launcher-loss continue` job. Without "
        "JOB: list such jobs of this user on this host.",
    )
    parser.add_argument("job", nargs="?", metavar="JOB", help="name of the job")
    chosen = parser.parse_args(arguments)
    try:
        return _list_jobs() if chosen.job is None else _attach(chosen.job)
    except (ConfigError, LaunchError) as error:
        complain(str(error))
        return error.exit_code if isinstance(error, LaunchError) else 2


def _list_jobs() -> int:
    for record, directory in list_jobs():
        results = read_results(directory)
        if has_launcher(directory):
            state = f"launcher: process {record.pid}"
        elif _lives(record):
            state = "no launcher"
        else:
            state = "has ended" if results else "no launcher, and no agent of it answers"
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.started))
        print(f"{record.job}  {started}  {record.host}  {state}: {shlex.join(record.arguments)}")
    return 0


def _lives(record: JobRecord) -> bool:
    return any(ContinuedJob.is_reachable(agent) for agent in record.agents)


def _attach(job: str) -> int:
    directory = job_directory(job)
    record = read_record(directory)
    if record is not None and not has_launcher(directory) and not _lives(record):
        return _report_end(JobFile.take_over(job))
    file = JobFile.take_over(job)
    record = file.record
    os.environ.clear()
    os.environ.update(record.environ)
    try:
        os.chdir(record.directory)
    except OSError as error:
        raise LaunchError(f"the directory of job {job} cannot be used: {record.directory}: {error.strerror}") from None
    return run_arguments(record.arguments, ContinuedJob(file, takes_over=True))


def _report_end(file: JobFile) -> int:
    """Say how a job has ended that had no launcher; returns its exit code, as far as that is known on this host."""
    results = read_results(file.directory)
    if not results:
        hosts = ", ".join(agent.host or "this one" for agent in file.record.agents) or "none"
        raise LaunchError(
            f"no agent of job {file.record.job} answers (hosts: {hosts}), and none has left its result in "
            f"{file.directory} on this host: look there on the others; `rm -r` forgets the job"
        )
    for result in results:
        print(_describe(result), end="")
    file.remove()
    return _exit_code(results)


def _describe(result: HostResult) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(result.ended))
    lines = [f"host {result.host}: ended without a launcher at {when}; output in {result.output_directory}"]
    for process in result.processes:
        end = "exit code 0" if process.exit_code == 0 else describe_exit(process.exit_code, process.cause)
        lines.append(f"  slot {process.slot}: {end}")
        if process.exit_code != 0:
            lines += [f"    {line}" for line in process.last_words.splitlines()[-20:]]
    return "\n".join(lines) + "\n"


def _exit_code(results: Sequence[HostResult]) -> int:
    """Return 0 where a program was done and no process has failed behind that; otherwise the first failure's code."""
    codes = [process.exit_code for result in results for process in result.processes]
    failures = [code if code > 0 else 128 - code for code in codes if code not in {0, 75}]
    if any(result.finished is not None for result in results):
        last = results[-1].processes[-1:]
        return failures[-1] if last and last[0].exit_code not in {0, 75} else 0
    return failures[0] if failures else 1
