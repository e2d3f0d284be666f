"""Reducer: buckets of gradients, reduced as backward fills them."""
