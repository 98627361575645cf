"""Simulated SGLang instances with the bootstrap protocol."""
