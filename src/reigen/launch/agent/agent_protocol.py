"""What the launcher and its agent on another host say to each other, through the stdin and stdout of one ssh.

a. The agent writes its greeting, a line with its version. What stands before it on stdout was printed by the shell's
   startup files and is skipped. Until the greeting has come, and names the launcher's own version, the launcher sends
   nothing: whatever else may read there (a shell, another program) never sees the job's secret.
b. From then on both sides send frames (``net.codec``), and a KeepAlive at least every second; from StartRequest on the
   agent also asks the control service as often (``launch.agent.heartbeat``). Whoever has heard nothing in either way
   for ``silence_seconds`` takes the connection for cut: the launcher counts the host as lost, the agent ends
   everything. When the job has failed, the launcher waits for no more than REIGEN_PEER_TIMEOUT.
c. The agent says AgentHello. The launcher sends PrepareRequest; the agent looks whether the job can run there, and
   answers HostReady, or HostRefused with the reason, in words.
d. When all hosts are ready the launcher sends StartRequest; the agent starts its ranks and answers ProcessesStarted,
   or HostRefused.
e. What happens there comes as OutputChunk, OutputClosed, ProcessExitReport; the launcher's decisions arrive as
   TerminateRequest, KillRequest and SweepRequest, which mean what they do in ``launch.job_state``. The agent answers a
   SweepRequest with HostSwept, after everything that was printed.
f. A stream may have WINDOW_BYTES under way: the agent reads no more of it until OutputCredit says what was taken.
g. A payload for the ranks (``launch.payload``) comes before StartRequest, in PayloadChunks. A rank's RankMessageHeader
   is followed by the PayloadChunks of its message, and what happens to the rank afterwards is told after those.
h. `reigen check` asks for no job, but for HostFacts (FactsRequest), and for the time there (TimeRequest, TimeReply).
i. A process that has ended is started again by RestartRequest; the agent refuses if it cannot be.
j. When the agent's stdin ends, it kills whatever it started and exits: after HostSwept there is nothing.
"""

from __future__ import annotations

import msgspec

from reigen._version import __version__
from reigen.errors import WireError
from reigen.launch.ps_processes import PsJobSpec, PsProcess
from reigen.net.codec import MessageCodec

#: An environment and a command line are bounded by the kernel, at 2 MiB together unless somebody raised it.
MAX_FRAME_BYTES = 16 << 20
#: What the shell's startup files may print before the agent's greeting.
MAX_NOISE_BYTES = 1 << 18
WINDOW_BYTES = 1 << 20
KEEPALIVE_SECONDS = 1.0

GREETING = b"\0reigen-agent "


def greeting() -> bytes:
    """What the agent says first."""
    return GREETING + __version__.encode() + b"\n"


class GreetingParser:
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


