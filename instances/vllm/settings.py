"""vLLM-specific settings and faults."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from instances.faults import Menu
from instances.openai.menu import ANSWER_MENU
from instances.settings import read_settings

MENU: Menu = MappingProxyType(
    {
        "no_params": ("flag", "P: the answer lacks kv_transfer_params, nothing is kept"),
        "null_params": ("flag", "P: kv_transfer_params is null, nothing is kept"),
        "empty_params": ("flag", "P: kv_transfer_params is an empty object, nothing is kept"),
        "stale_params": ("flag", "P: kv_transfer_params name another engine, as from before a restart"),
        "finish_stop": ("flag", "P: the finish reason is `stop`"),
        "wrong_kv": ("flag", "P: hands over the KV of something else: decode writes visibly wrong text"),
        "transfer_failed": ("flag", "D: the KV cannot be read; kv_load_failure_policy decides"),
        **ANSWER_MENU,
    }
)
SHAPES = ("new", "plain", "old")
POLICIES = ("fail", "recompute")


@dataclass(frozen=True, slots=True)
class Settings:
    """Engine-specific settings (`Options.settings`).

    Attributes:
        shape: of kv_transfer_params: `new` (block ids nested by KV group, all fields), `plain` (nested, without the
            later fields), `old` (a flat list, without remote_request_id).
        same_request_id: 1: as before vLLM 0.13, decode reads only under the X-Request-Id that prefill had, and an id
            that is live is refused.
        kv_lease_s: how long prefill keeps KV that nobody reads.
        kv_load_failure_policy: what decode does without the KV: `fail` or `recompute`.
        min_kv_tokens: prompts below this many tokens get no params.
        params_on_hit: 0: a prompt that is cached as far as it can be gets no params.
        side_channel_port: a further port, named in the params; 0 takes a free one, -1: the instance's own.
        max_model_len: context length in tokens.
        version: of vLLM.
    """

    shape: str = "new"
    same_request_id: int = 0
    kv_lease_s: float = 30.0
    kv_load_failure_policy: str = "fail"
    min_kv_tokens: int = 0
    params_on_hit: int = 1
    side_channel_port: int = 0
    max_model_len: int = 131_072
    version: str = "0.32.0"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("shape", self.shape, SHAPES),
            ("kv_load_failure_policy", self.kv_load_failure_policy, POLICIES),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")

    @classmethod
    def read(cls, given: Mapping[str, object]) -> Self:
        """Settings from names and values, texts included; raises ValueError."""
        return read_settings(cls(), given)
