"""Decode's answer on its way to the client, with what only prefill knows of it."""

from collections.abc import Callable
from typing import Protocol

from coordinator.core.out import Out
from coordinator.wire.events import UsageEditor
from coordinator.wire.json_edit import read_fields, write_fields
from coordinator.wire.merge import with_cached_tokens
from coordinator.wire.sglang_answers import LogprobsEditor, cached_tokens, prompt_logprobs, with_logprobs

MAX_HELD_BYTES = 4 << 20


class Editor(Protocol):
    """Edits a stream: bytes in, bytes out, held back where an event is not whole."""

    def feed(self, data: bytes) -> bytes:
        """Take stream bytes; returns those that can go on."""
        ...

    def rest(self) -> bytes:
        """What is held back."""
        ...


class JoinedOut(Out):
    """A `core.ports.Out` in front of the client's, for requests that prefill's answer adds something to.

    This one adds prefill's cached tokens to the usage of OpenAI answers. It waits for nothing: what has gone out, or
    ends before prefill's answer is there, stays as decode said it.
    """

    def __init__(self, out: Out, *, stream: bool) -> None:
        self._out = out
        self._stream = stream
        self._editor: Editor | None = None
        self._prefilled: bytes = b""

    def prefilled(self, body: bytes, now_s: float) -> None:  # noqa: ARG002
        """Learn prefill's answer."""
        self._prefilled = body
        cached = cached_tokens(body, stream=True) if self._stream else None
        if cached is not None:
            self._editor = UsageEditor(cached)

    @property
    def waits(self) -> bool:
        """Whether decode's answer is held back."""
        return False

    def release(self) -> None:
        """Send what was held back, and everything from here on as it comes."""

    # --- Out

    @property
    def started(self) -> bool:
        """Whether anything was sent to the client."""
        return self._out.started

    def piece(self, data: bytes, now_s: float, *, token: bool = True) -> None:
        """Send stream bytes, edited."""
        if self._editor is not None:
            data = self._editor.feed(data)
        if data:
            self._out.piece(data, now_s, token=token)

    def finish(self, data: bytes, now_s: float, *, token: bool = True, after: bytes = b"") -> None:
        """Send the last stream bytes and the end."""
        if self._editor is not None:
            data = self._editor.feed(data) + self._editor.rest()
        self._out.finish(data, now_s, token=token, after=after)

    def whole(self, body: bytes, now_s: float, content_type: bytes = b"application/json") -> None:
        """Send a complete answer, edited."""
        self._out.whole(self._edited(body), now_s, content_type)

    def only_opens(self, data: bytes) -> bool:
        """See `core.ports.Out`."""
        return self._out.only_opens(data)

    def ends(self, data: bytes) -> bool:
        """See `core.ports.Out`."""
        return self._out.ends(data)

    def paced_by(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """See `core.ports.Out`."""
        self._out.paced_by(pause, resume)

    def hold(self) -> None:
        """See `core.gather`."""
        self._out.hold()

    def flush(self) -> None:
        """See `core.gather`."""
        self._out.flush()

    def _edited(self, body: bytes) -> bytes:
        cached = cached_tokens(self._prefilled, stream=False)
        try:
            return body if cached is None else write_fields(with_cached_tokens(read_fields(body), cached))
        except ValueError:
            return body


class LogprobsOut(JoinedOut):
    """Adds the prompt's logprobs to answers of `/generate`; holds decode's answer back until prefill's is there.

    Above MAX_HELD_BYTES decode's stream is paused meanwhile. `release` lets go of what is held.
    """

    def __init__(self, out: Out, *, stream: bool) -> None:
        super().__init__(out, stream=stream)
        self._held: list[Callable[[], None]] | None = []
        self._held_bytes = 0
        self._pause: Callable[[], None] | None = None
        self._resume: Callable[[], None] | None = None

    @property
    def waits(self) -> bool:
        """Whether decode's answer is held back."""
        return self._held is not None

    def prefilled(self, body: bytes, now_s: float) -> None:  # noqa: ARG002
        """Learn prefill's answer and send what was held back."""
        self._prefilled = body
        if self._stream:
            told = prompt_logprobs(body, stream=True)
            self._editor = LogprobsEditor(told) if told else None
        self.release()

    def release(self) -> None:
        """Send what was held back, and everything from here on as it comes."""
        held, self._held = self._held, None
        if self._resume is not None and self._held_bytes > MAX_HELD_BYTES:
            self._resume()
        self._held_bytes = 0
        self._out.hold()
        try:
            for send in held or ():
                send()
        finally:
            self._out.flush()

    def piece(self, data: bytes, now_s: float, *, token: bool = True) -> None:
        """Send stream bytes, or hold them back."""
        if self._held is None:
            super().piece(data, now_s, token=token)
            return
        self._held.append(lambda: self.piece(data, now_s, token=token))
        self._held_bytes += len(data)
        if self._held_bytes > MAX_HELD_BYTES and self._pause is not None:
            self._pause()

    def finish(self, data: bytes, now_s: float, *, token: bool = True, after: bytes = b"") -> None:
        """Send the end of the stream, or hold it back."""
        if self._held is None:
            super().finish(data, now_s, token=token, after=after)
        else:
            self._held.append(lambda: self.finish(data, now_s, token=token, after=after))

    def whole(self, body: bytes, now_s: float, content_type: bytes = b"application/json") -> None:
        """Send a complete answer, or hold it back."""
        if self._held is None:
            super().whole(body, now_s, content_type)
        else:
            self._held.append(lambda: self.whole(body, now_s, content_type))

    def paced_by(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Take the means to pause decode; the client's own slowness uses them too."""
        self._pause, self._resume = pause, resume
        super().paced_by(pause, resume)

    def _edited(self, body: bytes) -> bytes:
        return with_logprobs(body, prompt_logprobs(self._prefilled, stream=False))
