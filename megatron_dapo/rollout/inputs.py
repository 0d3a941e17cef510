"""What rollouts are made from: prompts, tokenizer, stop tokens and the user's reward function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from megatron_dapo.config import ConfigError, RunConfig
from megatron_dapo.data.prompts import PromptSet
from megatron_dapo.data.tokenizer import Tokenizer, load_tokenizer, stop_token_ids
from megatron_dapo.reward.plugin import RewardFunction, load_plugin
from megatron_dapo.types import Prompt


@dataclass(frozen=True)
class RolloutInputs:
    """Everything that sampling reads from files, checked."""

    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]
    train: PromptSet
    heldout: tuple[Prompt, ...]
    """Of `data.heldout`, at most `evaluation.max_prompts`."""
    plugin: RewardFunction | None

    @classmethod
    def read(cls, config: RunConfig) -> Self:
        """Read all of it: the launcher before it starts anything, then global rank 0.

        Raises:
            ConfigError: a file, a row or the reward plug-in is not usable; the message names it.
        """
        try:
            tokenizer = load_tokenizer(
                config.model.tokenizer or config.model.path,
                trust_remote_code=config.model.trust_remote_code,
            )
            heldout: tuple[Prompt, ...] = ()
            if config.data.heldout is not None:
                heldout = PromptSet.load(config.data.heldout, config.data, tokenizer).prompts
            return cls(
                tokenizer=tokenizer,
                stop_token_ids=stop_token_ids(config.model.path, tokenizer),
                train=PromptSet.load(config.data.train, config.data, tokenizer),
                heldout=heldout[: config.evaluation.max_prompts],
                plugin=load_plugin(config.reward.plugin) if config.reward.plugin else None,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
