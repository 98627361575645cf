"""One request on decode, as a member of the batch."""

import asyncio
import time
from typing import TYPE_CHECKING

from instances import answers
from instances.faults import Chosen
from instances.tokens import split_character
from instances.xllm import outputs
from instances.xllm.ask import UNKNOWN, Ask, Failed, plans
from instances.xllm.outputs import Sequence
from instances.xllm.proto.engine_pb2 import DisaggStreamGeneration

if TYPE_CHECKING:
    from instances.xllm.decode import Decode

_HALF = split_character(answers.SPLIT_CHARACTERS[0])[0]


class Job:
    """A request and its sequences, which make their tokens side by side.

    Args:
        decode: the role it belongs to.
        ask: what is asked for.
        chosen: its faults.
        prefill: name of the instance that has its KV; empty: this one.
    """

    def __init__(self, decode: "Decode", ask: Ask, chosen: Chosen, prefill: str) -> None:
        self._decode = decode
        self.ask = ask
        self.chosen = chosen
        self.prefill = prefill
        self.blocks: list[int] = []
        self.kv = ""
        self.cached_tokens = 0
        self.sequences: list[Sequence] = []
        self.over = False
        self._stalled = False
        self._last_s = time.monotonic()

    def plan(self, first: int | None) -> None:
        """Plan the answer; `first`: the token that prefill made of the first sequence."""
        engine = self._decode.engine
        partial = first == _HALF or (first is None and "partial_first" in self.chosen)
        made = plans(self.ask, engine.instance.options, engine.settings.max_context_len, partial_first=partial)
        self.sequences = [Sequence(number, plan) for number, plan in enumerate(made)]
        if first is not None:
            head = self.sequences[0]
            # a token without text was told by nobody: it comes with the next ones
            head.sent, head.told = 1, 1 if head.plan.texts[0] else 0
        self._last_s = time.monotonic()

    @property
    def complete(self) -> bool:
        """Whether all sequences have all their tokens."""
        return all(sequence.complete for sequence in self.sequences)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV is needed for the next step."""
        return len(self.ask.tokens) + sum(sequence.sent for sequence in self.sequences) + 1

    @property
    def generated(self) -> int:
        """Tokens of the longest sequence."""
        return max(sequence.sent for sequence in self.sequences)

    def told(self, is_ok: bool) -> None:  # noqa: FBT001 - the outbox's interface
        """The service has answered to a message."""
        if not is_ok:
            self._decode.cancel(self)

    def step(self) -> bool:
        """Make the next token of each sequence; False takes the request out of the batch."""
        if self.over or self._strikes() or not self._decode.grow(self):
            return False
        now_s = time.monotonic()
        self._decode.engine.presence.next_token(now_s - self._last_s)
        self._last_s = now_s
        for sequence in self.sequences:
            sequence.sent += not sequence.complete
        self._before()
        if self.ask.stream:
            self._tell_step()
        if self.complete:
            self.tell_end()
        return not self.over

    def _strikes(self) -> bool:
        """Faults that are due before the next token; True: no token."""
        chosen, made = self.chosen, self.generated
        if not chosen:
            return False
        if (error := chosen.at("generation_error", made)) is not None:
            self._decode.fail(self, Failed(int(error.number(UNKNOWN)), "injected failure"))
            return True
        if (crash := chosen.at("answer_crash", made)) is not None:
            self._decode.crash(crash.number(0) if crash.value else None)
            return True
        stall = chosen.at("stall", made)
        if stall is not None and not self._stalled:
            self._stalled = True
            if stall.value:
                asyncio.get_running_loop().call_later(stall.number(0), self._go_on)
            return True
        return False

    def _go_on(self) -> None:
        if not self.over:
            self._decode.engine.batch.join(self)

    def _before(self) -> None:
        """Faults before the message of a token."""
        chosen, made = self.chosen, self.generated
        if chosen.at("empty_step", made, 2) is not None:
            self._decode.tell_apart(self, outputs.generation(self.ask, []))
        if chosen.at("empty_gens", made, 2) is not None:
            self._decode.tell_apart(None, None)
        if chosen.at("unknown_id", made, 2) is not None:
            self._decode.tell_unknown(self)

    def _tell_step(self) -> None:
        shown = [sequence.delta(self.ask) for sequence in self.sequences if not sequence.over]
        if not self.complete:
            shown += [sequence.end() for sequence in self.sequences if sequence.complete and not sequence.over]
        message = outputs.generation(self.ask, shown)
        self._decode.tell(self, message)
        if self.chosen.at("duplicate", self.generated, 2) is not None:
            self._decode.tell_again(self, message)

    def tell_end(self) -> None:
        """The last message; the request is over with it."""
        if self.ask.stream:
            ended = [sequence.end() for sequence in self.sequences if not sequence.over]
        else:
            ended = [sequence.whole(self.ask) for sequence in self.sequences]
        message = outputs.finished(self.ask, ended, self.sequences, self.cached_tokens)
        if self.prefill and self.generated == 1:
            message.finished_on_prefill_instance = True
        self._decode.tell_end(self, message)
        if "finish_twice" in self.chosen:
            self._decode.tell_again(self, message)
        for _ in range(int(self.chosen.number("late", 1))):
            self._decode.tell_again(self, self._late_message(), late=True)

    def _late_message(self) -> DisaggStreamGeneration:
        message = outputs.generation(self.ask, [])
        message.outputs.add(index=0, text=" too late")
        return message

    async def alone(self) -> None:
        """Make tokens at a pace of its own, outside of the batch."""
        pace_s = self.chosen.number("slow", 1)
        while not self.over:
            await asyncio.sleep(pace_s)
            going_on = self.step()
            self._decode.flush()
            if not going_on:
                return
