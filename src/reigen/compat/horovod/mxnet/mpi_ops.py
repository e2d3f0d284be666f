"""The collectives, and this process's place in the job."""

from reigen.mxnet import *
