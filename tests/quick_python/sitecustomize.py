"""For processes of tests that import a framework: looking for garbage is a third of the time to start and to end one.

In PYTHONPATH. Not for tests of how a process ends: what is in cycles then is not finalized.
"""

import atexit
import gc

gc.set_threshold(100_000)
atexit.register(gc.freeze)  # the last of all functions that are registered so
