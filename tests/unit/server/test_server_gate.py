"""What is refused before its body is read."""

import pytest

from coordinator.core.errors import InvalidKey
from coordinator.server.limits import ServerLimits
from coordinator.server.reader import RequestReader

HEAD = b"POST /p?q=1 HTTP/1.1\r\nHost: a\r\nX-Key: k\r\n"
LENGTH, CHUNKS, EXPECT = b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n"


class Gate:
    def __init__(self, error=None):
        self.asked = []
        self._error = error

    def __call__(self, method, path, headers):
        self.asked.append((method, path, dict(headers)[b"x-key"]))
        if self._error is not None:
            raise self._error
        return "what it has found"


@pytest.mark.parametrize("framing", [LENGTH, CHUNKS, LENGTH + EXPECT])
@pytest.mark.parametrize("early", [b"", b"5"])
def test_a_request_that_is_refused_is_complete_at_its_head_and_its_rest_unread(framing, early):
    gate = Gate(InvalidKey("no"))
    reader = RequestReader(ServerLimits(), gate)
    assert reader.feed(HEAD + framing + b"\r\n" + early) == b""
    assert (reader.complete, reader.unread, reader.wants_continue) == (True, True, False)
    assert isinstance(reader.refusal, InvalidKey)
    assert (reader.method, reader.path) == ("POST", "/p")
    assert gate.asked == [("POST", "/p", b"k")]


def test_one_that_is_let_in_is_read_and_asked_about_once():
    gate = Gate()
    reader = RequestReader(ServerLimits(), gate)
    for byte in HEAD + LENGTH + b"\r\nhello":
        reader.feed(bytes((byte,)))
    assert (reader.complete, reader.body, reader.refusal) == (True, b"hello", None)
    assert len(gate.asked) == 1
    assert reader.kept == "what it has found"


def test_one_without_a_body_is_left_to_its_handler():
    gate = Gate(InvalidKey("no"))
    reader = RequestReader(ServerLimits(), gate)
    reader.feed(HEAD.replace(b"POST", b"GET") + b"\r\n")
    assert (reader.complete, reader.refusal, reader.kept, gate.asked) == (True, None, None, [])
