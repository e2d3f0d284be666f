"""Scripts for torch.distributed and DistributedDataParallel: Reigen's calls in the place of torch's.

As they are, such scripts run by ``reigen run --torchrun-env``, and torch goes on averaging. Edits put Reigen there:
DDP becomes a broadcast of the model and an optimizer that averages, collectives become Reigen's. Half of that would
train wrongly and say nothing, so edits of a file are made all or none: what has no safe edit, and is not harmless,
blocks the file, and those that it imports or is imported by (`reigen.migrate.project`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from reigen.errors import ConfigError
from reigen.migrate.findings import LineFinding
from reigen.migrate.syntax import NameUse, PythonSource
from reigen.migrate.text_files import Edit, apply_edits
from reigen.migrate.torch_collectives import CollectiveRules
from reigen.migrate.torch_record import PROCESSES, TorchFindings, TorchRecord
from reigen.migrate.torch_training import TrainingRules

_DDP = {
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
}
_SYNC_BATCH_NORM = "torch.nn.SyncBatchNorm"
_SAMPLER = {
    "torch.utils.data.distributed.DistributedSampler",
    "torch.utils.data.DistributedSampler",
}
#: Packages that average, or shard, by themselves.
_OTHERS = (
    "accelerate",
    "apex.parallel",
    "colossalai",
    "deepspeed",
    "fairscale",
    "ignite.distributed",
    "lightning",
    "megatron",
    "pytorch_lightning",
)
#: What is not used any more when edits are made, and then not imported.
_GONE = ("torch.distributed", "torch.nn.parallel", "torch.multiprocessing")


def find_in_torch_script(source: PythonSource) -> TorchFindings:
    """Find what uses torch.distributed, and the edits that put Reigen in its place."""
    record = TorchRecord(source)
    collectives, training = CollectiveRules(record), TrainingRules(record)
    for use in source.uses:
        if use.dotted.startswith(_SYNC_BATCH_NORM):
            _find_batch_norm(record, training, use)
        elif use.dotted in _DDP:
            training.data_parallel(use)
        elif use.dotted == "torch.multiprocessing.spawn":
            training.spawn(use)
        elif use.dotted in PROCESSES:
            record.launch(use.node)
        elif use.dotted.startswith("torch.distributed."):
            collectives.apply(use)
        elif use.dotted == "torch.distributed":
            record.block(use.node, "the module under another name, or as an argument: name its functions")
    for use in source.uses:
        if use.dotted in _SAMPLER:
            training.sampler(use)
    training.finish()
    training.variables()
    if record.found.used:
        training.local_rank_option()
        _find_others_that_average(record)
    else:
        _find_others_alone(record)
    if any(finding.edits for finding in record.found.findings):
        _change_imports(record)
    record.found.findings = sorted(_without_inner_edits(record.found.findings), key=lambda each: each.line)
    return record.found


def _find_batch_norm(record: TorchRecord, training: TrainingRules, use: NameUse) -> None:
    """Find conversions to torch's SyncBatchNorm, and layers of it."""
    if use.dotted == f"{_SYNC_BATCH_NORM}.convert_sync_batchnorm":
        training.convert_batch_norm(use)
    elif use.dotted == _SYNC_BATCH_NORM and record.call(use) is not None:
        message = "hvd.SyncBatchNorm: without a process group torch's normalises over this rank's batch alone"
        record.block_with_others(use.node, message)


def _find_others_that_average(record: TorchRecord) -> None:
    """Find imports that cannot be followed, or of packages that use torch.distributed by themselves."""
    for each in record.source.imports:
        if each.dotted == "torch.distributed.*":
            record.block(each.statement, "import the names that are used")
        elif each.dotted.startswith(_OTHERS):
            message = "it uses torch.distributed by itself: leave averaging to one of the two"
            record.block(each.statement, message)


def _find_others_alone(record: TorchRecord) -> None:
    """Find what starts averaging by other packages, in files that have nothing else of torch.distributed."""
    for use in record.source.uses:
        if use.dotted in {"accelerate.Accelerator", "accelerate.accelerator.Accelerator"}:
            message = "works as it is, by `reigen run --torchrun-env`, and torch averages: docs/huggingface.md says why"
            record.remark(use.node, message)
        elif use.dotted in {"transformers.Trainer", "transformers.Seq2SeqTrainer"}:
            message = (
                "works as it is, by `reigen run --torchrun-env`, and torch averages; or by docs/huggingface.md's way"
            )
            record.remark(use.node, message)
        elif use.dotted == "deepspeed.initialize":
            message = "Reigen needs whole parameters and state, and has no place in DeepSpeed: it goes on as it is"
            record.found.findings.append(LineFinding(use.node.lineno, "cannot", use.dotted, message))


