"""Pages of the reference that are made of the code: its names, its knobs and its commands."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from dataclasses import fields
from functools import cache

from reigen.cli.main import COMMANDS
from reigen.config import VARIABLES, WITHOUT_EFFECT, Config
from reigen.migrate.public_names import find_module, place_of_definition, star_names
from tools.docs.parsers import actions_of, command_parsers

#: Modules of the reference: their page's title. Those with Horovod's names share a page for the names that all have.
MODULES = {
    "reigen": "reigen: NumPy arrays",
    "reigen.torch": "reigen.torch",
    "reigen.lightning": "reigen.lightning",
    "reigen.tensorflow": "reigen.tensorflow",
    "reigen.tensorflow.keras": "reigen.tensorflow.keras",
    "reigen.keras": "reigen.keras",
    "reigen.keras.callbacks": "reigen.keras.callbacks",
    "reigen.jax": "reigen.jax",
    "reigen.mxnet": "reigen.mxnet",
    "reigen.elastic": "reigen.elastic",
    "reigen.torch.elastic": "reigen.torch.elastic",
    "reigen.tensorflow.elastic": "reigen.tensorflow.elastic",
    "reigen.keras.elastic": "reigen.keras.elastic",
    "reigen.jax.elastic": "reigen.jax.elastic",
    "reigen.mxnet.elastic": "reigen.mxnet.elastic",
    "reigen.kv": "reigen.kv",
    "reigen.optim": "reigen.optim",
    "reigen.compression": "reigen.compression",
    "reigen.data": "reigen.data",
    "reigen.ray": "reigen.ray",
    "reigen.spark": "reigen.spark",
    "reigen.spark.torch": "reigen.spark.torch",
    "reigen.spark.keras": "reigen.spark.keras",
    "reigen.dask": "reigen.dask",
    "reigen.sagemaker": "reigen.sagemaker",
    "reigen.errors": "reigen.errors",
    "reigen.testing": "reigen.testing",
}
#: The names that the packages of all frameworks have.
COMMON = "reigen.api.common_names"
_COLUMNS = {"positional arguments": "argument"}
_OPERATOR = "Operator of reductions: `op=hvd.{}`."
#: Values without a comment of their own in the code.
VALUES = {
    **{name: _OPERATOR.format(name) for name in ("Adasum", "Average", "Max", "Min", "Product", "Sum")},
    "reigen.mxnet.allgather_object": "An object of each rank, pickled on its way, as a list on all ranks.",
    "reigen.mxnet.broadcast_object": "An object of one rank, pickled on its way, on all ranks.",
    "global_process_set": "The process set of all ranks.",
    "HorovodInternalError": "The name by which scripts for Horovod catch [`CollectiveError`](reigen.errors.md).",
    "ReigenStrategy": 'A strategy for `Trainer(strategy="reigen")`; see [PyTorch Lightning](../lightning.md).',
    "ReigenConfig": "Backend for Ray Train: `backend_config=ReigenConfig()`; see [Ray](../ray.md).",
}
_ALSO = (
    "It also has the names of [every framework's package](common.md): `init`, `rank`, `size`, the operators, "
    "process sets, metrics."
)
_SAME = (
    "The same functions and objects in `reigen`, `reigen.torch`, `reigen.tensorflow`, `reigen.keras`, `reigen.jax` "
    "and `reigen.mxnet`: `hvd.rank()` is the same whatever `hvd` is."
)
_PRECEDENCE = (
    "Environment variables of a job's processes. `REIGEN_*` wins over `HOROVOD_*` and the other names, and these "
    "over a configuration file (`reigen run --config-file`). An option of `reigen run` sets the variable of all ranks. "
    "Sizes may be written as `64MiB` or `64m` (2^20 bytes each), or as `64MB` (10^6). "
    "`REIGEN_LOG=info` prints each knob that differs from its default, and what set it; a variable that is misspelt "
    "is named in a warning, and a value that makes no sense is an error."
)
_WITHOUT_EFFECT = "Variables of Horovod's that are known; `REIGEN_LOG=info` says why they have no effect."


def make_pages() -> dict[str, str]:
    """Return the pages' text by their path in docs/."""
    pages = {module_page(name): _module_text(name) for name in MODULES}
    pages[module_page(COMMON)] = _common_text()
    pages |= {"reference/index.md": _index_text(), "reference/knobs.md": _knobs_text()}
    pages |= {f"reference/commands/{name}.md": _command_text(name) for name in COMMANDS}
    return pages


