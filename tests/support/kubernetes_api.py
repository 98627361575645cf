"""An API server of Kubernetes for tests: lists in pages, watches with bookmarks, versions that expire, TLS and tokens.

After "Kubernetes API Concepts" (efficient detection of changes, resource versions, retrieving large results sets). It
runs in a thread of its own, so that tests which block do not hold it up.
"""

import asyncio
import copy
import json
import re
import ssl
import threading

from aiohttp import web
from held_ports import HeldPorts

HOST = "127.0.0.1"
COLLECTIONS = {
    "/api/v1/namespaces/{namespace}/pods": ("v1", "Pod"),
    "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices": ("discovery.k8s.io/v1", "EndpointSlice"),
}


def pod(name, ip, *, ready=True, labels=None, annotations=None, ports=None, phase="Running", namespace="serving"):
    """A pod as the API server shows it."""
    status = "True" if ready else "False"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{name}-{ip}",
            "creationTimestamp": "2026-01-02T03:04:05Z",
            "labels": labels or {},
            "annotations": annotations or {},
        },
        "spec": {
            "nodeName": "node-1",
            "restartPolicy": "Always",
            "containers": [
                {
                    "name": "engine",
                    "image": "engine:1",
                    "ports": [{"name": n, "containerPort": p, "protocol": "TCP"} for n, p in (ports or {}).items()],
                }
            ],
        },
        "status": {
            "phase": phase,
            "hostIP": "10.9.9.9",
            **({"podIP": ip, "podIPs": [{"ip": ip}]} if ip else {}),
            "conditions": [
                {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-02T03:04:05Z"},
                {"type": "Ready", "status": status, "lastTransitionTime": "2026-01-02T03:04:06Z"},
            ],
        },
    }


def terminating(given):
    """The same pod once somebody has deleted it and its containers still run."""
    return changed(given, metadata={"deletionTimestamp": "2026-01-02T04:00:00Z", "deletionGracePeriodSeconds": 30})


def changed(given, **parts):
    """A copy with other keys in its sections."""
    made = copy.deepcopy(given)
    for section, keys in parts.items():
        made[section] = {**made.get(section, {}), **keys}
    return made


def endpoint(ip, name=None, *, ready=True, terminating=False):
    """An endpoint of a slice."""
    made = {"addresses": [ip], "conditions": {"ready": ready, "serving": ready, "terminating": terminating}}
    if name is not None:
        made["targetRef"] = {"kind": "Pod", "name": name, "namespace": "serving", "uid": f"uid-{name}"}
    return made


