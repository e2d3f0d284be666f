"""Projects: torch.distributed, KVStore, command lines, notebooks, and what belongs together."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from reigen.cli.main import main
from reigen.cli.migrate import make_num_values
from reigen.migrate import FileReport, Migration, analyse

_DDP = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main(rank):
    dist.init_process_group("gloo")
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        loss = model(batch)
        loss.backward()
        optimizer.step()
"""


def read(directory: Path, **files: str) -> Migration:
    """Findings about files, whose names have _ for the last dot."""
    for name, text in files.items():
        stem, _, suffix = name.rpartition("_")
        (directory / f"{stem}.{suffix}").write_text(textwrap.dedent(text))
    return analyse([directory], make_num_values())


def report(migration: Migration, name: str) -> FileReport:
    [found] = [file for file in migration.files if file.path.name == name]
    return found


def changed(directory: Path, text: str) -> str | None:
    """A script after its edits; None: it is not changed."""
    return report(read(directory, train_py=text), "train.py").new_text


def test_ddp_becomes_a_broadcast_and_an_optimizer(tmp_path: Path) -> None:
    assert (
        changed(tmp_path, _DDP)
        == """\
import torch
import reigen.torch as hvd


def main(rank):
    hvd.init()
    model = net()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for batch in batches:
        loss = model(batch)
        loss.backward()
        optimizer.step()
"""
    )


@pytest.mark.parametrize(
    ("old", "new", "status", "advice"),
    [
        (
            "        loss.backward()\n",
            "        with model.no_sync():\n            loss.backward()\n",
            "change",
            "backward_passes_per_step",
        ),
        (
            "        optimizer.step()\n",
            "        if step % 4 == 0:\n            optimizer.step()\n",
            "change",
            "backward_passes_per_step",
        ),
        ("DDP(net())", "DDP(net(), process_group=group)", "change", "process_group"),
        (
            "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
            "    optimizer = make(model)\n",
            "change",
            "no optimizer",
        ),
        (
            "    for batch",
            "    DistributedSampler(data, **options)\n    for batch",
            "change",
            "num_replicas=hvd.size()",
        ),
        ("    for batch", "    group = dist.new_group([0, 1])\n    for batch", "change", "ProcessSet"),
        ("    for batch", "    dist.send(torch.ones(1), 1)\n    for batch", "cannot", "no messages"),
        ("    for batch", "    work = dist.all_reduce(t, async_op=True)\n    for batch", "change", "allreduce_async_"),
        ("    for batch", "    sizes = dist.get_world_size(group)\n    for batch", "change", "ProcessSet"),
        (
            'dist.init_process_group("gloo")',
            'r = rank * 8 + gpu\n    dist.init_process_group("gloo", rank=r)',
            "change",
            "calculated",
        ),
        ("    for batch", "    save(trainer.model.module)\n    for batch", "change", ".module"),
        (
            "import torch.distributed as dist\n",
            "import torch.distributed as dist\nd = dist\n",
            "change",
            "another name",
        ),
        ("import torch\n", "import torch\nfrom torch.distributed import *\n", "change", "import the names"),
        ("import torch\n", "import torch\nimport deepspeed\n", "change", "by itself"),
        (
            "    for batch",
            "    head = torch.optim.Adam(model.head.parameters())\n    for batch",
            "change",
            "another optimizer",
        ),
        (
            "    for batch",
            "    for step in range(8):\n        model.require_backward_grad_sync = step == 7\n    for batch",
            "change",
            "backward_passes_per_step",
        ),
        ("DDP(net())", "DDP(torch.nn.SyncBatchNorm.convert_sync_batchnorm(net(), g))", "change", "process_set"),
        ("DDP(net())", "DDP(net(torch.nn.SyncBatchNorm(4)))", "change", "hvd.SyncBatchNorm"),
    ],
)
def test_what_has_no_safe_edit_leaves_the_whole_script(
    tmp_path: Path, old: str, new: str, status: str, advice: str
) -> None:
    assert old in _DDP
    sampler = "from torch.utils.data.distributed import DistributedSampler\n" if "Sampler" in new else ""
    migration = read(tmp_path, train_py=sampler + _DDP.replace(old, new))
    [file] = migration.files
    reasons = [each for each in file.findings if each.blocks]

    assert file.new_text is None
    assert [each.status for each in reasons] == [status] * len(reasons)
    assert any(advice in each.message for each in reasons)
    assert all("--torchrun-env" in each.message for each in file.findings)
    assert not migration.is_done


_CLASS = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Runner:
    def __init__(self, net):
        self.net = DDP(net.to(0))


def main():
    dist.init_process_group("gloo")
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    Runner(net).train(optimizer)
"""


def test_an_optimizer_is_wrapped_with_the_name_that_it_is_made_of(tmp_path: Path) -> None:
    assert "named_parameters=net.named_parameters(), synchronize" in str(changed(tmp_path, _CLASS))

    early = _DDP.replace("    model = DDP(net())\n", "    model = net()\n").replace(
        "lr=0.1)\n", "lr=0.1)\n    ddp = DDP(model)\n"
    )
    assert "named_parameters=model.named_parameters())\n    ddp = model\n" in str(changed(tmp_path, early))

    late = _DDP.replace("model.parameters", "model.module.parameters")
    new = str(changed(tmp_path, late))
    assert "SGD(model.parameters(), lr=0.1)" in new
    assert "named_parameters=model.named_parameters()" in new


@pytest.mark.parametrize(
    ("old", "new", "advice"),
    [
        ("    Runner(net).train", "    Runner(make()).train", "no optimizer"),
        ("Runner:\n", "Other:\n", "no optimizer"),
        (
            "        self.net = DDP",
            '        dist.init_process_group("gloo")\n        self.net = DDP',
            "before init_process",
        ),
    ],
)
def test_an_optimizer_of_a_caller_is_wrapped_only_if_the_model_is_handed_over(
    tmp_path: Path, old: str, new: str, advice: str
) -> None:
    text = _CLASS.replace(old, new)
    assert text != _CLASS
    if "before init" in advice:
        text = text.replace('def main():\n    dist.init_process_group("gloo")\n', "def main():\n")
    [file] = read(tmp_path, train_py=text).files

    assert file.new_text is None
    assert any(each.blocks and advice in each.message for each in file.findings)


_HANDED = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def train(batches, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        model(batch).sum().backward()
        optimizer.step()


def main():
    dist.init_process_group("gloo")
    model = DDP(net())
    train(data, model)
"""


