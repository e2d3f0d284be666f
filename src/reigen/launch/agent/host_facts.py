"""Facts about this host for `reigen check`."""

from __future__ import annotations

import subprocess
from importlib import metadata

from reigen.launch.agent.agent_protocol import HostFacts
from reigen.launch.local_plan import detect_cpus

_DISTRIBUTIONS = ("numpy", "torch", "mpi4py")
_NVIDIA_SECONDS = 10.0


def collect_host_facts() -> HostFacts:
    """Collect the number of processors, versions of libraries and GPUs."""
    return HostFacts(len(detect_cpus().cpus), _versions(), list_gpus())


def list_gpus() -> tuple[str, ...]:
    """List NVIDIA's GPUs, a line each, as its driver names them."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_NVIDIA_SECONDS, check=False
        )
    except OSError:  # no driver, no GPUs
        return ()
    except subprocess.TimeoutExpired:
        return (f"nvidia-smi does not answer within {_NVIDIA_SECONDS:g} s",)
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip()) if done.returncode == 0 else ()


def _versions() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
