"""Membership of a job with parameter servers: the scheduler, and its clients on workers and servers."""
