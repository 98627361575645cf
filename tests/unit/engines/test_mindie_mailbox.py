"""One request's share of a result stream: order, holding back, ends (MindIE protocol page §5.5, §5.6, §6)."""

import asyncio

import pytest
from engine_world import Out, Placed, instance, turns

from coordinator.core.errors import EngineFailed, Side
from coordinator.core.ports import Completed, Resume
from coordinator.engines.mindie import mailbox as mailbox_module
from coordinator.engines.mindie.envelope import FirstToken
from coordinator.engines.mindie.mailbox import Mailbox
from coordinator.wire.mindie import Kind

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
DONE = b"data: [DONE]\n\n"
LAST = b'data: {"choices":[{"index":0,"delta":{"content":"z"},"finish_reason":"stop"}]}\n\n'


def text(word):
    return b'data: {"choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":null}]}\n\n' % word.encode()


def first(output=None, *, last=False):
    return FirstToken(text("A") if output is None else output, last=last)


class Case:
    def __init__(self, *, stream=True, family="openai"):
        self.out = Out(family)
        self.stages = Placed(instance("p0"), instance("d0"))
        self.box = Mailbox("77", "d0", self.out, self.stages, stream=stream)

    def says(self, *words, at_s=1.0):
        for word in words:
            self.box.data(word, at_s)

    def message(self, kind, body=b"", at_s=1.0):
        self.box.message(kind, body, at_s)

    @property
    def error(self):
        error = self.box.done.exception()
        assert isinstance(error, EngineFailed)
        assert (error.side, error.instance_id) == (Side.DECODE, "d0")
        return error


@pytest.fixture
async def case():
    return Case()


@pytest.fixture
async def unary():
    return Case(stream=False)


class TestStream:
    async def test_decode_waits_for_prefills_token(self, case):
        case.says(text("B"), text("C"))
        assert case.out.events == []
        assert case.stages.names == []
        case.box.prefilled(first(), 2.0)
        assert case.out.body == text("A") + text("B") + text("C")
        assert case.stages.names == ["prefilled", "decoding"]

    async def test_held_tokens_keep_the_time_at_which_they_came(self, case):
        case.says(text("B"), at_s=1.5)
        case.box.prefilled(first(), 2.0)
        assert case.stages.moments == [("prefilled", 2.0), ("decoding", 1.5)]

    async def test_after_prefill_everything_flows_at_once(self, case):
        case.box.prefilled(first(), 1.0)
        for word in "BCD":
            case.says(text(word))
            assert case.out.body.endswith(text(word))
        case.message(Kind.LAST_DATA, LAST)
        assert case.box.done.result() == Completed()
        assert case.out.over

    async def test_last_data_that_is_held_ends_the_stream_after_prefills_token(self, case):
        case.says(text("B"))
        case.message(Kind.LAST_DATA, LAST)
        assert not case.box.settled
        case.box.prefilled(first(), 2.0)
        assert case.out.body == text("A") + text("B") + LAST + DONE
        assert case.box.done.result() == Completed()

    async def test_an_empty_first_output_sends_nothing(self, case):
        case.says(text("B"))
        case.box.prefilled(first(b""), 1.0)
        assert [kind for kind, *_ in case.out.events] == ["piece"]
        assert case.out.body == text("B")

    async def test_all_in_prefill(self, case):
        case.box.prefilled(first(LAST + DONE, last=True), 1.0)
        assert case.out.body == LAST + DONE
        assert case.box.done.result() == Completed()
        assert case.stages.names == ["prefilled", "decoding"]

    async def test_all_in_prefill_without_a_mark(self, case):
        case.box.prefilled(first(LAST, last=True), 1.0)
        assert case.out.body == LAST + DONE

    @pytest.mark.parametrize("second", [True, False])
    async def test_exactly_one_done(self, case, second):
        """The engine says lastData twice, or once; the second one is late (protocol page §5.5)."""
        case.box.prefilled(first(), 1.0)
        case.message(Kind.LAST_DATA, LAST)
        if second:
            case.message(Kind.LAST_DATA, DONE)
        assert case.out.body.count(b"[DONE]") == 1
        assert case.out.body.endswith(LAST + DONE)

    async def test_done_that_comes_with_the_last_piece(self, case):
        case.box.prefilled(first(), 1.0)
        case.message(Kind.LAST_DATA, LAST + DONE)
        assert case.out.body == text("A") + LAST + DONE

    async def test_done_alone_as_the_last_message(self, case):
        case.box.prefilled(first(), 1.0)
        case.says(LAST)
        case.message(Kind.LAST_DATA, DONE)
        assert case.out.body == text("A") + LAST + DONE

    async def test_two_last_data_while_held(self, case):
        case.message(Kind.LAST_DATA, LAST)
        case.message(Kind.LAST_DATA, DONE)
        case.box.prefilled(first(), 1.0)
        assert case.out.body == text("A") + LAST + DONE

    @pytest.mark.parametrize("family", ["tgi", "triton", "vllm", "mindie"])
    async def test_other_families_get_no_mark(self, family):
        case = Case(family=family)
        case.box.prefilled(first(b"data: 1\n\n"), 1.0)
        case.message(Kind.LAST_DATA, b'{"text":["x"]}\0')
        assert case.out.body == b'data: 1\n\n{"text":["x"]}\0'

    async def test_nothing_after_the_end(self, case):
        case.box.prefilled(first(), 1.0)
        case.message(Kind.LAST_DATA, LAST)
        before = list(case.out.events)
        case.says(text("late"))
        for kind in (Kind.DATA, Kind.LAST_DATA, Kind.ERROR, Kind.RETRY, Kind.OVERSIZED):
            case.message(kind, text("late"))
        assert case.out.events == before
        assert case.box.done.result() == Completed()


