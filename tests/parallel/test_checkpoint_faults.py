"""Whatever ends or refuses a save, at any moment: the newest valid checkpoint is the old one or the
new one, and the next start leaves nothing half done."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_dapo.checkpoint import find
from megatron_dapo.checkpoint.commit import (
    find_damage,
    list_corrupt,
    list_steps,
    step_folder,
    step_of,
)
from megatron_dapo.checkpoint.durable_files import list_files
from megatron_dapo.checkpoint.find import find_checkpoint
from megatron_dapo.checkpoint.keeper import CheckpointKeeper
from megatron_dapo.checkpoint.save import CheckpointError
from megatron_dapo.config.checkpoint import CheckpointConfig
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.policy.policy import Policy
from tests.parallel.crash_points import EXIT_KILLED, CrashPoints, fork_and_run
from tests.parallel.mounts import may_mount, private_tmpfs, read_only
from tests.parallel.policy_cases import build_policy, run_config
from tests.tiny_models import tiny_model

SHORT = {1: 5, 2: 2}
"""Points of the short form on each rank, by the number of ranks."""
AT_ONCE = 2
STATE = {"counters": {"skipped": 2}, "rollout": {"carried": list(range(200))}}


@contextmanager
def rank_of(rank: int, world: int, store: Path) -> Iterator[Policy]:
    """This process as a rank over gloo, with a small model on its layout."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    config = run_config(tensor=world)
    parallel = ParallelContext.create(config.parallel, seed=0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}
    model = tiny_model("qwen2", layers=1, num_attention_heads=2, **sizes)
    yield build_policy(config, model, parallel)
    parallel.destroy()
    dist.destroy_process_group()


def keeper_of(policy: Policy, folder: Path, **settings: object) -> CheckpointKeeper:
    return CheckpointKeeper(
        folder,
        CheckpointConfig.model_validate({"keep": 1} | settings),
        policy.parallel,
        policy.chunks,
        policy.optimizer,
    )


def add(policy: Policy, amount: float) -> None:
    """What training is here: every weight moves."""
    with torch.no_grad():
        for chunk in policy.chunks:
            for parameter in chunk.parameters():
                parameter += amount


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for chunk in policy.chunks for p in chunk.parameters()])


def go_on(policy: Policy, keeper: CheckpointKeeper) -> int:
    """Resume, train one step, save it, and train on; the step that was saved."""
    checkpoint = find_checkpoint(keeper.folder, policy.parallel.control_group)
    done = 0
    if checkpoint is not None:
        restored, continues = keeper.restore(checkpoint)
        assert continues and restored.state == STATE
        done = restored.step
        add(policy, 1.0)
    keeper.save(done + 1, STATE, metrics={}, must_succeed=False)
    if keeper.settings.asynchronous:
        add(policy, 100.0)
    keeper.settle(wait=True)
    keeper.close()
    return done + 1


@dataclasses.dataclass(frozen=True)
class Life:
    """One process life of a run in `folder`, killed at the point `at` on rank `victim`."""

    folder: Path
    asynchronous: bool = False
    world: int = 1
    at: int | None = None
    victim: int = 0

    def start(self) -> list[Callable[[], int]]:
        store = self.folder.with_name(f"{self.folder.name}.store")
        store.unlink(missing_ok=True)
        return [
            fork_and_run(lambda rank=rank: self._live(rank, store)) for rank in range(self.world)
        ]

    def end(self) -> list[int]:
        return [wait() for wait in self.start()]

    def _live(self, rank: int, store: Path) -> None:
        logging.disable()
        with rank_of(rank, self.world, store) as policy:
            keeper = keeper_of(policy, self.folder, asynchronous=self.asynchronous)
            points = CrashPoints(self.folder, self.at if rank == self.victim else None)
            with points.watching():
                go_on(policy, keeper)
            self.folder.with_name(f"{self.folder.name}.points{rank}").write_text(str(points.count))

    def points(self, rank: int = 0) -> int:
        """Of a life that ended by itself."""
        return int(self.folder.with_name(f"{self.folder.name}.points{rank}").read_text())


