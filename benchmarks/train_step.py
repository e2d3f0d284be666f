"""`reigen bench train-step`: what training on several ranks costs beside training alone, with Reigen and with DDP."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from benchmarks.harness.crew import Crew, CrewSpec
from benchmarks.harness.figures import Footprint, Overhead, Summary, overhead, overhead_ratio
from benchmarks.harness.peers import DDP, find_peer
from benchmarks.harness.report import Document, Row, Verdict
from benchmarks.harness.schedule import WARMUP, Mode, Report, about, alternate, crews
from benchmarks.harness.work import Case
from reigen.errors import LaunchError

MODELS = ("mlp", "deep", "cnn")
ALONE, REIGEN, DDP_DEFAULT, DDP_VIEW = "one rank alone", "reigen", "ddp", "ddp, gradients as bucket views"
#: As many ranks as the others have, none of which communicates: what sharing the machine costs by itself.
SIDE_BY_SIDE = "ranks that do not communicate"
TIMELINE = "reigen, with a timeline"
SHARED = "reigen, shared parameters"
#: Names of optimizers; the first one is what the models are trained with unless it is said otherwise.
OPTIMIZERS = ("sgd", "adam")
#: Tensors of a parameter's size that they keep.
_NUM_STATES = {"sgd": 1, "adam": 2}
_BUDGET = 0.4
#: A step with shared parameters in steps of one rank alone, where every rank has a core.
_SHARED_BUDGETS = {("mlp", "adam"): 0.9, ("deep", "adam"): 0.95, ("mlp", "sgd"): 1.2, ("deep", "sgd"): 1.2}
#: The same in steps of DDP, where ranks share cores.
_CROWDED_BUDGET = 0.6
#: Of parameters and state once a host, and the rest once a rank.
_MEMORY_BUDGET = 1.1
_TIMELINE_BUDGET = 1.02
#: Two ways to add the same float32 numbers may differ in the last bits; this part of the update is far above that.
_TOLERANCE = 1e-3
_ALONE_CREW, _SILENT_CREW, _REIGEN_CREW, _TIMELINE_CREW = "alone", "silent", "reigen", "reigen with a timeline"


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        num_ranks: processes of Reigen and DDP.
        models: names in `benchmarks.harness.models.RECIPES`.
        rounds: turns of each mode.
        turn_seconds: about how long a turn is.
        timeline: measure what a timeline costs, too.
        optimizers: names in `OPTIMIZERS`.
        memory: measure memory, too.
    """

    num_ranks: int
    models: tuple[str, ...]
    rounds: int
    turn_seconds: float
    timeline: bool = False
    optimizers: tuple[str, ...] = OPTIMIZERS[:1]
    memory: bool = False


class Agreement(msgspec.Struct, frozen=True):
    """How far the weights of two modes are apart after the same steps on the same data.

    Attributes:
        difference: Euclidean length of the difference of the weights, as a part of that of the update.
        ranks_identical: whether all ranks of the first mode have bit-identical weights.
    """

    difference: float
    ranks_identical: bool

    @property
    def holds(self) -> bool:
        """Whether the two modes compute the same thing."""
        return self.ranks_identical and self.difference <= _TOLERANCE


def run(settings: Settings, command: str, report: Report) -> Document:
    """Measure; without DDP the overhead of Reigen is shown alone."""
    document = Document(command, settings.num_ranks, settings.rounds)
    peer = find_peer(DDP, settings.num_ranks)
    specs = [
        CrewSpec(_ALONE_CREW, "benchmarks.programs.alone", 1),
        CrewSpec(_SILENT_CREW, "benchmarks.programs.alone", settings.num_ranks),
        CrewSpec(_REIGEN_CREW, "benchmarks.programs.train", settings.num_ranks),
    ]
    if settings.timeline:
        specs.append(CrewSpec(_TIMELINE_CREW, "benchmarks.programs.train", settings.num_ranks))
    if isinstance(peer, str):
        document.skipped.append(peer)
    else:
        specs.append(peer)
    titles = [(model, optimizer) for model in settings.models for optimizer in settings.optimizers]
    with crews(specs, report) as (came, failures):
        document.skipped += [f"{name} is left out: {reason}" for name, reason in failures.items()]
        for crew in came.values():
            document.versions |= crew.versions
        for model, optimizer in titles:
            _measure(model, optimizer, settings, came, document, report)
    if settings.memory:
        by_name = {spec.name: spec for spec in specs}
        for model, optimizer in titles:
            _measure_memory(model, optimizer, by_name, document, report)
    return document


