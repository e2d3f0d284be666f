"""Connections that must not live on in forked children.

A peer learns of a process's death when the kernel closes its connections. A child that was forked (a DataLoader's
worker, say) has them, too, and would keep them open after that death. So a child gives them up first of all.
"""

from __future__ import annotations

import functools
import os
import weakref
from typing import Protocol


class DescriptorOwner(Protocol):
    """Object with descriptors."""

    def close_descriptors(self) -> None:
        """Give up this process's copies, and do nothing else: threads that used them are in another process."""


#: Owners of descriptors that every forked child closes. Weak references: they keep no owner alive.
_owners: weakref.WeakSet[DescriptorOwner] = weakref.WeakSet()


def close_in_children(owner: DescriptorOwner) -> None:
    """Have forked children close the descriptors of ``owner``, for as long as it exists here."""
    _register_fork_hook()
    _owners.add(owner)


@functools.cache
def _register_fork_hook() -> None:
    os.register_at_fork(after_in_child=_close_after_fork)


def _close_after_fork() -> None:
    for owner in list(_owners):
        owner.close_descriptors()
    _owners.clear()
