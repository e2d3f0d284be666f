"""Which cases of the launchers' conformance suite a test of one launcher may leave to others."""

from __future__ import annotations

import os
from collections.abc import Mapping

#: What happens between ranks, agents and the supervisor once agents are there, however they were started: the local
#: launcher, ssh, and the launcher of somebody else pass these cases. REIGEN_TEST_ALL_CASES=1: all launchers.
SAME_FOR_ALL_AGENTS: Mapping[str, str] = (
    {}
    if os.environ.get("REIGEN_TEST_ALL_CASES") == "1"
    else dict.fromkeys(
        (
            *("all_ranks", "directory", "streams", "prefixes", "first_failure", "killed_rank", "stubborn_rank"),
            *("unauthenticated_connections", "missing_program"),
        ),
        "it is the same for all launchers with agents",
    )
)
