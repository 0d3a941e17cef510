"""The product's scheduler on simulated engines: exactly once, fresh enough, and hardly idle.

All times are simulated, so every comparison is exact and the same on a slow machine.
"""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections import Counter
from functools import cache

import pytest

from benchmarks.rollout_modes import (
    CONTINUE,
    MODES,
    REFERENCE,
    Mode,
    Outcome,
    failures,
    in_words,
    outcome,
    report,
    run_mode,
    savings,
    sized,
    table,
    waves_table,
    whole_waves,
)
from benchmarks.simulated_engines import PROMPT_TOKENS, LengthLaw, identity
from benchmarks.simulated_loop import simulate
from benchmarks.simulated_run import Account, Failure, Scenario, StepRecord, account

SMALL = Scenario(
    engines=4,
    slots=16,
    prompts_per_step=16,
    group_size=8,
    train_seconds_per_token=1.6e-4,
    steps=9,
    warm_up_steps=3,
    last_steps=2,
    lengths=LengthLaw(median_tokens=1500, within_group=0.6),
)
BY_NAME = {mode.name: mode for mode in MODES}


@cache
def records_of(name: str) -> tuple[list[StepRecord], list[dict[str, float]]]:
    return simulate(run_mode(SMALL, BY_NAME[name]))


def account_of(name: str) -> Account:
    return account(records_of(name)[0], SMALL)


def check_exactly_once(records: list[StepRecord], scenario: Scenario) -> None:
    """Each step trains on its number of whole, mixed groups; no draw is trained on twice."""
    draws: Counter[int] = Counter()
    for record in records:
        assert len(record.groups) == scenario.prompts_per_step
        for group in record.groups:
            assert group.mixed
            assert len(group.responses) == scenario.group_size
            members = [response.sample_index for response in group.responses]
            assert members == list(range(scenario.group_size))
            for response in group.responses:
                draws[identity(response)] += 1
                length = response.token_ids[0]
                assert len(response.token_ids) == min(length, scenario.max_blocks)
                assert len(response.rollout_logprobs) == len(response.token_ids)
    assert len(draws) == sum(len(record.lengths) for record in records)
    assert set(draws.values()) == {1}


@pytest.mark.parametrize("name", BY_NAME)
def test_every_draw_is_trained_on_once_and_whole(name: str) -> None:
    check_exactly_once(records_of(name)[0], SMALL)


@pytest.mark.parametrize("name", BY_NAME)
def test_no_token_is_older_than_the_mode_allows(name: str) -> None:
    records, _ = records_of(name)
    ages = [age for record in records for age in record.staleness]
    assert min(ages) >= 0
    assert max(ages) <= BY_NAME[name].max_staleness


@pytest.mark.parametrize("name", set(BY_NAME) - {"reference"})
def test_what_the_scheduler_says_of_staleness_is_true(name: str) -> None:
    records, metrics = records_of(name)
    for record, told in zip(records, metrics, strict=True):
        assert told["rollout/staleness/max"] == max(record.staleness)
        mean = sum(record.staleness) / len(record.staleness)
        assert told["rollout/staleness/mean"] == pytest.approx(mean)


def test_a_mode_is_repeated_exactly() -> None:
    again, metrics = simulate(run_mode(SMALL, CONTINUE))
    assert (again, metrics) == records_of(CONTINUE.name)


def test_async_leaves_engines_less_idle_than_any_sync_mode_and_is_faster() -> None:
    sync = [account_of(mode.name) for mode in MODES if mode.rollout.get("mode", "sync") == "sync"]
    assert len(sync) == 4
    for name in ("async 1", "async 2", "async 4"):
        assert account_of(name).engines_idle < min(one.engines_idle for one in sync)
        assert account_of(name).step_seconds < min(one.step_seconds for one in sync)


def test_more_staleness_never_makes_async_slower() -> None:
    runs = [records_of(f"async {staleness}")[0] for staleness in (1, 2, 4)]
    seconds = [sum(record.seconds for record in records) for records in runs]
    assert seconds[1] < seconds[0]
    assert seconds[2] <= 1.05 * seconds[1]


def test_training_beside_sampling_is_faster_than_after_it() -> None:
    assert account_of("one step off").step_seconds < account_of("drop").step_seconds


def test_only_the_reference_throws_a_third_away() -> None:
    assert account_of("reference").wasted_share > 0.3
    for name in set(BY_NAME) - {"reference"}:
        assert account_of(name).wasted_share < 0.25, name


