"""What instances tell about themselves, brought to the policies that go by it."""

from collections.abc import Iterable

from coordinator.core.abilities import InformingEngine
from coordinator.core.instance import Role

from .policy import InformedPolicy, Policies


def inform(policies: Policies, engines: Iterable[object]) -> Policies:
    """Have policies go by the news of these engine protocols, as far as they do; returns the same policies."""
    sources = [engine.news for engine in engines if isinstance(engine, InformingEngine)]
    for policy in {id(made): made for made in map(policies.of, Role)}.values():
        if isinstance(policy, InformedPolicy):
            policy.inform(sources)
    return policies
