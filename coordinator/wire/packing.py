"""What messages between our own processes hold besides what msgspec packs by itself."""

from collections.abc import Mapping


def plain(value: object) -> object:
    """An `enc_hook` for mappings of other kinds than dict, as instances may have for options."""
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} in a message")
