"""Grading in workers overlaps the sampling, and what a plug-in does to one response stays there."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megatron_dapo.config.schema import RewardConfig, RolloutConfig, SamplingConfig
from megatron_dapo.reward.grade import grade_response, grading_errors
from megatron_dapo.reward.grader_pool import GraderPool
from megatron_dapo.rollout.sampler import RolloutStep
from tests.unit.rollout.fake_engine import FakeEngine, Source
from tests.unit.rollout.scheduling import Rollouts, collect_step


def collect(config: RewardConfig, folder: Path) -> tuple[RolloutStep, dict[str, float]]:
    """One step of eight groups of four without dynamic sampling, graded by the plug-in."""
    pool = GraderPool(config, folder)
    pool.start()
    try:
        grade = partial(grade_response, config=config, max_response_tokens=100, pool=pool)
        rollouts = Rollouts(
            [FakeEngine()],
            Source((50,)),
            RolloutConfig(prompts_per_step=8, group_size=4),
            SamplingConfig(dynamic=False),
            grade=grade,
            threads=config.workers,
        )
        step = collect_step(rollouts)
        return step, pool.take_counts()
    finally:
        pool.close()


def test_responses_whose_grader_fails_are_masked_and_the_step_goes_on(tmp_path: Path) -> None:
    config = RewardConfig(
        plugin="tests.unit.reward.plugins:fail_for_some",
        workers=2,
        time_limit_seconds=60.0,
        overlong_buffer_tokens=0,
    )
    step, counts = collect(config, tmp_path)
    rewards = {
        (group.prompt.id, response.sample_index): reward.accuracy
        for group in step.groups
        for response, reward in zip(group.responses, group.rewards, strict=True)
    }
    assert len(step.groups) == 8 and len(rewards) == 32
    expected = {0: None, 1: None, 2: None, 3: 1.0}
    assert {key: expected[key[1]] for key in rewards} == rewards
    assert grading_errors(step.generated) == 24
    assert step.metrics["reward/acc/mean"] == 1.0
    assert counts == {"reward/limit_overruns": 8.0, "reward/worker_restarts": 16.0}
