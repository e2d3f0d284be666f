"""Runs programs of the documentation: ``python -m tests.docs.run_programs GROUP [NAME]``, in each of a job's processes.

A group's programs share their processes, for frameworks take seconds to import; between two of them the job ends.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import reigen
from tests.docs.blocks import Block, blocks_of
from tests.docs.programs import PROGRAMS, Program


def run_program(program: Program, group: str) -> dict[str, Any]:
    """Run a program's blocks; returns its names."""
    names = importlib.import_module(f"tests.docs.names_{group}")
    module = sys.modules[f"documentation_{program.name}"] = types.ModuleType("__main__")
    given = getattr(names, f"given_{program.name}", dict)()
    vars(module).update(given)
    found = list(blocks_of(program.page, "python", "py"))
    for number in program.blocks:
        run_block(found[number], program, vars(module))
    if (check := getattr(names, f"check_{program.name}", None)) is not None:
        check(vars(module))
    return vars(module)


def run_block(block: Block, program: Program, names: dict[str, Any]) -> None:
    """Run a block; lines of tracebacks are those of its page."""
    text = block.text
    for written, used in program.replaced.items():
        text = text.replace(written, used)
    exec(compile("\n" * (block.line - 1) + text, block.page, "exec"), names)  # noqa: S102


def main(group: str, *only: str) -> None:
    for program in PROGRAMS[group]:
        if not only or program.name in only:
            run_program(program, group)
            reigen.shutdown()
            print(f"ran {program.name}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
