"""What each way of scheduling rollouts costs, on simulated engines: tokens, idle time, staleness.

    python -m benchmarks.rollout_modes [--out build/benchmarks] [--share 8]

The product's scheduler fills steps of 512 groups of 16 responses from 64 engines, in each of its
modes and at several keep rates; `reference` is the published recipe (whole waves of three times
512 prompts, surplus groups discarded). Time is simulated, so every figure is exact and the same on
any machine. Writes rollout_modes.json and rollout_modes.png, and prints Markdown. Exit status 1: a
bar of `failures` is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.rollout_modes_plot import draw
from benchmarks.simulated_engines import decode, grade
from benchmarks.simulated_loop import simulate
from benchmarks.simulated_run import (
    Account,
    Brought,
    ReferenceSampler,
    Scenario,
    SimulatedFleet,
    StepRecord,
    account,
    train,
)
from megatron_dapo.config.schema import RolloutConfig, SamplingConfig
from megatron_dapo.data.prompts import PromptSet, PromptStream
from megatron_dapo.data.selection import PromptReport
from megatron_dapo.rollout.scheduler import GroupScheduler
from megatron_dapo.types import Prompt, Response, Reward

KEEP_RATES = (0.2, 0.35, 0.5, 0.7, 0.9)
MAIN_RATE = 0.5
SEEDS = 10
"""Runs of `reference` and `carry + continue` at the main keep rate; all else runs once."""
STOP_TOKEN_IDS = (2,)
MOST_WASTED = 0.01
"""Share of tokens that carry + continue may waste, at any keep rate."""
LEAST_SAVING = 1.5
"""Tokens a trained token, reference over carry + continue, at a keep rate of a half. It is also the
most that there is: a wave of three targets, over the two that half a keep rate costs. So it is held
to, less what may be wasted, and what chance does to the runs."""

MOST_BIAS = 0.05
"""How far the mean length of trained responses may be from that of all worth training on."""
WAVES = (1, 2, 3, 4)
NEVER = 1e-9
"""A chance that is none."""

Metrics = dict[str, float]


@dataclass(frozen=True)
class Mode:
    """A way to schedule rollouts."""

    name: str
    rollout: Mapping[str, object] = field(default_factory=dict)
    sampling: Mapping[str, object] = field(default_factory=dict)
    wave: int | None = None
    """Of the reference: prompts of a wave, in targets."""

    @property
    def asynchronous(self) -> bool:
        return self.rollout.get("mode") == "async"

    @property
    def max_staleness(self) -> int:
        """Versions that a trained token may be old."""
        if self.asynchronous:
            return int(str(self.rollout["max_staleness"]))
        carries = self.sampling.get("surplus") == "carry"
        return int(carries or self.rollout.get("mode") == "one_step_off")


REFERENCE = Mode("reference", wave=3)
CONTINUE = Mode("carry + continue", sampling={"surplus": "carry", "unfinished": "continue"})
MODES = (
    REFERENCE,
    Mode("drop", rollout={"mode": "sync"}),
    Mode("carry + finish", sampling={"surplus": "carry", "unfinished": "finish"}),
    CONTINUE,
    Mode("one step off", rollout={"mode": "one_step_off"}),
    *(
        Mode(
            f"async {staleness}",
            rollout={"mode": "async", "max_staleness": staleness},
            sampling={"surplus": "carry", "unfinished": "continue"},
        )
        for staleness in (1, 2, 4)
    ),
)


@dataclass(frozen=True)
class Outcome:
    """What a mode came to at one keep rate."""

    mode: str
    keep_rate: float
    seed: int
    account: Account
    cpu_seconds: float


def prompt_stream(prompts: tuple[Prompt, ...], seed: int) -> PromptStream:
    """The product's order of prompts that come from no file."""
    report = PromptReport(
        path=Path("simulated"),
        rows=len(prompts),
        kept=len(prompts),
        max_prompt_tokens=len(prompts[0].token_ids),
        bad=(),
        duplicate_lines=(),
        contradictions=(),
        deduplicated=False,
        overlong_lines=(),
        overlong_dropped=False,
        text_answer_lines=(),
    )
    return PromptStream(PromptSet(prompts, report), seed)


async def simulated_grader(prompt: Prompt, response: Response) -> tuple[Response, Reward]:
    """Text and reward of a complete response, in no time."""
    decoded = dataclasses.replace(response, text=decode(response.token_ids))
    return decoded, grade(prompt, decoded)


