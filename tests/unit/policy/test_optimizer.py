"""The learning rate of a rollout step, and whose Adam runs."""

from __future__ import annotations

import importlib.util
import logging
from types import SimpleNamespace

import pytest
import torch

from megatron_dapo.config.schema import OptimizerConfig
from megatron_dapo.policy import optimizer
from megatron_dapo.policy.optimizer import adam_source, global_grad_norm, set_lr, warmup_lr
from tests.unit.handed import Case, handed_cases


def test_warm_up_is_linear_over_rollout_steps_as_in_the_paper() -> None:
    paper = OptimizerConfig()  # DAPO 4.1: 1e-6, 20 rollout steps
    rates = [warmup_lr(step, paper) for step in (1, 10, 20, 21, 400)]
    assert rates == pytest.approx([5e-8, 5e-7, 1e-6, 1e-6, 1e-6])


def test_without_warm_up_the_first_step_has_the_full_rate() -> None:
    assert warmup_lr(1, OptimizerConfig(lr=3e-6, warmup_steps=0)) == 3e-6


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="count from 1"):
        warmup_lr(0, OptimizerConfig())


def test_an_unrelated_package_called_apex_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = {"apex": object()}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found.get(name))
    with caplog.at_level(logging.WARNING):
        adam_source()
    assert "not NVIDIA's" in caplog.text


@pytest.mark.parametrize(
    ("release", "name"),
    [((0, 16, 1), "get_main_grads_for_grad_norm"), ((0, 19, 2), "get_grads_for_grad_norm")],
)
def test_the_norm_finds_its_gradients_under_the_name_of_the_release(
    release: tuple[int, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "megatron_release", lambda: release)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: None)
    grads = [torch.tensor([3.0]), torch.tensor([4.0])]
    part = SimpleNamespace(get_grad_stats_parallel_group=lambda: None, **{name: lambda: grads})
    assert global_grad_norm(SimpleNamespace(chained_optimizers=[part])) == 5.0


@pytest.mark.parametrize("case", handed_cases("j", "lr_resume"))
def test_lr_resume_of_handed_cases(case: Case) -> None:
    """What a checkpoint holds of an optimizer has an lr too; the step decides."""
    given = case["input"]
    settings = OptimizerConfig(lr=given["peak"], warmup_steps=given["warmup"])
    stop, end = given["stop_after"], given["stop_after"] + given["then"]

    def rates(optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
        found = []
        for step in range(first, last + 1):
            set_lr(optimizer, warmup_lr(step, settings))  # type: ignore[arg-type]
            found.append(optimizer.param_groups[0]["lr"])
        return found

    def adam() -> torch.optim.Optimizer:
        return torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=given["peak"])

    straight, stopped, resumed = adam(), adam(), adam()
    uninterrupted = rates(straight, 1, end)
    before = rates(stopped, 1, stop)
    resumed.load_state_dict(stopped.state_dict())
    assert (before + rates(resumed, stop + 1, end) == uninterrupted) == (
        case["expect"]["equal_to_uninterrupted"]
    )
    assert uninterrupted[stop] != uninterrupted[0]  # it did not start from its warm-up again
