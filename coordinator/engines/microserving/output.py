"""What a pattern yields, on its way to the client: the same rules as for an engine's own stream."""

import time

from coordinator.core.out import Out
from coordinator.core.ports import COMPLETED, Outcome, Placement
from coordinator.engines.microserving.ends import given_back
from coordinator.engines.microserving.means import Means, editor_of
from coordinator.engines.microserving.task import Task
from coordinator.sdk.openai_api_protocol import CompletionLogProbs, CompletionResponse
from coordinator.wire.chat_shape import whole_answer

TAIL_BYTES = 1024


class Output:
    """Takes responses one after the other: sends them, or puts them together where the client wants no stream."""

    def __init__(self, means: Means, task: Task, placement: Placement, out: Out) -> None:
        self._means = means
        self._task = task
        self._placement = placement
        self._out = out
        self._client_id = task.progress.client_id
        self._editor = editor_of(task, self._client_id)
        self._whole: CompletionResponse | None = None
        self._begun = False
        self._tail = b""

    def take(self, response: object) -> bool:
        """Take one response; returns whether it says that decode has given the request back.

        Raises:
            TypeError: it is none.
        """
        if not isinstance(response, CompletionResponse):
            raise TypeError("translate_request must yield CompletionResponse objects or None")
        response.id = self._client_id
        if not self._task.stream:
            self._join(response)
            return any(choice.finish_reason == "preempt" for choice in response.choices)
        ready = self._editor.feed(b"data: %b\n\n" % response.model_dump_json().encode())
        if ready:
            self._begin()
            self._tail = (self._tail + ready)[-TAIL_BYTES:]
            self._out.piece(ready, time.monotonic())
        return self._editor.preempted

    def _begin(self) -> None:
        """The first response is there: decode has the KV, and prefill's load ends if it has not."""
        if not self._begun:
            self._begun = True
            self._placement.skip_prefill()
            self._placement.decoding(time.monotonic())

    def _join(self, response: CompletionResponse) -> None:
        """Put the parts of a whole answer together: texts and log probabilities by choice, the last usage."""
        whole = self._whole
        if whole is None:
            self._whole = response.model_copy(deep=True)
            return
        known = {choice.index: choice for choice in whole.choices}
        for part in response.choices:
            choice = known.get(part.index)
            if choice is None:
                whole.choices.append(part)
                continue
            choice.text += part.text
            choice.finish_reason = part.finish_reason or choice.finish_reason
            choice.logprobs = _joined(choice.logprobs, part.logprobs)
        whole.usage = response.usage or whole.usage

    async def given_back(self) -> Outcome:
        """What follows a preempt; raises NoInstance."""
        editor = self._editor if self._task.stream else None
        return await given_back(self._means, self._task, self._placement.decode, self._out, editor)

    def end(self) -> Outcome:
        """The pattern is over; raises ValueError if that was no whole answer: an end is never made up."""
        now_s = time.monotonic()
        if self._task.stream:
            if not self._out.ends(self._tail):
                raise ValueError("translate_request ended without a finish reason")
            self._out.finish(b"", now_s, token=False, after=self._tail)
            return COMPLETED
        if self._whole is None:
            raise ValueError("translate_request yielded nothing")
        body = self._whole.model_dump_json().encode()
        self._begin()
        answer, _ = whole_answer(body, self._task.reading(self._client_id), chat=self._task.chat)
        self._out.whole(answer, now_s)
        return COMPLETED


def _joined(first: CompletionLogProbs | None, then: CompletionLogProbs | None) -> CompletionLogProbs | None:
    if first is None or then is None:
        return first or then
    merged = {
        name: [*(getattr(first, name) or []), *(getattr(then, name) or [])]
        for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs")
    }
    return first.model_copy(update=merged)
