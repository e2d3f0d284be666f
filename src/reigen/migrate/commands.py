"""Command lines in shell scripts, batch files, YAML, Dockerfiles and notebooks: how jobs are started."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import PurePosixPath

from reigen.launch.horovodrun import ELASTIC_OPTIONS, HOROVODRUN_OPTIONS, MPIRUN_OPTIONS
from reigen.migrate.findings import LineFinding
from reigen.migrate.horovod import find_variables
from reigen.migrate.lightning import SHARDED, STARTED
from reigen.migrate.text_files import Edit, Lines
from reigen.migrate.word_lists import Word, WordLists, folded_end

_WORD_BEFORE, _WORD_AFTER = r"(?<![\w./$-])", r"(?![\w.-])"
_HOROVODRUN = re.compile(_WORD_BEFORE + r"(?:/[\w./-]*/)?horovodrun" + _WORD_AFTER)
_TORCHRUN = re.compile(
    _WORD_BEFORE + r"(?:torchrun|python[\d.]*\s+-m\s+torch\.distributed\.(?:launch|run))" + _WORD_AFTER
)
_OTHER_LAUNCHERS = re.compile(_WORD_BEFORE + r"(?:accelerate\s+launch|deepspeed(?=\s+(?:-|\S+\.py)))" + _WORD_AFTER)
_IMAGE = re.compile(r"^\s*(?:-\s+)?(?:image:|FROM)\s+[\"']?(?P<image>(?:[\w.:-]+/)*horovod/horovod[\w.:@-]*)")
_LIGHTNING = re.compile(
    r"(?:^\s*|--trainer\.)strategy(?:\.class_path)?(?::\s*|=|\s+)[\"']?(?P<name>(?:ddp|fsdp|deepspeed|horovod)\w*)"
    r"|class_path:\s*[\"']?[\w.]*?(?P<class>(?:DDP|FSDP|DeepSpeed|ModelParallel)Strategy)"
)
_MPIRUN = re.compile(_WORD_BEFORE + r"(?:mpirun|mpiexec|srun)" + _WORD_AFTER)
_LAUNCH_PY = re.compile(_WORD_BEFORE + r"(?:python[\d.]*\s+)?[\w./$-]*tools/launch\.py" + _WORD_AFTER)
_INSTALLS = re.compile(r"\bpip[\d.]*\s+install\b|\bconda\s+install\b|\bmamba\s+install\b")
_INSTALLS_LIST = re.compile(r"\s(?:-r|-f|--requirement|--file)[\s=]*[\"']?(?P<list>[\w./-]+)")
_HOROVOD = re.compile(r"(?<![\w./-])horovod(\[[\w, -]*\])?(?![\w./-])")
_REQUIREMENT = re.compile(
    r"""^\s*-?\s*(?:[\w-]+::)?(?P<line>horovod(?:\[[\w, -]*\])?(?![\w.-])(?:\s*[=<>!~]{1,3}[\w.,*=<>!~ ]*)?)"""
    r"""|["'](?P<text>horovod(?:\[[\w, -]*\])?(?:\s*[=<>!~]{1,3}[\w.,*+=<>!~ ]*)?)\s*["';@](?!\s*:)"""
)
#: Lines of a project's own name and words, and of what is no package.
_NO_REQUIREMENT = re.compile(r"""^\s*["']?(?:name|keywords|horovod\s*=\s*None\b)""")
_ASKS = re.compile(r"(\bwhich|\bcommand\s+-v|\btype|\becho|\bman)\s+$")
#: Options of torchrun's that say nothing where one host starts all: whether a value follows.
_TORCHRUN_OPTIONS: Mapping[str, bool] = {
    "standalone": False,
    "use_env": False,
    "nnodes": True,
    "node_rank": True,
    "rdzv_backend": True,
    "rdzv_endpoint": True,
    "rdzv_id": True,
    "rdzv_conf": True,
    "master_addr": True,
    "master_port": True,
    "nproc_per_node": True,
    "max_restarts": True,
    "tee": True,
    "log_dir": True,
    "redirects": True,
    "module": False,
    "no_python": False,
}
_SHORT = {"m": "module", "t": "tee", "r": "redirects"}

#: Number of values of an option of `reigen run`; None: there is no such option.
NumValues = Callable[[str], int | None]


@dataclass(frozen=True, slots=True)
class ProjectScripts:
    """Scripts of the project, by their file names.

    Attributes:
        horovod: use Horovod.
        torch: use torch.distributed, and are converted.
        torch_kept: use torch.distributed, and stay as they are.
        reads_torchrun_variables: read RANK and the like.
        package_lists: lists of packages that have Horovod.
    """

    horovod: set[str] = field(default_factory=set)
    torch: set[str] = field(default_factory=set)
    torch_kept: set[str] = field(default_factory=set)
    reads_torchrun_variables: set[str] = field(default_factory=set)
    package_lists: set[str] = field(default_factory=set)


