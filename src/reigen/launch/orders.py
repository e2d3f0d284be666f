"""What the launcher and its agent on another host say to each other, through the stdin and stdout of one ssh.

a. The agent writes its greeting, a line with its version. What stands before it on stdout was printed by the shell's
   startup files and is skipped. Until the greeting has come, and names the launcher's own version, the launcher sends
   nothing: whatever else may read there (a shell, another program) never sees the job's secret.
b. From then on both sides send frames (``wire.codec``), and a Beat at least every second. Whoever has heard nothing for
   ``silence_seconds`` takes the connection for cut: the launcher counts the host as lost, the agent ends everything.
c. The agent says Hello. The launcher sends Prepare; the agent looks whether the job can run there, and answers Ready,
   or Refused with the reason, in words.
d. When all hosts are ready the launcher sends Start; the agent starts its ranks and answers Started, or Refused.
e. What happens there comes as Printed, Closed, Exited; the launcher's decisions arrive as Terminate, Kill and Sweep,
   which mean what they do in ``launch.job``. The agent answers a Sweep with Swept, after everything that was printed.
f. A stream may have WINDOW_BYTES under way: the agent reads no more of it until Credit says what was taken.
g. A parcel for the ranks (``launch.luggage``) comes before Start, in Pieces. A Letter of a rank is followed by the
   Pieces of its parcel, and what happens to the rank afterwards is told after those.
h. `reigen check` asks for no job, but for Facts (Ask), and for the time there (Ping, Pong).
i. A process that has ended is started again by Restart; the agent refuses if it cannot be.
j. When the agent's stdin ends, it kills whatever it started and exits: after Swept there is nothing.
"""

from __future__ import annotations

import msgspec

from reigen._version import __version__
from reigen.errors import WireError
from reigen.launch.servants import Household, Servant
from reigen.wire.codec import Codec

#: An environment and a command line are bounded by the kernel, at 2 MiB together unless somebody raised it.
MAX_FRAME_BYTES = 16 << 20
#: What the shell's startup files may print before the agent's greeting.
MAX_NOISE_BYTES = 1 << 18
WINDOW_BYTES = 1 << 20
BEAT_SECONDS = 1.0

GREETING = b"\0reigen-agent "


def greeting() -> bytes:
    """What the agent says first."""
    return GREETING + __version__.encode() + b"\n"


class Preface:
    """What comes before the frames: perhaps noise, then the greeting."""

    def __init__(self) -> None:
        self._data = b""
        #: The version that was named; None while the greeting is not complete.
        self.version: str | None = None

    @property
    def noise(self) -> str:
        """What is no greeting, for a message."""
        return self._data.partition(GREETING)[0].decode(errors="replace").strip()

    def feed(self, data: bytes) -> bytes:
        """Take in what was read; returns what stands behind the greeting.

        Raises:
            WireError: there is too much before it, or the version is another.
        """
        self._data += data
        before, found, behind = self._data.partition(GREETING)
        version, end, rest = behind.partition(b"\n")
        if found and end:
            self._data = before + found
            self.version = version.decode(errors="replace")
            if self.version != __version__:
                raise WireError(
                    f"Reigen {self.version} there, {__version__} here: install the same version on all hosts"
                )
            return rest
        if len(self._data) > MAX_NOISE_BYTES:
            raise WireError("something else than Reigen's agent answers there")
        return b""