def test_carry_and_continue_wastes_next_to_nothing_of_a_whole_run() -> None:
    scenario = sized(0.5, share=8)
    found = outcome(scenario, CONTINUE).account
    assert found.wasted_share < 0.015
    assert found.generated_per_trained < 2.1


def test_carry_and_finish_rarely_waits_for_one_more_wave() -> None:
    scenario = dataclasses.replace(sized(0.5, share=8), steps=10, last_steps=1)
    drop, finish = (outcome(scenario, BY_NAME[name]) for name in ("drop", "carry + finish"))
    assert finish.account.step_seconds < 1.2 * drop.account.step_seconds
    assert finish.account.wasted_share < drop.account.wasted_share / 2


@pytest.mark.parametrize("name", ["drop", "carry + continue", "async 2"])
def test_64_engines_and_8192_responses_survive_deaths_hangs_and_slow_ones(name: str) -> None:
    # Short responses keep the test short; what counts here is how many there are.
    scenario = dataclasses.replace(
        sized(0.9),
        steps=1 if name == "drop" else 2,
        warm_up_steps=0,
        last_steps=0,
        lengths=LengthLaw(median_tokens=500, within_group=0.5),
        train_seconds_per_token=1e-6,
        failures=(
            *(Failure(5.0 + number, number, "death") for number in range(6)),
            *(Failure(7.0 + number, number, "hang") for number in range(10, 14)),
            *(Failure(3.0, number, "slow") for number in range(20, 30)),
        ),
    )
    records, _ = simulate(run_mode(scenario, BY_NAME[name]))
    check_exactly_once(records, scenario)
    assert sum(len(record.lengths) for record in records) == scenario.steps * 8192


def test_with_drop_the_groups_do_not_depend_on_the_engines() -> None:
    few = dataclasses.replace(SMALL, steps=4)
    other = dataclasses.replace(
        few, engines=7, slots=5, failures=(Failure(60.0, 3, "death"), Failure(9.0, 0, "slow"))
    )
    mode = BY_NAME["drop"]
    first, second = (simulate(run_mode(scenario, mode))[0] for scenario in (few, other))
    trained = [[[r.token_ids for r in g.responses] for g in one.groups] for one in first]
    assert trained == [[[r.token_ids for r in g.responses] for g in one.groups] for one in second]


def test_the_account_counts_all_tokens_and_the_time_of_the_middle() -> None:
    scenario = dataclasses.replace(
        SMALL, steps=4, warm_up_steps=1, last_steps=1, engines=1, slots=10
    )
    record = StepRecord(
        seconds=100.0,
        train_seconds=40.0,
        trained_tokens=2000,
        read_tokens=4800,
        mixed_tokens=2400,
        decoded_tokens=5000.0,
        slot_seconds=250.0,
        lengths=(500, 1500),
        staleness=(0, 2),
        groups=(),
    )
    cold = dataclasses.replace(record, seconds=1e6, decoded_tokens=9000.0, staleness=(9, 9))
    found = account([cold, record, record, cold], scenario)
    assert found.generated_per_trained == 28000 / 8000
    assert found.wasted_share == pytest.approx(1 - 2 * 8000 / 28000)
    assert found.step_seconds == 100
    assert found.engines_idle == pytest.approx(0.75)
    assert found.trainer_idle == pytest.approx(0.6)
    assert found.staleness_mean == 1
    assert found.staleness_max == 9
    assert found.staleness_histogram == {0: 0.5, 2: 0.5}


def test_what_a_run_has_sampled_is_trained_on_without_signal_or_wasted() -> None:
    for name in ("reference", "drop", "carry + continue"):
        records, _ = records_of(name)
        found = account_of(name)
        trained = sum(one.trained_tokens for one in records)
        read = sum(one.read_tokens for one in records)
        decoded = sum(one.decoded_tokens for one in records)
        assert trained <= sum(one.mixed_tokens for one in records)
        assert read <= decoded + 1
        assert 0 <= found.wasted_share < 1
    assert account_of("reference").wasted_share > 0.2


def outcomes_like(base: Account, **of_modes: Account) -> list[Outcome]:
    base = dataclasses.replace(base, staleness_max=0, length_ratio=1, wasted_share=0)
    return [
        Outcome(mode.name, 0.5, 0, of_modes.get(re.sub(r"\W", "_", mode.name), base), 1.0)
        for mode in MODES
    ]


