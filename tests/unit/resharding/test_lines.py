"""Replicas share a line of bytes evenly, and most of them work in every bucket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.resharding import lines
from megatron_dapo.resharding.boxes import Crossing
from megatron_dapo.resharding.lines import Line, Segment, bytes_between, row_at, segments

PARTS = st.lists(
    st.builds(Segment, st.just(0), st.integers(1, 200), st.sampled_from([2, 12, 64])),
    min_size=1,
    max_size=12,
)


def crossing(row: int, rows: int, cols: int) -> Crossing:
    return Crossing(row, rows, cols, 0, 0, 0, 0)


def test_rows_that_several_ranks_need_weigh_so_often() -> None:
    found = segments([crossing(0, 4, 5), crossing(2, 2, 5), crossing(4, 1, 10)], item_bytes=2)
    assert found == (Segment(0, 2, 10), Segment(2, 3, 20))


def test_rows_that_nobody_needs_are_in_no_segment() -> None:
    assert segments([crossing(1, 2, 1), crossing(5, 1, 1)], 4) == (
        Segment(1, 2, 4),
        Segment(5, 1, 4),
    )


def test_a_position_leads_to_the_next_row() -> None:
    parts = (Segment(1, 2, 4), Segment(5, 3, 10))
    rows = {position: row_at(parts, position) for position in (0, 1, 4, 8, 9, 18, 38)}
    assert rows == {0: 1, 1: 2, 4: 2, 8: 3, 9: 6, 18: 6, 38: 8}
    assert bytes_between(parts, 2, 6) == 4 + 10
    with pytest.raises(AssertionError, match="1 bytes beyond the end"):
        row_at(parts, 39)


def test_rows_that_begin_blocks_bring_their_scales() -> None:
    found = segments([crossing(0, 256, 384), crossing(300, 84, 128)], 1, in_blocks=True)
    assert found == (Segment(0, 256, 384, 12, 128), Segment(300, 84, 128, 4, 128))
    assert [segment.num_bytes for segment in found] == [256 * 384 + 2 * 12, 84 * 128]
    assert bytes_between(found, 128, 256) == bytes_between(found, 0, 128) == 128 * 384 + 12
    assert bytes_between(found, 1, 128) == 127 * 384


def test_rows_of_one_block_are_not_parted() -> None:
    part = Segment(64, 576, 10, 4, 128)  # half a block, four blocks
    step = 128 * 10 + 4
    wanted = {0: 128, 640: 128, 641: 256, 640 + step: 256, 641 + step: 384, part.num_bytes: 640}
    assert {position: part.row_at(position) for position in wanted} == wanted
    assert part.num_bytes == 640 + 4 * step and part.step_bytes == step
    inside = Segment(10, 20, 10, 0, 128)
    assert [inside.row_at(position) for position in (0, 1, 200)] == [30, 30, 30]


@given(parts=PARTS, replicas=st.integers(1, 9), buckets=st.integers(1, 30))
def test_every_row_has_one_owner_and_shares_are_even(
    parts: list[Segment], replicas: int, buckets: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "MESSAGE_BYTES", 1)
        each = [(part,) for part in parts]
        line = Line(
            range(10, 10 + len(parts)), each, replicas=replicas, buckets=buckets, receivers=2
        )
    sent = [0] * replicas
    for number, part in enumerate(parts):
        owners = line.owners(10 + number)
        assert [first for first, _, _ in owners] == [0, *(stop for _, stop, _ in owners[:-1])]
        assert owners[-1][1] == part.rows
        for first, stop, replica in owners:
            sent[replica] += (stop - first) * part.row_bytes
    assert line.bytes_by_replica() == sent
    assert max(sent) - min(sent) <= max(0.1 * max(sent), 2 * line.widest_row_bytes)


def test_replicas_take_turns_in_every_bucket_but_not_with_tiny_messages() -> None:
    rows = 2**16  # of 4 KiB: 256 MiB in one parameter
    each = [(Segment(0, rows, 4096),)]
    few = Line([0], each, replicas=4, buckets=1, receivers=1)
    assert [replica for _, _, replica in few.owners(0)] == [0, 1, 2, 3]
    many = Line([0], each, replicas=4, buckets=8, receivers=1)
    assert [replica for _, _, replica in many.owners(0)] == [0, 1, 2, 3] * 8
    spread = Line([0], each, replicas=4, buckets=8, receivers=32)
    assert [replica for _, _, replica in spread.owners(0)] == [0, 1, 2, 3] * 2


def test_a_shard_of_padding_only_sends_nothing() -> None:
    line = Line([0, 1], [(), (Segment(0, 3, 8),)], replicas=2, buckets=1, receivers=1)
    assert line.owners(0) == []
    assert sum(line.bytes_by_replica()) == 24
