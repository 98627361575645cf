"""xLLM: the coordinator stands in the place of xllm-service.

    client ──▶ engine.serve ──▶ POST prefill (Completions, JSON): empty reply at once
                    │ mailbox registered first
    prefill, decode ──▶ Generations (baidu_std) ──▶ inbound ──▶ service ──▶ boxes ──▶ mailbox ──▶ answer ──▶ out
                                     ◀── one Status for each result; not ok: end that request

`engine` is the choreography of one request, `mailbox` its share of what instances push, `answer` the client's bytes,
`preparing` the question for prefill. `fleet` knows the instances, `linking` keeps their KV links, `service` answers
their calls.
"""

from coordinator.engines.xllm.engine import XllmEngine

__all__ = ["XllmEngine"]
