"""The last request on a connection, to read the next one by it: most clients send the same head again and again."""

from coordinator.server.reader import RequestReader
from coordinator.server.shared import Shared
from coordinator.wire.head_memory import HeadMemory


class LastRequest(HeadMemory[RequestReader]):
    """See `HeadMemory`; `what` is the request that was read, without its body."""

    __slots__ = ()

    def keep(self, request: RequestReader) -> None:
        """Know its head from here on."""
        self.learn(request.plain_head, request.headers, request)

    def again(self, data: bytes, shared: Shared) -> RequestReader | None:
        """The request, if `data` is just one whole request with the known head."""
        at = self.find(data)
        length, limits = self.length, shared.limits
        if at < 0 or len(data) - at != length or length > limits.max_body_bytes or at > limits.max_header_bytes:
            return None
        request = self.what
        assert request is not None
        request.headers = self.headers
        request.body = data[at:]
        request.arrived_s = shared.clock()
        return request