class ProductSampler:
    """`GroupScheduler` on a simulated fleet."""

    def __init__(self, scenario: Scenario, mode: Mode, fleet: SimulatedFleet) -> None:
        rollout = RolloutConfig(
            prompts_per_step=scenario.prompts_per_step,
            group_size=scenario.group_size,
            max_response_tokens=scenario.max_blocks,
            max_concurrent_sequences=scenario.slots,
            engines=scenario.engines,
            **mode.rollout,  # type: ignore[arg-type]
        )
        self.stream = prompt_stream(scenario.prompts, scenario.seed)
        self.metrics: list[Metrics] = []
        self.scheduler = GroupScheduler(
            fleet.generate,
            self.stream,
            simulated_grader,
            rollout,
            SamplingConfig(**mode.sampling),  # type: ignore[arg-type]
            interrupt=fleet.interrupt,
            seed=scenario.seed,
            stop_token_ids=STOP_TOKEN_IDS,
            capacity=fleet.capacity,
            last_step=scenario.steps,
        )

    async def collect(self, step: int, policy_version: int) -> Brought:
        rollout = await self.scheduler.collect(step, policy_version)
        self.metrics.append(rollout.metrics)
        return Brought(rollout.groups, rollout.generated)


async def run_mode(scenario: Scenario, mode: Mode) -> tuple[list[StepRecord], list[Metrics]]:
    """All steps of a run, and what the scheduler itself says of them ([] for the reference)."""
    fleet = SimulatedFleet(scenario, keep_in_flight=mode.asynchronous)
    try:
        if mode.wave is not None:
            take = prompt_stream(scenario.prompts, scenario.seed).take
            reference = ReferenceSampler(scenario, fleet.generate, take, mode.wave)
            return await train(reference, fleet, scenario), []
        product = ProductSampler(scenario, mode, fleet)
        drain = None if mode.asynchronous else product.scheduler.drain
        try:
            records = await train(product, fleet, scenario, drain)
        finally:
            await product.scheduler.close()
        return records, product.metrics
    finally:
        await fleet.close()


def outcome(scenario: Scenario, mode: Mode) -> Outcome:
    """One mode, simulated."""
    gc.set_threshold(100_000, 20, 20)  # a million objects live at a time, and few are garbage
    started = time.process_time()
    records, _ = simulate(run_mode(scenario, mode))
    figures = account(records, scenario)
    seconds = time.process_time() - started
    return Outcome(mode.name, scenario.keep_rate, scenario.seed, figures, seconds)


def scenario_figures(scenario: Scenario) -> dict[str, object]:
    """What was simulated, for the record."""
    return dataclasses.asdict(scenario) | {
        "expected": dataclasses.asdict(scenario.expected),
        "prompts": len(scenario.prompts),
    }


