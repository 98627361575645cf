import json

import msgspec
import pytest
from msgspec import Raw

from coordinator.api import bodies
from coordinator.core.errors import BadRequest
from coordinator.wire.json_scan import index


class Body(msgspec.Struct, frozen=True):
    a: Raw = bodies.ABSENT
    b: Raw = bodies.ABSENT


DECODER = msgspec.json.Decoder(Body)


def read(body):
    return bodies.read(DECODER, body)


def test_fields_are_kept_as_they_stand():
    given = read(b' {"a" : [1, 2] , "x": {"y": 1}, "b":"\\u00e9"}\n')
    assert (bytes(given.a), bytes(given.b)) == (b"[1, 2]", b'"\\u00e9"')


def test_the_last_of_equal_keys_counts():
    assert bytes(read(b'{"a":1,"a":2}').a) == b"2"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[1]", "the body must be a JSON object"),
        (b"", "the body is empty, a JSON object is wanted"),
        (b" \r\n", "the body is empty, a JSON object is wanted"),
        (b'{"a":1,}', "the body is not valid JSON: trailing comma in object (byte 7)"),
        (b'{"a":"secret', "the body is not valid JSON: it ends too early, or a string holds half of a surrogate pair"),
        (b'{"a":NaN}', "the body is not valid JSON: invalid character (byte 5)"),
        (b'{"a":1}{"secret"', "the body is not valid JSON: trailing characters (byte 8)"),
        (
            b'{"a":"\\ud83d"}',
            "the body is not valid JSON: it ends too early, or a string holds half of a surrogate pair",
        ),
        (b'{"a":"\xff"}', "the body is not valid UTF-8"),
        (b'{"a":' * 5000, "the body is nested too deeply"),
    ],
)
def test_refusals_say_what_is_wrong(body, message):
    with pytest.raises(BadRequest) as caught:
        read(body)
    assert caught.value.message == message


def test_utf8_is_looked_for_up_to_its_limit():
    def body(size):
        return b'{"a":"\xff' + b" " * (size - 9) + b'"}'

    with pytest.raises(BadRequest):
        read(body(bodies.UTF8_CHECKED_BYTES))
    assert read(body(bodies.UTF8_CHECKED_BYTES + 1)).a


@pytest.mark.parametrize(
    ("parameters", "top", "wanted"),
    [
        (b'{"max_new_tokens":5,"max_tokens":6}', b"7", 5),
        (b'{"max_new_tokens":null,"max_tokens":6}', b"7", 6),
        (b'{"other":1}', b"7", 7),
        (b"[]", b"7", 7),
        (b"null", b"", None),
    ],
)
def test_parameter_limit(parameters, top, wanted):
    assert bodies.parameter_limit(Raw(parameters), Raw(top)) == wanted


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (b"[1,2,3]", 3),
        (b"[ 1 ,\n2 ]", 2),
        (b"[]", 0),
        (b"[ ]", 0),
        (b"[[]]", 0),
        (b"[[1,2],[ ],[3]]", 3),
        (b"[-1]", 1),
        (b'["1,2"]', None),
        (b'[[1],"a"]', None),
        (b"[1.5]", None),
        (b"[true]", None),
        (b"[null]", None),
        (b"[{}]", None),
        (b'"1,2"', None),
        (b"5", None),
        (b"", None),
    ],
)
def test_tokens_are_counted(value, wanted):
    assert bodies.tokens(Raw(value), b"") == wanted


def test_peek_takes_nothing_for_what_it_cannot_read():
    numbers = msgspec.json.Decoder(list[int])
    assert bodies.peek(numbers, Raw(b"[1]")) == [1]
    assert [bodies.peek(numbers, Raw(value)) for value in (b"", b"null", b"{}", b'["a"]')] == [None] * 4


def test_has_needs_a_readable_body():
    assert bodies.has(DECODER, b'{"a":0}', "a")
    assert not bodies.has(DECODER, b'{"a":null}', "a")
    assert not bodies.has(DECODER, b'{"a":0}', "b")
    assert not bodies.has(DECODER, b'{"a":0', "a")


