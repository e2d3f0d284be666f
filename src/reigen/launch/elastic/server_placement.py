"""Placement of an elastic job's servers in processes, whose number changes while the job runs. No I/O, no clock.

A job has so many *servers* from beginning to end; they are what keys are divided among, and what workers talk to. Each
runs in one of the job's *server processes*, which are as many as the user wants at the moment, at most one for each
server. The launcher, of which there is one, decides which process runs which server.

The protocol
------------
A. *Taking.* A process that listens (ready) is told to take its servers, each with a generation: how often it was taken
   before. From generation 1 on the server takes the place of the one before it, as after a death.
B. *Moving.* A server is told to be released. Its process stops it between two requests: what was pushed and applied
   goes along, what was not is not acknowledged, and workers send it again. It leaves the server's state where the next
   process finds it, ends the server's connections, and says that it is released. Only then is the next process told to
   take it. So at any time one process at most has a server, and answers for it. Servers move one by one.
C. *Growing and shrinking.* Processes are started until there are as many as wanted; those that are too many, the latest
   ones, leave, and so does one that says so itself (it was sent SIGTERM). A process that leaves and has no server any
   more is told to end. Another process is started first if none would be left. Servers move from processes that leave,
   and then from one with two more than another has.
D. *Death.* A process that dies and is started again takes its servers when it is ready, with the next generation. A
   release that it was told does not count any more. Where it may not be started again, the job ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from reigen.launch.job_state import JobMessage


class StartServerProcess(JobMessage, frozen=True):
    """Start a server process."""

    process: int


class ForgetCommands(JobMessage, frozen=True):
    """Drop commands to a process that has died: another one is about to be started in its place."""

    process: int


class TellServerProcess(JobMessage, frozen=True):
    """Command to a server process: ``take SERVER GENERATION``, ``release SERVER``, ``close`` or ``end``."""

    process: int
    text: str


PlacementInstruction = StartServerProcess | ForgetCommands | TellServerProcess


class ServerPlacement:
    """Servers, processes, and which has which.

    Args:
        num_servers: the servers' number, and the largest one of processes.
        num_processes: to begin with.

    Attributes:
        homes: by server, its process.
        processes: that run, or are being started.
        wanted: how many there are to be.
        leaving: those that are to end.
    """

    def __init__(self, num_servers: int, num_processes: int) -> None:
        self.wanted = num_processes
        self.processes = set(range(num_processes))
        self.homes = [server % num_processes for server in range(num_servers)]
        self.leaving: set[int] = set()
        #: how often each server was taken
        self._generations = [0] * num_servers
        self._ready: set[int] = set()
        #: processes that were told to end
        self._ended: set[int] = set()
        #: the server that was told to be released, and the process that is to have it
        self._move: tuple[int, int] | None = None

    # ---- events

    def resize(self, num: int) -> list[PlacementInstruction]:
        """Have as many processes."""
        self.wanted = max(1, min(num, len(self.homes)))
        return self._settle()

    def handle_report(self, process: int, text: str) -> list[PlacementInstruction]:
        """Handle a report of a process: ``ready``, ``leaving`` or ``released SERVER``."""
        word, *numbers = text.split()
        if word == "ready":
            return self.process_ready(process)
        return self.process_leaving(process) if word == "leaving" else self.released(process, int(numbers[0]))

    def process_ready(self, process: int) -> list[PlacementInstruction]:
        """Note that a process listens."""
        self._ready.add(process)
        servers = self.servers_of(process)
        return [*(self._take(server) for server in servers), *self._settle()]

    def process_leaving(self, process: int) -> list[PlacementInstruction]:
        """Note that a process wants to end; there is one less from now on, but for the last one."""
        if process in self.leaving or process not in self.processes:
            return []
        self.leaving.add(process)
        self.wanted = max(1, self.wanted - 1)
        return self._settle()

    def released(self, process: int, server: int) -> list[PlacementInstruction]:
        """Note that a process has a server no more."""
        if self._move is None or self._move[0] != server or self.homes[server] != process:
            return []
        target, self._move = self._move[1], None
        if target not in self._staying():  # it has changed its mind meanwhile
            target = self._emptiest() if self._staying(ready=True) else target
        self.homes[server] = target
        instructions = [self._take(server)] if target in self._ready else []
        return [*instructions, *self._settle()]

    def process_ended(self, process: int, *, is_restarted: bool) -> list[PlacementInstruction]:
        """Note the end of a process; another one is started in its place, or it had no server any more."""
        self._ready.discard(process)
        self._ended.discard(process)
        if self._move is not None and self.homes[self._move[0]] == process:
            self._move = None
        if not is_restarted:
            self.processes.discard(process)
            self.leaving.discard(process)
        return self._settle()

    def close(self) -> list[TellServerProcess]:
        """Have processes end with their servers, which end by themselves, once no other process is left."""
        return [TellServerProcess(process, "close") for process in sorted(self.processes)]

    def servers_of(self, process: int) -> Sequence[int]:
        """Return the servers of a process, ascending."""
        return [server for server, home in enumerate(self.homes) if home == process]

    # ---- decisions

    def _staying(self, *, ready: bool = False) -> list[int]:
        staying = self.processes - self.leaving
        return sorted(staying & self._ready if ready else staying)

    def _emptiest(self) -> int:
        """Return the process that is to have the next server."""
        return min(self._staying(ready=True), key=lambda one: (len(self.servers_of(one)), one))

    def _take(self, server: int) -> TellServerProcess:
        generation, self._generations[server] = self._generations[server], self._generations[server] + 1
        return TellServerProcess(self.homes[server], f"take {server} {generation}")

    def _settle(self) -> list[PlacementInstruction]:
        """Return the next steps towards as many processes as wanted, with servers as evenly as can be."""
        instructions: list[PlacementInstruction] = []
        staying = self._staying()
        self.leaving.update(staying[self.wanted :])
        for process in range(len(self.homes) + 1):  # also where all of the others leave
            if len(self._staying()) < self.wanted and process not in self.processes:
                self.processes.add(process)
                instructions.append(StartServerProcess(process))
        if self._move is None and (move := self._next_move()) is not None:
            self._move = move
            instructions.append(TellServerProcess(self.homes[move[0]], f"release {move[0]}"))
        busy = {*self.homes, *(self._move or ())[1:]}
        for process in sorted((self.leaving & self._ready) - busy - self._ended):
            self._ended.add(process)
            instructions.append(TellServerProcess(process, "end"))
        return instructions

    def _next_move(self) -> tuple[int, int] | None:
        """Return the server that is to move next, and where to."""
        targets = self._staying(ready=True)
        if not targets:
            return None
        target = self._emptiest()
        for process in sorted(self.leaving & self._ready):
            if servers := self.servers_of(process):
                return servers[0], target
        fullest = max(targets, key=lambda one: (len(self.servers_of(one)), one))
        servers = self.servers_of(fullest)
        return (servers[-1], target) if len(servers) > len(self.servers_of(target)) + 1 else None

    def validate(self) -> None:
        """Assert what must hold between two events."""
        assert self.leaving <= self.processes
        assert self._ready <= self.processes
        assert set(self.homes) <= self.processes
        assert len(self._staying()) <= self.wanted <= len(self.homes)
        assert self._move is None or self.homes[self._move[0]] in self._ready
        assert not self._ended.intersection(self.homes)
