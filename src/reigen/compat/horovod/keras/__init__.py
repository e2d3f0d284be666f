"""``reigen.keras`` under Horovod's name, with Horovod's inner modules."""

from reigen.compat import keras2_calls as _keras2_calls  # noqa: F401  Keras 3 takes calls of Keras 2 from here on
from reigen.keras import *

from . import callbacks as callbacks  # type: ignore[no-redef]
from . import elastic as elastic  # type: ignore[no-redef]
