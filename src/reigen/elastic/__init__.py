"""Elastic jobs as users see them: a state that is saved, restored and synchronized, and `run`, which begins again.

Frameworks add states of their own: `reigen.torch.elastic`, `reigen.keras.elastic`, `reigen.tensorflow.elastic`.
"""

from reigen.elastic.loop import run, run_fn
from reigen.elastic.state import HostUpdateResult, ObjectState, State
from reigen.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "HorovodInternalError",
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "run",
    "run_fn",
]
