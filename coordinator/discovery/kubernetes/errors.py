"""What can keep us from following the API server."""


class Unreachable(Exception):
    """A call was not done; the text is for people.

    Attributes:
        retry_after_s: how long the server wants to be left alone; 0: it said nothing.
    """

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Expired(Exception):
    """The version that a list or watch goes on from is too old (410 Gone): everything must be listed again."""
