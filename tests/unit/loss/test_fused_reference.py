"""The fused loss, from hidden states, against the float64 reference of the papers' formulas.

What the fused path computes in blocks is rebuilt here from whole logits with torch's own
log_softmax, and every loss from tests.unit.loss.reference: no code of the product but the ledger.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_dapo.config.schema import LossConfig
from megatron_dapo.loss.denominators import Ledger
from megatron_dapo.loss.policy_cross_entropy import FusedTerms, policy_cross_entropy
from megatron_dapo.types import NO_LABEL
from tests.unit.loss.packs import pack
from tests.unit.loss.reference import Batch, random_batch, reference_loss
from tests.unit.loss.test_policy_loss import AGGREGATIONS, MISMATCH, OBJECTIVES

WIDTH, VOCAB, HIDDEN, TEMPERATURE = 40, 33, 8, 0.7
TOKEN_OBJECTIVES = [name for name in OBJECTIVES if name != "gspo"]
TOKEN_MISMATCH = ("none", "tis_token", "icepop")


class Case:
    """Hidden states and weight, and the batch whose log-probs and entropy come from them."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(100 + seed)
        batch = random_batch(seed)
        tokens = batch.loss_mask.numel()
        hidden = torch.randn(tokens, HIDDEN, generator=g, dtype=torch.float64)
        weight = torch.randn(WIDTH, HIDDEN, generator=g, dtype=torch.float64)
        self.hidden, self.weight = hidden.requires_grad_(), weight.requires_grad_()
        self.targets = torch.randint(0, VOCAB, (tokens,), generator=g)
        self.targets[~batch.loss_mask] = NO_LABEL
        shift = self._scores()[0].detach() - batch.old_logprobs
        shift += batch.old_logprobs - batch.logprobs.detach()  # the ratios of the random batch
        names = ("old_logprobs", "rollout_logprobs", "reference_logprobs")
        self.batch = replace(batch, **{name: getattr(batch, name) + shift for name in names})

    def _scores(self) -> tuple[Tensor, Tensor]:
        scores = (self.hidden @ self.weight[:VOCAB].t() / TEMPERATURE).log_softmax(-1)
        chosen = scores.gather(1, self.targets.clamp(min=0)[:, None])[:, 0]
        return chosen, -(scores.exp() * scores).sum(-1)

    def expected(self, config: LossConfig) -> tuple[Tensor, Batch]:
        logprobs, entropy = self._scores()
        batch = replace(self.batch, logprobs=logprobs, entropy=entropy)
        return reference_loss(batch, config), batch

    def fused(self, config: LossConfig, **more: object) -> tuple[Tensor, FusedTerms]:
        batch = self.batch
        responses = []
        for number in range(batch.num_sequences):
            where = (batch.sequence_index == number).clone()
            where[-3:] = False  # padding
            responses.append(
                (number, int(batch.group_index[where][0]), batch.loss_mask[where].int().tolist())
            )
        update = pack(responses, padding=3)
        ledger = Ledger.from_micro_batches([update], config)
        terms = policy_cross_entropy(
            self.hidden,
            self.weight,
            self.targets,
            batch.old_logprobs,
            batch.advantages,
            batch.loss_mask,
            config=config,
            temperature=TEMPERATURE,
            real_vocab_size=VOCAB,
            rollout_logprobs=batch.rollout_logprobs,
            reference_logprobs=batch.reference_logprobs,
            token_weights=ledger.token_weights(update),
            denominator=ledger.denominator(update),
            chunk_tokens=7,
            **more,
        )
        return terms.loss_sum / ledger.denominator(update), terms


@pytest.mark.parametrize(
    ("objective", "aggregation", "mismatch"),
    itertools.product(TOKEN_OBJECTIVES, AGGREGATIONS, TOKEN_MISMATCH),
)
def test_loss_and_gradients_are_the_papers(objective: str, aggregation: str, mismatch: str) -> None:
    settings = OBJECTIVES[objective] | AGGREGATIONS[aggregation] | MISMATCH[mismatch]
    config = LossConfig(**settings, mismatch=mismatch)
    for seed in range(2):
        case = Case(seed)
        leaves = [case.hidden, case.weight]
        wanted, batch = case.expected(config)
        loss, terms = case.fused(config)
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-9, abs=1e-9)
        counted = batch.loss_mask
        torch.testing.assert_close(terms.logprobs[counted], batch.logprobs.detach()[counted])
        torch.testing.assert_close(terms.entropy[counted], batch.entropy.detach()[counted])
        expected = torch.autograd.grad(wanted, leaves)
        for grad, right in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
            torch.testing.assert_close(grad, right, atol=1e-9, rtol=1e-9)
