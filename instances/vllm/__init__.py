"""Simulated vLLM instances with the NIXL connector."""
