"""Long and compressed request bodies: which codings are read, and what is done to them away from the event loop."""

import asyncio
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Executor

from coordinator.core.errors import BadRequest, BodyTooLarge, InternalError, RequestError, UnsupportedEncoding
from coordinator.server.pieces import Pieces

_INPUT_STEP_BYTES = 1 << 16
_OUTPUT_STEP_BYTES = 1 << 18
_MAX_GZIP_MEMBERS = 1024
_GZIP_BITS = 16 + zlib.MAX_WBITS
_NAME_SHOWN = 40
_AWAY_BYTES = 65536  # compressed bodies above this go to a thread at once
_HERE_BYTES = 1 << 20  # and smaller ones as soon as they turn out to be this large: some 2 ms of work

_GZIP = ("gzip", "x-gzip")
_DEFLATE = ("deflate",)


def coding_of(values: Iterable[bytes]) -> str | None:
    """The one coding that `Content-Encoding` names; None: the body is plain.

    Raises:
        UnsupportedEncoding: a coding that is not read here, or more than one.
    """
    names = [name.strip().lower() for value in values for name in value.decode("latin-1").split(",")]
    names = [name for name in names if name not in ("", "identity")]
    if not names:
        return None
    if len(names) > 1:
        raise UnsupportedEncoding("a body with more than one content coding is not supported, send one or none")
    if names[0] not in _GZIP + _DEFLATE:
        shown = names[0][:_NAME_SHOWN]
        raise UnsupportedEncoding(
            f"the content encoding {shown!r} is not supported, send gzip, deflate or a plain body"
        )
    return names[0]


class Expander:
    """Expands one body; `run` may go on in another thread, `stop` may come from any.

    What a body expands to is looked at step by step, so that a small body that stands for a huge one costs at most the
    limit, and a caller that runs it for a few steps is never held up for long.

    Args:
        coding: what `coding_of` returned; None: the body is only put together.
        data: the complete body as it came.
        limit_bytes: the most that it may expand to.
    """

    __slots__ = (
        "_at", "_coding", "_data", "_inflate", "_limit_bytes", "_members", "_out", "_pieces", "_size_bytes", "_stopped",
        "_tail",
    )  # fmt: skip

    def __init__(self, coding: str | None, data: bytes | Pieces, limit_bytes: int) -> None:
        self._coding = coding
        self._pieces: Pieces | None = data if isinstance(data, Pieces) else None
        self._data = b"" if isinstance(data, Pieces) else data
        self._limit_bytes = limit_bytes
        self._at = 0
        self._tail = b""
        self._members = 1
        self._out: list[bytes] = []
        self._size_bytes = 0
        self._stopped = False
        self._inflate: zlib._Decompress | None = None

    def stop(self) -> None:
        """Make a `run` in another thread return after its current step."""
        self._stopped = True

    def run(self, most_bytes: int | None = None) -> bytes | None:
        """Expand until the end, or until `most_bytes` came out.

        zlib lets other threads run meanwhile, and so does the joining of a long body.

        Returns:
            The expanded body, or None when there is more to do (or it was stopped).

        Raises:
            BadRequest: the data is corrupt or cut short.
            BodyTooLarge: it expands to more than the limit.
        """
        if self._pieces is not None and not self._stopped:
            self._data, self._pieces = self._pieces.whole(), None
        if self._coding is None:
            return None if self._stopped else self._data
        try:
            while not self._stopped and (most_bytes is None or self._size_bytes < most_bytes):
                if self._step():
                    self._data = b""
                    return b"".join(self._out)
        except zlib.error as error:
            raise BadRequest(f"the body is not valid {self._coding} data") from error
        return None

    def _step(self) -> bool:
        """One bounded step; true at the end of the data."""
        inflate = self._inflate
        if inflate is None:
            inflate = self._inflate = zlib.decompressobj(_window_bits(self._coding, self._data))
        piece = self._tail
        if not piece:
            piece = self._data[self._at : self._at + _INPUT_STEP_BYTES]
            self._at += len(piece)
        out = inflate.decompress(piece, _OUTPUT_STEP_BYTES)
        self._out.append(out)
        self._size_bytes += len(out)
        if self._size_bytes > self._limit_bytes:
            raise BodyTooLarge(f"the body expands to more than {self._limit_bytes} bytes")
        self._tail = inflate.unconsumed_tail
        if inflate.eof:
            return self._next_member(inflate.unused_data)
        if not piece and not inflate.unconsumed_tail:
            raise BadRequest(f"the {self._coding} data of the body is cut short")
        return False

    def _next_member(self, rest: bytes) -> bool:
        """Go on after the end of a compressed unit: gzip data may hold several (RFC 1952 §2.2).

        True if none follows.
        """
        self._tail = rest
        if not self._tail and self._at >= len(self._data):
            return True
        if self._coding not in _GZIP:
            raise BadRequest(f"the body goes on after the end of its {self._coding} data")
        self._members += 1
        if self._members > _MAX_GZIP_MEMBERS:
            raise BadRequest("the gzip data of the body has too many members")
        self._inflate = zlib.decompressobj(_GZIP_BITS)
        return False


def _window_bits(coding: str | None, data: bytes) -> int:
    """How zlib must read it: for `deflate`, some clients send bare deflate data without zlib's two byte header."""
    if coding in _GZIP:
        return _GZIP_BITS
    has_header = len(data) > 1 and data[0] & 0x0F == zlib.DEFLATED and (data[0] << 8 | data[1]) % 31 == 0
    return zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS


class Expansion:
    """Makes one body ready for an event loop: at once if that is quick, in a thread otherwise.

    Args:
        coding: what `coding_of` returned; None: the body is only put together.
        data: the complete body as it came.
        limit_bytes: the most that it may expand to.
        done: called once with the body, or with an empty one and the reason to refuse it; not after `cancel`.
    """

    __slots__ = ("_cancelled", "_data_bytes", "_done", "_expander")

    def __init__(
        self,
        coding: str | None,
        data: bytes | Pieces,
        limit_bytes: int,
        done: Callable[[bytes, RequestError | None], None],
    ) -> None:
        self._expander = Expander(coding, data, limit_bytes)
        self._data_bytes = len(data)
        self._done = done
        self._cancelled = False

    def begin(self, executor: Executor) -> None:
        """Start; `done` may be called before this returns."""
        try:
            body = self._expander.run(_HERE_BYTES) if self._data_bytes <= _AWAY_BYTES else None
        except RequestError as error:
            self._done(b"", error)
            return
        if body is not None:
            self._done(body, None)
            return
        result = asyncio.get_running_loop().run_in_executor(executor, self._expander.run)
        result.add_done_callback(self._ran)

    def cancel(self) -> None:
        """The body is of no use any more: the thread stops after its current step (256 KiB)."""
        self._cancelled = True
        self._expander.stop()

    def _ran(self, result: "asyncio.Future[bytes | None]") -> None:
        if result.cancelled():
            return
        error = result.exception()
        if self._cancelled:
            return
        if isinstance(error, RequestError):
            self._done(b"", error)
        elif error is not None:
            refusal = InternalError(detail=type(error).__name__)
            refusal.__cause__ = error
            self._done(b"", refusal)
        else:
            self._done(result.result() or b"", None)
