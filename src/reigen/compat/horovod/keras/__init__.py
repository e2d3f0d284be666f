"""``reigen.keras`` under Horovod's name, with Horovod's inner modules."""

from reigen.compat import keras2_calls as _keras2_calls  # noqa: F401  Keras 3 takes calls of Keras 2 from here on
from reigen.keras import *

from .callbacks import BroadcastGlobalVariablesCallback as _InCallbacks  # noqa: F401  imports the module of here
from .elastic import run as _in_elastic  # noqa: F401  imports the module of here, instead of Reigen's
