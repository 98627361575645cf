import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from long_request import indexed, run
from msgspec import Raw

from coordinator.core.body import LongBody
from coordinator.core.request import Ask, Deadlines, Request
from coordinator.wire import json_edit
from coordinator.wire.json_edit import IndexedRequest

ODD = b'{ "seed" : 9007199254740993, "top_p":1e-9, "x":{"a":null,"b":[1,{"c":"\xc3\xa9 \\u00e9"}]}, "n": null }'


def test_values_stay_byte_for_byte():
    fields = json_edit.read_fields(ODD)
    written = json_edit.write_fields(fields)
    assert written == b'{"seed":9007199254740993,"top_p":1e-9,"x":{"a":null,"b":[1,{"c":"\xc3\xa9 \\u00e9"}]},"n":null}'


def test_the_last_of_two_equal_names_counts():
    assert json.loads(json_edit.write_fields(json_edit.read_fields(b'{"a":1,"a":2}'))) == {"a": 2}


@pytest.mark.parametrize("text", [b"[]", b'"x"', b"null", b"7", b"{bad", b"", b'{"\\ud800":1}', b'{"\xff":1}'])
def test_what_is_no_object_is_a_value_error(text):
    with pytest.raises(ValueError, match="not a JSON object"):
        json_edit.read_fields(text)


@pytest.mark.parametrize(
    ("raw", "known"), [(None, False), (b"", False), (b"null", False), (b"0", True), (b'""', True), (b"false", True)]
)
def test_given(raw, known):
    assert json_edit.given(None if raw is None else Raw(raw)) is known


def test_readers_take_their_own_type_only():
    values = [Raw(b"7"), Raw(b'"x"'), Raw(b"[1, [2]]"), Raw(b'{"a":1}'), Raw(b"true"), None]
    assert [json_edit.number(v) for v in values] == [7, None, None, None, None, None]
    assert [json_edit.text(v) for v in values] == [None, "x", None, None, None, None]
    assert [v and bytes(v) for v in json_edit.items(values[2])] == [b"1", b"[2]"]
    assert [json_edit.items(v) for v in values[:2]] == [None, None]
    assert [json_edit.object_fields(v) is not None for v in values] == [False, False, False, True, False, False]
    assert [json_edit.is_true(v) for v in values] == [False, False, False, False, True, False]


def test_long_values_are_written_byte_for_byte():
    long = b'"' + "x\u00e9\u4e2d ".encode() * json_edit.JOINED_BYTES + b'"'
    fields = json_edit.read_fields(b'{"a" : 1.0, "\\u00e9\\"" :' + long + b', "c":[1, 2] }')
    assert json_edit.write_fields(fields) == b'{"a":1.0,"\xc3\xa9\\"":' + long + b',"c":[1, 2]}'


@given(st.dictionaries(st.text(max_size=3), st.integers(0, json_edit.PART_BYTES + 2), max_size=6))
def test_a_long_body_is_what_msgspec_would_write(sizes):
    fields = {"long": Raw(b"1" * json_edit.JOINED_BYTES)}
    fields |= {name: Raw(b"[%b]" % (b"1" * size)) for name, size in sizes.items()}
    body = json_edit.write_body(fields)
    assert isinstance(body, LongBody)
    assert bytes(body) == msgspec.json.encode(fields)


def test_the_long_values_of_a_long_body_are_no_copies():
    long = b'"' + b"x" * json_edit.JOINED_BYTES + b'"'
    fields = {"few": Raw(b"1"), "many": Raw(long), "none": Raw(b"null")}
    (written,) = json_edit.write_body(fields).slices(10**6)
    assert [bytes(part) for part in written] == [b'{"few":1,"many":', long, b',"none":null}']
    assert written[1].obj is fields["many"]


def request_of(body):
    ask, deadlines = Ask(stream=False, model=None, prompt_bytes=3), Deadlines(1.0, 2.0, 3.0, 4.0)
    return Request("r", "openai", "/p", "", (), body, ask, 0.0, deadlines)