class TestRolePiece:
    async def test_decodes_own_is_dropped_where_prefill_sent_one(self, case):
        case.box.prefilled(first(ROLE + text("A")), 1.0)
        case.says(ROLE, text("B"))
        assert case.out.body == ROLE + text("A") + text("B")

    async def test_also_where_it_was_held(self, case):
        case.says(ROLE, text("B"))
        case.box.prefilled(first(ROLE + text("A")), 1.0)
        assert case.out.body == ROLE + text("A") + text("B")

    async def test_decodes_own_is_kept_where_nothing_was_sent(self, case):
        case.box.prefilled(first(b""), 1.0)
        case.says(ROLE, text("B"))
        assert case.out.body == ROLE + text("B")

    async def test_only_the_first_message_can_be_one(self, case):
        case.box.prefilled(first(), 1.0)
        case.says(text("B"), ROLE)
        assert case.out.body == text("A") + text("B") + ROLE

    async def test_dropping_it_marks_the_handover_all_the_same(self, case):
        case.box.prefilled(first(ROLE + text("A")), 1.0)
        case.says(ROLE, at_s=3.0)
        assert ("decoding", 3.0) in case.stages.moments

    async def test_it_is_no_token(self, case):
        """A role without content must not pass for the first token."""
        case.box.prefilled(first(ROLE), 1.0)
        assert case.out.tokens == []
        case.says(ROLE, text("B"))
        assert case.out.tokens == [text("B")]

    async def test_it_is_no_token_where_decode_opens_the_stream(self, case):
        case.box.prefilled(first(b""), 1.0)
        case.says(ROLE, text("B"))
        assert case.out.tokens == [text("B")]


class TestUnary:
    async def test_the_answer_goes_out_at_once(self, unary):
        unary.message(Kind.LAST_DATA, b'{"x":1}')
        assert unary.out.events == [("whole", b'{"x":1}', True)]
        assert unary.box.done.result() == Completed()
        unary.box.prefilled(first(b""), 2.0)  # must not disturb
        assert len(unary.out.events) == 1

    async def test_after_prefill(self, unary):
        unary.box.prefilled(first(b""), 1.0)
        assert unary.out.events == []
        unary.message(Kind.LAST_DATA, b'{"x":1}')
        assert unary.out.body == b'{"x":1}'

    async def test_all_in_prefill(self, unary):
        unary.box.prefilled(first(b'{"x":1}', last=True), 1.0)
        assert unary.out.events == [("whole", b'{"x":1}', True)]

    async def test_pieces_do_not_happen_and_are_not_sent(self, unary):
        unary.box.prefilled(first(b""), 1.0)
        unary.says(b"data: {}\n\n")
        assert unary.out.events == []

    @pytest.mark.parametrize("early", [True, False])
    async def test_an_empty_answer_is_a_failure(self, unary, early):
        """Never an empty 200."""
        if not early:
            unary.box.prefilled(first(b""), 1.0)
        unary.message(Kind.LAST_DATA, b"")
        assert unary.error.reason == "bad_reply"
        assert unary.out.events == []


