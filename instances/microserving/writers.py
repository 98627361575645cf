"""Writing answers: chunks, and whole answers made of them (microserving protocol page §4)."""

import time
from collections.abc import Sequence
from typing import Any

from instances import tokens
from instances.microserving.asks import Ask
from instances.microserving.bodies import Chat, Completion
from instances.microserving.refusal import failed
from instances.microserving.stream import Delta, Output
from instances.openai import logprobs

Chunk = dict[str, Any]


class Writer:
    """What completions and chat share: one chunk has a choice for every sequence that gained something.

    Args:
        body: the request's body.
        ask: the same, as the engine sees it.
        debug: whether usage carries `extra`.
    """

    kind = ""

    def __init__(self, body: Completion | Chat, ask: Ask, *, debug: bool) -> None:
        self._body = body
        self._ask = ask
        self._debug = debug
        self.finish: list[str | None] = [None] * body.n

    def chunk(self, output: Output) -> Chunk | None:
        """The chunk of an output; None where there is nothing to tell. Raises Refused (500)."""
        if output.usage is not None:
            usage = output.usage if self._debug else {**output.usage, "extra": None}
            wanted = self._body.usage_wanted or not self._body.stream
            return self.framed([], usage) if wanted else None
        if len(output.deltas) < self._body.n:
            raise failed("fewer sequences than n")
        choices = []
        for index, delta in enumerate(output.deltas[: self._body.n]):
            ends = delta.finish is not None and self.finish[index] is None
            if ends:
                self.finish[index] = delta.finish
            elif not delta.text:
                continue
            choices.append(self._choice(index, delta))
        return self.framed(choices) if choices else None

    def framed(self, choices: list[Any], usage: dict[str, Any] | None = None) -> Chunk:
        """A chunk around choices."""
        return {
            "id": self._ask.user,
            "choices": choices,
            "created": int(time.time()),
            "model": self._body.model,
            **self._constants(),
            "usage": usage,
        }

    def _constants(self) -> dict[str, Any]:
        return {"object": self.kind}

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def echo(self) -> Chunk | None:
        """The chunk before all others."""
        return None

    def suffix(self) -> Chunk | None:
        """The chunk after all others; raises Refused (500)."""
        return None

    def whole(self, chunks: Sequence[Chunk]) -> Chunk:
        """The complete answer."""
        raise NotImplementedError


class CompletionWriter(Writer):
    """`/v1/completions` and start_generate."""

    kind = "text_completion"
    _body: Completion

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        return _completion_choice(index, delta.text, self.finish[index], self._logprobs(delta))

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        top = self._body.logprobs
        if top is None:
            return None
        return {
            "text_offset": None,
            "token_logprobs": [logprobs.of(token) for token in delta.tokens],
            "tokens": [tokens.decode((token,)) for token in delta.tokens],
            "top_logprobs": [
                {tokens.decode((token + rank,)): logprobs.of(token, rank) for rank in range(top)}
                for token in delta.tokens
            ],
        }

    def echo(self) -> Chunk | None:
        """The prompt, for each sequence."""
        if not self._body.echo:
            return None
        text = tokens.decode(self._ask.prompt)
        return self.framed([_completion_choice(index, text, None, None) for index in range(self._body.n)])

    def suffix(self) -> Chunk | None:
        """The suffix and the finish reasons; an engine request that ends without one is an assertion."""
        if self._body.suffix is None:
            return None
        if None in self.finish:
            raise failed("a suffix, but no finish reason")
        return self.framed(
            [_completion_choice(index, self._body.suffix, reason, None) for index, reason in enumerate(self.finish)]
        )

    def whole(self, chunks: Sequence[Chunk]) -> Chunk:
        """Texts and log probabilities joined."""
        choices = [_completion_choice(index, "", None, None) for index in range(self._body.n)]
        usage = None
        for chunk in chunks:
            usage = chunk["usage"] or usage
            for piece in chunk["choices"]:
                choice = choices[piece["index"]]
                choice["text"] += piece["text"]
                choice["finish_reason"] = choice["finish_reason"] or piece["finish_reason"]
                if piece["logprobs"] is None:
                    continue
                if choice["logprobs"] is None:
                    choice["logprobs"] = piece["logprobs"]
                else:
                    for name in ("token_logprobs", "tokens", "top_logprobs"):
                        choice["logprobs"][name] += piece["logprobs"][name]
        return self.framed(choices, usage)


def _completion_choice(index: int, text: str, finish: str | None, listed: dict[str, Any] | None) -> dict[str, Any]:
    return {"finish_reason": finish, "index": index, "logprobs": listed, "text": text}


class ChatWriter(Writer):
    """`/v1/chat/completions`, which has no finish reason `preempt`."""

    kind = "chat.completion.chunk"
    _body: Chat

    def _constants(self) -> dict[str, Any]:
        return {"system_fingerprint": "", "object": self.kind}

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        if delta.finish == "preempt":
            raise failed("preempt is no finish reason of a chat")
        listed = None
        if self._body.logprobs:
            listed = {"content": [_shown(token, self._body.top_logprobs) for token in delta.tokens]}
        said = {"content": delta.text, "role": "assistant", "name": None, "tool_calls": None, "tool_call_id": None}
        return {"finish_reason": self.finish[index], "index": index, "delta": said, "logprobs": listed}

    def whole(self, chunks: Sequence[Chunk]) -> Chunk:
        """Messages joined."""
        texts, usage = [""] * self._body.n, None
        listed: list[list[Any]] = [[] for _ in texts]
        for chunk in chunks:
            usage = chunk["usage"] or usage
            for piece in chunk["choices"]:
                texts[piece["index"]] += piece["delta"]["content"]
                listed[piece["index"]] += (piece["logprobs"] or {}).get("content", [])
        choices = [
            {
                "finish_reason": self.finish[index],
                "index": index,
                "message": {"content": text, "role": "assistant", "name": None, "tool_calls": None},
                "logprobs": {"content": listed[index]} if self._body.logprobs else None,
            }
            for index, text in enumerate(texts)
        ]
        return {**self.framed(choices, usage), "object": "chat.completion"}


def _shown(token: int, top: int) -> dict[str, Any]:
    def one(of: int, rank: int) -> dict[str, Any]:
        data = tokens.token_bytes(of)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprobs.of(token, rank), "bytes": list(data)}

    return {**one(token, 0), "top_logprobs": [one(token + rank, rank) for rank in range(top)]}
