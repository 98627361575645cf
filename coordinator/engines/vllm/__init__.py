"""vLLM with the NIXL connector in pull mode: one token from prefill, then decode with the record that came with it.

    client ──▶ engine.serve ──▶ POST prefill (one token) ──▶ kv_transfer_params
                    │                                             │ verbatim
                    └──────▶ POST decode (client's body + record) ◀┘ ──▶ answer, as it comes ──▶ client

`engine` is the choreography and knows the instances, `handoff` one prompt's way over a pair, `batch` the same for a
list of prompts, `legs` the calls, `releases` the KV that nobody came for, `missing` the handoffs that did not happen.
"""

from coordinator.engines.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]
