"""Consistency of a shard, for pushes and pulls: synchronous, stale (SSP), asynchronous."""
