"""What instances tell about themselves in their heartbeats, by the ids of the cluster."""

from collections.abc import Mapping

from coordinator.core.abilities import News
from coordinator.core.instance import Instance
from coordinator.engines.xllm.registry import Beat

MOST_BLOCKS = 1 << 20  # of one instance; 16 bytes each, and the oldest go first


class Bulletin:
    """Keeps the last news of each instance that is attached.

    Attributes:
        has_blocks: whether any instance tells of its prefix cache; newer ones do not (xLLM protocol page §8).
    """

    def __init__(self) -> None:
        self._news: dict[str, News] = {}
        self._ids: dict[str, list[str]] = {}
        self.has_blocks = False

    @property
    def news(self) -> Mapping[str, News]:
        """By instance id."""
        return self._news

    def add(self, instance: Instance) -> None:
        """An instance is attached; a MIX one whose role changes is so twice for a while."""
        self._ids.setdefault(instance.address.netloc, []).append(instance.id)

    def remove(self, instance: Instance) -> None:
        """An instance is gone."""
        name = instance.address.netloc
        ids = self._ids.get(name, [])
        if instance.id in ids:
            ids.remove(instance.id)
        if instance.id not in ids:
            self._news.pop(instance.id, None)
        if not ids:
            self._ids.pop(name, None)

    def note(self, beat: Beat) -> None:
        """Take a heartbeat."""
        for ident in set(self._ids.get(beat.name, ())):
            told = self._news.get(ident)
            if told is None:
                told = self._news[ident] = News()
            told.waiting = beat.waiting
            told.cache_usage = min(max(beat.cache_usage, 0.0), 1.0)
            blocks = told.blocks
            for block in beat.removed:
                blocks.pop(block, None)
            blocks.update(dict.fromkeys(beat.stored))
            while len(blocks) > MOST_BLOCKS:
                del blocks[next(iter(blocks))]
            self.has_blocks = self.has_blocks or bool(beat.stored)
