"""What a rank refuses once all have met, before engines and models start."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import JsonValue

from megatron_dapo import device, session
from megatron_dapo.checkpoint.header import HEADER_FILE, Header, state_files
from megatron_dapo.checkpoint.identity import run_identity
from megatron_dapo.config import ConfigError, RunConfig, load_config
from megatron_dapo.rollout import inputs
from megatron_dapo.rollout.driver import RolloutDriver
from tests.unit.config.runs import DENSE, write_run
from tests.unit.conftest import Alone
from tests.unit.data.word_tokenizer import WordTokenizer
from tests.unit.rollout.simulated import CONTINUE, Run, World, simulate

ROW = json.dumps({"prompt": "1 + 1", "reward_model": {"ground_truth": "2"}})
SCHEDULE = (
    "rollout.group_size=3",
    "rollout.prompts_per_step=3",
    "training.responses_per_update=9",
    "sampling.surplus=carry",
    "sampling.unfinished=continue",
)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whether engines were started, without any."""
    calls: list[str] = []
    device.select("cpu", local_rank=0)
    monkeypatch.setattr(inputs, "load_tokenizer", lambda path, **options: WordTokenizer())
    monkeypatch.setattr(RolloutDriver, "start", lambda self: calls.append("start"))
    return calls


def waiting_groups() -> dict[str, JsonValue]:
    """Of a schedule that goes on with unfinished responses, after its first step."""

    async def run() -> dict[str, JsonValue]:
        first = await Run(World(), CONTINUE).train(last=1)
        await first.scheduler.settle()
        state = first.scheduler.state_dict()
        await asyncio.sleep(0)
        return state

    return simulate(run())


def opened(folder: Path, alone: Alone, *changed: str, states: Mapping[str, JsonValue]) -> RunConfig:
    """Open the rollouts of a run that was saved with SCHEDULE, as SCHEDULE with what `changed`."""
    file = write_run(folder, hf=DENSE | {"eos_token_id": 9})
    (folder / "train.jsonl").write_text(ROW + "\n")
    keys = ["data.prompt_format=plain", "loss.mismatch=tis_token", *SCHEDULE]
    saved, config = load_config(file, keys), load_config(file, [*keys, *changed])
    checkpoint = folder / "run" / "checkpoints" / "step_1"
    checkpoint.mkdir(parents=True)
    (checkpoint / HEADER_FILE).write_text(Header(1, {}, 1).text())
    fingerprint = RolloutDriver(saved, device="cpu").prompts_fingerprint
    for name, content in state_files({**run_identity(saved, fingerprint), **states}).items():
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_bytes(content)
    run = session.RunStart(
        config=config,
        environment=session.LaunchEnv(0, 1, 0, 1, ""),
        parallel=alone,  # type: ignore[arg-type]
        stop=session.StopRequest(),
        watchdog=None,  # type: ignore[arg-type]
        lock=None,
        start_from=checkpoint,
        complete=False,
    )
    with ExitStack() as stack:
        session._open_rollouts(run, stack)
    return config


CHANGED = {
    "rollout.group_size=9": r"3 responses and rollout\.group_size=9",
    "rollout.max_response_tokens=1": r"rollout\.max_response_tokens=1: .* a response of \d+ tokens",
    "sampling.surplus=drop sampling.unfinished=abort": r"sampling\.(surplus|unfinished)=",
    "sampling.unfinished=finish": r"sampling\.unfinished=finish: .*unfinished=continue",
}


@pytest.mark.parametrize("changed", CHANGED)
def test_keys_that_do_not_fit_to_groups_that_wait_are_refused_before_engines_start(
    tmp_path: Path, alone: Alone, started: list[str], changed: str
) -> None:
    states = {"rollout": {"sampling": waiting_groups()}}
    with pytest.raises(ConfigError, match=CHANGED[changed]):
        opened(tmp_path, alone, *changed.split(), states=states)
    assert started == []


@pytest.mark.parametrize("states", [{}, {"rollout": {}}], ids=["weights alone", "no groups"])
def test_without_groups_that_wait_all_of_those_keys_may_change(
    tmp_path: Path, alone: Alone, started: list[str], states: dict[str, JsonValue]
) -> None:
    changed = [key for keys in CHANGED for key in keys.split()][:2]
    opened(tmp_path, alone, *changed, states=states)
    assert started == ["start"]


def test_the_same_schedule_goes_on_with_groups_that_wait(
    tmp_path: Path, alone: Alone, started: list[str]
) -> None:
    opened(tmp_path, alone, states={"rollout": {"sampling": waiting_groups()}})
    assert started == ["start"]


class Trains:
    """A trainer that notes what lay in the run directory when it began."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.found: set[str] = set()

    def run(self) -> bool:
        self.found = {path.name for path in self.run_dir.iterdir()}
        return True


@pytest.mark.parametrize("refused", [False, True])
def test_the_configuration_is_written_once_nothing_has_refused_it(
    tmp_path: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    config = load_config(write_run(tmp_path))
    config.run_dir.mkdir()
    trainer = Trains(config.run_dir)

    @contextmanager
    def opened_run(*_: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(complete=False, parallel=alone)

    @contextmanager
    def opened_parts(run: object) -> Iterator[Trains]:
        if refused:
            raise ConfigError("model.path: of another model")
        yield trainer

    monkeypatch.setattr(session, "open_run", opened_run)
    monkeypatch.setattr(session, "open_parts", opened_parts)
    expected = pytest.raises(ConfigError, match="another model") if refused else nullcontext()
    with expected:
        session.train(config, session.StopRequest())
    written = set() if refused else {"config.resolved.yaml", "versions.json"}
    assert {path.name for path in config.run_dir.iterdir()} == written == trainer.found


def test_a_run_directory_that_cannot_take_the_configuration_is_refused(tmp_path: Path) -> None:
    config = load_config(write_run(tmp_path))
    (config.run_dir / "config.resolved.yaml").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"^run_dir=.* cannot be written: .*Is a directory"):
        session._note_accepted(config)


def test_a_step_of_more_prompts_than_there_are_is_told_at_the_start(
    tmp_path: Path, alone: Alone, started: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    opened(tmp_path, alone, states={})
    told = r"rollout\.prompts_per_step=3: data\.train=.* has 1 prompts\. .* 3\.0 times or more"
    assert re.search(told, caplog.text)


def test_a_critic_that_was_never_saved_is_refused_before_engines_start(
    tmp_path: Path, alone: Alone, started: list[str]
) -> None:
    with pytest.raises(ConfigError, match=r"^advantage\.estimator=gae: .* holds no critic"):
        opened(tmp_path, alone, "advantage.estimator=gae", states={"rollout": {}})
    assert started == []


def test_experts_in_another_number_of_optimizers_are_refused_before_engines_start(
    tmp_path: Path, alone: Alone, started: list[str]
) -> None:
    with pytest.raises(ConfigError, match=r"^parallel\.expert=2: .* was trained with 1, .*Resume"):
        opened(tmp_path, alone, "parallel.expert=2", states={"rollout": {}})
    assert started == []