def judge(folders: list[Path], world: int, verdicts: Path) -> list[int]:
    """Start again in each folder: exit codes of the ranks; `verdicts` says what is wrong."""
    store = verdicts.with_suffix(".store")

    def work(rank: int) -> None:
        logging.disable()
        wrong = []
        with rank_of(rank, world, store) as policy:
            start = weights(policy)
            for folder in folders:
                keeper = keeper_of(policy, folder)
                found = find_checkpoint(folder, policy.parallel.control_group)
                step = 0 if found is None else step_of(found)
                names = {path.name for path in folder.iterdir()}
                if step not in (1, 2) or not names <= {"step_00000001", "step_00000002", "latest"}:
                    wrong.append(f"{folder.name}: step {step} of {sorted(names)}")
                    continue
                assert found is not None
                restored, _ = keeper.restore(found)
                if not torch.equal(weights(policy), start + (step - 1)) or restored.state != STATE:
                    wrong.append(f"{folder.name}: step {step} holds something else")
                keeper.save(step + 1, STATE, metrics={}, must_succeed=True)
                if [step + 1] != list_steps(folder) or find_damage(step_folder(folder, step + 1)):
                    wrong.append(f"{folder.name}: {list_steps(folder)} after one more save")
        if rank == 0:
            verdicts.write_text(json.dumps(wrong))

    store.unlink(missing_ok=True)
    return [
        wait() for wait in [fork_and_run(lambda rank=rank: work(rank)) for rank in range(world)]
    ]


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Life:
    """A run with step 1 saved."""
    life = Life(tmp_path_factory.mktemp("base") / "checkpoints", world=request.param)
    assert life.end() == [0] * life.world
    assert list_steps(life.folder) == [1]
    return life


def some_of(count: int, wanted: int) -> list[int]:
    """At most `wanted` points, the first and the last among them."""
    if count <= wanted:
        return list(range(count))
    return sorted({round(pick * (count - 1) / (wanted - 1)) for pick in range(wanted)})


def enumerate_crashes(base: Life, folder: Path, asynchronous: bool, wanted: int | None) -> int:
    """Kill a save at each point on each rank; how many points there were."""
    whole = dataclasses.replace(base, folder=folder / "whole", asynchronous=asynchronous)
    shutil.copytree(base.folder, whole.folder)
    assert whole.end() == [0] * base.world
    lives = [
        dataclasses.replace(whole, folder=folder / f"rank{rank}_point{at:03}", at=at, victim=rank)
        for rank in range(base.world)
        for at in some_of(whole.points(rank), wanted or whole.points(rank))
    ]
    for first in range(0, len(lives), AT_ONCE):
        running = []
        for life in lives[first : first + AT_ONCE]:
            shutil.copytree(base.folder, life.folder)
            running.append((life, life.start()))
        for life, ranks in running:
            codes = [wait() for wait in ranks]
            assert codes[life.victim] == EXIT_KILLED, (life, codes)
    verdicts = folder / "verdicts.json"
    codes = judge([life.folder for life in lives], base.world, verdicts)
    assert codes == [0] * base.world
    assert json.loads(verdicts.read_text()) == []
    return len(lives)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["in step", "in the background"])
def test_a_save_killed_at_some_points_leaves_the_old_or_the_new(
    base: Life, tmp_path: Path, asynchronous: bool
) -> None:
    points = enumerate_crashes(base, tmp_path, asynchronous, SHORT[base.world])
    assert points == SHORT[base.world] * base.world


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["in step", "in the background"])
def test_a_save_killed_at_every_point_leaves_the_old_or_the_new(
    base: Life, tmp_path: Path, asynchronous: bool
) -> None:
    points = enumerate_crashes(base, tmp_path, asynchronous, None)
    print(f"{points} crash points with {base.world} ranks")
    assert points >= 40


def in_a_process(work: Callable[[Policy], None], store: Path) -> None:
    """Run on one rank in a forked process, whose failures are those of the test."""
    report = store.with_suffix(".report")

    def run() -> None:
        with rank_of(0, 1, store) as policy:
            try:
                work(policy)
            except AssertionError as error:
                report.write_text(str(error) or "an assertion failed")
                raise

    code = fork_and_run(run)()
    assert code == 0, report.read_text() if report.exists() else f"exit code {code}"


