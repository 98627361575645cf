"""A flex instance (role 70) as the prefill and the decode instance that it is at the same time.

Pure. Source: MindIE protocol page §9.3. `p_percentage` says how much of it does prefill: 0 makes it a decode instance,
100 a prefill one, anything between both of them on the same address. The decode part has an id of its own; whoever
names the flex instance as a peer then means the part that it can have a link to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from .refresh_body import DECODE, FLEX, PREFILL, BadRefresh, Entry

DECODE_PART_ID = 2**64 - 2


@dataclass(frozen=True, slots=True)
class Split:
    """Entries without flex ones, and the id of the one that was split (None: there was none)."""

    entries: tuple[Entry, ...]
    flex_id: int | None = None


def split_flex(entries: Sequence[Entry]) -> Split:
    """Replace a flex entry by its parts and point the peers of all others to the right part.

    Raises:
        BadRefresh: there are two flex entries, or the percentage is none.
    """
    flexes = [entry for entry in entries if entry.static_info.role == FLEX]
    if not flexes:
        return Split(tuple(entries))
    if len(flexes) > 1:
        raise BadRefresh("there may be only one flex instance (role 70)")
    flex = flexes[0]
    percentage = flex.static_info.p_percentage
    if not 0 <= percentage <= 100:
        raise BadRefresh(f"p_percentage of instance {flex.id} must be between 0 and 100")
    result: list[Entry] = []
    for entry in entries:
        if entry is not flex:
            result.append(_redirected(entry, flex.id, percentage))
            continue
        if percentage > 0:
            result.append(_part(flex, PREFILL, percentage))
        if percentage < 100:
            result.append(_part(flex, DECODE, percentage))
    return Split(tuple(result), flex.id)


def _part(flex: Entry, role: int, percentage: int) -> Entry:
    """One half; nothing of it is zero, since an instance without a slot could never be used."""
    static, dynamic = flex.static_info, flex.dynamic_info
    both = 0 < percentage < 100

    def share(whole: int) -> int:
        prefill = whole * percentage // 100
        return max(1, prefill if role == PREFILL else whole - prefill)

    other = DECODE_PART_ID if role == PREFILL else flex.id
    peers = dynamic.peers
    return msgspec.structs.replace(
        flex,
        id=flex.id if role == PREFILL else DECODE_PART_ID,
        static_info=msgspec.structs.replace(
            static,
            role=role,
            total_slots_num=share(static.total_slots_num),
            total_block_num=share(static.total_block_num),
        ),
        dynamic_info=msgspec.structs.replace(
            dynamic,
            avail_slots_num=None if dynamic.avail_slots_num is None else share(dynamic.avail_slots_num),
            avail_block_num=None if dynamic.avail_block_num is None else share(dynamic.avail_block_num),
            peers=(*peers, other) if peers is not None and both else peers,
        ),
    )


def _redirected(entry: Entry, flex_id: int, percentage: int) -> Entry:
    peers = entry.dynamic_info.peers
    if peers is None or flex_id not in peers:
        return entry
    others = tuple(peer for peer in peers if peer != flex_id)
    if entry.static_info.role == PREFILL and percentage < 100:
        others = (*others, DECODE_PART_ID)
    if entry.static_info.role == DECODE and percentage > 0:
        others = (*others, flex_id)
    return msgspec.structs.replace(entry, dynamic_info=msgspec.structs.replace(entry.dynamic_info, peers=others))
