"""A request that generates: its sequences in the batch, and the faults that strike them."""

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from instances import answers
from instances.answers import Plan
from instances.microserving.asks import Ask
from instances.microserving.refusal import failed
from instances.microserving.resumed import rest_of
from instances.microserving.stream import Delta, Output, Stream, Struck
from instances.openai.menu import STREAM_FAULTS

if TYPE_CHECKING:
    from instances.microserving.loop import Loop

_SEED_STEP = 1_000_003
_BACKLOG_BYTES = 1 << 20
_UNFINISHED = "\ufffd"  # how a detokenizer shows bytes that are no character


def usage_of(prompt: int, made: int, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """The usage object."""
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made, "extra": extra}


class _Sequence:
    """One of n answers."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.sent = 0
        self.over = False

    def step(self) -> Delta:
        if self.over:
            return Delta("")
        at, self.sent = self.sent, self.sent + 1
        self.over = self.sent >= len(self.plan)
        finish = self.plan.finish if self.over else None
        return Delta(self.plan.texts[at], self.plan.tokens[at : at + 1], finish)

    def preempted(self) -> Delta:
        """Its end before its end: with what the detokenizer held back."""
        if self.over:
            return Delta("")
        held = self.sent and not self.plan.texts[self.sent - 1]
        return Delta(_UNFINISHED if held else "", (), "preempt")


class Running:
    """A request in the batch.

    Args:
        loop: the engine.
        stream: where its outputs go.
        ask: the request.
        key: under which its pages are held.
        lost: it has not got the KV of its prompt, and writes visibly wrong text.

    Attributes:
        base_tokens: tokens whose KV it holds apart from those that it makes.
    """

    def __init__(self, loop: "Loop", stream: Stream, ask: Ask, key: str, *, lost: bool) -> None:
        self._loop = loop
        self.stream = stream
        self.ask = ask
        self.key = key
        self.base_tokens = len(ask.prompt)
        self.lost = lost
        self._began_s = time.monotonic()
        self._first_s: float | None = None
        self.steps = 0
        self.carried = 0
        self.sequences = [_Sequence(self._plan(number)) for number in range(ask.n)]

    def _plan(self, number: int) -> Plan:
        wish, options = self.ask.wish, self._loop.instance.options
        if number:
            wish = dataclasses.replace(wish, seed=(wish.seed or 0) + number * _SEED_STEP)
        rest = rest_of(wish, self.ask.text, options.seed, options.answer_tokens, from_ids=self.ask.from_ids)
        self.carried = max(self.carried, rest.carried)
        return answers.wrong_plan(rest.plan, 0) if self.lost else rest.plan

    @property
    def made(self) -> int:
        """Tokens of all sequences."""
        return sum(sequence.sent for sequence in self.sequences)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV it holds."""
        return self.base_tokens + self.made

    def step(self) -> bool:
        """One token for each sequence; False takes the request out of the batch."""
        if self._loop.dead or self._loop.running.get(self.stream) is not self:
            return False
        if self.stream.left:
            self._loop.abort(self.stream, "aborted: the caller left")
            return False
        if self.stream.backlog_bytes() > _BACKLOG_BYTES:
            return True
        if self.ask.chosen and self._strikes():
            return False
        if not self._loop.grow(self):
            return False
        self._first_s = self._first_s or time.monotonic()
        self.steps += 1
        self.stream.push(Output(tuple(sequence.step() for sequence in self.sequences), token=self.steps))
        if all(sequence.over for sequence in self.sequences):
            self._loop.finish(self)
            return False
        return True

    async def run_slowly(self, pace_s: float) -> None:
        """Steps at a pace of its own, out of the batch."""
        goes_on = True
        while goes_on:
            await asyncio.sleep(pace_s)
            goes_on = self.step()

    def preempt(self) -> None:
        """Every sequence ends at once, with the last output that it has, and zero usage."""
        self.stream.push(Output(tuple(sequence.preempted() for sequence in self.sequences), token=self.steps))
        self.stream.push(Output(usage=usage_of(0, 0)))
        self.stream.end()

    def final_usage(self) -> dict[str, Any]:
        """Usage, with what only an engine with debug enabled tells."""
        now_s = time.monotonic()
        ttft_s = (self._first_s or now_s) - self._began_s
        took_s = max(now_s - self._began_s, 1e-9)
        prompt, made = len(self.ask.prompt), self.made
        extra = {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "prefill_tokens": prompt,
            "decode_tokens": max(0, made - 1),
            "jump_forward_tokens": 0,
            "prefill_tokens_per_s": prompt / max(ttft_s, 1e-9),
            "decode_tokens_per_s": made / took_s,
            "end_to_end_latency_s": took_s,
            "ttft_s": ttft_s,
            "inter_token_latency_s": took_s / max(1, made),
        }
        return usage_of(prompt, made, extra)

    # --- faults

    def _strikes(self) -> bool:
        """Faults that are due at this number of tokens; True: no more tokens."""
        chosen, done = self.ask.chosen, self.steps
        if self._preempt_due():
            self._loop.preempt(self)
            return True
        if chosen.at("die", done, 0) is not None:
            self._loop.die("fault")
            return True
        if (fault := chosen.at("answer_crash", done, 0)) is not None:
            self._loop.instance.crash(fault.number(0) if fault.value else None)
            return True
        if chosen.at("stall", done, 0) is not None:
            return True
        if (fault := chosen.at("answer_error", done, 0)) is not None:
            self._loop.abort(self.stream, "failed")
            self.stream.fail(failed(fault.value or "failed on request"))
            return True
        for name in STREAM_FAULTS:
            if chosen.at(name, done, 0) is not None:
                self._loop.abort(self.stream, "stream broken off")
                self.stream.fail(Struck(name))
                return True
        return False

    def _preempt_due(self) -> bool:
        """After k tokens; an answer that goes on after a preemption is only preempted again if the fault says so."""
        fault = self.ask.chosen.get("preempt")
        if fault is None:
            return False
        if self.carried:
            return bool(fault.value) and self.steps == fault.number(0)
        return self.steps == (fault.at or 0)
