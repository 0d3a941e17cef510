"""Rules between keys and against the model's shape: a run that would fail is refused here.

Each rule yields complete messages: key, value seen, what is allowed, what to do. Nothing
here looks at the machine; that is `config.machine_checks`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from megatron_dapo.config.endpoint_checks import endpoint_problems
from megatron_dapo.config.errors import ConfigError
from megatron_dapo.config.evaluation_checks import (
    best_problems,
    evaluation_problems,
    prompt_file_problems,
    temperature_problems,
)
from megatron_dapo.config.layout_checks import layout_problems
from megatron_dapo.config.loss_checks import loss_problems
from megatron_dapo.config.model_family import family_problems
from megatron_dapo.config.model_shape import ModelShape
from megatron_dapo.config.resharding_checks import resharding_problems
from megatron_dapo.config.rollout_checks import scheduling_problems
from megatron_dapo.config.schema import AdvantageConfig, CriticConfig, MoeConfig, RunConfig

_PLUGIN = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def check_config(config: RunConfig, hf_config: Mapping[str, object]) -> None:
    """Refuse what cannot be trained, or would be trained wrong, before a model is built.

    Args:
        config: as loaded; every field is already right by itself.
        hf_config: the parsed config.json of `config.model.path`.

    Raises:
        ConfigError: one message for each broken rule.
    """
    shape = ModelShape.from_hf(hf_config)
    problems = [
        *batch_problems(config),
        *length_problems(config, shape),
        *sampling_problems(config),
        *scheduling_problems(config),
        *evaluation_problems(config),
        *best_problems(config),
        *reward_problems(config),
        *advantage_problems(config),
        *loss_problems(config.loss),
        *moe_problems(config, shape),
        *rollout_problems(config, shape),
        *resharding_problems(config, shape),
        *layout_problems(config, shape),
        *data_problems(config),
        *model_problems(config, shape),
        *family_problems(hf_config),
    ]
    if problems:
        raise ConfigError(problems)


def batch_problems(config: RunConfig) -> Iterator[str]:
    """Responses -> updates -> data-parallel ranks."""
    update, group = config.training.responses_per_update, config.rollout.group_size
    total = config.responses_per_step
    if group == 1 and config.advantage.estimator == "group":
        yield (
            "rollout.group_size=1: an advantage relative to its group needs at least 2 responses "
            "a prompt, or every advantage is 0. DAPO uses 16. PPO takes 1: "
            "advantage.estimator=gae."
        )
    if total % update:
        yield (
            f"training.responses_per_update={update}: must divide rollout.prompts_per_step "
            f"{config.rollout.prompts_per_step} x rollout.group_size {group} = {total} responses. "
            f"Use {_nearest_update(config)}."
        )
    if update < config.parallel.data:
        yield (
            f"training.responses_per_update={update}: must be at least parallel.data="
            f"{config.parallel.data}, or some ranks have nothing to train on. Raise it or lower "
            "parallel.data."
        )
    elif update % group:
        yield (
            f"training.responses_per_update={update}: must be a multiple of rollout.group_size="
            f"{group}, since an update takes whole groups."
        )


def length_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Prompt + response against the engine, the model and one micro-batch."""
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    longest = config.max_sequence_tokens
    what = (
        f"data.max_prompt_tokens={prompt} + rollout.max_response_tokens={response} = {longest} "
        "tokens"
    )
    engine = config.rollout.max_engine_tokens
    if engine is not None and longest > engine:
        yield f"{what}: more than rollout.max_engine_tokens={engine}. Raise that, or leave it out."
    if longest > shape.max_positions:
        yield (
            f"{what}: more than the {shape.max_positions} positions (max_position_embeddings) of "
            "the model at model.path. Lower one of the two."
        )
    elif engine is not None and engine > shape.max_positions:
        yield (
            f"rollout.max_engine_tokens={engine}: more than the {shape.max_positions} positions "
            "(max_position_embeddings) of the model at model.path. Lower it, or leave it out."
        )
    if longest > config.training.tokens_per_micro_batch:
        yield (
            f"training.tokens_per_micro_batch={config.training.tokens_per_micro_batch}: must hold "
            f"one sequence whole, {what}. Raise it to at least {longest}."
        )
    buffer = config.reward.overlong_buffer_tokens
    if buffer > response:
        yield (
            f"reward.overlong_buffer_tokens={buffer}: must be at most rollout.max_response_tokens="
            f"{response}, since the punished zone ends there. DAPO: 4096 of 20480; 0 turns it off."
        )


