"""Every family in the table against the kit."""

import json

import pytest

pytest.register_assert_rewrite("family_kit")

from family_kit import GOLDEN, FamilyKit  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from coordinator.api.families import FAMILIES  # noqa: E402

KITS = [FamilyKit(family) for family in FAMILIES]
CHECKS = (
    "reads_golden_requests",
    "has_a_golden_request_for_every_route",
    "claims_its_golden_requests",
    "maps_paths_for_engines",
    "refuses_in_plain_words",
    "refuses_bad_bodies",
    "tells_errors_as_golden",
    "tells_every_error_in_its_shape",
    "leaks_nothing_internal",
    "knows_what_only_opens",
    "knows_what_ends",
    "declares_sane_streams",
)
each = pytest.mark.parametrize("kit", KITS, ids=[family.name for family in FAMILIES])

KEYS = st.sampled_from(
    ("model", "messages", "prompt", "inputs", "input_id", "text_input", "parameters", "stream", "max_tokens",
     "max_completion_tokens", "max_new_tokens", "text", "input_ids", "input_embeds", "sampling_params", "data", "x")
)  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=8)
PARTS = st.sampled_from(
    (b"data: ", b"data:", b"\n", b"\n\n", b": ping", b"{", b"}", b'"choices":[', b"]", b'"delta":{', b'"role":"a"',
     b'"content":""', b'"finish_reason":"', b'"generated_text":"', b"null", b"[DONE]", b",", b"\0", b"\xff")
)  # fmt: skip
PIECES = st.lists(PARTS, max_size=12).map(b"".join)


@each
@pytest.mark.parametrize("check", CHECKS)
def test_family_conforms(kit, check):
    getattr(kit, check)()


def test_every_golden_file_is_a_familys():
    assert {path.stem for path in GOLDEN.glob("*.json")} == {family.name for family in FAMILIES}


@each
@settings(max_examples=150, deadline=None)
@given(value=OBJECTS)
def test_any_json_object_is_read_or_refused(kit, value):
    kit.survives(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))


@each
@settings(max_examples=50, deadline=None)
@given(value=VALUES)
def test_any_json_is_read_or_refused(kit, value):
    kit.survives(json.dumps(value).encode())


@each
@settings(max_examples=100, deadline=None)
@given(body=st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(kit, body):
    kit.survives(body)
    kit.judges_any_piece(body)


@each
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_requests_are_read_or_refused(kit, data):
    sample = data.draw(st.sampled_from(kit.golden["requests"]))
    body = bytearray(json.dumps(sample["body"], ensure_ascii=False).encode())
    at = data.draw(st.integers(0, len(body) - 1))
    body[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    kit.survives(bytes(body))


@each
@settings(max_examples=150, deadline=None)
@given(piece=PIECES)
def test_any_piece_is_judged(kit, piece):
    kit.judges_any_piece(piece)
