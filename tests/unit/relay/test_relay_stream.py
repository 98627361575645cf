"""What an engine sends on its way to the client: heads, ends, times."""

import math

import pytest
from engine_world import observed
from relay_world import BY_NAME, T0, Case

from coordinator.core.errors import EngineFailed, Side

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
A = b'data: {"choices":[{"index":0,"delta":{"content":"A"},"finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"delta":{"content":"z"},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


class TestHead:
    def test_it_goes_out_with_the_first_piece_in_one_write(self):
        case = Case()
        assert not case.relay.started
        case.relay.piece(A, T0 + 1)
        assert len(case.client.writes) == 1
        assert case.relay.started
        assert case.client.status == case.record.status == 200
        assert case.client.body == A
        assert not case.client.whole

    def test_its_headers(self):
        case = Case()
        case.relay.piece(A, T0 + 1)
        headers = case.client.headers
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        assert headers["cache-control"] == "no-cache"
        assert headers["x-accel-buffering"] == "no"
        assert headers["x-request-id"] == "client-7"
        assert headers["transfer-encoding"] == "chunked"
        assert not any(name.startswith("x-pd-") for name in headers)

    @pytest.mark.parametrize("stream", [True, False])
    def test_the_route_where_it_shall_be_told(self, stream):
        case = Case(tell_route=True)
        case.record.prefill, case.record.decode, case.record.attempts = "p0", "d1", 2
        if stream:
            case.relay.piece(A, T0 + 1)
        else:
            case.relay.whole(b"{}", T0 + 1)
        headers = case.client.headers
        assert (headers["x-pd-prefill"], headers["x-pd-decode"], headers["x-pd-attempts"]) == ("p0", "d1", "2")

    def test_the_route_of_a_failure_too(self):
        case = Case(tell_route=True)
        case.record.prefill, case.record.decode, case.record.attempts = "p0", "d1", 3
        case.relay.fail(EngineFailed(Side.PREFILL, "p0", "reset"))
        assert case.client.headers["x-pd-attempts"] == "3"

    def test_no_route_where_none_was_found(self):
        case = Case(tell_route=True)
        case.relay.fail(EngineFailed(Side.PREFILL, "p0", "reset"))
        assert "x-pd-prefill" not in case.client.headers

    def test_one_write_for_each_piece(self):
        case = Case()
        for number in range(4):
            case.relay.piece(A, T0 + number)
        assert len(case.client.writes) == 4
        assert case.client.body == A * 4
        assert case.relay.pieces == 4

    def test_the_line_about_it_counts_its_bytes(self):
        stream, broken, whole, failed = Case(), Case(), Case(), Case()
        stream.relay.piece(A, T0 + 1)
        stream.relay.finish(A, T0 + 2)
        broken.relay.piece(A, T0 + 1)
        broken.relay.fail(EngineFailed(Side.DECODE, "d0", "reset"))
        whole.relay.whole(b"{}", T0 + 1)
        failed.relay.fail(EngineFailed(Side.DECODE, "d0", "reset"))
        for case in (stream, broken, whole, failed):
            assert case.relay.bytes_out == len(case.client.body) > 0

    def test_an_old_client_gets_no_chunks(self):
        case = Case(version="1.0")
        case.relay.piece(A, T0 + 1)
        case.relay.finish(LAST, T0 + 2)
        assert case.client.headers["connection"] == "close"
        assert case.client.body == A + LAST + DONE


class TestEnd:
    @pytest.mark.parametrize(
        ("pieces", "last", "after"),
        [
            ([A], LAST, b""),
            ([A], LAST + DONE, b""),
            ([A, LAST], DONE, b""),
            ([A, LAST, DONE], b"", LAST + DONE),  # the engine's own mark went out as a piece
            ([A, LAST], b"", A + LAST),
            ([A, LAST + b"data: [DO", b"NE]\n\n"], b"", LAST + DONE),
            ([], LAST, b""),
            ([], LAST + DONE, b""),
            ([A], LAST + b"data: [DONE]\r\n\r\n", b""),
            ([A], LAST + b"data: [DONE]", b""),
            ([A], LAST + b"data:[DONE]\n\n", b""),
        ],
    )
    def test_exactly_one_mark_at_the_end(self, pieces, last, after):
        case = Case()
        for piece in pieces:
            case.relay.piece(piece, T0 + 1)
        case.relay.finish(last, T0 + 2, after=after)
        body = case.client.body
        assert body.count(b"[DONE]") == 1
        assert body.rstrip().endswith(b"[DONE]")
        assert body.startswith(b"".join(pieces) + last)
        assert case.client.whole
        assert case.client.ends == ["answered"]

    def test_a_mark_inside_of_a_text_is_none(self):
        case = Case()
        said = A.replace(b'"A"', b'"data: [DONE]"')
        case.relay.finish(said, T0 + 1)
        assert case.client.body == said + DONE

    @pytest.mark.parametrize("family", [name for name, family in BY_NAME.items() if not family.ends_with])
    def test_the_other_families_end_as_the_engine_says(self, family):
        case = Case(family)
        case.relay.piece(b"data: 1\n\n", T0 + 1)
        case.relay.finish(b"data: 2\n\n", T0 + 2)
        assert case.client.body == b"data: 1\n\ndata: 2\n\n"
        assert case.client.whole

    def test_last_piece_and_end_are_one_write(self):
        case = Case()
        case.relay.piece(A, T0 + 1)
        case.relay.finish(LAST, T0 + 2)
        assert len(case.client.writes) == 2

    def test_a_vllm_piece_keeps_its_nul(self):
        case = Case("vllm")
        case.relay.piece(b'{"text":["a"]}\0', T0 + 1)
        case.relay.finish(b'{"text":["b"]}\0', T0 + 2)
        assert case.client.body == b'{"text":["a"]}\0{"text":["b"]}\0'

    def test_whole(self):
        case = Case()
        case.relay.whole(b'{"x":1}', T0 + 1)
        assert len(case.client.writes) == 1
        assert (case.client.status, case.client.body) == (200, b'{"x":1}')
        assert case.client.headers["content-type"] == "application/json"
        assert case.record.status == 200
        assert case.client.whole

    def test_whole_of_another_type(self):
        case = Case()
        case.relay.whole(b"x", T0 + 1, b"text/plain")
        assert case.client.headers["content-type"] == "text/plain"


