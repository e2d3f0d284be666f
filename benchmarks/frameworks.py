"""`reigen bench frameworks`: what Reigen costs in TensorFlow, Keras and JAX, compared with their own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.harness.crew import Crew, CrewSpec, Start
from benchmarks.harness.figures import Overhead, Summary, overhead, overhead_ratio, ratio, summarize
from benchmarks.harness.peers import BENCHMARKS
from benchmarks.harness.report import Document, Row, Verdict
from benchmarks.harness.schedule import Mode, Report, about, alternate, crews
from benchmarks.harness.work import Case
from benchmarks.programs.sums import CHAIN_LENGTH
from benchmarks.train_step import Agreement, agreement
from reigen.errors import LaunchError
from reigen.launch.supervision.spawn import reserve_port

MODELS = ("mlp", "deep", "cnn")
SUMS, IMPORTS = "sums", "import"

NUMPY = "reigen (NumPy)"
TENSORFLOW_EAGER, TENSORFLOW_GRAPH = "reigen.tensorflow, eager", "reigen.tensorflow, in a tf.function"
#: As many sums in one call, each of what the one before has given; what is shown is a sum's share.
TENSORFLOW_CHAIN = f"reigen.tensorflow, {CHAIN_LENGTH} in a tf.function, each"
JAX_EAGER, JAX_JIT = "reigen.jax, eager", "reigen.jax, in a jit"
#: What a call of a compiled program takes by itself.
TENSORFLOW_EMPTY, JAX_EMPTY = "tensorflow, a tf.function without a sum", "jax, a jit without a sum"
GROUP, SMALL = "60 gradients, 25 M parameters", "1 KiB"
_SMALL_BYTES, _GROUP_BYTES = 1 << 10, 4 * 30 * (912 * 912 + 912)
_GROUP_BUDGET = 1.3
#: What a blocking sum of 1 KiB may take longer than NumPy's, in microseconds.
_SMALL_BUDGETS = {
    TENSORFLOW_EAGER: 30.0,
    TENSORFLOW_GRAPH: 60.0,
    TENSORFLOW_CHAIN: 60.0,
    JAX_EAGER: 30.0,
    JAX_JIT: 60.0,
}

TORCH_ALONE, TORCH = "torch alone", "reigen.torch"
TENSORFLOW_ALONE, TAPE, STRATEGY = "tensorflow alone", "reigen.tensorflow", "MultiWorkerMirroredStrategy"
KERAS_ALONE, FIT = "keras alone", "reigen.keras"
LEGACY_ALONE, STRATEGY_FIT = "legacy keras alone", "MultiWorkerMirroredStrategy, legacy keras"
JAX_ALONE, OPTAX = "jax alone", "reigen.jax"
JAX_GLOO, JAX_FLAT = "jax.distributed, gloo", "jax.distributed, gloo, one array"
_PEER_BUDGET, _TORCH_BUDGET = 0.5, 1.2
#: Seconds that Reigen's import may add to a framework's.
_IMPORT_BUDGET = 0.1
_IMPORT_LIMIT_SECONDS = 120.0
#: TensorFlow says on stderr what it is doing, at length.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
#: Operations before the first round; fewer where one is a `fit` of several steps.
_WARMUP, _FIT_WARMUP = 5, 2
#: `benchmarks.harness.keras_training.NUM_STEPS`, which needs TensorFlow to be imported.
_FIT_STEPS = 10
_TENSORFLOW, _KERAS, _LEGACY = ("tensorflow",), ("tensorflow", "keras"), ("tensorflow", "tf_keras")
_JAX, _TORCH = ("jax", "optax"), ("torch",)


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        name: what tables call it.
        program: what each rank runs: a file in this directory, or a module.
        variant: of the case.
        alone: the mode of one rank that its overhead is told from; empty: it is itself one rank.
        needs: modules that must be installed.
        variables: set for its processes.
        num_steps: that one operation takes.
    """

    name: str
    program: str
    variant: str
    alone: str
    needs: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    num_steps: int = 1


@dataclass(frozen=True)
class Section:
    """A framework's ways to train.

    Attributes:
        name: of the section.
        ours: the mode that is held against budgets.
        peers: the modes of which the best is what it is compared with; weights are compared with the first one's.
        ways: all of them.
    """

    name: str
    ours: str
    peers: tuple[str, ...]
    ways: tuple[Way, ...]


