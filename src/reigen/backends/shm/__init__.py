"""Backend of the ranks of one host: shared memory."""
