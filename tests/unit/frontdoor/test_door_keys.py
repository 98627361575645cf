"""The front door with keys: who is let in, what they may, and what is told of it."""

import asyncio

import pytest
from client_side import Client
from door_world import World

from coordinator.core.errors import InvalidKey
from coordinator.frontdoor.headers import forwardable
from coordinator.security.keys import Key, Keyring, new_hash, split_hash
from coordinator.security.proxies import TrustedProxies

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","messages":[{"role":"user","content":"Hi"}]}'
GOOD = ["Authorization: Bearer the-key-of-team-a"]


def key(name="team-a", text="the-key-of-team-a", slot=0, **limits):
    return Key(slot, name, split_hash(new_hash(text))[1], **limits)


@pytest.fixture
def world():
    made = World()
    made.door.guard.take([key()])
    return made


async def test_with_the_key_a_request_is_served_and_accounted_to_it(world):
    made = await world.ask(CHAT, BODY, headers=GOOD)
    assert made.exchange.finished
    assert world.lines.records[0].key == "team-a"
    assert world.metrics.key_requests.snapshot() == {("team-a", "ok"): [1]}


async def test_the_key_does_not_travel_on_and_nothing_else_stays_behind(world):
    await world.ask(CHAT, BODY, headers=[*GOOD, "x-api-key: k", "api-key: k", "traceparent: 00-1"])
    assert world.dispatcher.requests[0].headers == ((b"traceparent", b"00-1"),)


@pytest.mark.parametrize("headers", [[], ["Authorization: Bearer wrong"], ["Cookie: the-key-of-team-a"]])
async def test_without_it_no_engine_hears_of_a_request(world, headers):
    made = await world.ask(CHAT, BODY, headers=headers)
    head = b"".join(made.writes)
    assert head.startswith(b"HTTP/1.1 401 ")
    assert b'"code":"invalid_api_key"' in head
    assert b'www-authenticate: Bearer realm="pd-coordinator"' in head
    assert not world.dispatcher.requests
    assert world.metrics.key_requests.snapshot() == {("-", "client_error"): [1]}
    assert world.lines.records[0].key == ""


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/health", "/v2/models/m/ready"])
async def test_probes_need_none(world, path):
    assert b"".join((await world.ask(path)).writes).startswith(b"HTTP/1.1 200 ")
    world.door.gate("GET", path, ())


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m", "/info", "/v2", "/v2/models/m", "/v2/models/m/config"])
async def test_other_answers_of_ours_need_one(world, path):
    assert b"".join((await world.ask(path)).writes).startswith(b"HTTP/1.1 401 ")
    assert b"".join((await world.ask(path, headers=GOOD)).writes).startswith(b"HTTP/1.1 200 ")


async def test_the_gate_refuses_before_a_body_is_there(world):
    with pytest.raises(InvalidKey):
        world.door.gate("POST", CHAT, ())
    world.door.gate("POST", CHAT, ((b"authorization", b"Bearer the-key-of-team-a"),))
    world.door.gate("POST", "/nowhere", ())  # a 404, in its turn
    world.door.gate("DELETE", CHAT, ())
    world.door.guard = World().door.guard
    world.door.gate("POST", CHAT, ())


@pytest.mark.parametrize("ending", ["answer", "error", "client leaves", "fault"])
async def test_a_place_is_given_back_however_a_request_ends(world, ending):
    world.door.guard.take([key(max_in_flight=1)])
    world.dispatcher.wait = asyncio.Event()
    _, task = world.start(CHAT, BODY, headers=GOOD)
    await asyncio.sleep(0)
    refused = await world.ask(CHAT, BODY, headers=GOOD)
    assert b"HTTP/1.1 429 " in refused.writes[0]
    assert b"retry-after: 1" in refused.writes[0]
    if ending == "client leaves":
        task.cancel()
        await asyncio.wait([task])
    else:
        world.dispatcher.error = {"answer": None, "error": InvalidKey("x"), "fault": RuntimeError("x")}[ending]
        world.dispatcher.wait.set()
        await task
    world.dispatcher.wait = world.dispatcher.error = None
    assert (await world.ask(CHAT, BODY, headers=GOOD)).writes[0].startswith(b"HTTP/1.1 200 ")
    assert world.metrics.key_requests.snapshot()["team-a", "rejected"] == [1]


