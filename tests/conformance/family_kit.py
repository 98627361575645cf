"""What every API family must do, whatever its dialect: held against its golden samples and against nonsense."""

import json
from pathlib import Path

import pytest

from coordinator.core import errors
from coordinator.core.errors import BadRequest, RequestError, Side
from coordinator.core.request import Ask

GOLDEN = Path(__file__).parent.parent / "golden" / "api"

SECRET = "10.1.2.3:9000 refused"
INSTANCE = "prefill-secret-7"
TOLD = "told"

BAD_BODIES = {
    "list": b"[]",
    "string": b'"x"',
    "null": b"null",
    "number": b"7",
    "broken": b"{bad",
    "empty": b"",
    "spaces": b" \n",
    "not UTF-8": b"\xff\xfe\x00",
    "brackets": b"[" * 100_000,
    "nested lists": b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested objects": b'{"x":' * 100_000 + b"1" + b"}" * 100_000,
    "NaN": b'{"x":NaN}',
    "infinity": b'{"x":-Infinity}',
    "cut list": b'{"x":[1,}',
    "cut string": b'{"x":"a',
    "comma too many": b'{"x":{"y":1,}}',
    "two objects": b"{}{}",
    "text after it": b"{} x",
    "NUL in a string": b'{"x":"a\0b"}',
    "NUL after it": b"{}\0",
    "text not UTF-8": b'{"x":"\xc3\x28"}',
    "key not UTF-8": b'{"\xff":1}',
    "half a surrogate pair": b'{"x":"\\ud83d abcdef"}',
    "single quotes": b"{'x':1}",
}

SAMPLES: dict[str, RequestError] = {
    "RequestError": RequestError(TOLD, detail=SECRET),
    "InternalError": errors.InternalError(SECRET),
    "BadRequest": BadRequest(TOLD, detail=SECRET),
    "InvalidKey": errors.InvalidKey(TOLD, detail=SECRET),
    "UnknownPath": errors.UnknownPath(TOLD, detail=SECRET),
    "UnknownModel": errors.UnknownModel(TOLD, detail=SECRET),
    "WrongMethod": errors.WrongMethod(TOLD, allow="POST"),
    "BodyTooLarge": errors.BodyTooLarge(TOLD, detail=SECRET),
    "KvTooLarge": errors.KvTooLarge(TOLD, detail=SECRET),
    "KvMemoryFull": errors.KvMemoryFull(TOLD, detail=SECRET),
    "UnsupportedEncoding": errors.UnsupportedEncoding(TOLD, detail=SECRET),
    "UnknownExpectation": errors.UnknownExpectation(TOLD, detail=SECRET),
    "HeadersTooLarge": errors.HeadersTooLarge(TOLD, detail=SECRET),
    "EngineRefused": errors.EngineRefused(422, 'told "twice"\n\ud800 \0 \N{SNOWMAN}'),
    "ClientGone": errors.ClientGone(TOLD, detail=SECRET),
    "SlowClient": errors.SlowClient(TOLD, detail=SECRET),
    "TooManyRequests": errors.TooManyRequests(TOLD),
    "KeyLimitReached": errors.KeyLimitReached(TOLD),
    "NoInstance": errors.NoInstance(TOLD, detail=SECRET),
    "Draining": errors.Draining(),
    "DeadlineExceeded": errors.DeadlineExceeded("first_token"),
    "EngineFailed": errors.EngineFailed(Side.DECODE, INSTANCE, "closed_early", detail=SECRET),
}