def module_page(name: str) -> str:
    """Return the path in docs/ of a module's page."""
    return f"reference/{'common' if name == COMMON else name}.md"


@cache
def names_of(module: str) -> tuple[str, ...]:
    """Return the public names of a module that have a definition, those that all frameworks have left out."""
    common = star_names(COMMON) if module != COMMON else frozenset()
    listed = star_names(source := _source(module))
    if not has_list(source):  # what a module defines, and not what it imports
        listed = frozenset(name for name in listed if place_of_definition(module, name) == (source, name))
    return tuple(sorted(listed - common - {"__version__"}, key=str.lower))


def has_list(module: str) -> bool:
    """Return whether a module says which of its names are public."""
    path = find_module(module)
    return path is not None and "__all__" in path.with_suffix(".py").read_text(encoding="utf-8")


def _source(module: str) -> str:
    """Return the module that has the names: that of ``import reigen`` loads them when they are used."""
    return "reigen.numpy_ops" if module == "reigen" else module


def _module_text(module: str) -> str:
    lines = [f"# {MODULES[module]}", "", _introduction(module), ""]
    documented = [name for name in names_of(module) if not find_module(f"{module}.{name}")]
    modules = [name for name in names_of(module) if find_module(f"{module}.{name}")]
    if star_names(COMMON) <= star_names(_source(module)):
        lines += [_ALSO, ""]
    for name in modules:
        target = f"{module}.{name}"
        lines += [f"- [`{target}`]({target}.md)" if target in MODULES else f"- `{target}`"]
    lines.append("")
    for name in documented:
        lines += [_entry(f"{module}.{name}", name), ""]
    return "\n".join(lines)


def _entry(path: str, name: str) -> str:
    """Return the directive that describes a name, or a description where there is none to be read."""
    text = VALUES.get(path) or VALUES.get(name)
    if text:
        return f"## {name.replace('_', chr(92) + '_')} {{ #{path} }}\n\n{text}"
    return f"::: {path}\n    options: {{ show_if_no_docstring: true }}"


def _introduction(module: str) -> str:
    path = find_module(_source(module))
    assert path is not None
    source = path.with_suffix(".py").read_text(encoding="utf-8")
    return to_markdown(ast.get_docstring(ast.parse(source)) or "")


