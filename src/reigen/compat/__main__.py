"""``PYTHONPATH=$(python -m reigen.compat) mpirun ...``: prints the directory that makes ``import horovod`` work."""

import sys

from reigen.compat import DIRECTORY

sys.stdout.write(DIRECTORY + "\n")
