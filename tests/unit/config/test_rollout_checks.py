"""Schedules of rollouts that would train on wrong or biased samples are refused with the reason."""

from __future__ import annotations

import pytest

from megatron_dapo.config import ConfigError
from megatron_dapo.config.checks import check_config
from megatron_dapo.config.remarks import remarks
from tests.unit.config.runs import DENSE, make_config

TIS = {"mismatch": "tis_token"}
CONTINUE = {"surplus": "carry", "unfinished": "continue"}
FINISH = {"surplus": "carry", "unfinished": "finish"}
Sections = dict[str, dict[str, object]]

SOUND: list[Sections] = [
    {"sampling": FINISH, "loss": TIS},
    {"sampling": CONTINUE, "loss": TIS, "rollout": {"max_staleness": 3}},
    {"rollout": {"mode": "one_step_off"}, "loss": TIS},
    {"rollout": {"mode": "async", "max_staleness": 4}, "sampling": CONTINUE, "loss": TIS},
    {"rollout": {"mode": "async"}, "sampling": FINISH, "loss": TIS},
    {"sampling": {"max_seconds": 600.0}},
    {"sampling": {"prompts_per_round": 1, "max_rounds": 8}},
    {"sampling": {"prompts_per_round": 1, "max_rounds": 7, "when_short": "train"}},
]


@pytest.mark.parametrize("sections", SOUND, ids=str)
def test_sound_schedules_are_taken(sections: Sections) -> None:
    check_config(make_config(**sections), DENSE)


REFUSED: list[tuple[Sections, str]] = [
    ({"sampling": FINISH}, r"loss\.mismatch=none: with sampling\.surplus=carry .* tis_token"),
    ({"rollout": {"mode": "one_step_off"}}, r"mismatch=none: with rollout\.mode=one_step_off"),
    (
        {"rollout": {"mode": "async"}, "sampling": CONTINUE},
        r"mismatch=none: with rollout\.mode=async",
    ),
    ({"sampling": {"unfinished": "finish"}}, r"sampling\.unfinished=finish: .*only abort"),
    ({"sampling": {"unfinished": "continue"}}, r"sampling\.unfinished=continue: .*only abort"),
    ({"sampling": {"surplus": "carry"}, "loss": TIS}, r"unfinished=abort: .* favours short"),
    (
        {"rollout": {"mode": "one_step_off"}, "sampling": CONTINUE, "loss": TIS},
        r"sampling\.surplus=carry: rollout\.mode=one_step_off .* only drop",
    ),
    (
        {"rollout": {"mode": "async"}, "loss": TIS},
        r"sampling\.surplus=drop: rollout\.mode=async .* only carry",
    ),
    (
        {"rollout": {"mode": "one_step_off", "max_staleness": 2}, "loss": TIS},
        r"max_staleness=2: rollout\.mode=one_step_off is exactly one",
    ),
    ({"rollout": {"max_staleness": 2}}, r"max_staleness=2: rollout\.mode=sync .* nothing older"),
    (
        {"sampling": {"prompts_per_round": 1, "max_rounds": 7}},
        r"sampling\.prompts_per_round=1: .*sampling\.max_rounds=7 .*prompts_per_step=8\. Raise",
    ),
]


@pytest.mark.parametrize(("sections", "reason"), REFUSED, ids=str)
def test_others_are_refused_with_the_reason(sections: Sections, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        check_config(make_config(**sections), DENSE)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("mode", ["one_step_off", "async"])
def test_engines_that_sleep_while_the_trainer_trains_cannot_run_ahead(mode: str) -> None:
    kept = CONTINUE if mode == "async" else {}
    config = make_config(rollout={"mode": mode}, sampling=kept, loss=TIS)
    apart = config.rollout.model_copy(update={"placement": "disaggregated"})
    on_gpu = config.model_copy(update={"device": "cuda"})
    with pytest.raises(ConfigError, match=r"placement=colocated: .*Set rollout\.placement=disagg"):
        check_config(on_gpu, DENSE)
    check_config(on_gpu.model_copy(update={"rollout": apart}), DENSE)


def test_updates_that_wait_for_every_response_are_remarked_on() -> None:
    held_out = {"heldout": "h.jsonl"}
    found = {
        in_flight: list(
            remarks(
                make_config(
                    rollout={"mode": "async"},
                    sampling=CONTINUE,
                    loss=TIS,
                    data=held_out,
                    resharding={"in_flight": in_flight},
                )
            )
        )
        for in_flight in ("wait", "keep")
    }
    assert ["in_flight=wait: each update waits" in remark for remark in found["wait"]] == [True]
    assert found["keep"] == []
