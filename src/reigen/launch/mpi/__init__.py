"""Launching by an MPI's own mpirun."""
