"""The micro-benchmarks."""
