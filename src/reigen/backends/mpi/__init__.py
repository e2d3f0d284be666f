"""Backend over MPI, through mpi4py."""