def table(outcomes: Sequence[Outcome]) -> str:
    """The figures of one keep rate, as Markdown."""
    base = outcomes[0].account
    lines = [
        "| mode | tokens / trained | x fewer | wasted | step, s | x faster | engines idle | "
        "trainer idle | length | staleness mean, max |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        a = one.account
        lines.append(
            f"| {one.mode} | {a.generated_per_trained:.2f} "
            f"| {base.generated_per_trained / a.generated_per_trained:.2f} "
            f"| {a.wasted_share:.1%} | {a.step_seconds:.0f} "
            f"| {base.step_seconds / a.step_seconds:.2f} | {a.engines_idle:.0%} "
            f"| {a.trainer_idle:.0%} | {a.length_ratio:.3f} "
            f"| {a.staleness_mean:.2f}, {a.staleness_max} |"
        )
    return "\n".join(lines)


def savings(outcomes: Sequence[Outcome]) -> list[float]:
    """Tokens a trained token, reference over carry + continue, seed by seed, at the main rate."""
    tokens = {
        (one.mode, one.seed): one.account.generated_per_trained
        for one in outcomes
        if one.keep_rate == MAIN_RATE
    }
    return [
        found / tokens[CONTINUE.name, seed]
        for (mode, seed), found in tokens.items()
        if mode == REFERENCE.name
    ]


def by_chance(values: Sequence[float]) -> float:
    """Two standard errors of the mean: prompts and lengths are drawn anew for each run."""
    return 2 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def in_words(values: Sequence[float]) -> str:
    """Mean, spread and range of the savings."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return (
        f"{statistics.fmean(values):.3f}, standard deviation {spread:.3f} of {len(values)} runs, "
        f"{min(values):.3f} to {max(values):.3f}"
    )


def whole_waves(keep_rate: float, wave: int, target: int) -> float:
    """Tokens that the reference samples for a trained one, to be expected: no simulation.

    Lengths have nothing to do with the answer, so tokens are as groups, and a step takes another
    wave as long as the waves before have brought fewer than `target` mixed groups.

    Args:
        wave: prompts of a wave, in targets.
        target: prompts of a step.
    """
    log_keep, log_drop = math.log(keep_rate), math.log1p(-keep_rate)
    expected, prompts = 0.0, 0
    while True:
        short = math.fsum(
            math.exp(
                math.lgamma(prompts + 1)
                - math.lgamma(mixed + 1)
                - math.lgamma(prompts - mixed + 1)
                + mixed * log_keep
                + (prompts - mixed) * log_drop
            )
            for mixed in range(min(target, prompts + 1))
        )
        if short < NEVER:
            return wave * expected
        expected += short
        prompts += wave * target


def waves_table(wasted: Mapping[float, float], target: int) -> str:
    """What a reference with other waves costs, and over that of carry + continue, as Markdown.

    Args:
        wasted: keep rate -> share of tokens that carry + continue wastes there.
    """
    heads = " | ".join(f"waves of {wave} x" for wave in WAVES)
    lines = [f"| keep rate | no waste | {heads} |", "|---|---|" + "---|" * len(WAVES)]
    for rate, share in wasted.items():
        costs = [whole_waves(rate, wave, target) for wave in WAVES]
        cells = " | ".join(f"{cost:.2f}, {cost * rate * (1 - share):.2f}x" for cost in costs)
        lines.append(f"| {rate} | {1 / rate:.2f} | {cells} |")
    return "\n".join(lines)


def failures(outcomes: Sequence[Outcome]) -> list[str]:
    """Which bars are missed."""
    found = []
    most = {mode.name: mode.max_staleness for mode in MODES}
    for one in outcomes:
        a, where = one.account, f"{one.mode} at keep rate {one.keep_rate}"
        if a.staleness_max > most[one.mode]:
            found.append(f"{where} trains on tokens that are {a.staleness_max} versions old")
        if abs(a.length_ratio - 1) > MOST_BIAS:
            found.append(f"{where} trains on responses of {a.length_ratio:.3f} x the length")
        if one.mode == CONTINUE.name and a.wasted_share > MOST_WASTED:
            found.append(f"{where} wastes {a.wasted_share:.1%} of its tokens")
    saved = savings(outcomes)
    if statistics.fmean(saved) + by_chance(saved) < LEAST_SAVING * (1 - MOST_WASTED):
        found.append(f"{CONTINUE.name} saves {in_words(saved)}; not {LEAST_SAVING}x")
    idle = {one.mode: one.account.engines_idle for one in outcomes if one.keep_rate == MAIN_RATE}
    for mode in MODES:
        if mode.asynchronous and idle[mode.name] >= idle[CONTINUE.name]:
            found.append(f"{mode.name} leaves engines idle for {idle[mode.name]:.0%}")
    return found


def sized(keep_rate: float, *, share: int = 1, seed: int = 0) -> Scenario:
    """64 engines and 8,192 responses a step; or one part in `share` of everything, trainer too."""
    whole = Scenario()
    return dataclasses.replace(
        whole,
        engines=whole.engines // share,
        prompts_per_step=whole.prompts_per_step // share,
        train_seconds_per_token=share * whole.train_seconds_per_token,
        keep_rate=keep_rate,
        seed=seed,
    )


def outcomes_of(jobs: Sequence[tuple[Scenario, Mode]]) -> list[Outcome]:
    """Each on a core of its own, as far as there are any; told as soon as it is there."""
    context = multiprocessing.get_context("spawn")
    found = []
    with ProcessPoolExecutor(mp_context=context) as pool:
        for one in pool.map(outcome, *zip(*jobs, strict=True)):
            sys.stderr.write(f"{one}\n")
            found.append(one)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--share", type=int, default=1, help="one part in so many of the size")
    arguments = parser.parse_args()
    out, share = arguments.out, arguments.share
    jobs = [(sized(rate, share=share), mode) for rate in KEEP_RATES for mode in MODES]
    jobs += [
        (sized(MAIN_RATE, share=share, seed=seed), mode)
        for seed in range(1, SEEDS)
        for mode in (REFERENCE, CONTINUE)
    ]
    found = outcomes_of(jobs)
    sweep = found[: len(KEEP_RATES) * len(MODES)]
    out.mkdir(parents=True, exist_ok=True)
    figures = {
        "scenario": scenario_figures(sized(MAIN_RATE, share=share)),
        "outcomes": [dataclasses.asdict(one) for one in found],
    }
    (out / "rollout_modes.json").write_text(json.dumps(figures, indent=1) + "\n")
    main_rows = [one for one in sweep if one.keep_rate == MAIN_RATE]
    draw(main_rows, sweep, out / "rollout_modes.png")
    missed = failures(found)
    sys.stdout.write(report(found, sweep, sized(MAIN_RATE, share=share).prompts_per_step))
    seconds = math.fsum(one.cpu_seconds for one in found)
    sys.stdout.write(f"\nwritten to {out}; {seconds:.0f} CPU seconds\n")
    sys.stdout.writelines(f"MISSED: {line}\n" for line in missed)
    return 1 if missed else 0


def report(found: Sequence[Outcome], sweep: Sequence[Outcome], target: int) -> str:
    """Everything that was found, as Markdown."""
    text = []
    for first in range(0, len(sweep), len(MODES)):
        rows = sweep[first : first + len(MODES)]
        text.append(f"keep rate {rows[0].keep_rate}\n\n{table(rows)}\n\n")
    wasted = {one.keep_rate: one.account.wasted_share for one in sweep if one.mode == CONTINUE.name}
    text.append(f"whole waves of other sizes\n\n{waves_table(wasted, target)}\n\n")
    text.append(f"tokens saved at keep rate {MAIN_RATE}: {in_words(savings(found))}\n")
    return "".join(text)


if __name__ == "__main__":
    sys.exit(main())
