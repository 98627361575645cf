"""OpenAI's completions: text, log probabilities as parallel lists, usage, `[DONE]`."""

from collections.abc import Sequence
from typing import Any, Final

from coordinator.api.bodies import dump
from coordinator.api.generation import Generation

from .answer import Delta, TokenLogprob, Usage
from .openai import OpenAiShapes, finish, known, with_ids

_CONTINUES: Final = 0b11000000
_CONTINUATION: Final = 0b10000000


class CompletionsWriter(OpenAiShapes):
    """Writes `/v1/completions`."""

    def __init__(self, generation: Generation, ident: str, model: str, created_s: int) -> None:
        head: dict[str, object] = {
            "id": f"cmpl-{ident}",
            "object": "text_completion",
            "created": created_s,
            "model": model,
        }
        super().__init__(head, generation)
        self._prompts: dict[int, Delta] = {}
        self._offsets: dict[int, int] = {}  # of the next token in the text

    def prompt(self, index: int, prompt: Delta) -> bytes:
        """A chunk with the prompt, which the answer begins with."""
        self._prompts[index] = prompt
        return self._written(index, prompt) if prompt.text or prompt.token_ids else b""

    def piece(self, index: int, delta: Delta) -> bytes:
        """Text, and the finish reason with it."""
        bare = not delta.text and delta.finish_reason is None
        if bare and not (delta.token_ids and (self._ids or self._logprobs is not None)):
            return b""
        return self._written(index, delta)

    def whole(self, choices: Sequence[Delta], usage: Usage) -> bytes:
        """Texts with their finish reasons, behind the prompts that `prompt` was given."""
        self._offsets.clear()
        return self.body([self._choice(index, self._after(index, one)) for index, one in enumerate(choices)], usage)

    def _written(self, index: int, delta: Delta) -> bytes:
        if self._ids or self._logprobs is not None:
            return self._chunk + dump(self._choice(index, delta)) + b"]}\n\n"
        reason = b"null" if delta.finish_reason is None else dump(finish(delta.finish_reason))
        shape = b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b}]}\n\n'
        return self._chunk + shape % (index, dump(delta.text), reason)

    def _after(self, index: int, choice: Delta) -> Delta:
        prompt = self._prompts.get(index)
        if prompt is None:
            return choice
        return Delta(
            prompt.text + choice.text,
            prompt.token_ids + choice.token_ids,
            prompt.logprobs + choice.logprobs,
            choice.finish_reason,
        )

    def _choice(self, index: int, choice: Delta) -> dict[str, Any]:
        shape = {
            "index": index,
            "text": choice.text,
            "logprobs": self._listed(index, choice),
            "finish_reason": finish(choice.finish_reason),
        }
        return with_ids(shape, choice.token_ids, wanted=self._ids)

    def _listed(self, index: int, delta: Delta) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        offset = self._offsets.get(index, 0)
        offsets: list[int] = []
        for token in delta.logprobs:
            offsets.append(offset)
            offset += _characters(token)
        self._offsets[index] = offset
        if not known(delta.logprobs):
            return None
        return {
            "text_offset": offsets,
            "token_logprobs": [token.logprob for token in delta.logprobs],
            "tokens": [token.text for token in delta.logprobs],
            "top_logprobs": [_top(token, self._logprobs) for token in delta.logprobs],
        }


def _characters(token: TokenLogprob) -> int:
    """Characters that begin in a token: it may hold only a part of one."""
    if token.data is None:
        return len(token.text)
    return sum(byte & _CONTINUES != _CONTINUATION for byte in token.data)


def _top(token: TokenLogprob, count: int) -> dict[str, float | None] | None:
    """The most likely tokens, and the token itself, which is one more where it is none of them."""
    if token.logprob is None:
        return None
    return {one.text: one.logprob for one in token.top[:count]} | {token.text: token.logprob}