def test_a_function_that_gets_the_model_may_make_its_optimizer(tmp_path: Path) -> None:
    wrapped = (
        "    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())\n    for batch"
    )
    assert wrapped in str(changed(tmp_path, _HANDED))
    assert wrapped in str(changed(tmp_path, _HANDED.replace("train(data, model)", "train(data, model=model)")))
    for other in ("train(data, model.backbone)", "train(*parts)", "train(data, model)\n\n\ntrain(data, model)"):
        assert changed(tmp_path, _HANDED.replace("    train(data, model)", f"    {other}")) is None


def test_attributes_of_different_classes_are_different_models(tmp_path: Path) -> None:
    other = "class Other:\n    def __init__(self):\n        self.opt = torch.optim.SGD(self.net.parameters())\n"
    [file] = read(tmp_path, train_py=_CLASS.replace("Runner(net)", "Runner(make())") + "\n\n" + other).files

    assert file.new_text is None
    assert any(each.blocks and "no optimizer of self.net" in each.message for each in file.findings)


_GAN = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
net_g = DDP(make_g())
net_d = DDP(make_d())
opt_g = torch.optim.Adam(net_g.parameters(), lr=0.1)
opt_d = torch.optim.Adam(net_d.parameters(), lr=0.1)
for real in batches:
    opt_d.zero_grad()
    (net_d(net_g(noise).detach()) - net_d(real)).mean().backward()
    opt_d.step()
    opt_g.zero_grad()
    net_d(net_g(noise)).mean().backward()
    opt_g.step()
"""


def test_several_models_with_optimizers_of_their_own_need_a_hand(tmp_path: Path) -> None:
    [file] = read(tmp_path, train_py=_GAN).files
    blocking = [each for each in file.findings if each.blocks]
    assert file.new_text is None
    assert [each.line for each in blocking] == [8, 9]
    assert all("requires_grad_(False)" in each.message for each in blocking)

    twice = _GAN.replace("net_d.parameters()", "[*net_d.parameters(), *net_g.parameters()]").replace("opt_g", "opt_d")
    assert changed(tmp_path, twice.replace("opt_d = torch.optim.Adam(net_g.parameters(), lr=0.1)\n", "")) is not None


def test_models_of_two_files_of_one_program_need_a_hand(tmp_path: Path) -> None:
    files = {
        f"{name}_py": (
            "import torch\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n\n\nclass Player:\n"
            "    def __init__(self):\n        self.net = DDP(make())\n"
            "        self.optimizer = torch.optim.Adam(self.net.parameters())\n"
        )
        for name in ("generator", "critic")
    }
    start = 'import torch.distributed as dist\n\ndist.init_process_group("gloo")\nloss().backward()\n'
    program = f"import generator\nimport critic\n{start}"
    migration = read(tmp_path, train_py=program, **files)
    assert [file.new_text for file in migration.files] == [None] * 3
    for name in ("generator.py", "critic.py"):
        [reason] = [each for each in report(migration, name).findings if each.blocks]
        assert (reason.line, "requires_grad_(False)" in reason.message) == (8, True)

    # two programs that share a file, and none that has both
    shared = "import shared\n" + start
    files = {name: f"{shared}{text}" for name, text in files.items()}
    (tmp_path / "train.py").unlink()
    migration = read(tmp_path, shared_py=start, **files)
    assert all(file.new_text is not None for file in migration.files)


def test_models_of_functions_that_keep_them_are_independent(tmp_path: Path) -> None:
    function = (
        "def {}():\n    net = DDP(make())\n    opt = torch.optim.Adam(net.parameters())\n    train(net, opt)\n{}\n\n"
    )
    start = _GAN.partition("net_g")[0]
    assert changed(tmp_path, start + function.format("one", "") + function.format("two", "")) is not None
    assert (
        changed(tmp_path, start + function.format("one", "") + function.format("two", "    return net, opt\n")) is None
    )


def test_what_differs_after_a_conversion_is_not_said_of_a_script_that_stays(tmp_path: Path) -> None:
    saves = _DDP.replace("    for batch", "    torch.save(model.state_dict(), path)\n    for batch")
    [file] = read(tmp_path, train_py=saves).files
    assert any("do not begin with `module.`" in each.message for each in file.findings)
    assert "import reigen.torch as hvd" in [each.subject for each in file.findings]

    [file] = read(tmp_path, train_py=saves.replace("    for batch", "    dist.send(loss, 1)\n    for batch")).files
    assert file.new_text is None
    assert not any("do not begin with `module.`" in each.message for each in file.findings)
    assert not any("reigen" in each.subject for each in file.findings)


def test_a_script_that_spawns_its_processes_goes_on_to(tmp_path: Path) -> None:
    text = f"import torch.multiprocessing as mp\n{_DDP}        dist.send(loss, 1)\n\n\nmp.spawn(main, nprocs=2)\n"
    [file] = read(tmp_path, train_py=text).files

    assert file.new_text is None
    assert all("starts its processes by itself" in each.message for each in file.findings)


def test_variables_of_a_script_that_spawns_its_processes_need_no_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = 'import os\nimport torch.multiprocessing as mp\nsize = os.environ["WORLD_SIZE"]\n' + _DDP
    text += "        dist.send(loss, 1)\n\n\nmp.spawn(main, nprocs=2)\n"
    (tmp_path / "train.py").write_text(text)

    main(["migrate", str(tmp_path)])
    assert "torchrun-env" not in capsys.readouterr().out


def test_a_line_is_said_once(tmp_path: Path) -> None:
    text = _DDP.replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)", "optimizer = make(model)")
    [file] = read(tmp_path, train_py=text).files
    assert [each.status for each in file.findings if each.line == 8] == ["change"]


def test_an_optimizer_of_horovod_beside_ddp_is_none_to_wrap(tmp_path: Path) -> None:
    both = _DDP.replace(
        "    for batch", "    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())\n    for batch"
    )
    [file] = read(tmp_path, train_py="import horovod.torch as hvd\n" + both).files
    assert [each.line for each in file.findings if each.blocks] == [11]
    assert any("averages, too" in each.message for each in file.findings)


@pytest.mark.parametrize(
    "new",
    [
        "    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
        "    optimizer = torch.optim.SGD(groups(model), lr=0.1)\n",
        "    parameters = groups(model, 0.1)\n    optimizer = torch.optim.SGD(parameters, lr=0.1)\n",
        "    optimizer = model.configure_optimizers(0.1)\n",
        "    optimizer = create_optimizer(args, model)\n",
        "    kind = torch.optim.SGD\n    optimizer = kind(model.parameters())\n",
        "    optimizer = torch.optim.SGD(model.parameters()) if rank else torch.optim.Adam(model.parameters())\n",
    ],
)
def test_ways_in_which_an_optimizer_is_made(tmp_path: Path, new: str) -> None:
    old = "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    text = str(changed(tmp_path, _DDP.replace(old, new)))
    assert f"{new}    optimizer = hvd.DistributedOptimizer(optimizer" in text
    assert text.count("DistributedOptimizer") == 1


def test_an_optimizer_of_each_branch_is_wrapped(tmp_path: Path) -> None:
    new = "".join(
        f"    {word}:\n        optimizer = torch.optim.{name}(model.parameters(), lr=0.1)\n"
        for word, name in (("if rank == 0", "SGD"), ("elif rank == 1", "Adam"), ("else", "AdamW"))
    )
    text = _DDP.replace("    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n", new)
    assert str(changed(tmp_path, text)).count("\n        optimizer = hvd.DistributedOptimizer(optimizer, named") == 3


_MAKER = """\
def make_optimizer(net, name):
    if name == "sgd":
        return torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = torch.optim.Adam(net.parameters())
    return optimizer


