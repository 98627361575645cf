"""A client without a socket: a real exchange over a transport that remembers what was written."""

from coordinator.server.exchange import Exchange
from coordinator.server.limits import ServerLimits
from coordinator.server.reader import RequestReader

NOTHING = b""


class Wire:
    """The transport; `unsent` bytes are said to wait in its buffer."""

    def __init__(self):
        self.writes = []
        self.unsent = 0

    def write(self, data):
        self.writes.append(bytes(data))

    def writelines(self, pieces):
        self.write(b"".join(pieces))

    def get_write_buffer_size(self):
        return self.unsent


class Client:
    """One request of a client, and the answer as the client would read it."""

    def __init__(
        self, target="/v1/chat/completions", body=b"{}", *, method="POST", headers=(), version="1.1",
        refusal=None, arrived_s=100.0,
    ):  # fmt: skip
        self.transport = Wire()
        self.peer = "10.9.8.7"
        self.draining = False
        self.date = bytes
        self.ends = []  # how the answer ended: answered, torn, reset
        lines = [f"{method} {target} HTTP/{version}", "Host: a", f"Content-Length: {len(body)}", *headers]
        reader = RequestReader(ServerLimits())
        reader.feed("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)
        assert reader.complete
        assert reader.refusal is None
        reader.arrived_s = arrived_s
        self.exchange = Exchange(self, reader, b"" if refusal else reader.body, refusal)

    # --- what the exchange calls

    def answered(self, *, reusable):
        self.ends.append("answered")

    def torn(self):
        self.ends.append("torn")

    def reset(self):
        self.ends.append("reset")

    # --- what tests read

    @property
    def writes(self):
        return self.transport.writes

    @property
    def status(self):
        return int(self._head.split(b" ", 2)[1])

    @property
    def headers(self):
        lines = self._head.split(b"\r\n")[1:]
        pairs = [line.decode().split(": ", 1) for line in lines]
        found = {name.lower(): value for name, value in pairs}
        assert len(found) == len(pairs), "a header is there twice"
        return found

    @property
    def body(self):
        return self._read()[0]

    @property
    def whole(self):
        """Whether the body has its proper end."""
        return self._read()[1]

    @property
    def _head(self):
        return b"".join(self.writes).partition(b"\r\n\r\n")[0]

    def _read(self):
        rest = b"".join(self.writes).partition(b"\r\n\r\n")[2]
        if "transfer-encoding" not in self.headers:
            length = int(self.headers.get("content-length", -1))
            return rest, length == len(rest)
        body = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            assert rest[length : length + 2] == b"\r\n"
            if not length:
                assert rest == b"\r\n", "bytes after the end"
                return body, True
            body, rest = body + rest[:length], rest[length + 2 :]
        return body, False
