"""A stand-in for a member of an elastic job: it knows the launcher's side of one, and only how to tell of views.

A directory is its argument. A file ``SLOT.INCARNATION`` appears there when it runs; it does what is in ``do``,
``do.SLOT`` or ``do.SLOT.INCARNATION``, a line each: ``finish``, ``exit CODE``, ``die``, or
``view EPOCH SLOT.INCARNATION ...``, and the file ``view.EPOCH`` appears.
"""

import os
import signal
import sys
import threading
from pathlib import Path

import msgspec

from reigen.cluster.membership.rendezvous import RendezvousClient
from reigen.cluster.membership.views.record import StepBase, View, ViewHost, ViewMember

_directory = Path(sys.argv[1])
_slot, _incarnation = os.environ["REIGEN_SLOT"], os.environ["REIGEN_INCARNATION"]
_secret = bytes.fromhex(os.environ["REIGEN_SECRET"])
_pause = threading.Event()


def put(key: str, value: bytes) -> None:
    client = RendezvousClient(os.environ["REIGEN_RENDEZVOUS"], _secret, int(_slot), 30.0)
    client.put(key, value)
    client.close()


def announce(epoch: int, names: list[str]) -> None:
    members = tuple(ViewMember(*map(int, name.split(".")), 1) for name in names)
    view = View.make(epoch, [ViewHost("h", 1, "127.0.0.1", members)], base=StepBase(), sizes=(1, 1024))
    put("elastic/view", msgspec.msgpack.encode(view))


def main() -> int:
    names = ("REIGEN_RANK", "REIGEN_ELASTIC_CANDIDATE", "HOROVOD_HOSTNAME", "HOROVOD_LOCAL_RANK", "FAKE_HOST")
    text = " ".join(os.environ.get(name, "-") for name in names)
    os.fstat(int(os.environ["REIGEN_VOTER_FD"]))
    (_directory / f"{_slot}.{_incarnation}.new").write_text(f"{os.getpid()} {text}")
    (_directory / f"{_slot}.{_incarnation}.new").rename(_directory / f"{_slot}.{_incarnation}")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    done = set()
    while True:
        for file in (_directory / f"do.{_slot}.{_incarnation}", _directory / f"do.{_slot}", _directory / "do"):
            if file.exists() and (orders := file.read_text()).endswith("\n"):
                for number, order in enumerate(orders.splitlines()):
                    if (file, number) not in done:
                        done.add((file, number))
                        word, *rest = order.split()
                        if word == "finish":
                            put("elastic/finished", _slot.encode())
                            return int(rest[0]) if rest else 0
                        if word == "exit":
                            return int(rest[0])
                        if word == "die":
                            os.kill(os.getpid(), signal.SIGKILL)
                        if word == "view":
                            announce(int(rest[0]), rest[1:])
                            (_directory / f"view.{rest[0]}").touch()
        _pause.wait(0.02)


if __name__ == "__main__":
    sys.exit(main())
