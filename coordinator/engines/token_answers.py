"""From what an engine generates to what the client gets: text out of ids, stop strings, limits, usage, the shapes.

Nothing here waits: each call of an engine ends in at most one call of `Out`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from coordinator.api.writers import LENGTH, STOP, STOP_STRING, Delta, TokenLogprob, Usage, Writer
from coordinator.core.out import Out
from coordinator.engines.token_prompts import TokenRequest
from coordinator.tokens import Detokenizer, StopWatch, Tokenizer

MOST_COUNT: Final = 2**63


class IdLogprob(NamedTuple):
    """A token's log probability as engines tell it who know ids only; `top`: (id, log probability), likeliest first."""

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()


@dataclass(slots=True)
class _Choice:
    """One answer of a request."""

    text: Detokenizer | None
    watch: StopWatch | None
    tokens: int = 0
    begun: bool = False
    finish: str | None = None
    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class TokenAnswers:
    """The answers to one request, in one attempt to serve it.

    An answer ends where the engine says so, at a stop token or stop string, or at its last allowed token, whichever
    comes first; what the engine sends afterwards is ignored.

    Args:
        asked: the request.
        writer: made for the same request.
        out: where the client's bytes go.

    Attributes:
        first_s: monotonic time of the first token; nan before.
        last_s: the same of the last one.
    """

    __slots__ = (
        "_choices", "_ends", "_generation", "_limit", "_out", "_prompt", "_stream", "_tokenizer", "_wants_logprobs",
        "_writer", "first_s", "last_s",
    )  # fmt: skip

    def __init__(self, asked: TokenRequest, writer: Writer, out: Out) -> None:
        generation, tokenizer = asked.generation, asked.tokenizer
        self._generation = generation
        self._prompt = asked.prompt
        self._tokenizer = tokenizer
        self._writer = writer
        self._out = out
        self._stream = generation.stream
        self._limit = generation.max_tokens or MOST_COUNT
        self._wants_logprobs = generation.logprobs is not None
        eos = frozenset() if generation.ignore_eos or tokenizer is None else tokenizer.eos_ids
        self._ends = eos.union(generation.stop_token_ids)
        self._choices = [self._new_choice(tokenizer) for _ in range(generation.n)]
        self.first_s = self.last_s = math.nan

    def _new_choice(self, tokenizer: Tokenizer | None) -> _Choice:
        generation = self._generation
        watch = StopWatch(generation.stop, include=generation.include_stop) if generation.stop else None
        if tokenizer is None:
            return _Choice(None, watch)
        skip = generation.skip_special_tokens
        return _Choice(tokenizer.detokenizer(self._prompt.ids, skip_special=skip), watch)

    # --- from the engine

    def tokens(
        self,
        index: int,
        ids: Sequence[int],
        now_s: float,
        *,
        logprobs: Sequence[IdLogprob] = (),
        finish_reason: str | None = None,
    ) -> bool:
        """Take the next tokens of answer number `index`; hot.

        Args:
            index: from 0.
            ids: may be empty, with a finish reason.
            now_s: monotonic time of arrival.
            logprobs: one for each id, or none.
            finish_reason: the engine's: `stop`, `length` or a word of its own.

        Returns:
            Whether this answer is complete: the engine need make no more of it.

        Raises:
            ValueError: no such answer was asked for.
        """
        choice = self._numbered(index)
        if choice.finish is not None:
            return True
        ids, hidden, finish = self._cut(choice, ids, finish_reason)
        shown = ids[: len(ids) - hidden] if hidden else ids
        text = ""
        if choice.text is not None:
            text = choice.text.push(shown) if shown else ""
            if finish is not None:
                text += choice.text.end()
        told: Sequence[TokenLogprob] = ()
        if self._wants_logprobs:
            told = self._told(ids, logprobs)
        return self._take(choice, index, Delta(text, tuple(ids), tuple(told), finish), now_s)

    def text(
        self,
        index: int,
        text: str,
        ids: Sequence[int],
        now_s: float,
        *,
        logprobs: Sequence[TokenLogprob] = (),
        finish_reason: str | None = None,
    ) -> bool:
        """Take the next text of answer number `index`, from an engine that makes text itself; else as `tokens`.

        Stop tokens are the engine's business here; stop strings are looked for all the same.
        """
        choice = self._numbered(index)
        if choice.finish is not None:
            return True
        finish = finish_reason
        if choice.tokens + len(ids) >= self._limit:
            finish = finish or LENGTH
        return self._take(choice, index, Delta(text, tuple(ids), tuple(logprobs), finish), now_s)

    @property
    def complete(self) -> bool:
        """Whether every answer has ended."""
        return all(choice.finish is not None for choice in self._choices)

    def usage(self, cached_tokens: int | None = None) -> Usage:
        """Tokens so far, as they were counted here."""
        return Usage(len(self._prompt.ids), sum(choice.tokens for choice in self._choices), cached_tokens)

    def end(self, usage: Usage | None = None) -> None:
        """Send what ends the stream, or the whole answer.

        Args:
            usage: the engine's own figures; None: those of `usage`.

        Raises:
            ValueError: an answer has not ended; nothing is sent, for an end is never made up.
        """
        if not self.complete:
            raise ValueError("an answer has no end")
        usage = usage or self.usage()
        if self._stream:
            self._out.finish(self._writer.tail(usage), self.last_s, token=self._writer.tail_has_token)
            return
        choices = [
            Delta("".join(choice.texts), tuple(choice.ids), tuple(choice.logprobs), choice.finish)
            for choice in self._choices
        ]
        self._out.whole(self._writer.whole(choices, usage), self.last_s)

    # --- inside

    def _numbered(self, index: int) -> _Choice:
        if not 0 <= index < len(self._choices):
            raise ValueError(f"answer number {index} was not asked for")
        return self._choices[index]

    def _cut(self, choice: _Choice, ids: Sequence[int], finish: str | None) -> tuple[Sequence[int], int, str | None]:
        """What of the ids belongs to the answer, how many at its end have no text, and the finish reason."""
        left = self._limit - choice.tokens
        if len(ids) >= left:
            finish = finish if finish is not None and len(ids) == left else LENGTH
            ids = ids[:left]
        ends = self._ends
        if ends:
            for at, token in enumerate(ids):
                if token in ends:
                    return ids[: at + 1], int(not self._generation.include_stop), STOP
        return ids, 0, finish

    def _take(self, choice: _Choice, index: int, delta: Delta, now_s: float) -> bool:
        if choice.watch is not None:
            delta = self._watched(choice.watch, delta)
        choice.tokens += len(delta.token_ids)
        choice.finish = delta.finish_reason
        if self.first_s != self.first_s:  # nan: this is the first token
            self.first_s = now_s
        self.last_s = now_s
        data = b""
        if not choice.begun:
            choice.begun = True
            if self._generation.echo:
                data = self._writer.prompt(index, self._echoed())
        if self._stream:
            data += self._writer.piece(index, delta)
            if data:
                self._out.piece(data, now_s)
        else:
            choice.texts.append(delta.text)
            choice.ids += delta.token_ids
            choice.logprobs += delta.logprobs
        return delta.finish_reason is not None

    def _watched(self, watch: StopWatch, delta: Delta) -> Delta:
        text, met = watch.push(delta.text)
        finish = STOP_STRING if met else delta.finish_reason
        if finish is not None:
            text += watch.end()
        return Delta(text, delta.token_ids, delta.logprobs, finish)

    def _echoed(self) -> Delta:
        prompt = self._prompt
        told = self._told(prompt.ids, ()) if self._wants_logprobs else ()
        return Delta(prompt.text, prompt.ids, tuple(told))

    def _told(self, ids: Sequence[int], logprobs: Sequence[IdLogprob]) -> Sequence[TokenLogprob]:
        """Log probabilities with their texts; without a number where the engine has told none."""
        if not logprobs:
            return [self._token(token, None) for token in ids]
        return [
            self._token(one.token_id, one.logprob)._replace(top=tuple(self._token(*other) for other in one.top))
            for one in logprobs[: len(ids)]
        ]

    def _token(self, token_id: int, logprob: float | None) -> TokenLogprob:
        if self._tokenizer is None:
            return TokenLogprob(token_id, f"token_id:{token_id}", logprob, b"")
        data = self._tokenizer.token_bytes(token_id)
        return TokenLogprob(token_id, data.decode("utf-8", "replace"), logprob, data)
