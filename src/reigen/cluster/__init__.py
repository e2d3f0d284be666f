"""Cluster of a job: how this process was started, its place in the job, where the others are."""
