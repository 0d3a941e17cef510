"""The learning rate of a rollout step, and whose Adam runs."""

from __future__ import annotations

import importlib.util
import logging

import pytest

from megatron_dapo.config.schema import OptimizerConfig
from megatron_dapo.policy.optimizer import adam_source, warmup_lr


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
