import json
import time

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from long_request import run
from msgspec import Raw

from coordinator.core.errors import BadRequest
from coordinator.wire import json_scan
from coordinator.wire.json_scan import elements, fields_of, index

WALK = msgspec.json.Decoder(dict[str, Raw])
KIB = 1024


def scan(text, step_bytes=json_scan.STEP_BYTES):
    return {name: bytes(value) for name, value in fields_of(text, run(index(text, step_bytes))[0]).items()}


def walk(text):
    return {name: bytes(value) for name, value in WALK.decode(text).items()}


TRICKY = (
    rb' { "model" : "m\"\\" , "a":[ ] ,"b":{"x":[{"]}":"[{\"\\\\\""},"\\"],"y":"}"},"c":-1.5e+3,"":null,'
    rb'"d":"\\\\\\\"","\u006dodel":true, "e":[["a","\"]"],[[[]]],{"k":{}}]'
    b',"\xc3\xa9":"\xe4\xb8\xad\\n" }\r\n\t'
)

texts = st.text(st.one_of(st.sampled_from('"\\[]{},: \n'), st.characters(codec="utf-8")), max_size=12)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), texts)
values = st.recursive(scalars, lambda v: st.one_of(st.lists(v, max_size=5), st.dictionaries(texts, v, max_size=4)))
documents = st.dictionaries(texts, values, max_size=6)
shapes = st.sampled_from([(",", ":"), (" , ", " : "), (",\r\n\t", ": ")])


@pytest.mark.parametrize("step_bytes", range(1, len(TRICKY) + 1))
def test_the_fields_are_the_same_however_far_it_looks(step_bytes):
    assert scan(TRICKY, step_bytes) == walk(TRICKY)


@settings(deadline=None)
@given(documents, st.integers(1, 90), shapes, st.booleans())
def test_any_object_is_read_as_msgspec_reads_it(document, step_bytes, separators, ascii_only):
    text = json.dumps(document, separators=separators, ensure_ascii=ascii_only).encode()
    found = scan(text, step_bytes)
    assert found == walk(text)
    assert {name: json.loads(value) for name, value in found.items()} == document


@settings(deadline=None)
@given(documents, st.data(), st.integers(1, 90))
def test_a_broken_object_ends_in_bad_request_or_in_fields(document, data, step_bytes):
    text = bytearray(json.dumps(document, ensure_ascii=False).encode())
    at = data.draw(st.integers(0, len(text) - 1))
    match data.draw(st.sampled_from(["cut", "change", "insert"])):
        case "cut":
            del text[at:]
        case "change":
            text[at] = data.draw(st.sampled_from(b'"\\[]{},:x0\x01\xff'))
        case _:
            text[at:at] = data.draw(st.sampled_from([b'"', b"\\", b"[", b"}", b",", b'"\\', b"\x01"]))
    check_junk(bytes(text), step_bytes)


@settings(deadline=None)
@given(st.one_of(st.binary(max_size=60), st.text(st.sampled_from('{}[]",:\\ \x01a1-'), max_size=40)), st.integers(1, 9))
@example(b'{"a":[\\]}', 3)
@example(b'{"a":"\\', 2)
@example(b'{"a":["\\', 2)
def test_junk_ends_in_bad_request_or_in_fields(junk, step_bytes):
    text = junk if isinstance(junk, bytes) else junk.encode()
    check_junk(text, step_bytes)
    check_junk(b'{"a":' + text + b"}", step_bytes)


