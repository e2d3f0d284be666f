"""Command line of srun as a remote shell in an allocation. Decides, starts nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from reigen.launch.slurm.allocation import SlurmAllocation

#: Variables of Slurm's that srun needs to find the job; all others of the family are options to it, or foreign.
_NEEDED = frozenset(
    [
        "SLURM_JOB_ID",
        "SLURM_JOBID",
        "SLURM_CONF",
        "SLURM_CONF_SERVER",
        "SLURM_CLUSTERS",
        "SLURM_WORKING_CLUSTER",
        "SLURM_HET_SIZE",
        "SLURM_JWT",
    ]
)
_FAMILIES = ("SLURM_", "SBATCH_", "SALLOC_", "SLURMD_", "PMI_", "PMIX_")

#: Each word has a site, or a setting of the user's, without which it would not be needed:
#: --overlap            steps do not share processors: a second one, or an srun of the user's, would wait for ever.
#:                      No -c: it would leave one task's processors to the agent, and without it the step has all.
#: --no-kill            a node that fails would end the step; the job, too, unless it was submitted with --no-kill.
#: --kill-on-bad-exit,  sites set KillOnBadExit and WaitTime.
#: --wait
#: --mpi=none           an agent is no process of MPI, whatever MpiDefault says.
#: --cpu-bind=none      an agent would be bound to one processor, and its ranks with it.
#: --mem=0              all of the job's memory of the node.
#: --chdir=/            a directory that is everywhere; the agent goes into the job's by itself, or says that it is not.
_OPTIONS = (
    *("--overlap", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none", "--cpu-bind=none", "--mem=0"),
    *("--chdir=/",),
)


def foreign_variables(environ: Iterable[str]) -> list[str]:
    """Select the variables that bend srun, and that ranks must not take for theirs, from the names of ``environ``."""
    return sorted(name for name in environ if name.startswith(_FAMILIES) and name not in _NEEDED)


def srun_command(allocation: SlurmAllocation, environ: Mapping[str, str], host: str = "") -> list[str]:
    """Return the beginning of a command whose rest srun runs on ``host``; empty: the host's name is to follow."""
    unset = [word for name in foreign_variables(environ) for word in ("-u", name)]
    group = allocation.groups.get(host)
    options = [*_OPTIONS, "-N1", "-n1", *([] if group is None else [f"--het-group={group}"])]
    return ["env", *unset, "srun", *options, "-w", *([host] if host else [])]


def step_command(environ: Mapping[str, str], hosts: Sequence[str], group: int | None) -> list[str]:
    """Return the beginning of a command whose rest one srun runs once on each of ``hosts``.

    Its stdin goes to all of them, and each line that they print begins with the number of its host in the list, which
    must be in the order of the allocation.
    """
    unset = [word for name in foreign_variables(environ) for word in ("-u", name)]
    number = str(len(hosts))
    options = ["-N", number, "-n", number, "--ntasks-per-node=1", "--input=all", "--label"]
    options += [] if group is None else [f"--het-group={group}"]
    return ["env", *unset, "srun", *_OPTIONS, *options, "-w", ",".join(hosts)]


def remote_shell(allocation: SlurmAllocation, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the beginning of a command that takes a host and words for a shell there, as ssh does, for rsync.

    Empty in a heterogeneous job, whose nodes need different options.
    """
    if allocation.groups:
        return ()
    # unbuffered: else srun waits for the end of a line, which rsync does not know; the words have no blanks and quotes
    words = " ".join(srun_command(allocation, environ)).replace(" -w", " --unbuffered -w")
    return "sh", "-c", f'host=$1; shift; exec {words} "$host" sh -c "$*"', "sh"


def rank_variables(rank: int, place: tuple[int, int], counts: list[int]) -> dict[str, str | None]:
    """Return Slurm's variables of a rank, as if one step had started all of them; None: it has no such variable.

    An agent is the only task of its step, so its own say 0 of 1 on every host.

    Args:
        rank: its number.
        place: the number of its host, and its number there.
        counts: ranks of each host.
    """
    node, local_rank = place
    size = str(sum(counts))
    return dict.fromkeys(STEP_VARIABLES) | {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(node),
        "SLURM_NTASKS": size,
        "SLURM_NPROCS": size,
        "SLURM_NNODES": str(len(counts)),
        "SLURM_TASKS_PER_NODE": ",".join(map(str, counts)),
    }


#: Those of an agent's step, and of a task, which are not the rank's.
STEP_VARIABLES = (
    *("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_LAUNCHER_PORT", "SLURM_GTIDS", "SLURM_TASK_PID"),
    *("SLURM_SRUN_COMM_HOST", "SLURM_SRUN_COMM_PORT", "SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST"),
    *("SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_VERBOSE"),
)
