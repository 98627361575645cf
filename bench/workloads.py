"""What is asked of a router, and which figures of it count."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Workload:
    """Closed-loop clients in front of pretend engines.

    Attributes:
        concurrency: clients; each sends its next request when it has its answer.
        requests: how many, all clients together; 0: every client opens one stream, and they are held.
        tokens: events of a stream.
        step_ms: an engine's time from one event to the next, of all its streams at once.
        prefill_ms: an engine's time for a prompt.
        stream: whether answers are event streams.
        prompt_bytes: size of a prompt.
        hold_s: how long the open streams are watched, where they are held.
        together: events that an engine sends at once.
        counting: clients count events and ends, and read nothing else of streams; they cost little beside the router.
    """

    concurrency: int
    requests: int
    tokens: int
    step_ms: float
    prefill_ms: float
    stream: bool
    prompt_bytes: int = 1200
    hold_s: float = 0
    together: int = 1
    counting: bool = False


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        "stream": Workload(200, 1000, tokens=128, step_ms=10, prefill_ms=5, stream=True),
        "burst": Workload(600, 1800, tokens=64, step_ms=20, prefill_ms=5, stream=True),
        "unary": Workload(64, 6000, tokens=4, step_ms=1, prefill_ms=0, stream=False),
        "latency": Workload(8, 400, tokens=8, step_ms=5, prefill_ms=5, stream=True),
        "long": Workload(16, 2000, tokens=4, step_ms=1, prefill_ms=0, stream=False, prompt_bytes=100_000),
        "idle": Workload(2000, 0, tokens=100_000, step_ms=1000, prefill_ms=5, stream=True, hold_s=20),
    }
)

# The first one is compared with the peers.
SHOWN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "stream": ("cpu_us_per_event", "events_per_s", "ttft_p50_ms", "itl_p99_ms"),
        "burst": ("cpu_us_per_event", "events_per_s", "ttft_p99_ms", "itl_p99_ms"),
        "unary": ("cpu_us_per_request", "requests_per_s", "ttft_p50_ms", "ttft_p99_ms"),
        "latency": ("ttft_p50_ms", "ttft_p99_ms", "itl_p99_ms", "cpu_us_per_request"),
        "long": ("cpu_us_per_request", "requests_per_s", "ttft_p50_ms", "ttft_p99_ms"),
        "idle": ("kib_per_stream", "cpu_us_per_event", "itl_p99_ms"),
    }
)

LABELS: Mapping[str, str] = MappingProxyType(
    {
        "cpu_us_per_event": "CPU µs / event",
        "cpu_us_per_request": "CPU µs / request",
        "events_per_s": "events / s",
        "requests_per_s": "requests / s",
        "ttft_p50_ms": "TTFT p50, ms",
        "ttft_p99_ms": "TTFT p99, ms",
        "itl_p99_ms": "ITL p99, ms",
        "kib_per_stream": "KiB / stream",
    }
)


def quick(work: Workload) -> Workload:
    """The same in a few seconds, to see that everything runs; its figures mean nothing."""
    return replace(
        work,
        concurrency=max(4, work.concurrency // 20),
        requests=work.requests // 20,
        hold_s=min(work.hold_s, 2),
    )
