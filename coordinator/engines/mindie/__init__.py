"""MindIE: the request goes to prefill over HTTP, decode's output comes on one standing stream per decode instance.

    client ──▶ engine.serve ──▶ POST prefill (control headers) ──▶ envelope: first token
                    │ mailbox registered first
    decode instance ──▶ GET /dresult ──▶ link ──▶ mailbox ──▶ out

`engine` is the choreography of one request, `link` the standing stream of one decode instance, `mailbox` one request's
share of it, `envelope` the reading of prefill's reply, `stops` the aborts that outlive their requests.
"""

from coordinator.engines.mindie.engine import MindieEngine

__all__ = ["MindieEngine"]
