"""A DNS server for tests, of dnslib: UDP and TCP on one port, with records that change and every way to fail."""

import threading

from dnslib import AAAA, CNAME, NS, QTYPE, RCODE, RR, SOA, SRV, A
from dnslib.server import BaseResolver, DNSLogger, DNSServer

HOST = "127.0.0.1"
KINDS = {"A": A, "AAAA": AAAA, "SRV": SRV, "CNAME": CNAME}
ZONE = "serving.test."
TRIES = 20
POLL_S = 0.02
MOST_UDP_BYTES = 512  # RFC 1035 §4.2.1


class Dns(BaseResolver):
    """The server; use it with `with`.

    Attributes:
        records: by name and kind, lists of what `dnslib` makes records of.
        ttl_s: of every record.
        negative_ttl_s: of answers that there is nothing.
        mode: ok, servfail, refused, silent, or referral (no data, no authority).
        queries: what was asked: (name, kind, protocol).
    """

    def __init__(self):
        self.records = {}
        self.ttl_s = 1
        self.negative_ttl_s = 1
        self.mode = "ok"
        self.additional = {}
        self.queries = []
        self._released = threading.Event()
        self._servers = []
        self.port = 0

    def __enter__(self):
        for _ in range(TRIES):
            try:
                self._listen()
            except OSError:  # the port is taken for the other protocol
                self._close()
            else:
                return self
        raise AssertionError("no port is free for both UDP and TCP")

    def __exit__(self, *_):
        self._released.set()
        self._close()

    def _listen(self):
        self.port = 0
        for tcp in (False, True):
            made = DNSServer(self, address=HOST, port=self.port, tcp=tcp, logger=DNSLogger(logf=lambda _: None))
            server = made.server
            self.port = server.server_address[1]
            server.daemon_threads = True
            thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True)
            thread.start()
            self._servers.append((server, thread))

    def _close(self):
        while self._servers:
            server, thread = self._servers.pop()
            server.shutdown()
            thread.join()
            server.server_close()

    @property
    def address(self):
        return f"{HOST}:{self.port}"

    def set(self, name, kind, *values):
        """The records of a name; none: the name is there and has none of this kind."""
        self.records.setdefault(name, {})[kind] = list(values)

    def forget(self, name):
        """There is no such name any more."""
        self.records.pop(name, None)

    def resolve(self, request, handler):
        """Answer one query."""
        name, kind = str(request.q.qname).lower(), QTYPE[request.q.qtype]
        mode = self.mode
        self.queries.append((name, kind, handler.protocol))
        reply = request.reply(aa=mode == "ok")
        if mode == "silent":
            self._released.wait(60)
        elif mode in ("servfail", "refused"):
            reply.header.rcode = getattr(RCODE, mode.upper())
        elif mode == "referral":
            reply.add_auth(RR(ZONE, QTYPE.NS, rdata=NS("elsewhere.test."), ttl=60))
        else:
            self._answer(reply, name, kind)
        if handler.protocol == "udp" and len(reply.pack()) > MOST_UDP_BYTES:
            reply = request.reply(aa=True)
            reply.header.tc = 1
        return reply

    def _answer(self, reply, name, kind):
        known = self.records.get(name)
        found = (known or {}).get(kind, ())
        while not found and known and "CNAME" in known:
            (target,) = known["CNAME"]
            reply.add_answer(RR(name, QTYPE.CNAME, rdata=CNAME(target), ttl=self.ttl_s))
            name, known = target, self.records.get(target)
            found = (known or {}).get(kind, ())
        for value in found:
            rdata = KINDS[kind](*value) if isinstance(value, tuple) else KINDS[kind](value)
            reply.add_answer(RR(name, getattr(QTYPE, kind), rdata=rdata, ttl=self.ttl_s))
            for address in self.additional.get(value[-1], ()) if kind == "SRV" else ():
                reply.add_ar(RR(value[-1], QTYPE.A, rdata=A(address), ttl=self.ttl_s))
        if not found:
            if known is None:
                reply.header.rcode = RCODE.NXDOMAIN
            times = (1, 60, 60, 3600, self.negative_ttl_s)
            reply.add_auth(RR(ZONE, QTYPE.SOA, rdata=SOA(f"ns.{ZONE}", f"root.{ZONE}", times), ttl=3600))