def compact(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def strict(data):
    """JSON as strict readers take it: UTF-8, no NaN, no half surrogate pairs."""
    value = json.loads(data.decode(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    json.dumps(value, ensure_ascii=False).encode()
    return value


def all_errors(base=RequestError):
    yield base
    for child in base.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from all_errors(child)


class FamilyKit:
    """The checks for one family; each raises AssertionError or passes."""

    def __init__(self, family):
        self.family = family
        self.golden = json.loads((GOLDEN / f"{family.name}.json").read_text())

    def paths(self):
        """One concrete path for each POST route."""
        fill = {"model": "m", "version": "1"}
        return [route.template.format(**fill) for route in self.family.routes if route.method == "POST"]

    def reads_golden_requests(self):
        for sample in self.golden["requests"]:
            body = compact(sample["body"])
            prompt_bytes = len(compact(sample["body"][sample["prompt"]]))
            asked = Ask(prompt_bytes=prompt_bytes, **sample["ask"])
            assert self.family.parse(sample["path"], body) == asked, sample["name"]
            spaced = json.dumps(sample["body"], indent=2, sort_keys=True).encode()
            loosely = self.family.parse(sample["path"], spaced)
            assert (loosely.stream, loosely.model) == (asked.stream, asked.model), sample["name"]
            assert (loosely.prompt_tokens, loosely.max_tokens) == (asked.prompt_tokens, asked.max_tokens)

    def has_a_golden_request_for_every_route(self):
        asked = {self.family.engine_path(sample["path"]) for sample in self.golden["requests"]}
        assert {self.family.engine_path(path) for path in self.paths()} <= asked

    def claims_its_golden_requests(self):
        for sample in self.golden["requests"]:
            assert self.family.claims(sample["path"], compact(sample["body"])), sample["name"]

    def maps_paths_for_engines(self):
        for sample in self.golden["requests"]:
            path = sample["path"]
            wanted = sample.get("engine_path", path)
            assert self.family.engine_path(path) == wanted
            assert self.family.engine_path(wanted) == wanted
            body = compact(sample["body"])
            assert self.family.parse(wanted, body) == self.family.parse(path, body), "a resumed request reads the same"

    def refuses_in_plain_words(self):
        for sample in self.golden["refused"]:
            with pytest.raises(BadRequest) as caught:
                self.family.parse(sample["path"], compact(sample["body"]))
            assert caught.value.message == sample["message"]

    def refuses_bad_bodies(self):
        for path in self.paths():
            for name, body in BAD_BODIES.items():
                assert not self.family.claims(path, body), name
                with pytest.raises(BadRequest) as caught:
                    self.family.parse(path, body)
                assert caught.value.status == 400, name
                assert "Error" not in caught.value.message, name

    def survives(self, body):
        """Whatever the body: a claim is true or false, and reading gives an Ask or BadRequest."""
        for path in self.paths():
            claimed = self.family.claims(path, body)
            assert claimed in (True, False)
            try:
                ask = self.family.parse(path, body)
            except BadRequest as error:
                strict(self.family.error_body(error))
                continue
            assert claimed
            assert isinstance(ask.stream, bool)
            assert ask.model is None or isinstance(ask.model, str)
            assert 0 < ask.prompt_bytes <= len(body)
            for count in (ask.prompt_tokens, ask.max_tokens):
                assert count is None or (isinstance(count, int) and count >= 0)

    def judges_any_piece(self, piece):
        assert self.family.only_opens(piece) in (True, False)
        assert self.family.ends(piece) in (True, False)

    def tells_errors_as_golden(self):
        for name, wanted in self.golden["errors"].items():
            assert strict(self.family.error_body(SAMPLES[name])) == wanted
            late = self.golden["late_errors"].get(name, wanted)
            assert self._unframed(self.family.error_event(SAMPLES[name])) == late

    def tells_every_error_in_its_shape(self):
        assert {kind.__name__ for kind in all_errors()} == set(SAMPLES), "each error class needs a sample"
        shape = _shape(next(iter(self.golden["errors"].values())))
        for error in SAMPLES.values():
            for value in (strict(self.family.error_body(error)), self._unframed(self.family.error_event(error))):
                assert _shape(value) == shape, error
                text = error.message.encode("utf-8", "replace").decode()
                told = value["error"]
                assert text == (told["message"] if isinstance(told, dict) else told)

    def leaks_nothing_internal(self):
        for error in SAMPLES.values():
            for data in (self.family.error_body(error), self.family.error_event(error)):
                for word in (SECRET, INSTANCE, "Traceback", type(error).__name__):
                    assert word.encode() not in data

    def knows_what_only_opens(self):
        for piece in self.golden["opening"]:
            assert self.family.only_opens(piece.encode()), piece
        for piece in (*self.golden["token"], *self.golden["last"]):
            assert not self.family.only_opens(piece.encode()), piece

    def knows_what_ends(self):
        for data in self.golden["last"]:
            assert self.family.ends(data.encode()), data
        for data in self.golden["unfinished"]:
            assert not self.family.ends(data.encode()), data

    def declares_sane_streams(self):
        assert self.family.stream_type.startswith(b"text/event-stream")
        assert not self.family.ends_with or self.family.ends(self.family.ends_with)

    def _unframed(self, event):
        start, end = (part.encode() for part in self.golden["frame"])
        assert event.startswith(start)
        assert event.endswith(end)
        inner = event.removeprefix(start).removesuffix(end)
        assert b"\n" not in inner
        assert b"\0" not in inner
        return strict(inner)


def _shape(value):
    """Keys and types, null apart."""
    if isinstance(value, dict):
        return {key: _shape(item) for key, item in value.items()}
    return type(value).__name__
