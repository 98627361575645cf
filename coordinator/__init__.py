"""pd-coordinator: the router in front of prefill/decode-disaggregated LLM instances.

A request goes one way down: front door (`api.frontdoor`) → `dispatch` → `scheduler` → an engine protocol (`engines`)
→ `transport`; what the engine sends comes back through `relay` to the client's socket. docs/architecture.md draws it.
"""
