"""Lightning's Trainer, from both of its packages: Reigen's strategy in the place of DDP's and Horovod's."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from reigen.migrate.findings import LineFinding
from reigen.migrate.syntax import NameUse, PythonSource

#: About processes, of which Trainer starts none any more.
STARTED = "`reigen run -np N` starts the processes, and devices= and num_nodes= do not count (docs/lightning.md)"
#: About strategies that divide parameters or state among ranks.
SHARDED = "Reigen needs whole parameters, and has no such strategy: it goes on as it is, by torch.distributed"
_PACKAGES = ("lightning.", "pytorch_lightning.", "lightning_fabric.")
_DDP = {"ddp", "ddp_spawn", "ddp_fork", "ddp_notebook", "ddp2"}
_FOUND_UNUSED = ("_find_unused_parameters_true", "_find_unused_parameters_false")
_SHARDED = ("fsdp", "deepspeed", "ddp_sharded", "ddp_fully_sharded", "colossalai")
_SHARDED_CLASSES = {"FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy", "DDPFullyShardedNativeStrategy"}
#: Values of accelerator= that were strategies.
_OF_LIGHTNING_1 = ("ddp", "ddp_spawn", "ddp2", "ddp_cpu", "horovod")
#: About Fabric, which has no place for another package's strategy, and needs none.
_FABRIC = (
    "works as it is, by `reigen run --torchrun-env -np N` on one host, where N is its number of devices, and torch "
    "averages; docs/lightning.md has the lines with which Reigen does"
)
_FABRIC_ALONE = "it starts its processes by itself, as before, and torch averages: start it by `python`"
_STARTS_PROCESSES = ("ddp_spawn", "ddp_fork", "ddp_notebook")
_BY_HAND = f'strategy="reigen", and `import reigen.lightning`: {STARTED}'


def find_in_lightning_script(source: PythonSource) -> Iterator[LineFinding]:
    """Yield findings about trainers that average with DDP, or did with Horovod."""
    for use in source.uses:
        name = use.dotted.rpartition(".")[2]
        call = source.parents.get(use.node)
        if not use.dotted.startswith(_PACKAGES) or not isinstance(call, ast.Call) or call.func is not use.node:
            continue
        if name == "Trainer" or use.dotted.endswith(".Trainer.from_argparse_args"):
            yield from _check_trainer(source, use, call)
        elif name == "Fabric":
            yield _check_fabric(call)
        elif name == "LightningCLI":
            for keyword in call.keywords:
                if keyword.arg == "trainer_defaults":
                    yield from _check_options(source, use, _options(keyword.value))
        elif name in {"DDPStrategy", "HorovodStrategy"} and not _is_of_fabric(source, use, call):
            message = f'by hand: strategy="reigen" in its place, and `import reigen.lightning`: {STARTED}'
            yield LineFinding(call.lineno, "change", name, message)
        elif name in _SHARDED_CLASSES:
            yield LineFinding(call.lineno, "cannot", name, SHARDED)


def _check_fabric(call: ast.Call) -> LineFinding:
    """Return what becomes of a Fabric, which trains by a loop of the script's own."""
    strategy = next((each.value for each in call.keywords if each.arg == "strategy"), None)
    name = strategy.value if isinstance(strategy, ast.Constant) else None
    if isinstance(name, str) and name.startswith(_SHARDED):
        return LineFinding(call.lineno, "cannot", f"Fabric, strategy={name!r}", SHARDED)
    starts = isinstance(name, str) and name.startswith(_STARTS_PROCESSES)
    return LineFinding(call.lineno, "works", "Fabric", _FABRIC_ALONE if starts else _FABRIC)


def _is_of_fabric(source: PythonSource, use: NameUse, call: ast.Call) -> bool:
    """Return whether a strategy is Fabric's own, or is handed to one: it averages there as before."""
    callers = (each for each in source.ancestors(call) if isinstance(each, ast.Call))
    is_handed = any((source.resolve(each.func) or "").endswith(".Fabric") for each in callers)
    return is_handed or use.dotted.startswith(("lightning.fabric.", "lightning_fabric."))


