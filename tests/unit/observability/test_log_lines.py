import calendar
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.errors import Side
from coordinator.observability.lines import CUT, LINE_LIMIT_BYTES, Stamper, cut_line, field, printable, quoted, scalar


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain-id_77/../x", "plain-id_77/../x"),
        ("", '""'),
        ("two words", '"two words"'),
        ("a=b", '"a=b"'),
        ('a"b', '"a\\"b"'),
        ("a\\nb", '"a\\\\nb"'),
        ("a\nb", '"a\\nb"'),
        ("a\r\n\tb", '"a\\r\\n\\tb"'),
        ("\x1b[31mred", '"\\x1b[31mred"'),
        ("\u2028\u2029\x85", '"\\u2028\\u2029\\x85"'),
        ("\u202egnp.exe", '"\\u202egnp.exe"'),
        ("\ud800", '"\\ud800"'),
        ("模型", '"模型"'),
        ("\0", '"\\x00"'),
    ],
)
def test_quoted(text, expected):
    assert quoted(text) == expected


def test_a_value_never_ends_its_line_nor_its_quotes():
    for c in [*map(chr, range(0x3000)), "\ud800", "\udfff", "\U000e0001", "\U0010ffff"]:
        line = f"key={quoted(f'a{c}b')} next=1"
        assert len(line.splitlines()) == 1, ascii(c)
        assert re.fullmatch(r'key=([^ "=\\]+|"([^"\\]|\\.)*") next=1', line), ascii(c)
        line.encode()


@pytest.mark.parametrize("fill", ["x", "é", " ", '"', "\\", "\n", "\ud800", "\U000e0001"])
def test_values_are_cut(fill):
    assert len(quoted(fill * 100_000)) <= 200 + len(CUT) + 2
    assert len(printable(fill * 100_000)) <= 200 + len(CUT)
    assert CUT in quoted(fill * 201)


def test_a_cut_never_splits_an_escape():
    for length in range(190, 210):
        cut = quoted("x" * length + "\n\\" * 100)
        assert re.fullmatch(r'"([^"\\]|\\.)*"', cut)


def test_200_characters_stay_whole():
    assert quoted("x" * 200) == "x" * 200
    assert quoted(" " * 200) == '"' + " " * 200 + '"'
    assert printable("é" * 200) == "é" * 200


def test_printable_keeps_quotes_and_backslashes():
    assert printable('say "no"\\\n') == 'say "no"\\\\n'


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, "yes"),
        (False, "no"),
        (3, "3"),
        (0.123456789, "0.123457"),
        (None, "None"),
        (Side.PREFILL, "prefill"),
        (("p0", "p1"), "p0,p1"),
        (Path("/etc/cluster.yaml"), "/etc/cluster.yaml"),
        (b"secret", "<bytes>"),
        ([b"secret", "a"], "<bytes>,a"),
        ({"prompt": "secret"}, "<dict>"),
        (ValueError("secret"), "<ValueError>"),
    ],
)
def test_field(value, expected):
    assert field(value) == expected


def test_scalar_keeps_numbers():
    assert (scalar(3), scalar(0.5), scalar(True), scalar(None)) == (3, 0.5, True, None)


@pytest.mark.parametrize("fill", ["x", "é", "模", "\U0001f600"])
@pytest.mark.parametrize("length", [1, 999, 1000, 1001, 3999, 4000, 4001, 100_000])
def test_lines_are_cut_in_bytes(fill, length):
    line = cut_line(fill * length)
    assert len(line.encode()) <= LINE_LIMIT_BYTES
    if len((fill * length).encode()) <= LINE_LIMIT_BYTES:
        assert line == fill * length
    else:
        assert line.endswith(CUT)
        assert len(line.encode()) > LINE_LIMIT_BYTES - 8


def test_stamps():
    stamp = Stamper()
    assert stamp(0.0) == "1970-01-01T00:00:00.000Z"
    assert stamp(1_700_000_000.25) == "2023-11-14T22:13:20.250Z"
    assert stamp(1_700_000_000.75) == "2023-11-14T22:13:20.750Z"
    assert stamp(1_700_000_001.9999) == "2023-11-14T22:13:21.999Z"
    assert stamp(1_700_000_000.5) == "2023-11-14T22:13:20.500Z"
    assert Stamper("at ").at(1_700_000_000.0) == "at 2023-11-14T22:13:20.000Z"


@given(st.floats(0, 4e9), st.floats(-2, 2))
def test_stamps_are_the_same_whatever_came_before(now_s, step_s):
    stamp = Stamper()
    stamp.at(now_s)
    then_s = max(0.0, now_s + step_s)
    assert stamp.at(then_s) == Stamper().at(then_s)
    seconds, _, millis = stamp.at(then_s).removesuffix("Z").partition(".")
    assert calendar.timegm(time.strptime(seconds, "%Y-%m-%dT%H:%M:%S")) == int(then_s)
    assert int(millis) == int((then_s - int(then_s)) * 1000)
