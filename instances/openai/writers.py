"""Writing answers: `/v1/chat/completions` and `/v1/completions`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from instances.openai import logprobs
from instances.openai.ask import Choice, Job
from instances.openai.refusal import Refused


class Writer(Protocol):
    """How an answer is written down, as a whole or in the events of a stream."""

    def opening(self, job: Job, choice: Choice) -> list[Any]:
        """Events before the first token of a sequence."""
        ...

    def token(self, job: Job, choice: Choice) -> list[Any]:
        """Events for the newest token (number `choice.sent`, from 1)."""
        ...

    def closing(self, job: Job) -> list[Any]:
        """Events after the last token of the last sequence."""
        ...

    def error(self, job: Job, refused: Refused) -> Any:
        """The event for an error."""
        ...

    def empty(self, job: Job) -> Any:
        """An event with no choices, as some engines send one at first."""
        ...

    def whole(self, job: Job) -> Any:
        """The complete answer."""
        ...


@dataclass(frozen=True, slots=True)
class Style:
    """Where the engines differ.

    Attributes:
        finish_apart: whether the finish reason comes in an event of its own (SGLang) or with the last token (vLLM).
        stop_key: the key that tells which stop text or token was met.
        error: the error event.
    """

    finish_apart: bool
    stop_key: str
    error: Callable[[Refused], Any]


class _OpenAi:
    """What chat and completions share."""

    kind = ""
    chunk_kind = ""

    def __init__(self, style: Style) -> None:
        self._style = style

    def _chunk(self, job: Job, choices: list[Any], *, usage: bool) -> dict[str, Any]:
        chunk = {
            "id": job.id,
            "object": self.chunk_kind,
            "created": job.created,
            "model": job.model,
            "choices": choices,
        }
        return {**chunk, "usage": job.usage()} if usage else chunk

    def _one(self, job: Job, choice: dict[str, Any]) -> dict[str, Any]:
        return self._chunk(job, [choice], usage=job.ask.usage_always)

    def closing(self, job: Job) -> list[Any]:
        """The usage event, if it is asked for."""
        return [self._chunk(job, [], usage=True)] if job.ask.usage else []

    def error(self, job: Job, refused: Refused) -> Any:  # noqa: ARG002 - the writers' interface
        """The engine's error object."""
        return self._style.error(refused)

    def empty(self, job: Job) -> Any:
        """An event without choices."""
        return self._chunk(job, [], usage=False)

    def choice(self, job: Job, choice: Choice) -> dict[str, Any]:
        """One of `choices` in a complete answer."""
        raise NotImplementedError

    def whole(self, job: Job) -> Any:
        """The complete answer."""
        return {
            "id": job.id,
            "object": self.kind,
            "created": job.created,
            "model": job.model,
            "choices": [self.choice(job, choice) for choice in job.choices],
            "usage": job.usage(),
            **job.extra,
        }


class Chat(_OpenAi):
    """`/v1/chat/completions`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def _event(self, job: Job, choice: Choice, delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
        value = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return self._one(job, {**value, self._style.stop_key: None} if finish else value)

    def opening(self, job: Job, choice: Choice) -> list[Any]:
        """The event with a role and no content."""
        return [self._event(job, choice, {"role": "assistant", "content": ""}, None)]

    def token(self, job: Job, choice: Choice) -> list[Any]:
        """Content; the finish reason with it or after it."""
        last = choice.is_last(choice.sent - 1)
        with_it = last and not self._style.finish_apart
        event = self._event(
            job, choice, {"content": choice.plan.texts[choice.sent - 1]}, choice.finish if with_it else None
        )
        top = job.ask.logprobs.answer
        if top is not None:
            event["choices"][0]["logprobs"] = logprobs.chat(choice, choice.sent - 1, choice.sent, top)
        return [event, self._event(job, choice, {}, choice.finish)] if last and self._style.finish_apart else [event]

    def choice(self, job: Job, choice: Choice) -> dict[str, Any]:
        """Message and finish reason."""
        top = job.ask.logprobs.answer
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "tool_calls": []},
            "logprobs": None if top is None else logprobs.chat(choice, 0, choice.sent, top),
            "finish_reason": choice.finish,
            self._style.stop_key: None,
        }

    def whole(self, job: Job) -> Any:
        """The complete answer; prompt log probabilities stand at its top."""
        whole = super().whole(job)
        if job.ask.logprobs.prompt is not None:
            whole["prompt_logprobs"] = logprobs.prompt(job.choices[0].prompt.tokens, job.ask.logprobs.prompt)
        return whole


class Completions(_OpenAi):
    """`/v1/completions`."""

    kind = chunk_kind = "text_completion"

    def _event(self, job: Job, choice: Choice, text: str, finish: str | None) -> dict[str, Any]:
        value = {"index": choice.index, "text": text, "logprobs": None, "finish_reason": finish}
        return self._one(job, {**value, self._style.stop_key: None})

    def opening(self, job: Job, choice: Choice) -> list[Any]:
        """The prompt, if it is to be echoed."""
        if not job.ask.echo:
            return []
        event = self._event(job, choice, choice.prompt.text, None)
        top = job.ask.logprobs.answer
        if top is not None:
            listed = logprobs.completion(choice.prompt.tokens, top, 0, prompt_first=True)
            event["choices"][0]["logprobs"] = listed
        return [event]

    def token(self, job: Job, choice: Choice) -> list[Any]:
        """Text; the finish reason with it or after it."""
        last = choice.is_last(choice.sent - 1)
        with_it = last and not self._style.finish_apart
        event = self._event(job, choice, choice.plan.texts[choice.sent - 1], choice.finish if with_it else None)
        top = job.ask.logprobs.answer
        if top is not None:
            before = len(choice.prompt.text) * job.ask.echo + len("".join(choice.plan.texts[: choice.sent - 1]))
            ids = choice.plan.tokens[choice.sent - 1 : choice.sent]
            event["choices"][0]["logprobs"] = logprobs.completion(ids, top, before)
        return [event, self._event(job, choice, "", choice.finish)] if last and self._style.finish_apart else [event]

    def choice(self, job: Job, choice: Choice) -> dict[str, Any]:
        """Text and finish reason."""
        echo, top = job.ask.echo, job.ask.logprobs.answer
        value: dict[str, Any] = {
            "index": choice.index,
            "text": (choice.prompt.text if echo else "") + choice.text,
            "logprobs": None,
            "finish_reason": choice.finish,
            self._style.stop_key: None,
        }
        if top is not None:
            ids = (*(choice.prompt.tokens if echo else ()), *choice.plan.tokens[: choice.sent])
            value["logprobs"] = logprobs.completion(ids, top, 0, prompt_first=echo)
        if job.ask.logprobs.prompt is not None:
            value["prompt_logprobs"] = logprobs.prompt(choice.prompt.tokens, job.ask.logprobs.prompt)
        return value
