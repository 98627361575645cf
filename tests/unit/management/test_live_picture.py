"""Pictures of the live feed: whole, and as what has changed."""

import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from live_world import BusySight, look, row

from coordinator.core.errors import NoInstance
from coordinator.management.live_picture import COLUMNS, GAP_S, HISTORY, POINT, Album
from coordinator.observability.access import RequestRecord
from coordinator.observability.recent import Recent


class Viewer:
    """Puts events together as a listener does."""

    def __init__(self):
        self.rows = self.paths = self.failures = None
        self.n = 0
        self.kinds = []
        self.sizes = []

    def take(self, raw):
        head, ident, data, end, more = raw.decode().split("\n")
        assert (end, more) == ("", "")
        body = msgspec.json.decode(data.removeprefix("data: "))
        kind = head.removeprefix("event: ")
        assert ident == f"id: {body['n']}"
        self.kinds.append(kind)
        self.sizes.append(len(raw))
        self.body = body
        if kind == "snapshot":
            assert body["columns"] == list(COLUMNS)
            self.rows, self.paths, self.failures = body["rows"], body["paths"], body["failures"]
        else:
            assert body["n"] == self.n + 1
            for position, *values in body.get("rows", []):
                self.rows[position][-len(values) :] = values
            self.paths = body.get("paths", []) + self.paths
            self.failures = body.get("failures", self.failures)
        self.n = body["n"]

    def dicts(self):
        return [dict(zip(COLUMNS, one, strict=True)) for one in self.rows]


@pytest.fixture
def album():
    return Album({"version": "1"})


@pytest.fixture
def viewer():
    return Viewer()


def show(album, viewer, given, at_s=0.0):
    picture = album.add(given, 1000.0 + at_s, at_s)
    viewer.take(picture.change if picture.change is not None and viewer.n else picture.whole)
    return picture


def test_the_first_is_whole(album, viewer):
    picture = show(album, viewer, look([row("p0"), row("d0", requests=3)]))
    assert picture.change is None
    assert viewer.kinds == ["snapshot"]
    assert viewer.body["about"] == {"version": "1"}
    assert [one["requests"] for one in viewer.dicts()] == [0, 3]


def test_only_rows_that_differ_are_sent(album, viewer):
    rows = [row(f"d{i}") for i in range(100)]
    show(album, viewer, look(rows))
    rows[7] = row("d7", requests=2, blocks=31)
    rows[9] = row("d9", state="down", reason="connect refused", since_s=5)
    show(album, viewer, look(rows), 1.0)
    assert viewer.kinds == ["snapshot", "tick"]
    assert len(viewer.body["rows"]) == 2
    assert viewer.dicts()[7] == {**rows[7]._asdict()}
    assert viewer.dicts()[9]["reason"] == "connect refused"
    assert viewer.sizes[1] < viewer.sizes[0] / 10


def test_a_tick_without_changes_says_so_briefly(album, viewer):
    show(album, viewer, look([row("p0")]))
    show(album, viewer, look([row("p0")]), 1.0)
    assert viewer.body.keys() == {"n", "at_s", "figures"}


@pytest.mark.parametrize("after", [["p0"], ["p0", "d0", "d1"], ["p0", "d1"], ["d0", "p0"]])
def test_another_list_is_sent_whole(album, viewer, after):
    show(album, viewer, look([row("p0"), row("d0")]))
    picture = album.add(look([row(ident) for ident in after]), 1001.0, 1.0)
    assert picture.change is None
    viewer.take(picture.whole)
    assert [one["id"] for one in viewer.dicts()] == after


def test_a_model_that_is_learned_later_is_a_change(album, viewer):
    show(album, viewer, look([row("p0", model="")]))
    show(album, viewer, look([row("p0", model="qwen")]), 1.0)
    assert viewer.kinds == ["snapshot", "tick"]
    assert viewer.dicts()[0]["model"] == "qwen"


def test_new_paths_and_failures_are_added(album, viewer):
    recent = Recent(wall=iter(range(100)).__next__)

    def finish(ident, error=None):
        record = RequestRecord(ident, "openai", "/", prefill="p0", decode="d0")
        if error is not None:
            record.failed(error)
        recent.take(record)

    finish("a")
    show(album, viewer, look(recently=recent.read()))
    finish("b")
    finish("c", NoInstance("none"))
    show(album, viewer, look(recently=recent.read()), 1.0)
    assert viewer.kinds == ["snapshot", "tick"]
    assert [path["id"] for path in viewer.body["paths"]] == ["c", "b"]
    assert [path["id"] for path in viewer.paths] == ["c", "b", "a"]
    assert [failure["code"] for failure in viewer.failures] == ["no_instance"]
    show(album, viewer, look(recently=recent.read()), 2.0)
    assert viewer.body.keys() == {"n", "at_s", "figures"}


def test_who_puts_ticks_on_a_snapshot_has_what_a_new_listener_gets():
    album, late, early = Album({}), Viewer(), Viewer()
    sight = BusySight(20, 40, rate=60)
    for second in range(12):
        if second == 5:
            sight.set_state("d3", "down", "connect refused")
        show(album, early, sight.now(), float(second))
    late.take(album.latest.whole)
    assert early.rows == late.rows
    assert early.failures == late.failures
    known = [(path["id"], path["at_s"]) for path in early.paths]
    assert known[: len(late.paths)] == [(path["id"], path["at_s"]) for path in late.paths]
    assert early.kinds == ["snapshot"] + ["tick"] * 11
    assert late.body["figures"]["moving"]["requests_s"] > 20


def test_history_has_one_point_a_second_and_an_end(album, viewer):
    for second in range(HISTORY + 20):
        picture = album.add(look(in_flight=second), 0.0, float(second))
    viewer.take(picture.whole)
    assert len(viewer.body["history"]) == HISTORY
    assert viewer.body["points"] == list(POINT)
    assert [point[-1] for point in viewer.body["history"]][-2:] == [HISTORY + 18, HISTORY + 19]


def test_after_a_gap_history_begins_again(album, viewer):
    album.add(look(), 0.0, 0.0)
    album.add(look(), 0.0, 1.0)
    viewer.take(album.add(look(), 0.0, 1.0 + GAP_S + 1).whole)
    assert len(viewer.body["history"]) == 1
    assert viewer.body["n"] == 3
    assert viewer.body["figures"]["moving"]["requests_s"] is None


def test_many_listeners_cost_one_encoding(album):
    picture = album.add(look([row("p0")]), 0.0, 0.0)
    assert picture.whole is picture.whole
