"""What goes out to SGLang engines: rooms, and a body that is otherwise the client's."""

import json

import pytest

from coordinator.wire.json_edit import read_fields
from coordinator.wire.sglang import (
    CONTROL,
    MAX_SEQUENCES,
    TooManySequences,
    asks_logprobs,
    room_of,
    sequences_of,
    with_rooms,
    without_control,
)


def sequences(body, *, native=False):
    """The count for compact and for loose JSON."""
    counts = {
        sequences_of(read_fields(json.dumps(body, **style).encode()), native=native)
        for style in ({"separators": (",", ":")}, {"indent": 40})
    }
    assert len(counts) == 1
    return counts.pop()


# --- rooms


def test_rooms_are_distinct_integers_of_63_bits():
    ids = [*range(5000), *range(2**63 - 5000, 2**63), *(7 << 55 | number for number in range(5000))]
    rooms = [room_of(number) for number in ids]
    assert len(set(rooms)) == len(ids)
    assert all(0 <= room < 2**63 for room in rooms)
    assert max(rooms) > 2**62 > min(rooms)


def test_every_other_room_is_not_tied_to_a_rank():
    for dp_size in (2, 4, 8):
        ranks = [room_of(number) % dp_size for number in range(10_000, 14_000, 2)]
        shares = [ranks.count(rank) / len(ranks) for rank in range(dp_size)]
        assert all(0.8 / dp_size < share < 1.2 / dp_size for share in shares), shares


# --- how many


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, None),
        ({"messages": [], "n": 1}, None),
        ({"messages": [], "n": None}, None),
        ({"messages": [], "n": 0}, None),
        ({"messages": [], "n": -3}, None),
        ({"messages": [], "n": "many"}, None),
        ({"messages": [], "n": True}, None),
        ({"messages": [], "n": 3}, 3),
        ({"messages": [], "n": 3.0}, 3),
        ({"prompt": "a"}, None),
        ({"prompt": [1, 2, 3]}, None),
        ({"prompt": [-1, 2, 3]}, None),
        ({"prompt": []}, None),
        ({"prompt": ["a"]}, 1),
        ({"prompt": ["a", "b"]}, 2),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": [[1, 2], [3]], "n": 2}, 4),
        ({"prompt": "a", "n": 2}, 2),
        ({"prompt": "a", "text": ["b", "c"]}, None),
    ],
)
def test_sequences_of_openai_bodies(body, count):
    assert sequences(body) == count


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"text": "a"}, None),
        ({"text": ["a"]}, 1),
        ({"text": ["a", "b", "c"]}, 3),
        ({"input_ids": [1, 2]}, None),
        ({"input_ids": [[1, 2], [3]]}, 2),
        ({"text": None, "input_ids": [[1, 2], [3]]}, 2),
        ({"text": "a", "input_ids": [[1, 2], [3]]}, None),
        ({"input_embeds": [[0.5, 1.5], [2.5, 3.5]]}, None),
        ({"input_embeds": [[[0.5, 1.5]], [[2.5, 3.5]]]}, 2),
        ({"text": "a", "sampling_params": {"n": 4}}, 4),
        ({"text": ["a", "b"], "sampling_params": {"n": 4}}, 8),
        ({"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 2}]}, 4),
        ({"text": ["a", "b"], "sampling_params": [{}, {}]}, 2),
        ({"text": "a", "sampling_params": {"n": 4, "beam_width": 4}}, None),
        ({"text": "a", "sampling_params": None}, None),
        ({"text": "a", "sampling_params": [1]}, None),
        ({"text": "a", "sampling_params": "x"}, None),
        ({"text": "a", "n": 4}, None),
        ({}, None),
    ],
)
def test_sequences_of_native_bodies(body, count):
    assert sequences(body, native=True) == count


def test_a_room_for_everybody_has_an_end():
    assert sequences({"messages": [], "n": MAX_SEQUENCES}) == MAX_SEQUENCES
    for body in ({"messages": [], "n": MAX_SEQUENCES + 1}, {"messages": [], "n": 1e300}):
        with pytest.raises(TooManySequences, match=str(MAX_SEQUENCES)):
            sequences(body)


# --- bodies


def test_all_else_stays_as_it_was_written():
    body = (
        b'{ "seed" : 9007199254740993 , "top_p":1e-9,"x":{"a":null,"b":[1,{"c":"\\u00e9\xc3\xa9"}] },'
        b'"messages":[ {"role":"critic","content":null} ],"stream":true}'
    )
    fields = read_fields(body)
    sent = with_rooms(dict(fields), "p.example", 8998, [2**63 - 1], batch=False)
    after = read_fields(sent)
    for name, value in fields.items():
        assert bytes(after.pop(name)) == bytes(value)
    assert {name: bytes(value) for name, value in after.items()} == {
        "bootstrap_host": b'"p.example"',
        "bootstrap_port": b"8998",
        "bootstrap_room": b"9223372036854775807",
    }


def test_a_batch_has_arrays():
    sent = json.loads(with_rooms({}, "::1", 9000, [5, 6, 7], batch=True))
    assert sent == {"bootstrap_host": ["::1"] * 3, "bootstrap_port": [9000] * 3, "bootstrap_room": [5, 6, 7]}
    sent = json.loads(with_rooms({}, "::1", 9000, [5], batch=True))
    assert sent == {"bootstrap_host": ["::1"], "bootstrap_port": [9000], "bootstrap_room": [5]}


def test_a_client_steers_nothing():
    body = json.dumps({"text": "a", "id": "x", "request_id": "y", **dict.fromkeys(sorted(CONTROL), "evil")}).encode()
    sent = json.loads(with_rooms(read_fields(body), "h", 1, [2], batch=False))
    kept = {"text": "a", "id": "x", "request_id": "y"}
    assert sent == {**kept, "bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 2}
    assert json.loads(without_control(read_fields(body))) == kept
    assert without_control(read_fields(b'{"text":"rid"}')) is None


@pytest.mark.parametrize(
    ("value", "asked"),
    [("true", True), ("[true,false]", True), ("[false]", True), ("false", False), ("null", False), ("1", False)],
)
def test_who_asks_for_logprobs(value, asked):
    assert asks_logprobs(read_fields(b'{"return_logprob":%b}' % value.encode())) is asked
    assert not asks_logprobs({})
