"""`log`: dictionaries from ranks to the ``callbacks`` of the driver, as in Horovod's ``horovod.ray.ray_logger``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def log(info_dict: Mapping[str, Any]) -> None:
    """Send a dictionary to the callbacks of the `run` or `execute` that this rank is in.

    Args:
        info_dict: what can be pickled.

    Raises:
        RuntimeError: this process is no rank of a job on Ray.
    """
    from reigen.runner.notes import send_note

    send_note(dict(info_dict))
