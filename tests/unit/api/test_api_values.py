import pytest
from msgspec import Raw

from coordinator.api import values
from coordinator.core.errors import BadRequest


@pytest.mark.parametrize(("value", "is_given"), [(b"", False), (b"null", False), (b"true", True), (b'""', True)])
def test_null_is_absent(value, is_given):
    assert values.given(Raw(value)) is is_given


@pytest.mark.parametrize(("value", "wanted"), [(b"", False), (b"null", False), (b"false", False), (b"true", True)])
def test_flag(value, wanted):
    assert values.flag(Raw(value), "a") is wanted


@pytest.mark.parametrize("value", [b"1", b"0", b'"true"', b"[]", b"{}", b"[1,2,3,4,5]"])
def test_flag_of_another_type_is_refused_by_name(value):
    with pytest.raises(BadRequest, match="`stream`"):
        values.flag(Raw(value), "stream")


def test_text():
    assert values.text(Raw(b'"a\\u00e9"'), "model") == "aé"
    assert values.text(Raw(b"null"), "model") is None


def test_text_that_is_too_long():
    with pytest.raises(BadRequest, match="`model` is too long"):
        values.text(Raw(b'"' + b"x" * 70000 + b'"'), "model")


@pytest.mark.parametrize("value", [b"1", b"{}", b'"\xff"', b'"\\ud800 abcdef"'])
def test_text_of_another_type_is_refused_by_name(value):
    with pytest.raises(BadRequest, match="`model`"):
        values.text(Raw(value), "model")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ((b"7",), 7),
        ((b"null", b"8"), 8),
        ((b"1", b"8"), 1),
        ((b"", b""), None),
        ((b"-1",), None),
        ((b"1.5",), None),
        ((b'"9"', b"8"), None),
        ((b"9" * 18,), int("9" * 18)),
        ((b"9" * 5000,), None),
    ],
)
def test_limit(given, wanted):
    assert values.limit(*map(Raw, given)) == wanted
