"""What is allowed but worth knowing before a run; the dry run prints it."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_dapo.config.heldout import heldout_paths
from megatron_dapo.config.resharding_checks import MEETS_ON_LOOPBACK, VLLM_BACKENDS
from megatron_dapo.config.schema import RunConfig


def remarks(config: RunConfig) -> Iterator[str]:
    """Sentences about settings that work but may not be meant."""
    if config.updates_per_step == 1:
        yield (
            "One update a step: policy and old policy are equal, so every ratio is 1 and nothing "
            "is ever clipped. DAPO makes 16 updates of 512 responses."
        )
    if config.loss.kl_coef > 0:
        yield (
            f"loss.kl_coef={config.loss.kl_coef} keeps a frozen copy of the weights on every rank "
            "(the reference line of the memory table). DAPO trains without it."
        )
    if config.optimizer.warmup_steps >= config.training.steps:
        yield (
            f"optimizer.warmup_steps={config.optimizer.warmup_steps} rollout steps: the run ends "
            f"after training.steps={config.training.steps}, before the full learning rate."
        )
    if config.evaluation.every > 0 and not heldout_paths(config):
        yield (
            "Neither data.heldout nor evaluation.sets is given: nothing is evaluated inside the "
            "loop."
        )
    if config.loss.clip_high == config.loss.clip_low and config.loss.ratio == "token":
        yield "loss.clip_high equals loss.clip_low: without clip-higher, entropy tends to collapse."
    if config.rollout.mode == "async" and config.resharding.in_flight == "wait":
        yield (
            "rollout.mode=async with resharding.in_flight=wait: each update waits until all "
            "running responses are complete. keep lets them go on with the new weights."
        )
    yield from _unguarded_transport(config)
    yield from _idle_devices(config)


def remark_on_prompts(config: RunConfig, prompts: int) -> str | None:
    """A sentence where one step asks for more prompts than there are.

    Args:
        prompts: that `data.train` holds, as far as they are known to differ.
    """
    step = config.rollout.prompts_per_step
    if step <= prompts:
        return None
    return (
        f"rollout.prompts_per_step={step}: data.train={config.data.train} has {prompts} prompts. "
        f"An epoch passes in every step, which samples each of them {step / prompts:.1f} times or "
        "more. Give more prompts, or lower rollout.prompts_per_step."
    )


def _unguarded_transport(config: RunConfig) -> Iterator[str]:
    """What a user of vLLM's own backends takes upon himself."""
    transport = config.resharding.transport
    seen = f"resharding.transport={transport}"
    if transport in VLLM_BACKENDS and config.resharding.verify_digests:
        yield (
            f"{seen} brings no digests: resharding.verify_digests is not read, and only the probe "
            "shows whether the engines hold the policy."
        )
    if transport == "vllm_ipc":
        yield (
            f"{seen} sends pickled handles (vLLM's own protocol) and starts the engines with "
            "VLLM_ALLOW_INSECURE_SERIALIZATION=1: whoever may write to an engine's socket, which "
            "is this user alone, can run code in it. cuda_ipc does the same without pickle."
        )
    if transport in MEETS_ON_LOOPBACK:
        yield (
            f"{seen}: trainers and engines meet at a port of 127.0.0.1 that asks nobody who he is. "
            "Use it only where every user of the machine is trusted; nccl meets in a private "
            "directory."
        )


def _idle_devices(config: RunConfig) -> Iterator[str]:
    rollout, world = config.rollout, config.parallel.world_size
    used = rollout.engines * rollout.engine_tensor
    shares = rollout.placement == "colocated" and config.device == "cuda" and not rollout.endpoints
    if shares and used < world:
        yield (
            f"Generation uses {used} of {world} devices (rollout.engines x rollout.engine_tensor); "
            "engines run on the first node."
        )
