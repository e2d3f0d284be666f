"""Launching in an allocation of Slurm's."""
