"""Names of ``horovod.keras.callbacks``."""

from reigen.keras.callbacks import *
