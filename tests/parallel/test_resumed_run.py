"""Half a run and the other half are the whole run to the last bit: real trainer, real scheduler,
real checkpoints; tokens come from a rule instead of an engine."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import JsonValue

from megatron_dapo.checkpoint.commit import CHECKPOINTS, step_of
from megatron_dapo.checkpoint.find import find_checkpoint
from megatron_dapo.checkpoint.keeper import CheckpointKeeper
from megatron_dapo.config import RunConfig
from megatron_dapo.data.prompts import PromptSet, PromptStream
from megatron_dapo.observability.watchdog import Watchdog
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.parallel.stop import StopRequest
from megatron_dapo.policy.trained_model import SkippedUpdates
from megatron_dapo.rollout.engine import GenerationRequest, GenerationResult
from megatron_dapo.rollout.response_store import FOLDER, ResponseStore
from megatron_dapo.rollout.sampler import RolloutStep
from megatron_dapo.rollout.scheduler import GroupScheduler
from megatron_dapo.trainer import Trainer
from megatron_dapo.types import Group, Prompt, Response, Reward
from tests.parallel.crash_points import fork_and_run
from tests.parallel.policy_cases import build_policy
from tests.ranks import run_ranks
from tests.tiny_models import tiny_model

STEPS, HALF, PROMPTS, VOCAB = 20, 10, 30, 64
CLOCKS = ("timing_s/", "perf/", "rollout/tokens_per_second", "rollout/grade_seconds")
MODES: dict[str, dict[str, dict[str, str]]] = {
    "as in the paper": {},
    "carried groups": {
        "sampling": {"surplus": "carry", "unfinished": "finish"},
        "loss": {"mismatch": "tis_token"},
    },
    "one step ahead": {"rollout": {"mode": "one_step_off"}, "loss": {"mismatch": "tis_token"}},
}


def config_of(run_dir: Path, mode: Mapping[str, Mapping[str, str]]) -> RunConfig:
    tree: dict[str, Any] = {
        "run_dir": str(run_dir),
        "model": {"path": "unused", "dtype": "float32"},
        "data": {"train": "unused", "max_prompt_tokens": 8},
        "training": {"steps": STEPS, "responses_per_update": 8, "tokens_per_micro_batch": 64},
        "optimizer": {"lr": 1e-2, "warmup_steps": 12},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_response_tokens": 8},
        "reward": {"overlong_buffer_tokens": 2},
        "evaluation": {"every": 0},
        "checkpoint": {"every": 4, "asynchronous": True, "export_hf": False},
    }
    for section, keys in mode.items():
        tree[section] = {**tree.get(section, {}), **keys}
    return RunConfig.model_validate(tree)


class RuleRollouts:
    """The driver's part of a run, with tokens by the request's seed; mixed groups are common."""

    responses = 0

    def __init__(self, config: RunConfig) -> None:
        chance = random.Random(3)
        prompts = tuple(
            Prompt(
                id=str(number),
                text="",
                token_ids=tuple(chance.randrange(3, VOCAB) for _ in range(3 + number % 4)),
                answer="",
                source="rule",
            )
            for number in range(PROMPTS)
        )
        self.version = 0
        self._prompts = PromptStream(PromptSet(prompts, None), config.seed)  # type: ignore[arg-type]
        self._loop = asyncio.Runner()
        self._store = ResponseStore(config.run_dir / FOLDER, config.rollout.logprobs)
        self._scheduler = GroupScheduler(
            self._generate,
            self._prompts,
            self._graded,
            config.rollout,
            config.sampling,
            interrupt=self._nothing,
            seed=config.seed,
            stop_token_ids=[2],
            capacity=lambda: 64,
            last_step=config.training.steps,
        )

    def collect(self, step: int, policy_version: int) -> RolloutStep:
        rollout = self._loop.run(self._scheduler.collect(step, policy_version))
        rollout.metrics["data/epoch"] = float(self._prompts.epoch)
        return rollout

    def serve(self, version: int) -> None:
        """What an update of engines comes after, and what it changes."""
        self._loop.run(self._scheduler.drain())
        self.version = version
        self._loop.run(self._store.serve(version, [{"all": f"of version {version}"}]))

    def forget_responses_before(self, policy_version: int) -> None:
        self._store.forget_before(policy_version)

    def state_dict(self) -> dict[str, JsonValue]:
        self._loop.run(self._scheduler.settle())
        state = self.snapshot()()
        self._scheduler.go_on()
        return state

    def snapshot(self) -> Callable[[], dict[str, JsonValue]]:
        prompts, sampling = self._prompts.state_dict(), self._scheduler.state_dict()
        return lambda: {"prompts": dict(prompts), "sampling": sampling}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._prompts.load_state_dict(state["prompts"])
        self._scheduler.load_state_dict(state["sampling"])

    def interrupt(self) -> None:
        """Nothing runs between two calls."""

    def close(self) -> None:
        self._loop.run(self._scheduler.close())
        self._loop.close()
        self._store.close()

    async def _nothing(self) -> None:
        """No request of ours waits."""

    async def _generate(self, request: GenerationRequest) -> GenerationResult:
        return await self._store.sampled(request, self._sampled)

    async def _sampled(self, request: GenerationRequest) -> GenerationResult:
        chance = random.Random(request.seed)
        for _ in range(chance.randrange(3)):
            await asyncio.sleep(0)
        count = chance.randrange(2, request.max_tokens)
        tokens = (*(chance.randrange(3, VOCAB) for _ in range(count - 1)), 2)
        return GenerationResult(
            token_ids=tokens,
            logprobs=tuple(-4.0 - chance.random() / 8 for _ in tokens),
            finish_reason="stop",
            version_spans=((0, self.version),),
            policy_version=self.version,
        )

    async def _graded(self, prompt: Prompt, response: Response) -> tuple[Response, Reward]:
        right = float(sum(response.token_ids) % 3 == 0)
        return response, Reward(right, 2 * right - 1)


@dataclass
class Records:
    """Metrics by step; may ask to stop."""

    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    stop_after: int | None = None
    stop: StopRequest = field(default_factory=StopRequest)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        kept = {name: value for name, value in metrics.items() if not name.startswith(CLOCKS)}
        self.steps[step] = kept
        if step == self.stop_after:
            self.stop.set()

    def log_samples(self, step: int, groups: Sequence[Group]) -> None:
        """Metrics tell runs apart."""

    def finish(self) -> None:
        """Nothing to draw."""


class RuleTrainer(Trainer):
    """A trainer whose weights go nowhere."""

    def sync_weights(self) -> dict[str, float]:
        self.rollouts.serve(self.policy_version)  # type: ignore[union-attr]
        return {}


def train(config: RunConfig, records: Records) -> tuple[int, torch.Tensor]:
    """Go on to `training.steps`: the step that it began behind, and the weights at the end."""
    parallel = ParallelContext.create(config.parallel, seed=config.seed)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": VOCAB}
    model = tiny_model("qwen2", layers=1, num_attention_heads=2, **sizes)
    policy = build_policy(config, model, parallel)
    checkpoints = config.run_dir / CHECKPOINTS
    found = find_checkpoint(checkpoints, parallel.control_group)
    rollouts = RuleRollouts(config)
    keeper = CheckpointKeeper(
        checkpoints, config.checkpoint, parallel, policy.chunks, policy.optimizer
    )
    trainer = RuleTrainer(
        config=config,
        hf_config=model.config,
        parallel=parallel,
        policy=policy,
        critic=None,
        bridge=None,  # type: ignore[arg-type]
        rollouts=rollouts,  # type: ignore[arg-type]
        sinks=records,  # type: ignore[arg-type]
        skipped=SkippedUpdates(3),
        watchdog=Watchdog(Path(tempfile.mkdtemp()), 0, 1, 0),
        checkpoints=keeper,
        start_from=found,
        stop=records.stop,
    )
    assert trainer.run() == (records.stop_after is None)
    rollouts.close()
    keeper.close()
    weights = [p.detach().flatten() for chunk in policy.chunks for p in chunk.parameters()]
    end = torch.cat(weights).clone()
    parallel.destroy()
    return 0 if found is None else step_of(found), end


def _halves_are_the_whole(rank: int, world: int, root: Path) -> None:
    for name, mode in MODES.items():
        straight, first, second = Records(), Records(stop_after=HALF), Records()
        _, wanted = train(config_of(root / name / "straight", mode), straight)
        _, middle = train(config_of(root / name / "halves", mode), first)
        began, end = train(config_of(root / name / "halves", mode), second)
        assert began == HALF
        halves = Records(first.steps | second.steps)
        assert [*halves.steps] == [*straight.steps] == [*range(1, STEPS + 1)]
        for step, metrics in straight.steps.items():
            assert len(metrics) > 30
            assert halves.steps[step] == metrics, (name, step, _differing(halves, straight, step))
        assert torch.equal(end, wanted), name
        assert not torch.equal(end, middle)
        epochs = [straight.steps[step]["data/epoch"] for step in (1, HALF, STEPS)]
        assert epochs[0] < epochs[1] < epochs[2], "no epoch ended on either side"
        if name == "carried groups":
            assert straight.steps[HALF]["filter/carried_out"] > 0
        if name == "one step ahead":
            assert straight.steps[HALF + 1]["rollout/staleness/max"] == 1
    assert dist.get_world_size() == 1


def _differing(here: Records, there: Records, step: int) -> dict[str, tuple[object, object]]:
    names = here.steps[step].keys() | there.steps[step].keys()
    pairs = {n: (here.steps[step].get(n), there.steps[step].get(n)) for n in sorted(names)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def test_ten_steps_and_ten_more_are_twenty_to_the_last_bit(tmp_path: Path) -> None:
    run_ranks(1, _halves_are_the_whole, tmp_path)


def _live(run_dir: Path, mode: str, weights: Path) -> None:
    """One process life of a run, in a forked process; its weights where it comes to the end."""
    logging.disable()
    store = run_dir.with_suffix(".store")
    store.unlink(missing_ok=True)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    _, end = train(config_of(run_dir, MODES[mode]), Records())
    torch.save(end, weights)


def _killed_after(seconds: float, run_dir: Path, mode: str, weights: Path) -> bool:
    """A process life that is killed; False: it had ended before."""
    child = os.fork()
    if child == 0:
        try:
            _live(run_dir, mode, weights)
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize(
    "kills", [2, pytest.param(30, marks=[pytest.mark.faults, pytest.mark.slow])]
)
def test_a_run_killed_at_any_time_ends_with_the_same_weights(tmp_path: Path, kills: int) -> None:
    mode, chance = "carried groups", random.Random(11)
    wanted = tmp_path / "wanted.pt"
    started = time.monotonic()
    assert fork_and_run(lambda: _live(tmp_path / "straight", mode, wanted))() == 0
    seconds = time.monotonic() - started
    for number in range(kills):
        run_dir, weights = tmp_path / f"run{number}", tmp_path / f"run{number}.pt"
        while not _killed_after(chance.uniform(0.1 * seconds, seconds), run_dir, mode, weights):
            seconds /= 2  # the machine has become faster
            shutil.rmtree(run_dir)
        assert fork_and_run(lambda r=run_dir, w=weights: _live(r, mode, w))() == 0
        assert torch.equal(torch.load(weights), torch.load(wanted)), number
        left = [path.name for path in (run_dir / CHECKPOINTS).glob(".*")]
        assert left == [], number
