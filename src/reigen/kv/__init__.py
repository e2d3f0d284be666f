"""Parameter server: a store of keys and values that workers share, on servers that a scheduler brings together.

What a store is stands in `reigen.kv.store`.
"""

from reigen.kv.factory import create
from reigen.kv.store import KVStore, Pending
from reigen.kv.values import RowSparse

__all__ = ["KVStore", "Pending", "RowSparse", "create"]
