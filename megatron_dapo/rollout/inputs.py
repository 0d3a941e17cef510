"""What rollouts are made from: prompts, tokenizer and stop tokens; and graders that can start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from megatron_dapo.config import ConfigError, RunConfig
from megatron_dapo.data.prompts import PromptSet
from megatron_dapo.data.tokenizer import Tokenizer, load_tokenizer, stop_token_ids
from megatron_dapo.reward.grader_pool import check_graders
from megatron_dapo.reward.grader_process import GraderStartError
from megatron_dapo.rollout.heldout import HeldoutSet, read_heldout, warn_of_overlap


@dataclass(frozen=True)
class RolloutInputs:
    """Everything that sampling reads from files, checked."""

    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]
    train: PromptSet
    heldout: tuple[HeldoutSet, ...]
    """Of `data.heldout` and `evaluation.sets`."""

    @classmethod
    def read(cls, config: RunConfig) -> Self:
        """Read all of it: the launcher before it starts anything, then global rank 0.

        Raises:
            ConfigError: a file, a row or the reward plug-in is not usable; the message names it.
        """
        try:
            check_graders(config.reward)
            tokenizer = load_tokenizer(
                config.model.tokenizer or config.model.path,
                trust_remote_code=config.model.trust_remote_code,
            )
            train = PromptSet.load(config.data.train, config.data, tokenizer)
            heldout = read_heldout(config, tokenizer)
            warn_of_overlap(train.prompts, heldout)
            return cls(
                tokenizer=tokenizer,
                stop_token_ids=stop_token_ids(config.model.path, tokenizer),
                train=train,
                heldout=heldout,
            )
        except (ValueError, GraderStartError) as error:
            raise ConfigError(str(error)) from error