def find_in_commands(text: str, scripts: ProjectScripts, num_values: NumValues) -> Iterator[LineFinding]:
    """Yield findings about command lines, and images of containers.

    Args:
        text: of a file.
        scripts: of the project.
        num_values: knows the options of `reigen run`.
    """
    lines = Lines(text)
    lists = WordLists(lines)
    found: list[LineFinding] = []
    for number in range(1, len(lines.starts) + 1):
        if not lines.line(number).lstrip().startswith(("#", "//")):
            found += _check_line(lines, number, lists, scripts, num_values)
    by_hand = next((each.line for each in found if each.message in {_INSTALL, _IMAGE_ADVICE}), None)
    by_hand = by_hand or _line_that_installs(lines, scripts.package_lists)
    for each in found:
        if by_hand is not None and each.edits:
            # with the line alone the command would not be found where it runs
            message = f"by hand, together with what line {by_hand} installs: `{_new_command(each)}` ({each.message})"
            yield LineFinding(each.line, each.status, each.subject, message)
        else:
            yield each


def _line_that_installs(lines: Lines, package_lists: set[str]) -> int | None:
    """Return the first line that installs one of these lists of packages; None: there is none."""
    for number in range(1, len(lines.starts) + 1):
        match = _INSTALLS_LIST.search(lines.line(number))
        if match and PurePosixPath(match["list"]).name in package_lists:
            return number
    return None


def _new_command(finding: LineFinding) -> str:
    """Return the words that edits of one line put there, without a list's punctuation."""
    new = "".join(each.new for each in finding.edits)
    return " ".join(re.sub(r"""["']?(, |\s-\s+)["']?""", " ", new).strip("\"' ").split())


def _check_line(
    lines: Lines, number: int, lists: WordLists, scripts: ProjectScripts, num_values: NumValues
) -> Iterator[LineFinding]:
    line, start = lines.line(number), lines.starts[number - 1]
    for launcher, rest in lists.launchers(number):
        yield from _check_list(launcher, rest, scripts)
    for match in _HOROVODRUN.finditer(line):
        word = lists.at(match.start() + start)
        yield from _check_horovodrun(lines, number, match.start() + start, match.end() + start, word, num_values)
    for match in _LAUNCH_PY.finditer(line):
        message = "`reigen launch` has the options of launch.py"
        if lists.at(match.start() + start) is not None:
            message = f"by hand: `reigen launch --as-mxnet`, an item a word, in its place; {message}"
            yield LineFinding(number, "change", match[0], message)
            continue
        edit = Edit(match.start() + start, match.end() + start, "reigen launch --as-mxnet")
        yield LineFinding(number, "change", match[0], message, (edit,))
    for match in _TORCHRUN.finditer(line):
        if lists.at(match.start() + start) is None:
            yield from _check_torchrun(lines, number, match.start() + start, match.end() + start, scripts)
    for match in _OTHER_LAUNCHERS.finditer(line):
        if lists.at(match.start() + start) is None:
            program = _script_of(_words(lines.text, match.end() + start, _logical_end(lines, number)))
            yield from _check_other_launcher(number, " ".join(match[0].split()), program, scripts)
    started = _MPIRUN.search(line)
    if started and not _HOROVODRUN.search(line) and lists.at(started.start() + start) is None:
        program = _script_of(_words(lines.text, started.start() + start, _logical_end(lines, number)))
        yield from _check_mpirun(number, line.strip()[:60], program, scripts)
    yield from _check_installation(line, number)
    yield from _check_strategy(line, number)
    yield from find_variables(iter([(line, number)]))


def _check_list(launcher_word: Word, rest: list[str], scripts: ProjectScripts) -> Iterator[LineFinding]:
    """Yield findings about a command that is written as a list: what to do is said, and not done."""
    number, launcher = launcher_word.line, PurePosixPath(launcher_word.text).name
    placed = [(word, place, place) for place, word in enumerate(rest)]
    parsed = _parse_torchrun(placed)
    script = _script_of(placed) or _module_of(placed)
    if launcher in {"mpirun", "mpiexec", "srun"}:
        yield from _check_mpirun(number, " ".join([launcher, *rest])[:60], script, scripts)
    elif launcher in {"accelerate", "deepspeed"}:
        if script is None:
            return  # a package of that name
        yield from _check_other_launcher(number, launcher, script, scripts)
    elif script in scripts.torch_kept:
        yield LineFinding(number, "works", launcher, _kept(script))
    elif script in scripts.torch:
        new = (
            "reigen run -np N -H HOST:N,..."
            if isinstance(parsed, str)
            else f"reigen run -np {parsed[0]} {parsed[1]}{' '.join(rest[parsed[2] :])}"
        )
        needs = " with --torchrun-env" if script in scripts.reads_torchrun_variables else ""
        reason = f" ({parsed})" if isinstance(parsed, str) else ""
        yield LineFinding(number, "change", launcher, f"by hand: `{new}`{needs}, an item a word{reason}")
    elif script is None and scripts.torch:
        yield LineFinding(number, "works", launcher, _STARTS_CONVERTED)