"""


def test_a_function_that_makes_an_optimizer_is_wrapped_where_it_is_called(tmp_path: Path) -> None:
    call = "    optimizer = make_optimizer(model, name)\n"
    text = _DDP.replace("    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n", call)
    text = text.replace("def main", f"{_MAKER}def main")
    new = str(changed(tmp_path, text))
    assert f"{call}    optimizer = hvd.DistributedOptimizer(optimizer)\n" in new
    assert new.count("DistributedOptimizer") == 1

    twice = text.replace("    for batch", "    other(make_optimizer(model, 'adam'))\n    for batch")
    assert changed(tmp_path, twice) is None
    several = text.replace("    return optimizer\n", "    return optimizer, torch.optim.SGD(net.parameters())\n")
    assert changed(tmp_path, several) is None


def test_a_method_that_makes_the_optimizer_of_its_object(tmp_path: Path) -> None:
    text = _CLASS.partition("    optimizer =")[0].replace(
        "\n\ndef main",
        "        self.opt = self.made()\n\n    def made(self):\n        return torch.optim.SGD(self.net.parameters())\n"
        "\n    def step(self, loss):\n        loss.backward()\n        self.opt.step()\n\n\ndef main",
    )
    new = str(changed(tmp_path, text.replace("make()", "make()\n    Runner(net)")))
    assert "        self.opt = self.made()\n        self.opt = hvd.DistributedOptimizer(self.opt)\n" in new


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
            "    use(opt := torch.optim.SGD(model.parameters()))\n",
        ),
        ("    model = DDP(net())\n", "    (model := DDP(net())).train()\n"),
        (
            "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
            "    optimizer, scheduler = make_optimizer(model)\n",
        ),
        (
            "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
            "    optimizers = make_optimizers(model)\n",
        ),
    ],
)
def test_what_is_bound_in_other_ways_needs_a_hand(tmp_path: Path, old: str, new: str) -> None:
    assert old in _DDP
    [file] = read(tmp_path, train_py=_DDP.replace(old, new)).files
    assert file.new_text is None
    assert any(each.blocks and "hvd.DistributedOptimizer(" in each.message for each in file.findings)


_COUNTED = _DDP.replace(
    "        loss = model(batch)\n        loss.backward()\n",
    "        for part in range(num_parts):\n            (model(batch[part]) / num_parts).backward()\n",
)


@pytest.mark.parametrize("number", ["4", "args.parts", "num_parts"])
def test_passes_that_are_counted(tmp_path: Path, number: str) -> None:
    text = _COUNTED.replace("num_parts", number)
    text = text.replace("    model =", "    num_parts = rank + 2\n    model =")
    new = str(changed(tmp_path, text))
    assert (
        f"DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), backward_passes_per_step={number})"
        in new
    )

    flag = "            model.require_backward_grad_sync = part == 3\n            ("
    assert "            pass\n            (" in str(changed(tmp_path, text.replace("            (", flag)))
    pause = "            with model.no_sync() if part < 3 else nullcontext():\n                ("
    new = str(changed(tmp_path, f"from contextlib import nullcontext\n{text.replace('            (', pause)}"))
    assert "            with nullcontext() if part < 3 else nullcontext():\n" in new


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("range(num_parts)", "range(num_parts - 1)"),
        ("range(num_parts)", "parts"),
        ("num_parts):\n", "num_parts):\n"),  # and set later
        (".backward()\n", ".backward()\n            if part > limit:\n                break\n"),
        ("            (model", "            if part:\n                (model"),
        ("        optimizer.step()\n", "        optimizer.step()\n    loss.backward()\n"),
    ],
)
def test_passes_that_are_not_counted_need_a_hand(tmp_path: Path, old: str, new: str) -> None:
    assert old in _COUNTED
    place = "    for batch" if old == new else "    model ="
    text = _COUNTED.replace(old, new).replace(place, f"    num_parts = 4\n{place}", 1)
    [file] = read(tmp_path, train_py=text).files
    assert file.new_text is None
    assert any(each.blocks and "backward_passes_per_step" in each.message for each in file.findings)


def test_a_loop_over_steps_that_a_function_makes_counts_no_passes(tmp_path: Path) -> None:
    text = _DDP.replace("for batch in batches", "for step in range(4)").replace("optimizer.step()", "update(optimizer)")
    text += "    scheduler.step()\n\n\ndef update(optimizer):\n    optimizer.step()\n"
    new = str(changed(tmp_path, text))
    assert "hvd.DistributedOptimizer(" in new
    assert "backward_passes_per_step" not in new


def test_a_spawn_that_depends_on_the_number_of_devices_needs_a_hand(tmp_path: Path) -> None:
    start = "\n\nif num > 1:\n    mp.spawn(main, nprocs=num)\nelse:\n    main(0)\n"
    [file] = read(tmp_path, train_py=f"import torch.multiprocessing as mp\n{_DDP}{start}").files
    assert file.new_text is None
    assert any(each.blocks and "in both cases" in each.message for each in file.findings)


def test_a_module_of_another_class_is_none_of_ddp(tmp_path: Path) -> None:
    text = _DDP.replace("    for batch", "    ema = ModelEma(model)\n    save(ema.module)\n    for batch")
    assert "    save(ema.module)\n" in str(changed(tmp_path, text))
    for made in ("make(model)", "NetParallel(model)"):
        assert changed(tmp_path, text.replace("ModelEma(model)", made)) is None

    asked = _DDP + "\n\ndef inner(net):\n    return net.module if hasattr(net, 'module') else net\n"
    assert "return net.module if hasattr(net, 'module') else net" in str(changed(tmp_path, asked))
    unwrapped = _DDP + "\n\ndef inner(net):\n    if isinstance(net, DDP):\n        net = net.module\n    return net\n"
    assert "        net = net.module\n" in str(changed(tmp_path, unwrapped))
    assert changed(tmp_path, unwrapped.replace("net = net.module", "net.module.update_teacher()")) is None


def test_batch_norms_are_converted_to_reigens(tmp_path: Path) -> None:
    old = (
        "    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net())\n    model = DDP(model, device_ids=[rank])\n"
    )
    new = str(changed(tmp_path, _DDP.replace("    model = DDP(net())\n", old)))
    assert "    model = hvd.SyncBatchNorm.convert_sync_batchnorm(net())\n    hvd.broadcast_parameters(model" in new

    nested = "DDP(torch.nn.SyncBatchNorm.convert_sync_batchnorm(net()))"
    new = str(changed(tmp_path, _DDP.replace("DDP(net())", nested)))
    assert "    model = hvd.SyncBatchNorm.convert_sync_batchnorm(net())\n    hvd.broadcast_parameters(model" in new


def test_batch_norms_stay_plain_where_a_script_runs_without_ddp(tmp_path: Path) -> None:
    convert = "torch.nn.SyncBatchNorm.convert_sync_batchnorm"
    wrapped = "    if rank is not None:\n        model = DDP(model)"
    text = _DDP.replace("    model = DDP(net())", f"    model = net()\n    model = {convert}(model)\n{wrapped}")
    new = str(changed(tmp_path, text))
    converted = "hvd.SyncBatchNorm.convert_sync_batchnorm(model)"
    assert f"    model = {converted} if hvd.is_initialized() else model\n" in new

    inside = wrapped.replace("DDP(model)", f"DDP({convert}(model))")
    new = str(changed(tmp_path, _DDP.replace("    model = DDP(net())", f"    model = net()\n{inside}")))
    assert f"        model = {converted}\n" in new
    assert f"{converted} if" not in new

    made = _DDP.replace("    model = DDP(net())", f"    model = {convert}(net())\n{wrapped}")
    [file] = read(tmp_path, train_py=made).files
    assert file.new_text is None
    assert any("only if hvd.is_initialized()" in each.message for each in file.findings)


def test_parameters_that_are_chosen_before_are_the_models(tmp_path: Path) -> None:
    text = _DDP.replace("SGD(model.parameters()", "SGD(chosen").replace(
        "    optimizer = ", "    chosen = [p for p in model.parameters() if p.requires_grad]\n    optimizer = "
    )
    assert "= hvd.DistributedOptimizer(optimizer)\n" in str(changed(tmp_path, text))


def test_options_and_attributes_that_are_right_as_they_are(tmp_path: Path) -> None:
    text = _DDP + (
        "\n\nclass Net:\n    def __init__(self, module):\n        self.module = module\n"
        "    def forward(self, x):\n        return self.module(x)\n"
    )
    assert "return self.module(x)" in str(changed(tmp_path, text))

    named = _DDP + "\n\ndef run(model: DDP | None, *, other: DDP) -> DDP:\n    here: DDP = model\n    return here\n"
    assert "(model: DDP | None, *, other: DDP) -> DDP:" in str(changed(tmp_path, named))
    assert "\n    model = net()\n" in str(changed(tmp_path, _DDP.replace("model = DDP", "model: DDP = DDP")))

    option = 'parser.add_argument("--local-rank", default=int(os.environ.get("LOCAL_RANK", 0)))\n'
    new = str(changed(tmp_path, f"import os\n{_DDP}\n\n{option}"))
    assert option in new
    assert "hvd.local_rank()" not in new


def test_a_script_that_starts_processes_in_other_ways_stays_as_it_is_too(tmp_path: Path) -> None:
    """Its processes would all be alone, and not say so."""
    start = "from torch.multiprocessing import Process\n\n[Process(target=main, args=(r,)).start() for r in range(2)]\n"
    [file] = read(tmp_path, train_py=_DDP + start).files
    assert file.new_text is None
    assert any(each.blocks and "starts the processes" in each.message for each in file.findings)


@pytest.mark.parametrize(
    "start",
    [
        'import torch.multiprocessing as mp\n\nmp.get_context("spawn").Process(target=main, args=(0,)).start()\n',
        "from multiprocessing import Pool\n\nPool(2).map(main, range(2))\n",
        "from concurrent.futures import ProcessPoolExecutor\n\nProcessPoolExecutor(2).map(main, range(2))\n",
    ],
)
def test_contexts_and_pools_start_processes_too(tmp_path: Path, start: str) -> None:
    [file] = read(tmp_path, train_py=_DDP + start).files
    assert file.new_text is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        loss.backward()\n", "        loss.backward()\n        model(batch).sum().backward()\n"),
        (
            "        loss.backward()\n",
            "        with scaled(loss) as s:\n            s.backward()\n        loss.backward()\n",
        ),
        ("        optimizer.step()\n", "        if loss < 3:\n            optimizer.step()\n"),
        (
            "        optimizer.step()\n",
            "        seen += 1\n        if seen == 4:\n            optimizer.step()\n            seen = 0\n",
        ),
    ],
)
def test_passes_without_a_step_each_need_a_hand(tmp_path: Path, old: str, new: str) -> None:
    assert old in _DDP
    [file] = read(tmp_path, train_py=_DDP.replace(old, new)).files
    assert file.new_text is None
    assert any(each.blocks and "backward_passes_per_step" in each.message for each in file.findings)

    model, _, loop = _DDP.replace(old, new).replace("optimizer =", "opt =").partition("    for batch")
    files = read(
        tmp_path, train_py=f"import loop\n{model}    loop.run(model, opt)\n", loop_py=f"def run():\n    for batch{loop}"
    )
    assert [each.new_text for each in files.files] == [None, None]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "        loss.backward()\n        optimizer.step()\n",
            (
                "        if amp:\n            scaler.scale(loss).backward()\n"
                "        else:\n            loss.backward()\n"
                "        if amp:\n            scaler.step(optimizer)\n        else:\n            optimizer.step()\n"
            ),
        ),
        (
            "        loss.backward()\n        optimizer.step()\n",
            (
                "        train = next(modes)\n        if train:\n            loss.backward()\n"
                "        if train:\n            optimizer.step()\n"
            ),
        ),
        ("        optimizer.step()\n", "        if dry is None:\n            optimizer.step()\n"),
        (
            "        optimizer.step()\n",
            "        optimizer.step()\n        model(batch).sum().backward()\n        optimizer.step()\n",
        ),
    ],
)
def test_passes_with_a_step_each_are_right(tmp_path: Path, old: str, new: str) -> None:
    assert old in _DDP
    assert changed(tmp_path, _DDP.replace(old, new)) is not None


def test_passes_of_a_test_that_imports_the_program_do_not_matter(tmp_path: Path) -> None:
    tested = "import train\n\n\ndef test_it():\n    train.net().a.backward()\n    train.net().b.backward()\n"
    assert report(read(tmp_path, train_py=_DDP, test_it_py=tested), "train.py").new_text is not None


def test_passes_in_another_file_may_read_gradients(tmp_path: Path) -> None:
    model = _DDP.partition("    for batch")[0]
    assert "synchronize_in_backward=True" in str(changed(tmp_path, f"{model}    loop.run(model, optimizer)\n"))


@pytest.mark.parametrize("is_late", [False, True])
def test_a_function_that_starts_the_job_is_called_before_the_optimizer_is_made(tmp_path: Path, is_late: bool) -> None:
    start = 'def setup():\n    dist.init_process_group("gloo")\n\n\ndef main(rank):\n'
    text = _DDP.replace('def main(rank):\n    dist.init_process_group("gloo")\n', start)
    place = "    for batch" if is_late else "    model = "
    new = changed(tmp_path, text.replace(place, f"    setup()\n{place}"))
    assert (new is None) == is_late


def test_a_sampler_that_may_be_given_the_ranks_is_left(tmp_path: Path) -> None:
    text = "from torch.utils.data import DistributedSampler\nDistributedSampler(data, **ranks)\n"
    assert not read(tmp_path, train_py=text).files


def test_a_step_of_a_profiler_is_none_of_the_optimizer(tmp_path: Path) -> None:
    text = _DDP.replace(
        "        loss.backward()\n",
        "        for part in range(2):\n            loss.backward()\n            prof.step()\n",
    )
    assert text != _DDP
    [file] = read(tmp_path, train_py=text).files
    assert file.new_text is None


def test_files_that_start_the_processes_of_others_belong_to_these(tmp_path: Path) -> None:
    start = "import multiprocessing\nimport train\n\nmultiprocessing.Process(target=train.main, args=(0,)).start()\n"
    files = read(tmp_path, start_py=start, train_py=_DDP).files
    assert [(file.path.name, file.new_text) for file in files] == [("start.py", None), ("train.py", None)]
    assert not read(tmp_path, train_py="import multiprocessing\nmultiprocessing.Process(target=print)\n").files


def test_options_that_are_needed_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\n" + _DDP.replace("batches", 'range(int(os.environ.get("WORLD_SIZE", "1")))'))

    assert main(["migrate", "--apply", str(script)]) == 0
    assert "`reigen run --torchrun-env` is needed for train.py" in capsys.readouterr().out


def test_gradients_that_are_read_before_the_step_are_averages(tmp_path: Path) -> None:
    text = _DDP.replace(
        "        optimizer.step", "        torch.nn.utils.clip_grad_norm_(p, 1.0)\n        optimizer.step"
    )

    assert "synchronize_in_backward=True)" in str(changed(tmp_path, text))


def test_a_script_that_can_run_without_ddp_still_can(tmp_path: Path) -> None:
    text = _DDP.replace(
        "    model = DDP(net())", "    model = net()\n    if rank is not None:\n        model = DDP(model)"
    )

    new = str(changed(tmp_path, text))
    assert "    if rank is not None:\n        hvd.broadcast_parameters(model" in new
    assert "    if hvd.is_initialized():\n        optimizer = hvd.DistributedOptimizer(" in new


def test_collectives(tmp_path: Path) -> None:
    new = changed(
        tmp_path,
        """\
        import torch, os
        import torch.distributed as dist
        hvd = 3
        dist.init_process_group("nccl")
        dist.all_reduce(a + b)
        dist.all_reduce(a, op=dist.ReduceOp.MAX)
        dist.reduce(a, 0, group=None, async_op=False)
        dist.broadcast(a, src=dist.get_rank() * 0)
        dist.broadcast_object_list(objects, src=1)
        sampler = torch.utils.data.DistributedSampler(d, dist.get_world_size(), shuffle=False)
        print(dist.is_available(), dist.is_initialized(), os.environ["RANK"])
        """,
    )

    assert new == textwrap.dedent("""\
        import torch, os
        import torch.distributed as dist
        import reigen.torch as reigen_hvd
        hvd = 3
        reigen_hvd.init()
        reigen_hvd.allreduce_(a + b, op=reigen_hvd.Sum)
        reigen_hvd.allreduce_(a, op=reigen_hvd.Max)
        reigen_hvd.allreduce_(a, op=reigen_hvd.Sum)
        reigen_hvd.broadcast_(a, root_rank=reigen_hvd.rank() * 0)
        objects[:] = reigen_hvd.broadcast_object(objects, root_rank=1)
        sampler = torch.utils.data.DistributedSampler(d, reigen_hvd.size(), shuffle=False, rank=reigen_hvd.rank())
        print(dist.is_available(), reigen_hvd.is_initialized(), os.environ["RANK"])
        """)


def test_files_that_import_each_other_are_changed_together_or_not_at_all(tmp_path: Path) -> None:
    helper = "import torch.distributed as dist\n\ndef rank():\n    return dist.get_rank()\n"
    alone = read(tmp_path, helper_py=helper)
    assert report(alone, "helper.py").new_text is None

    together = read(tmp_path, helper_py=helper, between_py="import helper\n", train_py="import between\n" + _DDP)
    assert "hvd.rank()" in str(report(together, "helper.py").new_text)
    assert "hvd.init()" in str(report(together, "train.py").new_text)

    blocked = read(tmp_path, helper_py=helper + "\ndef f():\n    dist.send(x, 1)\n")
    assert [file.new_text for file in blocked.files] == [None, None]
    assert "because of" in report(blocked, "train.py").findings[0].message


def test_stores_of_mxnet(tmp_path: Path) -> None:
    migration = read(
        tmp_path,
        train_py="""\
        import mxnet as mx
        from mxnet import gluon
        kv = mx.kv.create("dist_sync")
        local = mx.kv.create("local")
        odd = mx.kv.create("dist_magic")
        trainer = gluon.Trainer(params, "adadelta", {}, kvstore=kv)
        good = gluon.Trainer(params, "adadelta", {}, kvstore=kv, update_on_kvstore=False)
        sgd = gluon.Trainer(params, "sgd", {}, kvstore="dist_async")
        mx.profiler.set_config(profile_process="server")
        """,
    )
    found = {(each.line, each.status) for each in migration.files[0].findings}

    assert found == {
        (3, "works"),
        (4, "works"),
        (5, "cannot"),
        (6, "works"),
        (6, "change"),
        (7, "works"),
        (8, "works"),
        (9, "cannot"),
    }


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            'import lightning as L\nL.Trainer(devices=4, strategy="ddp")\n',
            'import lightning as L\nimport reigen.lightning\nL.Trainer(devices=4, strategy="reigen")\n',
        ),
        (
            "from pytorch_lightning import Trainer\nTrainer(strategy='ddp_find_unused_parameters_true')\n",
            'from pytorch_lightning import Trainer\nimport reigen.lightning\nTrainer(strategy="reigen")\n',
        ),
        (
            'import lightning as L\nimport reigen.torch\nL.Trainer(strategy="ddp")\n',
            'import lightning as L\nimport reigen.lightning\nimport reigen.torch\nL.Trainer(strategy="reigen")\n',
        ),
        (
            'from lightning.pytorch.cli import LightningCLI\nLightningCLI(M, trainer_defaults={"strategy": "ddp"})\n',
            (
                "from lightning.pytorch.cli import LightningCLI\nimport reigen.lightning\n"
                'LightningCLI(M, trainer_defaults={"strategy": "reigen"})\n'
            ),
        ),
        (
            'import pytorch_lightning as pl\npl.Trainer(**dict(devices=2, strategy="ddp"))\n',
            (
                "import pytorch_lightning as pl\nimport reigen.lightning\n"
                'pl.Trainer(**dict(devices=2, strategy="reigen"))\n'
            ),
        ),
        (
            'import pytorch_lightning as pl\npl.Trainer.from_argparse_args(args, strategy="ddp")\n',
            (
                "import pytorch_lightning as pl\nimport reigen.lightning\n"
                'pl.Trainer.from_argparse_args(args, strategy="reigen")\n'
            ),
        ),
        ("import lightning as L\nL.Trainer()\nL.Trainer(devices=1)\nL.Trainer(**options, devices=2)\n", None),
        ("import lightning as L\nimport reigen.lightning\nL.Trainer(strategy=args.strategy)\n", None),
        ('from mine import Trainer\nTrainer(strategy="ddp")\n', None),
    ],
)
def test_trainers_of_lightning(tmp_path: Path, old: str, new: str | None) -> None:
    files = read(tmp_path, train_py=old).files
    assert [file.new_text for file in files] == ([] if new is None else [new])
    assert not read(tmp_path, train_py=new or old).files


@pytest.mark.parametrize(
    "text",
    [
        "from pytorch_lightning import Trainer\nTrainer(accelerator='horovod', gpus=1)\n",
        "import lightning as L\nL.Trainer(strategy=L.pytorch.strategies.DDPStrategy(static_graph=True))\n",
        "from pytorch_lightning import Trainer\nTrainer(accelerator='horovod', strategy='horovod')\n",
        "if True:\n    import lightning as L; L.Trainer(strategy='ddp')\n",
        "import lightning as L\nL.Trainer(devices=args.devices, strategy=args.strategy)\n",
        "import lightning as L\nL.Trainer(devices=4)\n",
        "import lightning as L\nL.Trainer(devices=[0, 1])\n",
        "import lightning as L\nL.Trainer(devices=-1, num_nodes=2)\n",
        "import pytorch_lightning as pl\npl.Trainer(gpus=4, accelerator='ddp')\n",
    ],
)
def test_trainers_of_lightning_that_need_a_hand(tmp_path: Path, text: str) -> None:
    [file] = read(tmp_path, train_py=text).files
    assert [(each.line, each.status) for each in file.findings] == [(2, "change")]
    assert "by hand" in file.findings[0].message
    assert "import reigen.lightning" in file.findings[0].message


@pytest.mark.parametrize(
    ("call", "status", "message"),
    [
        ('L.Fabric(devices=2, strategy="ddp")', "works", "--torchrun-env"),
        ("L.Fabric(strategy=L.fabric.strategies.DDPStrategy())", "works", "docs/lightning.md"),
        ('L.Fabric(devices=2, strategy="ddp_spawn")', "works", "start it by `python`"),
        ('L.Fabric(devices=2, strategy="fsdp")', "cannot", "whole parameters"),
    ],
)
def test_fabric(tmp_path: Path, call: str, status: str, message: str) -> None:
    [file] = read(tmp_path, train_py=f"import lightning as L\nfabric = {call}\n").files
    assert [(each.line, each.status) for each in file.findings] == [(2, status)]
    assert message in file.findings[0].message


@pytest.mark.parametrize(
    "trainer",
    ['Trainer(strategy="fsdp")', 'Trainer(strategy="deepspeed_stage_2", devices=4)', "strategies.FSDPStrategy()"],
)
def test_strategies_of_lightning_that_divide_the_model_cannot_be_had(tmp_path: Path, trainer: str) -> None:
    [file] = read(tmp_path, train_py=f"import pytorch_lightning as pl\npl.{trainer}\n").files
    assert [(each.line, each.status) for each in file.findings] == [(2, "cannot")]


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("trainer:\n  strategy: ddp_find_unused_parameters_true\n", "change"),
        ("trainer:\n  strategy: 'fsdp'\n", "cannot"),
        ("strategy:\n  class_path: lightning.pytorch.strategies.DDPStrategy\n", "change"),
        ("run:\n  python train.py fit --trainer.strategy=ddp\n", "change"),
        ("strategy:\n  type: RollingUpdate\n", None),
    ],
)
def test_strategies_of_lightning_in_configurations(tmp_path: Path, text: str, status: str | None) -> None:
    found = [each for file in read(tmp_path, config_yaml=text).files for each in file.findings]
    assert [(each.line, each.status) for each in found] == ([(2, status)] if status else [])


def test_scripts_that_average_by_other_packages(tmp_path: Path) -> None:
    migration = read(
        tmp_path,
        a_py="from accelerate import Accelerator\nfrom accelerate.utils import set_seed\n\nA = Accelerator()\n",
        d_py="import deepspeed\n\nengine = deepspeed.initialize(model=model)\n",
        t_py="import transformers\n\n\nclass Trainer(transformers.Trainer):\n    pass\n",
        u_py="from accelerate.utils import set_seed\n\nset_seed(1)\n",
        train_py=_DDP,
        run_sh="accelerate launch a.py\ndeepspeed --num_gpus 4 d.py\naccelerate launch --num_processes 2 train.py\n",
        environment_yml="dependencies:\n  - deepspeed\n  - accelerate\n",
    )
    found = {file.path.name: [(each.line, each.status) for each in file.findings] for file in migration.files}

    assert found.pop("train.py")
    assert found == {
        "a.py": [(4, "works")],
        "d.py": [(3, "cannot")],
        "t.py": [(4, "works")],
        "run.sh": [(1, "works"), (2, "works"), (3, "change")],
    }
    assert report(migration, "a.py").options == ["--torchrun-env"]
    assert report(migration, "train.py").new_text is not None


@pytest.mark.parametrize(
    ("text", "line", "status", "message"),
    [
        ("command:\n- mpirun\n- -np\n- '2'\n- python\n- hvd.py\n", 2, "works", "PYTHONPATH"),
        ('  command: ["mpirun", "-np", "2", "python", "hvd.py"]\n', 1, "works", "PYTHONPATH"),
        ("command:\n  - torchrun\n  - --nproc_per_node=2\n  - train.py\n", 2, "change", "-np 2 python"),
        ('CMD ["torchrun", "--nproc_per_node", "2", "train.py"]\n', 1, "change", "-np 2 python"),
        ('["python", "-m", "torch.distributed.run", "--nnodes=2", "train.py"]\n', 1, "change", "several hosts"),
        ("- python\n- -m\n- torch.distributed.run\n- --nproc-per-node=4\n- train.py\n", 3, "change", "-np 4 python"),
        ('command: ["torchrun"]\nargs: ["--nproc_per_node=2", "train.py"]\n', 1, "change", "-np 2 python train.py`"),
        ("args:\n- --nproc_per_node=2\n- train.py  # it\ncommand:\n- torchrun\n", 5, "change", "-np 2 python train"),
        ("entrypoint: torchrun\ncommand: --nproc_per_node=2 train.py\n", 1, "change", "-np 2 python train.py"),
        ("command: [torchrun, --nproc_per_node=2, train.py]\n", 1, "change", "-np 2 python train.py"),
        ('command: [\n  "torchrun",  # it\n  "--nproc_per_node=4",\n  "train.py",\n]\n', 2, "change", "-np 4 python"),
        ('CMD ["torchrun", \\\n  "--nproc_per_node=4", \\\n  "train.py"]\n', 1, "change", "-np 4 python"),
        ('CMD ["env", "A=1", "B=2", "C=3", "torchrun", "train.py"]\n', 1, "change", "-np 1 python"),
        ('command: ["torchrun", "--nproc_per_node=2", "-m", "pkg.train"]\n', 1, "change", "python -m pkg.train"),
        ('- command: ["mpirun"]\n  args: ["-np", "2", "python", "hvd.py"]\n', 1, "works", "PYTHONPATH"),
        ("- command: [torchrun]\n- args: [train.py]\n", 1, "works", "is not seen"),
        ('CMD ["python", "tools/launch.py", "-n", "2", "python", "kv.py"]\n', 1, "change", "by hand"),
        ("- accelerate\n- launch\n- train.py\n", 1, "change", "reigen run -np N"),
        ("- image: horovod/horovod:0.28\n", 1, "change", "it has no Reigen"),
        ("FROM docker.io/horovod/horovod-cpu:latest\n", 1, "change", "it has no Reigen"),
    ],
)
def test_commands_that_are_lists_and_images(tmp_path: Path, text: str, line: int, status: str, message: str) -> None:
    migration = read(tmp_path, train_py=_DDP, hvd_py="import horovod.torch as hvd\n", job_yaml=text)
    file = report(migration, "job.yaml")

    assert [(each.line, each.status) for each in file.findings] == [(line, status)]
    assert message in file.findings[0].message
    assert file.new_text is None


def test_a_command_is_not_changed_where_reigen_is_not_installed_yet(tmp_path: Path) -> None:
    text = 'FROM python\nRUN pip install horovod[pytorch]\nCMD ["horovodrun", "-np", "2", "python", "hvd.py"]\n'
    (tmp_path / "Dockerfile").write_text(text)
    [file] = read(tmp_path).files

    assert file.new_text is None
    assert "line 2 installs: `reigen run --as-horovod`" in file.findings[1].message

    (tmp_path / "Dockerfile").write_text(text.replace("horovod[pytorch]", "-r /app/requirements.txt"))
    assert report(read(tmp_path), "Dockerfile").new_text is not None
    assert report(read(tmp_path, requirements_txt="horovod\n"), "Dockerfile").new_text is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("horovodrun -np 4 -H h1:4 python a.py\n", "reigen run --as-horovod -np 4 -H h1:4 python a.py\n"),
        (
            "exec /opt/bin/horovodrun \\\n  -np 4 python a.py\n",
            "exec reigen run --as-horovod \\\n  -np 4 python a.py\n",
        ),
        ('CMD ["horovodrun", "-np", "2"]\n', 'CMD ["reigen", "run", "--as-horovod", "-np", "2"]\n'),
        ("command: [horovodrun, -np, '2']\n", "command: [reigen, run, --as-horovod, -np, '2']\n"),
        ('do:\n- "horovodrun"\n- "-np"\n', 'do:\n- "reigen"\n- "run"\n- "--as-horovod"\n- "-np"\n'),
        ('entrypoint: "horovodrun"\ncommand: -np 2\n', 'entrypoint: "reigen run --as-horovod"\ncommand: -np 2\n'),
        ('"horovodrun" -np 2 python a.py\n', "reigen run --as-horovod -np 2 python a.py\n"),
        (
            'command: ["sh", "-c"]\nargs: ["torchrun --nproc_per_node=2 train.py; true"]\n',
            'command: ["sh", "-c"]\nargs: ["reigen run -np 2 python train.py; true"]\n',
        ),
        (
            "args:\n- >-\n  torchrun\n  --nproc_per_node=2\n  train.py --lr 1\n",
            "args:\n- >-\n  reigen run -np 2 python train.py --lr 1\n",
        ),
        ("[ -x torchrun ] && torchrun train.py; true\n", "[ -x torchrun ] && reigen run -np 1 python train.py; true\n"),
        ("torchrun --nproc_per_node=2 -m pkg.train --x\n", "reigen run -np 2 python -m pkg.train --x\n"),
        ("do:\n - horovodrun\n - -np\n", "do:\n - reigen\n - run\n - --as-horovod\n - -np\n"),
        (
            "python ../../tools/launch.py -n 3 -H hosts python a.py\n",
            "reigen launch --as-mxnet -n 3 -H hosts python a.py\n",
        ),
        ("torchrun --standalone --nproc-per-node=$N train.py --x 3\n", "reigen run -np $N python train.py --x 3\n"),
        (
            "python3 -m torch.distributed.launch --nproc_per_node 4 --use_env \\\n  train.py\n",
            "reigen run -np 4 python train.py\n",
        ),
        ("torchrun --nproc_per_node 2 -m train.py\n", "reigen run -np 2 python -m train.py\n"),
    ],
)
def test_command_lines(tmp_path: Path, old: str, new: str) -> None:
    assert report(read(tmp_path, train_py=_DDP, job_sh=old), "job.sh").new_text == new
    assert not [file for file in read(tmp_path, job_sh=new).files if file.path.name == "job.sh"]


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("horovodrun -np 2 --warp 9 python a.py", "cannot", "no such option"),
        ("horovodrun --cycle-time-ms 3 -np 2 python a.py --warp", "works", "no effect"),
        ("which horovodrun", "change", "by hand"),
        ("RUN HOROVOD_WITH_PYTORCH=1 pip install horovod[pytorch]==0.28.1", "change", "by hand"),
        ("mpirun -np 2 python hvd.py", "works", "PYTHONPATH"),
        ("torchrun --nnodes 2 --nproc_per_node 8 train.py", "change", "several hosts"),
        ("torchrun --nproc_per_node gpu train.py", "change", "-np is a number"),
    ],
)
def test_command_lines_that_need_a_hand_or_none(tmp_path: Path, line: str, status: str, message: str) -> None:
    migration = read(tmp_path, train_py=_DDP, hvd_py="import horovod.torch as hvd\n", job_sh=f"# horovodrun\n{line}\n")

    found = report(migration, "job.sh").findings
    assert any(each.status == status and message in each.message and each.line == 2 for each in found)


@pytest.mark.parametrize(
    ("name", "text", "subject"),
    [
        ("requirements.txt", "torch\nhorovod==0.28.1  # averages\n", "horovod==0.28.1"),
        ("environment.yml", "dependencies:\n  - pip:\n    - horovod[pytorch]>=0.28\n", "horovod[pytorch]>=0.28"),
        ("requirements.txt", "torch\nhorovod==0.28.1 --hash=sha256:aa\n", "horovod==0.28.1"),
        ("requirements.txt", "torch\nhorovod[pytorch]==0.28.1 \\\n", "horovod[pytorch]==0.28.1"),
        ("environment.yml", "dependencies:\n  - torch\n  - conda-forge::horovod=0.28\n", "horovod=0.28"),
        ("setup.py", 'import horovod_free\nsetup(\n    install_requires=["torch", "horovod>=0.2"])\n', "horovod>=0.2"),
        ("pyproject.toml", "[project]\n# horovod\ndependencies = ['torch', 'horovod[keras] ~= 0.28']\n", None),
        ("Pipfile", '[packages]\ntorch = "*"\nhorovod = "*"\n', "horovod ="),
    ],
)
def test_packages_that_a_project_needs(tmp_path: Path, name: str, text: str, subject: str | None) -> None:
    (tmp_path / name).write_text(text)
    [file] = read(tmp_path).files

    assert [(each.line, each.status) for each in file.findings] == [(3 if name != "requirements.txt" else 2, "change")]
    assert file.findings[0].subject == (subject or "horovod[keras] ~= 0.28")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pyproject.toml", '[project]\nname = "horovod"\nkeywords = ["horovod", "mpi"]\n'),
        ("setup.py", 'horovod = None\nsetup(extras_require={"horovod": []})\n'),
        ("requirements.txt", "horovod-tools==1.0\nhorovod_x\n"),
    ],
)
def test_names_that_are_no_packages(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert not read(tmp_path).files


def test_command_lines_of_others_are_left_alone(tmp_path: Path) -> None:
    text = "mpirun -np 2 ./solver\ntorchrun --nproc_per_node 2 other.py\nname: horovodrun-job\npip install torch\n"

    assert [file.path.name for file in read(tmp_path, train_py=_DDP, job_sh=text).files] == ["train.py"]


def notebook(*sources: str) -> str:
    cells = [
        {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": text.splitlines(True)}
        for text in sources
    ]
    cells.insert(1, {"cell_type": "markdown", "metadata": {}, "source": ["horovodrun é"]})
    return json.dumps(
        {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, indent=1, ensure_ascii=False
    )


def test_notebooks_keep_their_form(tmp_path: Path) -> None:
    old = notebook(
        "%matplotlib inline\nimport horovod.torch as hvd", "!horovodrun -np 2 python a.py\nx = !ls\nhvd.init()"
    )
    migration = read(tmp_path, a_ipynb=old + "\n")
    [file] = migration.files

    assert [file.place(each) for each in file.findings] == [(1, 2), (3, 1), (3, 3)]
    expected = old.replace("import horovod", "import reigen").replace("!horovodrun", "!reigen run --as-horovod")
    assert file.new_text == expected + "\n"


def test_a_notebook_in_another_form_is_not_changed_all_over(tmp_path: Path) -> None:
    text = json.dumps(json.loads(notebook("import horovod.torch as hvd", "")))
    [file] = read(tmp_path, a_ipynb=text).files

    assert file.new_text is None
    assert "not formatted as Jupyter" in str(file.error)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import horovod.torch as hvd\n\nhvd.init()\n")
    old = tmp_path / "old.py"
    old.write_text("import horovod.torch as hvd\nprint 'x'\n")

    assert main(["migrate", str(script)]) == 0
    out = capsys.readouterr().out
    assert "+import reigen.torch as hvd" in out
    assert "is needed for" not in out
    assert "line 3: hvd.init" in out
    assert main(["migrate", "--check", "--no-diff", str(script)]) == 1
    assert main(["migrate", "--check", "--json", str(tmp_path)]) == 2
    capsys.readouterr()
    assert main(["migrate", "--apply", "--json", str(tmp_path)]) == 2
    document = json.loads(capsys.readouterr().out)
    errors = {Path(file["path"]).name: file["error"] for file in document["files"]}
    assert errors["train.py"] is None
    assert errors["old.py"].startswith("Python 2 (line 2")
    assert script.read_text() == "import reigen.torch as hvd\n\nhvd.init()\n"
    assert old.read_text() == "import horovod.torch as hvd\nprint 'x'\n"
    assert main(["migrate", "--check", str(script)]) == 0
    assert "nothing of Horovod" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["migrate", str(tmp_path / "nothing")])