_TF_PROGRAM, _KERAS_PROGRAM = "benchmarks.programs.tensorflow_train", "benchmarks.programs.keras_train"
_JAX_PROGRAM = "benchmarks.programs.jax_train"
_ON_TENSORFLOW, _OLD = {"KERAS_BACKEND": "tensorflow"}, {"TF_USE_LEGACY_KERAS": "1"}
_TORCH_WAYS = (
    Way(TORCH_ALONE, "benchmarks.programs.alone", "alone", "", _TORCH),
    Way(TORCH, "benchmarks.programs.train", "reigen", TORCH_ALONE, _TORCH),
)
SECTIONS = (
    Section(
        "tensorflow",
        TAPE,
        (STRATEGY,),
        (
            Way(TENSORFLOW_ALONE, _TF_PROGRAM, "alone", "", _TENSORFLOW),
            Way(TAPE, _TF_PROGRAM, "reigen", TENSORFLOW_ALONE, _TENSORFLOW),
            Way(STRATEGY, "mwms_train.py", "strategy", TENSORFLOW_ALONE, _TENSORFLOW),
            *_TORCH_WAYS,
        ),
    ),
    Section(
        "keras",
        FIT,
        (STRATEGY_FIT,),
        (
            Way(KERAS_ALONE, _KERAS_PROGRAM, "alone", "", _KERAS, _ON_TENSORFLOW, _FIT_STEPS),
            Way(FIT, _KERAS_PROGRAM, "reigen", KERAS_ALONE, _KERAS, _ON_TENSORFLOW, _FIT_STEPS),
            Way(LEGACY_ALONE, "mwms_fit.py", "alone", "", _LEGACY, _OLD, _FIT_STEPS),
            Way(STRATEGY_FIT, "mwms_fit.py", "strategy", LEGACY_ALONE, _LEGACY, _OLD, _FIT_STEPS),
            *_TORCH_WAYS,
        ),
    ),
    Section(
        "jax",
        OPTAX,
        (JAX_GLOO, JAX_FLAT),
        (
            Way(JAX_ALONE, _JAX_PROGRAM, "alone", "", _JAX),
            Way(OPTAX, _JAX_PROGRAM, "reigen", JAX_ALONE, _JAX),
            Way(JAX_GLOO, "jax_gloo_train.py", "each", JAX_ALONE, _JAX),
            Way(JAX_FLAT, "jax_gloo_train.py", "flat", JAX_ALONE, _JAX),
            *_TORCH_WAYS,
        ),
    ),
)
PARTS = (SUMS, *(section.name for section in SECTIONS), IMPORTS)


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        num_ranks: processes of each mode that communicates.
        parts: of `PARTS`.
        models: of `MODELS`.
        rounds: turns of each mode.
        turn_seconds: about how long a turn is.
    """

    num_ranks: int
    parts: tuple[str, ...]
    models: tuple[str, ...]
    rounds: int
    turn_seconds: float


def run(settings: Settings, command: str, report: Report) -> Document:
    """Measure part by part; a framework or a peer that is not there or fails is left out, with a line that says why."""
    document = Document(command, settings.num_ranks, settings.rounds)
    if SUMS in settings.parts:
        _measure_sums(settings, document, report)
    for section in SECTIONS:
        if section.name in settings.parts:
            _measure_section(section, settings, document, report)
    if IMPORTS in settings.parts:
        _measure_imports(settings, document, report)
    return document


def missing(needs: Sequence[str]) -> list[str]:
    """The modules that are not installed."""
    return [name for name in needs if importlib.util.find_spec(name) is None]


@contextmanager
def _came(
    specs: Mapping[str, tuple[CrewSpec, tuple[str, ...]]], document: Document, report: Report
) -> Iterator[dict[str, Crew]]:
    """The crews that could be started, of (how to start it, modules that it needs); lines about the others."""
    present: list[CrewSpec] = []
    for name, (spec, needs) in specs.items():
        absent = missing(needs)
        if absent:
            document.skipped.append(f"left out, {' and '.join(absent)} not installed: {name}")
        else:
            present.append(spec)
    with crews(present, report) as (came, failures):
        document.skipped += [f"{name} is left out: {reason}" for name, reason in failures.items()]
        for crew in came.values():
            document.versions |= crew.versions
        yield came


# -- sums --------------------------------------------------------------------------------------------------------------

#: A face's crew, and the modules that it needs.
_FACES = {"reigen, NumPy": (), "reigen, TensorFlow": _TENSORFLOW, "reigen, JAX": ("jax",)}
#: (mode, crew, case).
_SUMS = (
    (NUMPY, "reigen, NumPy", "numpy/eager"),
    (TENSORFLOW_EAGER, "reigen, TensorFlow", "tensorflow/eager"),
    (TENSORFLOW_GRAPH, "reigen, TensorFlow", "tensorflow/graph"),
    (TENSORFLOW_CHAIN, "reigen, TensorFlow", "tensorflow/chain"),
    (JAX_EAGER, "reigen, JAX", "jax/eager"),
    (JAX_JIT, "reigen, JAX", "jax/jit"),
    (TENSORFLOW_EMPTY, "reigen, TensorFlow", "tensorflow/empty"),
    (JAX_EMPTY, "reigen, JAX", "jax/empty"),
)
#: What is done with all gradients; the rest with a small tensor alone.
_GROUPED = (NUMPY, TENSORFLOW_GRAPH, JAX_JIT)


def _measure_sums(settings: Settings, document: Document, report: Report) -> None:
    specs = {
        name: (CrewSpec(name, "benchmarks.programs.sums", settings.num_ranks, variables=_QUIET), needs)
        for name, needs in _FACES.items()
    }
    with _came(specs, document, report) as came:
        for title, nbytes in ((GROUP, 0), (SMALL, _SMALL_BYTES)):
            modes = [
                Mode(
                    name,
                    came[crew],
                    Case(case, nbytes),
                    joint=not nbytes,
                    num_steps=CHAIN_LENGTH if name == TENSORFLOW_CHAIN else 1,
                )
                for name, crew, case in _SUMS
                if crew in came and (nbytes or name in _GROUPED)
            ]
            outcome = alternate(modes, settings.rounds, settings.turn_seconds, about(title, report))
            document.rows.append(Row(title, nbytes or _GROUP_BYTES, outcome.summaries, NUMPY, outcome.failures))
            document.verdicts += sum_verdicts(title, outcome.summaries)


def sum_verdicts(title: str, modes: Mapping[str, Summary]) -> list[Verdict]:
    """A group in NumPy's times; a small tensor in microseconds more than NumPy's."""
    if NUMPY not in modes:
        return []
    found = []
    for name, summary in modes.items():
        if title == GROUP and name in (TENSORFLOW_GRAPH, JAX_JIT):
            quotient = ratio(summary, modes[NUMPY])
            note = f"({quotient.low:.3g} - {quotient.high:.3g})"
            found.append(
                Verdict(f"{title}: {name} / {NUMPY}", quotient.value, _GROUP_BUDGET, at_least=False, note=note)
            )
        elif title == SMALL and name in _SMALL_BUDGETS:
            more = 1e6 * overhead(summary, modes[NUMPY]).median
            claim = f"{title}, blocking: {name}, more than {NUMPY}"
            found.append(Verdict(claim, more, _SMALL_BUDGETS[name], at_least=False, note="us"))
    return found


# -- training steps ----------------------------------------------------------------------------------------------------


def _measure_section(section: Section, settings: Settings, document: Document, report: Report) -> None:
    with ExitStack() as stack:
        specs = {way.name: (_spec(way, settings.num_ranks, stack), way.needs) for way in section.ways}
        with _came(specs, document, report) as came:
            if section.ours not in came:
                return
            for model in settings.models:
                _measure_model(section, model, came, settings, document, report)


def _spec(way: Way, num_ranks: int, stack: ExitStack) -> CrewSpec:
    program = str(BENCHMARKS / way.program) if way.program.endswith(".py") else way.program
    starts: tuple[Start, ...] = ()
    if way.variant == "strategy":
        ports = [stack.enter_context(reserve_port()).getsockname()[1] for _ in range(num_ranks)]
        starts = tuple(Start((), {"TF_CONFIG": text}) for text in strategy_configs(ports))
    return CrewSpec(
        way.name, program, num_ranks if way.alone else 1, variables={**_QUIET, **way.variables}, starts=starts
    )


def strategy_configs(ports: Sequence[int]) -> list[str]:
    """TF_CONFIG of each worker of this host."""
    workers = [f"127.0.0.1:{port}" for port in ports]
    return [
        json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
        for rank in range(len(ports))
    ]


def _measure_model(
    section: Section, model: str, came: Mapping[str, Crew], settings: Settings, document: Document, report: Report
) -> None:
    title = f"{model}, {section.name}"
    warmup = _FIT_WARMUP if any(way.num_steps > 1 for way in section.ways) else _WARMUP
    with tempfile.TemporaryDirectory(prefix="reigen-bench-") as directory:
        saved = {name: Path(directory, name.partition(" ")[0]) for name in (section.ours, section.peers[0])}
        modes = [
            Mode(
                way.name,
                came[way.name],
                Case(f"{model}/{way.variant}", save=str(saved.get(way.name, ""))),
                num_steps=way.num_steps,
            )
            for way in section.ways
            if way.name in came
        ]
        outcome = alternate(modes, settings.rounds, settings.turn_seconds, about(title, report), warmup=warmup)
        summaries = outcome.summaries
        document.rows.append(Row(title, 0, summaries, section.ways[0].name, outcome.failures))
        if saved.keys() <= summaries.keys():
            found = agreement(saved[section.ours], saved[section.peers[0]], settings.num_ranks)
            document.notes.append(_sentence(title, section, found))
    document.overheads[title] = overs = overheads(section, summaries)
    document.verdicts += step_verdicts(title, section, overs)


def overheads(section: Section, summaries: Mapping[str, Summary]) -> dict[str, Overhead]:
    """What each mode's step took longer than one rank alone with the same framework."""
    return {
        way.name: overhead(summaries[way.name], summaries[way.alone])
        for way in section.ways
        if {way.name, way.alone} <= summaries.keys()
    }


