"""One owner for result streams, several processes that serve."""

import logging

import msgspec
import pytest
from engine_world import instance, request, until
from mindie_world import DONE, LAST, World, text

from coordinator.core.errors import EngineFailed
from coordinator.core.ids import WireIds
from coordinator.engines.mindie import split
from coordinator.engines.mindie.split import Frames, LinkOffice, Lost, Model, Opened, RemoteLinks
from coordinator.engines.mindie.strays import MAX_REMEMBERED, Strays
from coordinator.wire.mindie import Kind

D0, D1 = instance("d0"), instance("d1")


def rid(worker, number=5):
    return WireIds(worker, start=number).next().encode()


def words(data):
    return msgspec.msgpack.Decoder(Opened | Lost | Frames | Model).decode(data)


@pytest.fixture
def told():
    return []


@pytest.fixture
def office(told):
    return LinkOffice(lambda worker, data: told.append((worker, words(data))))


class TestOffice:
    def test_frames_go_to_whom_they_belong_in_one_message_each(self, office, told):
        frames = [(rid(worker, number), kind, b"x%d" % number) for number, (worker, kind) in enumerate(
            [(0, Kind.DATA), (1, Kind.DATA), (0, Kind.LAST_DATA), (7, Kind.ERROR), (1, Kind.RETRY), (0, Kind.DATA)]
        )]  # fmt: skip
        assert office.pass_on(3, frames) == []
        assert {worker: [body for _, _, body in word.frames] for worker, word in told} == {
            0: [b"x0", b"x2", b"x5"], 1: [b"x1", b"x4"], 7: [b"x3"],
        }  # fmt: skip
        kinds = tuple(Kind)
        assert [kinds[number] for _, number, _ in dict(told)[0].frames] == [Kind.DATA, Kind.LAST_DATA, Kind.DATA]
        assert {word.number for _, word in told} == {3}

    def test_what_names_no_process_stays(self, office, told):
        frames = [
            (b"", Kind.CLOSE, b""),
            (b"abc", Kind.DATA, b"x"),
            (b"9" * 21, Kind.DATA, b"x"),
            (b"-1", Kind.DATA, b""),
        ]
        assert office.pass_on(1, frames) == frames
        assert told == []

    def test_ids_that_are_remembered_are_bounded(self, office, monkeypatch):
        monkeypatch.setattr(split, "MAX_KNOWN_IDS", 10)
        for number in range(100):
            office.pass_on(1, [(rid(1, number), Kind.DATA, b"")])
        assert len(office._owners) <= 10

    def test_streams_open_and_are_lost_for_all(self, office, told):
        first, second = office.number(), office.number()
        office.opened(first, D0)
        office.lost(second, "never open")
        office.lost(first, "reset")
        office.lost(first, "again")
        assert told == [(None, Opened(first, D0)), (None, Lost(first, "reset"))]

    def test_a_new_process_is_told_what_is(self, office, told):
        numbers = [office.number() for _ in range(3)]
        for number, found in zip(numbers, (D0, D1, D0), strict=True):
            office.opened(number, found)
        office.lost(numbers[0], "reset")
        office.serves(D0, "a")
        office.serves(D1, "b")
        office.forget(D1)
        told.clear()
        office.introduce(4)
        assert [worker for worker, _ in told] == [4, 4, 4]
        assert [word for _, word in told] == [Opened(numbers[1], D1), Opened(numbers[2], D0), Model(D0, "a")]

    def test_a_model_name_is_told_when_it_changes(self, office, told):
        for name in ("a", "a", "b", "b"):
            office.serves(D0, name)
        assert [word.name for _, word in told] == ["a", "b"]


class Box:
    """Remembers what it got."""

    stream = True

    def __init__(self):
        self.got = []
        self.error = None

    def data(self, body, now_s):
        self.got.append((Kind.DATA, body, now_s))

    def message(self, kind, body, now_s):
        self.got.append((kind, body, now_s))

    def hold(self):
        self.got.append("hold")

    def flush(self):
        self.got.append("flush")

    def fail(self, error):
        self.error = error


