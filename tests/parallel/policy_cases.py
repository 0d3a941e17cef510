"""What the policy tests share: a batch, a transformers reference, and HF weights in any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from megatron_dapo.batch.packing import pack_update, pad_multiple
from megatron_dapo.config.schema import OptimizerConfig, ParallelConfig, RunConfig
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.policy.policy import Policy
from megatron_dapo.policy.trained_model import TrainedModel, UpdateResult
from megatron_dapo.policy.value_head import ValueHead
from megatron_dapo.types import MicroBatch, RolloutBatch
from tests.tiny_models import tiny_model

RESPONSES = 8
LR, EPS = 0.1, 0.1
"""A large eps makes Adam's step proportional to the gradient, so that rounding stays rounding."""
OBJECTIVES: dict[str, dict[str, object]] = {
    "dapo": {},
    "gspo": {
        "ratio": "sequence",
        "aggregation": "sequence_mean",
        "clip_low": 0.03,
        "clip_high": 0.04,
        "dual_clip": None,
    },
}
"""Settings of `loss`; gspo clips wider than its paper, so that the drift leaves some unclipped."""


def run_config(
    *,
    loss: dict[str, object] | None = None,
    moe: dict[str, object] | None = None,
    critic: dict[str, object] | None = None,
    dtype: str = "float32",
    recompute: str = "none",
    overlap: bool = False,
    temperature: float = 0.7,
    clip_grad: float = 5.0,
    **parallel: object,
) -> RunConfig:
    """A run over the layout `parallel`; the files it names are never read."""
    return RunConfig.model_validate(
        {
            "run_dir": "unused",
            "model": {"path": "unused", "dtype": dtype},
            "data": {"train": "unused"},
            "parallel": parallel,
            "training": {"recompute": recompute, "overlap_grad_reduce": overlap},
            "moe": moe or {},
            "optimizer": {
                "lr": LR,
                "eps": EPS,
                "warmup_steps": 2,
                "weight_decay": 0.1,
                "clip_grad": clip_grad,
            },
            "rollout": {"temperature": temperature},
            "loss": {"dual_clip": 3.0} | (loss or {}),
            "critic": critic or {},
        }
    )


def model_of(family: str) -> PreTrainedModel:
    """A tiny fp32 model whose padding token is like any other; llama is Qwen2 without biases."""
    model = tiny_model("qwen2" if family == "llama" else family)
    if family == "llama":
        model = _as_llama(model)
    embedding = model.get_input_embeddings()
    embedding.padding_idx = None  # transformers neither fills nor trains that row otherwise
    with torch.no_grad():
        embedding.weight[0] = embedding.weight[1:].mean(0) + embedding.weight[1]
    return model


def _as_llama(qwen: PreTrainedModel) -> PreTrainedModel:
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    heads = ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    model = LlamaForCausalLM(
        LlamaConfig(**{name: getattr(qwen.config, name) for name in fields + heads})
    )
    weights = qwen.state_dict()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    return model.float().eval()


def every_layout(*, moe: bool) -> Iterator[dict[str, object]]:
    """TP in {1, 2} x SP x PP in {1, 2} x VPP x CP in {1, 2} x DP in {1, 2} x EP in {1, 2}."""
    tensors = ({}, {"tensor": 2}, {"tensor": 2, "sequence_parallel": False})
    pipelines = ({}, {"pipeline": 2}, {"pipeline": 2, "virtual_pipeline": 2})
    for tensor, pipeline, context, data, expert in product(
        tensors, pipelines, (1, 2), (1, 2), (1, 2)
    ):
        if expert == 2 and (not moe or not (tensor or context * data > 1)):
            continue  # nothing to spread, or no ranks to spread it over
        if moe and "sequence_parallel" in tensor:
            continue  # Megatron trains experts under tensor parallelism with SP only
        yield {**tensor, **pipeline, "context": context, "data": data, "expert": expert}


