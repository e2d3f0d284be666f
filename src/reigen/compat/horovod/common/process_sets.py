"""Names of ``horovod.common.process_sets``."""

from reigen.api.process_sets import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    remove_process_set,
)

__all__ = ["ProcessSet", "add_process_set", "get_process_set_ids_and_ranks", "global_process_set", "remove_process_set"]
