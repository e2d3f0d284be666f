"""Starting a job and keeping it: one process a rank, their output, their end."""
