import json

import pytest
from msgspec import Raw

from coordinator.wire import json_edit

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
