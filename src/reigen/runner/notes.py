"""Notes: values that a function sends to the driver of its job while it runs."""

from __future__ import annotations

import os
from collections.abc import Callable

from reigen.runner.serialization import pack_object

#: Sends the payload of a note, its descriptor, to the driver; None: this process has none.
_send: Callable[[int], object] | None = None


def send_note(value: object) -> None:
    """Send a value from a function that an engine's job runs to its ``on_note``, in the driver. From any thread.

    Raises:
        RuntimeError: this process is no rank of such a job.
        UnsupportedTypeError: the value cannot be pickled.
    """
    send = _send
    if send is None:
        raise RuntimeError("notes can be sent only by functions that Reigen has started on an engine")
    payload = pack_object(value, "the note")
    try:
        send(payload)
    finally:
        os.close(payload)


def send_notes_by(send: Callable[[int], object] | None) -> None:
    """Have notes sent by this function, which gets their payload, its descriptor; None: by none."""
    global _send  # noqa: PLW0603  what `send_note` finds
    _send = send
