"""Model names, aliases, and headers that may travel on."""

import json

import pytest

from coordinator.api.families import FAMILIES
from coordinator.core.errors import UnknownModel
from coordinator.frontdoor.headers import forwardable, request_id
from coordinator.frontdoor.models import ModelNames

BY_NAME = {family.name: family for family in FAMILIES}


def names(model: str | None, aliases: tuple[str, ...] = (), served: tuple[str, ...] = ("m",)) -> ModelNames:
    return ModelNames(model, aliases, listed=lambda: served, accepted=lambda name: model is None or name in served)


def test_an_alias_means_the_configured_model() -> None:
    assert names("m", ("dummy",)).resolve("dummy") == "m"
    assert names("m").resolve("m") == "m"
    assert names(None).resolve("anything") == "anything"
    assert names(None, ("tgi",)).resolve("tgi") == "m"
    assert names("m").resolve(None) is None


def test_an_unknown_model_is_refused_and_cut() -> None:
    with pytest.raises(UnknownModel) as caught:
        names("m").resolve("x" * 1000)
    assert len(caught.value.message) < 300
    with pytest.raises(UnknownModel):
        names("m").known("nope")


def test_lists_hold_the_configured_name_first_and_once() -> None:
    assert names("m", served=("m", "n")).names() == ("m", "n")
    assert names(None, served=("a", "b")).names() == ("a", "b")


def test_a_body_is_renamed_and_otherwise_stays_as_it_was() -> None:
    body = b'{"model":"dummy","seed":9007199254740993, "x":{"a":null,"t":1e-9},"prompt":"\\u00e9"}'
    path, renamed = BY_NAME["openai"].renamed("/v1/completions", body, "m")
    assert path == "/v1/completions"
    assert json.loads(renamed) == {**json.loads(body), "model": "m"}
    assert b"9007199254740993" in renamed
    assert b'{"a":null,"t":1e-9}' in renamed


def test_a_triton_model_stands_in_the_path() -> None:
    path, body = BY_NAME["triton"].renamed("/v2/models/dummy/generate", b"{}", "a/b")
    assert (path, body) == ("/v2/models/a%2Fb/generate", b"{}")


def test_hop_by_hop_control_and_named_headers_stay_here() -> None:
    kept = ((b"traceparent", b"00-1"), (b"authorization", b"Bearer x"), (b"accept", b"*/*"))
    dropped = (
        (b"connection", b"keep-alive, X-Foo"), (b"x-foo", b"1"), (b"keep-alive", b"1"), (b"te", b"trailers"),
        (b"upgrade", b"h2c"), (b"host", b"evil"), (b"content-length", b"3"), (b"expect", b"100-continue"),
        (b"proxy-authorization", b"Basic x"), (b"req-id", b"1"), (b"d-target", b"203.0.113.9"), (b"d-port", b"1"),
        (b"is-recompute", b"true"), (b"req-type", b"decode"), (b"x-prefiller-host-port", b"h:1"),
        (b"x-data-parallel-host-port", b"h:1"), (b"x-request-id", b"same"), (b"content-encoding", b"gzip"),
    )  # fmt: skip
    assert forwardable(dropped + kept) == kept


@pytest.mark.parametrize("value", [b"", b"a\tb", b'a"b', b"\xff\xfe", b"x" * 129, b"a b"])
def test_ids_that_no_log_line_should_carry(value: bytes) -> None:
    assert request_id([(b"x-request-id", value)]) is None


def test_a_good_id_is_kept_and_two_are_not() -> None:
    assert request_id([(b"x-request-id", b"client-id-77")]) == "client-id-77"
    assert request_id([(b"x-request-id", b"one"), (b"x-request-id", b"two")]) is None
    assert request_id([]) is None
