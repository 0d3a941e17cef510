"""What an evaluation alone needs: no trainer, so no rule of a layout or an update applies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_dapo.config.errors import ConfigError
from megatron_dapo.config.evaluation_checks import evaluation_problems
from megatron_dapo.config.heldout import heldout_paths
from megatron_dapo.config.machine_checks import (
    cuda_is_visible,
    decide_device,
    heldout_file_problems,
    tokenizer_problems,
    weight_problems,
)
from megatron_dapo.config.model_shape import ModelShape, read_hf_config
from megatron_dapo.config.schema import RunConfig


def check_evaluation(config: RunConfig, *, weights: bool) -> RunConfig:
    """Refuse in advance what `megatron-dapo eval` could not do here.

    Args:
        config: of the evaluation, model.path being a model's folder.
        weights: the folder's weights are served; else only its configuration is read.

    Returns:
        `config` with the device decided.

    Raises:
        ConfigError: one message for each broken rule.
    """
    hf_config = read_hf_config(config.model.path)
    config = decide_device(config)
    problems = [
        *evaluation_problems(config, in_loop=False),
        *_served_problems(config, hf_config),
        *heldout_file_problems(config),
        *tokenizer_problems(config),
        *(weight_problems(config.model.path) if weights else ()),
    ]
    if problems:
        raise ConfigError(problems)
    return config


def _served_problems(config: RunConfig, hf_config: Mapping[str, object]) -> Iterator[str]:
    rollout, shape = config.rollout, ModelShape.from_hf(hf_config)
    longest = config.max_sequence_tokens
    if not heldout_paths(config):
        yield (
            "nothing to evaluate: neither data.heldout nor evaluation.sets is given. Add for "
            "example evaluation.sets.aime2024.path=FILE."
        )
    if longest > shape.max_positions:
        yield (
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} + rollout.max_response_tokens="
            f"{rollout.max_response_tokens} = {longest} tokens: more than the "
            f"{shape.max_positions} positions (max_position_embeddings) of the model at "
            "model.path. Lower one of the two."
        )
    if rollout.max_engine_tokens is not None and longest > rollout.max_engine_tokens:
        yield (
            f"rollout.max_engine_tokens={rollout.max_engine_tokens}: less than prompt + response, "
            f"{longest} tokens. Raise it, or leave it out."
        )
    if shape.heads % rollout.engine_tensor:
        yield (
            f"rollout.engine_tensor={rollout.engine_tensor}: must divide the model's "
            f"{shape.heads} attention heads."
        )
    if rollout.engine_quantization is not None:
        yield (
            f"rollout.engine_quantization={rollout.engine_quantization}: only a running trainer "
            "quantizes weights for engines; eval serves a folder as it is. Set "
            "rollout.engine_quantization=null to evaluate in rollout.engine_dtype."
        )
    if config.device == "cuda" and not cuda_is_visible():
        yield "device=cuda: no CUDA device is visible on this machine. Set device=cpu or auto."