class _AgentMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Base of all messages."""


class KeepAlive(_AgentMessage, tag=1, frozen=True):
    """I am alive."""


class PrepareRequest(_AgentMessage, tag=2, frozen=True):
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


class StartRequest(_AgentMessage, tag=3, frozen=True):
    """Start the ranks and the servants.

    Attributes:
        command: the program and its arguments.
        topologies: of each rank there, as the fields of ``cluster.topology.Topology``.
        environ: what the processes' environment gets from the launcher's.
        package: where Reigen is installed on the launcher's host.
        number: the agent's.
        rendezvous: see ``launch.local_plan.JobServices``, and so the next three.
        secret: the job's.
        master_address: rank 0's host.
        master_port: a port there.
        bind: see ``launch.local_plan.plan_ranks``.
        start_timeout_seconds: the same.
        ps_job: see ``launch.local_plan.JobServices``.
        servants: the processes of parameter servers on the host.
        ps_command: what they run; empty: Reigen's own.
        rank_environ: variables of the ranks alone.
        server_environ: those of the servers alone.
    """

    command: tuple[str, ...]
    topologies: tuple[tuple[int, int, int, int, int, int], ...]
    environ: dict[str, str]
    package: str
    number: int
    rendezvous: str
    secret: bytes
    master_address: str
    master_port: int
    bind: str | None
    start_timeout_seconds: float | None
    ps_job: PsJobSpec | None = None
    servants: tuple[PsProcess, ...] = ()
    ps_command: tuple[str, ...] = ()
    rank_environ: dict[str, str] = {}
    server_environ: dict[str, str] = {}

    def __repr__(self) -> str:
        """Without the secret, and without the environment, where others may be."""
        return f"Start({self.command}, {len(self.topologies)} ranks, {len(self.servants)} servants)"


class TerminateRequest(_AgentMessage, tag=4, frozen=True):
    """As in ``launch.job_state``."""

    ranks: tuple[int, ...]


class KillRequest(_AgentMessage, tag=5, frozen=True):
    """As in ``launch.job_state``."""

    ranks: tuple[int, ...]


class SweepRequest(_AgentMessage, tag=6, frozen=True):
    """As in ``launch.job_state``."""


class OutputCredit(_AgentMessage, tag=7, frozen=True):
    """So many bytes of a stream were taken."""

    stream: int
    num_bytes: int


class AgentHello(_AgentMessage, tag=9, frozen=True):
    """Who the agent is.

    Attributes:
        hostname: as its machine calls itself.
        python: version of the Python that runs it.
        client: the address from which the connection comes, as its sshd says; or empty.
    """

    hostname: str
    python: str
    client: str


class HostReady(_AgentMessage, tag=10, frozen=True):
    """The job can run there.

    Attributes:
        address: where the host is reached by the others.
        port: one that is free for rank 0's own server, and held.
    """

    address: str
    port: int


class HostRefused(_AgentMessage, tag=11, frozen=True):
    """It cannot.

    Attributes:
        reason: in words.
        exit_code: as in LaunchError.
    """

    reason: str
    exit_code: int = 1


class ProcessesStarted(_AgentMessage, tag=12, frozen=True):
    """The ranks, and the servants, run.

    Attributes:
        pids: their processes, in the order of ``StartRequest.topologies``, and of ``StartRequest.servants`` behind
            them.
        notes: where they were placed, a line each.
    """

    pids: tuple[int, ...]
    notes: tuple[str, ...]


class OutputChunk(_AgentMessage, tag=13, frozen=True):
    """A rank has printed this on a stream."""

    rank: int
    stream: int
    data: bytes


class OutputClosed(_AgentMessage, tag=14, frozen=True):
    """Nothing more comes from that stream."""

    rank: int
    stream: int


class ProcessExitReport(_AgentMessage, tag=15, frozen=True):
    """A rank's process has ended; the fields as in ``launch.job_state``."""

    rank: int
    exit_code: int
    cause: str


class HostSwept(_AgentMessage, tag=16, frozen=True):
    """Nothing that the ranks started runs any more."""


class FactsRequest(_AgentMessage, tag=17, frozen=True):
    """What is there?"""


class HostFacts(_AgentMessage, tag=18, frozen=True):
    """What is there.

    Attributes:
        num_cpus: logical processors that may be used.
        versions: of what is installed, by name.
        gpus: a line each.
    """

    num_cpus: int
    versions: dict[str, str]
    gpus: tuple[str, ...]


class TimeRequest(_AgentMessage, tag=19, frozen=True):
    """What is the time?"""


class TimeReply(_AgentMessage, tag=20, frozen=True):
    """The time there, in seconds since 1970."""

    seconds: float


class PayloadChunk(_AgentMessage, tag=21, frozen=True):
    """The next part of a parcel."""

    data: bytes
    is_last: bool


class RankMessageHeader(_AgentMessage, tag=22, frozen=True):
    """What a rank has sent home.

    Attributes:
        text: its bytes.
        num_bytes: size of the parcel that comes with it, in the pieces that follow; None: there is none.
    """

    text: bytes
    num_bytes: int | None


class RestartRequest(_AgentMessage, tag=23, frozen=True):
    """As in ``launch.job_state``."""

    number: int
    attempt: int


AgentRequest = (
    RestartRequest
    | KeepAlive
    | PrepareRequest
    | StartRequest
    | TerminateRequest
    | KillRequest
    | SweepRequest
    | OutputCredit
    | FactsRequest
    | TimeRequest
    | PayloadChunk
)
AgentReply = (
    KeepAlive
    | AgentHello
    | HostReady
    | HostRefused
    | ProcessesStarted
    | OutputChunk
    | OutputClosed
    | ProcessExitReport
    | HostSwept
    | HostFacts
    | TimeReply
    | PayloadChunk
    | RankMessageHeader
)

REQUEST_CODEC: MessageCodec[AgentRequest] = MessageCodec(AgentRequest, MAX_FRAME_BYTES)
REPLY_CODEC: MessageCodec[AgentReply] = MessageCodec(AgentReply, MAX_FRAME_BYTES)
