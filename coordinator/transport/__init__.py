"""Everything that opens a connection to an engine: an HTTP client of our own for the token legs, and standing links."""

from .client import HttpClient
from .errors import Reason, TransportError
from .link import Link, LinkReader, open_link
from .reply import Reply
from .sink import ReplySink
from .stream import Stream

__all__ = [
    "HttpClient",
    "Link",
    "LinkReader",
    "Reason",
    "Reply",
    "ReplySink",
    "Stream",
    "TransportError",
    "open_link",
]