@pytest.mark.parametrize(
    "wanted", [10, pytest.param(None, marks=[pytest.mark.faults, pytest.mark.slow])]
)
def test_a_disk_that_is_full_at_any_point_costs_one_save(
    tmp_path: Path, wanted: int | None
) -> None:
    def work(policy: Policy) -> None:
        folder = tmp_path / "checkpoints"
        keeper = keeper_of(policy, folder, on_failure="continue")
        step = go_on(policy, keeper)
        counting = CrashPoints(folder, None)
        with counting.watching():
            keeper.save(step + 1, STATE, metrics={}, must_succeed=False)
        assert keeper.failures == 0 and list_steps(folder) == [step + 1]
        assert counting.count >= 40
        for at in some_of(counting.count, wanted or counting.count):
            before, failures = list_steps(folder), keeper.failures
            full = CrashPoints(folder, at, refuses=True)
            with full.watching():
                keeper.save(before[-1] + 1, STATE, metrics={}, must_succeed=False)
            failed = keeper.failures > failures
            after = list_steps(folder)
            if failed:  # its flush of the new name, after the rename, may be what failed
                assert after in (before, [*before, before[-1] + 1]), (at, before, after)
            else:
                assert after[-1] == before[-1] + 1, (at, before, after)
            assert all(find_damage(step_folder(folder, n)) == [] for n in after), at
            assert failed or at > counting.count / 2, at
            keeper.save(after[-1] + 1, STATE, metrics={}, must_succeed=True)
            assert list_steps(folder) == [after[-1] + 1], at
            assert {path.name[:5] for path in folder.iterdir()} == {"step_", "lates"}, at

    in_a_process(work, tmp_path / "store")


def test_a_full_disk_stops_the_run_where_it_is_told_to(tmp_path: Path) -> None:
    def work(policy: Policy) -> None:
        folder = tmp_path / "checkpoints"
        for settings in ({}, {"asynchronous": True}, {"on_failure": "continue"}):
            keeper = keeper_of(policy, folder, **settings)
            last = "on_failure" in settings
            full = CrashPoints(folder, 2, refuses=True)
            said = r"step 7 is not saved: .*No space left"
            with full.watching(), pytest.raises(CheckpointError, match=said):
                keeper.save(7, STATE, metrics={}, must_succeed=last)
                keeper.settle(wait=True)  # of the one in the background
            keeper.close()
            assert list_steps(folder) == []

    in_a_process(work, tmp_path / "store")


def test_a_small_file_system_is_seen_before_it_is_full(tmp_path: Path) -> None:
    if not may_mount():
        pytest.skip("this process may not mount a file system of its own")

    def work(policy: Policy) -> None:
        with private_tmpfs(tmp_path / "small", kib=400) as folder:
            keeper = keeper_of(policy, folder / "checkpoints", on_failure="continue")
            go_on(policy, keeper)
            assert keeper.failures == 0
            go_on(policy, keeper)
            assert keeper.failures == 1
            assert list_steps(keeper.folder) == [1]
            assert find_damage(step_folder(keeper.folder, 1)) == []

    in_a_process(work, tmp_path / "store")


def test_a_directory_that_turns_read_only_costs_saves_and_nothing_else(tmp_path: Path) -> None:
    if not may_mount():
        pytest.skip("this process may not mount a file system of its own")

    def work(policy: Policy) -> None:
        with private_tmpfs(tmp_path / "disk", kib=4000) as disk:
            keeper = keeper_of(policy, disk / "checkpoints", on_failure="continue")
            go_on(policy, keeper)
            with read_only(disk):
                keeper.save(2, STATE, metrics={}, must_succeed=False)
                assert keeper.failures == 1
                with pytest.raises(CheckpointError, match="Read-only file system"):
                    keeper.save(2, STATE, metrics={}, must_succeed=True)
            assert find_damage(step_folder(keeper.folder, 1)) == []
            keeper.save(2, STATE, metrics={}, must_succeed=True)
            assert list_steps(keeper.folder) == [2]

    in_a_process(work, tmp_path / "store")


