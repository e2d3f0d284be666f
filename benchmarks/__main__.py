"""`reigen bench WHAT`: Reigen and its peers, alternately in one run, on this machine.

``python -m benchmarks`` in a checkout does the same.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from reigen.errors import ConfigError, ReigenError
from reigen.files import check_can_be_written, write_atomically

if TYPE_CHECKING:
    from benchmarks.harness.report import Document

_EPILOG = """\
Everything is measured in rounds: in each, every mode has a turn, in an order that rotates. All modes run in processes
that are started alike, one thread each, rank r on core r. A peer that is not installed is left out, with a line that
says so. Ratios compare modes within one run; figures of different runs should not be compared.
"""
_LAST_SECONDS = 5.0
#: Columns of the tables where there is no terminal.
_WIDTH = 120


def main(arguments: Sequence[str]) -> int:
    """Measure, print tables and write JSON; returns 0, or 1 when one of Reigen's own modes failed."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    for option in ("json", "costs"):
        file = getattr(chosen, option, None)
        try:
            if file is not None:
                check_can_be_written(file)  # before minutes are spent on what it is to hold
        except OSError as error:
            parser.error(f"--{option} {file}: {error.strerror}")
    try:
        return _run(chosen, shlex.join(["reigen", "bench", *arguments]))
    except ConfigError as error:
        parser.error(str(error))
    except ReigenError as error:
        print(f"reigen bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(chosen: argparse.Namespace, command: str) -> int:
    from rich.console import Console

    from benchmarks.harness.report import show

    measure: Callable[[argparse.Namespace, str, Callable[[str], None]], Document] = chosen.measure
    with _kill_descendants_on_exit(), _progress() as report:
        document = measure(chosen, command, report)
    show(document, command, Console(width=None if sys.stdout.isatty() else _WIDTH))
    if chosen.json is not None:
        document.save(chosen.json)
    return 1 if document.has_failed("reigen") else 0


def _allreduce(chosen: argparse.Namespace, command: str, report: Callable[[str], None]) -> Document:
    from benchmarks.allreduce import PEERS, Settings, run
    from benchmarks.harness.sizes import parse_size

    peers = tuple(name for name in chosen.peers.split(",") if name)
    if not set(peers) <= set(PEERS):
        raise ConfigError(f"--peers {chosen.peers}: the peers are {', '.join(PEERS)}")
    sizes = tuple(parse_size(size) for size in chosen.sizes.split(",") if size)
    gradients = not chosen.no_gradients
    return run(Settings(chosen.np, sizes, chosen.rounds, chosen.seconds, peers, gradients), command, report)


def _calls(chosen: argparse.Namespace, command: str, report: Callable[[str], None]) -> Document:
    from benchmarks.calls import PEERS, Settings, run

    peers = tuple(name for name in chosen.peers.split(",") if name)
    if not set(peers) <= set(PEERS):
        raise ConfigError(f"--peers {chosen.peers}: the peers are {', '.join(PEERS)}")
    settings = Settings(
        chosen.np,
        chosen.tensors,
        chosen.rounds,
        chosen.seconds,
        peers,
        gradients=not chosen.no_gradients,
        memory=not chosen.no_memory,
    )
    return run(settings, command, report)


def _train_step(chosen: argparse.Namespace, command: str, report: Callable[[str], None]) -> Document:
    if find_spec("torch") is None:
        raise ConfigError("train-step trains with PyTorch, which is not installed: pip install torch")
    from benchmarks.train_step import MODELS, OPTIMIZERS, Settings, run

    models, optimizers = tuple(chosen.models.split(",")), tuple(chosen.optimizers.split(","))
    if not set(models) <= set(MODELS):
        raise ConfigError(f"--models {chosen.models}: the models are {', '.join(MODELS)}")
    if not set(optimizers) <= set(OPTIMIZERS):
        raise ConfigError(f"--optimizers {chosen.optimizers}: the optimizers are {', '.join(OPTIMIZERS)}")
    settings = Settings(
        chosen.np,
        models,
        chosen.rounds,
        chosen.seconds,
        timeline=chosen.timeline,
        optimizers=optimizers,
        memory=chosen.memory,
    )
    return run(settings, command, report)


def _frameworks(chosen: argparse.Namespace, command: str, report: Callable[[str], None]) -> Document:
    from benchmarks.frameworks import MODELS, PARTS, Settings, run

    parts, models = tuple(chosen.only.split(",")), tuple(chosen.models.split(","))
    if not set(parts) <= set(PARTS):
        raise ConfigError(f"--only {chosen.only}: the parts are {', '.join(PARTS)}")
    if not set(models) <= set(MODELS):
        raise ConfigError(f"--models {chosen.models}: the models are {', '.join(MODELS)}")
    return run(Settings(chosen.np, parts, models, chosen.rounds, chosen.seconds), command, report)


def _costs(chosen: argparse.Namespace, command: str, report: Callable[[str], None]) -> Document:
    if find_spec("torch") is None:
        raise ConfigError("costs are measured by sums with PyTorch, which is not installed: pip install torch")
    import json

    from benchmarks.costs import Settings, costs_content, run

    document, costs = run(Settings(chosen.np, chosen.rounds, chosen.seconds), command, report)
    if chosen.costs is not None:
        write_atomically(chosen.costs, [json.dumps(costs_content(document, costs), indent=1).encode() + b"\n"])
    return document


def _startup(chosen: argparse.Namespace, command: str, report: Callable[[str], None]) -> Document:
    from benchmarks.startup import run

    return run(chosen.np, chosen.rounds, command, report)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="reigen bench",
        description="Measure Reigen and its peers, alternately in one run, on this machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="WHAT")
    add = _add_command(commands, "allreduce", "sums over the ranks: Reigen, Gloo, MPI, a plain copy", _allreduce, 7)
    sizes = "1KiB,4KiB,64KiB,1MiB,25MiB,100MiB"
    add("--sizes", default=sizes, metavar="A,B", help=f"bytes on each rank; empty: none (default: {sizes})")
    add("--peers", default="gloo,mpi", metavar="A,B", help="gloo, mpi, both or none (default: gloo,mpi)")
    add("--no-gradients", action="store_true", help="leave out the gradients of ResNet-50")
    add("--seconds", type=_seconds, default=0.5, metavar="S", help="length of a turn (default: 0.5)")
    add = _add_command(commands, "calls", "many tensors as separate calls: Reigen, Gloo; memory of fusion", _calls, 7)
    add("--tensors", type=_count, default=1000, metavar="N", help="how many small tensors (default: 1000)")
    add("--peers", default="gloo", metavar="A", help="gloo, or none (default: gloo)")
    add("--no-gradients", action="store_true", help="leave out the gradients of ResNet-50")
    add("--no-memory", action="store_true", help="leave out the memory of fusion")
    add("--seconds", type=_seconds, default=0.5, metavar="S", help="length of a turn (default: 0.5)")
    add = _add_command(commands, "train-step", "a training step: one rank alone, DDP, Reigen", _train_step, 9)
    add("--models", default="mlp,deep,cnn", metavar="A,B", help="of mlp, deep and cnn (default: all)")
    add("--seconds", type=_seconds, default=1.5, metavar="S", help="length of a turn (default: 1.5)")
    add("--optimizers", default="sgd", metavar="A,B", help="sgd (with momentum), adam or both (default: sgd)")
    add("--timeline", action="store_true", help="measure what a timeline costs, too")
    add("--memory", action="store_true", help="measure the memory of all ranks together, too")
    add = _add_command(commands, "frameworks", "TensorFlow, Keras and JAX: sums, steps, imports; peers", _frameworks, 5)
    parts = "sums,tensorflow,keras,jax,import"
    add("--only", default=parts, metavar="A,B", help=f"of {parts} (default: all)")
    add("--models", default="mlp,deep,cnn", metavar="A,B", help="of mlp, deep and cnn (default: all)")
    add("--seconds", type=_seconds, default=0.6, metavar="S", help="length of a turn (default: 0.6)")
    add = _add_command(commands, "costs", "messages and bytes on this machine, for `reigen plan`", _costs, 3)
    add("--costs", type=Path, metavar="FILE", help="write what `reigen plan --costs FILE` reads")
    add("--seconds", type=_seconds, default=0.3, metavar="S", help="length of a turn (default: 0.3)")
    _add_command(commands, "startup", "starting a job, compared with starting Python", _startup, 9)
    return parser


def _add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    text: str,
    measure: Callable[..., Document],
    rounds: int,
) -> Callable[..., argparse.Action]:
    """A command with the options that all of them have; returns its ``add_argument``."""
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(measure=measure)
    parser.add_argument("-np", "--np", type=_count, default=2, metavar="N", help="how many ranks (default: 2)")
    parser.add_argument(
        "--rounds", type=_count, default=rounds, metavar="R", help=f"turns of each mode (default: {rounds})"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found there, too")
    return parser.add_argument


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 60:
        raise argparse.ArgumentTypeError("must be more than 0 and at most 60 seconds")
    return value


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Says what is going on: on a terminal in one line that changes, elsewhere in a line for each thing measured."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("starting") as status:
            yield status.update
        return
    seen: set[str] = set()

    def once(what: str) -> None:
        heading = what.partition(":")[0]
        if heading not in seen:
            seen.add(heading)
            print(f"measuring {heading}", file=sys.stderr, flush=True)

    yield once


@contextmanager
def _kill_descendants_on_exit() -> Iterator[None]:
    """However the block ends, every process below this one ends, too; SIGTERM ends the block like Ctrl-C."""
    from reigen.launch.supervision.process_tree import become_subreaper, kill_all_below

    def stop(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    become_subreaper()
    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        kill_all_below(_LAST_SECONDS)
        signal.signal(signal.SIGTERM, previous)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
