"""Properties of the flex split, whatever the numbers."""

import json

from hypothesis import given
from hypothesis import strategies as st

from coordinator.management.flex import DECODE_PART_ID, split_flex
from coordinator.management.refresh_body import DECODE, FLEX, PREFILL, parse_refresh

FLEX_ID = 7


def entries(percentage, slots, blocks, free, peers):
    def one(ident, role, named):
        static = dict.fromkeys(("group_id", "max_seq_len", "max_output_len", "block_size", "label", "virtual_id"), 2)
        return {
            "id": ident,
            "ip": "10.0.0.1",
            "port": "1025",
            "metric_port": "1027",
            "static_info": {
                **static,
                "role": role,
                "p_percentage": percentage,
                "total_slots_num": slots,
                "total_block_num": blocks,
            },
            "dynamic_info": {"avail_slots_num": min(free, slots), "avail_block_num": free, "peers": named},
        }

    rows = [one(1, PREFILL, [2, *peers]), one(2, DECODE, [1, *peers]), one(FLEX_ID, FLEX, [1, 2])]
    picture = parse_refresh(json.dumps({"ids": [1, 2, FLEX_ID], "instances": rows}).encode())
    assert not picture.skipped
    return picture.entries


@given(
    st.integers(0, 100),
    st.integers(1, 5000),
    st.integers(1, 10**6),
    st.integers(0, 10**6),
    st.sampled_from([[], [FLEX_ID]]),
)
def test_split(percentage, slots, blocks, free, peers):
    given_entries = entries(percentage, slots, blocks, min(free, blocks), peers)
    split = split_flex(given_entries)
    assert split.flex_id == FLEX_ID
    by_id = {entry.id: entry for entry in split.entries}
    assert len(by_id) == len(split.entries)
    prefill, decode = by_id.get(FLEX_ID), by_id.get(DECODE_PART_ID)
    assert (prefill is not None) == (percentage > 0)
    assert (decode is not None) == (percentage < 100)
    parts = [part for part in (prefill, decode) if part is not None]
    for part, role in ((prefill, PREFILL), (decode, DECODE)):
        assert part is None or part.static_info.role == role
    for name, whole in (("total_slots_num", slots), ("total_block_num", blocks)):
        shares = [getattr(part.static_info, name) for part in parts]
        assert min(shares) >= 1
        assert whole <= sum(shares) <= whole + 1
        if prefill is not None and decode is not None:
            assert abs(getattr(prefill.static_info, name) - whole * percentage / 100) <= 1
    if prefill is not None and decode is not None:
        assert prefill.ip == decode.ip
        assert prefill.port == decode.port
        assert FLEX_ID in decode.dynamic_info.peers
        assert DECODE_PART_ID in prefill.dynamic_info.peers
    there = set(by_id)
    for entry in split.entries:
        assert set(entry.dynamic_info.peers) <= there, "nobody points to who is not there"
    assert (DECODE_PART_ID in by_id[1].dynamic_info.peers) == (bool(peers) and percentage < 100)
    assert (FLEX_ID in by_id[2].dynamic_info.peers) == (bool(peers) and percentage > 0)


def test_without_a_flex_instance_nothing_changes():
    plain = entries(0, 1, 1, 1, [])[:2]
    split = split_flex(plain)
    assert split.entries == plain
    assert split.flex_id is None
