"""Gradients of an optimizer: buckets, their order, sharding, checks of replicas."""
