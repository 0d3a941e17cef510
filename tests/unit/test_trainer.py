"""The order of a run, without ranks: what is done before, between and after the steps."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import JsonValue

from megatron_dapo import trainer as trainer_module
from megatron_dapo.checkpoint.state import Restored
from megatron_dapo.config.errors import RunFailed
from megatron_dapo.observability.watchdog import Watchdog
from megatron_dapo.parallel.stop import SIGNALS, StopRequest
from megatron_dapo.policy.trained_model import SkippedUpdates
from megatron_dapo.reward.grade import NOT_GRADED
from megatron_dapo.rollout.engine import EngineError, EngineUnavailable
from megatron_dapo.rollout.event_loop import Interrupted
from megatron_dapo.trainer import Trainer, steps_to_run
from megatron_dapo.types import Group, Prompt, Response, Reward
from tests.unit.config.runs import make_config
from tests.unit.conftest import Alone
from tests.unit.handed import Case, handed_cases

STEPS = 4


@dataclass
class Diary(Trainer):
    """A trainer whose parts only note that they were called."""

    start: int = 0
    stop_at: int | None = None
    interrupted_at: int | None = None
    evaluation_due_at: int | None = None
    owes: bool = False
    notes: list[str] = field(default_factory=list)
    must_succeed: list[bool] = field(default_factory=list)
    failing_save: int | None = None

    @property
    def under_way(self) -> list[int]:
        checkpoints = self.checkpoints
        assert isinstance(checkpoints, InBackground)
        return checkpoints.under_way

    def resume(self) -> int:
        self.owed = self.owes
        self.checkpoints.saved_step = self.start
        return self.start

    def sync_weights(self) -> dict[str, float]:
        self.notes.append("sync")
        return {}

    def evaluate(self, step: int) -> dict[str, float]:
        self.notes.append(f"evaluate {step}")
        return {}

    def step(self, step: int) -> bool:
        if step == self.interrupted_at:
            self.stop.set()
            return False
        self.notes.append(f"step {step}")
        if step == self.stop_at:
            self.stop.set()
            self.owed = step == self.evaluation_due_at
        return True

    def save(
        self,
        step: int,
        state: Mapping[str, JsonValue] | None = None,
        *,
        must_succeed: bool = False,
    ) -> None:
        self.notes.append(f"save {step}" + (" as before" if state is not None else ""))
        if must_succeed or step != self.failing_save:
            self.under_way.append(step)
        if must_succeed:
            self.checkpoints.settle(wait=True)
        self.must_succeed.append(must_succeed)

    def finish(self) -> None:
        self.notes.append("finish")


@dataclass
class InBackground:
    """Checkpoints that are complete once someone has waited for them."""

    saved_step: int = 0
    under_way: list[int] = field(default_factory=list)

    def settle(self, *, wait: bool) -> None:
        assert wait, "a run that says it has saved must have"
        self.saved_step = max([self.saved_step, *self.under_way])
        self.under_way.clear()


def diary(
    alone: Alone, *, every: int, start: int = 0, stop_at: int | None = None, **more: int | bool
) -> Diary:
    config = make_config(
        training={"steps": STEPS}, checkpoint={"every": every}, evaluation={"every": 2}
    )
    rest = dict.fromkeys(
        ("hf_config", "policy", "critic", "bridge", "rollouts", "sinks", "skipped", "start_from")
    )
    return Diary(
        checkpoints=InBackground(),  # type: ignore[arg-type]
        config=config,
        watchdog=Watchdog(Path(tempfile.mkdtemp()), 0, 1, 0),
        parallel=alone,  # type: ignore[arg-type]
        stop=StopRequest(),
        start=start,
        stop_at=stop_at,
        **more,  # type: ignore[arg-type]
        **rest,  # type: ignore[arg-type]
    )


def test_a_fresh_run_pushes_weights_and_evaluates_before_its_first_step(alone: Alone) -> None:
    trainer = diary(alone, every=2)
    assert trainer.run()
    steps = ["step 1", "step 2", "save 2", "step 3", "step 4", "save 4"]
    assert trainer.notes == ["sync", "evaluate 0", *steps, "finish"]


def test_the_last_step_is_saved_whatever_the_interval(alone: Alone) -> None:
    for every in (0, 3):
        trainer = diary(alone, every=every)
        assert trainer.run()
        assert [note for note in trainer.notes if "save" in note][-1] == f"save {STEPS}"
        assert trainer.notes[-1] == "finish"


def test_a_resumed_run_pushes_its_weights_and_does_not_evaluate_again(alone: Alone) -> None:
    trainer = diary(alone, every=0, start=2)
    assert trainer.run()
    assert trainer.notes == ["sync", "step 3", "step 4", "save 4", "finish"]


def test_a_run_stopped_after_its_last_checkpoint_only_exports(alone: Alone) -> None:
    trainer = diary(alone, every=0, start=STEPS)
    assert trainer.run()
    assert trainer.notes == ["finish"]


@pytest.mark.parametrize("case", handed_cases("j", "steps_to_run"))
def test_steps_to_run_of_handed_cases(alone: Alone, case: Case) -> None:
    given = case["input"]
    assert [*steps_to_run(given["restored_step"], given["target_steps"])] == case["expect"]["steps"]
    trainer = diary(alone, every=0, start=given["restored_step"])
    training = trainer.config.training.model_copy(update={"steps": given["target_steps"]})
    trainer.config = trainer.config.model_copy(update={"training": training})
    assert trainer.run()
    ran = [note for note in trainer.notes if note.startswith("step")]
    assert ran == [f"step {step}" for step in case["expect"]["steps"]]


def test_a_save_that_the_run_answers_for_must_succeed(alone: Alone) -> None:
    trainer = diary(alone, every=2)
    assert trainer.run()
    assert trainer.must_succeed == [False, True]  # step 2, and the last one
    trainer = diary(alone, every=1, stop_at=2)
    assert not trainer.run()
    assert trainer.must_succeed == [False, True]  # step 1, and the one it stopped with


def test_a_run_asked_to_stop_saves_first_and_is_not_finished(alone: Alone) -> None:
    trainer = diary(alone, every=0, stop_at=2)
    assert not trainer.run()
    assert trainer.notes[-2:] == ["step 2", "save 2"]


def test_a_run_asked_to_stop_in_its_last_step_finishes(alone: Alone) -> None:
    trainer = diary(alone, every=0, stop_at=STEPS)
    assert trainer.run()
    assert trainer.notes[-2:] == [f"save {STEPS}", "finish"]


def test_a_step_that_is_interrupted_before_its_updates_saves_the_one_before(alone: Alone) -> None:
    trainer = diary(alone, every=0, interrupted_at=3)
    assert not trainer.run()
    assert trainer.notes[-2:] == ["step 2", "save 2 as before"]


def test_a_step_that_is_saved_already_is_not_saved_again(alone: Alone) -> None:
    trainer = diary(alone, every=2, interrupted_at=3)
    assert not trainer.run()
    assert trainer.notes[-2:] == ["step 2", "save 2"]


@pytest.mark.parametrize("stop", [{"interrupted_at": 3}, {"stop_at": 3}], ids=["in", "after"])
def test_a_step_whose_save_failed_is_saved_again_by_a_stop(
    alone: Alone, stop: dict[str, int]
) -> None:
    """With checkpoint.on_failure=continue."""
    trainer = diary(alone, every=2, failing_save=2, **stop)
    assert not trainer.run()
    (saved,) = [note for note in trainer.notes if note.startswith("save") and note != "save 2"]
    assert saved == ("save 2 as before" if "interrupted_at" in stop else "save 3")
    assert trainer.must_succeed == [False, True]


def test_a_run_that_is_interrupted_before_any_update_saves_nothing(alone: Alone) -> None:
    trainer = diary(alone, every=1, interrupted_at=1)
    assert not trainer.run()
    assert trainer.notes == ["sync", "evaluate 0"]


def test_an_evaluation_that_a_stop_cut_short_is_made_up_for(alone: Alone) -> None:
    trainer = diary(alone, every=0, stop_at=2, evaluation_due_at=2)
    assert not trainer.run()
    again = diary(alone, every=0, start=2, owes=True)
    assert again.run()
    assert again.notes[:3] == ["sync", "evaluate 2", "step 3"]
    assert not again.owed


def test_the_last_step_is_evaluated_before_the_run_is_finished(alone: Alone) -> None:
    trainer = diary(alone, every=0, stop_at=STEPS, evaluation_due_at=STEPS)
    assert not trainer.run()
    assert trainer.notes[-1] == f"save {STEPS}"
    again = diary(alone, every=0, start=STEPS, owes=True)
    assert again.run()
    assert again.notes == ["sync", f"evaluate {STEPS}", "finish"]


@dataclass
class Kept:
    """Checkpoints in memory, as JSON carries them."""

    states: dict[int, str] = field(default_factory=dict)
    saved_step: int = 0

    def save(self, step: int, state: object, *, metrics: object, must_succeed: bool) -> None:
        self.states[step] = json.dumps(state)

    def restore(self, checkpoint: Path) -> tuple[Restored, bool]:
        step = int(checkpoint.name)
        return Restored(step, json.loads(self.states[step]), random_states=True), True


@dataclass
class Position:
    """Rollouts whose state is one number."""

    at: int

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.at = state["at"]


def remembering(kept: Kept, *, at: int, start_from: Path | None) -> Trainer:
    rest = dict.fromkeys(("hf_config", "parallel", "policy", "critic", "bridge", "sinks"))
    return Trainer(
        config=make_config(),
        rollouts=Position(at),  # type: ignore[arg-type]
        skipped=SkippedUpdates(3),
        watchdog=Watchdog(Path(tempfile.mkdtemp()), 0, 1, 0),
        checkpoints=kept,  # type: ignore[arg-type]
        start_from=start_from,
        **rest,  # type: ignore[arg-type]
    )


def test_rollouts_counters_and_what_is_owed_come_back() -> None:
    kept = Kept()
    before = remembering(kept, at=17, start_from=None)
    assert before.resume() == 0
    before.owed = True
    before.skipped.in_a_row["actor"] = 2
    before.save(5)
    after = remembering(kept, at=0, start_from=Path("5"))
    assert after.resume() == 5
    assert (after.rollouts, after.owed) == (Position(17), True)
    assert after.skipped.in_a_row == {"actor": 2}
    assert after.policy_version == 5


def test_an_export_without_room_says_what_to_do(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    stream = SimpleNamespace(tensors={}, dtype=None)
    monkeypatch.setattr(trainer_module, "export_stream", lambda *_: stream)
    monkeypatch.setattr(trainer_module, "write_hf_folder", full)
    trainer = evaluating(alone, Heldout(), Weights())
    trainer.policy = SimpleNamespace(chunks=[])  # type: ignore[assignment]
    told = r"hf is not written: .*No space left.* saved: make room.* start the same command again"
    with pytest.raises(RunFailed, match=told):
        trainer.finish()


@dataclass
class Heldout:
    """The rollouts of global rank 0, whose engines are all lost some times."""

    losses: int = 0
    interrupted: bool = False
    asked: list[tuple[int, int]] = field(default_factory=list)
    verdict: Reward = field(default_factory=lambda: Reward(0.0, -1.0))
    """On the second response."""
    grading_failures: tuple[str, ...] = ("raised: KeyError",)

    def sample_heldout(self, step: int, policy_version: int) -> dict[str, list[Group]]:
        self.asked.append((step, policy_version))
        if self.interrupted:
            raise Interrupted
        if len(self.asked) <= self.losses:
            raise EngineUnavailable("all 2 rollout engines are lost")
        prompt = Prompt("p", "", (3,), "1")
        responses = [Response("p", n, (7,), (-1.0,), "stop", policy_version, n) for n in range(2)]
        return {"sums": [Group(prompt, tuple(responses), (Reward(1.0, 1.0), self.verdict))]}


@dataclass
class Weights:
    """Brings engines back, `budget` times."""

    budget: int = 3
    spent: int = 0

    def bring_back(self) -> None:
        if self.spent == self.budget:
            raise EngineError("rollout engine 0 was restarted 3 times (rollout.max_restarts)")
        self.spent += 1


def evaluating(alone: Alone, rollouts: Heldout, weights: Weights) -> Trainer:
    """A trainer that evaluates, and whose parts around that are stand-ins."""
    made = diary(alone, every=0)
    fields = {name: value for name, value in vars(made).items() if name in PARTS}
    trainer = Trainer(**fields, rollouts=rollouts, policy_version=4)  # type: ignore[arg-type]
    trainer.weights = weights  # type: ignore[assignment]
    return trainer


PARTS = {
    *("config", "hf_config", "parallel", "policy", "critic", "bridge", "sinks", "skipped"),
    *("watchdog", "checkpoints", "start_from", "stop"),
}


@pytest.mark.parametrize("losses", [0, 1, 3])
def test_an_evaluation_goes_on_once_lost_engines_are_back(alone: Alone, losses: int) -> None:
    rollouts, weights = Heldout(losses), Weights()
    metrics = evaluating(alone, rollouts, weights).evaluate(2)
    assert weights.spent == losses
    assert rollouts.asked == [(2, 4)] * (losses + 1)
    assert metrics["val-core/sums/acc/mean@2"] == 0.5


def test_an_evaluation_warns_once_of_responses_that_nobody_graded(
    alone: Alone, caplog: pytest.LogCaptureFixture
) -> None:
    evaluating(alone, Heldout(), Weights()).evaluate(2)
    assert caplog.text == ""
    evaluating(alone, Heldout(verdict=NOT_GRADED), Weights()).evaluate(2)
    (warned,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warned.getMessage() == (
        "evaluation of step 2: sums: 1 of 2 responses were not graded and count as wrong (the "
        "grader failed on 1, 0 were aborted); graders said first: raised: KeyError"
    )


def test_an_evaluation_whose_engines_keep_dying_ends_the_run(alone: Alone) -> None:
    rollouts, weights = Heldout(losses=9), Weights()
    with pytest.raises(RuntimeError, match=r"rollout\.max_restarts"):
        evaluating(alone, rollouts, weights).evaluate(2)
    assert len(rollouts.asked) == weights.budget + 1


def test_an_evaluation_that_a_stop_cuts_short_is_owed(alone: Alone) -> None:
    trainer = evaluating(alone, Heldout(interrupted=True), Weights())
    assert trainer.evaluate(2) == {}
    assert trainer.owed


def test_without_evaluation_no_engine_is_asked(alone: Alone) -> None:
    rollouts = Heldout()
    trainer = evaluating(alone, rollouts, Weights())
    trainer.config = make_config(evaluation={"every": 0})
    assert trainer.evaluate(2) == {}
    assert not rollouts.asked
    assert not trainer.owed


def test_a_signal_to_every_process_does_not_end_the_one_that_checks_the_export(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[set[int]] = []

    def write(*_: object, **__: object) -> None:
        held.append({int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())})

    def stream(*_: object) -> SimpleNamespace:
        return SimpleNamespace(tensors={}, dtype=None)

    monkeypatch.setattr(trainer_module, "export_stream", stream)
    monkeypatch.setattr(trainer_module, "write_hf_folder", write)
    trainer = diary(alone, every=0)
    trainer.policy = SimpleNamespace(chunks=[])  # type: ignore[assignment]
    trainer.parallel = SimpleNamespace(rank=1)  # type: ignore[assignment]
    Trainer.finish(trainer)
    assert [numbers >= SIGNALS for numbers in held] == [True]
    assert not SIGNALS & signal.pthread_sigmask(signal.SIG_BLOCK, ())
