"""Ending everything below a process."""

from __future__ import annotations

import subprocess
import sys

#: A child with a child in a session of its own; the first look at /proc finds neither, as if parents had just ended.
PROGRAM = """
import subprocess
from reigen.launch.supervision import process_tree
process_tree.become_subreaper()
child = subprocess.Popen(["sh", "-c", "setsid sleep 300 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
orphan = int(child.stdout.readline())
looks, look = [], process_tree._list_processes
def list_processes():
    looks.append(None)
    return look() if len(looks) > 2 else iter(())
process_tree._list_processes = list_processes
print(process_tree.kill_all_below(20.0), process_tree.reap_orphans(set()))
try:
    import os
    os.kill(orphan, 0)
except ProcessLookupError:
    print("gone")
"""


def test_what_a_look_at_the_processes_misses_is_killed_all_the_same() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "2 False\ngone\n"
