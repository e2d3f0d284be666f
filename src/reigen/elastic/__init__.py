"""Elastic jobs as users see them: a state that is saved, restored and synchronized, and `run`, which begins again.

Frameworks add states of their own: `reigen.torch.elastic`, `reigen.keras.elastic`, `reigen.tensorflow.elastic`.
"""

from reigen.cluster.membership.views.history import ElasticHistory, ViewChange
from reigen.elastic.cursor import Cursor
from reigen.elastic.frameworks import Job
from reigen.elastic.loop import run, run_fn
from reigen.elastic.membership import history, leave
from reigen.elastic.state import Departure, HostUpdateResult, ObjectState, State
from reigen.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "Cursor",
    "Departure",
    "ElasticHistory",
    "HorovodInternalError",
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "Job",
    "ObjectState",
    "State",
    "ViewChange",
    "history",
    "leave",
    "run",
    "run_fn",
]