class TestRecord:
    @pytest.mark.parametrize("end", ["finish", "fail", "left"])
    def test_it_has_what_was_sent_in_the_end(self, end):
        case = Case()
        case.relay.piece(ROLE, T0 + 0.1, token=False)
        case.relay.piece(A, T0 + 0.2)
        if end == "finish":
            case.relay.finish(LAST, T0 + 0.3)
        elif end == "fail":
            case.relay.fail(EngineFailed(Side.DECODE, "d0", "reset"))
        if end != "fail":  # which settles by itself, since it may be the last word
            case.relay.settle()
        assert case.record.events == (2 if end == "finish" else 1)
        assert case.record.bytes_out == case.relay.bytes_out == len(case.client.body)


class TestTimes:
    def test_streaming(self):
        case = Case()
        case.relay.piece(ROLE, T0 + 0.1, token=False)
        assert case.record.ttft_s is None
        for at_s in (0.4, 0.45, 0.5):
            case.relay.piece(A, T0 + at_s)
        case.relay.finish(LAST, T0 + 0.55)
        assert case.record.ttft_s == pytest.approx(0.4)
        assert observed(case.cells.ttft) == (1, pytest.approx(0.4))
        assert observed(case.cells.itl) == (3, pytest.approx(0.15))
        assert case.relay.events == 4
        assert case.relay.last_token_s == pytest.approx(T0 + 0.55)

    @pytest.mark.parametrize("last", [DONE, b""])
    def test_the_mark_is_no_token(self, last):
        case = Case()
        case.relay.piece(A, T0 + 1)
        case.relay.piece(LAST, T0 + 2)
        case.relay.finish(last, T0 + 9, token=bool(last), after=LAST)
        assert case.relay.events == 2
        assert observed(case.cells.itl) == (1, pytest.approx(1.0))

    def test_not_streaming(self):
        case = Case()
        case.relay.whole(b"{}", T0 + 2)
        assert case.record.ttft_s == pytest.approx(2.0)
        assert observed(case.cells.itl) == (0, 0.0)

    def test_no_time_where_nothing_came(self):
        case = Case()
        assert math.isnan(case.relay.last_token_s)
        case.relay.fail(EngineFailed(Side.DECODE, "d0", "reset"))
        assert observed(case.cells.ttft) == (0, 0.0)
        assert case.record.ttft_s is None

    def test_tokens_of_one_packet_are_no_time_apart(self):
        case = Case()
        case.relay.piece(A, T0 + 1)
        case.relay.piece(A, T0 + 1)
        assert observed(case.cells.itl) == (1, 0.0)

    def test_a_held_token_that_came_before_the_first_one_is_counted_once(self):
        """Decode's token had to wait for prefill's: no second first token, no negative gap."""
        case = Case()
        case.relay.piece(A, T0 + 2)
        case.relay.piece(A, T0 + 1.5)
        case.relay.piece(A, T0 + 3)
        assert observed(case.cells.ttft) == (1, pytest.approx(2.0))
        count, sum_s = observed(case.cells.itl)
        assert case.relay.events == 3
        assert sum_s >= 0
        assert count <= 2


class TestClientThatHasLeft:
    @pytest.mark.parametrize("started", [True, False])
    def test_nothing_is_written_and_nothing_raises(self, started):
        case = Case()
        if started:
            case.relay.piece(A, T0 + 1)
        case.client.exchange.left()
        written = list(case.client.writes)
        case.relay.piece(A, T0 + 2)
        case.relay.finish(LAST, T0 + 3)
        if not started:
            case.relay.whole(b"{}", T0 + 3)
        case.relay.fail(EngineFailed(Side.DECODE, "d0", "reset"))
        assert case.client.writes == written
