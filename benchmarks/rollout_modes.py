"""What each way of scheduling rollouts costs, on simulated engines: tokens, idle time, staleness.

    python -m benchmarks.rollout_modes [--out build/benchmarks]

The product's scheduler fills steps of 512 groups of 16 responses from 64 engines, in each of its
modes; `reference` is the published recipe (whole waves of three times 512 prompts, surplus groups
discarded). Time is simulated, so every figure is exact and the same on any machine. The sweep over
keep rates runs at an eighth of the size. Writes rollout_modes.json and rollout_modes.png. Exit
status 1: a bar of `failures` is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import multiprocessing
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
from megatron_dapo.types import Group, Prompt, Response, Reward

KEEP_RATES = (0.2, 0.35, 0.9)
MAIN_RATE = 0.5
SWEEP_SHARE = 8
STOP_TOKEN_IDS = (2,)
LEAST_SAVING = 1.5
"""Tokens a trained token, reference over carry + continue, at a keep rate of a half."""
ROUNDING = 0.02
"""The saving can at best be 3 x keep rate = 1.5: what chance does to that is allowed."""

Metrics = dict[str, float]


@dataclass(frozen=True)
class Mode:
    """A way to schedule rollouts. Without any settings it is the reference."""

    name: str
    rollout: Mapping[str, object] = field(default_factory=dict)
    sampling: Mapping[str, object] = field(default_factory=dict)

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


REFERENCE = Mode("reference")
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
        )

    async def collect(self, step: int, policy_version: int) -> Sequence[Group]:
        rollout = await self.scheduler.collect(step, policy_version)
        self.metrics.append(rollout.metrics)
        return rollout.groups


async def run_mode(scenario: Scenario, mode: Mode) -> tuple[list[StepRecord], list[Metrics]]:
    """All steps of a run, and what the scheduler itself says of them ([] for the reference)."""
    fleet = SimulatedFleet(scenario, keep_in_flight=mode.asynchronous)
    try:
        if mode == REFERENCE:
            take = prompt_stream(scenario.prompts, scenario.seed).take
            reference = ReferenceSampler(scenario, fleet.generate, take)
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
    return Outcome(mode.name, scenario.keep_rate, figures, time.process_time() - started)


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


def failures(outcomes: Mapping[str, Account]) -> list[str]:
    """Which bars are missed at the main keep rate."""
    found = []
    saving = (
        outcomes[REFERENCE.name].generated_per_trained
        / outcomes[CONTINUE.name].generated_per_trained
    )
    if saving < LEAST_SAVING - ROUNDING:
        found.append(f"{CONTINUE.name} saves {saving:.3f}x of the tokens, not {LEAST_SAVING}x")
    for mode in MODES:
        a = outcomes[mode.name]
        if a.staleness_max > mode.max_staleness:
            found.append(f"{mode.name} trains on tokens that are {a.staleness_max} versions old")
        if mode.asynchronous and a.engines_idle >= outcomes[CONTINUE.name].engines_idle:
            found.append(f"{mode.name} leaves engines idle for {a.engines_idle:.0%}")
        if abs(a.length_ratio - 1) > 0.05:
            found.append(f"{mode.name} trains on responses of {a.length_ratio:.3f} x the length")
    return found


def sized(keep_rate: float, *, share: int = 1) -> Scenario:
    """64 engines and 8,192 responses a step; or one part in `share` of everything, trainer too."""
    whole = Scenario()
    return dataclasses.replace(
        whole,
        engines=whole.engines // share,
        prompts_per_step=whole.prompts_per_step // share,
        train_seconds_per_token=share * whole.train_seconds_per_token,
        keep_rate=keep_rate,
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
    out = parser.parse_args().out
    jobs = [(sized(MAIN_RATE), mode) for mode in MODES]
    jobs += [(sized(rate, share=SWEEP_SHARE), mode) for rate in KEEP_RATES for mode in MODES]
    found = outcomes_of(jobs)
    whole, sweep = found[: len(MODES)], found[len(MODES) :]
    sys.stdout.write(f"keep rate {MAIN_RATE}, 64 engines, 8,192 responses\n{table(whole)}\n")
    for first in range(0, len(sweep), len(MODES)):
        rows = sweep[first : first + len(MODES)]
        sys.stdout.write(
            f"\nkeep rate {rows[0].keep_rate}, 1/{SWEEP_SHARE} of the size\n{table(rows)}\n"
        )
    out.mkdir(parents=True, exist_ok=True)
    figures = {
        "scenario": scenario_figures(sized(MAIN_RATE)),
        "sweep_share": SWEEP_SHARE,
        "main": [dataclasses.asdict(one) for one in whole],
        "sweep": [dataclasses.asdict(one) for one in sweep],
    }
    (out / "rollout_modes.json").write_text(json.dumps(figures, indent=1) + "\n")
    draw(whole, [*whole, *sweep], out / "rollout_modes.png")
    seconds = math.fsum(one.cpu_seconds for one in found)
    sys.stdout.write(f"\nwritten to {out}; {seconds:.0f} CPU seconds\n")
    missed = failures({one.mode: one.account for one in whole})
    sys.stdout.writelines(f"MISSED: {line}\n" for line in missed)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
