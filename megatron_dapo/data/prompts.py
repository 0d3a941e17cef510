"""Prompt files -> prompts, with an account of every row; and their seeded, resumable order."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.config.schema import DataConfig
from megatron_dapo.data.selection import PromptReport, SelectedRow, usable_rows
from megatron_dapo.data.tokenizer import Tokenizer
from megatron_dapo.types import Prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptSet:
    """Prompts in file order with unique ids, and what happened to the other rows."""

    prompts: tuple[Prompt, ...]
    report: PromptReport

    @classmethod
    def load(cls, path: Path, config: DataConfig, tokenizer: Tokenizer) -> PromptSet:
        """Read, check, de-duplicate, format and tokenise a prompt file.

        A prompt's id is its `extra_info.index` where every kept row has one and all differ, else
        its line number.

        Raises:
            ValueError: bad rows with `bad_rows=error`, over-long prompts with
                `overlong_prompts=error`, or nothing left; the message names lines and reasons.
        """
        selection = usable_rows(path, config, tokenizer)
        logger.info(selection.report.summary())
        return cls(_prompts(selection.rows), selection.report)


def _prompts(kept: Sequence[SelectedRow]) -> tuple[Prompt, ...]:
    indices = [item.row.index for item in kept]
    by_index = None not in indices and len(set(indices)) == len(indices)
    return tuple(
        Prompt(
            id=str(item.row.index if by_index else item.row.line),
            text=item.text,
            token_ids=item.token_ids,
            answer=item.row.answer,
            source=item.row.source,
        )
        for item in kept
    )


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    """SHA-256 over what is trained on: ids, tokens and answers, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        line = json.dumps([prompt.id, prompt.token_ids, prompt.answer])
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()


class PromptStream:
    """Endless prompts: each epoch every prompt once, in an order that seed and epoch fix.

    The position is part of the checkpoint: after `load_state_dict` the stream goes on as if it had
    never stopped, inside an epoch and across its end.
    """

    def __init__(self, prompt_set: PromptSet, seed: int) -> None:
        self._prompts = prompt_set.prompts
        self._seed = seed
        self.fingerprint = _fingerprint(self._prompts)
        self._start_epoch(0)

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._position = 0
        self._order = list(range(len(self._prompts)))
        random.Random(f"{self._seed}/{epoch}").shuffle(self._order)

    @property
    def epoch(self) -> int:
        """Full passes over the prompts so far."""
        return self._epoch

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts; past the end of an epoch the next one follows at once."""
        taken: list[Prompt] = []
        while len(taken) < count:
            if self._position == len(self._order):
                self._start_epoch(self._epoch + 1)
            end = min(self._position + count - len(taken), len(self._order))
            taken += [self._prompts[i] for i in self._order[self._position : end]]
            self._position = end
        return taken

    def put_back(self, count: int) -> None:
        """The last `count` prompts taken come again, in their order, across ends of epochs too."""
        while self._epoch and 0 < count >= self._position:  # never left at the start of an epoch
            count -= self._position
            self._start_epoch(self._epoch - 1)
            self._position = len(self._order)
        if count > self._position:
            raise RuntimeError(f"{count} prompts are put back, but {self._position} were taken")
        self._position -= count

    def state_dict(self) -> dict[str, int | str]:
        """Everything that `load_state_dict` needs, as plain JSON values."""
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "prompts": self.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            RuntimeError: seed or prompts are not those of the state: the order would differ.
        """
        for key, here in (("seed", self._seed), ("prompts", self.fingerprint)):
            if state[key] != here:
                raise RuntimeError(
                    f"the saved prompt order has {key}={state[key]}, this run has {here}: resume "
                    "with the same seed and data, or start a new run"
                )
        self._start_epoch(int(state["epoch"]))
        self._position = int(state["position"])
