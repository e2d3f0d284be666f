"""``reigen.tensorflow.keras.elastic`` under Horovod's name."""

from reigen.tensorflow.keras.elastic import *
