"""Options of an elastic job, and what follows from those that the user gave. Decides, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reigen.cluster.membership.stragglers import DEFAULT_STRAGGLER_RULE, StragglerRule
from reigen.errors import ConfigError
from reigen.launch.hosts import HostInfo

#: What a process's failure keeps from being used for a while: its own place, or its whole host, as Horovod does.
BLACKLISTS = ("seat", "host")
#: What follows from the loss of the launcher: `--on-launcher-loss`.
LAUNCHER_LOSS_CHOICES = ("stop", "continue")
#: Limits of `--blacklist-cooldown-range`, in seconds.
_MOST_COOLDOWN_SECONDS = 3600.0
_REST_SECONDS = 10.0
#: A view has no more members.
MOST_RANKS = 1024


@dataclass(frozen=True, slots=True)
class Cooldown:
    """Rule for rests of places, or of hosts, after failures.

    Attributes:
        least_seconds, most_seconds: of one rest, which doubles with each failure.
        first_doublings: how often the first rest is doubled already.
        max_failures: so many failures within ``window_seconds`` and it is not used any more; None: it always returns.
        window_seconds: older failures are forgotten.
    """

    least_seconds: float = _REST_SECONDS
    most_seconds: float = _MOST_COOLDOWN_SECONDS
    first_doublings: int = 0
    max_failures: int | None = 3
    window_seconds: float = 600.0

    def rest_seconds(self, num_failures: int, chance: float) -> float | None:
        """Return how long to rest after the ``num_failures``-th failure; None: for ever.

        ``chance``: a random number from 0 to 1, by which rests of places that failed together differ.
        """
        if self.max_failures is not None and num_failures >= self.max_failures:
            return None
        doublings = min(num_failures - 1 + self.first_doublings, 20)
        return min(self.least_seconds * (1 << doublings) + chance * self.least_seconds, self.most_seconds)


#: A host that failed never returns: Horovod's rule, where no range of rests is given.
NEVER = Cooldown(max_failures=1)


@dataclass(frozen=True, slots=True)
class ElasticOptions:
    """Options of an elastic job.

    Attributes:
        min_ranks: no step is run with fewer processes.
        max_ranks: no more run at a time.
        timeout_seconds: how long there may be fewer than ``min_ranks``.
        start_timeout_seconds: the same in the beginning.
        reset_limit: how many changes of members the job survives; None: any number.
        counts_resizes: planned changes count as well as failures.
        accepts_early_end: the job is done if all processes end with exit code 0, also before its program says so.
        resize_limit: how many planned changes of members the job survives; None: any number.
        spares: how many more processes are started, which wait to take the places of those that die.
        has_warm_spares: they are members meanwhile, without samples, so that they have the state.
        cooldown: rests of what has failed.
        blacklist: one of `BLACKLISTS`.
        discovery: the program that lists the hosts; None: they are fixed.
        slots_per_host: of hosts that it lists without a number.
        is_polled: the job's engine says which hosts there are.
        witness: ``launcher``, ``dir:PATH`` of a directory that all hosts share, or empty: votes where the number of
            hosts is even.
        stragglers: which members are said to make all steps slower.
        ejects_stragglers: they are replaced, too, where others can take their places or there are enough.
    """

    min_ranks: int
    max_ranks: int = MOST_RANKS
    timeout_seconds: float = 600.0
    start_timeout_seconds: float = 600.0
    reset_limit: int | None = None
    counts_resizes: bool = False
    accepts_early_end: bool = False
    resize_limit: int | None = None
    spares: int = 0
    has_warm_spares: bool = False
    cooldown: Cooldown = Cooldown()
    blacklist: str = BLACKLISTS[0]
    discovery: str | None = None
    slots_per_host: int = 1
    is_polled: bool = False
    witness: str = ""
    stragglers: StragglerRule = DEFAULT_STRAGGLER_RULE
    ejects_stragglers: bool = False

    @property
    def has_fixed_hosts(self) -> bool:
        """Return whether no host can come that there was not in the beginning."""
        return self.discovery is None and not self.is_polled

    @property
    def max_members(self) -> int:
        """Greatest number of members of a view."""
        return self.max_processes if self.has_warm_spares else self.max_ranks

    @property
    def max_processes(self) -> int:
        """Greatest number of processes at a time, spares among them."""
        return self.max_ranks + self.spares


@dataclass(frozen=True, slots=True)
class ElasticRequest:
    """Options of an elastic job as the user gave them, None where not; ``names`` are those of options, for messages.

    ``spares``: a number, or as `parse_spares` takes it.
    """

    num_ranks: int | None = None
    min_ranks: int | None = None
    max_ranks: int | None = None
    discovery: str | None = None
    slots_per_host: int | None = None
    timeout_seconds: float | None = None
    start_timeout_seconds: float | None = None
    reset_limit: int | None = None
    resize_limit: int | None = None
    spares: int | str | None = None
    witness: str = ""
    eject_stragglers: str | None = None
    cooldown_range: Sequence[float] | None = None
    blacklist: str | None = None
    as_horovod: bool = False
    names: tuple[str, str, str, str] = ("-np", "--min-np", "--max-np", "--blacklist-cooldown-range")
    straggler_name: str = "--eject-stragglers"
    spares_name: str = "--spares"

    @property
    def is_elastic(self) -> bool:
        """Return whether an elastic job was asked for: by a bound, or by a program that lists the hosts."""
        has_bounds = self.min_ranks is not None or self.max_ranks not in {None, self.num_ranks}
        return has_bounds or self.discovery is not None

    @property
    def num_places(self) -> int:
        """Number of slots of this host where the user names none: one for each process, spares among them.

        Of a job that is not elastic: of its processes alone. 0: the user has not said how many they are.
        """
        num = self.num_ranks or self.max_ranks or self.min_ranks or 0
        return num + (_spares(self)[0] if self.is_elastic else 0)


def resolve_elastic(request: ElasticRequest) -> ElasticOptions | None:
    """Return the options of an elastic job; None: none was asked for.

    Raises:
        ConfigError: they contradict each other, or make no sense.
    """
    if not request.is_elastic:
        return None
    np_name, min_name, max_name, range_name = request.names
    given = (np_name, request.num_ranks), (min_name, request.min_ranks), (max_name, request.max_ranks)
    for name, value in given:
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    least = request.min_ranks or request.num_ranks
    if least is None:
        raise ConfigError(f"an elastic job needs {min_name}: with how many processes may it run at least?")
    most = request.max_ranks or request.num_ranks or MOST_RANKS
    for (low_name, low), (high_name, high) in ((given[1], given[0]), (given[0], given[2]), (given[1], given[2])):
        if low is not None and high is not None and low > high:
            raise ConfigError(f"{low_name} {low} is more than {high_name} {high}")
    if request.slots_per_host is not None and request.slots_per_host < 1:
        raise ConfigError(f"slots per host must be at least 1, not {request.slots_per_host}")
    for name, value in ("reset limit", request.reset_limit), ("resize limit", request.resize_limit):
        if value is not None and value < 0:
            raise ConfigError(f"the {name} must be at least 0, not {value}")
    num_spares, has_warm_spares = _spares(request)
    blacklist = request.blacklist or BLACKLISTS[int(request.as_horovod)]
    if blacklist not in BLACKLISTS:
        raise ConfigError(f"--blacklist {blacklist}: there is {' and '.join(BLACKLISTS)}")
    timeout = _seconds("elastic timeout", request.timeout_seconds, 600.0)
    return ElasticOptions(
        least,
        most,
        timeout,
        _seconds("start timeout", request.start_timeout_seconds, timeout),
        request.reset_limit,
        counts_resizes=request.as_horovod,
        accepts_early_end=request.as_horovod,
        resize_limit=request.resize_limit,
        spares=num_spares,
        has_warm_spares=has_warm_spares,
        witness=request.witness,
        cooldown=_cooldown(request.cooldown_range, range_name, blacklist),
        blacklist=blacklist,
        discovery=request.discovery,
        slots_per_host=request.slots_per_host or 1,
        stragglers=_straggler_rule(request),
        ejects_stragglers=request.eject_stragglers is not None,
    )


def parse_spares(text: int | str, option: str) -> tuple[int, bool]:
    """Parse ``N``, or ``N:warm``; returns the number of spares, and whether they are members that hold the state.

    Args:
        text: to parse; or the number itself.
        option: its name, for the message.

    Raises:
        ConfigError: it is something else; says what to write.
    """
    number, has_kind, kind = str(text).partition(":")
    if isinstance(text, bool) or not number.strip().removeprefix("-").isdecimal() or (has_kind and kind != "warm"):
        raise ConfigError(
            f"{option} {text}: it must be a whole number, as in 1, or one with :warm behind it, as in 1:warm"
        )
    if int(number) < 0:
        raise ConfigError(f"the number of spares must be at least 0, not {number.strip()}")
    return int(number), bool(has_kind) and int(number) > 0


def _spares(request: ElasticRequest) -> tuple[int, bool]:
    """Return the number of spares, and whether they are warm."""
    if request.spares is None:
        return 0, False
    num, are_warm = parse_spares(request.spares, request.spares_name)
    if not are_warm:
        return num, False
    option = f"{request.spares_name} {request.spares}"
    np_name, _, max_name, _ = request.names
    most = request.max_ranks or request.num_ranks
    if request.as_horovod:
        raise ConfigError(
            f"{option}: a warm spare makes the steps of a reigen.torch.elastic.Job, and Horovod's scripts have none; "
            f"{request.spares_name} {num} starts spares that get the state when they take a place"
        )
    if most is None:
        raise ConfigError(f"{option}: which processes are spares depends on {np_name} or {max_name}: give one of them")
    if most + num > MOST_RANKS:
        raise ConfigError(f"{option}: with {most} others a view would have more than {MOST_RANKS} members")
    return num, True


def _straggler_rule(request: ElasticRequest) -> StragglerRule:
    if request.eject_stragglers is None:
        return DEFAULT_STRAGGLER_RULE
    return StragglerRule.parse(request.eject_stragglers, request.straggler_name)


def _seconds(what: str, value: float | None, default: float) -> float:
    if value is not None and not 0 < value < 1e9:
        raise ConfigError(f"the {what} must be a number of seconds greater than 0, not {value:g}")
    return default if value is None else value


def _cooldown(chosen: Sequence[float] | None, name: str, blacklist: str) -> Cooldown:
    """Make the rule of rests; a range that is given replaces the limit of failures, too."""
    if chosen is None:
        return NEVER if blacklist == "host" else Cooldown()
    if len(chosen) != 2 or not 1 <= chosen[0] <= chosen[1] <= _MOST_COOLDOWN_SECONDS:
        shown = " ".join(f"{value:g}" for value in chosen)
        raise ConfigError(f"{name} {shown}: it must be two numbers of seconds, 1 <= MIN <= MAX <= 3600")
    is_host = blacklist == "host"
    return Cooldown(float(chosen[0]), float(chosen[1]), first_doublings=int(is_host), max_failures=None)


def check_elastic_hosts(options: ElasticOptions, hosts: Sequence[HostInfo], *, as_horovod: bool) -> None:
    """Check that a job can do without a host.

    Args:
        options: of the job.
        hosts: that the user has named; empty where they are found otherwise.
        as_horovod: it is horovodrun's.

    Raises:
        ConfigError: a failure of one process would end the job, as horovodrun says, too; or there are too few places.
    """
    if options.discovery is not None or not hosts:
        return
    if as_horovod and options.blacklist == "host" and len({host.name for host in hosts}) < 2:
        raise ConfigError(
            "Cannot run in fault tolerance mode with fewer than 2 hosts. (A failure takes its whole host out of the "
            "job: --blacklist seat takes only the place of one process.)"
        )
    if (num_slots := sum(host.slots for host in hosts)) < options.min_ranks:
        raise ConfigError(f"the hosts have {num_slots} slots, and {options.min_ranks} processes are needed at least")


def parse_count(option: str, text: object) -> int | None:
    """Parse a whole number; None stays None. Raises ConfigError."""
    if text is None:
        return None
    try:
        return int(str(text))
    except ValueError:
        raise ConfigError(f"{option} {text}: it must be a whole number") from None


def parse_cooldown(texts: Sequence[object] | None) -> tuple[float, ...] | None:
    """Parse the numbers of `--blacklist-cooldown-range`; None stays None. Raises ConfigError."""
    try:
        return None if texts is None else tuple(float(str(text)) for text in texts)
    except ValueError:
        raise ConfigError(
            f"--blacklist-cooldown-range {' '.join(map(str, texts or ()))}: it must be two numbers of seconds"
        ) from None