def step_verdicts(title: str, section: Section, found: Mapping[str, Overhead]) -> list[Verdict]:
    """Reigen's overhead as a part of the best peer's, and of that in PyTorch."""
    verdicts: list[Verdict] = []
    if section.ours not in found:
        return verdicts
    peers = sorted((name for name in section.peers if name in found), key=lambda name: found[name].median)
    others = [(name, _PEER_BUDGET) for name in peers[:1]] + [(TORCH, _TORCH_BUDGET)] * (TORCH in found)
    for other, budget in others:
        value, reason = overhead_ratio(found[section.ours], found[other])
        claim = f"{title}: overhead of {section.ours} / of {other}"
        verdicts.append(Verdict(claim, value, budget, at_least=False, note="" if value is not None else reason))
    return verdicts


def _sentence(title: str, section: Section, found: Agreement) -> str:
    ranks = "bit-identical on all of Reigen's ranks" if found.ranks_identical else "NOT IDENTICAL on Reigen's ranks"
    verb = "agree" if found.holds else "DO NOT AGREE"
    return (
        f"{title}: after the warm-up the weights of {section.ours} and {section.peers[0]} {verb}: they differ by "
        f"{found.difference:.1e} of the update; they are {ranks}"
    )


# -- imports -----------------------------------------------------------------------------------------------------------

