"""What tests of the pages borrow: a front door without sockets."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
for folder in ("support", "unit/frontdoor"):
    sys.path.insert(0, str(TESTS / folder))
