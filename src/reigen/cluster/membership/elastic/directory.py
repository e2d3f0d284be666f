"""Meeting place of an elastic job's processes: how the first members find each other, and candidates the members.

All of it is at the rendezvous of the launcher:

``elastic/card/RANK``  where a process of the first view listens
``elastic/witness``    incarnation of the witness in the first view, if there is one
``elastic/version``    Reigen's version in the members, by rank 0
``elastic/view``       the latest view that runs, by its rank 0
``elastic/change``     why it began, and what that has cost, by its rank 0; some of that when it runs
``elastic/finished``   slot of a member whose program is done, the latest one of them
``elastic/leaving``    slot and incarnation of a process that leaves, the latest one of them
``elastic/straggler``  a member that makes all steps slower, the latest one of them
``elastic/pause``      for how long all members are about to wait, with bytes and slots, by who gives the state
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue

from reigen._version import __version__
from reigen.cluster.environ import (
    ELASTIC_CHANGE_KEY,
    ELASTIC_FINISHED_KEY,
    ELASTIC_LEAVING_KEY,
    ELASTIC_PAUSE_KEY,
    ELASTIC_STRAGGLER_KEY,
    ELASTIC_VIEW_KEY,
)
from reigen.cluster.membership.elastic.node import ElasticNode
from reigen.cluster.membership.elastic.witness import WitnessVoter
from reigen.cluster.membership.rendezvous import Rendezvous
from reigen.cluster.membership.stragglers import Straggler
from reigen.cluster.membership.views.history import CHANGE_NOTE_CODEC, ChangeNote
from reigen.cluster.membership.views.record import MAX_VIEW_BYTES, MemberId, StepBase, View, ViewHost, Witness
from reigen.errors import AuthenticationError, ConfigError, DeadlineError, ReigenError, format_ranks
from reigen.net.codec import MessageCodec

_log = logging.getLogger(__name__)

#: A view as bytes, as at `ELASTIC_VIEW_KEY`.
VIEW_RECORD_CODEC: MessageCodec[View] = MessageCodec(View, MAX_VIEW_BYTES)
_CARD_CODEC: MessageCodec[ViewHost] = MessageCodec(ViewHost, 4096)
_WITNESS_KEY = "elastic/witness"
_VERSION_KEY = "elastic/version"
_LOOK_SECONDS, _CLOSE_SECONDS = 0.25, 2.0
#: Between looks of rank 0 whether there is another launcher.
_LAUNCHER_SECONDS = 0.5


def meet_first_view(
    node: ElasticNode,
    rendezvous: Rendezvous,
    rank: int,
    size: int,
    sizes: tuple[int, int],
    timeout_seconds: float,
    num_spares: int = 0,
) -> View:
    """Meet the other processes that begin the job, and make its first view. All of them make the same one.

    Args:
        node: this process; its slot is ``rank``.
        rendezvous: of the job.
        rank: of this process.
        size: how many processes begin.
        sizes: the smallest and the largest number of ranks with which steps are run.
        timeout_seconds: how long to wait for the slowest.
        num_spares: how many of the largest number are warm spares.

    Returns:
        The view. Its ranks are those of the processes if those of a host stand together, which a launcher sees to.

    Raises:
        ConfigError: the numbers contradict each other, or ranks of a host do not stand together.
        DeadlineError: processes did not come; names them.
        PeerLostError: the launcher has gone.
    """
    if not 1 <= sizes[0] <= size <= sizes[1]:
        raise ConfigError(
            f"an elastic job of {sizes[0]} to {sizes[1]} rank(s) does not begin with {size} (--min-np, --max-np)"
        )
    rendezvous.put(f"elastic/card/{rank}", _CARD_CODEC.encode(node.card()))
    until = time.monotonic() + timeout_seconds
    cards: list[ViewHost] = []
    missing: list[int] = []
    for other in range(size):
        try:
            left = max(0.05, until - time.monotonic())
            cards.append(_CARD_CODEC.decode(rendezvous.get(f"elastic/card/{other}", left)))
        except TimeoutError:
            missing.append(other)
    if missing:
        raise DeadlineError(
            f"rank(s) {format_ranks(missing)} of an elastic job did not come within {timeout_seconds:g} s "
            "(REIGEN_START_TIMEOUT sets how long to wait)",
            ranks=missing,
        )
    hosts: dict[str, ViewHost] = {}
    for card in cards:
        known = hosts.get(card.name)
        if known is not None and known.voter != card.voter:
            raise ConfigError(f"processes of host {card.name} have memories of two voters (REIGEN_VOTER_FD)")
        members = (*(() if known is None else known.members), *card.members)
        hosts[card.name] = ViewHost(*card.voter, card.address, members, card.failure_domain)
    witness = None if node.witness is None else _meet_witness(node.witness, rendezvous, rank, until)
    view = View.make(1, hosts.values(), base=StepBase(), sizes=sizes, witness=witness, num_spares=num_spares)
    if view.ranks.get(node.me) != rank:
        raise ConfigError(
            f"rank {rank} of an elastic job is process {tuple(node.me)} on host {node.host}, which would have rank "
            f"{view.ranks.get(node.me)}: ranks of a host must stand together"
        )
    return view


def _meet_witness(voter: WitnessVoter, rendezvous: Rendezvous, rank: int, until: float) -> Witness:
    """Return the witness of the first view, which is the same one for all ranks."""
    try:
        seen = voter.id
    except OSError as error:
        raise ConfigError(f"the witness cannot be asked by rank {rank}: {error.strerror or error}") from None
    if rank == 0:
        rendezvous.put(_WITNESS_KEY, str(seen.incarnation).encode())
    first = int(rendezvous.get(_WITNESS_KEY, max(0.05, until - time.monotonic())))
    if first != seen.incarnation:
        raise ConfigError(f"rank {rank} has another witness than rank 0: all hosts must share the directory")
    return Witness(seen.name, seen.incarnation, "")


class ViewDirectory:
    """One process's use of the rendezvous, in a thread of its own: others do not wait when the launcher is slow.

    A view that runs is put again at a launcher that has taken the place of the first one.

    Args:
        rendezvous: used by this thread alone; stays the caller's.
        find_launcher: returns something that is different for each launcher.
    """

    def __init__(self, rendezvous: Rendezvous, find_launcher: Callable[[], str] = str) -> None:
        self._rendezvous, self._find_launcher = rendezvous, find_launcher
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        #: asked for by a candidate: called with each view that is found
        self._look: Callable[[View], bool] | None = None
        self._refused: Callable[[ReigenError], None] = lambda error: None
        #: the latest view that this process has to announce, and the launcher that knows it; None: none does
        self._view: View | None = None
        self._known_to: str | None = None

    def announce(self, view: View) -> None:
        """Put a view that runs, once there is a launcher."""
        self._do(partial(self._announce, view))

    def _announce(self, view: View) -> None:
        self._view, self._known_to = view, None
        launcher = self._find_launcher()
        self._rendezvous.put(_VERSION_KEY, __version__.encode())
        self._rendezvous.put(ELASTIC_VIEW_KEY, VIEW_RECORD_CODEC.encode(view))
        self._known_to = launcher

    def _announce_again(self) -> None:
        if self._view is not None and self._known_to != self._find_launcher():
            self._announce(self._view)

    def look_for_view(self, found: Callable[[View], bool], refused: Callable[[ReigenError], None]) -> None:
        """Call ``found`` with the view at the rendezvous, again and again, until it returns True. By the thread.

        Where this process does not know the job's secret, or has another version of Reigen than the members,
        ``refused`` is called, and nobody is asked any more.
        """
        self._look, self._refused = found, refused
        self._do(self._look_once)

    def tell_change(self, note: ChangeNote) -> None:
        """Put the reason of a change of views, and its outcome for the step under way, as far as that is known."""
        self._tell(ELASTIC_CHANGE_KEY, CHANGE_NOTE_CODEC.encode(note), lambda: None)

    def tell_finished(self, member: MemberId, done: Callable[[], None]) -> None:
        """Put that a member's program is done; then call ``done``."""
        self._tell(ELASTIC_FINISHED_KEY, str(member.slot).encode(), done)

    def tell_leaving(self, member: MemberId, done: Callable[[], None]) -> None:
        """Put that a process leaves; then call ``done``."""
        self._tell(ELASTIC_LEAVING_KEY, f"{member.slot} {member.incarnation}".encode(), done)

    def tell_straggler(self, straggler: Straggler, min_size: int) -> None:
        """Put who makes all steps slower, and with how many members steps can be made at least."""
        slot, incarnation = straggler.member
        numbers = f"{slot} {incarnation} {straggler.step} {straggler.num_steps} {min_size}"
        seconds = f"{straggler.work_seconds:.6g} {straggler.median_seconds:.6g}"
        self._tell(ELASTIC_STRAGGLER_KEY, f"{numbers} {seconds}".encode(), lambda: None)

    def tell_pause(self, seconds: float, num_bytes: int, slots: Sequence[int]) -> None:
        """Put that all members are about to wait while these slots get so many bytes; 0 s: not known for how long."""
        self._tell(
            ELASTIC_PAUSE_KEY, " ".join([f"{seconds:.6g}", str(num_bytes), *map(str, slots)]).encode(), lambda: None
        )

    def _tell(self, key: str, data: bytes, done: Callable[[], None]) -> None:
        def tell() -> None:
            try:
                self._rendezvous.put(key, data)
            finally:
                done()

        self._do(tell)

    def close(self) -> None:
        """Have the thread end, and wait for it a moment. May be called twice."""
        self._is_closed = True
        if self._thread is not None:
            self._jobs.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join(_CLOSE_SECONDS)

    def _do(self, job: Callable[[], None]) -> None:
        if self._is_closed:
            return
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="reigen-directory", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                job = self._jobs.get(timeout=self._wait_seconds())
            except Empty:
                job = self._announce_again if self._look is None else self._look_once
            if job is None:
                return
            try:
                job()
            except (AuthenticationError, ConfigError) as error:
                self._look = None
                self._refused(error)
            except (OSError, ReigenError) as error:  # the launcher's loss is seen elsewhere, too
                _log.debug("the rendezvous of an elastic job: %s", error)

    def _wait_seconds(self) -> float | None:
        """Return how long to wait for jobs before there is something to do."""
        if self._look is not None:
            return _LOOK_SECONDS
        return None if self._view is None else _LAUNCHER_SECONDS

    def _look_once(self) -> None:
        data = self._rendezvous.peek(ELASTIC_VIEW_KEY)
        version = None if data is None else self._rendezvous.peek(_VERSION_KEY)
        if version is not None and version != __version__.encode():
            raise ConfigError(
                f"the members of the job have Reigen {version.decode(errors='replace')}, this process on host "
                f"{socket.gethostname()} has {__version__} ({sys.executable}): install the same version on all hosts"
            )
        if data is not None and self._look is not None and self._look(VIEW_RECORD_CODEC.decode(data)):
            self._look = None