def endpoint_slice(name, endpoints, *, ports=None, labels=None, kind="IPv4", namespace="serving", annotations=None):
    """A slice of a Service's endpoints."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{name}",
            "creationTimestamp": "2026-01-02T03:04:05Z",
            "labels": labels or {},
            "annotations": annotations or {},
        },
        "addressType": kind,
        "endpoints": endpoints,
        "ports": [{"name": n, "port": p, "protocol": "TCP"} for n, p in (ports or {}).items()],
    }


class KubernetesApi:
    """The server; use it with `with`.

    Attributes:
        tokens: that are accepted; empty: anybody may call.
        refuse: status and message with which every call is refused; None: none is.
        headers: of refusals.
        gone_as: how a version that is too old is told to a watch: as an ERROR event, or as the answer's status.
        page_items: most objects of a page, whatever the client wants.
        piece_bytes: set: watches write pieces of this size, however that cuts lines.
        delay_s: before every answer.
        silent: calls get no answer.
        calls: what was asked: (path, query, token).
    """

    def __init__(self, certificate=None):
        self._lock = threading.RLock()
        self._objects = {}
        self._history = []  # (version, key, object before, object after)
        self._compacted = 0
        self._version = 100
        self._watches = set()
        self._certificate = certificate
        self._thread = None
        self._loop = None
        self._runner = None
        self._ports = HeldPorts()
        self.port = 0
        self.tokens = set()
        self.refuse = None
        self.headers = {}
        self.gone_as = "event"
        self.page_items = 500
        self.piece_bytes = None
        self.delay_s = 0.0
        self.silent = False
        self.calls = []

    # --- life

    def __enter__(self):
        self.port = self._ports.take()  # also while it is away
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="kubernetes-api", daemon=True)
        self._thread.start()
        assert started.wait(20)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        self._ports.close()

    @property
    def url(self):
        return f"{'https' if self._certificate else 'http'}://{HOST}:{self.port}"

    @property
    def watching(self):
        """Watches that are open."""
        return len(self._watches)

    def _run(self, started):
        asyncio.run(self._serve(started))

    async def _serve(self, started):
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        app = web.Application()
        for path, (version, kind) in COLLECTIONS.items():
            app.router.add_get(path, self._handler(version, kind))
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        context = None
        if self._certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._certificate.cert, self._certificate.key)
        await self._listen(context)
        started.set()
        await self._stop.wait()
        self._abort_all()
        await self._runner.cleanup()
        await asyncio.sleep(0)  # transports close a turn later

    async def _listen(self, context):
        self._site = web.TCPSite(self._runner, HOST, self.port, ssl_context=context, reuse_address=True)
        await self._site.start()
        self._context = context

    # --- for tests

    def put(self, given):
        """Create an object or replace it."""
        with self._lock:
            meta = given["metadata"]
            key = (given["kind"], meta["namespace"], meta["name"])
            self._version += 1
            made = changed(given, metadata={"resourceVersion": str(self._version)})
            self._history.append((self._version, key, self._objects.get(key), made))
            self._objects[key] = made
        self._wake()

    def delete(self, kind, name, namespace="serving"):
        """Remove an object for good."""
        with self._lock:
            key = (kind, namespace, name)
            self._version += 1
            before = self._objects.pop(key)
            gone = changed(before, metadata={"resourceVersion": str(self._version)})
            self._history.append((self._version, key, before, None if gone is None else gone | {"_gone": True}))
        self._wake()

    def other_writes(self, count=1):
        """Objects that nobody here looks at were written."""
        with self._lock:
            self._version += count

    def compact(self):
        """Forget the history."""
        with self._lock:
            self._history.clear()
            self._compacted = self._version

    def bookmark(self):
        """Tell every watch that wants it how far it is."""
        self._each_watch(lambda watch: watch.queue.put_nowait("bookmark"))

    def end_watches(self):
        """End every watch the way a time-out of the server does."""
        self._each_watch(lambda watch: watch.queue.put_nowait("end"))

    def cut_watches(self):
        """Break every watch's connection in the middle of a chunk."""
        self._each_watch(lambda watch: watch.queue.put_nowait("cut"))

    def say(self, text):
        """Write a line of our own on every watch."""
        self._each_watch(lambda watch: watch.queue.put_nowait(text))

    def away(self):
        """Stop listening and break every connection."""
        asyncio.run_coroutine_threadsafe(self._go_away(), self._loop).result(20)

    def back(self):
        """Listen again, on the same port."""
        asyncio.run_coroutine_threadsafe(self._listen(self._context), self._loop).result(20)

    async def _go_away(self):
        await self._site.stop()
        self._abort_all()

    def _abort_all(self):
        for watch in self._watches:
            watch.queue.put_nowait("end")
        for connection in list(self._runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()

    def _each_watch(self, act):
        def run():
            for watch in list(self._watches):
                act(watch)

        self._loop.call_soon_threadsafe(run)

    def _wake(self):
        if self._loop is not None and not self._loop.is_closed():
            self._each_watch(lambda watch: watch.queue.put_nowait("look"))

    # --- serving

    def _handler(self, version, kind):
        async def serve(request):
            token = request.headers.get("Authorization", "").removeprefix("Bearer ")
            self.calls.append((request.path, dict(request.query), token))
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if self.silent:
                await asyncio.sleep(3600)
            if self.tokens and token not in self.tokens:
                return self._status(401, "Unauthorized", "Unauthorized")
            if self.refuse is not None:
                return self._status(self.refuse[0], "Forbidden", self.refuse[1])
            selects = selector(request.query.get("labelSelector", ""))
            wanted = (kind, request.match_info["namespace"])
            if request.query.get("watch") in ("1", "true"):
                return await self._watch(request, wanted, selects, version)
            return self._list(request, wanted, selects, version)

        return serve

    def _status(self, code, reason, message):
        body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        body |= {"message": message, "reason": reason, "code": code}
        return web.json_response(body, status=code, headers=self.headers)

    def _list(self, request, wanted, selects, version):
        with self._lock:
            at, after = self._version, ""
            if token := request.query.get("continue"):
                at, after = json.loads(token)
                if at < self._compacted:
                    return self._status(410, "Expired", "The provided continue parameter is too old")
            found = sorted(self._as_of(at, wanted, selects), key=lambda one: one["metadata"]["name"])
        found = [one for one in found if one["metadata"]["name"] > after]
        size = min(int(request.query.get("limit", self.page_items)), self.page_items)
        page, rest = found[:size], found[size:]
        meta = {"resourceVersion": str(at)}
        if rest:
            meta |= {"continue": json.dumps([at, page[-1]["metadata"]["name"]]), "remainingItemCount": len(rest)}
        items = [{k: v for k, v in one.items() if k not in ("kind", "apiVersion")} for one in page]
        return web.json_response({"kind": f"{wanted[0]}List", "apiVersion": version, "metadata": meta, "items": items})

    def _as_of(self, version, wanted, selects):
        objects = dict(self._objects)
        for changed_at, key, before, _ in reversed(self._history):
            if changed_at > version:
                objects.pop(key, None)
                if before is not None:
                    objects[key] = before
        return [one for key, one in objects.items() if key[:2] == wanted and selects(one["metadata"]["labels"])]

    async def _watch(self, request, wanted, selects, version):
        since = int(request.query["resourceVersion"])
        if since < self._compacted and self.gone_as == "status":
            return self._status(410, "Expired", f"too old resource version: {since} ({self._compacted})")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        watch = _Watch(since, wanted, selects, version, request.query.get("allowWatchBookmarks") == "true")
        self._watches.add(watch)
        try:
            async with asyncio.timeout(float(request.query.get("timeoutSeconds", "1800"))):
                await self._feed(watch, request, response)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self._watches.discard(watch)
        return response

    async def _feed(self, watch, request, response):
        what = "look"
        while True:
            if watch.since < self._compacted and self.gone_as == "event":
                gone = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410}
                gone["message"] = f"too old resource version: {watch.since} ({self._compacted})"
                await self._write(response, [{"type": "ERROR", "object": gone}])
                return
            if what == "end":
                return
            if what == "cut":
                request.transport.write(b"ff\r\n{")  # a chunk that never ends
                request.transport.close()
                return
            if what == "bookmark" and watch.bookmarks:
                with self._lock:
                    events = watch.news(self._history)
                    watch.since = self._version
                meta = {"resourceVersion": str(watch.since), "creationTimestamp": None}
                mark = {"kind": watch.wanted[0], "apiVersion": watch.version, "metadata": meta}
                await self._write(response, [*events, {"type": "BOOKMARK", "object": mark}])
            elif what not in ("look", "bookmark"):
                await response.write(what.encode())
            else:
                with self._lock:
                    events = watch.news(self._history)
                await self._write(response, events)
            what = await watch.queue.get()

    async def _write(self, response, events):
        data = b"".join(json.dumps(event).encode() + b"\n" for event in events)
        size = self.piece_bytes or len(data) or 1
        for at in range(0, len(data), size):
            await response.write(data[at : at + size])
            if self.piece_bytes:
                await asyncio.sleep(0.001)


