"""KV caches that a decode worker can check: each layer's bytes follow from the prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from instances.answers import kv_digest
from instances.disaggpb.proto.disagg_pb2 import KVBlock

_HALF = 2  # bytes of an fp16 number
_PATTERN_BYTES = 64
_FINITE = 0xBF  # without the exponent's highest bit no number is infinite or none


@dataclass(frozen=True, slots=True)
class Shape:
    """Layers, and what each keeps of a token."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        """Bytes of K, and of V, for one token in one layer."""
        return self.kv_heads * self.head_dim * _HALF


class Cache:
    """The KV of a prompt.

    Args:
        prompt: token ids.
        seed: the instances' common seed.
        shape: of the model.
        wrong: another one than the prompt must have.
    """

    def __init__(self, prompt: Sequence[int], seed: int, shape: Shape, *, wrong: bool = False) -> None:
        digest = kv_digest(prompt, seed)
        self._origin = digest[::-1] if wrong else digest
        self._length = len(prompt) * shape.token_bytes
        self._shape = shape

    def part(self, layer: int, kind: str) -> bytes:
        """The bytes of `k` or `v` in a layer."""
        pattern = bytearray(blake2b(f"{self._origin}:{layer}:{kind}".encode(), digest_size=_PATTERN_BYTES).digest())
        for index in range(1, _PATTERN_BYTES, _HALF):
            pattern[index] &= _FINITE
        return bytes(pattern * (self._length // _PATTERN_BYTES + 1))[: self._length]

    def block(self, layer: int, request_id: str) -> KVBlock:
        """The block of a layer."""
        k_data, v_data = self.part(layer, "k"), self.part(layer, "v")
        return KVBlock(request_id=request_id, layer_idx=layer, block_idx=0, k_data=k_data, v_data=v_data)

    def fault_of(self, blocks: Sequence[KVBlock], request_id: str) -> str:
        """What is wrong with blocks that came for this prompt; empty if nothing is."""
        if len(blocks) != self._shape.layers:
            return "layers"
        for layer, block in enumerate(blocks):
            if block.request_id != request_id:
                return "request_id"
            if (block.layer_idx, block.block_idx) != (layer, 0):
                return "order"
            if len(block.k_data) != self._length or len(block.v_data) != self._length:
                return "length"
            if block.k_data != self.part(layer, "k") or block.v_data != self.part(layer, "v"):
                return "content"
        return ""


def is_odd(blocks: Sequence[KVBlock]) -> bool:
    """Whether some part cannot be fp16 numbers."""
    return any(len(block.k_data) % _HALF or len(block.v_data) % _HALF for block in blocks)
