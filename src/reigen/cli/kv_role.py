"""Common part of `reigen server` and `reigen scheduler`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Literal

from reigen.config import load_config
from reigen.errors import ConfigError
from reigen.kv.run_role import run_role

_EPILOG = """\
The environment says which job this is. If you start processes yourself, set the same for all of them:
  DMLC_PS_ROOT_URI   name or address of the host where the scheduler runs
  DMLC_PS_ROOT_PORT  the port at which it listens
  DMLC_NUM_WORKER    how many workers there are
  DMLC_NUM_SERVER    how many servers there are
  REIGEN_SECRET      64 hexadecimal digits, or REIGEN_SECRET_FILE, a file that holds them (mode 0600);
                     not needed where all processes are on one host
and for workers DMLC_ROLE=worker. DMLC_TASK_ID numbers workers, and servers, from 0. PS_VERBOSE=1 shows who
comes and goes. `reigen run -s` sets all that, and starts all processes, itself."""


_DESCRIPTIONS = {
    "server": "A parameter server holds values that workers push to and pull from.",
    "scheduler": "The scheduler tells workers and servers where they are, and who of them is lost.",
}


def serve_role(role: Literal["server", "scheduler"], arguments: Sequence[str]) -> int:
    """Serve until the job is over; returns the exit code: 2 where the environment is not in order, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog=f"reigen {role}",
        description=_DESCRIPTIONS[role],
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.parse_args(arguments)
    try:
        return run_role(os.environ, load_config(os.environ), role)
    except ConfigError as error:
        print(f"reigen {role}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
