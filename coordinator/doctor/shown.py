"""The certificate that somebody shows, be it trusted or not."""

import asyncio
import ssl

from coordinator.core.instance import Address


def unchecked() -> ssl.SSLContext:
    """A context that trusts everybody: for looking, not for telling anything."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def shown_certificate(address: Address, within_s: float) -> bytes | None:
    """In DER form; None where nobody shows one within that time.

    In TLS 1.3 it is shown although one of ours may be wanted and lacking (RFC 8446 §4.4.2.4).
    """
    try:
        async with asyncio.timeout(within_s):
            _, writer = await asyncio.open_connection(
                address.host, address.port, ssl=unchecked(), server_hostname=address.host
            )
    except (OSError, TimeoutError):
        return None
    try:
        shown: ssl.SSLObject = writer.get_extra_info("ssl_object")
        return shown.getpeercert(binary_form=True)
    finally:
        writer.transport.abort()