def _check_other_launcher(
    number: int, launcher: str, script: str | None, scripts: ProjectScripts
) -> Iterator[LineFinding]:
    if script in scripts.torch or script in scripts.horovod:
        message = f"by hand: {script} is started by `reigen run -np N`"
        yield LineFinding(number, "change", launcher, message)
    else:
        message = "works as before: it starts processes for torch.distributed, and torch averages (docs/huggingface.md)"
        yield LineFinding(number, "works", launcher, message)


def _check_strategy(line: str, number: int) -> Iterator[LineFinding]:
    """Yield findings about strategies of Lightning's in configurations, and in options of its command line."""
    for match in _LIGHTNING.finditer(line):
        if re.match(
            "fsdp|deepspeed|modelparallel|ddp_(fully_)?sharded",
            name := (match["name"] or match["class"]),
            re.IGNORECASE,
        ):
            yield LineFinding(number, "cannot", name, SHARDED)
        else:
            message = f"by hand: strategy reigen in its place, and `import reigen.lightning` in the program: {STARTED}"
            yield LineFinding(number, "change", name, message)


def find_in_package_list(text: str) -> Iterator[LineFinding]:
    """Yield findings about Horovod in a list of packages: a line for each, quoted or not, or a key of TOML."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or _NO_REQUIREMENT.search(line):
            continue
        if match := _REQUIREMENT.search(line):
            yield LineFinding(number, "change", (match["line"] or match["text"]).strip(), _INSTALL)


_INSTALL = (
    "by hand: Reigen in its place, with the extra of the framework: reigen[torch], [tensorflow], [keras], [mxnet]"
)
_IMAGE_ADVICE = (
    "by hand: it has no Reigen. Take an image with the framework, and `pip install 'reigen[torch]'`, [tensorflow], "
    "[keras] or [mxnet] in it"
)


def _check_installation(line: str, number: int) -> Iterator[LineFinding]:
    if match := _IMAGE.search(line):
        yield LineFinding(number, "change", match["image"], _IMAGE_ADVICE)
    if _INSTALLS.search(line) and (match := _HOROVOD.search(line)):
        yield LineFinding(number, "change", match[0], _INSTALL)


def _logical_end(lines: Lines, number: int) -> int:
    """Return the offset of the end of a command that begins on a line: of the last one that a backslash continues."""
    number = folded_end(lines, number)
    while number < len(lines.starts) and lines.line(number).rstrip().endswith("\\"):
        number += 1
    return lines.starts[number - 1] + len(lines.line(number).rstrip("\r\n"))


def _words(text: str, start: int, end: int) -> list[tuple[str, int, int]]:
    """Return the words of a command, with their offsets, up to an operator of the shell's."""
    found = []
    for match in re.finditer(r"(?:\"[^\"]*\"|'[^']*'|\$\([^)]*\)|\\[^\r\n]|[^\s\\])+", text[start:end]):
        if re.match(r"[|&;>]", match[0]):
            break
        word = match[0].rstrip(";")
        if word:
            found.append((word, start + match.start(), start + match.start() + len(word)))
        if word != match[0]:
            break
    return found


def _check_horovodrun(
    lines: Lines, number: int, start: int, end: int, word: Word | None, num_values: NumValues
) -> Iterator[LineFinding]:
    text, line = lines.text, lines.line(number)
    words = ("reigen", "run", "--as-horovod")
    quote = text[start - 1 : start]
    new = " ".join(words)
    if word is not None:
        new = word.replacement(*words)
        edit = Edit(word.start, word.end, new)
    elif quote and quote in "\"'" and text[end : end + 2] == f"{quote} ":
        edit = Edit(start - 1, end + 1, new)  # the shell's name of one command
    else:
        edit = Edit(start, end, new)
    subject = text[start:end]
    if _ASKS.search(line[: start - lines.starts[number - 1]]):
        message = "by hand: the command is `reigen run --as-horovod`, or `python -m reigen.compat install` makes one"
        yield LineFinding(number, "change", subject, message)
        return
    message = "`reigen run` has its options; --as-horovod lets scripts import Horovod's names"
    yield LineFinding(number, "change", subject, message, (edit,))
    if word is None:
        yield from _check_options(lines, number, end, num_values)


