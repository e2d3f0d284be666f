"""``reigen.tensorflow.elastic`` under Horovod's name."""

from reigen.tensorflow import elastic as _reigen
from reigen.tensorflow.elastic import *

__getattr__ = _reigen.__getattr__
