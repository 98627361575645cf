import logging

from coordinator.engines.vllm.missing import QUIET_S, MissingKv


async def test_each_is_counted_and_a_minutes_worth_is_told_at_once(world, caplog):
    caplog.set_level(logging.INFO, "test.vllm")
    now = [1000.0]
    counted = []
    missing = MissingKv(world.log, lambda: counted.append(1), clock=lambda: now[0])
    for _ in range(5):
        missing.returned_none(world.prefill)
        missing.never_asked(world.decode)
    assert len(counted) == 10
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    now[0] += QUIET_S
    missing.returned_none(world.prefill)
    assert "(5 times since last told)" in caplog.records[-1].getMessage()
    missing.returned_none(world.other)  # another instance is told apart
    assert "d1" in caplog.records[-1].getMessage()
    assert len(caplog.records) == 4