def to_markdown(docstring: str) -> str:
    """Return a docstring as Markdown: code in single backticks, roles of Sphinx's as code, examples in fences."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", docstring)
    text = re.sub(r"(?<!`)``(?!`)", "`", text)
    text = re.sub(r"(?m)^Example:$", "Examples:", text)  # a section that Griffe knows
    text = re.sub(r"(?m)^(.*?):?:\n\n((?:(?: {4,}.*)?(?:\n|$))+)", _literal_block, text)
    return re.sub(r"(?m)^>>> (?:.+(?:\n|$))+", lambda match: f"```python\n{match[0].rstrip()}\n```\n", text)


def _literal_block(match: re.Match[str]) -> str:
    if not match[0].partition("\n")[0].endswith("::"):
        return match[0]
    head = f"{match[1]}:\n\n" if match[1] else ""
    return f"{head}```text\n{inspect.cleandoc(match[2])}\n```\n\n"


def _common_text() -> str:
    lines = [
        "# Names that every framework has",
        "",
        _SAME,
        "",
    ]
    lines += [_entry(f"{COMMON}.{name}", name) + "\n" for name in names_of(COMMON)]
    return "\n".join(lines)


def _index_text() -> str:
    lines = ["# Reference", "", "All of it is made of the code: of its docstrings, its table of knobs and its parsers."]
    lines += ["", "## Commands", "", "| command | what it does |", "|---|---|"]
    lines += [f"| [`reigen {name}`](commands/{name}.md) | {_cell(text)} |" for name, text in COMMANDS.items()]
    lines += ["", "## Knobs", "", "[Environment variables](knobs.md): defaults, values and other names of each.", ""]
    lines += ["## Modules", "", "| module | what it is |", "|---|---|"]
    lines.append(f"| [names that all have]({_page(COMMON)}) | The job, process sets, operators, metrics. |")
    for module in MODULES:
        summary = _introduction(module).partition("\n\n")[0].replace("\n", " ")
        lines.append(f"| [`{module}`]({_page(module)}) | {_cell(summary)} |")
    return "\n".join([*lines, ""])


def _page(module: str) -> str:
    return module_page(module).removeprefix("reference/")


def knob_descriptions() -> dict[str, str]:
    """Return the description of each knob, of the docstring of `reigen.config.Config`."""
    text = inspect.getdoc(Config) or ""
    attributes = text.partition("Attributes:\n")[2]
    found: dict[str, str] = {}
    for match in re.finditer(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE):
        found[match[1]] = " ".join(match[2].split())
    return found


def _knobs_text() -> str:
    described = knob_descriptions()
    lines = [
        "# Knobs",
        "",
        _PRECEDENCE,
        "",
    ]
    for knob in fields(Config):
        if knob.name not in VARIABLES:
            continue
        first, *others = VARIABLES[knob.name]
        kind = knob.metadata["kind"]
        text = described[knob.name].replace("``", "`")
        lines += [f"## `{first}`", "", f"{text[0].upper()}{text[1:]}", ""]
        lines += [f"- Default: {_default(knob.default)}", f"- Value: {_cell(kind.expected)}"]
        if others:
            lines.append(f"- Also: {', '.join(f'`{name}`' for name in others)}")
        lines.append("")
    lines += ["## Without effect", "", _WITHOUT_EFFECT, "", "| variable | why it has no effect |", "|---|---|"]
    lines += [f"| `{name}` | {_cell(reason)} |" for name, reason in WITHOUT_EFFECT.items()]
    lines.append("")
    return "\n".join(lines)


def _default(value: object) -> str:
    words = {None: "not set", (): "not set", False: "`0`", True: "`1`"}
    if value is None or value == () or isinstance(value, bool):
        return words[value]  # type: ignore[index]
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _command_text(command: str) -> str:
    lines = [f"# reigen {command}", ""]
    for name, parser in command_parsers().items():
        if name == command:
            lines += _parser_lines(parser)
        elif name.startswith(f"{command} "):
            lines += [f"## reigen {name}", "", *_parser_lines(parser)]
    return "\n".join(lines)


def _parser_lines(parser: argparse.ArgumentParser) -> list[str]:
    usage = parser.format_usage().removeprefix("usage: ").strip()
    lines = ["```text", usage, "```", ""]
    if parser.description:
        lines += [_text(parser, parser.description), ""]
    for title, actions in actions_of(parser):
        lines += [f"**{title.capitalize()}**", "", f"| {_COLUMNS.get(title, 'option')} | meaning |", "|---|---|"]
        lines += [f"| {_spelling(action)} | {_cell(_help(parser, action))} |" for action in actions]
        lines.append("")
    if parser.epilog:
        lines += ["```text", parser.epilog.strip("\n"), "```", ""]
    return lines


def _text(parser: argparse.ArgumentParser, text: str) -> str:
    return (text % {"prog": parser.prog}) if "%(" in text else text


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    values = {**vars(action), "prog": parser.prog}
    return ((action.help or "") % values) if "%" in (action.help or "") else action.help or ""


def _spelling(action: argparse.Action) -> str:
    metavar = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper())
    value = metavar if isinstance(metavar, str) else " ".join(metavar)
    if not action.option_strings:
        return f"`{value}`"
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    return names if action.nargs == 0 else f"{names} `{value}`".replace("|", "\\|")


def _cell(text: str) -> str:
    """Return text for a cell of a table: in one line, nothing of it taken for markup."""
    text = " ".join(text.split())
    return re.sub(r"([|*_<>\[\]])", r"\\\1", text) if "`" not in text else text.replace("|", "\\|")
