"""A group in the making: one sampling event of a prompt and what its responses have so far."""

from __future__ import annotations

import dataclasses
from copy import copy
from dataclasses import dataclass

from megatron_dapo.rollout.continuation import Unfinished
from megatron_dapo.types import Group, Prompt, Response, Reward


@dataclass(eq=False)
class Member:
    """One response of a group: not begun, begun, or complete and graded."""

    index: int
    begun: Unfinished | None = None
    response: Response | None = None
    reward: Reward | None = None

    @property
    def complete(self) -> bool:
        return self.reward is not None


@dataclass(eq=False)
class Draft:
    """A prompt that was drawn, under the numbers that its seeds come from.

    Args:
        step: rollout step that it was drawn for, and `event`, its place among those of the step.
        version: of the weights that were there when it was submitted, at least.
        members: `group_size` of them.
    """

    prompt: Prompt
    step: int
    event: int
    version: int
    members: tuple[Member, ...]
    group: Group | None = None
    """Once every member is complete."""

    @classmethod
    def new(cls, prompt: Prompt, step: int, event: int, version: int, group_size: int) -> Draft:
        return cls(prompt, step, event, version, tuple(map(Member, range(group_size))))

    @property
    def order(self) -> tuple[int, int]:
        """Drafts of a run are submitted in this order, and no two share it."""
        return self.step, self.event

    @property
    def oldest_version(self) -> int:
        """Of any token, as far as it is known; never newer than it really is."""
        tokens = [m.response.policy_version for m in self.members if m.response is not None]
        tokens += [m.begun.oldest_version for m in self.members if m.begun is not None]
        if all(m.response is not None for m in self.members):
            return min(tokens)
        return min([self.version, *tokens])

    @property
    def begun_tokens(self) -> int:
        """Tokens of responses that are not complete."""
        return sum(len(m.begun.token_ids) for m in self.members if m.begun and not m.complete)

    @property
    def tokens(self) -> int:
        """Of all responses, complete or not."""
        whole = sum(len(m.response.token_ids) for m in self.members if m.response is not None)
        return whole + self.begun_tokens

    @property
    def least_limit(self) -> int:
        """Tokens that a response must be allowed to have: those of the longest complete one, and
        one more than an unfinished one has, which goes on."""
        whole = [len(m.response.token_ids) for m in self.members if m.response is not None]
        begun = [len(m.begun.token_ids) + 1 for m in self.members if m.begun is not None]
        return max([*whole, *begun], default=0)

    def copy(self) -> Draft:
        """As it is now; what is sampled later does not change it."""
        return dataclasses.replace(self, members=tuple(map(copy, self.members)))

    def close_when_complete(self) -> bool:
        """Make the group if all members are graded; True if this did."""
        responses = [m.response for m in self.members if m.response is not None]
        rewards = [m.reward for m in self.members if m.reward is not None]
        if self.group is not None or len(rewards) < len(self.members):
            return False
        self.group = Group(self.prompt, tuple(responses), tuple(rewards))
        return True
