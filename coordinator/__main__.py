"""`python -m coordinator`: the same as the command `pd-coordinator`."""

import sys

from coordinator.cli import main

sys.exit(main())