_IMPORT = """
import time
begin = time.perf_counter()
import {framework}
middle = time.perf_counter()
import reigen.{framework}
print(middle - begin, time.perf_counter() - middle)
"""
#: What is imported, and the modules that it needs.
_IMPORTED = {"tensorflow": _TENSORFLOW, "keras": _KERAS, "jax": ("jax",)}


def _measure_imports(settings: Settings, document: Document, report: Report) -> None:
    """By turns, in new processes; a first one of each does not count: it may compile Python's files."""
    present = [name for name, needs in _IMPORTED.items() if not missing(needs)]
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in present}
    for number in range(settings.rounds + 1):
        for name in list(samples):
            report(f"import: round {number} of {settings.rounds}, {name}")
            try:
                seconds = import_seconds(name)
            except LaunchError as error:
                document.skipped.append(f"reigen.{name} is left out: {error}")
                del samples[name]
                continue
            if number:
                samples[name].append(seconds)
    for name, found in samples.items():
        modes = {f"import {name}": summarize([[theirs] for theirs, _ in found])}
        modes[f"then import reigen.{name}"] = summarize([[ours] for _, ours in found])
        document.rows.append(Row(f"import of {name}", 0, modes, f"import {name}"))
        claim = f"import reigen.{name} adds to import {name}"
        document.verdicts.append(
            Verdict(claim, median(ours for _, ours in found), _IMPORT_BUDGET, at_least=False, note="s")
        )


def import_seconds(framework: str) -> tuple[float, float]:
    """Seconds of a framework's import in a new process, and then of Reigen's for it.

    Raises:
        LaunchError: an import failed, or took too long.
    """
    command = [sys.executable, "-c", _IMPORT.format(framework=framework)]
    environ = {**os.environ, **_QUIET, **_ON_TENSORFLOW}
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, check=False, timeout=_IMPORT_LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"its import took more than {_IMPORT_LIMIT_SECONDS:.0f} s") from None
    if done.returncode:
        raise LaunchError(done.stderr.strip().rpartition("\n")[2])
    theirs, ours = done.stdout.split()[-2:]
    return float(theirs), float(ours)