def test_dump_writes_what_strict_readers_take():
    value = {"\ud800": ["a\udfff", {"b": "é"}, 1]}
    assert bodies.dump(value) == '{"?":["a?",{"b":"é"},1]}'.encode()
    assert bodies.dump({"a": None}) == b'{"a":null}'


def indexed(text):
    work = index(text)
    while True:
        try:
            next(work)
        except StopIteration as end:
            return bodies.Walked.indexed(text, end.value)


class TestWalkedBodies:
    TEXT = b'{"z": 1, "a":"one" ,"model":"alias", "b" :[1, 2]}'

    @pytest.mark.parametrize("walk", [bodies.walk, indexed])
    def test_they_are_read_as_any_other(self, walk):
        given = bodies.read(DECODER, walk(self.TEXT))
        assert given == read(self.TEXT)
        assert bodies.read(DECODER, walk(b'{"b":null}')) == Body(b=Raw(b"null"))
        assert bodies.has(DECODER, walk(self.TEXT), "b")
        assert not bodies.has(DECODER, walk(b'{"b":null}'), "b")

    @pytest.mark.parametrize("value", [b'"m"', b'"a much longer name"'])
    def test_a_changed_long_body_differs_in_that_value_alone(self, value):
        walked = indexed(self.TEXT)
        walked.change("model", value)
        assert bytes(walked.written()) == self.TEXT.replace(b'"alias"', value)
        assert {name: bytes(raw) for name, raw in walked.fields.items()} == {
            "z": b"1", "a": b'"one"', "model": value, "b": b"[1, 2]",
        }  # fmt: skip

    def test_several_changes(self):
        walked = indexed(self.TEXT)
        for name in ("model", "a", "model"):
            walked.change(name, b"7")
        assert bytes(walked.written()) == self.TEXT.replace(b'"alias"', b"7").replace(b'"one"', b"7")

    @pytest.mark.parametrize("walk", [bodies.walk, indexed])
    def test_what_was_not_changed_goes_on_as_it_came(self, walk):
        assert walk(self.TEXT).written() is self.TEXT

    def test_a_changed_short_body_has_its_values_as_they_were(self):
        walked = bodies.walk(self.TEXT)
        walked.change("model", b'"m"')
        assert walked.written() == b'{"z":1,"a":"one","model":"m","b":[1, 2]}'
        assert bytes(walked.fields["model"]) == b'"m"'
        assert walked.spans is None

    def test_of_equal_names_the_one_that_counts_is_changed(self):
        walked = indexed(b'{"model":"x","model":"y"}')
        walked.change("model", b"7")
        assert bytes(walked.written()) == b'{"model":"x","model":7}'

    def test_a_broken_short_body_is_refused(self):
        with pytest.raises(BadRequest):
            bodies.walk(b"[]")


@pytest.mark.parametrize("spaces", ["", " "])
@pytest.mark.parametrize(
    "value", [[], [1], [[]], [[], [], [7]], list(range(60000)), [[n] * (n % 3) for n in range(40000)], [[]] * 50000]
)
def test_tokens_of_any_number(value, spaces):
    numbers = sum(len(one) if isinstance(one, list) else 1 for one in value)
    text = json.dumps(value, separators=("," + spaces, ":")).replace("[]", f"[{spaces}]").encode()
    assert bodies.tokens(Raw(text), b"") == numbers


def test_what_is_long_and_no_token_array():
    numbers = b",".join([b"123"] * 60000)
    assert bodies.tokens(Raw(b"[" + numbers + b',"x"]'), b"") is None
    assert bodies.tokens(Raw(b"[" + numbers + b",1.5]"), b"") is None


def test_long_values_are_not_decoded():
    assert bodies.parameter_limit(Raw(b'{"max_tokens":3,"x":"' + b"x" * bodies.LONG_BYTES + b'"}')) is None
