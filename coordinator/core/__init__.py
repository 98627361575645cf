"""Values and interfaces that every other package speaks in: no I/O, no asyncio."""
