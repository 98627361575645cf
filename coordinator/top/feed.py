"""Listens to `GET /v1/live` of a coordinator."""

import ssl
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

PATH = "v1/live"
END = b"\n\n"
CONNECT_S = 5.0
SILENT_S = 20.0
LONGEST_EVENT_BYTES = 64 * 1024 * 1024
UNAUTHORIZED = 401

Event = tuple[str, dict[str, object]]


class FeedLost(Exception):
    """The feed cannot be had, or has ended; the text says why, for the person in front of it."""


class KeyRefused(FeedLost):
    """The coordinator wants a management key, or another one: trying again does not help."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where to listen.

    Attributes:
        url: of the management port.
        key: management key; empty: none.
        ca_file: PEM file with the authorities to go by; None: those of the system.
        cert_file: PEM file with a certificate of our own and its key; None: none.
    """

    url: str
    key: str = ""
    ca_file: Path | None = None
    cert_file: Path | None = None

    def trust(self) -> ssl.SSLContext | bool:
        """For aiohttp: whom to trust; raises OSError (ssl.SSLError included) where a file cannot be used."""
        if not self.url.startswith("https:"):
            return True
        context = ssl.create_default_context(cafile=self.ca_file)
        if self.cert_file is not None:
            context.load_cert_chain(self.cert_file)
        return context


async def listen(source: Source) -> AsyncGenerator[Event]:
    """The events of the feed, each with its name, until it ends.

    Raises:
        FeedLost: it has ended, or there is none.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENT_S)
    headers = {"Accept": "text/event-stream"} | ({"Authorization": f"Bearer {source.key}"} if source.key else {})
    answered = False
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers, read_bufsize=LONGEST_EVENT_BYTES) as session,
            session.get(f"{source.url.rstrip('/')}/{PATH}", ssl=source.trust()) as reply,
        ):
            await _check(reply, source)
            answered, number = True, 0
            while True:
                block = await reply.content.readuntil(END)
                if not block.endswith(END):
                    raise FeedLost("the feed has ended")
                event = _event(block)
                if event is None:
                    continue
                kind, data = event
                if kind == "tick" and data["n"] != number + 1:
                    raise FeedLost("a part of the feed is missing")
                number = int(str(data["n"]))
                yield kind, data
    except aiohttp.ClientSSLError as error:
        raise FeedLost(f"no trust in the coordinator's certificate: {error.__cause__ or error}") from error
    except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
        cut = isinstance(error.__cause__, ConnectionResetError)  # in the TLS handshake: TCP had come about
        raise FeedLost(_unanswered(source) if cut else "the coordinator cannot be reached") from error
    except (aiohttp.ClientError, OSError) as error:
        raise FeedLost("the feed has ended" if answered else _unanswered(source)) from error
    except (msgspec.DecodeError, KeyError, ValueError) as error:
        raise FeedLost("what came is no live feed") from error


def _unanswered(source: Source) -> str:
    """Why a connection ends without an answer. A refused certificate, or the lack of one, shows as nothing else."""
    ended = "the connection was closed without an answer: "
    if not source.url.startswith("https:"):
        return ended + "is this a management port, and does it speak plain http?"
    if source.cert_file is None:
        return ended + "does the coordinator want a certificate of yours? Give it with --cert-file"
    return ended + "does the coordinator accept the certificate of --cert-file, and is it still valid?"


async def _check(reply: aiohttp.ClientResponse, source: Source) -> None:
    if reply.status == UNAUTHORIZED:
        raise KeyRefused("the management key is not accepted" if source.key else "a management key is needed")
    if reply.status != 200 or reply.content_type != "text/event-stream":
        raise FeedLost(f"there is no live feed, but status {reply.status}: is this a management port?")


def _event(block: bytes) -> Event | None:
    """A server-sent event; None for a comment."""
    fields = dict(line.split(b": ", 1) for line in block.splitlines() if b": " in line)
    if b"data" not in fields:
        return None
    return fields[b"event"].decode(), msgspec.json.decode(fields[b"data"], type=dict[str, object])
