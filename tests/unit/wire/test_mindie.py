"""The result stream's messages: the literals of the protocol page, every split, odd bodies, limits."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.wire.chunked import ChunkError
from coordinator.wire.mindie import Frame, Kind, ResultParser

RETRY_BODY = b'{"prompt":"3,1,2,3,9","origin_inputs":"hi","stream":true,"max_tokens":8,"model":"None"}'
LITERALS: list[tuple[bytes, list[Frame]]] = [
    (b"d\r\nka:heartbeat\0\r\n", [(b"", Kind.HEARTBEAT, b"heartbeat")]),
    (b'23\r\nreqId:1234567\0data:data: {"x":1}\n\n\0\r\n', [(b"1234567", Kind.DATA, b'data: {"x":1}\n\n')]),
    (b'22\r\nreqId:1234567\0data:data:{"x":1}\n\n\0\r\n', [(b"1234567", Kind.DATA, b'data:{"x":1}\n\n')]),
    (b'23\r\nreqId:1234567\0data:{"text":["a"]}\0\0\r\n', [(b"1234567", Kind.DATA, b'{"text":["a"]}\0')]),
    (b'27\r\nreqId:1234567\0lastData:data: {"x":2}\n\n\0\r\n', [(b"1234567", Kind.LAST_DATA, b'data: {"x":2}\n\n')]),
    (b"26\r\nreqId:1234567\0lastData:data: [DONE]\n\n\0\r\n", [(b"1234567", Kind.LAST_DATA, b"data: [DONE]\n\n")]),
    (
        b'2f\r\nreqId:1234567\0lastData:{"generated_text":"hi"}\0\r\n',
        [(b"1234567", Kind.LAST_DATA, b'{"generated_text":"hi"}')],
    ),
    (
        b"31\r\nreqId:1234567\0error:Pull kv failed irreversibly.\0\r\n",
        [(b"1234567", Kind.ERROR, b"Pull kv failed irreversibly.")],
    ),
    (
        b"6c\r\nreqId:1234567\0retry:" + RETRY_BODY + b"\0\r\n",
        [(b"1234567", Kind.RETRY, RETRY_BODY)],
    ),
    (
        b"54\r\nreqId:0xffffffffffffffff\0close:new connection is to established, close the old one.\0\r\n",
        [(b"0xffffffffffffffff", Kind.CLOSE, b"new connection is to established, close the old one.")],
    ),
    (
        b'2a\r\nreqId:1\0data:data: {"x":1}\n\n\0ka:heartbeat\0\r\n',
        [(b"1", Kind.DATA, b'data: {"x":1}\n\n'), (b"1", Kind.HEARTBEAT, b"heartbeat")],
    ),
]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def message(rid: bytes, keyword: bytes, body: bytes) -> bytes:
    return b"reqId:%b\0%b:%b\0" % (rid, keyword, body)


def read(raw: bytes, step: int = 10**9) -> list[Frame]:
    parser, frames = ResultParser(1 << 20), []
    for at in range(0, len(raw), step):
        frames += parser.feed(raw[at : at + step])
    return frames


@pytest.mark.parametrize(("raw", "frames"), LITERALS)
def test_literals_of_the_protocol_page(raw: bytes, frames: list[Frame]) -> None:
    for step in (10**9, 1, 2, 3, 7):
        assert read(raw, step) == frames


def test_all_literals_in_one_read_and_the_end() -> None:
    parser = ResultParser(1 << 20)
    raw = b"".join(raw for raw, _ in LITERALS) + b"0\r\n\r\n"
    assert parser.feed(raw) == [frame for _, frames in LITERALS for frame in frames]
    assert parser.ended


def test_a_message_over_several_chunks() -> None:
    whole = message(b"12", b"data", 'data: {"t":"你好🌍"}\n\n'.encode())
    for size in (1, 2, 3, 5, 20):
        raw = b"".join(chunk(whole[at : at + size]) for at in range(0, len(whole), size))
        assert read(raw) == [(b"12", Kind.DATA, whole[len(b"reqId:12\0data:") : -1])]
        assert read(raw, 1) == read(raw)


def test_several_messages_in_one_chunk_keep_their_ids() -> None:
    raw = message(b"1", b"data", b"a") + message(b"2", b"data", b"b\0") + message(b"2", b"lastData", b"c")
    assert read(chunk(raw)) == [(b"1", Kind.DATA, b"a"), (b"2", Kind.DATA, b"b\0"), (b"2", Kind.LAST_DATA, b"c")]


def test_an_id_stays_in_force_for_the_rest_of_its_chunk_only() -> None:
    raw = b"reqId:5\0data:a\0data:b\0lastData:c\0"
    assert read(chunk(raw) + chunk(b"data:stray\0")) == [
        (b"5", Kind.DATA, b"a"),
        (b"5", Kind.DATA, b"b"),
        (b"5", Kind.LAST_DATA, b"c"),
        (b"", Kind.DATA, b"stray"),
    ]


@pytest.mark.parametrize("body", [b"", b":", b" leading", b"a:b:c\n", b"\0", b"a\0b", b"\0\0", b"re\0q", b"data\0x"])
def test_bodies_are_opaque(body: bytes) -> None:
    assert read(chunk(message(b"9", b"data", body))) == [(b"9", Kind.DATA, body)]


def test_unknown_keywords_and_junk_do_not_stop_the_stream() -> None:
    raw = chunk(message(b"9", b"later", b"x")) + chunk(b"junk\0") + chunk(b"x" * 40 + b"\0") + chunk(b"\0")
    frames = read(raw + chunk(message(b"9", b"data", b"y")))
    assert frames[0] == (b"9", Kind.UNKNOWN, b"x")
    assert frames[-1] == (b"9", Kind.DATA, b"y")
    assert all(kind is Kind.UNKNOWN for _, kind, _ in frames[:-1])


def test_an_oversized_message_is_named_and_the_others_go_on() -> None:
    parser = ResultParser(1000)
    raw = chunk(message(b"1", b"data", b"z" * 5000)) + chunk(message(b"2", b"data", b"ok"))
    frames = parser.feed(raw)
    assert sorted(frames, key=lambda f: f[0]) == [(b"1", Kind.OVERSIZED, b""), (b"2", Kind.DATA, b"ok")]


def test_a_message_that_grows_over_many_chunks_is_bounded() -> None:
    parser = ResultParser(1000)
    frames = parser.feed(chunk(b"reqId:3\0data:"))
    for _ in range(30):
        frames += parser.feed(chunk(b"z" * 100))
    assert (b"3", Kind.OVERSIZED, b"") in frames


def test_a_long_body_in_tiny_chunks_arrives_whole() -> None:
    whole = message(b"1", b"data", b"a\0b" * 20_000)
    raw = b"".join(chunk(whole[at : at + 9]) for at in range(1, len(whole), 9))
    raw = chunk(whole[:1]) + raw
    assert read(raw) == [(b"1", Kind.DATA, b"a\0b" * 20_000)]


ids = st.from_regex(rb"[0-9]{1,20}", fullmatch=True)
bodies = st.binary(max_size=60).filter(lambda b: b"\0" not in b)
messages = st.tuples(ids, st.sampled_from([b"data", b"lastData", b"error", b"retry"]), bodies)


@given(st.lists(st.lists(messages, min_size=1, max_size=4), max_size=6), st.data())
def test_any_grouping_and_any_split(groups: list[list[tuple[bytes, bytes, bytes]]], data: st.DataObject) -> None:
    raw = b"".join(chunk(b"".join(message(*m) for m in group)) for group in groups)
    cuts = sorted({0, len(raw), *data.draw(st.lists(st.integers(0, len(raw)), max_size=10))})
    parser, frames = ResultParser(1 << 20), []
    for start, stop in itertools.pairwise(cuts):
        frames += parser.feed(raw[start:stop])
    assert frames == [(rid, Kind(keyword), body) for group in groups for rid, keyword, body in group]


odd_bodies = st.lists(
    st.sampled_from([b"a", b":", b"\0", b"\r\n", b"\0\r\n", b"\r\nreqId:7", b"5\r\n", b'{"x":1}\n\n']), max_size=6
).map(b"".join)
size_lines = st.sampled_from([b"%x", b"%X", b"0%x", b"%x;q=1", b"%x "])


@given(st.lists(st.tuples(messages, odd_bodies, size_lines), max_size=8), st.data())
def test_a_chunk_of_its_own_ends_a_message_whatever_its_body(
    said: list[tuple[tuple[bytes, bytes, bytes], bytes, bytes]], data: st.DataObject
) -> None:
    """What looks like the end of a message, or the begin of another, is a body's where the chunk's size says so."""
    wholes = [(message(rid, keyword, body), line) for (rid, keyword, _), body, line in said]
    raw = b"".join(b"%b\r\n%b\r\n" % (line % len(whole), whole) for whole, line in wholes)
    cuts = sorted({0, len(raw), *data.draw(st.lists(st.integers(0, len(raw)), max_size=6))})
    parser, frames = ResultParser(1 << 20), []
    for start, stop in itertools.pairwise(cuts):
        frames += parser.feed(raw[start:stop])
    assert frames == [(rid, Kind(keyword), body) for (rid, keyword, _), body, _ in said]


@pytest.mark.parametrize(
    "raw", [b"23\r\nreqId:1\0data:a\0\r\n", b"5\r\nreqId:1\0data:a\0\r\n", b"\r\nreqId:1\0data:a\0\r\n"]
)
def test_a_size_that_is_not_the_chunks_is_not_believed(raw: bytes) -> None:
    parser = ResultParser(1 << 20)
    try:
        frames = parser.feed(chunk(message(b"0", b"data", b"ok")) + raw)
    except ChunkError:
        return
    assert frames == [(b"0", Kind.DATA, b"ok")]


def test_what_is_no_size_line_is_not_remembered() -> None:
    """Lines are remembered as long as the stream lasts, and an odd message may be large."""
    parser = ResultParser(1 << 20)
    for number in range(50):
        assert parser.feed(chunk(b"later:%d" % number + b"z" * 1000 + b"\0"))
        assert parser.feed(chunk(message(b"1", b"data", b"y")))
    sizes = {len(message(b"1", b"data", b"y")), *(len(b"later:%d" % n + b"z" * 1000 + b"\0") for n in (0, 10))}
    assert set(parser._decoder.sizes) == {b"%x" % size for size in sizes}


def test_a_message_at_the_limit_and_one_above_it() -> None:
    parser = ResultParser(100)
    fits, above = (message(b"1", b"data", b"z" * size) for size in (100 - len(message(b"1", b"data", b"")), 100))
    for _ in range(2):
        assert parser.feed(chunk(fits)) == [(b"1", Kind.DATA, fits[13:-1])]
        assert parser.feed(chunk(above)) == [(b"1", Kind.OVERSIZED, b"")]


@given(st.binary(max_size=300), st.integers(1, 9))
def test_no_bytes_break_the_parser_inside_good_chunks(junk: bytes, step: int) -> None:
    raw = b"".join(chunk(junk[at : at + step]) for at in range(0, len(junk), step))
    read(raw)
