"""What the dialects share in writing."""

import json
from typing import Any

from instances.mindie.ask import Job


def dump(value: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def sse(value: Any) -> bytes:
    """A server-sent event with a space after the colon."""
    return b"data: %b\n\n" % dump(value)


def comment(text: bytes) -> bytes:
    """A comment line of an event stream: clients skip it."""
    return b": %b\n\n" % text


def details(job: Job) -> dict[str, Any]:
    """`details` of a finished answer (TGI and native)."""
    return {
        "finish_reason": job.plan.finish,
        "generated_tokens": len(job.plan),
        "seed": job.ask.wish.seed,
    }


def milliseconds(value: float) -> float:
    """Rounded for an answer."""
    return round(value, 3)
