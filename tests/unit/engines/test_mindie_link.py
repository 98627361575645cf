"""The standing result stream of a decode instance, over real sockets (MindIE protocol page §5)."""

import asyncio
import types

import pytest
from engine_world import GUARD_S, Out, Placed, Watcher, context, count, instance, turns, until
from fake_instances import FakeDecode, frame

from coordinator.core.errors import EngineFailed, InternalError
from coordinator.core.ports import Completed
from coordinator.engines.mindie import link as link_module
from coordinator.engines.mindie.envelope import FirstToken
from coordinator.engines.mindie.link import DecodeLink, LinkSettings
from coordinator.engines.mindie.mailbox import Mailbox

QUICK = LinkSettings(first_pause_s=0.002, longest_pause_s=0.01, evicted_pause_s=30.0, head_s=GUARD_S)
EVICTION = b"reqId:0xffffffffffffffff\0close:new connection is to established, close the old one.\0"

WAYS = {
    "reset": lambda decode: decode.link.rst(),
    "closed": lambda decode: decode.link.fin(),
    "ended": lambda decode: decode.link.end(),
    "broken framing": lambda decode: decode.link.send(b"zzz\r\n"),
}


class Case:
    """A decode instance and the link to it."""

    def __init__(self, decode):
        self.decode = decode
        self.watcher = Watcher()
        self.late = 0
        self.reopened = 0
        self.given = context()
        self.link = None
        self.boxes = []

    async def open(self, settings=QUICK, *, wait=True):
        self.link = DecodeLink(
            instance("d0", self.decode.address),
            self.watcher,
            settings,
            self.given,
            on_late=self._late,
            on_reopened=self._reopened,
        )
        if wait:
            await until(lambda: self.watcher.up)
        return self

    def _late(self):
        self.late += 1

    def _reopened(self):
        self.reopened += 1

    def register(self, wire_id, *, stream=True, prefilled=True):
        """A registered request whose prefill has answered; returns its box and its sink."""
        out = Out("tgi")
        box = Mailbox(wire_id, "d0", out, Placed(instance("p0"), instance("d0")), stream=stream)
        scope = self.link.boxes.registered(wire_id.encode(), box)
        scope.__enter__()
        if prefilled:
            box.prefilled(FirstToken(b"", last=False), 0.0)
        self.boxes.append(scope)
        return box, out

    async def lost(self, box):
        async with asyncio.timeout(GUARD_S):
            with pytest.raises(EngineFailed) as caught:
                await box.done
        return caught.value

    async def aclose(self):
        if self.link is not None:
            await self.link.aclose()
        await self.given.client.aclose()


@pytest.fixture
async def decode():
    fake = await FakeDecode().listen()
    yield fake
    await fake.aclose()


@pytest.fixture
async def case(decode):
    case = Case(decode)
    yield case
    await case.aclose()


async def test_one_get_without_a_body_opens_it(case, decode):
    await case.open()
    assert case.link.up
    call = decode.links[0]
    assert (call.method, call.target, call.body) == ("GET", "/dresult", b"")
    assert call.header("user-agent") == "Coordinator/1.0"
    assert call.header("req-id") is None
    assert case.watcher.told == ["linked"]
    await turns(20)
    assert len(decode.links) == 1


async def test_messages_find_their_requests(case, decode):
    await case.open()
    (_, one), (_, two) = case.register("1"), case.register("2")
    decode.link.send(
        b"".join(
            b"%x\r\n%b\r\n" % (len(data), data)
            for data in (
                frame("1", "data", b"a"),
                frame("2", "data", b"b"),
                b"ka:heartbeat\0",
                frame("1", "data", b"c"),
            )
        )
    )
    await until(lambda: one.body == b"ac")
    assert two.body == b"b"


async def test_split_at_every_byte(case, decode):
    await case.open()
    box, out = case.register("1")
    raw = b""
    for word in ("data", "lastData"):
        message = frame("1", word, 'data: {"t":"你:好"}\n\n'.encode())
        raw += b"%x\r\n%b\r\n" % (len(message), message)
    for at in range(len(raw)):
        decode.link.send(raw[at : at + 1])
        await asyncio.sleep(0)
    async with asyncio.timeout(GUARD_S):
        assert await box.done == Completed()
    assert out.body == 'data: {"t":"你:好"}\n\n'.encode() * 2


async def test_unknown_ids_are_counted_and_dropped(case, decode):
    """Before, between and after the live request's messages."""
    await case.open()
    box, out = case.register("1")
    for wire_id, body in (("9", b"x"), ("1", b"a"), ("8", b"x"), ("1", b"b"), ("7", b"x")):
        decode.say(wire_id, "data", body)
    decode.say("1", "lastData", b"c")
    decode.say("9", "error", b"x")
    await until(lambda: box.settled and case.late == 4)
    assert out.body == b"abc"


