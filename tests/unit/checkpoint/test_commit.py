"""Which directories count as checkpoints, which one is resumed, and which are deleted."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megatron_dapo.checkpoint.commit import (
    MANIFEST_FILE,
    POINTER_FILE,
    commit,
    find_faults,
    list_files,
    list_steps,
    newest_complete,
    record_files,
    remove_old,
    require_complete,
    step_folder,
    unfinished_folder,
    verify_files,
    write_text_durably,
)
from tests.unit.handed import Case, handed_cases

FILES = ("optimizer", "model/shard")


def save(folder: Path, step: int, *, fails: bool = False) -> None:
    unfinished = unfinished_folder(folder, step)
    (unfinished / "model").mkdir(parents=True)
    for name in FILES:
        (unfinished / name).write_text(f"{name} of {step}")
        if fails:
            return
    commit(folder, step, record_files(unfinished, list_files(unfinished)))


def damage(checkpoint: Path, missing: str) -> None:
    (checkpoint / {"marker": MANIFEST_FILE}.get(missing, missing)).unlink()


@pytest.mark.parametrize("case", handed_cases("j", "resume_choice"))
def test_resume_choice_of_handed_cases(
    case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for entry in case["input"]["checkpoints"]:
        save(tmp_path, entry["step"])
        for missing in entry.get("missing", ()):
            damage(step_folder(tmp_path, entry["step"]), missing)
    (tmp_path / POINTER_FILE).unlink()
    if case["input"]["pointer"] is not None:
        pointed = step_folder(tmp_path, case["input"]["pointer"]).name
        write_text_durably(tmp_path / POINTER_FILE, pointed)
    with caplog.at_level(logging.WARNING):
        chosen = newest_complete(tmp_path)
    assert chosen == step_folder(tmp_path, case["expect"]["resume_from"])
    if case["expect"].get("warned"):
        assert "is incomplete" in caplog.text


@pytest.mark.parametrize("case", handed_cases("j", "keep_rule"))
def test_keep_rule_of_handed_cases(case: Case, tmp_path: Path) -> None:
    given = case["input"]
    for step in given["on_disk"]:
        save(tmp_path, step)
    failed = given.get("save_failed", False)
    save(tmp_path, given["new_step"], fails=failed)
    if not failed:
        remove_old(tmp_path, given["keep"])
    assert list_steps(tmp_path) == case["expect"]["left"]
    assert newest_complete(tmp_path) == step_folder(tmp_path, case["expect"]["left"][-1])


def test_a_committed_checkpoint_is_complete_and_pointed_to(tmp_path: Path) -> None:
    save(tmp_path, 7)
    checkpoint = step_folder(tmp_path, 7)
    assert find_faults(checkpoint) == []
    require_complete(checkpoint)
    verify_files(checkpoint, FILES)
    assert (tmp_path / POINTER_FILE).read_text() == "step_00000007\n"
    assert list(tmp_path.glob(".*")) == []


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 7)
    damage(step_folder(tmp_path, 7), "optimizer")
    save(tmp_path, 7)
    require_complete(step_folder(tmp_path, 7))


@pytest.mark.parametrize("name", [*FILES, MANIFEST_FILE])
def test_a_missing_file_makes_it_incomplete(tmp_path: Path, name: str) -> None:
    save(tmp_path, 7)
    damage(step_folder(tmp_path, 7), name)
    with pytest.raises(RuntimeError, match=f"incomplete: {name} is missing"):
        require_complete(step_folder(tmp_path, 7))


def test_a_file_cut_short_makes_it_incomplete(tmp_path: Path) -> None:
    save(tmp_path, 7)
    (step_folder(tmp_path, 7) / "optimizer").write_text("opt")
    assert find_faults(step_folder(tmp_path, 7)) == ["optimizer has 3 bytes instead of 14"]


def test_a_changed_byte_is_found_by_its_digest(tmp_path: Path) -> None:
    save(tmp_path, 7)
    path = step_folder(tmp_path, 7) / "optimizer"
    path.write_text(path.read_text().swapcase())
    assert find_faults(path.parent) == []
    with pytest.raises(RuntimeError, match="optimizer differs from the digest"):
        verify_files(path.parent, FILES)


def test_incomplete_checkpoints_neither_count_nor_get_deleted(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    damage(step_folder(tmp_path, 30), "optimizer")
    remove_old(tmp_path, keep=2)
    assert list_steps(tmp_path) == [10, 20, 30]


def test_no_checkpoint_at_all_is_none(tmp_path: Path) -> None:
    assert newest_complete(tmp_path / "nowhere") is None
    (tmp_path / "step_x").mkdir()
    assert newest_complete(tmp_path) is None
