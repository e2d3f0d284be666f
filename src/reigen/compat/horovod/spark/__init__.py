"""``reigen.spark`` under Horovod's name."""

from reigen.spark import *
