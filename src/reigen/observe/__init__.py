"""Watching a job: the timeline of all ranks, and what can be learned from it."""
