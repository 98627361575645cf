"""Free ports that stay free: other processes of this machine ask the system for ports all the time."""

import contextlib
import socket


class HeldPorts(contextlib.ExitStack):
    """Ports for who listens later, until the end of the scope.

    Each is bound, so that the system gives it to nobody else; who names it may listen there as if it were free
    (SO_REUSEADDR, which servers set), and may do so again and again.
    """

    def take(self, port=0):
        """One more port; or this one, which somebody has just given up."""
        place = self.enter_context(socket.socket())
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", port))
        return place.getsockname()[1]
