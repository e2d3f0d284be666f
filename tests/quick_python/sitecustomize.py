"""For processes of tests that import a framework: looking for garbage is a third of the time to start and to end one.

In PYTHONPATH. What a program does in between, and the order in which it ends, stay as they are.
"""

import atexit
import gc

gc.set_threshold(100_000)
atexit.register(gc.freeze)  # the last of all functions that are registered so