class TestLongLists:
    LONG = b"x" * json_edit.JOINED_BYTES
    BODY = b'{"a":["%b" , [1]],"b":[1,2,3%b],"c":[ {"d":1},"%b"],"few":["e"],"t":"%b"}' % (
        LONG,
        b",4" * 2**16,
        LONG,
        LONG,
    )

    def listed(self, *names, most=9):
        listed, pauses = run(json_edit.long_lists(indexed(request_of(self.BODY)), names, most))
        return {name: [bytes(one) for one in found] for name, found in listed.items()}, pauses

    def test_they_are_found_in_steps(self):
        listed, pauses = self.listed("a", "b", "c", "few", "t", "none")
        assert listed == {"a": [b'"%b"' % self.LONG, b"[1]"], "c": [b'{"d":1}', b'"%b"' % self.LONG]}
        assert pauses >= 4  # of 32 KiB each

    def test_no_more_than_are_wanted(self):
        assert self.listed("a", "c", most=1)[0] == {"a": [b'"%b"' % self.LONG], "c": [b'{"d":1}']}

    def test_none_in_the_body_of_a_request_that_goes_on(self):
        request = indexed(request_of(self.BODY))
        assert run(json_edit.long_lists(request.resumed(b"{}", request.ask, "7"), ("a",), 9)) == ({}, 0)

    def test_items_are_those_that_were_found_or_are_found_quickly(self):
        fields = {"a": Raw(b"[1,2]"), "long": Raw(b"[%b]" % (b"1," * 2**18 + b"1")), "x": Raw(b"7")}
        items = {
            name: json_edit.request_items(fields, name, {"b": [Raw(b"5")]}) for name in ("a", "b", "long", "x", "y")
        }
        assert {name: found and list(map(bytes, found)) for name, found in items.items()} == {
            "a": [b"1", b"2"], "b": [b"5"], "long": None, "x": None, "y": None,
        }  # fmt: skip


class TestRequestFields:
    BODY = b'{"a":1,"b":"x"}'
    REQUEST = Request(
        id="r", api="openai", path="/p", query="", headers=(), body=BODY,
        ask=Ask(stream=True, model=None, prompt_bytes=3), arrived_s=0.0, wire_id="7",
        deadlines=Deadlines(1.0, 2.0, 3.0, 4.0),
    )  # fmt: skip

    @staticmethod
    def plain(fields):
        return {name: bytes(value) for name, value in fields.items()}

    def test_without_an_index_the_body_is_read(self):
        assert self.plain(json_edit.request_fields(self.REQUEST)) == {"a": b"1", "b": b'"x"'}

    def test_an_index_is_believed(self):
        request = IndexedRequest.of(self.REQUEST, self.BODY, {"b": (11, 14)}, {})
        assert self.plain(json_edit.request_fields(request)) == {"b": b'"x"'}
        assert all(getattr(request, name) == getattr(self.REQUEST, name) for name in ("id", "ask", "wire_id", "body"))

    def test_what_was_changed_is_not_read_from_the_text(self):
        request = IndexedRequest.of(self.REQUEST, self.BODY, {"a": (5, 6), "b": (11, 14)}, {"b": Raw(b"7")})
        assert self.plain(json_edit.request_fields(request)) == {"a": b"1", "b": b"7"}

    def test_but_not_for_another_body(self):
        request = IndexedRequest.of(self.REQUEST, self.BODY, {"b": (11, 14)}, {})
        resumed = request.resumed(b'{"c":2}', request.ask, "8")
        assert self.plain(json_edit.request_fields(resumed)) == {"c": b"2"}

    def test_what_cannot_be_read_is_a_value_error(self):
        with pytest.raises(ValueError, match="not a JSON object"):
            json_edit.request_fields(self.REQUEST.resumed(b"[]", self.REQUEST.ask, ""))
