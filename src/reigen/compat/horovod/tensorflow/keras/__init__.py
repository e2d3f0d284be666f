"""``reigen.tensorflow.keras`` under Horovod's name, with Horovod's inner modules."""

from reigen.tensorflow.keras import *

from . import callbacks as callbacks  # type: ignore[no-redef]
from . import elastic as elastic