class _Frame(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Beat(_Frame, tag=1, frozen=True):
    """I am alive."""


class Prepare(_Frame, tag=2, frozen=True):
    """See whether the job can run there.

    Attributes:
        directory: where the ranks are to run; one that is not absolute begins at the user's home.
        program: what the ranks run; it must be there.
        path: PATH, as the launcher has it.
        files: what else must be there, relative to the directory.
        launcher: ``host:port`` that the ranks must be able to reach.
        interfaces: names of those through which others may reach the host; empty: all.
        silence_seconds: see above.
    """

    directory: str
    program: str
    path: str
    files: tuple[str, ...]
    launcher: str
    interfaces: tuple[str, ...]
    silence_seconds: float


class Start(_Frame, tag=3, frozen=True):
    """Start the ranks and the servants.

    Attributes:
        command: the program and its arguments.
        topologies: of each rank there, as the fields of ``cluster.topology.Topology``.
        environ: what the processes' environment gets from the launcher's.
        package: where Reigen is installed on the launcher's host.
        rendezvous: see ``launch.local.Services``, and so the next three.
        secret: the job's.
        master_address: rank 0's host.
        master_port: a port there.
        bind: see ``launch.local.plan``.
        start_timeout_seconds: the same.
        household: see ``launch.local.Services``.
        servants: those of the host.
        servant_command: what they run; empty: Reigen's own.
        rank_environ: variables of the ranks alone.
        server_environ: those of the servers alone.
    """

    command: tuple[str, ...]
    topologies: tuple[tuple[int, int, int, int, int, int], ...]
    environ: dict[str, str]
    package: str
    rendezvous: str
    secret: bytes
    master_address: str
    master_port: int
    bind: str | None
    start_timeout_seconds: float | None
    household: Household | None = None
    servants: tuple[Servant, ...] = ()
    servant_command: tuple[str, ...] = ()
    rank_environ: dict[str, str] = {}
    server_environ: dict[str, str] = {}

    def __repr__(self) -> str:
        """Without the secret, and without the environment, where others may be."""
        return f"Start({self.command}, {len(self.topologies)} ranks, {len(self.servants)} servants)"


class Terminate(_Frame, tag=4, frozen=True):
    """As in ``launch.job``."""

    ranks: tuple[int, ...]


class Kill(_Frame, tag=5, frozen=True):
    """As in ``launch.job``."""

    ranks: tuple[int, ...]


class Sweep(_Frame, tag=6, frozen=True):
    """As in ``launch.job``."""


class Credit(_Frame, tag=7, frozen=True):
    """So many bytes of a stream were taken."""

    stream: int
    num_bytes: int


class Hello(_Frame, tag=9, frozen=True):
    """Who the agent is.

    Attributes:
        hostname: as its machine calls itself.
        python: version of the Python that runs it.
        client: the address from which the connection comes, as its sshd says; or empty.
    """

    hostname: str
    python: str
    client: str


class Ready(_Frame, tag=10, frozen=True):
    """The job can run there.

    Attributes:
        address: where the host is reached by the others.
        port: one that is free for rank 0's own server, and held.
    """

    address: str
    port: int


class Refused(_Frame, tag=11, frozen=True):
    """It cannot.

    Attributes:
        reason: in words.
        exit_code: as in LaunchError.
    """

    reason: str
    exit_code: int = 1


class Started(_Frame, tag=12, frozen=True):
    """The ranks, and the servants, run.

    Attributes:
        pids: their processes, in the order of ``Start.topologies``, and of ``Start.servants`` behind them.
        notes: where they were placed, a line each.
    """

    pids: tuple[int, ...]
    notes: tuple[str, ...]


class Printed(_Frame, tag=13, frozen=True):
    """A rank has printed this on a stream."""

    rank: int
    stream: int
    data: bytes


class Closed(_Frame, tag=14, frozen=True):
    """Nothing more comes from that stream."""

    rank: int
    stream: int


class Exited(_Frame, tag=15, frozen=True):
    """A rank's process has ended; the code as in ``launch.job``."""

    rank: int
    exit_code: int


class Swept(_Frame, tag=16, frozen=True):
    """Nothing that the ranks started runs any more."""


class Ask(_Frame, tag=17, frozen=True):
    """What is there?"""


class Facts(_Frame, tag=18, frozen=True):
    """What is there.

    Attributes:
        num_cpus: logical processors that may be used.
        versions: of what is installed, by name.
        gpus: a line each.
    """

    num_cpus: int
    versions: dict[str, str]
    gpus: tuple[str, ...]


class Ping(_Frame, tag=19, frozen=True):
    """What is the time?"""


class Pong(_Frame, tag=20, frozen=True):
    """The time there, in seconds since 1970."""

    seconds: float


class Piece(_Frame, tag=21, frozen=True):
    """The next part of a parcel."""

    data: bytes
    is_last: bool


class Letter(_Frame, tag=22, frozen=True):
    """What a rank has sent home.

    Attributes:
        text: its bytes.
        num_bytes: size of the parcel that comes with it, in the pieces that follow; None: there is none.
    """

    text: bytes
    num_bytes: int | None


class Restart(_Frame, tag=23, frozen=True):
    """As in ``launch.job``."""

    number: int
    attempt: int


Order = Restart | Beat | Prepare | Start | Terminate | Kill | Sweep | Credit | Ask | Ping | Piece
Answer = Beat | Hello | Ready | Refused | Started | Printed | Closed | Exited | Swept | Facts | Pong | Piece | Letter

ORDERS: Codec[Order] = Codec(Order, MAX_FRAME_BYTES)
ANSWERS: Codec[Answer] = Codec(Answer, MAX_FRAME_BYTES)
