"""The loss on two ranks equals the loss on one: TP, CP and DP in one spawn."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.config.schema import LossConfig
from megatron_dapo.loss.denominators import Ledger
from megatron_dapo.loss.objectives import uses_whole_sequences
from megatron_dapo.loss.policy_loss import policy_loss
from megatron_dapo.loss.vocab_parallel import vocab_parallel_logprobs
from megatron_dapo.types import NO_LABEL
from tests.collectives import recorded_collectives
from tests.ranks import run_ranks
from tests.unit.loss.packs import pack
from tests.unit.loss.reference import Batch, random_batch, reference_loss


def _visit(
    logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None, vocab: int
) -> list[Tensor]:
    """[logprobs, entropy] and the gradient of a weighted sum of both, for one vocabulary cut."""
    weights = torch.randn(2, targets.numel(), generator=torch.Generator().manual_seed(3))
    leaf = logits.clone().requires_grad_()
    outputs = vocab_parallel_logprobs(
        leaf, targets, tp_group=group, temperature=0.7, real_vocab_size=vocab, chunk_tokens=5
    )
    (grad,) = torch.autograd.grad((torch.stack(outputs) * weights).sum(), leaf)
    return [torch.stack(outputs).detach(), grad]


def check_tensor_parallel_equals_one_rank(rank: int, world: int) -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(17, 48, generator=g) * 3
    # 40: padding in the last shard; 20: the last shard is all padding
    for vocab in (48, 40, 20):
        targets = torch.randint(0, vocab, (17,), generator=g)
        targets[4] = NO_LABEL
        values, grad = _visit(logits, targets, None, vocab)
        mine = logits.chunk(world, dim=1)[rank]
        with recorded_collectives() as calls:
            got, got_grad = _visit(mine, targets, dist.group.WORLD, vocab)
        assert [(call.name, call.shape) for call in calls] == [("all_gather", (4, 17))]
        torch.testing.assert_close(got, values, atol=1e-6, rtol=1e-6)
        wanted = grad.chunk(world, dim=1)[rank]
        torch.testing.assert_close(got_grad, wanted, atol=1e-6, rtol=1e-6)
        others = [torch.empty_like(got) for _ in range(world)]
        dist.all_gather(others, got)
        assert all(torch.equal(got, other) for other in others), "ranks must agree bit by bit"


def check_a_shard_of_tiny_logits_takes_no_part(rank: int, world: int) -> None:
    logits = torch.full((2, 4), -1e30)
    logits[:, 2:] = torch.tensor([1.0, 2.0])
    mine = logits.chunk(world, dim=1)[rank]
    for label in (3, 1):
        logprobs, entropy = vocab_parallel_logprobs(
            mine, torch.full((2,), label), tp_group=dist.group.WORLD
        )
        scores = logits.double().log_softmax(-1)
        torch.testing.assert_close(logprobs.double(), scores[:, label], atol=1e-6, rtol=1e-6)
        wanted = -(scores[:, 2:].exp() * scores[:, 2:]).sum(-1)
        torch.testing.assert_close(entropy.double(), wanted, atol=1e-6, rtol=1e-6)


def _shard(batch: Batch, keep: Tensor) -> Batch:
    fields = {
        name: value[keep].detach() if isinstance(value, Tensor) else value
        for name, value in vars(batch).items()
    }
    shard = Batch(**fields)
    shard.logprobs.requires_grad_()
    shard.entropy.requires_grad_()
    return shard


CONTEXT_CONFIGS = {
    "dapo": LossConfig(),
    "gspo": LossConfig(
        ratio="sequence", clip_low=0.05, clip_high=0.06, aggregation="sequence_mean"
    ),
    "grpo_tis_sequence": LossConfig(
        aggregation="sequence_mean", mismatch="tis_sequence", mismatch_high=1.1
    ),
    "geometric": LossConfig(mismatch="geometric", mismatch_low=0.9, mismatch_high=1.1),
    "groups": LossConfig(aggregation="group_token_mean"),
    "dr_grpo": LossConfig(aggregation="constant", constant_tokens=9),
}


def _check_calls_with_a_ledger(shard: Batch, config: LossConfig) -> None:
    """Given its weights, a loss of whole responses is one small sum, and any other nothing."""
    with recorded_collectives() as calls:
        terms = policy_loss(
            *shard.required(),
            num_sequences=shard.num_sequences,
            config=config,
            cp_group=dist.group.WORLD,
            token_weights=shard.loss_mask.double(),
            denominator=torch.tensor(3),
            **shard.optional(),
        )
        terms.loss_sum.backward()
    columns = 2 if config.mismatch == "none" else 3
    sums = [("all_reduce", (shard.num_sequences, columns))] if uses_whole_sequences(config) else []
    assert [(call.name, call.shape) for call in calls] == sums


def check_context_parallel_equals_one_rank(rank: int, world: int) -> None:
    whole = random_batch(11)
    # uneven: rank 0 has 1 token in 4, and none at all of some responses
    owner = (torch.arange(whole.loss_mask.numel()) % 4 > 0).long()
    mine = owner == rank
    for name, config in CONTEXT_CONFIGS.items():
        expected = reference_loss(whole, config)
        (gradient,) = torch.autograd.grad(expected, whole.logprobs, retain_graph=True)
        shard = _shard(whole, mine)
        terms = policy_loss(
            *shard.required(),
            num_sequences=shard.num_sequences,
            config=config,
            cp_group=dist.group.WORLD,
            **shard.optional(),
        )
        _check_calls_with_a_ledger(shard, config)
        totals = torch.stack([terms.loss_sum.detach(), terms.denominator.double()])
        clipped = terms.metrics["actor/pg_clipfrac"]
        counts = torch.stack([torch.as_tensor(clipped.value), torch.as_tensor(clipped.count)])
        dist.all_reduce(totals)
        dist.all_reduce(counts)
        assert totals[0] / totals[1] == pytest.approx(expected.item(), abs=1e-9), name
        (grad,) = torch.autograd.grad(terms.loss_sum / totals[1], shard.logprobs)
        torch.testing.assert_close(grad, gradient[mine], atol=1e-10, rtol=1e-9)
        things = 6 if config.ratio == "sequence" else int(whole.loss_mask.sum())
        assert counts[1].item() == pytest.approx(things), name


RESPONSES = [(0, 0, [1, 1, 1]), (1, 0, [1, 0]), (2, 1, [0, 1, 1, 0]), (3, 1, [1]), (4, 2, [0])]
TOTALS = {"token_mean": 7, "sequence_mean": 4, "group_token_mean": 2, "constant": 5}


def _config(aggregation: str) -> LossConfig:
    return LossConfig(
        aggregation=aggregation, constant_tokens=9 if aggregation == "constant" else None
    )


def _reduced(ledger: Ledger, packs: list) -> int:
    total = torch.stack([ledger.denominator(part) for part in packs]).sum()
    dist.all_reduce(total)
    return int(total)


def check_ledger_over_data_parallel(rank: int, world: int) -> None:
    mine = [[RESPONSES[i] for i in part] for part in ([[4], [1, 2]], [[0], [3]])[rank]]
    for aggregation, total in TOTALS.items():
        packs = [pack(part) for part in mine]
        ledger = Ledger.from_micro_batches(
            packs, _config(aggregation), dp_cp_group=dist.group.WORLD
        )
        assert _reduced(ledger, packs) == total, aggregation
        assert ledger.counted_tokens == 7
    groups = Ledger.from_micro_batches(
        packs, _config("group_token_mean"), dp_cp_group=dist.group.WORLD
    )
    for part in packs:  # group 0 has 4 counted tokens and group 1 has 3, wherever they lie
        weights = groups.token_weights(part)[part.loss_mask]
        wanted = torch.tensor([1 / 4, 1 / 3], dtype=torch.float64)[part.group_index[part.loss_mask]]
        torch.testing.assert_close(weights, wanted)


def check_ledger_over_context_parallel(rank: int, world: int) -> None:
    positions = slice(0, 1) if rank == 0 else slice(1, None)
    lengths = torch.tensor([3, 1, 2, 1])
    for aggregation, total in TOTALS.items():
        packs = [pack(RESPONSES[:2], positions=positions), pack(RESPONSES[2:], positions=positions)]
        ledger = Ledger.from_micro_batches(
            packs,
            _config(aggregation),
            dp_cp_group=dist.group.WORLD,
            cp_group=dist.group.WORLD,
        )
        assert _reduced(ledger, packs) == total, aggregation
        if aggregation == "sequence_mean":
            for part in packs:
                mask = part.loss_mask
                counted = lengths[part.rows[part.sequence_index[mask]]]
                torch.testing.assert_close(ledger.token_weights(part)[mask], 1.0 / counted.double())


def check_one_rank_with_nothing_to_train_on(rank: int, world: int) -> None:
    packs = [pack(RESPONSES[:2] if rank == 1 else [])]
    for aggregation in TOTALS:
        ledger = Ledger.from_micro_batches(
            packs, _config(aggregation), dp_cp_group=dist.group.WORLD
        )
        assert not ledger.empty
        assert _reduced(ledger, packs) == {"token_mean": 4, "group_token_mean": 1}.get(
            aggregation, 2
        )


def _all_checks(rank: int, world: int) -> None:
    check_tensor_parallel_equals_one_rank(rank, world)
    check_a_shard_of_tiny_logits_takes_no_part(rank, world)
    check_context_parallel_equals_one_rank(rank, world)
    check_ledger_over_data_parallel(rank, world)
    check_ledger_over_context_parallel(rank, world)
    check_one_rank_with_nothing_to_train_on(rank, world)


def test_two_ranks_compute_the_loss_of_one() -> None:
    run_ranks(2, _all_checks)