async def test_a_late_done_mark_is_no_late_message(case, decode):
    """It follows each OpenAI stream (protocol page §5.5)."""
    await case.open()
    decode.say("9", "lastData", b"data: [DONE]\n\n")
    box, _ = case.register("1")
    decode.say("1", "lastData", b"x")
    await until(lambda: box.settled)
    assert case.late == 0


async def test_after_the_block_messages_are_late(case, decode):
    await case.open()
    _, out = case.register("1")
    case.boxes[0].__exit__(None, None, None)
    decode.say("1", "data", b"x")
    await until(lambda: case.late == 1)
    assert out.events == []


async def test_a_second_request_under_the_same_id_is_not_unregistered_by_the_first(case, decode):
    """A recompute goes on under its id."""
    await case.open()
    case.register("1")
    _, out = case.register("1")
    case.boxes[0].__exit__(None, None, None)
    decode.say("1", "data", b"x")
    await until(lambda: out.body == b"x")
    assert case.late == 0


async def test_ids_and_bodies_that_look_like_framing(case, decode):
    await case.open()
    box, out = case.register("1")
    decode.say("1", "data", b':reqs:data:{"text":["a"]}\0')
    decode.say("1", "lastData", b"end")
    await until(lambda: box.settled)
    assert out.body == b':reqs:data:{"text":["a"]}\0end'


async def test_an_oversized_message_fails_its_request_alone(case, decode):
    await case.open(LinkSettings(max_message_bytes=10_000))
    big, big_out = case.register("1")
    other, other_out = case.register("2")
    decode.say("2", "data", b"a")
    decode.say("1", "data", b"x" * 50_000)
    decode.say("2", "lastData", b"b")
    assert (await case.lost(big)).reason == "message_too_large"
    await until(lambda: other.settled)
    assert (big_out.body, other_out.body) == (b"", b"ab")
    assert (len(decode.links), case.watcher.told) == (1, ["linked"])


@pytest.mark.parametrize("kind", ["data", "lastData", "error", "retry"])
async def test_a_message_without_an_id_ends_what_it_may_have_been_for(case, decode, kind):
    """Nobody knows whose piece it was: a stream that went on would have a hole and pass for a whole one."""
    await case.open()
    streaming, out = case.register("1")
    unary, unary_out = case.register("2", stream=False)
    decode.say("1", "data", b"a")
    await until(lambda: out.started)
    decode.link.chunk(b"%b:b\0" % kind.encode())
    error = await case.lost(streaming)
    assert (error.reason, error.instance_id) == ("bad_reply", "d0")
    assert f"({kind}) came without the id" in error.detail
    if kind == "data":
        decode.say("2", "lastData", b"{}")
        await until(lambda: unary.settled)
        assert unary_out.body == b"{}"
    else:
        assert (await case.lost(unary)).reason == "bad_reply"
    assert out.body == b"a"
    assert (len(decode.links), case.watcher.told, case.late) == (1, ["linked"], 0)


async def test_what_says_nothing_of_an_answer_may_lack_an_id(case, decode):
    await case.open()
    box, out = case.register("1")
    for said in (b"ka:heartbeat\0", b"mystery:x\0", b"no colon\0", b"lastData:data: [DONE]\n\n\0"):
        decode.link.chunk(said)
    decode.say("1", "lastData", b"end")
    await until(lambda: box.settled)
    assert (await box.done, out.body) == (Completed(), b"end")


async def test_a_slow_request_does_not_hold_up_the_stream(case, decode):
    """Two megabytes for a request that waits for its prefill, one token for another."""
    await case.open()
    case.register("1", prefilled=False)
    box, out = case.register("2")
    decode.say("1", "data", b"x" * (2 << 20))
    decode.say("2", "lastData", b"b")
    await until(lambda: box.settled)
    assert out.body == b"b"


