"""The project's own benchmarks: `make bench`. See docs/performance.md."""
