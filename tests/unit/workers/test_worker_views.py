"""The picture of the cluster: as it is sent, as it is taken, and what comes back."""

import mmap
from dataclasses import replace

import pytest
from engine_world import instance

from coordinator.core.errors import EngineFailed, Side
from coordinator.core.instance import Address, Capacity
from coordinator.core.view import ClusterView
from coordinator.scheduler import LoadBoard, size_bytes
from coordinator.workers.messages import Charge, Credit, View
from coordinator.workers.mirror import Mirror
from coordinator.workers.slots import Slots
from coordinator.workers.views import ViewSender
from coordinator.workers.work import BoardWork


def placed(name, port=9, **more):
    return instance(name, Address("127.0.0.1", port), **more)


P0, D0, D1, D2 = placed("p0", 1), placed("d0", 2), placed("d1", 3), placed("d2", 4)


class Cluster:
    """What ViewSender asks of one."""

    def __init__(self, *known):
        self.members = list(known)
        self.view = ClusterView(0)
        self.names = ("m",)
        self.pair = (True, "ready")
        self.listener = None

    def subscribe(self, listener):
        self.listener = listener
        listener(self.view)

    def known(self):
        return tuple(self.members)

    def models(self):
        return self.names

    def accepts(self, model):
        return False

    def ready_pair(self):
        return self.pair

    def show(self, *ready, suspect=()):
        self.view = ClusterView(self.view.version + 1, ready, suspect)
        self.listener(self.view)


class Sending:
    """A sender, what it sent, and the oldest picture that somebody goes by."""

    def __init__(self, *known, size=8):
        self.sent = []
        self.oldest = float("inf")
        self.cluster = Cluster(*known)
        self.slots = Slots(size)
        self.sender = ViewSender(self.cluster, self.slots, self.sent.append, lambda: self.oldest)


class TestSlots:
    def test_one_for_each_and_free_ones_again(self):
        slots = Slots(2)
        assert slots.take(P0) != slots.take(D0)
        assert slots.take(P0) == slots.find(P0)
        assert slots.take(D1) is None
        assert slots.find(D1) is None
        freed = slots.free(D0)
        assert slots.take(D1) == freed
        assert {found.id for found, _ in slots.pairs()} == {"p0", "d1"}

    def test_a_changed_instance_keeps_its_slot(self):
        slots = Slots(2)
        slot = slots.take(D0)
        changed = replace(D0, capacity=Capacity(5))
        assert slots.take(changed) == slot
        assert [found for found, _ in slots.pairs()] == [changed]

    def test_another_address_is_another_instance(self):
        slots = Slots(2)
        assert slots.take(D0) != slots.take(placed("d0", 99))


