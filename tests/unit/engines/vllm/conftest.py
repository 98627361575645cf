import pytest
from vllm_pair import World


@pytest.fixture
async def world():
    world = await World().start()
    yield world
    await world.aclose()
