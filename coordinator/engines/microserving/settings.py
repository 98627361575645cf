"""What can be configured: keys of an instance, and settings of the engine (section `engines`)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import cast

from coordinator.config.errors import OptionError

DISAGG, ROUND_ROBIN = "disagg", "round-robin"
MODES = (DISAGG, ROUND_ROBIN)
OPTIONS = ("recv_rank",)
MOST_S = 86400.0
MOST_PREEMPTS = 1000
NO_FACTOR = 1e-5  # below this the reference router sends the whole prompt but its last token to prefill (page §5)


@dataclass(frozen=True, slots=True)
class MicroservingSettings:
    """Settings of the engine `microserving`, and of patterns.

    Attributes:
        mode: `disagg`: three calls over a pair; `round-robin`: one engine serves alone.
        pd_balance_factor: share of the prompt's end that decode prefills itself, 0 to below 1.
        max_preempts: how often one request may be preempted before it is given up.
        prep_recv_s: how long decode may take to find room.
        remote_send_s: how long prefill may take to compute and send.
        cleanup_s: how long a call that frees a reservation may take.
    """

    mode: str = DISAGG
    pd_balance_factor: float = 0.0
    max_preempts: int = 8
    prep_recv_s: float = 60.0
    remote_send_s: float = 120.0
    cleanup_s: float = 10.0

    @property
    def balanced(self) -> bool:
        """Whether decode prefills a part of each prompt, for which its tokens must be counted."""
        return self.pd_balance_factor >= NO_FACTOR


SETTINGS = tuple(field.name for field in fields(MicroservingSettings))


def checked_settings(given: Mapping[str, object]) -> Mapping[str, object]:
    """Validate the settings and fill in the defaults; raises OptionError."""
    for key, value in given.items():
        if key not in SETTINGS:
            raise OptionError(key, "unknown key", SETTINGS)
        _check(key, value)
    made = settings_of(given)
    return {name: getattr(made, name) for name in SETTINGS}


def settings_of(checked: Mapping[str, object]) -> MicroservingSettings:
    """The settings as an object; those that are missing have their defaults."""
    return MicroservingSettings(**{name: value for name, value in checked.items() if name in SETTINGS})  # type: ignore[arg-type]


def checked_options(given: Mapping[str, object]) -> Mapping[str, object]:
    """Validate `recv_rank`, the one key of an instance; raises OptionError."""
    for key, value in given.items():
        if key not in OPTIONS:
            raise OptionError(key, "unknown key", OPTIONS)
        if not _is_whole(value) or cast("int", value) < 0:
            raise OptionError(key, "must be 0 or more: the first PE of the instance in the NVSHMEM world", OPTIONS)
    return dict(given)


def _check(key: str, value: object) -> None:
    if key == "mode":
        if value not in MODES:
            raise OptionError(key, f"must be {' or '.join(MODES)}", SETTINGS)
    elif key == "max_preempts":
        if not _is_whole(value) or not 0 <= cast("int", value) <= MOST_PREEMPTS:
            raise OptionError(key, f"must be a whole number, 0 to {MOST_PREEMPTS}", SETTINGS)
    elif not _is_number(value):
        raise OptionError(key, "must be a number", SETTINGS)
    elif key == "pd_balance_factor":
        if not 0 <= cast("float", value) < 1:
            raise OptionError(
                key,
                "must be 0 or more and less than 1: it is the share of the prompt that decode prefills itself, and "
                "prefill must have something left",
                SETTINGS,
            )
    elif not 0 < cast("float", value) <= MOST_S:
        raise OptionError(key, f"must be seconds, more than 0 and at most {MOST_S:g}", SETTINGS)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
