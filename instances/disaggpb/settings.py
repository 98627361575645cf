"""disaggpb-specific settings and faults."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from instances.faults import Menu
from instances.settings import read_settings

DEFAULT_MESSAGE_BYTES = 4_194_304  # gRPC's own default

MENU: Menu = MappingProxyType(
    {
        "zero_layers": ("flag", "P: no block at all, then done"),
        "done_first": ("flag", "P: done comes before the blocks"),
        "no_done": ("flag", "P: the stream ends without done once k blocks are sent (default: all)"),
        "block_after_done": ("flag", "P: one more block after done"),
        "wrong_id": ("flag", "P: blocks carry another request_id"),
        "out_of_order": ("flag", "P: the first two layers change places"),
        "duplicate": ("flag", "P: the first layer comes twice"),
        "skip_layer": ("flag", "P: the last layer is missing"),
        "odd_length": ("flag", "P: k_data of block k (default 0) has a byte too few"),
        "wrong_kv": ("flag", "P: the KV of something else: decode gives visibly wrong tokens"),
        "prefill_unavailable": ("flag", "P: UNAVAILABLE once k blocks are sent"),
        "prefill_fail": ("text", "P: UNKNOWN once k blocks are sent; value: the text"),
        "prefill_cut": ("flag", "P: the connection is reset once k blocks are sent"),
        "prefill_stall": ("flag", "P: nothing more once k blocks are sent"),
        "prefill_slow": ("number", "P: this many seconds for each block"),
        "decode_unavailable": ("flag", "D: UNAVAILABLE once k tokens are sent"),
        "decode_fail": ("text", "D: UNKNOWN once k tokens are sent; value: the text"),
        "decode_cut": ("flag", "D: the connection is reset once k tokens are sent"),
        "decode_stall": ("flag", "D: nothing more once k tokens are sent"),
        "decode_slow": ("number", "D: this many seconds for each token"),
        "decode_no_done": (
            "flag",
            "D: the stream ends without done once k tokens are sent (default: all but the last)",
        ),
        "decode_wrong_id": ("flag", "D: tokens carry another request_id"),
        "after_done": ("flag", "D: one more token after done"),
        "token_zero": ("flag", "D: token k (default: the first) has the id 0, which is a real token"),
        "eos_first": ("flag", "D: the first token ends the text"),
        "length": ("number", "D: natural length of the answer in tokens"),
    }
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Engine-specific settings (`Options.settings`).

    Attributes:
        layers, kv_heads, head_dim: shape of the KV; 32, 8 and 128 are those of Llama-3-8B.
        max_message_bytes: largest message that is received; -1: any.
        health: 1: serve the standard gRPC health service too.
        tls_cert, tls_key: files in PEM form: serve with TLS.
        tls_client_ca: file in PEM form: want a client certificate that it signed.
    """

    layers: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    max_message_bytes: int = DEFAULT_MESSAGE_BYTES
    health: int = 0
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if bool(self.tls_cert) != bool(self.tls_key) or (self.tls_client_ca and not self.tls_cert):
            raise ValueError("tls_cert and tls_key go together, and tls_client_ca with them")

    @classmethod
    def read(cls, given: Mapping[str, object]) -> Self:
        """Settings from names and values, texts included; raises ValueError."""
        return read_settings(cls(), given)
