"""Attention over a pack equals attention over each sequence alone."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import torch
from torch import Tensor

from megatron_dapo.policy.local_layers import PackedAttention


class OneRank:
    def size(self) -> int:
        return 1


def attention() -> PackedAttention:
    return PackedAttention(None, pg_collection=SimpleNamespace(cp=OneRank()))  # type: ignore[arg-type]


def packed(query: Tensor, key: Tensor, value: Tensor, bounds: list[int]) -> Tensor:
    params = SimpleNamespace(cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32))
    return attention()(query, key, value, None, packed_seq_params=params)


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of one sequence, written out: [tokens, heads * head_dim]."""
    repeat = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeat, dim=1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    future = torch.ones(scores.shape[1:]).triu(1).bool()
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def test_a_pack_is_its_sequences_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(11, 4, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 11, 2, 8, generator=generator, dtype=torch.float64)
    bounds = [0, 5, 6, 11]
    expected = [plain(query[a:b], key[a:b], value[a:b]) for a, b in pairwise(bounds)]
    torch.testing.assert_close(packed(query, key, value, bounds), torch.cat(expected))


def test_no_gradient_crosses_a_sequence_boundary() -> None:
    query, key, value = torch.randn(3, 8, 2, 4).unbind()
    key.requires_grad_()
    packed(query, key, value, [0, 5, 8])[5:].square().sum().backward()
    assert key.grad is not None
    assert key.grad[:5].abs().max() == 0 and key.grad[5:].abs().max() > 0
