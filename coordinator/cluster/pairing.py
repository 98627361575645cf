"""Whether instances can serve a request together, and a sentence that says why not."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from coordinator.core.instance import Instance, Role, State


def serves(instance: Instance, model: str | None) -> bool:
    """Whether an instance serves this model name; without a name on either side any will do."""
    return model is None or instance.model is None or instance.model == model


def pairs(prefill: Instance, decode: Instance) -> bool:
    """Whether prefill can hand a request over to decode: same engine, group and model, and a KV link.

    A link that either side names is there; where neither says anything, everybody has one with everybody.
    """
    return (
        prefill.engine == decode.engine
        and prefill.group == decode.group
        and (prefill.model is None or decode.model is None or prefill.model == decode.model)
        and (
            (prefill.peers is None and decode.peers is None)
            or (prefill.peers is not None and decode.id in prefill.peers)
            or (decode.peers is not None and prefill.id in decode.peers)
        )
    )


def find_pair(usable: Sequence[Instance], model: str | None = None) -> tuple[bool, str]:
    """Whether a request for this model can be placed on these instances, and a sentence about it."""
    by_role: dict[Role, list[Instance]] = {role: [] for role in Role}
    for instance in usable:
        if serves(instance, model):
            by_role[instance.role].append(instance)
    for hybrid in by_role[Role.HYBRID]:
        return True, f"hybrid instance {hybrid.id} takes requests"
    decodes: defaultdict[tuple[str, str | None], list[Instance]] = defaultdict(list)
    for decode in by_role[Role.DECODE]:
        decodes[decode.engine, decode.group].append(decode)
    for prefill in by_role[Role.PREFILL]:
        for decode in decodes[prefill.engine, prefill.group]:
            if pairs(prefill, decode):
                return True, f"prefill instance {prefill.id} and decode instance {decode.id} take requests"
    missing = [role.value for role in (Role.PREFILL, Role.DECODE) if not by_role[role]]
    if missing:
        return False, f"no {' and no '.join(missing)} instance takes requests"
    return False, "no prefill and decode instance of the same engine, group and model have a link to each other"


def list_reasons(rows: Iterable[tuple[str, State, str]], limit: int = 3) -> str:
    """The first few that are not ready, of `(id, state, reason)`, in words; short enough for a probe's answer."""
    out = [row for row in rows if row[1] is not State.READY]
    if not out:
        return ""
    known = [f"{ident} is {state}{f' ({reason})' if reason else ''}" for ident, state, reason in out[:limit]]
    more = f" and {len(out) - limit} more" if len(out) > limit else ""
    return f": {', '.join(known)}{more}"