def test_missed_bars_are_told_and_a_good_run_misses_none() -> None:
    base = dataclasses.replace(
        account_of("async 4"), staleness_max=0, length_ratio=1, wasted_share=0
    )
    reference = dataclasses.replace(base, generated_per_trained=1.51 * base.generated_per_trained)
    idle = dataclasses.replace(base, engines_idle=0.9)
    good = outcomes_like(base, reference=reference, carry___continue=idle)
    assert failures(good) == []
    assert savings(good) == [pytest.approx(1.51)]
    bad = outcomes_like(
        base,
        carry___continue=idle,
        async_2=dataclasses.replace(base, staleness_max=3, length_ratio=0.9, engines_idle=0.95),
    )
    wasteful = Outcome(CONTINUE.name, 0.9, 0, dataclasses.replace(idle, wasted_share=0.3), 1.0)
    missed = failures([*bad, wasteful])
    assert len(missed) == 5
    assert any("saves 1.000, " in line for line in missed)
    assert any("3 versions old" in line for line in missed)
    assert any("keep rate 0.9 wastes 30.0%" in line for line in missed)


def test_the_reference_stays_the_reference_in_another_process() -> None:
    quick = dataclasses.replace(SMALL, steps=2, warm_up_steps=0, last_steps=0)
    sent = pickle.loads(pickle.dumps(REFERENCE))
    records, metrics = simulate(run_mode(quick, sent))
    assert metrics == []
    assert records[0].decoded_tokens > 2.5 * records[0].trained_tokens


def test_the_table_names_every_mode() -> None:
    quick = dataclasses.replace(SMALL, steps=2, warm_up_steps=0, last_steps=0)
    outcomes = [outcome(quick, mode) for mode in (REFERENCE, Mode("mine", {"mode": "sync"}))]
    lines = table(outcomes).splitlines()
    assert lines[2].startswith("| reference |")
    assert lines[3].startswith("| mine |")
    assert len({line.count("|") for line in lines}) == 1


def test_the_report_has_a_table_for_each_keep_rate_and_the_saving() -> None:
    base = account_of("async 4")
    sweep = [Outcome(mode.name, rate, 0, base, 1.0) for rate in (0.5, 0.9) for mode in MODES]
    text = report(sweep, sweep, target=16)
    assert text.count("| carry + continue |") == 2
    assert "tokens saved at keep rate 0.5: 1.000, standard deviation 0.000 of 1 runs" in text
    assert in_words([1.0, 2.0]).startswith("1.500, standard deviation 0.707 of 2 runs, 1.000 to")


@pytest.mark.parametrize(
    ("keep_rate", "wave", "target", "tokens"),
    [
        (0.5, 3, 512, 3.0),  # 768 mixed groups of 1,536
        (0.9, 3, 512, 3.0),
        (0.2, 3, 512, 6.0),  # 307 of 512 are there after one wave
        (0.5, 1, 1, 2.0),  # until the first mixed group: geometric
        (0.25, 1, 1, 4.0),
    ],
)
def test_whole_waves_cost_what_can_be_reckoned(
    keep_rate: float, wave: int, target: int, tokens: float
) -> None:
    assert whole_waves(keep_rate, wave, target) == pytest.approx(tokens, rel=1e-3)


@pytest.mark.parametrize("wave", [1, 2])
def test_the_simulated_reference_costs_what_is_reckoned(wave: int) -> None:
    scenario = dataclasses.replace(SMALL, steps=30, warm_up_steps=0, last_steps=0)
    found = outcome(scenario, Mode("waves", wave=wave)).account
    expected = whole_waves(scenario.expected.keep_rate, wave, scenario.prompts_per_step)
    assert found.generated_per_trained == pytest.approx(expected, rel=0.08)


def test_the_table_of_waves_compares_with_what_is_not_wasted() -> None:
    lines = waves_table({0.9: 0.01}, 512).splitlines()
    assert lines[2] == ("| 0.9 | 1.11 | 2.00, 1.78x | 2.00, 1.78x | 3.00, 2.67x | 4.00, 3.56x |")


def test_prompts_of_the_simulation_have_the_length_that_engines_expect() -> None:
    assert {len(prompt.token_ids) for prompt in SMALL.prompts} == {PROMPT_TOKENS}
