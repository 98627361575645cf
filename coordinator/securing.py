"""Keys and certificates of the whole coordinator: applied at the start, on a reload, and when their files change."""

from collections.abc import Callable, Sequence

from coordinator.config import Settings
from coordinator.management import Management
from coordinator.observability.metrics import Metrics
from coordinator.security.certificates import Certificates
from coordinator.security.files import FileWatch
from coordinator.security.keeper import KeyKeeper
from coordinator.security.keys import Key
from coordinator.security.proxies import TrustedProxies

Tell = Callable[[Settings, Sequence[Key] | None], None]


class Security:
    """Hands everybody what they may go by; there is one, however many processes serve.

    Args:
        management: its port is guarded.
        certificates: of this process.
        tell: tells the data plane, of one process or of all, the settings and its keys; None: it needs none.
        metrics: forget keys that are gone.
    """

    def __init__(
        self, settings: Settings, management: Management, certificates: Certificates, tell: Tell, metrics: Metrics
    ) -> None:
        self.settings = settings
        self._certificates = certificates
        self._screen = management.screen
        self._tell = tell
        self._keeper = KeyKeeper(self._take, self._screen.take, metrics.forget_key)
        self._watches = (
            FileWatch("watch key files", self._keeper.files, self._keeper.reread, self._keys_s),
            FileWatch("watch certificates", certificates.files, certificates.reread, self._certificates_s),
        )

    @property
    def keys(self) -> Sequence[Key] | None:
        """The keys of the data plane; None: it needs none."""
        return self._keeper.keys

    def apply(self, settings: Settings) -> None:
        """Go by these settings; requests that run go on.

        Raises:
            ConfigError: a file cannot be used; nothing has changed.
        """
        steps = (self._certificates.prepare(settings), self._keeper.prepare(settings.auth))
        self.settings = settings
        for step in steps:
            step()
        self._screen.open_metrics = settings.auth.open_metrics
        self._screen.proxies = TrustedProxies(settings.server.trusted_proxies)
        names = (*settings.server.management_names, settings.server.management_host)
        self._screen.names = frozenset(map(str.lower, names))

    def start(self) -> None:
        """Apply the settings for the first time, and begin to look after the files. Raises ConfigError."""
        self.apply(self.settings)
        for watch in self._watches:
            watch.start()

    async def aclose(self) -> None:
        """Stop looking; idempotent."""
        for watch in self._watches:
            await watch.aclose()

    def _keys_s(self) -> float:
        return self.settings.auth.reread_s

    def _certificates_s(self) -> float:
        return self.settings.tls.reread_s

    def _take(self, keys: Sequence[Key] | None) -> None:
        self._tell(self.settings, keys)