def test_a_limit_on_file_sizes_costs_one_save(tmp_path: Path) -> None:
    def work(policy: Policy) -> None:
        keeper = keeper_of(policy, tmp_path / "checkpoints", on_failure="continue")
        go_on(policy, keeper)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
        keeper.save(2, STATE, metrics={}, must_succeed=False)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert keeper.failures == 1
        assert list_steps(keeper.folder) == [1]
        assert list(keeper.folder.glob(".*")) == []

    in_a_process(work, tmp_path / "store")


def test_a_write_that_does_not_stay_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_dapo.checkpoint import save as saving

    def work(policy: Policy) -> None:
        keeper = keeper_of(policy, tmp_path / "checkpoints")
        write = saving.write_tensors

        def rots(part: object, folder: Path, rank: int) -> object:
            written = write(part, folder, rank)  # type: ignore[arg-type]
            path = next(folder.glob("*.distcp"))
            path.write_bytes(path.read_bytes()[:-1] + b"?")
            return written

        monkeypatch.setattr(saving, "write_tensors", rots)
        with pytest.raises(CheckpointError, match="does not keep what is written"):
            keeper.save(1, STATE, metrics={}, must_succeed=False)
        assert list(keeper.folder.iterdir()) == []

    in_a_process(work, tmp_path / "store")


def damages(path: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Ways in which a file gets bad."""
    content = path.read_bytes()
    for name, size in (("empty", 0), ("half", len(content) // 2), ("last byte", -1)):
        cut = content[:size]
        yield f"{path.name}: {name}", lambda cut=cut: path.write_bytes(cut)
    for place in (0, len(content) // 2, len(content) - 1):
        flipped = bytearray(content)
        flipped[place] ^= 4
        yield f"{path.name}: bit {place}", lambda flipped=flipped: path.write_bytes(flipped)
    yield f"{path.name}: gone", path.unlink


def test_every_damage_of_every_file_is_found_and_the_step_before_is_taken(tmp_path: Path) -> None:
    def work(policy: Policy) -> None:
        logging.disable()
        folder = tmp_path / "checkpoints"
        keeper = keeper_of(policy, folder, keep=2)
        go_on(policy, keeper)
        go_on(policy, keeper)
        assert list_steps(folder) == [1, 2]
        names = list_files(step_folder(folder, 2))
        assert len(names) >= 8
        tried = 0
        for name in names:
            for what, spoil in damages(step_folder(folder, 2) / name):
                shutil.copytree(step_folder(folder, 2), tmp_path / "good")
                spoil()
                chosen = find_checkpoint(folder, policy.parallel.control_group)
                assert chosen == step_folder(folder, 1), f"{what}: {chosen}"
                (aside,) = list_corrupt(folder)
                shutil.rmtree(aside)
                (tmp_path / "good").rename(step_folder(folder, 2))
                tried += 1
        assert tried == 7 * len(names)
        assert find_checkpoint(folder, policy.parallel.control_group) == step_folder(folder, 2)

    in_a_process(work, tmp_path / "store")


def test_a_run_whose_every_checkpoint_is_bad_does_not_start_anew_in_silence(
    tmp_path: Path,
) -> None:
    def work(policy: Policy) -> None:
        logging.disable()
        folder = tmp_path / "checkpoints"
        go_on(policy, keeper_of(policy, folder))
        next(step_folder(folder, 1).rglob("*.distcp")).unlink()
        for _ in range(2):  # also when started again
            with pytest.raises(RuntimeError, match=r"step_00000001\.corrupt were found damaged"):
                find_checkpoint(folder, policy.parallel.control_group)

    in_a_process(work, tmp_path / "store")


def test_the_content_is_read_and_not_only_the_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reading of `find_checkpoint` is what finds a flipped bit."""

    def work(policy: Policy) -> None:
        folder = tmp_path / "checkpoints"
        go_on(policy, keeper_of(policy, folder))
        path = next(step_folder(folder, 1).rglob("*.distcp"))
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        monkeypatch.setattr(find, "content_faults", lambda *_: iter(()))
        assert find_checkpoint(folder, policy.parallel.control_group) == step_folder(folder, 1)

    in_a_process(work, tmp_path / "store")
