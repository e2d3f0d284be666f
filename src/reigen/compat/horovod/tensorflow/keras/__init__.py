"""``reigen.tensorflow.keras`` under Horovod's name, with Horovod's inner modules."""

from reigen.tensorflow.keras import *

from . import callbacks as callbacks
from . import elastic as elastic