async def test_a_bad_body_counts_and_gives_its_place_back(world):
    world.door.guard.take([key(max_in_flight=1)])
    for _ in range(3):
        made = await world.ask(CHAT, b"{", headers=GOOD)
        assert made.writes[0].startswith(b"HTTP/1.1 400 ")


def headers_of(*lines):
    return tuple((name.lower().encode(), value.encode()) for name, value in (line.split(": ") for line in lines))


async def ask_after_gate(world, between=None):
    """A request whose body comes after its head, with something in between."""
    made = Client(CHAT, BODY, headers=GOOD)
    made.exchange.kept = world.door.gate("POST", CHAT, made.exchange.headers)
    if between is not None:
        between()
    await world.door.handle(made.exchange)
    return made


async def test_what_the_gate_has_found_is_not_looked_for_again(world, monkeypatch):
    looked = []
    find = Keyring.find
    monkeypatch.setattr(Keyring, "find", lambda self, headers: (looked.append(headers), find(self, headers))[1])
    made = await ask_after_gate(world)
    assert made.status == 200
    assert looked == [made.exchange.headers]


@pytest.mark.parametrize(
    ("keys", "status"),
    [
        ([key("team-b", "the-key-of-team-b")], 401),
        ([key("team-a", "another-key-of-team-a")], 401),
        ([], 401),
        ([key("team-a-as-well")], 200),
        (None, 200),
    ],
)
async def test_keys_that_are_exchanged_between_head_and_body_count(world, keys, status):
    made = await ask_after_gate(world, lambda: world.door.guard.take(keys))
    assert made.status == status
    assert world.lines.records[0].key == (keys[0].name if keys and status == 200 else "")


@pytest.mark.parametrize("headers", [(), headers_of(*GOOD, "Authorization: Bearer x"), headers_of("api-key: wrong")])
def test_the_gate_lets_pass_what_needs_no_key_whatever_it_carries(world, headers):
    assert world.door.gate("GET", "/v2/health/ready", headers) is None
    assert world.door.gate("POST", "/nowhere", headers) is None
    with pytest.raises(InvalidKey):
        world.door.gate("POST", CHAT, headers)


async def test_keys_that_are_exchanged_count_at_once(world):
    world.door.guard.take([key("team-b", "the-key-of-team-b")])
    assert (await world.ask(CHAT, BODY, headers=GOOD)).writes[0].startswith(b"HTTP/1.1 401 ")
    world.door.guard.take([])
    assert (await world.ask(CHAT, BODY, headers=GOOD)).writes[0].startswith(b"HTTP/1.1 401 ")
    world.door.guard.take(None)
    assert (await world.ask(CHAT, BODY)).writes[0].startswith(b"HTTP/1.1 200 ")


async def test_the_address_in_the_log_is_what_trusted_proxies_say(world):
    headers = [*GOOD, "X-Forwarded-For: 203.0.113.5"]
    await world.ask(CHAT, BODY, headers=headers)
    world.door.proxies = TrustedProxies(["10.9.8.0/24"])
    await world.ask(CHAT, BODY, headers=headers)
    assert [record.client for record in world.lines.records] == ["10.9.8.7", "203.0.113.5"]


@pytest.mark.parametrize("name", [b"x-forwarded-for", b"x-forwarded-host", b"forwarded", b"x-real-ip"])
def test_what_a_client_says_of_its_address_reaches_no_engine(name):
    assert forwardable(((name, b"127.0.0.1"), (b"accept", b"*/*"))) == ((b"accept", b"*/*"),)


def test_a_client_of_the_tests_is_not_trusted_by_chance():
    assert Client().exchange.peer == "10.9.8.7"
