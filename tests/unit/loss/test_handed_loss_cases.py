"""The handed cases of this room, through a thin adaptor to our names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dapo.config.schema import LossConfig
from megatron_dapo.loss.policy_loss import policy_loss
from megatron_dapo.loss.vocab_parallel import vocab_parallel_logprobs

CASES = json.loads((Path(__file__).parents[1] / "handed_cases.json").read_text())["cases"]


def cases(*ops: str) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in CASES if case["op"] in ops]


@pytest.mark.parametrize("case", cases("policy_loss"))
def test_policy_loss(case: dict[str, Any]) -> None:
    given, expect, tolerance = case["input"], case["expect"], case.get("tol", 1e-6)
    sequences = given["sequences"]
    lengths = [len(sequence["new"]) for sequence in sequences]

    def flat(name: str) -> Tensor:
        return torch.tensor([x for sequence in sequences for x in sequence[name]])

    logprobs, mask = flat("new").double().requires_grad_(), flat("mask").bool()
    advantages = torch.tensor([float(sequence["adv"]) for sequence in sequences])
    terms = policy_loss(
        logprobs,
        flat("old").double(),
        advantages.repeat_interleave(torch.tensor(lengths)),
        mask,
        torch.arange(len(sequences)).repeat_interleave(torch.tensor(lengths)),
        num_sequences=len(sequences),
        config=LossConfig(
            ratio=given["ratio"],
            clip_low=given["eps_low"],
            clip_high=given["eps_high"],
            dual_clip=given.get("dual_clip"),
            aggregation={"token_mean": "token_mean", "seq_mean": "sequence_mean"}[given["agg"]],
        ),
    )
    loss = terms.loss_sum / terms.denominator.clamp(min=1)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all()
    if "loss" not in expect:
        return
    assert loss.item() == pytest.approx(expect["loss"], abs=tolerance)
    wanted = [x for row in expect["grad_new"] for x in row]
    assert gradient.tolist() == pytest.approx(wanted, abs=tolerance)
    clipped = terms.metrics["actor/pg_clipfrac"]
    assert float(clipped.value) == pytest.approx(sum(map(sum, expect["clip_active"])))


@pytest.mark.parametrize("case", cases("token_logprob"))
def test_token_logprob(case: dict[str, Any]) -> None:
    given, expect = case["input"], case["expect"]
    logprobs, entropy = vocab_parallel_logprobs(
        torch.tensor(given["logits"]),
        torch.tensor(given["tokens"]),
        temperature=given["temperature"],
        real_vocab_size=given.get("real_vocab"),
    )
    assert logprobs.tolist() == pytest.approx(expect["logprob"], abs=case.get("tol", 1e-6))
    assert entropy.tolist() == pytest.approx(expect["entropy"], abs=case.get("tol", 1e-6))


@pytest.mark.parametrize("case", cases("truncation_gap"))
def test_truncation_gap(case: dict[str, Any]) -> None:
    given, expect = case["input"], case["expect"]
    logits, token = torch.tensor([given["logits"]]), torch.tensor([given["token"]])
    survivors = logits.topk(given["top_k"]).indices
    truncated = torch.full_like(logits, -torch.inf).scatter(1, survivors, logits)
    full, engine = (
        vocab_parallel_logprobs(x, token, temperature=given["temperature"])[0].item()
        for x in (logits, truncated)
    )
    got = {"full_logprob": full, "engine_logprob": engine, "gap": full - engine}
    assert got == pytest.approx(expect, abs=case.get("tol", 1e-6))


@pytest.mark.parametrize("case", cases("big_vocab"))
def test_big_vocab(case: dict[str, Any]) -> None:
    given, expect = case["input"], case["expect"]
    logits = torch.zeros(given["tokens"], given["vocab"])
    targets = torch.arange(given["tokens"])
    for chunk_tokens in (given.get("chunk_tokens"), 1, 7, 1024):
        logprobs, entropy = vocab_parallel_logprobs(logits, targets, chunk_tokens=chunk_tokens)
        for values, name in ((logprobs, "logprob"), (entropy, "entropy")):
            wanted = torch.full_like(values, expect[name])
            torch.testing.assert_close(values, wanted, atol=case["tol"], rtol=0)
