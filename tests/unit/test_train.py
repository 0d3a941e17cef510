"""What a rank says when its run ends, and with which exit code."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dapo import session, train
from megatron_dapo.checkpoint.save import CheckpointError
from megatron_dapo.config import ConfigError
from megatron_dapo.config.errors import EXIT_CONFIG, EXIT_DONE, EXIT_PREEMPTED
from megatron_dapo.parallel.stop import SIGNALS
from megatron_dapo.reward.grader_process import GraderStartError
from megatron_dapo.rollout.engine import EngineError, EngineFault, EngineUnavailable
from megatron_dapo.rollout.grading import TooManyGradingErrors
from megatron_dapo.rollout.selection import FilterCounts, NotEnoughGroups
from megatron_dapo.rollout.vllm_server import EngineStartError
from tests.unit.config.runs import write_run


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A rank listens to signals until it ends; this process goes on."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *SIGNALS)}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = write_run(tmp_path)
    (tmp_path / "train.jsonl").touch()
    return str(path)


def ends(monkeypatch: pytest.MonkeyPatch, file: str, how: Exception | bool) -> int:
    def run(*_: object) -> bool:
        if isinstance(how, Exception):
            raise how
        return how

    monkeypatch.setattr(session, "train", run)
    return train.main(["--config", file])


@pytest.mark.parametrize(("finished", "code"), [(True, EXIT_DONE), (False, EXIT_PREEMPTED)])
def test_a_run_that_went_well_says_so_by_its_code(
    monkeypatch: pytest.MonkeyPatch, file: str, finished: bool, code: int
) -> None:
    assert ends(monkeypatch, file, finished) == code


FAILURES: list[Exception] = [
    CheckpointError("step 4 is not saved: No space left on device. Make room"),
    EngineError("rollout engine 0 was restarted 3 times"),
    EngineFault("it answered 500"),
    EngineUnavailable("it does not answer"),
    EngineStartError("rollout engine 0 ended before it was ready"),
    GraderStartError("3 times no grader could start"),
    TooManyGradingErrors("the grader failed on 9 of 9 responses"),
    NotEnoughGroups(4, 2, FilterCounts(8, 0, 0, 8, 0, 0)),
]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_a_failure_that_a_healthy_program_meets_is_its_message_alone(
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    capsys: pytest.CaptureFixture[str],
    failure: Exception,
) -> None:
    assert ends(monkeypatch, file, failure) == 1
    assert capsys.readouterr().err == f"{failure}\n"


def test_a_wrong_configuration_has_its_own_code(
    monkeypatch: pytest.MonkeyPatch, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ends(monkeypatch, file, ConfigError("seed=5: was trained with 0")) == EXIT_CONFIG
    assert capsys.readouterr().err == "seed=5: was trained with 0\n"


def test_what_nobody_expects_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    with pytest.raises(KeyError):
        ends(monkeypatch, file, KeyError("a bug of ours"))
