"""MoE routers of the policy: what auxiliary losses add to an update, and how experts are chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from megatron_dapo import device
from megatron_dapo.batch.packing import pack_update, pad_multiple
from megatron_dapo.config.schema import RunConfig
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.policy.policy import Policy
from megatron_dapo.types import MicroBatch, RolloutBatch
from tests.parallel.policy_cases import (
    build_policy,
    drift,
    hf_parts,
    model_of,
    pack,
    rollout_batch,
    run_config,
)
from tests.tiny_models import tiny_model
from tests.unit.handed import handed_cases

device.install_cpu_support()

from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402

AUX, Z = 0.5, 0.1
LAYOUTS: dict[int, list[dict[str, object]]] = {
    1: [{}],
    2: [
        {"data": 2, "expert": 2},
        {"tensor": 2, "expert": 2},
        {"tensor": 2, "expert_tensor": 2},
        {"context": 2},
        {"pipeline": 2},
    ],
    4: [{"tensor": 2, "context": 2, "expert": 2}, {"tensor": 2, "data": 2}],
}
LAYERS = 4
"""As many as in all other models here: Megatron keeps one log of auxiliary losses a process."""


def _scored(policy: Policy, packs: list[MicroBatch]) -> list[MicroBatch]:
    scored, _ = policy.logprobs(packs)
    return [drift(p) for p in scored] if policy.parallel.is_last_stage else scored


def aux_losses_weigh_what_the_config_says(world: int) -> None:
    for layout in LAYOUTS[world]:
        for loss in ({}, {"aggregation": "sequence_mean"}):
            config = run_config(
                moe={"aux_loss_coef": AUX, "z_loss_coef": Z},
                loss=loss,
                clip_grad=1e9,
                distributed_optimizer=False,
                **layout,
            )
            _check_aux_gradient(config)


def _check_aux_gradient(config: RunConfig) -> None:
    """With zero advantages the whole gradient is that of the auxiliary losses."""
    parallel = ParallelContext.create(config.parallel, seed=3)
    model = model_of("qwen3_moe")
    batch = rollout_batch(512)
    policy = build_policy(config, model, parallel)
    scored = _scored(policy, pack(batch, config, parallel, 2))
    policy.update([m.replace(advantages=torch.zeros_like(m.advantages)) for m in scored])
    gradients = [p.main_grad.clone() for p, _ in hf_parts(policy, model)]  # type: ignore[attr-defined]
    _backward_aux_losses(model, batch, config)
    with torch.no_grad():
        for parameter in model.parameters():
            grad = parameter.grad
            parameter.copy_(torch.zeros_like(parameter) if grad is None else grad)
    for gradient, (_, expected) in zip(gradients, hf_parts(policy, model), strict=True):
        error = (gradient[: expected.shape[0]] - expected).abs().max()
        assert error <= 1e-4 * expected.abs().max(), f"{config.parallel}: {tuple(gradient.shape)}"
    parallel.destroy()


def _backward_aux_losses(model: PreTrainedModel, batch: RolloutBatch, config: RunConfig) -> None:
    """Gradient of mean over all micro-batches of (AUX * balance + Z * z) summed over layers."""
    layout = config.parallel
    packs = [
        micro_batch
        for rank in range(layout.data)
        for micro_batch in pack_update(
            batch,
            torch.arange(batch.num_responses),
            dp_rank=rank,
            dp_size=layout.data,
            tokens_per_micro_batch=256,
            pad_multiple=pad_multiple(
                layout.tensor, layout.context, layout.uses_sequence_parallel, "none"
            ),
            min_micro_batches=2,
            cp_size=layout.context,
        )
    ]
    layers = model.model.layers
    inputs: list[list[Tensor]] = [[] for _ in layers]
    for layer, seen in zip(layers, inputs, strict=True):
        layer.mlp.gate.register_forward_pre_hook(
            lambda _module, args, seen=seen: seen.append(args[0].flatten(0, -2))
        )
    for micro_batch in packs:
        for seen in inputs:
            seen.clear()
        for tokens in micro_batch.tokens.split(micro_batch.cu_seqlens.diff().tolist()):
            model(tokens[None])
        total = torch.zeros(())
        for layer, seen in zip(layers, inputs, strict=True):
            logits = torch.cat(seen) @ layer.mlp.gate.weight.T
            experts, chosen = logits.shape[1], logits.topk(2).indices
            share = torch.bincount(chosen.flatten(), minlength=experts) / chosen.numel()
            balance = experts * (share * logits.softmax(-1).mean(0)).sum()
            total = total + AUX * balance + Z * logits.logsumexp(-1).square().mean()
        (total / len(packs)).backward()


def handed_balance_is_what_updates_add(world: int) -> None:
    """The auxiliary loss of the handed probabilities, once a layer, whatever the layout."""
    for (case,) in (parameters.values for parameters in handed_cases("k", "moe_aux_loss")):
        given, probs = case["input"], torch.tensor(case["input"]["probs"])
        for layout in LAYOUTS[world]:
            config = run_config(moe={"aux_loss_coef": AUX}, **layout)
            parallel = ParallelContext.create(config.parallel, seed=3)
            model = _tiny_moe(experts=probs.shape[1], topk=given["topk"])
            policy = build_policy(config, model, parallel)
            batch = rollout_batch(512)
            scored = _scored(policy, _whole_patterns(batch, config, parallel, len(probs)))
            with _every_router_sees(probs.log()), _recorded_aux_losses() as added:
                policy.update(scored)
            total = torch.tensor(sum(added), dtype=torch.float64)
            dist.all_reduce(total)
            counted = int(batch.response_tokens[batch.trained].sum())
            found = float(total) / counted / (AUX * LAYERS)
            assert abs(found - case["expect"]["value"]) <= case["tol"], f"{layout}: {found}"
            parallel.destroy()


def _tiny_moe(*, experts: int, topk: int) -> PreTrainedModel:
    shape = {"num_experts": experts, "num_experts_per_tok": topk, "norm_topk_prob": False}
    return tiny_model("qwen3_moe", layers=LAYERS, **shape)


def _whole_patterns(
    batch: RolloutBatch, config: RunConfig, parallel: ParallelContext, rows: int
) -> list[MicroBatch]:
    """Packs of which every tensor and context rank routes a multiple of `rows` tokens."""
    layout = config.parallel
    return pack_update(
        batch,
        torch.arange(batch.num_responses),
        dp_rank=parallel.dp_rank,
        dp_size=parallel.dp_size,
        tokens_per_micro_batch=256,
        pad_multiple=2 * rows * layout.tensor * layout.context,
        min_micro_batches=2,
        cp_size=layout.context,
    )


@contextmanager
def _every_router_sees(logits: Tensor) -> Iterator[None]:
    """Routers take `logits` [rows, experts], over and over, for whatever tokens they get."""
    real = TopKRouter.gating

    def gating(router: TopKRouter, hidden: Tensor) -> Tensor:
        own = real(router, hidden)
        return own * 0 + logits.repeat(own.shape[0] // logits.shape[0], 1)[:, None]

    with mock.patch.object(TopKRouter, "gating", gating):
        yield


@contextmanager
def _recorded_aux_losses() -> Iterator[list[float]]:
    """What Megatron adds to this rank's sum of losses meanwhile."""
    added: list[float] = []
    real: Callable[..., Any] = MoEAuxLossAutoScaler.apply

    def record(activation: Tensor, loss: Tensor) -> Tensor:
        added.append(loss.item())
        return real(activation, loss)

    with mock.patch.object(MoEAuxLossAutoScaler, "apply", record):
        yield added


def a_bias_chooses_experts_and_does_not_weigh_them(world: int) -> None:
    """Of the routers that the policy builds; no family that trains here has such a bias yet."""
    for (case,) in (parameters.values for parameters in handed_cases("k", "router_select")):
        given = case["input"]
        scores, bias = torch.tensor([given["scores"]]), torch.tensor(given["bias"])
        parallel = ParallelContext.create(run_config().parallel, seed=3)
        model = _tiny_moe(experts=bias.numel(), topk=given["topk"])
        policy = build_policy(run_config(), model, parallel)
        router = policy.chunks[0].decoder.layers[0].mlp.router
        router.score_function, router.expert_bias = "sigmoid", bias
        weights, chosen = router.routing(scores.logit()[:, None])
        assert chosen[0].nonzero()[:, 0].tolist() == case["expect"]["experts"]
        for expert, weight in case["expect"]["weights"].items():
            assert abs(float(weights[0, int(expert)]) * given["scale"] - weight) <= case["tol"]
        parallel.destroy()
