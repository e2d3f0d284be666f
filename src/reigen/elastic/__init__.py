"""Elastic jobs as users see them: a state that is saved, restored and synchronized, and `run`, which begins again.

Frameworks add states of their own: `reigen.torch.elastic`, `reigen.keras.elastic`, `reigen.tensorflow.elastic`.
"""

from reigen.elastic.loop import run, run_fn
from reigen.elastic.membership import leave
from reigen.elastic.state import Departure, HostUpdateResult, ObjectState, State
from reigen.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "Departure",
    "HorovodInternalError",
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "leave",
    "run",
    "run_fn",
]
