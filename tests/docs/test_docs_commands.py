"""Every shell command of the documentation is one that its program would take; nothing is run."""

from __future__ import annotations

import re

import pytest

from tests.docs.blocks import FENCE, Block, blocks, blocks_of, written_pages
from tests.docs.commands import command_lines, faults, make_targets, parse, unknown_variables

#: A command in the text of a page, and what it need not have there.
IN_TEXT = re.compile(r"`((?:\w+=\S+ )*(?:reigen|horovodrun|make|mpirun|srun|pip|python[\d.]* -m) [^`\n]+)`")
LEFT_OUT = ("arguments are required", "expected one argument", ": no command", "'N'", "'M'")
NO_COMMANDS = {
    "reigen run: host n2 was sent SIGTERM by Slurm: the job's time is over",  # a message
    "make .venv-frameworks/.stamp",  # a file that the Makefile makes
}
#: Stand for the name of a new knob in CONTRIBUTING.md.
PLACEHOLDERS = {"REIGEN_NAME", "HOROVOD_NAME"}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("reigen run -np 2 --bind cores python a.py --no-such", []),
        (
            "X=1 exec reigen run -np two python a.py",
            ["reigen run: error: argument -np/--num-proc: invalid int value: 'two'"],
        ),
        ("reigen run -np 2", ["reigen run -np 2: no command"]),
        ("horovodrun -np 2 -H h1:1,h2:1 python a.py && make demos", ["no such target: demos"]),
        ("horovodrun --no-such python a.py", ["--no-such"]),
        ("srun -n 2 V/bin/reigen chek | tee x", ["no such command: reigen chek", "no such program: tee"]),
        ("mpirun -np 2 python -m reigen migrate --aply .", ["reigen migrate: error: unrecognized arguments: --aply"]),
        ("reigen bench allreduce [--np 2] [--size 1KiB]", ["--size"]),
        ("reigen run -np 2 python examples/torch/no.py", ["no such file: examples/torch/no.py"]),
        ("PYTHONPATH=$(python -m reigen.compat) python -m reigen.no", ["no such module: reigen.no"]),
        ("pip install '.[torch,tsl]' && echo 'x", ["No closing quotation"]),
        ("pip install '.[torch,tsl]'", ["no such extra: tsl"]),
    ],
)
def test_faults_are_found(line: str, found: list[str]) -> None:
    shown = list(faults(line))
    assert len(shown) == len(found)
    assert all(expected in each for expected, each in zip(found, shown, strict=True)), shown


def test_what_is_parsed_is_what_the_command_would_have() -> None:
    chosen = parse("run", ["-np", "2", "--dashboard", "python", "a.py", "-np", "3"])
    assert (chosen.num_ranks, chosen.dashboard, chosen.command) == (2, "", ["python", "a.py", "-np", "3"])
    assert parse("bench", ["allreduce", "--np", "3"]).np == 3


def test_lines_of_a_block() -> None:
    text = "reigen run \\\n    -np 2 a   # two\n# nothing\n\nmake demo#1\n"
    assert list(command_lines(Block("a.md", "bash", text, 0, 1))) == ["reigen run  -np 2 a", "make demo#1"]
    assert list(command_lines(Block("a.md", "console", "$ make demo\nout\n", 0, 1))) == ["make demo"]


def test_every_command_is_taken_by_its_program() -> None:
    failed = {}
    for block in blocks("bash", "sh", "console", "text"):
        found = [fault for line in command_lines(block) for fault in faults(line)]
        assert not (block.not_run and not found), f"{block} can be parsed"
        if found and block.not_run is None:
            failed[str(block)] = found
    assert failed == {}
    assert sum(1 for block in blocks("bash", "console") for _ in command_lines(block)) > 90


def test_every_command_in_a_text_is_taken_by_its_program() -> None:
    """As far as it goes: of most of them only the options in question are named."""
    failed, number = {}, 0
    for page, text in written_pages().items():
        for command in IN_TEXT.findall(FENCE.sub("", text)) if page != "CHANGELOG.md" else ():
            number += 1
            found = [fault for fault in faults(command) if not any(words in fault for words in LEFT_OUT)]
            if found and command not in NO_COMMANDS:
                failed[f"{page}: {command}"] = found
    assert failed == {}
    assert number > 250


def test_contributing_has_every_target_of_the_makefile() -> None:
    lines = [line for block in blocks_of("CONTRIBUTING.md", "bash") for line in command_lines(block)]
    assert {line.split()[1] for line in lines if line.startswith("make ")} == make_targets()


def test_every_block_says_what_it_is() -> None:
    assert [str(block) for block in blocks("")] == []


def test_variables_are_those_that_the_code_knows() -> None:
    assert unknown_variables("REIGEN_KV_* `HOROVOD_TIMELINE` REIGEN_DEADLIN=3 X_REIGEN_Y") == [
        "REIGEN_DEADLIN (did you mean REIGEN_DEADLINE?)"
    ]
    pages = {page: text for page, text in written_pages().items() if page != "CHANGELOG.md"}
    unknown = {page: [*{*unknown_variables(text)} - PLACEHOLDERS] for page, text in pages.items()}
    assert {page: found for page, found in unknown.items() if found} == {}