class TestSending:
    def test_every_change_once(self):
        world = Sending(P0, D0)
        world.cluster.show(P0, D0)
        count = len(world.sent)
        world.sender.refresh()
        assert len(world.sent) == count
        view = world.sent[-1]
        assert [view.members[i][0] for i in view.ready] == [P0, D0]
        assert [slot for _, slot in view.members] == [world.slots.find(P0), world.slots.find(D0)]
        assert (view.names, view.any_name, view.pair, view.why) == (["m"], False, True, "ready")

    def test_numbers_grow(self):
        world = Sending(P0, D0)
        for ready in ((P0,), (P0, D0), (D0,)):
            world.cluster.show(*ready)
        numbers = [view.number for view in world.sent]
        assert numbers == sorted(set(numbers))

    def test_what_changes_beside_the_view_is_told_too(self):
        world = Sending(P0, D0)
        world.cluster.show(P0, D0)
        for change in ({"names": ("m", "n")}, {"pair": (False, "why not")}, {"members": [P0, D0, D1]}):
            vars(world.cluster).update(change)
            count = len(world.sent)
            world.sender.refresh()
            assert len(world.sent) == count + 1, change
        assert [found for found, _ in world.sent[-1].members] == [P0, D0, D1]
        assert len(world.sent[-1].ready) == 2

    def test_suspect_ones_stand_apart(self):
        world = Sending(P0, D0, D1)
        world.cluster.show(P0, D1, suspect=(D0,))
        view = world.sent[-1]
        assert [view.members[i][0] for i in view.suspect] == [D0]
        assert [view.members[i][0] for i in view.ready] == [P0, D1]

    def test_more_than_there_are_slots_for(self, caplog):
        world = Sending(P0, D0, D1, D2, size=3)
        world.cluster.show(P0, D0, D1, D2)
        world.cluster.show(P0, D0, D1, D2, suspect=(D2,))
        view = world.sent[-1]
        assert [found for found, _ in view.members] == [P0, D0, D1]
        assert [view.members[i][0] for i in view.ready] == [P0, D0, D1]
        assert view.suspect == []
        told = [record.getMessage() for record in caplog.records]
        assert told == ["instance d2 is not used: more than 3 instances cannot be shared among workers"]
        world.slots.free(D0)
        world.cluster.members = [P0, D1, D2]
        world.cluster.show(P0, D1, D2)
        assert [found for found, _ in world.sent[-1].members] == [P0, D1, D2]

    def test_a_new_worker_gets_the_picture_of_the_others(self):
        world = Sending(P0, D0)
        world.cluster.show(P0, D0)
        assert world.sender.view() == world.sent[-1]

    def test_whether_requests_may_still_come(self):
        """A worker that has not read its mail yet may choose who has left the view."""
        world = Sending(P0, D0, D1)
        world.cluster.show(P0, D0, D1)
        listed = world.sent[-1].number
        world.oldest = listed
        assert not world.sender.may_get_requests(D0), "it is in the picture: its load speaks for it"
        world.cluster.show(P0, D1)
        assert world.sender.may_get_requests(D0)
        world.oldest = listed + 1
        assert not world.sender.may_get_requests(D0)
        world.oldest = 0  # one that has just started: it may get the older picture first
        assert world.sender.may_get_requests(D0)
        world.sender.forget(D0)
        assert not world.sender.may_get_requests(D0)
        assert not world.sender.may_get_requests(D2), "nobody was ever told of it"


class Mirrored:
    """A mirror over a board with two rows, and what it said."""

    def __init__(self):
        memory = mmap.mmap(-1, size_bytes(2, 8))
        self.other = LoadBoard(memory, 2, 8, 1)
        self.said = []
        self.mirror = Mirror(self.said.append, LoadBoard(memory, 2, 8, 0))

    def take(self, *members, ready=(), suspect=(), number=1, **more):
        given = {"names": ["m"], "any_name": False, "pair": True, "why": "y"} | more
        slots = [(member, slot) for slot, member in enumerate(members)]
        return self.mirror.take(View(number, slots, list(ready), list(suspect), **given))


