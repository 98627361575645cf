"""Every inference call that clients can make: how its body looks, and what text its answer holds."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from instances import tokens

MODEL = "sim-model"
_DATA = re.compile(rb"^data: ?(.*)$", re.MULTILINE)


def events(body: bytes) -> list[Any]:
    """The JSON of each server-sent event; `[DONE]` as text."""
    return [payload.decode() if payload == b"[DONE]" else json.loads(payload) for payload in _DATA.findall(body)]


@dataclass(frozen=True, slots=True)
class Dialect:
    """One call, as a stream or not.

    Attributes:
        make: the body for a prompt and a limit; without the stream flag.
        whole: the text of an answer that is no stream.
        streamed: the text of a stream, put together.
        flag: whether the body tells that a stream is wanted.
    """

    name: str
    api: str
    path: str
    make: Callable[[str, int], dict[str, Any]]
    whole: Callable[[Any], str]
    streamed: Callable[[bytes], str] | None = None
    flag: bool = True

    @property
    def stream(self) -> bool:
        """Whether its answer is a stream."""
        return self.streamed is not None

    def body(self, prompt: str, limit: int = 12) -> dict[str, Any]:
        """A body that asks for exactly `limit` tokens at most."""
        return self.make(prompt, limit) | ({"stream": self.stream} if self.flag else {})

    def text(self, body: bytes, prompt: str) -> str:
        """The generated text of a complete answer."""
        text = self.whole(json.loads(body)) if self.streamed is None else self.streamed(body)
        return text.removeprefix(prompt) if self.api == "vllm" and not self.stream else text


def _chat(prompt: str, limit: int) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_completion_tokens": limit}


def _completion(prompt: str, limit: int) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": limit}


def _inputs(prompt: str, limit: int) -> dict[str, Any]:
    return {"inputs": prompt, "parameters": {"max_new_tokens": limit}}


def _input_ids(prompt: str, limit: int) -> dict[str, Any]:
    return {"input_id": list(tokens.encode(prompt)), "parameters": {"max_new_tokens": limit}}


def _vllm(prompt: str, limit: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": limit}


def _text_input(prompt: str, limit: int) -> dict[str, Any]:
    return {"text_input": prompt, "parameters": {"max_new_tokens": limit}}


def _tensor(prompt: str, limit: int) -> dict[str, Any]:
    ids = list(tokens.encode(prompt))
    tensor = {"name": "input0", "shape": [1, len(ids)], "datatype": "UINT32", "data": ids}
    return {"inputs": [tensor], "outputs": [{"name": "output0"}], "parameters": {"max_new_tokens": limit}}


def _stream_of_choices(body: bytes) -> str:
    *chunks, done = events(body)
    assert done == "[DONE]"
    assert "[DONE]" not in chunks
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices].count(None) == len(choices) - 1
    assert choices[-1]["finish_reason"] in ("stop", "length")
    return "".join(choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices)


def _stream_of_tokens(body: bytes) -> str:
    chunks = events(body)
    assert [chunk.get("generated_text") for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    text: str = chunks[-1]["generated_text"]
    parts = "".join(chunk["token"]["text"] or "" for chunk in chunks)
    last = chunks[-1]["token"]["text"]
    assert parts == text if last is not None else text.startswith(parts)
    return text


def _stream_of_outputs(body: bytes) -> str:
    return "".join(chunk["text_output"] for chunk in events(body))


def _stream_of_pieces(body: bytes) -> str:
    *pieces, after = body.split(b"\0")
    assert after == b""
    return "".join(json.loads(piece)["text"][0] for piece in pieces)


def _first(answer: Any) -> str:
    one = answer[0] if isinstance(answer, list) else answer
    return str(one["generated_text"])


def _content(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def _text_of_tensor(answer: Any) -> str:
    output = answer["outputs"][0]
    assert output["shape"] == [1, len(output["data"])]
    return tokens.decode(output["data"])


DIALECTS = (
    Dialect("chat", "openai", "/v1/chat/completions", _chat, _content),
    Dialect("chat-stream", "openai", "/v1/chat/completions", _chat, _content, _stream_of_choices),
    Dialect("completions", "openai", "/v1/completions", _completion, lambda a: str(a["choices"][0]["text"])),
    Dialect("completions-stream", "openai", "/v1/completions", _completion, str, _stream_of_choices),
    Dialect("tgi-root", "tgi", "/", _inputs, _first),
    Dialect("tgi-root-stream", "tgi", "/", _inputs, _first, _stream_of_tokens),
    Dialect("tgi", "tgi", "/generate", _inputs, _first, flag=False),
    Dialect("tgi-stream", "tgi", "/generate_stream", _inputs, _first, _stream_of_tokens, flag=False),
    Dialect("vllm", "vllm", "/generate", _vllm, lambda a: str(a["text"][0])),
    Dialect("vllm-stream", "vllm", "/generate", _vllm, str, _stream_of_pieces),
    Dialect(
        "triton", "triton", f"/v2/models/{MODEL}/generate", _text_input, lambda a: str(a["text_output"]), flag=False
    ),
    Dialect(
        "triton-stream",
        "triton",
        f"/v2/models/{MODEL}/generate_stream",
        _text_input,
        str,
        _stream_of_outputs,
        flag=False,
    ),
    Dialect("triton-infer", "triton", f"/v2/models/{MODEL}/infer", _tensor, _text_of_tensor, flag=False),
    Dialect("mindie", "mindie", "/infer", _inputs, _first),
    Dialect("mindie-stream", "mindie", "/infer", _inputs, _first, _stream_of_tokens),
    Dialect("mindie-tokens", "mindie", "/infer_token", _input_ids, _first),
)
BY_NAME = {dialect.name: dialect for dialect in DIALECTS}
CHAT_STREAM = BY_NAME["chat-stream"]
CHAT = BY_NAME["chat"]