class Listener:
    def __init__(self):
        self.models = []
        self.strays = []

    def learn(self, found, name):
        self.models.append((found.id, name))

    def stray(self, found, wire_id):
        self.strays.append((found.id, wire_id))


class Worker:
    """The serving half of process 0, told by an office."""

    def __init__(self):
        self.late = 0
        self.listener = Listener()
        self.links = RemoteLinks(logging.getLogger("test"), self.listener, on_late=self._late)
        self.now_s = 1.0
        self.office = LinkOffice(
            lambda worker, data: self.links.told(data, self.now_s) if worker in (None, 0) else None
        )

    def _late(self):
        self.late += 1


def two_streams():
    """A worker with a stream of each of two decode instances, a waiting request's box and the link of each."""
    world = Worker()
    world.office.opened(1, D0)
    world.office.opened(2, D1)
    boxes = {D0: Box(), D1: Box()}
    return world, boxes, {found: world.links.by_key[found.key] for found in boxes}


@pytest.mark.uncompiled  # doubles stand in the place of mailboxes
class TestRemote:
    def test_messages_reach_their_request(self):
        world = Worker()
        world.office.opened(1, D0)
        link, box = world.links.by_key[D0.key], Box()
        assert link.up
        world.now_s = 7.5
        with link.boxes.registered(rid(0), box):
            world.office.pass_on(1, [(rid(0), kind, b"b") for kind in Kind if kind is not Kind.HEARTBEAT])
        said = [(kind, b"b", 7.5) for kind in Kind if kind is not Kind.HEARTBEAT]
        assert box.got == ["hold", *said, "flush"]
        assert world.late == 0

    def test_messages_for_nobody_are_counted_and_shown(self):
        world = Worker()
        world.office.opened(1, D0)
        world.office.pass_on(1, [(rid(0, 9), Kind.DATA, b"x"), (rid(0, 9), Kind.LAST_DATA, DONE)])
        assert world.late == 1
        assert world.listener.strays == [("d0", rid(0, 9))] * 2
        world.office.pass_on(2, [(rid(0, 9), Kind.DATA, b"of a stream that is not open here")])
        assert world.late == 1

    def test_a_lost_stream_fails_its_own_requests_only(self):
        world, boxes, links = two_streams()
        with links[D0].boxes.registered(rid(0, 1), boxes[D0]), links[D1].boxes.registered(rid(0, 2), boxes[D1]):
            world.office.lost(1, "reset")
            assert isinstance(boxes[D0].error, EngineFailed)
            assert (boxes[D0].error.instance_id, boxes[D0].error.reason) == ("d0", "link_lost")
            assert boxes[D1].error is None
        assert not links[D0].up
        assert D0.key not in world.links.by_key
        assert links[D1].up

    def test_a_message_without_an_id_fails_all_that_it_may_have_been_for(self):
        world, boxes, links = two_streams()
        with links[D0].boxes.registered(rid(0, 1), boxes[D0]), links[D1].boxes.registered(rid(0, 2), boxes[D1]):
            world.office.doubt(1, Kind.DATA)
            world.office.doubt(99, Kind.DATA)
            assert (boxes[D0].error.instance_id, boxes[D0].error.reason) == ("d0", "bad_reply")
            assert boxes[D1].error is None
        assert links[D0].up

    def test_a_stream_that_opens_again(self):
        world = Worker()
        for number in (1, 2):
            world.office.opened(number, D0)
            box = Box()
            with world.links.by_key[D0.key].boxes.registered(rid(0), box):
                world.office.pass_on(number, [(rid(0), Kind.DATA, b"x")])
                world.office.lost(number, "reset")
            assert len(box.got) == 1
            assert box.error is not None

    def test_a_late_loss_does_not_hurt_the_successor(self):
        world = Worker()
        world.office.opened(1, D0)
        world.office.opened(2, D0)
        world.office.lost(1, "reset")
        assert world.links.by_key[D0.key].up
        world.links.told(msgspec.msgpack.encode(Lost(99, "unknown")), 0.0)

    def test_model_names(self):
        world = Worker()
        world.office.serves(D0, "a")
        assert world.listener.models == [("d0", "a")]


