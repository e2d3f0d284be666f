"""Options of `reigen launch` about a job that is submitted, under the names of MXNet's launch.py."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from reigen.launch.submission import SubmissionOptions


def add_submission_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for `parse_submission_options`, and ``print_job``."""
    group = parser.add_argument_group("jobs to submit (--launcher sge, kubernetes, yarn, outside a job)")
    add = group.add_argument
    add("--print", dest="print_job", action="store_true", help="show what would be submitted, and exit")
    add("--jobname", dest="job_name", metavar="NAME", help="name of the job (default: derived from the command)")
    add("--queue", metavar="NAME", help="queue to submit to (default: the system's default)")
    for role in ("worker", "server"):
        add(f"--{role}-cores", type=int, metavar="N", help=f"processors of each {role} (default: not requested)")
        add(
            f"--{role}-memory",
            metavar="4g",
            help=f"memory of each {role}, with k, m, g or t, powers of 1024 (default: not requested)",
        )
    add("--gpus", type=int, metavar="N", help="GPUs of each worker (default: not requested)")
    add("--pods", type=int, metavar="N", help="Kubernetes: how many pods the workers share (default: one each)")
    add("--archives", action="append", metavar="FILE", help="YARN: unpacked in the working directory; may be repeated")
    add("--files", action="append", metavar="FILE", help="YARN: placed in the working directory; may be repeated")
    add(
        "--auto-file-cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="YARN: also send files that the command names",
    )
    add(
        "--containers-by-host",
        action="store_true",
        help="YARN: one container on each node, for as many workers as fit (default: one for each worker)",
    )
    add("--hdfs-tempdir", metavar="DIR", help="YARN: directory for the job's files while it runs")
    add("--sge-log-dir", type=Path, metavar="DIR", help="Grid Engine: directory for the job's output (default: here)")
    add("--sge-pe", metavar="NAME", help="Grid Engine: parallel environment (default: the only suitable one)")
    add("--kube-namespace", metavar="NAME", help="Kubernetes: namespace (default: kubectl's)")
    for role in ("worker", "server"):
        add(f"--kube-{role}-image", metavar="IMAGE", help=f"Kubernetes: container image of {role}s")
        add(
            f"--kube-{role}-template",
            type=Path,
            metavar="FILE",
            help=f"Kubernetes: template for the manifest of {role}s",
        )


def parse_submission_options(chosen: argparse.Namespace) -> SubmissionOptions:
    """Make the options of the namespace of a parser that has them."""
    found = {each.name: getattr(chosen, each.name) for each in fields(SubmissionOptions)}
    for name in ("archives", "files"):
        found[name] = tuple(found[name] or ())
    return SubmissionOptions(**found)


def arguments_before_command(arguments: list[str], command: list[str]) -> tuple[str, ...]:
    """Return the arguments that stand before the command, for the `reigen launch` in the job, without `--print`.

    Args:
        arguments: all of them.
        command: those that the parser took for the command, perhaps with a ``--`` before it.
    """
    before = arguments[: len(arguments) - len(command)]
    if before[-1:] == ["--"]:
        before.pop()
    return tuple(word for word in before if word != "--print")
