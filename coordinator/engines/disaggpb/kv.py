"""KV between prefill and decode: decode's request grows as prefill's messages come, each copied once, none parsed."""

import asyncio
import io
from collections.abc import Callable, Hashable

from coordinator.core.errors import EngineFailed, KvTooLarge
from coordinator.core.instance import Instance
from coordinator.engines.disaggpb.budget import TOO_LARGE, Room
from coordinator.engines.http_leg import side_of
from coordinator.wire.disaggpb import BLOCK_ENTRY, MAX_MESSAGE_BYTES, KvBlock, WireError, decode_head, read_kv

STEP_BYTES = 1 << 20  # copied without a turn of the loop: well below a millisecond, a few where pages are fresh


class LayerCounts:
    """How many layers whole KV has: a stream that ends with `done` too early looks like any other.

    Args:
        fixed: the number, where it is known; None: it is what KV of the same kind had before. Another number must come
            twice in a row to be believed, as it does where a model was exchanged.
    """

    def __init__(self, fixed: int | None = None) -> None:
        self._fixed = fixed
        self._known: dict[Hashable, int] = {}
        self._odd: dict[Hashable, int] = {}

    def agree(self, kind: Hashable, count: int) -> bool:
        """Whether KV of this kind may have so many layers; learns from it."""
        if self._fixed is not None:
            return count == self._fixed
        odd = self._odd.pop(kind, None)
        if self._known.setdefault(kind, count) != count and count != odd:
            self._odd[kind] = count
            return False
        self._known[kind] = count
        return True


class KvBuffer:
    """A DecodeRequest in the making.

    Blocks must come in the order of layers, within a layer in the order of blocks, from 0 on and without a gap.

    Args:
        wire_id: the request's id, which blocks carry.
        prefill: whose KV it is; guilty of what is wrong with it.
        room: accounts for what comes.
        agree: says whether a whole KV may have so many layers.
        expected_bytes: a guess at how much will come, so that the buffer need not be moved as it grows; 0: none.
    """

    def __init__(
        self, wire_id: str, prefill: Instance, room: Room, agree: Callable[[int], bool], expected_bytes: int = 0
    ) -> None:
        self._wire_id = wire_id.encode()
        self._prefill = prefill
        self._room = room
        self._agree = agree
        self._buffer = io.BytesIO(bytes(expected_bytes))
        self._buffer.write(decode_head(wire_id))
        self._layer_idx = self._block_idx = -1

    async def add(self, message: bytes | None) -> bool:
        """Take one message of the prefill stream, None for its end; returns whether this was the KV's last.

        Waits for memory where more comes than was reserved, and lets the loop turn between parts of a long block.

        Raises:
            EngineFailed: the message is none, is out of order or another request's, or the KV ends too early.
            KvTooLarge: it is more than one request may have.
            KvMemoryFull: there is no more memory.
        """
        if message is None:
            raise self._bad("the stream ends without `done`", "ended_early")
        try:
            read = read_kv(message)
        except WireError as error:
            raise self._bad(str(error)) from error
        if read.block is not None:
            self._check(read.block)
            await self._room.take(len(message))
            await self._append(message, read.block)
        if read.done:
            layers = self._layer_idx + 1
            if not layers:
                raise self._bad("no layer has come")
            if not self._agree(layers):
                raise self._bad(f"there are {layers} layers, another number than before")
        return read.done

    def request(self, tail: bytes) -> bytes:
        """The whole request. The buffer becomes it without being copied, and is of no further use.

        Raises:
            KvTooLarge: it is longer than a protobuf message can be.
        """
        buffer, self._buffer = self._buffer, io.BytesIO()
        buffer.write(tail)
        buffer.truncate()
        if buffer.tell() > MAX_MESSAGE_BYTES:
            raise KvTooLarge(TOO_LARGE)
        return buffer.getvalue()

    async def _append(self, message: bytes, block: KvBlock) -> None:
        write, view = self._buffer.write, memoryview(message)
        write(BLOCK_ENTRY)
        for at in range(block.start, block.end, STEP_BYTES):
            if at > block.start:
                await asyncio.sleep(0)
            write(view[at : min(at + STEP_BYTES, block.end)])

    def _check(self, block: KvBlock) -> None:
        if block.request_id not in (self._wire_id, b""):
            raise self._bad("a block of another request")
        follows = (self._layer_idx, self._block_idx + 1) if self._layer_idx >= 0 else (0, 0)
        if (block.layer_idx, block.block_idx) not in (follows, (self._layer_idx + 1, 0)):
            after = f"layer {self._layer_idx} block {self._block_idx}" if self._layer_idx >= 0 else "nothing"
            raise self._bad(f"layer {block.layer_idx} block {block.block_idx} after {after}")
        if block.k_bytes % 2 or block.v_bytes % 2:
            raise self._bad(f"{block.k_bytes} and {block.v_bytes} bytes are no fp16 numbers")
        if not block.k_bytes and not block.v_bytes:
            raise self._bad("a block without data")
        self._layer_idx, self._block_idx = block.layer_idx, block.block_idx

    def _bad(self, why: str, reason: str = "bad_reply") -> EngineFailed:
        return EngineFailed(side_of(self._prefill), self._prefill.id, reason, detail=f"KV: {why}")


class Payload:
    """Decode's request, kept for another decode instance until somebody has begun to answer it."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size_bytes = len(data)
        self.dropped = False

    def __call__(self) -> bytes:
        """The bytes."""
        return self._data

    def drop(self) -> None:
        """Let go of them."""
        self._data = b""
        self.dropped = True
