"""Environment of processes of tests."""

from __future__ import annotations

import os

_LAUNCHERS = (
    *("REIGEN_", "HOROVOD_", "OMPI_", "PMI_", "PMIX_", "PRTE_", "MPI_LOCAL", "SLURM_"),
    *("SM_", "PET_", "JSM_", "SKYPILOT_", "TORCHELASTIC_", "JAX_"),
)
_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)


def clean_environment() -> dict[str, str]:
    """Return this process's environment without a launcher's variables; one thread a process if unset."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS) and name not in _TORCHRUN
    }
    kept.setdefault("OMP_NUM_THREADS", "1")
    return kept
