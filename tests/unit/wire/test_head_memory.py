import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.wire.head_memory import MAX_LESSONS, HeadMemory

DATE = b"Mon, 30 Nov 2026 02:40:05 GMT"
LATER = b"Tue, 01 Dec 2026 10:00:59 GMT"


def head(length=b"12", date=DATE, extra=b""):
    return b"HTTP/1.1 200 OK\r\nDate: %b\r\nserver: x\r\nContent-Length:  %b\r\n%b\r\n" % (date, length, extra)


def headers(length=b"12", date=DATE):
    return ((b"date", date), (b"server", b"x"), (b"content-length", length))


def learned(*, dated=True):
    memory = HeadMemory()
    memory.learn(head(), headers(), "what", dated=dated)
    return memory


def test_nothing_is_known_at_first():
    memory = HeadMemory()
    assert memory.what is None
    assert [memory.find(data) for data in (b"", b"\n", b"\r\n", head())] == [-1] * 4


def test_the_same_head_again():
    memory = learned()
    assert memory.find(head() + b"body") == len(head())
    assert (memory.what, memory.headers, memory.length) == ("what", headers(), 12)


@pytest.mark.parametrize("length", [b"0", b"7", b"007", b"1234567890123456789"])
def test_another_length(length):
    memory = learned()
    assert memory.find(head(length) + b"body") == len(head(length))
    assert (memory.headers, memory.length) == (headers(length), int(length))
    assert memory.find(head()) == len(head()), "and back"
    assert (memory.headers, memory.length) == (headers(), 12)


@pytest.mark.parametrize(
    "length",
    [
        b"",
        b" ",
        b"1 ",
        b"+1",
        b"-1",
        b"0x1",
        b"1_0",
        b"1,1",
        "\uff11".encode(),
        b"1\n",
        b"12345678901234567890",
        b"1" * 99,
    ],
)
def test_what_is_no_length_is_left_to_a_parser(length):
    assert learned().find(head(length)) == -1


def test_another_date_where_it_may_differ():
    memory = learned()
    assert memory.find(head(b"5", LATER)) == len(head(b"5", LATER))
    assert (memory.headers, memory.length) == (headers(b"5", LATER), 5)
    assert learned(dated=False).find(head(date=LATER)) == -1
    assert learned(dated=False).find(head(b"5")) == len(head(b"5"))


@pytest.mark.parametrize("date", [b"", DATE[:-1], DATE + b" ", b"Mon, 30 Nov\nx: y 02:40:05 GMT ", DATE.lower()])
def test_what_is_no_date_is_left_to_a_parser(date):
    assert learned().find(head(date=date)) == -1


def test_a_part_of_a_head_is_not_known():
    memory = learned()
    assert all(memory.find(head()[:end]) == -1 for end in range(len(head())))


@given(st.data())
def test_a_head_that_differs_anywhere_else_is_not_known(data):
    known = head()
    at = data.draw(st.integers(0, len(known) - 1))
    other = bytearray(known)
    other[at] = data.draw(st.integers(0, 255).filter(lambda byte: byte != known[at]))
    memory = learned()
    if memory.find(bytes(other)) >= 0:
        values = dict(memory.headers)
        assert bytes(other) == head(values[b"content-length"], values[b"date"])
        assert values[b"content-length"].isdigit()


@pytest.mark.parametrize(
    ("raw", "read"),
    [
        (head(extra=b"content-length: 12\r\n"), (*headers(), (b"content-length", b"12"))),
        (head(b"+1"), headers(b"+1")),
    ],
    ids=["two lengths", "no number"],
)
def test_heads_that_are_not_learned(raw, read):
    memory = learned()
    memory.learn(raw, read, "other")
    assert memory.what is None
    assert memory.find(raw) == -1
    assert memory.find(head()) == -1, "the one before is forgotten"


@pytest.mark.parametrize(
    ("raw", "read", "length"),
    [
        (b"HTTP/1.1 200 OK\r\nserver: x\r\n\r\n", ((b"server", b"x"),), 0),
        (head(b"12 "), headers(), 12),
        (b"HTTP/1.1 200 OK\nContent-Length: 12\n\n", ((b"content-length", b"12"),), 12),
    ],
    ids=["no length", "space behind it", "bare line ends"],
)
def test_heads_that_are_known_as_they_are_alone(raw, read, length):
    memory = HeadMemory()
    memory.learn(raw, read, "what", dated=True)
    assert (memory.find(raw), memory.headers, memory.length) == (len(raw), read, length)
    assert memory.find(raw.replace(b"12", b"13")) == (-1 if length else len(raw))


def test_a_peer_that_never_says_the_same_twice_is_given_up():
    memory = HeadMemory()
    for number in range(MAX_LESSONS):
        memory.learn(head(extra=b"x-id: %d\r\n" % number), headers(), "what")
        assert memory.what == "what"
    memory.learn(head(), headers(), "what")
    assert memory.find(head()) == -1


def test_a_peer_that_does_is_not():
    memory = HeadMemory()
    for number in range(3 * MAX_LESSONS):
        memory.learn(head(extra=b"x-id: %d\r\n" % number), headers(), number)
        assert memory.find(head(b"5", extra=b"x-id: %d\r\n" % number)) > 0
        assert memory.what == number
