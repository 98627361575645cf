"""Commands of `pd-coordinator`: parse, call, exit code; no logic."""


def main() -> int:
    """Entry point."""
    return 2
