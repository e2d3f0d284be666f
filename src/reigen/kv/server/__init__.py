"""Server's side of the parameter server: shards, requests, consistency, snapshots."""
