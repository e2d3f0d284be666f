"""``PYTHONPATH=$(python -m reigen.compat) mpirun ...``: prints the directory that makes ``import horovod`` work.

``python -m reigen.compat mxnet`` prints the one that gives MXNet Reigen's stores.
"""

import sys

from reigen.compat import DIRECTORY, MXNET_DIRECTORY

if sys.argv[1:] not in ([], ["horovod"], ["mxnet"]):
    sys.exit("usage: python -m reigen.compat [horovod | mxnet]")
sys.stdout.write((MXNET_DIRECTORY if sys.argv[1:] == ["mxnet"] else DIRECTORY) + "\n")
