"""MLC microserving: decode reserves room, prefill sends the KV into it, decode generates.

    client ──▶ engine.serve ──▶ prep_recv on decode ──▶ remote_send on prefill ──▶ start_generate on decode ──▶ client

`engine` knows the instances, `task` what of a client's body goes where, `handoff` the three calls, `alone` the one call
of an engine that serves alone, `leg` the stream that may break off with `preempt`, `progress` what the next attempt
must know, `errands` what goes on after a request has left.
"""

from coordinator.engines.microserving.engine import MicroservingEngine

__all__ = ["MicroservingEngine"]