def _options(node: ast.expr) -> dict[str, ast.expr]:
    """Return the values of a dictionary that is written out: ``{...}`` or ``dict(...)``."""
    if isinstance(node, ast.Dict):
        keys = (key.value if isinstance(key, ast.Constant) else None for key in node.keys)
        return {key: value for key, value in zip(keys, node.values, strict=True) if isinstance(key, str)}
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict":
        return {each.arg: each.value for each in node.keywords if each.arg is not None}
    return {}


def _check_trainer(source: PythonSource, use: NameUse, call: ast.Call) -> Iterator[LineFinding]:
    options: dict[str, ast.expr] = {}
    is_complete = use.dotted.endswith(".Trainer")
    for keyword in call.keywords:
        if keyword.arg is not None:
            options[keyword.arg] = keyword.value
        else:
            is_complete &= bool(known := _options(keyword.value))
            options |= known
    yield from _check_options(source, use, options)
    if "strategy" in options or not is_complete:
        return
    for name in ("devices", "gpus", "num_nodes", "num_processes"):
        if (
            name in options
            and _is_several(options[name])
            and not _is_text(options.get("accelerator"), *_OF_LIGHTNING_1)
        ):
            message = f"by hand: without a strategy, several devices are Lightning's own DDP: {_BY_HAND}"
            yield LineFinding(options[name].lineno, "change", f"{name}={ast.unparse(options[name])}", message)
            return


def _check_options(source: PythonSource, use: NameUse, options: dict[str, ast.expr]) -> Iterator[LineFinding]:
    """Yield findings about the strategy among a trainer's options."""
    accelerator, strategy = options.get("accelerator"), options.get("strategy")
    if accelerator is not None and _is_text(accelerator, *_OF_LIGHTNING_1):
        message = 'by hand, as Lightning 2 has it: strategy="reigen", accelerator="gpu" or "cpu", and '
        subject = f"accelerator={ast.unparse(accelerator)}"
        yield LineFinding(accelerator.lineno, "change", subject, f"{message}`import reigen.lightning`: {STARTED}")
    elif strategy is not None:
        yield from _check_strategy(source, use, strategy)


def _check_strategy(source: PythonSource, use: NameUse, strategy: ast.expr) -> Iterator[LineFinding]:
    line, subject = strategy.lineno, f"strategy={ast.unparse(strategy)}"
    if isinstance(strategy, ast.Name | ast.Attribute | ast.Subscript):
        if not _imports_strategy(source):  # else it may be Reigen's already
            yield LineFinding(line, "change", subject, f"by hand, where it is DDP's: {_BY_HAND}")
    elif not isinstance(strategy, ast.Constant) or not isinstance(strategy.value, str):
        return  # of a class, of which another finding tells
    elif strategy.value.startswith(_SHARDED):
        yield LineFinding(line, "cannot", subject, SHARDED)
    elif _is_replaced(strategy.value):
        statement = use.imported.statement
        if statement not in source.tree.body or not source.is_alone(statement):
            yield LineFinding(line, "change", subject, f"by hand: {_BY_HAND}")
            return
        edits = [source.replace(strategy, '"reigen"')]
        if not _imports_strategy(source):
            edits.append(source.insert_after(statement, "import reigen.lightning"))
        yield LineFinding(line, "change", subject, STARTED, tuple(edits))


def _is_several(node: ast.expr) -> bool:
    """Return whether a number of devices, or a list of them, is written out and more than one."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return False
    if isinstance(value, list | tuple):
        return len(value) > 1
    return str(value) == "-1" or (str(value).isdecimal() and int(value) > 1)


def _is_text(node: ast.expr | None, *texts: str) -> bool:
    return isinstance(node, ast.Constant) and node.value in texts


def _imports_strategy(source: PythonSource) -> bool:
    """Return whether the file has ``import reigen.lightning``, or imports names of it."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import) and any(each.name == "reigen.lightning" for each in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "reigen":
            return any(each.name == "lightning" for each in node.names)
        if isinstance(node, ast.ImportFrom) and node.module == "reigen.lightning":
            return True
    return False


def _is_replaced(strategy: str) -> bool:
    for suffix in _FOUND_UNUSED:
        strategy = strategy.removesuffix(suffix)
    return strategy in {*_DDP, "horovod"}
