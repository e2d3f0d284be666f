"""Which samples a worker uses, and how a batch is cut. Knows no framework: positions, and whatever has a shape."""

from reigen.data.partition import Remainder, share, share_length
from reigen.data.sampler import ShuffleSplitSampler, SplitSampler
from reigen.data.slices import split_and_load, split_data

__all__ = ["Remainder", "ShuffleSplitSampler", "SplitSampler", "share", "share_length", "split_and_load", "split_data"]
