import sys
from pathlib import Path

import pytest
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from patient_loop import PatientLoop


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(config, item):
    """Engines and their callers are in one process here: none is to be late because the process stood still.

    What a loop's own objects keep alive differs from one to the other; uvloop is what runs in production.
    """
    if "failures_leave_no_cycles" in item.nodeid:
        return {"asyncio": PatientLoop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": PatientLoop}