def check_conversion(source: PythonSource, found: TorchFindings) -> LineFinding | None:
    """Make the edits of a file and look again; return a finding that blocks it if they were not all, else None."""
    edits = [edit for finding in found.findings for edit in finding.edits]
    if not edits or found.blocking:
        return None
    try:
        again = find_in_torch_script(PythonSource(apply_edits(source.lines.text, edits)))
    except ConfigError as error:
        return LineFinding(1, "change", "torch.distributed", f"by hand: {error}", blocks=True)
    left = next((each for each in again.findings if each.edits or each.blocks), None)
    if left is None:
        return None
    message = f"by hand: `reigen migrate` knows no edit that is enough here. Until then {found.stays}"
    return LineFinding(1, "change", left.subject, message, blocks=True)


def _without_inner_edits(findings: list[LineFinding]) -> Iterator[LineFinding]:
    """Yield findings without those whose edits lie within what another one, with more of them, replaces."""
    replaced = [(edit, finding) for finding in findings for edit in finding.edits if edit.end > edit.start]
    for finding in findings:
        is_inner = all(
            any(
                other is not finding and _is_inside(edit, outer, len(other.edits) > len(finding.edits))
                for outer, other in replaced
            )
            for edit in finding.edits
        )
        if not finding.edits or not is_inner:
            yield finding


def _is_inside(inner: Edit, outer: Edit, yields_if_equal: bool) -> bool:
    """Return whether an edit is of a part of what another one replaces; an insertion at its edge is not."""
    if inner.start == inner.end:
        return outer.start < inner.start < outer.end
    if (inner.start, inner.end) == (outer.start, outer.end):
        return yields_if_equal
    return outer.start <= inner.start and inner.end <= outer.end


def _change_imports(record: TorchRecord) -> None:
    """Import Reigen, and leave out imports that are not used any more."""
    source = record.source
    edits = dict(_unused_imports(record))
    line = f"import reigen.torch as {record.hvd}"
    if record.imports_reigen:
        if edits:
            first = min(edits, key=lambda each: each.lineno)
            record.change(first, "not used any more", *edits.values())
        return
    imports = [each for each in source.tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
    torchs = [each for each in imports if _first_package(each) == "torch"]
    if not imports:
        record.block(source.tree.body[0], line)
        return
    place = (torchs or imports)[-1]
    if place in edits and edits[place].new == "":
        edits[place] = source.replace(place, line)
    else:
        edits[ast.Pass()] = source.insert_after(place, line)
    record.change(place, "and imports that are not used any more are left out", *edits.values(), subject=line)


def _first_package(statement: ast.Import | ast.ImportFrom) -> str:
    name = statement.module or "" if isinstance(statement, ast.ImportFrom) else statement.names[0].name
    return name.partition(".")[0]


def _unused_imports(record: TorchRecord) -> Iterator[tuple[ast.stmt, Edit]]:
    source = record.source
    for statement in source.tree.body:
        if not isinstance(statement, ast.Import | ast.ImportFrom) or not source.is_alone(statement):
            continue
        mine = [each for each in source.imports if each.statement is statement]
        gone = [each for each in mine if each.dotted.startswith(_GONE) and _is_unused(record, each.bound)]
        if not gone or statement.lineno != statement.end_lineno or "#" in source.lines.line(statement.lineno):
            continue
        if len(gone) == len(mine):
            start = source.lines.starts[statement.lineno - 1]
            yield statement, Edit(start, start + len(source.lines.line(statement.lineno)), "")
        else:
            names = ", ".join(ast.unparse(each.alias) for each in mine if each not in gone)
            kept = f"import {names}" if isinstance(statement, ast.Import) else f"from {statement.module} import {names}"
            yield statement, source.replace(statement, kept)


def _is_unused(record: TorchRecord, bound: str) -> bool:
    """Return whether all uses of a name are taken away by edits."""
    names = [node for node in ast.walk(record.source.tree) if isinstance(node, ast.Name) and node.id == bound]
    return bool(names) and all(node in record.replaced for node in names)
