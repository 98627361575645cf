"""etcd v3 over its JSON gateway: as much of it as an instance needs."""

import json
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

_CALL = aiohttp.ClientTimeout(total=5)
_STANDING = aiohttp.ClientTimeout(total=None, sock_connect=5)


class EtcdError(Exception):
    """etcd did not answer, or not well."""


class Etcd:
    """A client of one etcd.

    Args:
        client: makes the HTTP calls.
        url: of the gateway.
        namespace: keys begin with `/<namespace>/`; empty: they do not.
        login: name and password; empty: none.
    """

    def __init__(self, client: aiohttp.ClientSession, url: str, namespace: str, login: tuple[str, str]) -> None:
        self._client = client
        self._url = url.rstrip("/")
        self._prefix = f"/{namespace}/" if namespace else ""
        self._login = login
        self._token = ""

    def _key(self, key: str) -> str:
        return b64encode(f"{self._prefix}{key}".encode()).decode()

    async def put(self, key: str, value: str, lease: int = 0) -> None:
        """Write a key; with a lease it goes when that ends."""
        await self._call("kv/put", {"key": self._key(key), "value": _packed(value), "lease": lease})

    async def get(self, key: str) -> str | None:
        """The value of a key; None: there is none."""
        return (await self.look(key))[0]

    async def look(self, key: str) -> tuple[str | None, int]:
        """The value of a key, and the revision of etcd that had it."""
        answer = await self._call("kv/range", {"key": self._key(key)})
        found = answer.get("kvs", [])
        value = b64decode(found[0].get("value", "")).decode() if found else None
        return value, int(answer["header"]["revision"])

    async def delete(self, key: str) -> None:
        """Take a key away."""
        await self._call("kv/deleterange", {"key": self._key(key)})

    async def grant(self, ttl_s: int) -> int:
        """A lease."""
        return int((await self._call("lease/grant", {"TTL": ttl_s}))["ID"])

    async def keep_alive(self, lease: int) -> bool:
        """Begin the time of a lease anew; False if it has ended."""
        answer = await self._call("lease/keepalive", {"ID": lease})
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    async def revoke(self, lease: int) -> None:
        """End a lease, and take its keys away."""
        await self._call("lease/revoke", {"ID": lease})

    async def watch(self, key: str, after: int) -> AsyncIterator[str | None]:
        """Values of a key as they change after that revision, None for a key that goes.

        It ends, or raises EtcdError, when the watch breaks.
        """
        body = {"create_request": {"key": self._key(key), "start_revision": after + 1}}
        try:
            async with self._client.post(
                f"{self._url}/v3/watch", json=body, headers=self._headers(), timeout=_STANDING
            ) as answer:
                async for line in answer.content:
                    for event in json.loads(line).get("result", {}).get("events", []):
                        is_gone = event.get("type") == "DELETE"
                        yield None if is_gone else b64decode(event["kv"].get("value", "")).decode()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EtcdError(f"watch: {str(error) or type(error).__name__}") from None

    def _headers(self) -> dict[str, str]:
        return {"Authorization": self._token} if self._token else {}

    async def _call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._login[0] and not self._token:
            await self._authenticate()
        status, answer = await self._post(path, body)
        if status != 200 and self._token and "token" in str(answer.get("error")):
            await self._authenticate()
            status, answer = await self._post(path, body)
        if status != 200:
            raise EtcdError(f"{path}: {answer.get('error') or status}")
        return answer

    async def _authenticate(self) -> None:
        self._token = ""
        name, password = self._login
        status, answer = await self._post("auth/authenticate", {"name": name, "password": password})
        if status != 200:
            raise EtcdError(f"authenticate: {answer.get('error') or status}")
        self._token = answer["token"]

    async def _post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        try:
            async with self._client.post(
                f"{self._url}/v3/{path}", json=body, headers=self._headers(), timeout=_CALL
            ) as answer:
                return answer.status, json.loads(await answer.read())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EtcdError(f"{path}: {str(error) or type(error).__name__}") from None


def _packed(value: str) -> str:
    return b64encode(value.encode()).decode()
