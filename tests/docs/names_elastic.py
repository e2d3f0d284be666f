"""An elastic job that a rank has left, for docs/elastic-tutorial.md."""

from __future__ import annotations

from typing import Any

import numpy as np

import reigen as hvd
from reigen.elastic import ObjectState


def given_history() -> dict[str, Any]:
    hvd.init()
    state = ObjectState(hvd.broadcast_object, hvd.rank, step=0)

    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        while hvd.size() == 2:
            hvd.allreduce(np.ones(1))
            state.step += 1
            if hvd.rank() == 1 and state.step == 3:
                hvd.elastic.leave()
            state.commit()

    train(state)
    return {"hvd": hvd}


def check_history(names: dict[str, Any]) -> None:
    assert names["history"].num_changes == 1
    assert names["history"].num_reruns == 0
    assert "left" in names["history"].changes[-1].describe()
