"""Sizes of an application's containers, their placement, and its files. Pure, but for looking at files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

from reigen.errors import ConfigError
from reigen.launch.job_options import parse_memory
from reigen.launch.submission import SubmissionOptions

_DEFAULT_MB, _DEFAULT_CORES = 1024, 1
#: The master: Python, and a Java process of at most 256 MB of heap.
MASTER_MB = 1024
_ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".jar")
#: Names that the application's own files have in a container.
RESERVED_NAMES = frozenset({"reigen-job.json", "reigen-hadoop.xml", "reigen-dial"})


@dataclass(frozen=True, slots=True)
class ContainerSize:
    """Memory in MB, and processors, of a container."""

    memory_mb: int
    cores: int

    def __str__(self) -> str:
        """Describe it."""
        return f"{self.memory_mb} MB and {self.cores} core{'s' if self.cores > 1 else ''}"

    def times(self, number: int) -> ContainerSize:
        """Return the size of a container for so many processes."""
        return ContainerSize(self.memory_mb * number, self.cores * number)

    def exceeds(self, maximum: ContainerSize) -> bool:
        """Return whether no container of YARN's can be so large."""
        return self.memory_mb > maximum.memory_mb or self.cores > maximum.cores


@dataclass(frozen=True, slots=True)
class SentFile:
    """File that a container gets: where it is, the name that it has there, and whether it is unpacked."""

    source: str
    name: str
    is_archive: bool = False

    @property
    def is_remote(self) -> bool:
        """Return whether it is in a filesystem of the cluster's already."""
        return "://" in self.source


def container_sizes(options: SubmissionOptions) -> tuple[ContainerSize, ContainerSize]:
    """Return the sizes of a worker and of a server; raises ConfigError."""
    return tuple(  # type: ignore[return-value]
        _size(role, memory, cores)
        for role, memory, cores in (
            ("worker", options.worker_memory, options.worker_cores),
            ("server", options.server_memory, options.server_cores),
        )
    )


def _size(role: str, memory: str | None, cores: int | None) -> ContainerSize:
    if cores is not None and cores < 1:
        raise ConfigError(f"--{role}-cores {cores}: at least 1")
    megabytes = _DEFAULT_MB if memory is None else parse_memory(f"--{role}-memory", memory) >> 20
    return ContainerSize(megabytes, cores or _DEFAULT_CORES)


def find_files(options: SubmissionOptions, command: Sequence[str], directory: Path) -> tuple[SentFile, ...]:
    """Find the files to send: archives, files, and those of the working directory that the command names.

    ``FILE#NAME`` gives one another name in the container.

    Raises:
        ConfigError: one does not exist, cannot be unpacked, or two have one name.
    """
    found = [_sent("--archives", spec, directory, is_archive=True) for spec in _split(options.archives)]
    found += [_sent("--files", spec, directory) for spec in _split(options.files)]
    if options.auto_file_cache:
        names = {each.name for each in found}
        for word in command:
            if not word.startswith("-") and not Path(word).is_absolute() and _is_file(directory / word):
                name = str(Path(word))
                if ".." in Path(word).parts:
                    raise ConfigError(
                        f"{word}: it is outside of this directory, and a container has no such place: say --files "
                        f"{word}, and {Path(word).name} in the command; or --no-auto-file-cache, if all nodes have it"
                    )
                if name not in names:
                    names.add(name)
                    found.append(SentFile(str(directory / word), name))
    seen: set[str] = set()
    for each in found:
        if ".." in Path(each.name).parts:
            raise ConfigError(f"{each.source}: {each.name} is no name in a container: FILE#NAME")
        if each.name in seen or each.name in RESERVED_NAMES:
            raise ConfigError(f"{each.source}: a container has something else under the name {each.name}: FILE#NAME")
        seen.add(each.name)
    return tuple(found)


def _is_file(path: Path) -> bool:
    """Return whether there is such a file; a word of a command may be too long for a name."""
    try:
        return path.is_file()
    except OSError:
        return False


def _split(specs: Sequence[str]) -> list[str]:
    """Split what may also be a list with commas, as MXNet's launch.py has it."""
    return [spec for each in specs for spec in each.split(",") if spec]


def _sent(option: str, spec: str, directory: Path, *, is_archive: bool = False) -> SentFile:
    source, _, name = spec.partition("#")
    if "://" not in source:
        path = directory / source
        if not _is_file(path):
            raise ConfigError(f"{option} {source}: there is no such file")
        source = str(path)
    name = name or Path(urlparse(source).path).name
    if is_archive and not source.lower().endswith(_ARCHIVES):
        raise ConfigError(f"{option} {source}: YARN unpacks {', '.join(_ARCHIVES)}")
    return SentFile(source, name, is_archive)


@dataclass(frozen=True, slots=True)
class NodeSpace:
    """Free memory in MB and processors of a node of the cluster."""

    host: str
    memory_mb: int
    cores: int


def plan_by_host(
    num: int, size: ContainerSize, nodes: Sequence[NodeSpace], maximum: ContainerSize
) -> tuple[list[tuple[str, int]], str]:
    """Decide how many processes go into one container on each node, the largest nodes first.

    On each of them space is left for the master, which YARN puts where it likes.

    Returns:
        Hosts and numbers; and, where that is not possible now, why (the list is empty then).
    """
    capacities = sorted((-_capacity(node, size, maximum), node.host) for node in nodes)
    chosen, left = [], num
    for negative, host in capacities:
        if left and negative:
            chosen.append((host, min(-negative, left)))
            left -= chosen[-1][1]
    if left:
        total = -sum(negative for negative, _ in capacities)
        return [], f"the {len(nodes)} nodes have space for {total} processes of {size} now; {num} are wanted"
    return chosen, ""


def _capacity(node: NodeSpace, size: ContainerSize, maximum: ContainerSize) -> int:
    memory, cores = min(node.memory_mb - MASTER_MB, maximum.memory_mb), min(node.cores - 1, maximum.cores)
    return max(0, min(memory // size.memory_mb, cores // size.cores))


def check_size(what: str, options: str, size: ContainerSize, maximum: ContainerSize) -> None:
    """Raise ConfigError where the ResourceManager would not give so large a container."""
    if size.exceeds(maximum):
        raise ConfigError(
            f"{what} needs {size}; the ResourceManager gives a container {maximum.memory_mb} MB "
            f"(yarn.scheduler.maximum-allocation-mb) and {maximum.cores} cores "
            f"(yarn.scheduler.maximum-allocation-vcores) at most: ask for less, with {options}"
        )
