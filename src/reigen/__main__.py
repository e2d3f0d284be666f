"""``python -m reigen``: the command line."""

import sys

from reigen.cli.main import main

sys.exit(main())
