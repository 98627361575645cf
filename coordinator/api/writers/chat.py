"""OpenAI's chat completions: a role, content, a finish reason, usage, `[DONE]`."""

from collections.abc import Sequence
from typing import Any, Final

from coordinator.api.bodies import dump
from coordinator.api.generation import Generation

from .answer import Delta, TokenLogprob, Usage
from .openai import OpenAiShapes, finish, known, with_ids

_NO_LOGPROB: Final = -9999.0  # OpenAI's own word for a token too unlikely to be told
_ROLE: Final = b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
_GOES_ON: Final = b'},"logprobs":null,"finish_reason":null}]}\n\n'


class ChatWriter(OpenAiShapes):
    """Writes `/v1/chat/completions`."""

    def __init__(self, generation: Generation, ident: str, model: str, created_s: int) -> None:
        head: dict[str, object] = {
            "id": f"chatcmpl-{ident}",
            "object": "chat.completion.chunk",
            "created": created_s,
            "model": model,
        }
        super().__init__(head, generation)
        self._begun: dict[int, bytes] = {}

    def prompt(self, index: int, prompt: Delta) -> bytes:  # noqa: ARG002 - a chat echoes nothing
        """Nothing."""
        return b""

    def piece(self, index: int, delta: Delta) -> bytes:
        """The role before the first content; content; the finish reason in a chunk of its own."""
        opening = b""
        begin = self._begun.get(index)
        if begin is None:
            begin = self._chunk + b'{"index":%d,"delta":' % index
        plain = self._logprobs is None and not self._ids
        if delta.text and plain:
            content = begin + b'{"content":' + dump(delta.text) + _GOES_ON
        elif delta.text or (delta.token_ids and not plain):
            content = begin + self._rich(delta)
        else:
            content = b""
        reason = finish(delta.finish_reason)
        if reason is not None:
            content += begin + b'{},"logprobs":null,"finish_reason":' + dump(reason) + b"}]}\n\n"
        if content and index not in self._begun:
            self._begun[index] = begin
            opening = begin + _ROLE
        return opening + content

    def whole(self, choices: Sequence[Delta], usage: Usage) -> bytes:
        """Messages with their finish reasons."""
        self._head["object"] = "chat.completion"
        return self.body([self._choice(index, choice) for index, choice in enumerate(choices)], usage)

    def _rich(self, delta: Delta) -> bytes:
        """The rest of a chunk with log probabilities, token ids or both."""
        rest = with_ids({"logprobs": self._listed(delta), "finish_reason": None}, delta.token_ids, wanted=self._ids)
        return b'{"content":' + dump(delta.text) + b"}," + dump(rest)[1:] + b"]}\n\n"

    def _choice(self, index: int, choice: Delta) -> dict[str, Any]:
        shape = {
            "index": index,
            "message": {"role": "assistant", "content": choice.text},
            "logprobs": self._listed(choice),
            "finish_reason": finish(choice.finish_reason),
        }
        return with_ids(shape, choice.token_ids, wanted=self._ids)

    def _listed(self, delta: Delta) -> dict[str, Any] | None:
        if self._logprobs is None or not known(delta.logprobs):
            return None
        return {"content": [self._entry(one) for one in delta.logprobs]}

    def _entry(self, token: TokenLogprob) -> dict[str, Any]:
        return {**_shown(token), "top_logprobs": [_shown(other) for other in token.top[: self._logprobs]]}


def _shown(token: TokenLogprob) -> dict[str, Any]:
    data = token.text.encode("utf-8", "replace") if token.data is None else token.data
    logprob = _NO_LOGPROB if token.logprob is None else max(token.logprob, _NO_LOGPROB)
    return {"token": token.text, "logprob": logprob, "bytes": list(data)}
