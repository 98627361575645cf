"""Names whose DNS records are instances: A and AAAA (RFC 1035, RFC 3596), SRV (RFC 2782)."""

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, NamedTuple

import dns.asyncresolver
import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.nameserver
import dns.rdatatype
import dns.resolver
import dns.rrset

from coordinator.config import DnsSource, split_nameserver
from coordinator.core.instance import Instance

from .pauses import Pauses
from .source import Make, Report

TRY_S = 2.0  # for one name server, before the next one is asked
NO_TARGET = "."


class Unanswered(Exception):
    """No name server has given an answer that counts; the text is for people."""


class Endpoint(NamedTuple):
    """Where an instance listens, and the name it has there (empty: none of its own)."""

    address: str
    port: int
    name: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What a look-up has brought.

    Attributes:
        endpoints: in a fixed order, whatever the server's.
        ttl_s: how long it may be used.
        faults: targets without an address, with the reason.
    """

    endpoints: tuple[Endpoint, ...]
    ttl_s: float
    faults: dict[str, str]


class DnsRecords:
    """Looks a name up whenever the last answer's TTL has passed, within the bounds of its settings.

    An answer that says there is nothing counts (RFC 2308: NXDOMAIN, or no data with an SOA record or from an
    authority). Whatever is no answer, such as SERVFAIL, REFUSED, a referral or silence, does not: the last one stays.
    """

    def __init__(self, given: DnsSource, make: Make) -> None:
        self._given = given
        self._make = make
        self._pauses = Pauses(given.min_interval_s, max(given.min_interval_s, min(given.max_interval_s, 30.0)))

    async def run(self, report: Report) -> None:
        """See source.Source."""
        given = self._given
        while True:
            try:
                answer = await self.ask()
            except Unanswered as error:
                report.lost(str(error))
                await asyncio.sleep(self._pauses.next_s())
                continue
            self._pauses.reset()
            instances, faults = self._made(answer)
            report.found(instances, faults)
            await asyncio.sleep(min(max(answer.ttl_s, given.min_interval_s), given.max_interval_s))

    async def ask(self) -> Answer:
        """Look once; raises Unanswered."""
        given = self._given
        try:
            async with asyncio.timeout(given.timeout_s):
                lookup = _Lookup(given)
                if given.type == "SRV":
                    return await lookup.services()
                found = await lookup.addresses(given.name, given.type)
                port = given.port or 0
                return Answer(tuple(Endpoint(address, port, "") for address in found), lookup.ttl_s, {})
        except (TimeoutError, dns.resolver.LifetimeTimeout):
            raise Unanswered(f"no answer within {given.timeout_s:g} s") from None
        except dns.resolver.NoNameservers as error:
            raise Unanswered(_why(error)) from None
        except dns.resolver.NoResolverConfiguration:
            raise Unanswered("this machine has no name servers: set nameservers") from None
        except (dns.exception.DNSException, OSError) as error:
            raise Unanswered(f"{type(error).__name__}: {error}") from None

    def _made(self, answer: Answer) -> tuple[list[Instance], dict[str, str]]:
        given = self._given
        instances: list[Instance] = []
        faults = dict(answer.faults)
        for endpoint in answer.endpoints:
            host = f"[{endpoint.address}]" if ":" in endpoint.address else endpoint.address
            keys = {"role": given.role.value, "url": f"{given.scheme}://{host}:{endpoint.port}"}
            if endpoint.name and given.scheme == "https":
                keys["server_name"] = endpoint.name
            try:
                instances.append(self._make({**keys, **given.traits()}))
            except ValueError as error:
                faults[f"{host}:{endpoint.port}"] = str(error)
        return instances, faults


class _Lookup:
    """One look-up with all queries that belong to it.

    Attributes:
        ttl_s: the least TTL of all answers.
    """

    def __init__(self, given: DnsSource) -> None:
        self._given = given
        self._resolver = dns.asyncresolver.Resolver(configure=not given.nameservers)
        if given.nameservers:
            servers = map(split_nameserver, given.nameservers)
            self._resolver.nameservers = [dns.nameserver.Do53Nameserver(host, port) for host, port in servers]
        self._resolver.timeout = min(TRY_S, given.timeout_s)
        self._resolver.lifetime = given.timeout_s
        self.ttl_s = math.inf

    async def addresses(self, name: str, kind: str) -> list[str]:
        """The addresses of a name, in their own order; none where it has none."""
        _, found = await self._records(name, kind)
        return _sorted_addresses(record.address for record in found)

    async def services(self) -> Answer:
        """The targets of SRV records, each with its addresses. Priorities and weights do not count."""
        response, found = await self._records(self._given.name, "SRV")
        endpoints: set[Endpoint] = set()
        faults: dict[str, str] = {}
        for target in sorted({str(record.target) for record in found} - {NO_TARGET}):
            addresses = self._additional(response, target)
            for kind in ("A", "AAAA"):
                addresses = addresses or await self.addresses(target, kind)
            name = target.removesuffix(".")
            if not addresses:
                faults[name] = "it has no address"
            ports = {record.port for record in found if str(record.target) == target}
            endpoints |= {Endpoint(addresses[0], port, name) for port in ports if addresses}
        return Answer(tuple(sorted(endpoints)), self.ttl_s, faults)

    def _additional(self, response: dns.message.Message | None, target: str) -> list[str]:
        """IPv4 addresses of a target that came along with its SRV record."""
        wanted = dns.name.from_text(target)
        for rrset in response.additional if response is not None else ():
            if rrset.name == wanted and rrset.rdtype == dns.rdatatype.A:
                self.ttl_s = min(self.ttl_s, rrset.ttl)
                return _sorted_addresses(record.address for record in rrset)
        return []

    async def _records(self, name: str, kind: str) -> tuple[dns.message.Message | None, list[Any]]:
        """The response and the records of one query; raises what dnspython raises, and Unanswered."""
        search = not self._given.nameservers
        try:
            answer = await self._resolver.resolve(name, kind, raise_on_no_answer=False, search=search)
        except dns.resolver.NXDOMAIN as error:
            responses = error.kwargs.get("responses", {}).values()
            self.ttl_s = min([self.ttl_s, *map(_negative_ttl_s, responses)])
            return None, []
        if answer.rrset is None:
            if not (answer.response.flags & dns.flags.AA or _soa(answer.response)):
                raise Unanswered("a name server knows nothing of this name and refers to others")
            self.ttl_s = min(self.ttl_s, _negative_ttl_s(answer.response))
            return answer.response, []
        self.ttl_s = min(self.ttl_s, answer.chaining_result.minimum_ttl)
        return answer.response, list(answer.rrset)


def _sorted_addresses(addresses: Iterable[str]) -> list[str]:
    return [str(address) for address in sorted({ip_address(address) for address in addresses}, key=int)]


def _soa(response: dns.message.Message) -> dns.rrset.RRset | None:
    return next((rrset for rrset in response.authority if rrset.rdtype == dns.rdatatype.SOA), None)


def _negative_ttl_s(response: dns.message.Message) -> float:
    """How long an answer that says there is nothing may be used (RFC 2308 §5): without an SOA record, not at all."""
    soa = _soa(response)
    return float(min(soa.ttl, soa[0].minimum)) if soa is not None else 0.0


def _why(error: dns.resolver.NoNameservers) -> str:
    """What each name server said, without what differs from one try to the next."""
    tried = error.kwargs.get("errors", ())
    return "; ".join(dict.fromkeys(f"{entry[0]}: {entry[3]}" for entry in tried)) or "no name server answers"
