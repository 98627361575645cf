"""Cache aware: prefill where most of the prompt is in the prefix cache and least is waiting (xLLM protocol page §8)."""

from coordinator.core.abilities import News
from coordinator.core.instance import Instance, Role

from .accounting import Accounting
from .policy import Demand, InformedPolicy, LoadView

DEFAULT = Accounting()


class XllmCacheAware(InformedPolicy):
    """Score = cached part of the prompt - used part of the KV cache - waiting requests as a part of the most anywhere.

    The parts are real numbers, and every instance is a candidate. Where instances tell nothing of their caches, load
    alone decides. Decode never looks at the cache: it gets the whole KV from prefill.
    """

    per_request = True

    def __init__(self, accounting: Accounting = DEFAULT) -> None:
        super().__init__()
        self.accounting = accounting

    def cost(self, load: LoadView, instance: Instance, demand: Demand) -> float:
        """The score, turned round."""
        news = self.news_of(instance)
        # what was placed since the last heartbeat is not in it
        waiting = max(news.waiting, load.requests)
        busiest = max(demand.busiest, waiting, 1)
        cost = news.cache_usage + waiting / busiest
        if instance.role is not Role.DECODE and demand.request.prepared is not None:
            cost -= cached_part(demand.request.prepared.block_hashes, news)
        return cost


def cached_part(hashes: tuple[bytes, ...], news: News) -> float:
    """How much of the prompt's full blocks the cache has, from the beginning on: 0 to 1."""
    if not hashes or not news.blocks:
        return 0.0
    blocks = news.blocks
    matched = next((at for at, block in enumerate(hashes) if block not in blocks), len(hashes))
    return matched / len(hashes)
