"""Elastic members as real processes: the state machines of `views` with threads, connections, timers and memory."""
