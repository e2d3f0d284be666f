"""Timeline of all ranks of a job, and its analysis."""
