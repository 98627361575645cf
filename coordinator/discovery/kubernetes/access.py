"""Where the API server is, and how we may call it."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from kubernetes_asyncio import config
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.config.incluster_config import InClusterConfigLoader

from .errors import Unreachable

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN = "BearerToken"  # noqa: S105  # the client's name for where it keeps it
DEFAULT_NAMESPACE = "default"
AGENT = "pd-coordinator"


@dataclass(frozen=True, slots=True)
class Session:
    """A client and the namespace that it belongs to."""

    client: ApiClient
    namespace: str


class Access:
    """Opens sessions: by a kubeconfig, or by the service account of the pod that this process runs in.

    Each session reads everything again, so a token or certificate that was exchanged counts from the next one on.

    Args:
        kubeconfig: path; None: the service account.
        context: of the kubeconfig; None: its current one.
        account: folder of the service account's token, authority and namespace.
    """

    def __init__(self, kubeconfig: str | None, context: str | None = None, account: Path = SERVICE_ACCOUNT) -> None:
        self._kubeconfig = kubeconfig
        self._context = context
        self._account = account

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """A session for the block; raises Unreachable where what it needs cannot be read."""
        configuration = Configuration()
        try:
            if self._kubeconfig is None:
                namespace = self._by_account(configuration)
            else:
                namespace = await self._by_kubeconfig(self._kubeconfig, configuration)
            if token := configuration.api_key.get(TOKEN):
                configuration.api_key[TOKEN] = token.strip()
            client = ApiClient(configuration)
        except Exception as error:  # noqa: BLE001  # the border to the client: its loaders raise what they come across
            where = self._kubeconfig or "the service account"
            raise Unreachable(f"{where} cannot be used: {str(error) or type(error).__name__}") from None
        client.user_agent = AGENT
        try:
            yield Session(client, namespace)
        finally:
            await client.close()

    def _by_account(self, configuration: Configuration) -> str:
        loader = InClusterConfigLoader(
            str(self._account / "token"), str(self._account / "ca.crt"), try_refresh_token=False
        )
        loader.load_and_set(configuration)
        return (self._account / "namespace").read_text().strip() or DEFAULT_NAMESPACE

    async def _by_kubeconfig(self, path: str, configuration: Configuration) -> str:
        loader = await config.load_kube_config(
            config_file=path, context=self._context, client_configuration=configuration, persist_config=False
        )
        current = (loader.current_context or {}).get("context", {})
        return str(current.get("namespace") or DEFAULT_NAMESPACE)
