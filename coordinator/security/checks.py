"""What is wrong with keys and certificates beyond the configuration file itself."""

from collections.abc import Iterator

from coordinator.config import ConfigError, Settings
from coordinator.security.places import data_keys, management_keys

Problem = tuple[tuple[str | int, ...], str]
"""A key path and what is wrong there, in words."""


def problems(settings: Settings) -> Iterator[Problem]:
    """Everything that would stop the start."""
    yield from _keys(settings)


def _keys(settings: Settings) -> Iterator[Problem]:
    for name, read in (("keys_file", data_keys), ("management_keys_file", management_keys)):
        try:
            read(settings.auth)
        except ConfigError as error:
            yield ("auth", name), "; ".join(str(error).splitlines())
