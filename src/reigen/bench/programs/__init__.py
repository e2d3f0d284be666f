"""Reigen's own side of the benchmarks, and what needs no peer: programs for `reigen.bench.rank`."""
