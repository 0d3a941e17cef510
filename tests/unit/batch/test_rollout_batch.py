from __future__ import annotations

import math

import pytest
import torch

from megatron_dapo.batch.rollout_batch import build_rollout_batch, from_tensors
from megatron_dapo.config.schema import AdvantageConfig, RewardConfig
from megatron_dapo.types import Reward
from tests.unit.batch.batches import make_group, random_batch, run_config

RIGHT, WRONG, FAILED = Reward(1.0, 1.0), Reward(0.0, -1.0), Reward(None, 0.0)


def test_ids_and_logprobs_are_the_engine_s() -> None:
    groups = [
        make_group([1, 2], [[258, 1385], [7]], [RIGHT, WRONG]),
        make_group([3], [[4, 5, 6], []], [WRONG, RIGHT]),
    ]
    batch = build_rollout_batch(groups, run_config())
    assert batch.tokens.tolist() == [1, 2, 258, 1385, 1, 2, 7, 3, 4, 5, 6, 3]
    assert batch.prompt_tokens.tolist() == [2, 2, 1, 1]
    assert batch.response_tokens.tolist() == [2, 1, 3, 0]
    expected = torch.tensor([-2.58, -13.85, -0.07, -0.04, -0.05, -0.06])
    torch.testing.assert_close(batch.rollout_logprobs, expected)
    assert batch.group_index.tolist() == [0, 0, 1, 1]
    assert batch.policy_version.tolist() == [0, 1, 0, 1]
    assert batch.trained.all()


def test_a_prompt_sampled_twice_makes_two_groups() -> None:
    group = make_group([1], [[2], [3]], [RIGHT, WRONG])
    same_text = make_group([1], [[2], [3]], [WRONG, WRONG])
    batch = build_rollout_batch([group, same_text], run_config())
    assert batch.group_index.tolist() == [0, 0, 1, 1]
    assert batch.advantages[2:].tolist() == [0.0, 0.0]


def test_advantages_come_from_the_shaped_rewards() -> None:
    rewards = [Reward(1.0, 1.0), Reward(1.0, 1.0, overlong=-1.0), Reward(0.0, -1.0)]
    group = make_group([1], [[2]] * 3, rewards)
    plain = run_config(advantage=AdvantageConfig(normalize_std=False))
    assert build_rollout_batch([group], plain).advantages.tolist() == [1.0, 0.0, -1.0]
    divided = run_config(advantage=AdvantageConfig(unbiased=False, eps=0.5))
    expected = 1 / (math.sqrt(2 / 3) + 0.5)
    assert build_rollout_batch([group], divided).advantages[0].item() == pytest.approx(expected)


def test_with_a_critic_rewards_travel_and_advantages_come_later() -> None:
    rewards = [Reward(1.0, 1.0, overlong=-0.5), Reward(0.0, -1.0)]
    critic = run_config(advantage=AdvantageConfig(estimator="gae"))
    batch = build_rollout_batch([make_group([1], [[2]] * 2, rewards)], critic)
    assert batch.rewards.tolist() == [0.5, -1.0]
    assert batch.advantages.tolist() == [0.0, 0.0]


def test_a_response_without_a_grade_neither_counts_nor_trains() -> None:
    group = make_group([1], [[2]] * 3, [Reward(None, 100.0), RIGHT, WRONG])
    batch = build_rollout_batch([group], run_config())
    assert batch.trained.tolist() == [False, True, True]
    assert batch.advantages.tolist() == pytest.approx([0.0, 0.7071063, -0.7071063], abs=1e-6)


def test_overlong_filtering_only_takes_the_loss_away() -> None:
    group = make_group([1], [[2]] * 3, [RIGHT, WRONG, WRONG], finish=["stop", "length", "stop"])
    filtered = run_config(reward=RewardConfig(filter_truncated=True))
    off, on = build_rollout_batch([group], run_config()), build_rollout_batch([group], filtered)
    assert off.trained.tolist() == [True, True, True]
    assert on.trained.tolist() == [True, False, True]
    assert on.advantages.tolist() == pytest.approx([1.1547, -0.57735, -0.57735], abs=1e-4)
    assert on.advantages.equal(off.advantages)
    assert on.tokens.equal(off.tokens)
    ungraded = make_group([1], [[2]] * 3, [FAILED, RIGHT, WRONG], finish=["stop"] * 3)
    assert build_rollout_batch([ungraded], filtered).trained.tolist() == [False, True, True]


def test_an_empty_step_or_prompt_is_refused() -> None:
    with pytest.raises(RuntimeError, match="no groups"):
        build_rollout_batch([], run_config())
    with pytest.raises(RuntimeError, match="prompt p has no tokens"):
        build_rollout_batch([make_group([], [[2]], [RIGHT])], run_config())


def test_a_batch_survives_the_journey_as_tensors() -> None:
    batch = random_batch([(3, 4), (1, 0)])
    again = from_tensors(batch.tensors())
    for name, tensor in batch.tensors().items():
        assert again.tensors()[name].equal(tensor)


@pytest.mark.parametrize("name", list(random_batch([(1, 1)]).tensors()))
def test_a_tensor_that_does_not_fit_is_named(name: str) -> None:
    good = random_batch([(3, 4), (1, 2)]).tensors()
    with pytest.raises(RuntimeError, match=name):
        from_tensors({key: value for key, value in good.items() if key != name})
    if name not in ("prompt_tokens", "response_tokens"):
        with pytest.raises(RuntimeError, match=name):
            from_tensors(good | {name: good[name][:-1]})
    with pytest.raises(RuntimeError, match=name):
        from_tensors(good | {name: good[name].to(torch.int16)})
