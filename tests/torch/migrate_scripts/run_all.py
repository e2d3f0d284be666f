"""Runs scripts one after the other in this rank: starting torch for each of them would take most of the time."""

import runpy
import sys

directory, *names = sys.argv[1:]
sys.path.insert(0, directory)
for name in names:
    sys.argv = [f"{directory}/{name}.py"]
    runpy.run_path(sys.argv[0], run_name="__main__")
