"""Names of ``horovod.tensorflow.keras.callbacks``."""

from reigen.tensorflow.keras.callbacks import *
