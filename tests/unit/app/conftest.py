import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from held_ports import HeldPorts


@pytest.fixture
def free_port():
    """Gives a port that is free, and that nobody else gets before the test is over."""
    with HeldPorts() as ports:
        yield ports.take
