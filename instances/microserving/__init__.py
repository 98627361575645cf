"""Simulated MLC engines with the microserving calls."""