def world_size(layout: Mapping[str, object]) -> int:
    """Ranks of a layout."""
    return ParallelConfig.model_validate(layout).world_size


def rollout_batch(vocab_size: int, *, responses: int = RESPONSES, seed: int = 7) -> RolloutBatch:
    """Random prompts and responses of unequal lengths, two responses a group, one not trained."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, 9, (responses,), generator=generator)
    answers = torch.randint(2, 14, (responses,), generator=generator)
    tokens = torch.randint(0, vocab_size, (int((prompts + answers).sum()),), generator=generator)
    trained = torch.ones(responses, dtype=torch.bool)
    trained[1:2] = False
    return RolloutBatch(
        tokens=tokens,
        prompt_tokens=prompts,
        response_tokens=answers,
        rollout_logprobs=-6 + torch.randn(int(answers.sum()), generator=generator) * 0.1,
        rewards=1 - 2.5 * torch.rand(responses, generator=torch.Generator().manual_seed(seed + 1)),
        advantages=torch.randn(responses, generator=generator),
        trained=trained,
        group_index=torch.arange(responses) // 2,
        policy_version=torch.zeros(responses, dtype=torch.int64),
    )


def pack(
    batch: RolloutBatch,
    config: RunConfig,
    parallel: ParallelContext,
    micro_batches: int,
    *,
    order: int | None = None,
    tokens: int = 256,
) -> list[MicroBatch]:
    """This rank's micro-batches of one update over the whole batch, rows shuffled by `order`."""
    layout = config.parallel
    rows = torch.arange(batch.num_responses)
    if order is not None:
        rows = torch.randperm(rows.numel(), generator=torch.Generator().manual_seed(order))
    return pack_update(
        batch,
        rows,
        dp_rank=parallel.dp_rank,
        dp_size=parallel.dp_size,
        tokens_per_micro_batch=tokens,
        pad_multiple=pad_multiple(
            layout.tensor, layout.context, layout.uses_sequence_parallel, "none"
        ),
        micro_batch_multiple=layout.pipeline if layout.virtual_pipeline else 1,
        min_micro_batches=micro_batches,
        cp_size=layout.context,
    )


def drift(micro_batch: MicroBatch) -> MicroBatch:
    """Old log-probs moved by a fixed pattern, so that ratios leave 1 and some tokens clip."""
    assert micro_batch.old_logprobs is not None
    row = micro_batch.rows[micro_batch.sequence_index] if micro_batch.num_sequences else 0
    pattern = torch.sin(1.7 * micro_batch.position_ids + 0.9 * row) * 0.4
    return micro_batch.replace(old_logprobs=micro_batch.old_logprobs + pattern)


def sequences(batch: RolloutBatch) -> Iterator[tuple[Tensor, slice]]:
    """(tokens, positions that predict the response) of each response."""
    start = 0
    lengths = zip(batch.prompt_tokens.tolist(), batch.response_tokens.tolist(), strict=True)
    for prompt, answer in lengths:
        yield (
            batch.tokens[start : start + prompt + answer],
            slice(prompt - 1, prompt + answer - 1),
        )
        start += prompt + answer


def reference_logprobs(model: PreTrainedModel, tokens: Tensor, temperature: float) -> Tensor:
    """[tokens - 1] log-probs of the next tokens, from transformers."""
    logits = model(tokens[None]).logits[0, :-1].double() / temperature
    return logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]