def check_junk(text, step_bytes):
    """What msgspec can read is read the same; of the rest, whatever the scan says does not depend on its steps."""
    said = outcome(text, step_bytes)
    assert said == outcome(text, 10**6)
    try:
        wanted = walk(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    assert said == wanted


def outcome(text, step_bytes):
    try:
        return scan(text, step_bytes)
    except BadRequest as error:
        return "refused" if error.message.startswith("the body ") else error


@pytest.mark.parametrize(
    "text",
    [
        b"", b" ", b"[]", b"7", b'"x"', b"{", b'{"a"', b'{"a":', b'{"a":1', b'{"a":1,}', b"{,}", b"{} x", b'{"a" 1}',
        b'{"a":1 "b":2}', b"{a:1}", b'{"a":01}', b'{"a":+1}', b'{"a":.5}', b'{"a":1.}', b'{"a":tru}', b'{"a":nulll}',
        b'{"a":"x}', b'{"a":["x]}', b'{"a":[1}', b'{"a":[1}]', b'{"a":{"b":[}]}', b'{"a":[1]]}', b'{"a":[\\"]"]}',
        b'{"a":[\x01]}', b'{"\\x":1}', b'{"\xff":1}', b'\xef\xbb\xbf{"a":1}', b'{"a":1}\x00',
    ],
)  # fmt: skip
def test_what_is_no_object_is_refused(text):
    with pytest.raises(BadRequest):
        scan(text)


def test_what_lies_below_the_outermost_level_is_the_engines_to_judge():
    assert scan(b'{"a":[1 2,,"\xff\n"]}') == {"a": b'[1 2,,"\xff\n"]'}


def test_the_last_of_two_equal_names_counts():
    assert scan(b'{"a":1,"b":0,"\\u0061":2}') == {"a": b"2", "b": b"0"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{" + b",".join(b'"%d":0' % n for n in range(json_scan.MAX_FIELDS + 1)) + b"}", "more than 4096 fields"),
        (b'{"a":' + b"[" * 2000 + b"]" * 2000 + b"}", "nested too deeply"),
        (b'{"' + b"a" * 5000 + b'":1}', "the name of a field is too long"),
        (b'{"a":' + b"1" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_limits(text, message):
    with pytest.raises(BadRequest, match=message):
        scan(text)


def test_limits_are_not_met_by_what_is_just_within_them():
    fields = b",".join(b'"%d":0' % n for n in range(json_scan.MAX_FIELDS))
    assert len(scan(b"{" + fields + b"}")) == json_scan.MAX_FIELDS
    deep = b"[" * 900 + b"]" * 900
    assert scan(b'{"a":' + deep + b"}") == {"a": deep}


LONG = {
    "text": b'{"p":"' + b"a b c " * 40000 + b'","s":true}',
    "escapes": b'{"p":"' + b'say \\"x\\\\\\" and\\n' * 15000 + b'","s":true}',
    "quotes": b'{"p":["' + b'\\"' * 120000 + b'"],"s":true}',
    "numbers": b'{"p":[' + b"12345," * 40000 + b'0],"s":true}',
    "strings": b'{"p":[' + b'"ab",' * 48000 + b'""],"s":true}',
    "objects": b'{"p":[' + b'{"a":[1]},' * 24000 + b'{}],"s":true}',
    "deep": b'{"p":[' + (b"[" * 500 + b"]" * 500 + b",") * 240 + b'0],"s":true}',
    "blank": b'{"p":' + b" " * 240000 + b'1,"s":true}',
    "messages": b'{"p":[' + (b'{"role":"user","content":"' + b"x\\n" * 300 + b'"},') * 250 + b'{}],"s":true}',
}


@pytest.mark.parametrize("kind", LONG)
def test_long_values(kind):
    text = LONG[kind]
    assert len(text) > 200 * KIB
    assert scan(text) == walk(text)


@pytest.mark.parametrize("kind", LONG)
def test_no_step_is_long(kind):
    """By processor time: a step of the slowest kind takes 1.5 ms on the slowest machine tried."""
    scans = [list(step_times(index(LONG[kind]))) for _ in range(3)]  # what is inherent shows in each of them
    assert max(map(min, *scans)) < 0.010


def step_times(work):
    """The processor time of each step, in seconds."""
    done = False
    while not done:
        began_s = time.thread_time()
        done = next(work, "done") == "done"
        yield time.thread_time() - began_s


class TestElements:
    @settings(deadline=None)
    @given(st.lists(values, max_size=6), st.integers(1, 90), shapes, st.integers(1, 7))
    def test_they_are_those_that_msgspec_finds(self, array, step_bytes, separators, most):
        text = b' {"x" :' + json.dumps(array, separators=separators).encode() + b',"y":[1]}'
        spans, _ = run(elements(text, text.index(b"["), most, step_bytes))
        whole = msgspec.json.Decoder(list[Raw]).decode(json.dumps(array, separators=separators))
        assert [text[start:end] for start, end in spans] == list(map(bytes, whole))[:most]

    @pytest.mark.parametrize("text", [b"[1 2]", b"[1,]", b"[,1]", b"[1;2]", b'["a" "b"]', b"[x]", b"[1"])
    def test_what_stands_between_them_is_judged(self, text):
        with pytest.raises(BadRequest, match="not valid JSON"):
            run(elements(text, 0, 9))

    @pytest.mark.parametrize("one", [b'"ab"', b"[1]", b'{"a":1}', b"7", b'"' + b"x" * 4 * json_scan.STEP_BYTES + b'"'])
    def test_in_steps(self, one):
        text = b"[" + b",".join([one] * (2**20 // len(one))) + b"]"
        _, pauses = run(elements(text, 0, 10**9))
        assert pauses >= len(text) // json_scan.STEP_BYTES - 1