class TestErrors:
    async def test_before_anything_was_sent(self, unary):
        unary.message(Kind.ERROR, b"Pull kv failed irreversibly.")
        assert unary.error.reason == "engine_error"
        assert unary.error.detail == "Pull kv failed irreversibly."
        assert "Pull kv" not in unary.error.message
        assert unary.out.events == []

    async def test_after_output(self, case):
        case.box.prefilled(first(), 1.0)
        case.message(Kind.ERROR, b" gone")
        assert case.error.reason == "engine_error"
        assert case.out.body == text("A")

    async def test_an_error_that_overtakes_prefill_waits_for_it_a_moment(self, case):
        case.message(Kind.ERROR, b"gone")
        assert not case.box.settled
        case.box.prefilled(first(), 1.0)
        assert case.error.reason == "engine_error"
        assert case.out.body == text("A")

    async def test_but_not_for_long(self, case, monkeypatch):
        monkeypatch.setattr(mailbox_module, "OVERTAKEN_S", 0.01)
        settled = asyncio.Event()
        case.box.on_settled = settled.set
        case.message(Kind.ERROR, b"gone")
        async with asyncio.timeout(5):
            await settled.wait()
        assert case.error.reason == "engine_error"

    async def test_the_wait_for_prefill_spoils_nothing_later(self, case, monkeypatch):
        monkeypatch.setattr(mailbox_module, "OVERTAKEN_S", 0.01)
        case.message(Kind.ERROR, b"gone")
        case.box.fail(EngineFailed(Side.PREFILL, "p0", "reset"))
        await asyncio.sleep(0.03)
        assert case.box.done.exception().reason == "reset"

    async def test_text_that_is_none_is_cut_and_read_as_it_goes(self, unary):
        unary.message(Kind.ERROR, b"\xff" * 10_000)
        assert 0 < len(unary.error.detail) <= 300

    async def test_a_message_above_the_limit(self, case):
        case.message(Kind.OVERSIZED)
        assert case.error.reason == "message_too_large"

    async def test_too_much_before_prefill(self, case, monkeypatch):
        monkeypatch.setattr(mailbox_module, "MAX_HELD_BYTES", 100)
        case.says(b"x" * 60)
        assert not case.box.settled
        case.says(b"x" * 60)
        assert case.error.reason == "message_too_large"
        case.box.prefilled(first(), 1.0)
        assert case.out.events == []

    async def test_unknown_words_are_passed_over(self, case):
        case.message(Kind.UNKNOWN, b"x")
        case.box.prefilled(first(), 1.0)
        case.message(Kind.UNKNOWN, b"x")
        case.message(Kind.HEARTBEAT, b"x")
        assert case.out.body == text("A")
        assert not case.box.settled

    async def test_a_failed_box_takes_nothing_more(self, case):
        case.box.prefilled(first(), 1.0)
        case.says(text("B"))
        case.box.fail(EngineFailed(Side.DECODE, "d0", "link_lost"))
        case.says(text("C"))
        case.message(Kind.LAST_DATA, LAST)
        assert case.out.body == text("A") + text("B")
        case.box.fail(EngineFailed(Side.DECODE, "d0", "again"))
        assert case.error.reason == "link_lost"

    async def test_a_failure_that_nobody_waits_for_is_silent(self, caplog):
        case = Case()
        case.box.fail(EngineFailed(Side.DECODE, "d0", "link_lost"))
        del case
        await turns()
        assert caplog.records == []


class TestRetry:
    async def test_the_request_is_given_back_with_its_id(self, case):
        case.box.prefilled(first(), 1.0)
        case.says(text("B"))
        case.message(Kind.RETRY, b'{"prompt":"1,2"}')
        assert case.box.done.result() == Resume(b'{"prompt":"1,2"}', "77")
        assert not case.out.over

    async def test_not_before_prefills_token_is_out(self, case):
        case.message(Kind.RETRY, b"{}")
        assert not case.box.settled
        case.box.prefilled(first(), 1.0)
        assert case.out.body == text("A")
        assert case.box.done.result() == Resume(b"{}", "77")

    async def test_non_streaming(self, unary):
        unary.message(Kind.RETRY, b"{}")
        assert not unary.box.settled
        unary.box.prefilled(first(b""), 1.0)
        assert unary.box.done.result() == Resume(b"{}", "77")
        assert unary.out.events == []

    async def test_tokens_after_it_belong_to_nobody(self, case):
        case.box.prefilled(first(), 1.0)
        case.message(Kind.RETRY, b"{}")
        case.says(text("late"))
        assert case.out.body == text("A")


async def test_whoever_waits_is_told_once(case):
    calls = []
    case.box.on_settled = lambda: calls.append(case.box.settled)
    case.box.prefilled(first(), 1.0)
    case.message(Kind.LAST_DATA, LAST)
    case.message(Kind.LAST_DATA, DONE)
    case.box.fail(EngineFailed(Side.DECODE, "d0", "link_lost"))
    assert calls == [True]