def reference_update(
    model: PreTrainedModel, batch: RolloutBatch, config: RunConfig
) -> tuple[float, float]:
    """(loss, grad norm) of one DAPO or GSPO update; `model` holds the new weights after it."""
    losses = []
    for row, (tokens, answer) in enumerate(sequences(batch)):
        if not batch.trained[row]:
            continue
        new = reference_logprobs(model, tokens, config.rollout.temperature)[answer]
        positions = torch.arange(tokens.numel())[answer]
        log_ratio = new - new.detach() - torch.sin(1.7 * positions + 0.9 * row) * 0.4
        if config.loss.ratio == "sequence":
            log_ratio = log_ratio.mean(0, keepdim=True)
        ratio, advantage = log_ratio.exp(), batch.advantages[row].double()
        clipped = ratio.clamp(1 - config.loss.clip_low, 1 + config.loss.clip_high)
        loss = -torch.minimum(ratio * advantage, clipped * advantage)
        if advantage < 0 and config.loss.dual_clip is not None:
            loss = torch.minimum(loss, -config.loss.dual_clip * advantage)
        losses.append(loss)
    loss = torch.cat(losses).mean()  # of tokens, or with one ratio a response of responses
    loss.backward()
    return loss.item(), reference_step(model, config.optimizer)


@dataclass(frozen=True)
class Reference:
    """One update of transformers and torch on a single process."""

    start: PreTrainedModel
    batch: RolloutBatch
    logprobs: list[Tensor]
    """Of each row, [tokens - 1] float64, before the update."""
    loss: float
    grad_norm: float
    updated: PreTrainedModel


@cache
def reference_of(family: str, objective: str, responses: int, seed: int) -> Reference:
    """The expected update; computed once in a process, whatever the layouts that it checks."""
    start = model_of(family)
    batch = rollout_batch(start.config.vocab_size, responses=responses, seed=seed)
    config = run_config(loss=OBJECTIVES[objective])
    with torch.no_grad():
        logprobs = [
            reference_logprobs(start, tokens, config.rollout.temperature)
            for tokens, _ in sequences(batch)
        ]
    updated = deepcopy(start)
    loss, grad_norm = reference_update(updated, batch, config)
    return Reference(start, batch, logprobs, loss, grad_norm, updated)


def reference_step(model: nn.Module, settings: OptimizerConfig) -> float:
    """Clip and step as rollout step 1 does; the gradient norm before clipping."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([grad.double().norm() for grad in grads]).norm()
    nn.utils.clip_grads_with_norm_(model.parameters(), settings.clip_grad, norm)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ],
        lr=settings.lr / settings.warmup_steps,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    ).step()
    return norm.item()


def build_policy(
    config: RunConfig,
    model: PreTrainedModel,
    parallel: ParallelContext,
    policy_class: type[Policy] = Policy,
) -> Policy:
    """A policy that holds this rank's part of `model`'s weights, at rollout step 1."""
    policy = policy_class.build(config, model.config, parallel)
    for parameter, value in hf_parts(policy, model):
        with torch.no_grad():
            parameter.zero_()
            parameter[tuple(slice(size) for size in value.shape)].copy_(value)
    policy.weights_loaded()
    policy.start_step(1)
    return policy


def update_loss(result: UpdateResult, name: str = "actor/pg_loss") -> float:
    """Loss of an update over all ranks, from the metrics that one tensor rank of each holds."""
    sums = torch.zeros(2, dtype=torch.float64)
    metric = result.metrics.metrics.get(name)
    if metric is not None:
        sums = torch.tensor([float(metric.value), float(metric.count)], dtype=torch.float64)
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def worst_weight_error(policy: TrainedModel, model: PreTrainedModel) -> float:
    """Largest difference to `model`'s weights, relative to each tensor's largest entry."""
    worst = torch.zeros(())
    for parameter, value in hf_parts(policy, model):
        own = parameter.detach()[tuple(slice(size) for size in value.shape)]
        worst = torch.maximum(worst, (own - value).abs().max() / value.abs().max())
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def hf_parts(policy: TrainedModel, model: PreTrainedModel) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Each Megatron parameter of this rank with what it must hold (padded rows left out)."""
    named = {name: value.detach() for name, value in model.named_parameters()}
    for chunk in policy.chunks:
        pairs = list(_chunk_parts(chunk, model.config, _getter(named), policy.parallel))
        assert len(pairs) == len(list(chunk.parameters())), "every parameter has a counterpart"
        yield from pairs


