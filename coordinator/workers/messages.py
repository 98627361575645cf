"""What supervisor and workers say to each other."""

import msgspec

from coordinator.core.instance import Instance
from coordinator.security.keys import Key


class _Message(msgspec.Struct, array_like=True, tag=True):
    """A message; its type travels with it."""


# --- down


class Start(_Message):
    """The first message: who you are, and the configuration as JSON.

    `path`: where the supervisor finds modules, so that engines and policies of the user's own are found as well.
    """

    worker: int
    workers: int
    slots: int
    settings: str
    max_connections: int
    path: list[str]


class View(_Message):
    """The cluster as it is, in the picture `number`.

    `members`: every instance that requests may run on, with its slot on the board. `ready` and `suspect`: positions in
    that list. `names`, `any_name`, `pair`, `why`: what `Members` answers.
    """

    number: int
    members: list[tuple[Instance, int]]
    ready: list[int]
    suspect: list[int]
    names: list[str]
    any_name: bool
    pair: bool
    why: str


class Told(_Message):
    """A message for the engine protocol `engine`, made by its other half; opaque here."""

    engine: str
    data: bytes


class Secured(_Message):
    """Whom to let in and whom to believe: the keys of the data plane (None: it needs none), and the settings as JSON.

    It comes before the first view, so that nobody is let in without a key that needs one.
    """

    settings: str
    keys: list[Key] | None


class AskRecent(_Message):
    """Send what you have just seen."""


class Prepare(_Message):
    """Build what this configuration (JSON) needs, and say when it is there: `Prepared` with the same number."""

    number: int
    settings: str


class Commit(_Message):
    """Go by the configuration with this number from here on; 0: forget it."""

    number: int


class LogBy(_Message):
    """Log in this way (the section `logging` as JSON) until another configuration comes."""

    logging: str


class Drain(_Message):
    """Take no new requests, end within `within_s` seconds, then leave. A second one with 0 seconds ends it at once."""

    within_s: float


class AskMetrics(_Message):
    """Send your metrics; the answer carries the number."""

    number: int


# --- up


class Serving(_Message):
    """The worker listens on this port."""

    port: int


class Failed(_Message):
    """The worker cannot listen; the text says why."""

    reason: str


class Charge(_Message):
    """The instance with this id and URL has failed a request."""

    instance: str
    url: str
    side: str
    reason: str
    detail: str
    connecting: bool
    doubted: str = ""


class Credit(_Message):
    """A request went well at an instance that had failed one before."""

    instance: str
    url: str


class Requests(_Message):
    """Finished requests since the last such message: their number, prompt bytes and output tokens."""

    count: int
    prompt_bytes: int
    output_tokens: int


class Prepared(_Message):
    """The worker can go by the configuration `number`; or the text says why it cannot."""

    worker: int
    number: int
    reason: str


class Said(_Message):
    """A message for the other half of the engine protocol `engine`; opaque here."""

    engine: str
    data: bytes


class Seen(_Message):
    """What a worker has just seen, as `Recent.read` gives it, packed."""

    worker: int
    data: bytes


class Snapshot(_Message):
    """The metrics, as `Metrics.snapshot` gives them, packed; `number` is the question's, 0 for last words."""

    number: int
    data: bytes


Down = Start | View | Told | Secured | Prepare | Commit | LogBy | Drain | AskMetrics | AskRecent
Up = Serving | Failed | Charge | Credit | Requests | Prepared | Said | Seen | Snapshot
