"""Settings of a store on a server, by COMMAND: its optimizer and its gradient compression.

======================== ================================ =============================================================
command                  arguments                        who, and when it is answered
======================== ================================ =============================================================
set_optimizer            spec: `Optimizer.to_spec`        all workers alike; when all have sent it
set_gradient_compression params: of `from_params`; or {}  all workers alike; when all have sent it
set_learning_rate        learning_rate: a number          any worker; at once
get_optimizer                                             any worker; at once: the spec, or None
======================== ================================ =============================================================

The first two are for stores that were not pushed to. Said again as they were, in the same order, they always work:
a worker that takes the place of a lost one runs the same script.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from reigen.compression import Codec, from_params
from reigen.errors import ArgumentError, ConfigError, MismatchError, ReigenError
from reigen.kv.protocol import RESULT_CODEC, CommandResult, MessageKind, RemoteError, StoreCommand
from reigen.kv.server.consensus import ConsensusStore, WorkerConsensus
from reigen.kv.server.requests import WorkerConnection, WorkerRequest
from reigen.kv.server.stalls import WaitingWorker
from reigen.optim import Optimizer, from_spec

_CONSENSUS_COMMANDS = {"set_optimizer": "the optimizer", "set_gradient_compression": "gradient compression"}


class StoreSettings:
    """Settings of one store.

    Attributes:
        optimizer: updates values; None: sums take their place.
        codec: decodes what workers push; None: it is not encoded.
        encoder: encodes sums of ``num_workers`` contributions for workers that take them so.
    """

    def __init__(self, store: ConsensusStore, num_workers: int) -> None:
        self._store = store
        self._num_workers = num_workers
        #: What each was set to, in order; and how many of them a connection has sent, or seen sent by others.
        self._agreed: dict[str, list[bytes]] = {name: [] for name in _CONSENSUS_COMMANDS}
        self._num_confirmed: WeakKeyDictionary[WorkerConnection, dict[str, int]] = WeakKeyDictionary()
        self._consensus = {name: WorkerConsensus(what, _describe) for name, what in _CONSENSUS_COMMANDS.items()}
        self.optimizer: Optimizer | None = None
        self.codec: Codec | None = None
        self.encoder: Codec | None = None

    def command(self, request: WorkerRequest, command: StoreCommand) -> None:
        """Carry out a COMMAND, which is answered now or later; its errors are for this worker alone."""
        match command.name:
            case "set_optimizer" | "set_gradient_compression":
                argument = command.arguments.get("spec" if command.name == "set_optimizer" else "params")
                if not isinstance(argument, dict):
                    raise ConfigError(f"{command.name} needs a dict of names and numbers, not {argument!r:.100}")
                self._agree(request, command.name, argument)
            case "set_learning_rate":
                self._set_learning_rate(command.arguments.get("learning_rate"))
                _answer_command(request, None)
            case "get_optimizer":
                _answer_command(request, None if self.optimizer is None else self.optimizer.to_spec())
            case _:
                names = ", ".join([*_CONSENSUS_COMMANDS, "set_learning_rate", "get_optimizer"])
                raise ArgumentError(f"servers know no command {command.name!r:.100}; there are {names}")

    def settle(self) -> None:
        """Decide again, since other workers are expected now."""
        for name in self._consensus:
            self._decide(name)

    def fail(self, problem: RemoteError) -> None:
        """Answer all that wait with an error."""
        for consensus in self._consensus.values():
            consensus.fail(problem)

    def expire(self, before: float) -> None:
        """Answer who has waited since ``before`` with an error that names the missing workers."""
        for consensus in self._consensus.values():
            consensus.expire(before, self._store.expected())

    def waiting(self) -> Iterator[WaitingWorker]:
        """Yield who waits for others to say the same."""
        for consensus in self._consensus.values():
            yield from consensus.waits(self._store.expected())

    def state(self) -> dict[str, Any]:
        """Return the settings for a snapshot."""
        spec = None if self.optimizer is None else self.optimizer.to_spec()
        return {"words": {name: list(proposals) for name, proposals in self._agreed.items()}, "optimizer": spec}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over the settings of `state`; raises ConfigError or ArgumentError if they make no sense."""
        for name, proposals in state["words"].items():
            self._agreed[str(name)] = [bytes(proposal) for proposal in proposals]
            if proposals:
                self._apply(name, msgspec.msgpack.decode(proposals[-1]))
        if state["optimizer"] is not None:
            self.optimizer = from_spec(state["optimizer"])

    def _agree(self, request: WorkerRequest, name: str, argument: dict[str, Any]) -> None:
        if name == "set_optimizer":  # an argument that makes no sense, before any worker waits because of it
            from_spec(argument)
        elif argument:
            from_params(argument)
        # the same bytes for equal arguments, whatever the order in which they were written
        proposal, agreed = msgspec.msgpack.encode(dict(sorted(argument.items()))), self._agreed[name]
        confirmed = self._num_confirmed.setdefault(request.connection, {})
        position = confirmed.get(name, 0)
        if proposal in agreed[position:] or proposal in agreed[-1:]:
            confirmed[name] = agreed.index(proposal, position) + 1 if proposal in agreed[position:] else position
            _answer_command(request, None)
            return
        if self._store.has_pushes():
            if not agreed:
                raise ArgumentError(f"{_CONSENSUS_COMMANDS[name]} can be set only before the first push")
            raise MismatchError(
                f"{_CONSENSUS_COMMANDS[name]} was set otherwise before the first push",
                ranks=[request.connection.worker],
                details={request.connection.worker: f"{_describe(proposal)}; before it was {_describe(agreed[-1])}"},
            )
        self._consensus[name].take(request, proposal)
        self._decide(name)

    def _decide(self, name: str) -> None:
        consensus = self._consensus[name]
        proposal = consensus.settle(self._store.expected()) if self._store.has_begun else None
        if proposal is None:
            return
        try:
            self._apply(name, msgspec.msgpack.decode(proposal))
        except ReigenError as error:
            consensus.fail(RemoteError.of(error))
            return
        self._agreed[name].append(proposal)
        self._store.must_save = True
        for request in consensus.pop_waiting():
            self._num_confirmed[request.connection][name] = len(self._agreed[name])
            _answer_command(request, None)

    def _apply(self, name: str, argument: dict[str, Any]) -> None:
        if name == "set_optimizer":
            self.optimizer = from_spec(argument)
            self._store.use(self.optimizer)
            return
        self.codec = from_params(argument) if argument else None
        self.encoder = None if self.codec is None else self.codec.for_sums(self._num_workers)

    def _set_learning_rate(self, rate: Any) -> None:
        if self.optimizer is None:
            raise ArgumentError("there is no optimizer whose learning rate could be set; call set_optimizer() before")
        if isinstance(rate, bool) or not isinstance(rate, int | float):
            raise ArgumentError(f"a learning rate is a number, not {rate!r:.100}")
        self.optimizer = self.optimizer.with_learning_rate(float(rate))
        self._store.must_save = True


def _describe(proposal: bytes) -> str:
    argument = msgspec.msgpack.decode(proposal)
    if not argument:
        return "none"
    facts = {name: value for name, value in argument.items() if value not in (None, [], {}) and name != "name"}
    return f"{argument.get('name', '')}({', '.join(f'{name}={value!r}' for name, value in facts.items())})"


def _answer_command(request: WorkerRequest, value: Any) -> None:
    request.connection.answer(request, MessageKind.DONE, RESULT_CODEC.encode(CommandResult(value)))
