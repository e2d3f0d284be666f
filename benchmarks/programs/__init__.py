"""Reigen's own side of the benchmarks, and what needs no peer: programs for `benchmarks.harness.rank`."""
