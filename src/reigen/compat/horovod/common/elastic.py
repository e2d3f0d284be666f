"""``reigen.elastic`` under Horovod's name."""

from reigen.elastic import *
