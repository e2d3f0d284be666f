"""Who takes part: how this process was started, its place in the job, where the others are."""
