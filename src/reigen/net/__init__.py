"""Bytes between two processes: frames, authentication, and shared memory."""