def _getter(named: dict[str, Tensor]) -> Callable[[str], Tensor]:
    """HF tensor by name; one expert's matrices out of transformers' fused expert tensors."""

    def get(name: str) -> Tensor:
        if name in named:
            return named[name]
        prefix, expert, leaf, _ = name.rsplit(".", 3)
        if leaf == "down_proj":
            return named[f"{prefix}.down_proj"][int(expert)]
        gate, up = named[f"{prefix}.gate_up_proj"][int(expert)].chunk(2)
        return gate if leaf == "gate_proj" else up

    return get


def _chunk_parts(
    chunk: nn.Module, hf: object, get: Callable[[str], Tensor], parallel: ParallelContext
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    rank = parallel.tp_rank

    def vocabulary(value: Tensor, parameter: nn.Parameter) -> tuple[nn.Parameter, Tensor]:
        rows = parameter.shape[0]
        return parameter, value[rank * rows : (rank + 1) * rows]

    if chunk.pre_process:
        yield vocabulary(get("model.embed_tokens.weight"), chunk.embedding.word_embeddings.weight)
    for layer in chunk.decoder.layers:
        yield from _layer_parts(layer, hf, get, parallel)
    if chunk.post_process:
        yield chunk.decoder.final_layernorm.weight, get("model.norm.weight")
        if isinstance(chunk.output_layer, ValueHead):
            yield chunk.output_layer.weight, get("value_head.weight")
        elif chunk.output_layer.weight is not None:
            tied = hf.tie_word_embeddings
            name = "model.embed_tokens.weight" if tied else "lm_head.weight"
            yield vocabulary(get(name), chunk.output_layer.weight)


def _layer_parts(
    layer: nn.Module, hf: object, get: Callable[[str], Tensor], parallel: ParallelContext
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    tp, rank = parallel.tp_size, parallel.tp_rank
    prefix = f"model.layers.{layer.layer_number - 1}"
    attention = layer.self_attention

    def fused_qkv(leaf: str) -> Tensor:
        groups = hf.num_key_value_heads
        parts = [get(f"{prefix}.self_attn.{name}_proj.{leaf}") for name in "qkv"]
        fused = torch.cat([p.view(groups, -1, *p.shape[1:]) for p in parts], 1)
        return fused.flatten(0, 1).chunk(tp)[rank]

    yield layer.input_layernorm.weight, get(f"{prefix}.input_layernorm.weight")
    yield attention.linear_qkv.weight, fused_qkv("weight")
    if attention.linear_qkv.bias is not None:
        yield attention.linear_qkv.bias, fused_qkv("bias")
    if hf.model_type.startswith("qwen3"):
        yield attention.q_layernorm.weight, get(f"{prefix}.self_attn.q_norm.weight")
        yield attention.k_layernorm.weight, get(f"{prefix}.self_attn.k_norm.weight")
    output = get(f"{prefix}.self_attn.o_proj.weight").chunk(tp, 1)[rank]
    yield attention.linear_proj.weight, output
    yield layer.pre_mlp_layernorm.weight, get(f"{prefix}.post_attention_layernorm.weight")
    if not hasattr(layer.mlp, "router"):
        yield from _mlp_parts(layer.mlp, f"{prefix}.mlp", get, tp, rank)
        return
    yield layer.mlp.router.weight, get(f"{prefix}.mlp.gate.weight")
    for local, expert in enumerate(layer.mlp.local_expert_indices):
        yield from _mlp_parts(
            layer.mlp.experts.local_experts[local],
            f"{prefix}.mlp.experts.{expert}",
            get,
            parallel.etp_size,
            parallel.etp_rank,
        )


def _mlp_parts(
    mlp: nn.Module, prefix: str, get: Callable[[str], Tensor], size: int, rank: int
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    gate, up, down = (get(f"{prefix}.{name}_proj.weight") for name in ("gate", "up", "down"))
    yield mlp.linear_fc1.weight, torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])
    yield mlp.linear_fc2.weight, down.chunk(size, 1)[rank]