class _Watch:
    """One watch and how far it is."""

    def __init__(self, since, wanted, selects, version, bookmarks):
        self.since = since
        self.wanted = wanted
        self.selects = selects
        self.version = version
        self.bookmarks = bookmarks
        self.queue = asyncio.Queue()

    def news(self, history):
        """Events since the last ones, as this watch's selector sees them."""
        events = []
        for version, key, before, after in history:
            if version <= self.since:
                continue
            self.since = version
            if key[:2] != self.wanted:
                continue
            gone = after.get("_gone", False)
            shown = {name: value for name, value in after.items() if name != "_gone"}
            was = before is not None and self.selects(before["metadata"]["labels"])
            is_there = not gone and self.selects(after["metadata"]["labels"])
            if was and is_there:
                events.append({"type": "MODIFIED", "object": shown})
            elif is_there:
                events.append({"type": "ADDED", "object": shown})
            elif was:
                events.append({"type": "DELETED", "object": shown})
        return events


def selector(text):
    """Whether labels are selected: `a=b`, `a==b`, `a!=b`, `a in (b,c)`, `a notin (b)`, `a`, `!a`."""
    tests = []
    for part in map(str.strip, re.findall(r"[^,(]+(?:\([^)]*\))?", text)):
        if match := re.fullmatch(r"(\S+)\s+(in|notin)\s+\(([^)]*)\)", part):
            name, how, values = match[1], match[2], {value.strip() for value in match[3].split(",")}
            tests.append(lambda labels, n=name, h=how, v=values: (labels.get(n) in v) is (h == "in"))
        elif match := re.fullmatch(r"([^!=]+)(==|=|!=)([^=]*)", part):
            name, how, value = match[1].strip(), match[2], match[3].strip()
            tests.append(lambda labels, n=name, h=how, v=value: (labels.get(n) == v) is (h != "!="))
        elif part.startswith("!"):
            tests.append(lambda labels, n=part[1:]: n not in labels)
        elif part:
            tests.append(lambda labels, n=part: n in labels)
    return lambda labels: all(test(labels) for test in tests)


def write_kubeconfig(path, api, *, authority=None, token=None, token_file=None, namespace="serving"):
    """A kubeconfig for this server."""
    cluster = {"server": api.url}
    if authority is not None:
        cluster["certificate-authority"] = str(authority)
    user = {}
    if token is not None:
        user["token"] = token
    if token_file is not None:
        user["tokenFile"] = str(token_file)
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "here", "cluster": cluster}],
        "users": [{"name": "me", "user": user}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me", "namespace": namespace}}],
    }
    path.write_text(json.dumps(config))
    return path
