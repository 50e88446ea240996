"""``python -m dcp_placements``: the command line."""

import sys

from dcp_placements.cli import main

sys.exit(main())
