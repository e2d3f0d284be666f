"""A program whose state can be copied, and cannot be sent to others."""

from __future__ import annotations

from typing import Any

import reigen as hvd
from reigen.elastic import ObjectState, run


class Connection:
    """An object of a library that can be copied here, and means nothing to another process."""

    def __deepcopy__(self, _: Any) -> Connection:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a connection cannot be pickled")


@run
def train(_: ObjectState) -> None:
    raise AssertionError("the state cannot be synchronized")


hvd.init()
train(ObjectState(hvd.broadcast_object, hvd.rank, step=0, connection=Connection()))
