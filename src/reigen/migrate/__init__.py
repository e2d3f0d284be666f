"""`reigen migrate`: reads a project that uses Horovod, torch.distributed or MXNet's KVStore, and runs nothing of it.

Everything is decided on the text and its syntax tree (`ast`, with positions), and edits are replacements of ranges of
that text: formatting and comments stay. The names and parameters that Reigen has are read of its own source.
"""

from reigen.migrate.project import FileReport, Migration, analyse

__all__ = ["FileReport", "Migration", "analyse"]
