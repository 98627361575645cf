"""What a simulated instance is told when it starts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from instances.timing import Timing

ROLES = ("prefill", "decode", "hybrid")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of one instance; the defaults suit tests: instant, a free port, no fault.

    Attributes:
        engine: which protocol it speaks.
        role: prefill, decode or hybrid.
        host: address to listen on, also the one that peers are told.
        port: 0 takes a free one.
        name: for `on=` faults and reports; default `<role>-<port>`.
        model: served model name.
        seed: must be the same on all instances that work together.
        timing: how long things take.
        answer_tokens: shortest and longest natural answer.
        max_new_tokens: the engine's own limit, where a request gives none.
        blocks, block_tokens: KV capacity.
        prefix_blocks: blocks of the prefix cache; 0: none.
        max_running: most requests in one decode step.
        max_body_bytes: 413 above.
        startup_s: answers 503 on health paths for so long.
        listen_after_s: refuses connections for so long.
        faults: see `instances.faults`.
        record_requests, record_body_bytes: how many requests, and how much of each body, the record keeps.
        settings: engine-specific keys.
    """

    engine: str = "mindie"
    role: str = "hybrid"
    host: str = "127.0.0.1"
    port: int = 0
    name: str = ""
    model: str = "sim-model"
    seed: int = 0
    timing: Timing = field(default_factory=Timing)
    answer_tokens: tuple[int, int] = (8, 48)
    max_new_tokens: int = 512
    blocks: int = 65536
    block_tokens: int = 128
    prefix_blocks: int = 0
    max_running: int = 4096
    max_body_bytes: int = 64 << 20
    startup_s: float = 0.0
    listen_after_s: float = 0.0
    faults: tuple[str, ...] = ()
    record_requests: int = 10_000
    record_body_bytes: int = 65_536
    settings: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role {self.role!r} is not one of {', '.join(ROLES)}")
