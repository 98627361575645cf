"""The interface of this shelf: how to choose one of several instances that could all serve."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from coordinator.core.abilities import News
from coordinator.core.instance import Instance, Role
from coordinator.core.request import Ask, Deadlines, Request

from .accounting import Accounting, Held


class LoadView(Held, Protocol):
    """What the coordinator itself has put on one instance. Read only.

    A prefill instance holds a request until its prompt is computed, decode and hybrid ones until its answer is over.
    """

    @property
    def tokens(self) -> int:
        """Prompt tokens of the requests held."""
        ...

    @property
    def lengths(self) -> Mapping[int, int]:
        """How many of the requests held have a prompt of so many tokens."""
        ...

    @property
    def pinned(self) -> int:
        """Computed prompts whose KV decode has not fetched yet (prefill instances only)."""
        ...

    @property
    def picked(self) -> int:
        """When the instance was last picked, as a number that grows with each pick; no two instances share one."""
        ...


@dataclass(frozen=True, slots=True)
class Demand:
    """One request as a policy sees it.

    Attributes:
        request: the request to place.
        tokens: its prompt tokens, as the policy's accounting measures them.
        busiest: the most requests that one instance holds, of those which the request may be given to.
    """

    request: Request
    tokens: int
    busiest: int


_NO_NEWS = News()


@runtime_checkable
class Policy(Protocol):
    """One way to choose. Derive from this class to get its defaults; the conformance kit tells whether yours is one.

    The scheduler decides who may be chosen (role, group, peers, model, capacity, earlier attempts, health); the policy
    only says who is better. Of several instances with the lowest cost the one that was picked least recently is taken,
    so a policy that knows no difference is a rotation.

    Use one object for one role. All methods are called on the event loop: they must not block, wait or raise, and only
    `chosen` may change the policy. A cost that raises or is not a number counts as infinite.

    A policy may also have an attribute `constant`: True says that the cost of an instance never changes, so that it is
    asked for once.

    Attributes:
        per_request: False: the cost depends on nothing but the load and the instance. It is then computed only when
            one of them changes, and a choice costs the same for ten instances and for a thousand. True: the cost
            depends on the request too, and every instance is scored for every request.
        accounting: how requests are measured for the role that the policy serves.
    """

    per_request: bool = False
    accounting: Accounting = Accounting()

    def cost(self, load: LoadView, instance: Instance, demand: Demand) -> float:
        """How bad a choice the instance is; lower is better, any finite number.

        Args:
            load: what the instance holds, without the request to place.
            instance: the candidate; `instance.role` tells prefill, decode and hybrid apart.
            demand: the request to place if `per_request`, else `NO_DEMAND`.
        """
        ...

    def chosen(self, instance: Instance, request: Request) -> None:  # noqa: ARG002
        """The request was given to the instance: the place to remember something. Called only if `per_request`."""
        return


class InformedPolicy(Policy):
    """A policy that goes by what instances tell about themselves, too."""

    def __init__(self) -> None:
        self._sources: Sequence[Mapping[str, News]] = ()

    def inform(self, sources: Sequence[Mapping[str, News]]) -> None:
        """Go by these from here on, by instance ids; they change by themselves."""
        self._sources = sources

    def news_of(self, instance: Instance) -> News:
        """The last that an instance has told; what a silent and empty one would tell, if it has told nothing."""
        for source in self._sources:
            found = source.get(instance.id)
            if found is not None:
                return found
        return _NO_NEWS


@dataclass(frozen=True, slots=True)
class Policies:
    """Which policy serves which role. Hybrid instances follow prefill's: their work begins with the prompt."""

    prefill: Policy
    decode: Policy
    hybrid: Policy | None = None

    def of(self, role: Role) -> Policy:
        """The policy that chooses among instances of this role."""
        if role is Role.DECODE:
            return self.decode
        return self.hybrid or self.prefill if role is Role.HYBRID else self.prefill


NO_DEMAND = Demand(
    request=Request(
        id="",
        api="",
        path="",
        query="",
        headers=(),
        body=b"",
        ask=Ask(stream=False, model=None, prompt_bytes=0),
        arrived_s=0.0,
        deadlines=Deadlines(scheduled_s=0.0, first_token_s=0.0, finished_s=0.0, inter_token_s=0.0),
    ),
    tokens=0,
    busiest=0,
)
