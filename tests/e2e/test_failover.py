"""An instance dies without a word during traffic, and comes back."""

import pytest
from clusters import FAST
from dialects import BY_NAME
from raw_client import eventually
from traffic import Traffic

pytestmark = pytest.mark.xdist_group("failover")
WHOLE = tuple(BY_NAME[name] for name in ("chat", "tgi", "triton-infer"))
STREAMS = tuple(BY_NAME[name] for name in ("chat-stream", "mindie-stream"))
# slow enough that requests are always under way on it
VICTIM = ("--prefill-ms", "50", "--decode-ms", "5", "--prefill-lanes", "4")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_killed_instance_is_worked_around_and_used_again(start, role: str):
    others = ["prefill", "decode", "decode" if role == "prefill" else "prefill"]
    fleet = start.fleet([{"role": other, "timing": FAST} for other in others])
    victim = start.instance(role, *VICTIM)
    cluster = start.in_front_of([*fleet.instances, victim])
    coordinator = cluster.coordinator
    name = f"{role[0]}1"
    await eventually(lambda: coordinator.states()[name] == "ready", f"{name} is ready")

    whole, streams = Traffic(cluster.port, WHOLE, clients=5), Traffic(cluster.port, STREAMS, clients=5)
    async with whole, streams:
        await whole.more(20)
        await streams.more(20)
        assert victim.state()["requests"] > 0
        victim.kill()
        await eventually(lambda: coordinator.states()[name] != "ready", f"{name} is out")
        await whole.more(30)
        await streams.more(30)
        back = start.again(victim)
        await eventually(lambda: coordinator.states()[name] == "ready", f"{name} is back")
        await eventually(lambda: busy(back, role), f"{name} gets work again")

    assert whole.counts.keys() == {"whole"}, (whole.counts, whole.notes)
    assert streams.counts.keys() <= {"whole", "broken"}, (streams.counts, streams.notes)
    assert streams.counts["broken"] <= 5  # those that were under way
    cluster.wait_idle()
    assert coordinator.metric("pd_coordinator_engine_failures_total", instance=name) > 0


def busy(instance, role: str) -> int:
    """Work that it was given."""
    return instance.state()["inference_requests" if role == "prefill" else "accepted"]


LONG_COOL_DOWN = {"interval_s": 60, "timeout_s": 20, "fail_after": 3, "recover_after": 1}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("guilty", "fault"), [("p1", "stale_params"), ("d1", "status=500")])
async def test_of_a_pair_the_one_that_is_broken_is_found(start, guilty, fault, workers):
    """A vLLM prefill whose KV nobody can read, and a decode that fails: the failure looks the same."""
    roles = ("prefill", "prefill", "decode", "decode")
    fleet = start.fleet([{"role": role, "engine": "vllm", "timing": FAST} for role in roles])
    names = dict(zip(("p0", "p1", "d0", "d1"), fleet.instances, strict=True))
    names[guilty].fault(fault)
    server = {"port": 0, "management_port": 0, "workers": workers}
    cluster = start.in_front_of(
        list(fleet.instances), each={"engine": "vllm"}, health=LONG_COOL_DOWN, retry={"max_attempts": 3}, server=server
    )
    coordinator = cluster.coordinator
    await eventually(lambda: set(coordinator.states().values()) == {"ready"}, "all are ready")
    async with Traffic(cluster.port, (BY_NAME["chat"], BY_NAME["chat-stream"]), clients=6) as traffic:
        await traffic.more(300)
        states = coordinator.states()
    assert traffic.counts.keys() == {"whole"}, (traffic.counts, traffic.notes)
    attempts = coordinator.metric("pd_coordinator_attempts_total")
    again = attempts - coordinator.metric("pd_coordinator_attempts_total", reason="first")
    assert 0 < again < 0.1 * attempts, again
    assert states == {name: "suspect" if name == guilty else "ready" for name in names}
    assert [line for line in coordinator.log().splitlines() if " is suspect" in line and "instance p0" in line] == []
