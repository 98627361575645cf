import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from patient_loop import PatientLoop


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(config, item):
    """Instances and their callers are in one process here: none is to be late because the process stood still."""
    return {"patient": PatientLoop}
