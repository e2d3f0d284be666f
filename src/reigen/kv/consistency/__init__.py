"""When pushes to a shard are applied, and when it may be pulled: synchronous, stale (SSP), asynchronous."""
