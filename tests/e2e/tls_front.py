"""TLS in front of a simulated instance, as a proxy beside an engine does it; a process of its own."""

import asyncio
import contextlib
import re
import signal
import ssl
import sys
from pathlib import Path
from urllib.parse import urlsplit

from processes import HOST, Process


class TlsFront(Process):
    """Takes TLS connections and passes their bytes on to a plain port.

    Args:
        url: of the instance behind it.
        cert, key: what it shows.
        client_ca: set: clients have to show a certificate.
        folder: for its log.
    """

    def __init__(self, url: str, cert: Path, key: Path, client_ca: Path | None, folder: Path) -> None:
        port = str(urlsplit(url).port)
        super().__init__("tls-front", [__file__, port, str(cert), str(key), str(client_ca or "")], folder)
        listening = self.said(r"READY (\d+)")
        self.url = f"https://{HOST}:{listening.group(1)}"

    def seen(self) -> set[tuple[str, str]]:
        """For each connection what the client has called it (SNI), and the common name of the client's certificate."""
        return set(re.findall(r"^CLIENT name=(\S*) subject=(\S*)$", self.log(), re.MULTILINE))


async def _serve(port: int, context: ssl.SSLContext) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    names: dict[object, str] = {}
    context.sni_callback = lambda connection, name, _context: names.update({connection: name or ""})

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        shown = writer.get_extra_info("peercert") or {}
        subjects = [value for part in shown.get("subject", ()) for key, value in part if key == "commonName"]
        name = names.get(writer.get_extra_info("ssl_object"), "")
        print(f"CLIENT name={name} subject={''.join(subjects)}")
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection(HOST, port)
            await asyncio.gather(pass_on(reader, back), pass_on(there, writer))

    server = await asyncio.start_server(client, HOST, 0, ssl=context)
    print("READY", server.sockets[0].getsockname()[1])
    await stop.wait()


def _main(port: str, cert: str, key: str, client_ca: str) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=client_ca or None)
    context.load_cert_chain(cert, key)
    if client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _loop, _context: None)  # clients that break off handshakes
    loop.run_until_complete(_serve(int(port), context))


if __name__ == "__main__":
    _main(*sys.argv[1:])