def _check_options(lines: Lines, number: int, start: int, num_values: NumValues) -> Iterator[LineFinding]:
    ignored = {
        option.flag.replace("[no-]", form)
        for option in HOROVODRUN_OPTIONS
        for form in ("", "no-")
        if not option.variable and option.name not in (*MPIRUN_OPTIONS, *ELASTIC_OPTIONS)
    }
    values = 0
    for word, begin, _ in _words(lines.text, start, _logical_end(lines, number)):
        if values:
            values -= 1
            continue
        if not word.startswith("-") or word == "--":
            return
        option, has_value, _ = word.partition("=")
        known = num_values(option)
        place = lines.number(begin)
        if known is None:
            yield LineFinding(place, "cannot", option, "`reigen run` has no such option: leave it out")
            return
        if option in ignored:
            yield LineFinding(place, "works", option, "accepted, and has no effect here")
        values = 0 if has_value else known


def _script_of(words: list[tuple[str, int, int]]) -> str | None:
    """Return the file name of the program of Python's that a command runs."""
    return next((PurePosixPath(word.strip("\"'[],")).name for word, _, _ in words if ".py" in word), None)


def _module_of(words: list[tuple[str, int, int]]) -> str | None:
    """Return the file name of the module that `torchrun -m PACKAGE.MODULE` runs."""
    texts = [word.strip("\"'[],") for word, _, _ in words]
    at = next((place for place, text in enumerate(texts) if text in {"-m", "--module"}), len(texts))
    name = next((text for text in texts[at + 1 :] if not text.startswith("-")), "")
    return f"{name.rpartition('.')[2]}.py" if re.fullmatch(r"[\w.]+", name) else None


def _check_mpirun(number: int, subject: str, script: str | None, scripts: ProjectScripts) -> Iterator[LineFinding]:
    if script in scripts.horovod:
        message = (
            "works as it is where imports are Reigen's; else with PYTHONPATH=$(python -m reigen.compat) before it, and "
            "for mpirun -x PYTHONPATH in it (docs/mpi.md)"
        )
        yield LineFinding(number, "works", subject, message)


_STARTS_CONVERTED = (
    "which program it starts is not seen; one that is converted it starts as well, for Reigen reads torchrun's "
    "variables, too: `reigen run -np N` takes its place when you like"
)


def _kept(script: str | None) -> str:
    return f"{script} is not converted: it goes on as it is, or by `reigen run --torchrun-env`"


def _check_torchrun(lines: Lines, number: int, start: int, end: int, scripts: ProjectScripts) -> Iterator[LineFinding]:
    words = _words(lines.text, end, _logical_end(lines, number))
    script = _script_of(words) or _module_of(words)
    subject = " ".join(lines.text[start:end].split())
    if script in scripts.torch_kept:
        yield LineFinding(number, "works", subject, _kept(script))
        return
    if script is None and scripts.torch and words and not words[0][0].startswith("]"):
        yield LineFinding(number, "works", subject, _STARTS_CONVERTED)
    if script not in scripts.torch:
        return
    parsed = _parse_torchrun(words)
    if isinstance(parsed, str):
        message = f"by hand: `reigen run -np N -H HOST:N,...` ({parsed})"
        yield LineFinding(number, "change", subject, message)
        return
    num_ranks, program, position = parsed
    needs = "--torchrun-env " if script in scripts.reads_torchrun_variables else ""
    new = f"reigen run {needs}-np {num_ranks} {program}"
    message = "one host, and the same number of processes; Reigen has to be installed there"
    yield LineFinding(number, "change", subject, message, (Edit(start, position, new),))


def _parse_torchrun(words: list[tuple[str, int, int]]) -> tuple[str, str, int] | str:
    """Return the number of processes, the begin of the command, and the offset behind options; or a problem."""
    options: dict[str, str] = {}
    position = 0
    while position < len(words) and words[position][0].startswith("-"):
        text, has_value, value = words[position][0].partition("=")
        name = text.lstrip("-").replace("-", "_")
        name = _SHORT.get(name, name)
        if name not in _TORCHRUN_OPTIONS:
            close = get_close_matches(name, _TORCHRUN_OPTIONS, 1)
            return f"option {text} is not known" + (f", is it --{close[0]}?" if close else "")
        if _TORCHRUN_OPTIONS[name] and not has_value:
            position += 1
            value = words[position][0] if position < len(words) else ""
        options[name] = value
        position += 1
    if position == len(words):
        return "there is no program"
    if options.get("nnodes", "1").strip("\"'") not in {"1", "1:1"}:
        return "several hosts: who they are is said by -H or --hostfile"
    number = options.get("nproc_per_node", "1")
    if number.strip("\"'") in {"gpu", "auto", "cpu"}:
        return f"--nproc_per_node={number}: -np is a number"
    program = "" if "no_python" in options else "python -m " if "module" in options else "python "
    return number, program, words[position][1]
