"""How a pack is dealt to context ranks."""

from __future__ import annotations

import pytest
import torch

from megatron_dapo.parallel.collectives import zigzag_index


def test_each_rank_takes_an_early_and_a_late_chunk_of_every_sequence() -> None:
    index = zigzag_index(torch.tensor([0, 8, 12]), 2)
    assert index.tolist() == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


def test_all_ranks_together_hold_each_token_once() -> None:
    index = zigzag_index(torch.tensor([0, 12, 36, 42]), 3)
    assert sorted(index.flatten().tolist()) == list(range(42))


def test_causal_work_is_balanced() -> None:
    work = (zigzag_index(torch.tensor([0, 64]), 4) + 1).sum(1)  # keys that each query sees
    assert len(set(work.tolist())) == 1


def test_a_sequence_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        zigzag_index(torch.tensor([0, 6]), 2)