#: What has a turn: the mode's name, its processes, and the variant of the case.
_MODES = (
    (ALONE, _ALONE_CREW, "alone"),
    (SIDE_BY_SIDE, _SILENT_CREW, "alone"),
    (REIGEN, _REIGEN_CREW, "reigen"),
    (SHARED, _REIGEN_CREW, "shared"),
    (TIMELINE, _TIMELINE_CREW, "timeline"),
    (DDP_DEFAULT, DDP, "default"),
    (DDP_VIEW, DDP, "view"),
)
#: Whose weights are compared.
_COMPARED = (REIGEN, SHARED, DDP_DEFAULT)


def title_of(model: str, optimizer: str) -> str:
    """How tables call a model and its optimizer.

    Example:
        >>> title_of("mlp", "sgd"), title_of("mlp", "adam")
        ('mlp', 'mlp+adam')
    """
    return model if optimizer == OPTIMIZERS[0] else f"{model}+{optimizer}"


def _measure(
    model: str, optimizer: str, settings: Settings, came: Mapping[str, Crew], document: Document, report: Report
) -> None:
    title = title_of(model, optimizer)
    with tempfile.TemporaryDirectory(prefix="reigen-bench-") as directory:
        saved = {name: Path(directory, str(number)) for number, name in enumerate(_COMPARED)}
        modes = [
            Mode(
                name,
                came[crew],
                Case(f"{model}+{optimizer}/{variant}", save=str(saved.get(name, ""))),
                joint=crew != _SILENT_CREW,
            )
            for name, crew, variant in _MODES
            if crew in came
        ]
        outcome = alternate(modes, settings.rounds, settings.turn_seconds, about(title, report))
        summaries = outcome.summaries
        document.rows.append(Row(title, 0, summaries, ALONE, outcome.failures))
        if {REIGEN, DDP_DEFAULT} <= summaries.keys():
            found = agreement(saved[REIGEN], saved[DDP_DEFAULT], settings.num_ranks)
            document.notes.append(_sentence(title, found))
        if {REIGEN, SHARED} <= summaries.keys():
            document.notes.append(_same_bits(title, saved[REIGEN], saved[SHARED], settings.num_ranks))
        if {REIGEN, TIMELINE} <= summaries.keys():
            document.verdicts.append(timeline_verdict(title, summaries))
    document.overheads[title] = overs = overheads(summaries)
    if REIGEN in overs and {DDP_DEFAULT, DDP_VIEW} & overs.keys():
        document.verdicts.append(verdict(title, overs))
    is_crowded = settings.num_ranks > document.machine.num_cores
    shared = shared_verdict(model, optimizer, summaries, is_crowded=is_crowded)
    if shared is not None:
        document.verdicts.append(shared)


def _measure_memory(
    model: str, optimizer: str, specs: Mapping[str, CrewSpec], document: Document, report: Report
) -> None:
    from benchmarks.harness.footprint import measure

    title = title_of(model, optimizer)
    alone: Footprint | None = None
    for name, crew, variant in _MODES:
        if crew not in specs or name in (SIDE_BY_SIDE, TIMELINE):
            continue
        report(f"{title}: memory: {name}")
        try:
            found = measure(title, name, specs[crew], Case(f"{model}+{optimizer}/{variant}"), WARMUP)
        except LaunchError as error:
            document.skipped.append(f"memory of {name} is left out: {error}")
            continue
        document.footprints.append(found)
        if name == ALONE:
            alone = found
        if name == SHARED and alone is not None:
            document.verdicts.append(memory_verdict(found, alone, _NUM_STATES[optimizer]))


def overheads(summaries: Mapping[str, Summary]) -> dict[str, Overhead]:
    """What each mode's step took longer than one rank alone; empty if that failed."""
    alone = summaries.get(ALONE)
    if alone is None:
        return {}
    return {name: overhead(step, alone) for name, step in summaries.items() if name != ALONE}


