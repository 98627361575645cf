"""Frames: what they say, and that they never leave the screen."""

import json
import re

import pytest
from live_world import BusySight, look, row

from coordinator.management.live_picture import Album
from coordinator.top.frame import LEAST_ROWS, draw
from coordinator.top.paint import Paint
from coordinator.top.shown import Shown
from coordinator.top.table import chosen
from coordinator.top.view import SORTS, View
from coordinator.top.words import age, clean, count, fit, span, spark, width

ESCAPE = re.compile(r"\x1b\[[\d;]*m")


def parse(raw):
    kind, _, data = raw.decode().strip().split("\n")
    return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def shown_of(*looks):
    shown, album = Shown(), Album({"version": "1.2.3", "model": "qwen", "workers": 2})
    for second, one in enumerate(looks):
        picture = album.add(one, 1_796_000_000.0 + second, float(second))
        shown.take(*parse(picture.change if shown.events and picture.change else picture.whole))
    return shown


@pytest.fixture(scope="module")
def busy():
    sight = BusySight(20, 40, failing=0.1, days_s=1_796_000_000.0)
    sight.set_state("d3", "down", "connect refused")
    return shown_of(*(sight.now() for _ in range(8)))


def later_events():
    """A snapshot of two instances, and the change that one of them is down."""
    album = Album({})
    whole = album.add(look([row("p0"), row("d0")]), 1000.0, 0.0)
    change = album.add(look([row("p0"), row("d0", state="down")]), 1001.0, 1.0)
    return parse(whole.whole)[1], parse(change.change)[1]


def plain(lines):
    return [ESCAPE.sub("", line) for line in lines]


def texts(shown, view=View(), columns=200, lines=0, lost=""):  # noqa: B008  # frozen
    return draw(shown, view, Paint(columns, colours=False), lines, lost).lines


class TestShown:
    def test_ticks_on_a_snapshot_make_what_a_new_listener_gets(self):
        sight, album, early = BusySight(10, 10, failing=0.1), Album({}), Shown()
        for second in range(10):
            if second == 4:
                sight.set_state("d1", "suspect", "requests failed: reset")
            picture = album.add(sight.now(), 1000.0 + second, float(second))
            early.take(*parse(picture.change if early.events else picture.whole))
        late = Shown()
        late.take(*parse(album.latest.whole))
        assert early.events == 10
        assert late.events == 1
        assert early.instances == late.instances
        assert early.figures == late.figures
        assert early.failures == late.failures
        assert early.paths == late.paths
        assert list(early.rates) == list(late.rates)
        assert early.as_data() == late.as_data()

    def test_columns_of_a_later_version_are_left_out(self):
        whole, change = later_events()
        for event in (whole, change):
            event["columns"] = [*event.get("columns", ()), "colour"]
            event["rows"] = [[*one, "red"] for one in event["rows"]]
        shown = Shown()
        shown.take("snapshot", whole)
        shown.take("tick", change)
        assert [(one.id, one.state) for one in shown.instances] == [("p0", "ready"), ("d0", "down")]

    @pytest.mark.parametrize("kind", ["snapshot", "tick"])
    def test_rows_that_are_none(self, kind):
        whole, change = later_events()
        shown = Shown()
        if kind == "tick":
            shown.take("snapshot", whole)
            change["rows"][0][-1] = "many"
        else:
            whole["columns"] = [name.replace("blocks", "pages") for name in whole["columns"]]
        with pytest.raises((ValueError, KeyError)):
            shown.take(kind, change if kind == "tick" else whole)

    @pytest.mark.parametrize(
        "odd",
        [{}, {"figures": {}}, {"figures": None, "at_s": 1}, {"rows": [[9, 1]], "at_s": 1}],
    )
    def test_what_is_no_event(self, busy, odd):
        with pytest.raises((ValueError, KeyError, IndexError)):
            Shown().take("tick", odd)