class TestStrays:
    @pytest.fixture
    def stopped(self):
        return []

    @pytest.fixture
    def strays(self, stopped):
        self.ids = WireIds(1, start=1000)
        return Strays(self.ids, lambda wire_id, found: stopped.append((wire_id, found.id)))

    def test_own_requests_are_left_alone(self, strays, stopped):
        own = [self.ids.next().encode() for _ in range(5)]
        for wire_id in own:
            strays.met(D0, wire_id)
        assert stopped == []

    def test_those_of_the_process_before_are_stopped_once(self, strays, stopped):
        self.ids.next()
        before = [rid(1, number) for number in (5, 900, 50_000)]
        for _ in range(3):
            for wire_id in before:
                strays.met(D0, wire_id)
        assert stopped == [(wire_id.decode(), "d0") for wire_id in before]

    def test_the_memory_is_bounded(self, strays, stopped):
        for number in range(MAX_REMEMBERED + 10):
            strays.met(D0, rid(1, 10_000 + number))
        assert len(stopped) == MAX_REMEMBERED + 10
        assert len(strays._stopped) == MAX_REMEMBERED
        strays.met(D0, rid(1, 10_000 + MAX_REMEMBERED))
        assert len(stopped) == MAX_REMEMBERED + 10


class SplitWorld(World):
    """A MindIE engine in two halves; `engine` is the one that serves, `owner` the one with the streams."""

    async def __aenter__(self):
        self.owner = self.engine
        serving = type(self.owner)(self.context)
        serving.follow()
        self.owner.own(lambda worker, data: serving.told(data) if worker in (None, 0) else None)
        await super().__aenter__()
        self.engine = serving
        return self

    async def __aexit__(self, *more):
        await self.owner.aclose()
        await super().__aexit__(*more)


@pytest.fixture
async def world():
    async with SplitWorld() as made:
        yield made


class TestEngine:
    async def test_a_request_over_two_halves(self, world):
        task, out, placement = world.serve(request(stream=True))
        call = await world.sent()
        await until(lambda: out.events)
        world.decode.say(call.wire_id, "data", text("B").encode())
        world.decode.say(call.wire_id, "lastData", LAST)
        await task
        assert b"B" in out.body
        assert out.over
        assert placement.names == ["sent", "prefilled", "decoding"]

    async def test_a_lost_stream(self, world):
        task, out, _ = world.serve(request(stream=True))
        await world.sent()
        await until(lambda: out.events)
        world.decode.link.rst()
        with pytest.raises(EngineFailed) as caught:
            await task
        assert caught.value.reason == "link_lost"
        await until(lambda: len(world.decode.links) == 2)
        await until(lambda: world.engine._link(world.d0) is not None)

    async def test_the_half_that_serves_opens_no_stream(self, world):
        watcher = type(world.watcher)()
        world.engine.attach(world.d0, watcher)
        assert watcher.up
        assert world.engine._links == {}
        assert len(world.decode.links) == 1

    async def test_a_request_of_the_process_before_is_stopped(self, world):
        stray = WireIds(0, start=77).next()
        for _ in range(3):
            world.decode.say(stray, "data", b"x")
        await until(lambda: world.decode.stops)
        assert (await world.stopped())[1] == {stray: 1}

    async def test_a_late_message_of_our_own_is_not(self, world):
        task, out, _ = world.serve(request(stream=True))
        call = await world.sent()
        await until(lambda: out.events)
        world.decode.say(call.wire_id, "lastData", LAST)
        await task
        world.decode.say(call.wire_id, "data", b"late")
        world.decode.say(WireIds(0, start=78).next(), "data", b"x")
        await until(lambda: world.decode.stops)
        assert call.wire_id not in (await world.stopped())[1]
