"""Fuzzing for as long as one likes, led by what code is reached: ``python -m tests.fuzz.explore TARGET [OPTION ...]``.

The options are libFuzzer's. Needs atheris. Without ``-max_total_time=SECONDS`` it goes on until it finds something.
"""

import sys

import atheris

with atheris.instrument_imports(include=["reigen"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in TARGETS:
        raise SystemExit(f"expected one of: {' '.join(TARGETS)}")
    atheris.Setup(sys.argv, TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