def verdict(model: str, found: Mapping[str, Overhead]) -> Verdict:
    """Reigen's overhead as a part of DDP's, with the better of DDP's two settings."""
    theirs = min((found[name] for name in (DDP_DEFAULT, DDP_VIEW) if name in found), key=lambda o: o.median)
    value, reason = overhead_ratio(found[REIGEN], theirs)
    claim = f"{model}: overhead of Reigen / of DDP at its best"
    return Verdict(claim, value, _BUDGET, at_least=False, note="" if value is not None else reason)


def timeline_verdict(model: str, summaries: Mapping[str, Summary]) -> Verdict:
    """A step with a timeline in steps without: the median of the rounds' quotients."""
    quotients = [w / o for w, o in zip(summaries[TIMELINE].rounds, summaries[REIGEN].rounds, strict=True)]
    claim = f"{model}: a step with a timeline / without"
    note = f"({min(quotients):.3f} - {max(quotients):.3f})"
    return Verdict(claim, median(quotients), _TIMELINE_BUDGET, at_least=False, note=note)


def shared_verdict(model: str, optimizer: str, summaries: Mapping[str, Summary], *, is_crowded: bool) -> Verdict | None:
    """A step with shared parameters beside one rank alone, or beside DDP at its best where ranks share cores."""
    if SHARED not in summaries:
        return None
    peers = [name for name in ((DDP_DEFAULT, DDP_VIEW) if is_crowded else (ALONE,)) if name in summaries]
    budget = _CROWDED_BUDGET if is_crowded else _SHARED_BUDGETS.get((model, optimizer))
    if not peers or budget is None:
        return None
    base = min((summaries[name] for name in peers), key=lambda summary: summary.median)
    quotients = [s / b for s, b in zip(summaries[SHARED].rounds, base.rounds, strict=True)]
    whom = "DDP at its best" if is_crowded else ALONE
    claim = f"{title_of(model, optimizer)}: a step with shared parameters / of {whom}"
    note = f"({min(quotients):.3f} - {max(quotients):.3f})"
    return Verdict(claim, median(quotients), budget, at_least=False, note=note)


def memory_verdict(shared: Footprint, alone: Footprint, num_states: int) -> Verdict:
    """Memory in what one rank alone needs for every rank, less the parameters and states that the others share."""
    spared = (shared.num_ranks - 1) * (1 + num_states) * shared.parameter_bytes
    claim = f"{shared.title}: memory with shared parameters / of parameters and state once, the rest once a rank"
    value = shared.all_bytes / (shared.num_ranks * alone.all_bytes - spared)
    return Verdict(claim, value, _MEMORY_BUDGET, at_least=False)


def agreement(ours: Path, theirs: Path, num_ranks: int) -> Agreement:
    """Compare the weights that two modes saved (see `Case.save`): rank 0's of both, and ours among the ranks."""
    mine = [np.load(f"{ours}.{rank}.npz")["weights"] for rank in range(num_ranks)]
    with np.load(f"{theirs}.0.npz") as file:
        weights, initial = file["weights"].astype(np.float64), file["initial"].astype(np.float64)
    difference = np.linalg.norm(mine[0] - weights) / np.linalg.norm(weights - initial)
    identical = all(mine[0].tobytes() == other.tobytes() for other in mine[1:])
    return Agreement(float(difference), identical)


def _same_bits(title: str, buckets: Path, shared: Path, num_ranks: int) -> str:
    """Whether sharing parameters changed a bit of the weights on any rank."""
    weights = [np.load(f"{path}.{rank}.npz")["weights"] for path in (buckets, shared) for rank in range(num_ranks)]
    same = all(weights[0].tobytes() == other.tobytes() for other in weights[1:])
    are = "are bit-identical to" if same else "ARE NOT THOSE"
    return f"{title}: after {WARMUP} steps the weights with shared parameters {are}{' those' if same else ''} without"


def _sentence(model: str, found: Agreement) -> str:
    ranks = "bit-identical on all of Reigen's ranks" if found.ranks_identical else "NOT IDENTICAL on Reigen's ranks"
    verb = "agree" if found.holds else "DO NOT AGREE"
    return (
        f"{model}: after {WARMUP} steps the weights of Reigen and DDP {verb}: they differ by {found.difference:.1e} "
        f"of the update; they are {ranks}"
    )
