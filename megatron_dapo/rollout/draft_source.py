"""Prompts to drafts, each under a number that is used once in a run."""

from __future__ import annotations

from typing import Protocol

from megatron_dapo.rollout.draft import Draft
from megatron_dapo.types import Prompt


class PromptSource(Protocol):
    """An order of prompts that can be wound back."""

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        ...

    def put_back(self, count: int) -> None:
        """The last `count` prompts come again."""
        ...


class DraftSource:
    """Draws prompts; a draft's seeds come from its step and its place among that step's draws."""

    def __init__(self, prompts: PromptSource, group_size: int) -> None:
        self._prompts = prompts
        self._group_size = group_size
        self._step = 0
        self._drawn = 0
        self.taken = 0
        """Prompts that were drawn and not put back."""

    def draw(self, count: int, step: int, version: int) -> list[Draft]:
        """New drafts of `step`, from weights `version` at least.

        Raises:
            RuntimeError: there are no prompts.
        """
        if step != self._step:
            self._step, self._drawn = step, 0
        prompts = self._prompts.take(count)
        if len(prompts) < count:
            raise RuntimeError(f"no prompts are left for step {step}; check data.train")
        self.taken += count
        first, self._drawn = self._drawn, self._drawn + count
        return [
            Draft.new(prompt, step, first + index, version, self._group_size)
            for index, prompt in enumerate(prompts)
        ]

    def put_back(self, drafts: int) -> None:
        """The prompts of the last `drafts` draws come again, under new numbers."""
        self._prompts.put_back(drafts)
        self.taken -= drafts
