"""Which directories count as checkpoints, which one is resumed, and what a dead save leaves."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import BinaryIO

import pytest

from megatron_dapo.checkpoint import commit as commit_module
from megatron_dapo.checkpoint import durable_files
from megatron_dapo.checkpoint.commit import (
    MANIFEST_FILE,
    POINTER_FILE,
    clear_leftovers,
    commit,
    find_damage,
    find_faults,
    list_corrupt,
    list_steps,
    newest_complete,
    remove_checkpoint,
    require_complete,
    set_aside,
    step_folder,
    unfinished_folder,
    verify_files,
)
from megatron_dapo.checkpoint.find import find_checkpoint
from megatron_dapo.checkpoint.header import read_states, state_files
from megatron_dapo.checkpoint.retention import remove_old
from megatron_dapo.config import ConfigError
from megatron_dapo.config.checkpoint import CheckpointConfig
from megatron_dapo.config.whole_files import replace_durably
from tests.unit.checkpoint.records import recorded
from tests.unit.conftest import Alone
from tests.unit.handed import Case, handed_cases

FILES = ("optimizer", "model/shard")


def write(folder: Path, step: int) -> None:
    unfinished = unfinished_folder(folder, step)
    (unfinished / "model").mkdir(parents=True)
    for name in FILES:
        (unfinished / name).write_text(f"{name} of {step}")


def save(folder: Path, step: int, *, fails: bool = False) -> None:
    write(folder, step)
    if not fails:
        unfinished = unfinished_folder(folder, step)
        commit(folder, step, recorded(unfinished))


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
        replace_durably(tmp_path / POINTER_FILE, pointed)
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
        remove_old(tmp_path, CheckpointConfig(keep=given["keep"]))
    assert list_steps(tmp_path) == case["expect"]["left"]
    assert newest_complete(tmp_path) == step_folder(tmp_path, case["expect"]["left"][-1])


def test_a_committed_checkpoint_is_complete_and_pointed_to(tmp_path: Path) -> None:
    save(tmp_path, 7)
    checkpoint = step_folder(tmp_path, 7)
    assert find_damage(checkpoint) == []
    require_complete(checkpoint)
    verify_files(checkpoint, [*FILES])
    assert (tmp_path / POINTER_FILE).read_text() == "step_00000007\n"
    assert list(tmp_path.glob(".*")) == []


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 7)
    damage(step_folder(tmp_path, 7), "optimizer")
    save(tmp_path, 7)
    require_complete(step_folder(tmp_path, 7))
    assert list(tmp_path.glob(".*")) == []


def test_a_step_is_not_given_up_before_the_new_save_of_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 7)

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commit_module, "_put_in_place", dies)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 7)
    assert find_damage(step_folder(tmp_path, 7)) == []


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
    assert len(find_damage(path.parent)) == 1
    with pytest.raises(RuntimeError, match="optimizer differs from the digest"):
        verify_files(path.parent, [*FILES])


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path: Path) -> None:
    save(tmp_path, 7)
    path = step_folder(tmp_path, 7) / MANIFEST_FILE
    content = path.read_bytes()
    json.loads(content)
    for place in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            assert find_faults(path.parent), (place, bit, bytes(changed))
    path.write_bytes(content)
    assert find_faults(path.parent) == []


def test_incomplete_checkpoints_neither_count_nor_get_deleted(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    damage(step_folder(tmp_path, 30), "optimizer")
    remove_old(tmp_path, CheckpointConfig(keep=2))
    assert list_steps(tmp_path) == [10, 20, 30]


def test_no_checkpoint_at_all_is_none(tmp_path: Path) -> None:
    assert newest_complete(tmp_path / "nowhere") is None
    (tmp_path / "step_x").mkdir()
    assert newest_complete(tmp_path) is None


def test_a_half_written_save_is_removed_at_the_next_start(tmp_path: Path) -> None:
    save(tmp_path, 7)
    save(tmp_path, 8, fails=True)
    (tmp_path / ".latest.tmp").write_text("step_0000")
    clear_leftovers(tmp_path)
    assert list_steps(tmp_path) == [7]
    assert list(tmp_path.glob(".*")) == []
    clear_leftovers(tmp_path / "nowhere")


def test_a_complete_save_that_was_not_renamed_is_kept(tmp_path: Path) -> None:
    save(tmp_path, 7)
    step_folder(tmp_path, 7).rename(unfinished_folder(tmp_path, 7))
    clear_leftovers(tmp_path)
    assert find_damage(step_folder(tmp_path, 7)) == []
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize("new_one_is_good", [True, False])
def test_a_step_that_made_way_comes_back_where_its_successor_is_bad(
    tmp_path: Path, new_one_is_good: bool
) -> None:
    save(tmp_path, 7)
    new = tmp_path / ".step_00000007.tmp"
    shutil.copytree(step_folder(tmp_path, 7), new)
    (new / "optimizer").write_text("OPTIMIZER of 7")
    if new_one_is_good:
        shutil.rmtree(new)
        write(tmp_path, 7)
        (new / "optimizer").write_text("OPTIMIZER of 7")
        step_folder(tmp_path, 7).rename(tmp_path / ".step_00000007.old")
        commit(tmp_path, 7, recorded(new))
        step_folder(tmp_path, 7).rename(new)
        save(tmp_path / "other", 7)
        (tmp_path / "other" / "step_00000007").rename(tmp_path / ".step_00000007.old")
    else:
        step_folder(tmp_path, 7).rename(tmp_path / ".step_00000007.old")
    clear_leftovers(tmp_path)
    assert find_damage(step_folder(tmp_path, 7)) == []
    text = (step_folder(tmp_path, 7) / "optimizer").read_text()
    assert text == ("OPTIMIZER of 7" if new_one_is_good else "optimizer of 7")
    assert list(tmp_path.glob(".*")) == []


def test_a_half_deleted_checkpoint_is_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 7)

    def dies(path: Path) -> None:
        (path / "optimizer").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(commit_module.shutil, "rmtree", dies)
        with pytest.raises(KeyboardInterrupt):
            remove_checkpoint(step_folder(tmp_path, 7))
    assert list_steps(tmp_path) == []
    clear_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / POINTER_FILE]


def test_a_damaged_checkpoint_is_kept_under_a_name_that_nothing_resumes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        save(tmp_path, 7)
        set_aside(step_folder(tmp_path, 7), "optimizer has 3 bytes")
    assert list_steps(tmp_path) == []
    names = [path.name for path in list_corrupt(tmp_path)]
    assert names == ["step_00000007.corrupt", "step_00000007.corrupt.2"]
    assert "optimizer has 3 bytes" in caplog.text and names[1] in caplog.text
    clear_leftovers(tmp_path)
    assert len(list_corrupt(tmp_path)) == 2


def test_checkpoints_that_are_links_are_removed_and_what_they_lead_to_stays(
    tmp_path: Path,
) -> None:
    folder, disk = tmp_path / "checkpoints", tmp_path / "other disk"
    folder.mkdir()
    disk.mkdir()
    for step in (1, 2):
        save(folder, step)
        step_folder(folder, step).rename(disk / f"moved {step}")
        step_folder(folder, step).symlink_to(disk / f"moved {step}")
    remove_checkpoint(step_folder(folder, 1))
    step_folder(folder, 2).rename(folder / ".step_00000002.removed")
    (folder / ".step_00000003.old").write_text("no folder at all")
    save(folder, 3)
    clear_leftovers(folder)
    assert sorted(path.name for path in folder.iterdir()) == [POINTER_FILE, "step_00000003"]
    assert all(not find_damage(disk / f"moved {step}") for step in (1, 2))


def test_a_checkpoint_under_another_steps_name_is_damaged(tmp_path: Path) -> None:
    save(tmp_path, 10)
    step_folder(tmp_path, 10).rename(step_folder(tmp_path, 12))
    assert find_faults(step_folder(tmp_path, 12)) == [
        "it is the checkpoint of step 10 under another name"
    ]
    save(tmp_path, 11)
    assert newest_complete(tmp_path) == step_folder(tmp_path, 11)


def test_states_are_those_that_were_saved(tmp_path: Path) -> None:
    unfinished = unfinished_folder(tmp_path, 3)
    (unfinished / "state").mkdir(parents=True)
    for name, content in state_files({"prompts": {"position": 7}, "run": {}}).items():
        (unfinished / name).write_bytes(content)
    checkpoint = commit(tmp_path, 3, recorded(unfinished))
    (checkpoint / "state" / "notes.json").write_text("not JSON at all")
    assert not find_damage(checkpoint)
    assert read_states(checkpoint) == {"prompts": {"position": 7}, "run": {}}


@pytest.mark.parametrize("errors", [1, 2])
def test_a_file_that_cannot_be_read_is_read_once_more_before_it_counts_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: int
) -> None:
    save(tmp_path, 7)
    tried, digest = [], hashlib.file_digest

    def faltering(file: BinaryIO, kind: str) -> object:
        tried.append(file.name)
        if tried.count(file.name) <= errors and file.name.endswith("optimizer"):
            raise OSError(116, "Stale file handle", file.name)
        return digest(file, kind)  # type: ignore[arg-type]

    monkeypatch.setattr(durable_files, "READ_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(hashlib, "file_digest", faltering)
    faults = find_damage(step_folder(tmp_path, 7))
    assert len(faults) == errors - 1
    assert all("optimizer cannot be read: [Errno 116]" in fault for fault in faults)


def as_of_a_later_version(checkpoint: Path) -> str:
    """Give it a sound manifest of a format that is not known here; its text."""
    path = checkpoint / MANIFEST_FILE
    old = json.loads(path.read_text())
    content: dict[str, object] = {"format": 2, "parts": list(old["files"]), "step": old["step"]}
    content["sha256"] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    path.write_text(json.dumps(content, indent=2))
    return path.read_text()


NEWER = r"made by a newer version .*manifest\.json has format=2, .* format 1\. .*Go on with "


def test_a_checkpoint_of_a_later_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    text = as_of_a_later_version(step_folder(tmp_path, 2))
    for look in (find_faults, find_damage, require_complete):
        with pytest.raises(ConfigError, match=NEWER):
            look(step_folder(tmp_path, 2))
    with pytest.raises(ConfigError, match=NEWER):
        newest_complete(tmp_path)
    assert list_steps(tmp_path) == [1, 2]
    assert (step_folder(tmp_path, 2) / MANIFEST_FILE).read_text() == text


def test_a_run_does_not_start_beside_a_checkpoint_of_a_later_version(
    tmp_path: Path, alone: Alone
) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    as_of_a_later_version(step_folder(tmp_path, 2))
    with pytest.raises(ConfigError, match=NEWER):
        find_checkpoint(tmp_path, alone.control_group)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("latest", "step_00000001", "step_00000002")
    ]


def test_a_save_of_a_later_version_that_was_not_renamed_is_not_removed(tmp_path: Path) -> None:
    save(tmp_path, 2)
    unfinished = unfinished_folder(tmp_path, 2)
    step_folder(tmp_path, 2).rename(unfinished)
    as_of_a_later_version(unfinished)
    with pytest.raises(ConfigError, match=NEWER):
        clear_leftovers(tmp_path)
    assert unfinished.is_dir()


def test_old_checkpoints_stay_beside_one_of_a_later_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    as_of_a_later_version(step_folder(tmp_path, 1))
    remove_old(tmp_path, CheckpointConfig(keep=1))
    assert list_steps(tmp_path) == [1, 2, 3]
    assert "old checkpoints stay: " in caplog.text


@pytest.mark.parametrize("digit", "0359")
def test_a_format_with_a_flipped_bit_is_damage(tmp_path: Path, digit: str) -> None:
    save(tmp_path, 2)
    path = step_folder(tmp_path, 2) / MANIFEST_FILE
    path.write_text(path.read_text().replace('"format": 1', f'"format": {digit}'))
    assert find_faults(step_folder(tmp_path, 2)) == ["manifest.json differs from its own digest"]


def test_a_pointer_that_was_being_replaced_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path, 7)
    for name in (".latest.tmp", ".latest.4711.draft"):
        (tmp_path / name).write_text("step_0000")
    clear_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000007"]
