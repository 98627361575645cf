"""SGLang-specific settings and faults."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from instances.faults import Menu
from instances.openai.menu import ANSWER_MENU
from instances.settings import read_settings

MENU: Menu = MappingProxyType(
    {
        "prefill_error": ("text", "P: fails after its prefill, before the transfer; value: the text"),
        "prefill_stall": ("flag", "P: the transfer never comes"),
        "late_error": ("number", "P: fails this many seconds after the transfer, when decode streams already"),
        "late_reply": ("number", "P: answers this many seconds after the transfer"),
        "wrong_kv": ("flag", "P: transfers the KV of something else: decode writes visibly wrong text"),
        "transfer_failed": ("flag", "D: the transfer fails"),
        "garbage": ("flag", "D: writes visibly wrong text when prefill aborts, instead of failing"),
        **ANSWER_MENU,
    }
)
DUPLICATES = ("refuse", "crash")


@dataclass(frozen=True, slots=True)
class Settings:
    """Engine-specific settings (`Options.settings`).

    Attributes:
        bootstrap_port: P: port of the bootstrap server; 0 takes a free one, -1: the instance's own. D: the port that is
            meant where a request gives none.
        bootstrap_timeout_s: how long each leg waits for the other.
        waiting_timeout_s: how long each leg waits for the transfer.
        duplicate_room: what happens when a room that is live is opened again: `refuse` or `crash`.
        dp_size: data-parallel ranks of prefill.
        context_length: in tokens.
        version: of SGLang.
    """

    bootstrap_port: int = 0
    bootstrap_timeout_s: float = 300.0
    waiting_timeout_s: float = 300.0
    duplicate_room: str = "refuse"
    dp_size: int = 1
    context_length: int = 131_072
    version: str = "0.5.9"

    def __post_init__(self) -> None:
        if self.duplicate_room not in DUPLICATES:
            raise ValueError(f"duplicate_room must be one of {', '.join(DUPLICATES)}, not {self.duplicate_room!r}")

    @classmethod
    def read(cls, given: Mapping[str, object]) -> Self:
        """Settings from names and values, texts included; raises ValueError."""
        return read_settings(cls(), given)