def sampling_problems(config: RunConfig) -> Iterator[str]:
    """Responses must come from the distribution that the trainer differentiates."""
    rollout, sampling = config.rollout, config.sampling
    yield from temperature_problems("rollout.temperature", rollout.temperature)
    if rollout.temperature == 0:
        yield (
            "rollout.temperature=0.0: greedy responses are all equal and their log-probs have no "
            "gradient; must be above 0 for training (evaluation.temperature may be 0). DAPO: 1.0."
        )
    if rollout.top_p < 1:
        yield (
            f"rollout.top_p={rollout.top_p}: training takes only 1.0, since the trainer's "
            "log-probs are of the untruncated distribution. evaluation.top_p is free."
        )
    if rollout.top_k > 0:
        yield (
            f"rollout.top_k={rollout.top_k}: training takes only -1 (off), since the trainer's "
            "log-probs are of the untruncated distribution."
        )
    if rollout.logprobs == "raw" and rollout.temperature not in (0.0, 1.0):
        yield (
            f"rollout.logprobs=raw with rollout.temperature={rollout.temperature}: raw log-probs "
            "are of temperature 1, the trainer's are tempered. Use rollout.logprobs=processed."
        )
    if not sampling.dynamic and sampling.prompts_per_round not in (None, rollout.prompts_per_step):
        yield (
            f"sampling.prompts_per_round={sampling.prompts_per_round}: without dynamic sampling "
            f"there is one round of rollout.prompts_per_step={rollout.prompts_per_step} prompts. "
            "Leave it out, or set sampling.dynamic=true."
        )


def reward_problems(config: RunConfig) -> Iterator[str]:
    """The reward must order right above wrong."""
    reward = config.reward
    if reward.correct <= reward.incorrect:
        yield (
            f"reward.correct={reward.correct}: must be above reward.incorrect={reward.incorrect}. "
            "DAPO: 1 and -1."
        )
    if reward.plugin is not None and not _PLUGIN.fullmatch(reward.plugin):
        yield (
            f"reward.plugin={reward.plugin!r}: must be dotted.path:function, for example "
            "my_rewards.math:grade"
        )
    if reward.math_verify and (reward.plugin is not None or reward.style == "dapo_reference"):
        yield (
            "reward.math_verify=true: must be false with reward.plugin, which grades alone, and "
            "with reward.style=dapo_reference, which is the published grader to the letter."
        )
    for key, value in (
        ("plugin_network", reward.plugin_network),
        ("plugin_environment", list(reward.plugin_environment)),
    ):
        if value and reward.plugin is None:
            yield f"reward.{key}={value}: read only with reward.plugin. Leave it out."


def advantage_problems(config: RunConfig) -> Iterator[str]:
    """Keys of one estimator are not read by the other."""
    advantage, default = config.advantage, AdvantageConfig()
    gae = advantage.estimator == "gae"
    unread = ("normalize_std", "unbiased", "eps") if gae else ("gamma", "lam")
    for name in unread:
        value, usual = advantage.model_dump()[name], default.model_dump()[name]
        if value != usual:
            yield (
                f"advantage.{name}={value}: not read with advantage.estimator="
                f"{advantage.estimator}. Leave it out (its default is {usual})."
            )
    if not gae and config.critic != CriticConfig():
        yield (
            "critic: read only with advantage.estimator=gae, which is group. Leave it out, or set "
            "advantage.estimator=gae."
        )
    if gae and config.sampling.dynamic and config.rollout.group_size == 1:
        yield (
            "sampling.dynamic=true: keeps groups of mixed accuracy, and a group of "
            "rollout.group_size=1 never is. Set sampling.dynamic=false; the critic needs no mix."
        )


def moe_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Keys of experts are not read for a model without any."""
    if not shape.is_moe and config.moe != MoeConfig():
        usual = MoeConfig().model_dump()
        given = [f"moe.{k}={v}" for k, v in config.moe.model_dump().items() if v != usual[k]]
        yield f"{', '.join(given)}: not read, the model has no experts. Leave it out."


def rollout_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Engines: how many, how wide, and where."""
    rollout = config.rollout
    if shape.heads % rollout.engine_tensor:
        yield (
            f"rollout.engine_tensor={rollout.engine_tensor}: must divide the model's "
            f"{shape.heads} attention heads."
        )
    if rollout.endpoints and len(rollout.endpoints) != rollout.engines:
        yield (
            f"rollout.engines={rollout.engines}: must equal the number of rollout.endpoints, "
            f"{len(rollout.endpoints)}."
        )
    if len(set(rollout.endpoints)) != len(rollout.endpoints):
        yield "rollout.endpoints: one is given twice; each must be a server of its own."
    if rollout.heartbeat_timeout_seconds < 2 * rollout.heartbeat_seconds:
        yield (
            f"rollout.heartbeat_timeout_seconds={rollout.heartbeat_timeout_seconds:g}: must be at "
            f"least twice rollout.heartbeat_seconds={rollout.heartbeat_seconds:g}, or engines are "
            "taken for dead between two questions. Raise it."
        )
    yield from endpoint_problems(config)


def data_problems(config: RunConfig) -> Iterator[str]:
    """Prompt files that can be read."""
    yield from prompt_file_problems("data.train", config.data.train)


def model_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """What the model folder asks for."""
    if shape.custom_code and not config.model.trust_remote_code:
        yield (
            "model.trust_remote_code=false: the config.json at model.path names Python code of its "
            "own (auto_map). Read that code, then set it to true, or choose another model."
        )


def _nearest_update(config: RunConfig) -> int:
    prompts, group = config.rollout.prompts_per_step, config.rollout.group_size
    sizes = [n * group for n in range(1, prompts + 1) if prompts % n == 0]
    return min(sizes, key=lambda size: abs(size - config.training.responses_per_update))
