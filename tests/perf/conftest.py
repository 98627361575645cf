import gc
from collections.abc import Iterator

import pytest

from coordinator.parts import settle_memory


@pytest.fixture(scope="module")
def collector() -> Iterator[None]:
    """The collector looks as seldom as in a coordinator, and not at what the tests have gathered."""
    thresholds = gc.get_threshold()
    settle_memory()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)
