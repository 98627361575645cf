"""MLC-specific settings and faults."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from instances.faults import Menu
from instances.openai.menu import ANSWER_MENU
from instances.settings import read_settings

CALLS = ("prep", "send", "generate")
_SAID = {"prep": "prep_recv", "send": "remote_send", "generate": "start_generate"}


def _of_each_call() -> dict[str, tuple[str, str]]:
    menu = {}
    for call, path in _SAID.items():
        menu[f"{call}_error"] = ("number", f"{path} answers this status (500) and does nothing")
        menu[f"{call}_hang"] = ("flag", f"{path} is never answered, and does nothing")
        menu[f"{call}_close"] = ("flag", f"{path} closes the connection, and does nothing")
    return menu


MENU: Menu = MappingProxyType(
    {
        **_of_each_call(),
        "prep_late": ("number", "D: the reservation comes this many seconds later, whether or not the caller waits"),
        "prep_lost": ("flag", "D: the reservation is made, and the connection closed instead of an answer"),
        "prep_die": ("flag", "D: the engine loop dies once prep_recv is answered"),
        "metadata": ("text", "D: prep_recv answers this as kv_append_metadata"),
        "send_late": ("number", "P: remote_send takes this many seconds more"),
        "send_lost": ("flag", "P: the KV is sent, and the connection closed instead of an answer"),
        "send_nothing": ("flag", "P: remote_send answers 200 with nothing sent, as after a preemption or abort"),
        "send_die": ("flag", "P: the engine loop dies in remote_send"),
        "wrong_kv": ("flag", "P: sends the KV of something else: decode writes visibly wrong text"),
        "preempt": (
            "number",
            "preempted once k tokens exist; value: an answer that goes on after that, again after so many more",
        ),
        "zero_chunks": ("flag", "the request ends without any output: 500 for a stream"),
        "die": ("flag", "the engine loop dies once k tokens exist: HTTP lives, nothing but /v1/models is answered"),
        **ANSWER_MENU,
    }
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Engine-specific settings (`Options.settings`).

    Attributes:
        world: name of the NVSHMEM world, the same on all instances that send KV to each other; empty: one for all
            instances of this process.
        pe_start: first rank of the instance in its world; -1 takes the first ones that are free.
        num_gpus: ranks of the instance.
        enable_debug: 0: as without `--enable-debug`, `debug_config` is stripped.
        disagg: 0: a model library that was compiled without disaggregation.
        max_sequence_length: longest sequence in tokens.
        reserve_pages: pages that must stay free when prep_recv takes its own.
        draft_models: further models, for speculative decoding: each has metadata of its own.
        segments: most pieces that a reservation is made of, for each model.
        more_models: names of further models that are loaded, with commas between them.
        api_key: wanted as bearer token under `/v1/`; empty: none.
    """

    world: str = ""
    pe_start: int = -1
    num_gpus: int = 1
    enable_debug: int = 1
    disagg: int = 1
    max_sequence_length: int = 32_768
    reserve_pages: int = 400
    draft_models: int = 0
    segments: int = 1
    more_models: str = ""
    api_key: str = ""

    def __post_init__(self) -> None:
        for name in ("num_gpus", "segments", "max_sequence_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @classmethod
    def read(cls, given: Mapping[str, object]) -> Self:
        """Settings from names and values, texts included; raises ValueError."""
        return read_settings(cls(), given)
