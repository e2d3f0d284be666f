"""Partitions of a data set among workers, and slices of batches. Without a framework: any object with a shape."""

from reigen.data.partition import Remainder, ShuffleSplitSampler, SplitSampler, share, share_length
from reigen.data.slices import split_and_load, split_data

__all__ = ["Remainder", "ShuffleSplitSampler", "SplitSampler", "share", "share_length", "split_and_load", "split_data"]
