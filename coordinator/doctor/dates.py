"""From when until when a certificate is valid, read from its DER form (RFC 5280 §4.1) without checking anything else.

Python's own parser gives dates of verified peers only, and those that have expired are the ones asked about here.
"""

import ssl
from datetime import UTC, datetime
from typing import NamedTuple

_VERSION = 0xA0
_UTC_TIME, _GENERALIZED_TIME = 0x17, 0x18
_BEFORE_VALIDITY = 3  # serial number, signature, issuer
_PEM_BEGIN, _PEM_END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


class Validity(NamedTuple):
    """The first and the last moment."""

    since: datetime
    until: datetime


def validity(der: bytes) -> Validity:
    """The dates of one certificate; raises ValueError if it is none."""
    try:
        _, certificate, _ = _element(der)
        _, body, _ = _element(certificate)
        if body[0] == _VERSION:
            _, _, body = _element(body)
        for _ in range(_BEFORE_VALIDITY):
            _, _, body = _element(body)
        _, dates, _ = _element(body)
        first, since, rest = _element(dates)
        second, until, _ = _element(rest)
        return Validity(_moment(first, since), _moment(second, until))
    except (IndexError, ValueError) as error:
        raise ValueError(f"not a certificate: {error}") from error


def validities(pem: str) -> list[Validity]:
    """The dates of every certificate in a PEM file; raises ValueError."""
    found = []
    for part in pem.split(_PEM_BEGIN)[1:]:
        body, end, _ = part.partition(_PEM_END)
        if not end:
            raise ValueError("a certificate is cut off")
        found.append(validity(ssl.PEM_cert_to_DER_cert(_PEM_BEGIN + body + _PEM_END)))
    return found


def _element(data: bytes) -> tuple[int, bytes, bytes]:
    """Tag, content and rest of the first element (X.690 §8.1)."""
    tag, length, at = data[0], data[1], 2
    if length & 0x80:
        size = length & 0x7F
        length, at = int.from_bytes(data[2 : 2 + size]), 2 + size
    if len(data) < at + length:
        raise ValueError("it is cut off")
    return tag, data[at : at + length], data[at + length :]


def _moment(tag: int, content: bytes) -> datetime:
    text = content.decode("ascii")
    if tag == _UTC_TIME:  # two digits of the year, 50 is 1950 (RFC 5280 §4.1.2.5.1)
        text = ("19" if int(text[:2]) >= 50 else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError("a date of an unknown kind")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
