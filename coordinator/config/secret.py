"""Secrets that the configuration names and does not hold."""

import os
from pathlib import Path

from .errors import Refusal

MAX_BYTES = 4096


def read_secret(variable: str | None, file: str | None) -> bytes:
    """The secret in a variable of the environment, or in a file (spaces and line ends around it do not count).

    Returns:
        Empty where neither is named.

    Raises:
        Refusal: it is not there, or cannot stand in a header; the secret itself is never shown.
    """
    if variable is not None:
        given = os.environ.get(variable)
        if given is None:
            raise Refusal(f"the environment has no variable {variable}")
        return _checked(given.encode("utf-8", "surrogateescape"))
    if file is None:
        return b""
    try:
        with Path(file).open("rb") as opened:
            return _checked(opened.read(MAX_BYTES + 1))
    except OSError as error:
        raise Refusal(f"cannot be read: {(error.strerror or type(error).__name__).lower()}") from None


def _checked(given: bytes) -> bytes:
    secret = given.strip()
    if not secret:
        raise Refusal("there is nothing in it")
    if len(given) > MAX_BYTES:
        raise Refusal(f"it is longer than {MAX_BYTES} bytes")
    if not all(0x21 <= byte <= 0x7E for byte in secret):
        raise Refusal("it holds characters that cannot stand in a header")
    return secret
