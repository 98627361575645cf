"""What the demo shows: an answer as it comes, and calls to try."""

import asyncio
import json
import math
import sys
import time

from coordinator.transport.errors import TransportError
from coordinator.transport.sink import ReplySink

TEXT_ONLY = ("microserving",)
"""Engines whose chat needs a model's tokenizer, which a simulated one has not."""


def shown_request(engine: str, model: str, prompt: str, tokens: int) -> tuple[str, bytes]:
    """Path and body of the request that is shown: a chat where the engine can."""
    asked: dict[str, object] = {"model": model, "stream": True, "max_tokens": tokens}
    if engine in TEXT_ONLY:
        return "/v1/completions", json.dumps({**asked, "prompt": prompt}).encode()
    return "/v1/chat/completions", json.dumps({**asked, "messages": [{"role": "user", "content": prompt}]}).encode()


class Printer(ReplySink):
    """Prints the text of a stream of chat or of completions, and remembers when it came."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sent_s = time.monotonic()
        self._times_s: list[float] = []
        self._rest = b""
        self._route: dict[bytes, bytes] = {}
        self._status = 0

    def head(self, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        """Take the status, and the names of the instances."""
        self._status, self._route = status, dict(headers)

    def data(self, data: bytes, now_s: float) -> None:
        """Print what has come."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            payload = event.removeprefix(b"data:").strip()
            if payload in (b"", b"[DONE]"):
                continue
            choices = json.loads(payload).get("choices") or [{}]
            text = choices[0].get("text") or choices[0].get("delta", {}).get("content")
            if text:
                self._times_s.append(now_s)
                sys.stdout.write(text)
                sys.stdout.flush()

    def end(self, now_s: float) -> None:  # noqa: ARG002  # the sink's signature
        """The answer is there."""
        if not self.done.done():
            self.done.set_result(None)

    def lost(self, error: TransportError) -> None:
        """The answer broke off."""
        if not self.done.done():
            self.done.set_exception(error)

    def summary(self, first_from_prefill: bool) -> str:  # noqa: FBT001  # says what it is where it is called
        """One line on where the answer came from and how fast."""
        if not self._times_s:
            return f"no token came (status {self._status})"
        ttft_ms = (self._times_s[0] - self._sent_s) * 1000
        gaps = len(self._times_s) - 1
        itl_ms = (self._times_s[-1] - self._times_s[0]) / gaps * 1000 if gaps else math.nan
        prefill, decode = (self._route.get(name, b"?").decode() for name in (b"x-pd-prefill", b"x-pd-decode"))
        if not first_from_prefill:
            return (
                f"{len(self._times_s)} tokens from decode {decode}, the prompt computed on prefill {prefill}: "
                f"the first one after {ttft_ms:.0f} ms, then {itl_ms:.0f} ms apart."
            )
        return (
            f"{len(self._times_s)} tokens: the first one from prefill {prefill} after {ttft_ms:.0f} ms, "
            f"the others from decode {decode}, {itl_ms:.0f} ms apart."
        )


def offered_calls(engine: str, model: str, url: str, management_url: str) -> list[tuple[str, str]]:
    """Calls that the cluster answers: what each is, and its line for a shell."""
    chat = f'{{"model":"{model}","stream":true,"messages":[{{"role":"user","content":"Hello"}}]}}'
    lines = [
        ("OpenAI chat", f"curl -N {url}/v1/chat/completions -d '{chat}'"),
        ("OpenAI completions", f'curl {url}/v1/completions -d \'{{"model":"{model}","prompt":"Hello"}}\''),
    ]
    if engine in TEXT_ONLY:
        del lines[0]
    streamed = f'curl -s {url}/v1/completions -d \'{{"model":"{model}","stream":true,"prompt":"Hello"}}\''
    load = f"for i in $(seq 200); do {streamed} -o /dev/null & sleep 0.1; done; wait"
    native = {
        "disaggpb": [
            ("disaggpb", f'curl -N {url}/v1/completions -d \'{{"token_ids":[5,6,7],"max_new_tokens":8}}\''),
        ],
        "sglang": [("SGLang", f'curl {url}/generate -d \'{{"text":"Hello"}}\'')],
        "mindie": [
            ("TGI", f'curl -N {url}/generate_stream -d \'{{"inputs":"Hello"}}\''),
            ("vLLM", f'curl {url}/generate -d \'{{"prompt":"Hello"}}\''),
            ("Triton", f'curl {url}/v2/models/{model}/generate -d \'{{"text_input":"Hello"}}\''),
            ("MindIE", f'curl {url}/infer -d \'{{"inputs":"Hello","stream":false}}\''),
        ],
    }
    return [
        *lines,
        *native.get(engine, []),
        (f"some load, to see it move on {management_url}/", load),
        ("the same as that page, in a terminal", f"pd-coordinator top --url {management_url}"),
        ("instances", f"curl {management_url}/v1/instances"),
        ("metrics", f"curl {management_url}/metrics"),
    ]
