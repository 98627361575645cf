"""SGLang with bootstrap: one request to prefill and decode at once, tied together by a room.

    client ──▶ engine.serve ──▶ Pair ──▶ POST prefill (body + room) ──▶ drained
                                  │                │ KV, between the engines
                                  └────▶ POST decode (same body) ──▶ answer, as it comes ──▶ client

`engine` is the choreography and knows the instances, `pair` one attempt and whose fault its failure is, `legs` the
two sinks, `joined` what prefill adds to decode's answer, `drains` answers that outlive their request, `bootstrap`
the ports.
"""

from coordinator.engines.sglang.engine import SglangEngine

__all__ = ["SglangEngine"]
