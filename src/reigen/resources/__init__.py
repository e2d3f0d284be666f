"""Resources of this process: memory, limits, the OOM killer, standard streams."""