class TestFrame:
    @pytest.mark.parametrize("columns", [1, 10, 40, 79, 80, 100, 133, 200])
    @pytest.mark.parametrize("lines", [1, 5, 12, 24, 50, 90])
    def test_it_fits_every_screen(self, busy, columns, lines):
        for view in (View(), View(news=False), View(typing=True, filter="d"), View(filter="nobody")):
            for colours in (False, True):
                frame = draw(busy, view, Paint(columns, colours=colours), lines, "the coordinator cannot be reached")
                assert len(frame.lines) == lines
                assert max(map(width, plain(frame.lines))) <= columns

    def test_nothing_has_come_yet(self):
        lines = texts(Shown(), lines=24)
        assert "connecting" in lines[0]
        assert len(lines) == 24

    def test_what_it_says(self, busy):
        text = "\n".join(texts(busy))
        assert "pd-coordinator  1.2.3  qwen  2 workers" in text
        assert "Ready: prefill instance p0 and decode instance d0 take requests" in text
        assert re.search(r"requests/s +\d", text)
        assert re.search(r"first token +\d+ms  95% +\d+ms  99%", text)
        assert "bottleneck: prefill" in text
        assert re.search(r"queue \d+ > prefill \d+ > handoff \d+ > decode \d+", text)
        assert re.search(r"d3 +decode +x down .*connect refused", text)
        assert len([line for line in text.splitlines() if line.startswith(("p", "d")) and "qwen3-32b" in line]) == 60
        assert re.search(r"(reset|link lost|closed) x\d+, decode d\d+, \d+ made good elsewhere", text)
        assert re.search(r"p\d+ > d\d+ +queue .*prefill .*handoff .*decode .*total ", text)

    def test_a_cluster_that_is_not_ready(self):
        assert "NOT READY: no instance" in texts(shown_of(look(ready=False, why="no instance")))[1]

    def test_a_lost_feed(self, busy):
        line = texts(busy, lost="the feed has ended")[0]
        assert re.search(r"LOST, the feed has ended; from \d\d:\d\d:\d\d$", line)

    def test_no_colours_no_escapes(self, busy):
        assert not any("\x1b" in line for line in texts(busy))
        colours = draw(busy, View(), Paint(200, colours=True), 0).lines
        assert any("\x1b[1;31m" in line for line in colours)
        assert [line.rstrip() for line in plain(colours)] == texts(busy)

    def test_texts_of_others_cannot_command_the_terminal(self):
        evil = "\x1b]0;gone\x07\x1b[2J\u202e\r\n"
        shown = shown_of(look([row("d1", reason=evil, model=evil, engine=evil, state="down")], ready=False, why=evil))
        shown.about["model"] = evil
        for line in texts(shown, View(filter=""), lost=evil):
            assert line.isprintable(), repr(line)

    def test_it_scrolls(self, busy):
        frame = draw(busy, View(scroll=10, news=False), Paint(120, colours=False), 24)
        assert frame.scroll == 10
        assert frame.lines[8].startswith("p10 ")
        assert f"11-{10 + frame.page} of 60" in frame.lines[-1]
        end = draw(busy, View(scroll=1 << 30, news=False), Paint(120, colours=False), 24)
        assert end.scroll == 60 - end.page
        assert any(line.startswith("d39 ") for line in end.lines)
        assert draw(busy, View(), Paint(120, colours=False), 3).page == LEAST_ROWS


class TestOrder:
    @pytest.mark.parametrize("sort", SORTS)
    def test_every_order_is_one(self, busy, sort):
        rows = chosen(busy.instances, View(sort=sort))
        assert sorted(one.id for one in rows) == sorted(one.id for one in busy.instances)
        back = chosen(busy.instances, View(sort=sort, backwards=True))
        if sort == "id":
            assert [one.id for one in rows][:3] == ["p0", "p1", "p2"]
            assert [one.role for one in back] == [one.role for one in rows], "roles stay together"
            assert [one.id for one in rows if one.role == "decode"][9:12] == ["d9", "d10", "d11"]
        elif sort == "state":
            assert rows[0].id == "d3"
            assert back[-1].id == "d3"
        else:
            values = [getattr(one, sort) for one in rows]
            assert values == sorted(values, reverse=True)
            assert [getattr(one, sort) for one in back] == values[::-1]

    def test_filter(self, busy):
        assert [one.id for one in chosen(busy.instances, View(filter="REFUSED"))] == ["d3"]
        assert len(chosen(busy.instances, View(filter="prefill"))) == 20
        assert chosen(busy.instances, View(filter="nobody")) == []


class TestWords:
    @pytest.mark.parametrize(
        ("number", "text"),
        [(None, "-"), (0, "0"), (0.25, "0.2"), (7, "7"), (41.24, "41.2"), (999.6, "1000"), (9999, "9999"),
         (12345, "12.3k"), (456789, "457k"), (1.5e6, "1.5M"), (2.5e8, "250M")],
    )  # fmt: skip
    def test_count(self, number, text):
        assert count(number) == text

    @pytest.mark.parametrize(
        ("seconds", "text"),
        [(None, "-"), (0, "0.0ms"), (0.0184, "18.4ms"), (0.257, "257ms"), (0.9999, "1.00s"), (12.345, "12.35s"),
         (3600, "3600s")],
    )  # fmt: skip
    def test_span(self, seconds, text):
        assert span(seconds) == text

    @pytest.mark.parametrize(
        ("seconds", "text"), [(-3, "0s"), (59.4, "59s"), (60, "1m"), (3599, "59m"), (7200, "2h"), (200000, "2d")]
    )
    def test_age(self, seconds, text):
        assert age(seconds) == text

    @pytest.mark.parametrize(
        ("text", "columns", "expected"),
        [("abc", 5, "abc  "), ("abcdef", 4, "abc…"), ("模型模型", 5, "模型…"), ("模型模型", 4, "模… "), ("ab", 0, ""),
         ("", 2, "  ")],
    )  # fmt: skip
    def test_fit(self, text, columns, expected):
        assert fit(text, columns) == expected
        assert width(fit(text, columns)) == columns

    def test_fit_on_the_right(self):
        assert fit("7", 3, right=True) == "  7"

    def test_spark(self):
        assert spark([], 3) == "   "
        assert spark([None, 0, 4, 8], 5) == "  ▁▅█"
        assert spark([1, 2, 3], 2) == "▆█"
        assert spark([0, 0], 2) == "▁▁"
        assert spark([1], 0) == ""

    def test_clean(self):
        assert clean("d\x1b[0m") == "d\\x1b[0m"
