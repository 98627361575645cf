"""TGI: one event for each token; the last one has the whole text and its details.

Source: text-generation-inference, `router/src/lib.rs` (`StreamResponse`, `GenerateResponse`, `Details`).
"""

from collections.abc import Sequence
from typing import Any, Final

from coordinator.api.bodies import dump
from coordinator.api.generation import Generation

from .answer import LENGTH, STOP, STOP_STRING, Delta, TokenLogprob, Usage

_REASONS: Final = {STOP: "eos_token", STOP_STRING: "stop_sequence", LENGTH: "length"}


class TgiWriter:
    """Writes `/generate`, `/generate_stream` and `/`.

    The event of the last token waits for `tail`: it tells the length of the prompt.

    Args:
        generation: what the client asked for.
        details: whether a whole answer has them.
        listed: whether it is a list of one object, as on `/`.
    """

    tail_has_token = True

    def __init__(self, generation: Generation, *, details: bool, listed: bool) -> None:
        self._seed = generation.seed
        self._top = generation.logprobs or 0
        self._ids = generation.return_ids
        self._details = details
        self._listed = listed
        self._prompt = ""
        self._texts: list[str] = []
        self._tokens = 0
        self._last: tuple[dict[str, Any], str] | None = None  # the last event, and why there is no other

    def prompt(self, index: int, prompt: Delta) -> bytes:  # noqa: ARG002 - one answer only
        """The prompt is part of the whole text alone."""
        self._prompt = prompt.text
        return b""

    def piece(self, index: int, delta: Delta) -> bytes:  # noqa: ARG002 - one answer only
        """An event for each token; the text of several stands with the last of them."""
        if delta.text:
            self._texts.append(delta.text)
        tokens = _tokens(delta)
        ended = delta.finish_reason is not None
        events = [self._event(token, "", special=False) for token in tokens[:-1]]
        events += [self._event(token, delta.text, special=ended and not delta.text) for token in tokens[-1:]]
        if delta.finish_reason is not None:
            self._last = (events.pop(), delta.finish_reason)
        return b"".join([b"data:" + dump(event) + b"\n\n" for event in events])

    def tail(self, usage: Usage | None) -> bytes:
        """The event of the last token."""
        if self._last is None:
            return b""
        event, reason = self._last
        event["generated_text"] = self._prompt + "".join(self._texts)
        event["details"] = {
            "finish_reason": _REASONS.get(reason, reason),
            "generated_tokens": self._tokens if usage is None else usage.completion_tokens,
            "seed": self._seed,
            "input_length": 0 if usage is None else usage.prompt_tokens,
        }
        return b"data:" + dump(event) + b"\n\n"

    def whole(self, choices: Sequence[Delta], usage: Usage) -> bytes:
        """The text and, where they are wanted, its details."""
        choice = choices[0]
        answer: dict[str, Any] = {"generated_text": self._prompt + choice.text}
        if self._details:
            answer["details"] = self._told(choice, usage)
        if self._ids:
            answer["token_ids"] = list(choice.token_ids)
        return dump([answer] if self._listed else answer)

    def _told(self, choice: Delta, usage: Usage) -> dict[str, Any]:
        tokens = _tokens(choice)
        told: dict[str, Any] = {
            "finish_reason": _REASONS.get(choice.finish_reason or "", choice.finish_reason),
            "generated_tokens": usage.completion_tokens,
            "seed": self._seed,
            "prefill": [],
            "tokens": [_shown(token) for token in tokens],
        }
        if self._top:
            told["top_tokens"] = [self._alternatives(token) for token in tokens]
        return told

    def _event(self, token: TokenLogprob, text: str, *, special: bool) -> dict[str, Any]:
        self._tokens += 1
        event: dict[str, Any] = {"index": self._tokens, "token": _shown(token) | {"text": text, "special": special}}
        if self._top:
            event["top_tokens"] = self._alternatives(token)
        return {**event, "generated_text": None, "details": None}

    def _alternatives(self, token: TokenLogprob) -> list[dict[str, Any]]:
        return [_shown(one) for one in token.top[: self._top]]


def _tokens(delta: Delta) -> Sequence[TokenLogprob]:
    """The tokens of a piece; one without an id where only text is known."""
    if len(delta.logprobs) == len(delta.token_ids) and delta.logprobs:
        return delta.logprobs
    if delta.token_ids:
        return [TokenLogprob(token, "", None) for token in delta.token_ids]
    return [TokenLogprob(None, delta.text, None)] if delta.text or delta.finish_reason is not None else []


def _shown(token: TokenLogprob) -> dict[str, Any]:
    return {"id": token.token_id, "text": token.text, "logprob": token.logprob, "special": False}