class TestMirror:
    def test_before_the_first_view(self):
        mirror = Mirrored().mirror
        assert mirror.view == ClusterView(0)
        assert mirror.models() == []
        assert mirror.accepts("anything")
        assert mirror.ready_pair() == (False, "no instance is known")

    def test_answers_from_the_view(self):
        world = Mirrored()
        world.take(P0, D0, D1, ready=[0, 2], suspect=[1], number=5)
        assert world.mirror.view == ClusterView(5, (P0, D1), (D0,))
        assert world.mirror.slots == {P0.key: 0, D0.key: 1, D1.key: 2}
        assert world.mirror.models() == ["m"]
        assert [world.mirror.accepts(name) for name in ("m", "x", None)] == [True, False, True]
        assert world.mirror.ready_pair() == (True, "y")
        world.take(P0, any_name=True)
        assert world.mirror.accepts("x")

    def test_what_has_not_changed_stays_the_same_object(self):
        world = Mirrored()
        world.take(P0, D0, ready=[0, 1])
        before = world.mirror.view.ready
        world.take(placed("p0", 1), replace(D0, capacity=Capacity(1)), ready=[0, 1], number=2)
        after = world.mirror.view.ready
        assert after[0] is before[0]
        assert after[1].capacity.max_requests == 1

    def test_who_comes_and_who_goes(self):
        world = Mirrored()
        assert world.take(P0, D0) == ([P0, D0], [])
        assert world.take(P0, D1) == ([D1], [D0])
        moved = placed("d1", 99)
        assert world.take(P0, moved) == ([moved], [D1])
        assert world.take(P0, replace(moved, capacity=Capacity(1))) == ([], [])
        assert world.take() == ([], [P0, replace(moved, capacity=Capacity(1))])

    def test_a_fault_is_passed_on(self):
        world = Mirrored()
        world.take(P0, D0)
        world.mirror.charge(D0, EngineFailed(Side.DECODE, "d0", "timeout", detail="x", connecting=True))
        assert world.said == [Charge("d0", D0.url, "decode", "timeout", "x", connecting=True)]

    def test_a_doubt_is_passed_on_and_so_is_what_goes_well_at_the_doubted_one(self):
        world = Mirrored()
        world.take(P0, D0)
        error = EngineFailed(Side.DECODE, "d0", "http_5xx")
        error.doubted = "p0"
        world.mirror.charge(D0, error)
        assert world.said == [Charge("d0", D0.url, "decode", "http_5xx", "", connecting=False, doubted="p0")]
        for _ in range(2):
            world.mirror.credit(P0)
            world.mirror.credit(D0)
        assert world.said[1:] == [Credit("p0", P0.url), Credit("d0", D0.url)]

    def test_success_is_told_once_after_a_fault_of_anybody(self):
        world = Mirrored()
        world.take(P0, D0)
        world.mirror.credit(D0)
        assert world.said == []
        world.mirror.charge(D0, EngineFailed(Side.DECODE, "d0", "timeout"))
        for _ in range(3):
            world.mirror.credit(D0)
            world.mirror.credit(P0)
        assert world.said[1:] == [Credit("d0", D0.url)]
        world.other.count_fault(0)
        for _ in range(3):
            world.mirror.credit(P0)
            world.mirror.credit(D0)
        assert world.said[2:] == [Credit("p0", P0.url)]

    def test_who_is_gone_is_neither_forgiven_nor_remembered(self):
        world = Mirrored()
        world.take(P0, D0)
        world.mirror.charge(D0, EngineFailed(Side.DECODE, "d0", "timeout"))
        world.take(P0)
        world.mirror.credit(D0)
        world.mirror.charge(D0, EngineFailed(Side.DECODE, "d0", "timeout"))
        assert [type(message) for message in world.said] == [Charge, Charge]
        world.take(P0, D0)
        world.mirror.credit(D0)
        assert [type(message) for message in world.said] == [Charge, Charge]


class TestWork:
    @pytest.fixture
    def board(self):
        memory = mmap.mmap(-1, size_bytes(2, 8))
        self.rows = [LoadBoard(memory, 2, 8, row) for row in range(2)]
        return LoadBoard(memory, 2, 8)

    def test_sums_of_all(self, board):
        slots = Slots(8)
        for member in (P0, D0, D1):
            slots.take(member)
        work = BoardWork(board, slots)
        self.rows[0].write(slots.find(P0), (1, 5, 9, 2))
        self.rows[1].write(slots.find(P0), (1, 5, 9, 1))
        self.rows[1].write(slots.find(D0), (4, 6, 9, 0))
        self.rows[0].write_live(4)
        self.rows[1].write_live(3)
        self.rows[1].write_queued(2)
        assert {load.instance.id: load[1:4] for load in work.loads()} == {
            "p0": (2, 10, 3), "d0": (4, 6, 0), "d1": (0, 0, 0),
        }  # fmt: skip
        assert [work.in_flight(member) for member in (P0, D0, D1, D2)] == [5, 4, 0, 0]
        assert (work.live(), work.queued()) == (7, 2)
        assert work.in_common("p0", "d0") == 4
        assert work.in_common("p0", "d1") == 0
        assert work.in_common("p0", "nobody") == 0

    def test_an_instance_that_may_still_be_chosen_is_not_idle(self, board):
        slots = Slots(8)
        slots.take(D0)
        work = BoardWork(board, slots)
        work.may_come = lambda member: member is D0
        assert work.in_flight(D0) == 1
        self.rows[0].write(slots.find(D0), (3, 0, 0, 0))
        assert work.in_flight(D0) == 3
        assert work.in_flight(D1) == 0
