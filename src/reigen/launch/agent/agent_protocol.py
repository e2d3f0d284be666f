"""Protocol between the launcher and its agent on another host, through the stdin and stdout of one ssh.

a. The agent writes its greeting, a line with its version. Text before it on stdout was printed by the shell's startup
   files and is skipped. Until the greeting has come, and names the launcher's own version, the launcher sends nothing:
   another reader there (a shell, another program) never sees the job's secret.
b. From then on both sides send frames (``net.codec``), and a KeepAlive at least every second; from StartRequest on the
   agent also asks the control service as often (``launch.agent.heartbeat``). A side that has received nothing in either
   way for ``silence_seconds`` takes the connection for cut: the launcher counts the host as lost, the agent ends
   everything. When the job has failed, the launcher waits for no more than REIGEN_PEER_TIMEOUT. The agent lets a
   KeepAlive follow each message: srun passes on what a task writes up to the end of the last line, and no further.
c. The agent sends AgentHello. The launcher sends PrepareRequest; the agent looks whether the job can run there, and
   answers HostReady, or HostRefused with the reason, in words.
d. When all hosts are ready the launcher sends StartRequest; the agent starts its ranks and answers ProcessesStarted,
   or HostRefused.
e. Events there come as OutputChunk, OutputClosed, ProcessExited; the launcher's decisions go there as they are:
   TerminateProcesses, KillProcesses and SweepProcesses of ``launch.job_state``. The agent answers SweepProcesses with
   ProcessesSwept, after all output.
f. A stream may have WINDOW_BYTES under way: the agent reads no more of it until OutputCredit gives it room.
g. A payload for the ranks (``launch.payload``) comes before StartRequest, in PayloadChunks. A rank's RankMessageHeader
   is followed by the PayloadChunks of its message, and later events of the rank come after those.
h. `reigen check` asks for no job, but for HostFacts (FactsRequest), and for the time there (TimeRequest, TimeReply).
i. A process that has ended is started again by RestartProcess; the agent refuses if it cannot be.
j. A signal that the agent is sent goes to the launcher in a SignalNotice: what follows from it is decided there.
k. When the agent's stdin ends, it kills everything that it started and exits: after ProcessesSwept there is nothing.
l. Not so in a job that goes on without its launcher (Continuation): then the agent writes output to files, and listens
   for another launcher, which proves that it knows the job's secret, and has a higher generation than the last one. It
   sends AttachRequest, and is told what runs (AttachReply) and what has ended meanwhile (ProcessExited). The line of an
   older launcher is closed, after Superseded: what it still sends is not read. EndRequest ends everything at once.
"""

from __future__ import annotations

from reigen._version import __version__
from reigen.errors import WireError
from reigen.launch.elastic.places import PlacedStart
from reigen.launch.hosts import HostAssignment
from reigen.launch.job_state import JobMessage, ProcessesSwept, ProcessExited, ProcessInstruction
from reigen.launch.local_plan import JobServices, ProcessOptions
from reigen.net.codec import MessageCodec, add_length_prefix

#: An environment and a command line are bounded by the kernel, at 2 MiB together unless that was raised.
MAX_FRAME_BYTES = 16 << 20
#: Limit of the shell's startup output before the agent's greeting.
MAX_BANNER_BYTES = 1 << 18
WINDOW_BYTES = 1 << 20
KEEPALIVE_SECONDS = 1.0
#: Purpose of a launcher's connection to an agent that listens; its rank is the launcher's generation.
ATTACH_PURPOSE = "attach"

GREETING = b"\0reigen-agent "


def greeting() -> bytes:
    """Return the first bytes that the agent sends."""
    return GREETING + __version__.encode() + b"\n"


class GreetingParser:
    """Parser of the bytes before the frames: perhaps a banner, then the greeting."""

    def __init__(self) -> None:
        self._data = b""
        #: Version in the greeting; None while it is not complete.
        self.version: str | None = None

    @property
    def banner(self) -> str:
        """Text before the greeting, for a message."""
        return self._data.partition(GREETING)[0].decode(errors="replace").strip()

    def feed(self, data: bytes) -> bytes:
        """Take bytes; return those behind the greeting. Raises WireError: too many before it, or another version."""
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
        if len(self._data) > MAX_BANNER_BYTES:
            raise WireError("something else than Reigen's agent answers there")
        return b""


class KeepAlive(JobMessage, tag=10, frozen=True):
    """Sign of life. Its last byte is its tag, the end of a line (see b. above)."""


