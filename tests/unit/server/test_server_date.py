import pytest
from server_fakes import FakeClock, Wire, get

from coordinator.server.date import DateLine

LINE = b"Date: Sun, 06 Nov 1994 08:49:37 GMT\r\n"  # RFC 9110 §5.6.7
AT_S = 784111777


def test_it_has_the_form_of_the_rfc():
    assert DateLine(lambda: AT_S + 0.9)() == LINE


def test_it_goes_with_the_time_and_is_written_down_once_a_second():
    clock = FakeClock()
    clock.now_s = AT_S + 0.1
    line = DateLine(clock)
    assert line() == LINE
    clock.now_s += 0.8
    assert line() is line()
    clock.now_s += 0.2
    assert line() == LINE.replace(b":37", b":38")
    clock.now_s = AT_S - 3600
    assert line() == LINE.replace(b" 08:", b" 07:"), "a clock that was set back"


@pytest.mark.parametrize("how", ["whole", "stream", "refused"])
async def test_every_answer_has_it_once(how):
    async def answer(exchange):
        if how == "stream":
            exchange.start(200, ())
            exchange.end(b"x")
        else:
            exchange.respond(200 if exchange.refusal is None else exchange.refusal.status, (), b"x")

    wire = Wire(answer, date=DateLine(lambda: AT_S))
    await wire.feed(get() if how != "refused" else get(version="3.0"))
    assert wire.sent.count(b"\r\n" + LINE) == 1
    await wire.aclose()


async def test_an_answer_to_a_handler_that_failed_has_it():
    async def fail(exchange):
        raise ZeroDivisionError

    wire = Wire(fail, date=DateLine(lambda: AT_S))
    await wire.feed(get())
    assert wire.sent.startswith(b"HTTP/1.1 500 ")
    assert wire.sent.count(LINE) == 1
    await wire.aclose()
