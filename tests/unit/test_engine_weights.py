"""Updates and restarts of engines as the trainer tells them, with parts that note what is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_dapo.engine_weights import EngineWeights
from megatron_dapo.rollout.engine import EngineError
from megatron_dapo.rollout.event_loop import Interrupted
from megatron_dapo.rollout.probe import Probe
from tests.unit.config.runs import make_config
from tests.unit.conftest import Alone

BOTH = {0: False, 1: False}
PROBE = Probe(0, (3, 4), (5,), (-0.5,), 3)


@dataclass
class Parts:
    """Policy, bridge and rollouts in one."""

    due: list[Mapping[int, bool] | Exception]
    """What each question for the engines that need weights is answered with; then none does."""
    failures: list[Exception | None] = field(default_factory=list)
    """Of each sending."""
    lost: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    updates: int = 0
    directory: Path | None = None
    staging_bytes: int = 0
    update_reports: dict[int, list[object]] = field(default_factory=dict)

    def prepare(self, version: int) -> None:
        self.notes.append(f"prepare {version}")

    def payload(self) -> dict[str, object]:
        return {}

    def init_info(self, engine: int) -> dict[str, object]:
        return {"replica": engine}

    def rejoin(self, engine: int) -> None:
        self.notes.append(f"rejoin {engine}")

    def to_update(self, *, all_engines: bool) -> Mapping[int, bool]:
        due = self.due.pop(0) if self.due else {}
        if isinstance(due, Exception):
            raise due
        return due

    def start_update(
        self, infos: Mapping[int, Mapping[str, object]], payload: object, version: int
    ) -> None:
        assert [info["replica"] for info in infos.values()] == list(infos)
        self.notes.append(f"start {version} on {list(infos)}")

    def send(self, version: int, engines: Sequence[int] | None) -> None:
        self.notes.append(f"send {version} to {engines or 'all'}")
        if self.failures and (failure := self.failures.pop(0)) is not None:
            raise failure

    def abandon_update(self) -> list[int]:
        self.notes.append("abandon")
        return self.lost

    def expected_digests(self) -> list[dict[str, str]]:
        return [{}]

    def finish_update(self, expected: object) -> tuple[Probe, ...]:
        self.notes.append("finish")
        return (PROBE,)

    def let_requests_in(self) -> None:
        self.notes.append("let in")

    def acknowledged(self, version: int) -> None:
        self.notes.append(f"acknowledge {version}")


class Probing(EngineWeights):
    """Without a policy that could score probes: they differ when told so."""

    differs = False

    def _check_probes(self, probes: Sequence[Probe]) -> dict[str, float]:
        assert self._rollouts is not None
        self._rollouts.notes.append("probes")  # type: ignore[attr-defined]
        if self.differs:
            raise RuntimeError("log-probs of its probe differ")
        return {"rollout/probe_logprob_diff": 0.25}


def weights(alone: Alone, parts: Parts, transport: str = "files") -> Probing:
    config = make_config(rollout={"engines": 2})
    object.__setattr__(config.resharding, "transport", transport)
    return Probing(config, alone, parts, parts, parts)  # type: ignore[arg-type]


UPDATE = ["prepare 3", "start 3 on [0, 1]", "send 3 to all", "finish", "probes"]
OF_ONE = ["rejoin 1", "start 3 on [1]", "send 3 to [1]", "finish", "probes", "let in"]


def test_requests_are_let_in_once_the_probes_are_right(alone: Alone) -> None:
    parts = Parts([BOTH])
    metrics = weights(alone, parts).sync(3)
    assert parts.notes == [*UPDATE, "let in", "acknowledge 3"]
    assert metrics["rollout/probe_logprob_diff"] == 0.25
    assert metrics["weight_sync/published_bytes"] == 0.0


def test_no_request_is_let_in_where_a_probe_differs(alone: Alone) -> None:
    parts = Parts([BOTH])
    probing = weights(alone, parts)
    probing.differs = True
    with pytest.raises(RuntimeError, match="its probe differ"):
        probing.sync(3)
    assert parts.notes == UPDATE


def test_an_engine_lost_inside_an_update_gets_one_of_its_own_once_it_is_back(alone: Alone) -> None:
    parts = Parts([BOTH, {1: True}])
    weights(alone, parts).sync(3)
    assert parts.notes == [*UPDATE, "let in", *OF_ONE, "acknowledge 3"]


def test_engines_come_back_with_the_version_that_was_sent_last(alone: Alone) -> None:
    parts = Parts([BOTH])
    coming = weights(alone, parts)
    coming.sync(3)
    parts.notes.clear()
    parts.due = [{1: True}]
    coming.bring_back()
    assert parts.notes == OF_ONE


def test_no_engine_comes_back_after_the_policy_has_moved_on(alone: Alone) -> None:
    parts = Parts([BOTH, {1: True}])
    coming = weights(alone, parts)
    coming.sync(3)
    parts.notes.clear()
    parts.updates += 2
    with pytest.raises(AssertionError, match="updated 2 times since version 3 went"):
        coming.bring_back()
    assert parts.notes == []


def test_weights_are_sent_again_after_an_engine_was_lost_while_they_were(alone: Alone) -> None:
    parts = Parts([BOTH, {0: True, 1: True}], [OSError("connection closed")], lost=[1])
    weights(alone, parts).sync(3)
    again = ["rejoin 0", "rejoin 1", *UPDATE[1:], "let in", "acknowledge 3"]
    assert parts.notes == [*UPDATE[:3], "abandon", *again]


@pytest.mark.parametrize(("lost", "transport"), [([], "gloo"), ([1], "vllm_nccl")])
def test_what_no_restart_can_mend_ends_the_run(
    alone: Alone, lost: list[int], transport: str
) -> None:
    parts = Parts([BOTH, {1: True}], [RuntimeError("an engine refused")], lost=lost)
    with pytest.raises(RuntimeError, match="an engine refused"):
        weights(alone, parts, transport).sync(3)
    assert parts.notes == [*UPDATE[:3], "abandon"]


def test_too_many_restarts_end_the_run(alone: Alone) -> None:
    parts = Parts([EngineError("rollout engine 1 was restarted 3 times")])
    with pytest.raises(EngineError, match="restarted 3 times"):
        weights(alone, parts).sync(3)


def test_a_stop_ends_the_waiting_for_an_engine(alone: Alone) -> None:
    parts = Parts([BOTH])
    coming = weights(alone, parts)
    coming.sync(3)
    parts.notes.clear()
    parts.due = [Interrupted()]
    coming.bring_back()
    assert parts.notes == []