class PrepareRequest(JobMessage, tag=2, frozen=True):
    """Request to see whether the job can run there.

    Attributes:
        directory: where the ranks are to run; one that is not absolute begins at the user's home.
        program: the ranks' program, which must exist.
        path: PATH, as the launcher has it.
        files: other files that must exist, relative to the directory.
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


class Continuation(JobMessage, frozen=True):
    """Facts that an agent needs to go on when its launcher is lost.

    Attributes:
        job: name of the job, and of its directory.
        generation: of the launcher.
        output_directory: of the processes' output then; empty: in the job's directory.
        num_ranks: as in ``launch.output.output_files.process_directory``.
    """

    job: str
    generation: int
    output_directory: str
    num_ranks: int


class StartRequest(JobMessage, tag=3, frozen=True):
    """Request to start the ranks and the PS processes.

    Attributes:
        number: the agent's.
        assignment, options, services: as in ``launch.local_plan.plan_host``.
        environ: variables from the launcher's host.
        package: where Reigen is installed on the launcher's host.
        kept_variables: as in ``launch.base.JobPlan``.
        elastic_starts: of an elastic job, whose processes are started so, and not by the assignment; may come again.
        num_places: of an elastic job: how many processes there may be on the host at a time.
        continuation: None: everything ends when the launcher is lost.
    """

    number: int
    assignment: HostAssignment
    options: ProcessOptions
    services: JobServices
    environ: dict[str, str]
    package: str
    kept_variables: tuple[str, ...] = ()
    elastic_starts: tuple[PlacedStart, ...] = ()
    num_places: int = 0
    continuation: Continuation | None = None

    def __repr__(self) -> str:
        """Describe it without the secret, and without the environment, which may hold others."""
        return f"Start({self.options.command}, processes {self.assignment.numbers})"


class OutputCredit(JobMessage, tag=7, frozen=True):
    """Credit for so many more bytes of a stream."""

    stream: int
    num_bytes: int


class AgentHello(JobMessage, tag=9, frozen=True):
    """First message of the agent: its host's own name, its Python's version, and its client's address or ``""``."""

    hostname: str
    python: str
    client: str


class HostReady(JobMessage, tag=1, frozen=True):
    """Answer that the job can run there; others reach the host at ``address``, and ``port`` is held for rank 0."""

    address: str
    port: int


class HostRefused(JobMessage, tag=11, frozen=True):
    """Answer that it cannot, with the reason and LaunchError's exit code."""

    reason: str
    exit_code: int = 1


class ProcessesStarted(JobMessage, tag=12, frozen=True):
    """Processes of a host, ranks before PS processes, in the order of StartRequest, with a line about each binding.

    ``attach_at``: where another launcher reaches the agent, ``host:port``; empty: it goes with its launcher.
    """

    pids: tuple[int, ...]
    notes: tuple[str, ...]
    attach_at: str = ""


class OutputChunk(JobMessage, tag=13, frozen=True):
    """Output of a rank."""

    rank: int
    stream: int
    data: bytes


class OutputClosed(JobMessage, tag=14, frozen=True):
    """End of a rank's stream."""

    rank: int
    stream: int


class FactsRequest(JobMessage, tag=17, frozen=True):
    """Request for HostFacts."""


class HostFacts(JobMessage, tag=18, frozen=True):
    """Logical processors that may be used, versions of installed libraries by name, and GPUs, a line each."""

    num_cpus: int
    versions: dict[str, str]
    gpus: tuple[str, ...]


class TimeRequest(JobMessage, tag=19, frozen=True):
    """Request for TimeReply."""


class TimeReply(JobMessage, tag=20, frozen=True):
    """Time there, in seconds since 1970."""

    seconds: float


class PayloadChunk(JobMessage, tag=21, frozen=True):
    """Next part of a payload."""

    data: bytes
    is_last: bool


class RankMessageHeader(JobMessage, tag=22, frozen=True):
    """Message of a rank; its payload of ``num_bytes`` (None: there is none) follows in chunks."""

    text: bytes
    num_bytes: int | None


class SignalNotice(JobMessage, tag=24, frozen=True):
    """Notice of a signal that the agent was sent, by its engine or by a person, while its ranks run."""

    signum: int


class AttachRequest(JobMessage, tag=26, frozen=True):
    """First message of a launcher that takes another one's place.

    Attributes:
        rendezvous: ``host:port`` of its service.
        number: the agent's there.
        silence_seconds: see above.
    """

    rendezvous: str
    number: int
    silence_seconds: float


class AttachReply(JobMessage, tag=27, frozen=True):
    """Answer to AttachRequest.

    Attributes:
        running: numbers of processes that run, or have ended without a launcher: their ends are told next.
        finished: slot of a process whose program was done; None: there was none.
        output_directory: where their output is that no launcher has taken; empty: there was always one.
    """

    running: tuple[int, ...]
    finished: int | None
    output_directory: str


class Superseded(JobMessage, tag=28, frozen=True):
    """Last message to a launcher: one of this generation has taken its place."""

    generation: int


class EndRequest(JobMessage, tag=29, frozen=True):
    """Request to kill everything, and to end."""


_Start = AgentHello | HostReady | HostRefused | ProcessesStarted
_RankEvent = OutputChunk | OutputClosed | ProcessExited | RankMessageHeader
_Shared = KeepAlive | PayloadChunk
_JobRequest = PrepareRequest | StartRequest | AttachRequest | EndRequest
AgentRequest = _Shared | _JobRequest | ProcessInstruction | OutputCredit | FactsRequest | TimeRequest
_JobReply = AttachReply | Superseded | ProcessesSwept
AgentReply = _Shared | SignalNotice | _Start | _RankEvent | _JobReply | HostFacts | TimeReply

REQUEST_CODEC: MessageCodec[AgentRequest] = MessageCodec(AgentRequest, MAX_FRAME_BYTES)
REPLY_CODEC: MessageCodec[AgentReply] = MessageCodec(AgentReply, MAX_FRAME_BYTES)
#: Frame behind each message of an agent; it ends as a line does.
LINE_END = add_length_prefix(REPLY_CODEC.encode(KeepAlive()), MAX_FRAME_BYTES)