class TestLoss:
    @pytest.mark.parametrize("way", WAYS)
    async def test_requests_fail_at_once_and_it_is_opened_again(self, case, decode, way):
        await case.open()
        (streaming, out), (unary, _), (held, _) = (
            case.register("1"), case.register("2", stream=False), case.register("3", prefilled=False),
        )  # fmt: skip
        decode.say("1", "data", b"a")
        await until(lambda: out.started)
        WAYS[way](decode)
        for box in (streaming, unary, held):
            error = await case.lost(box)
            assert (error.reason, error.instance_id, error.connecting) == ("link_lost", "d0", False)
        assert out.body == b"a"
        await until(lambda: len(decode.links) == 2 and case.watcher.up)
        assert case.watcher.told[0] == case.watcher.told[-1] == "linked"
        assert len(case.watcher.told) == 3
        assert case.reopened == 1

    async def test_messages_before_the_end_in_the_same_packet_count(self, case, decode):
        await case.open()
        box, out = case.register("1")
        message = frame("1", "lastData", b"whole")
        decode.link.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(message), message))
        async with asyncio.timeout(GUARD_S):
            assert await box.done == Completed()
        assert out.body == b"whole"
        await until(lambda: len(decode.links) == 2)

    async def test_the_next_stream_starts_with_a_clean_parser(self, case, decode):
        await case.open()
        case.register("1")
        half = frame("1", "data", b"x" * 100)
        decode.link.send(b"%x\r\n%b" % (len(half), half[:50]))
        await turns()
        decode.link.rst()
        await until(lambda: len(decode.links) == 2 and case.watcher.up)
        box, out = case.register("2")
        decode.say("2", "lastData", b"fresh")
        await until(lambda: box.settled)
        assert out.body == b"fresh"

    async def test_at_any_time_one_stream_only(self, case, decode):
        await case.open()
        for _ in range(5):
            decode.link.rst()
            before = len(decode.links)
            await until(lambda before=before: len(decode.links) > before and case.watcher.up)
            assert len(decode.peers) == 1

    async def test_silence_is_a_loss(self, case, decode):
        await case.open(LinkSettings(silence_s=0.05, first_pause_s=0.002))
        box, _ = case.register("1")
        error = await case.lost(box)
        assert error.detail == "silent for 0.05 s"
        await until(lambda: len(decode.links) >= 2)
        await until(lambda: len(decode.peers) <= 1)  # it sees the end of the one before in its own time

    async def test_any_byte_counts_and_the_wait_starts_from_the_last_one(self, case, decode, monkeypatch):
        """Heartbeats every 5 to 6 s keep the stream; 30 s after the last byte it is given up."""
        clock = types.SimpleNamespace(now_s=100.0)
        waits, beats = [], [b"d\r\nka:heartbeat\0\r\n", b"d\r\nka:he"]

        async def wait(tasks, timeout=None):  # noqa: ASYNC109
            if timeout is None:
                return await asyncio.wait(tasks)
            waits.append(timeout)
            if beats:
                clock.now_s += 20.0
                case.link.feed(beats.pop(0), clock.now_s)
                clock.now_s += timeout - 20.0
            else:
                clock.now_s += timeout
            return await asyncio.wait(tasks, timeout=0)

        monkeypatch.setattr(link_module, "asyncio", types.SimpleNamespace(**{**vars(asyncio), "wait": wait}))
        monkeypatch.setattr(link_module, "time", types.SimpleNamespace(monotonic=lambda: clock.now_s))
        await case.open(LinkSettings(silence_s=30.0), wait=False)
        await until(lambda: len(case.watcher.told) >= 2)
        assert case.watcher.told[:2] == ["linked", "silent for 30 s"]
        assert waits[:3] == [30.0, 20.0, 30.0]


