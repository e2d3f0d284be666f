"""``reigen.keras.elastic`` under Horovod's name."""

from reigen.keras.elastic import *
