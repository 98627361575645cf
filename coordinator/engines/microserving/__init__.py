"""MLC microserving: decode reserves room, prefill sends the KV into it, decode generates.

    client ──▶ engine.serve ──▶ prep_recv on decode ──▶ remote_send on prefill ──▶ start_generate on decode ──▶ client

`engine` knows the instances, `task` what of a client's body goes where, `handoff` the three calls, `alone` the one call
of an engine that serves alone, `leg` the stream that may break off with `preempt`, `progress` what the next attempt
must know, `errands` what goes on after a request has left.

With `pattern` the calls are made by a router of the user's own (coordinator.sdk): `pattern_run` is what it may do,
`pattern_stream` the answer that it reads, `output` what becomes of what it yields.
"""

from coordinator.engines.microserving.engine import MicroservingEngine
from coordinator.engines.microserving.pattern import PatternEngine, pattern_of

__all__ = ["MicroservingEngine", "PatternEngine", "pattern_of"]
