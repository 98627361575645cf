"""Model names: which ones are served, what they are called in lists, and the aliases that clients use."""

from collections.abc import Callable, Sequence

from coordinator.core.errors import UnknownModel


class ModelNames:
    """Answers for model names out of the configuration and the cluster.

    Args:
        model: the served name, or None where any name is passed through.
        aliases: further names that mean `model`.
        listed: names that the cluster's instances serve.
        accepted: whether any instance serves a name (or every name).
    """

    def __init__(
        self,
        model: str | None,
        aliases: Sequence[str],
        *,
        listed: Callable[[], Sequence[str]],
        accepted: Callable[[str | None], bool],
    ) -> None:
        self.rename(model, aliases)
        self._listed = listed
        self._accepted = accepted

    def rename(self, model: str | None, aliases: Sequence[str]) -> None:
        """Go by these names from here on."""
        self._model = model
        self._aliases = frozenset(aliases)

    def names(self) -> Sequence[str]:
        """The names for lists: the configured one, else what the instances say."""
        listed = self._listed()
        if self._model is None:
            return listed
        return (self._model, *(name for name in listed if name != self._model))

    def resolve(self, name: str | None) -> str | None:
        """The name under which the scheduler looks for instances.

        Raises:
            UnknownModel: nobody here serves it, and none is only passing trouble.
        """
        if name is None:
            return None
        if name in self._aliases:
            return self._model if self._model is not None else next(iter(self._listed()), name)
        if not self._accepted(name):
            raise UnknownModel(f"the model {name[:200]!r} does not exist here")
        return name

    def known(self, name: str) -> None:
        """Raise UnknownModel unless `name` may be asked about."""
        names = self.names()
        if name not in names and name not in self._aliases and (names or not self._accepted(name)):
            raise UnknownModel(f"the model {name[:200]!r} does not exist here")
