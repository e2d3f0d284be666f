"""``reigen.tensorflow.keras`` under Horovod's name, with Horovod's inner modules."""

from reigen.compat.keras2_calls import accept_keras2_calls as _accept_keras2_calls
from reigen.tensorflow.keras import *

from . import callbacks as callbacks  # type: ignore[no-redef]
from . import elastic as elastic

_accept_keras2_calls()