class TestOpening:
    async def test_refusals_are_told_and_it_comes_up_in_the_end(self, case, decode):
        """The instance is no decode one yet (protocol page §5.1)."""
        opening = decode.opening

        async def refuse(call):
            if len(decode.links) <= 3:
                call.reply(b'{"message":"Only the Decode node supports dresult but you send to none"}', 400)
            else:
                await opening(call)

        decode.opening = refuse
        await case.open()
        assert len(decode.links) == 4
        assert len(case.watcher.told) == 4
        assert "status 400" in case.watcher.told[0]
        assert case.reopened == 0  # it never was open before

    async def test_pauses_grow_to_a_bound_and_start_anew_after_a_success(self, case, decode, monkeypatch):
        pauses = []

        async def sleep(seconds):
            pauses.append(seconds)
            await asyncio.sleep(0)

        monkeypatch.setattr(link_module, "asyncio", types.SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
        monkeypatch.setattr(link_module, "random", types.SimpleNamespace(uniform=lambda low, high: (low + high) / 2))
        opening = decode.opening

        async def refuse(call):
            if len(decode.links) in (1, 2, 3, 4, 5, 6, 8):
                call.reply(b"", 503)
            else:
                await opening(call)

        decode.opening = refuse
        await case.open(LinkSettings(first_pause_s=0.1, longest_pause_s=2.0))
        assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
        decode.link.rst()
        await until(lambda: len(decode.links) == 9 and case.watcher.up)
        assert pauses[6:] == [0.1, 0.2]
        assert sum(pauses[:4]) > 1.0  # E15: far from ten tries in five seconds

    async def test_pauses_are_spread(self, case, decode, monkeypatch):
        pauses = []

        async def sleep(seconds):
            pauses.append(seconds)
            await asyncio.sleep(0)

        async def refuse(call):
            call.reply(b"", 503)

        monkeypatch.setattr(link_module, "asyncio", types.SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
        decode.opening = refuse
        await case.open(LinkSettings(first_pause_s=1.0, longest_pause_s=1.0), wait=False)
        await until(lambda: len(pauses) >= 30)
        assert all(0.75 <= pause <= 1.25 for pause in pauses)
        assert len(set(pauses)) > 10

    async def test_a_port_that_refuses(self, case, decode):
        await decode.refuse()
        await case.open(wait=False)
        await until(lambda: len(case.watcher.told) >= 3)
        assert not case.link.up
        assert all("connect_refused" in told for told in case.watcher.told)

    async def test_no_answer_in_time(self, case, decode):
        async def mute(call):
            await call.left()

        decode.opening = mute
        await case.open(LinkSettings(head_s=0.02, first_pause_s=0.002), wait=False)
        await until(lambda: len(case.watcher.told) >= 2)
        assert all("timeout" in told for told in case.watcher.told)
        await until(lambda: len(decode.peers) <= 1)  # it sees the end of the one before in its own time


class TestEviction:
    async def test_it_is_not_fought_over(self, case, decode):
        """Another coordinator has opened the stream: taking it back at once would never end."""
        await case.open()
        box, _ = case.register("1")
        decode.link.chunk(EVICTION)
        decode.link.end()
        assert "another coordinator" in (await case.lost(box)).detail
        await asyncio.sleep(0.05)  # twenty times the pause after any other loss
        assert len(decode.links) == 1
        assert not case.link.up
        assert case.late == 0

    async def test_after_a_long_pause_it_is_tried_again(self, case, decode):
        await case.open(LinkSettings(evicted_pause_s=0.02, first_pause_s=0.001, longest_pause_s=0.001))
        decode.link.chunk(EVICTION)
        await until(lambda: len(decode.links) == 2 and case.watcher.up)
        decode.link.rst()
        await until(lambda: len(decode.links) == 3 and case.watcher.up)


class TestClosing:
    async def test_requests_fail_and_the_connection_is_closed(self, case, decode):
        await case.open()
        box, _ = case.register("1")
        await case.link.aclose()
        assert (await case.lost(box)).reason == "link_lost"
        await until(lambda: not decode.peers)
        await turns(20)
        assert len(decode.links) == 1
        await case.link.aclose()  # idempotent

    async def test_while_it_is_being_opened(self, case, decode):
        async def mute(call):
            await call.left()

        decode.opening = mute
        await case.open(wait=False)
        await until(lambda: decode.links)
        await case.link.aclose()
        await until(lambda: not decode.peers)

    async def test_before_its_task_ran(self, case, decode):
        await case.open(wait=False)
        await case.link.aclose()
        assert decode.links == []

    async def test_it_leaves_no_task(self, case):
        before = asyncio.all_tasks()
        await case.open()
        names = {task.get_name() for task in asyncio.all_tasks() - before}
        assert "dresult d0" in names
        await case.link.aclose()
        await until(lambda: not [t for t in asyncio.all_tasks() - before if t.get_name().startswith("dresult")])

    async def test_a_cancelled_close_passes_the_cancellation_on(self, case, decode):
        await case.open()

        async def close():
            asyncio.current_task().cancel()
            await case.link.aclose()

        task = asyncio.create_task(close(), name="closing")
        await asyncio.wait([task])
        assert task.cancelled()


async def test_counters_of_the_engine_are_bound(decode):
    """Late messages and reopened links show in the metrics."""
    from coordinator.engines.mindie import MindieEngine

    given = context()
    engine = MindieEngine(given)
    engine._link_settings = QUICK
    watcher = Watcher()
    engine.attach(instance("d0", decode.address), watcher)
    await until(lambda: watcher.up)
    decode.say("5", "data", b"x")
    await until(lambda: count(given.metrics.late_frames) == 1)
    decode.link.fin()
    await until(lambda: count(given.metrics.link_reconnects, "d0") == 1)
    await engine.aclose()
    await given.client.aclose()


async def test_a_fault_in_one_request_does_not_end_the_stream_of_the_others(case, decode, caplog):
    await case.open()
    bad, bad_out = case.register("1")
    good, good_out = case.register("2")

    def break_down(*_, **__):
        raise ZeroDivisionError

    bad_out.piece = break_down
    frames = [frame("2", "data", b"a"), frame("1", "data", b"x"), frame("2", "data", b"b")]
    decode.link.send(b"".join(b"%x\r\n%b\r\n" % (len(data), data) for data in frames))
    async with asyncio.timeout(GUARD_S):
        with pytest.raises(InternalError):
            await bad.done
    decode.say("2", "lastData", b"c")
    await until(lambda: good.settled)
    assert good_out.body == b"abc"
    assert (len(decode.links), case.watcher.told) == (1, ["linked"])
    assert [record.levelname for record in caplog.records] == ["ERROR"]
