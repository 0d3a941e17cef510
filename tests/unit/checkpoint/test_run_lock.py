"""One run in a run directory, whatever dies and wherever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron_dapo.checkpoint import run_lock
from megatron_dapo.checkpoint.run_lock import OWNER_FILE, Owner, RunLock
from megatron_dapo.config import ConfigError

BEAT, STALE = 0.1, 1.5
HOLDER = """
import sys, time
from pathlib import Path
from megatron_dapo.checkpoint.run_lock import RunLock
with RunLock(Path(sys.argv[1]), {}):
    print("held", flush=True)
    time.sleep(600)
"""


def lock(folder: Path, **environ: str) -> RunLock:
    return RunLock(folder, environ, beat_seconds=BEAT, stale_seconds=STALE)


def write_owner(folder: Path, owner: Owner) -> None:
    folder.mkdir(exist_ok=True)
    (folder / OWNER_FILE).write_text(json.dumps(asdict(owner)))


def elsewhere(**changes: object) -> Owner:
    return replace(Owner.here({}), host="node7", place="another boot", **changes)  # type: ignore[arg-type]


def test_the_owner_is_named_while_it_lives_and_gone_after(tmp_path: Path) -> None:
    with lock(tmp_path / "run", SLURM_JOB_ID="42") as held:
        owner = json.loads((tmp_path / "run" / OWNER_FILE).read_text())
        assert (owner["pid"], owner["job"]) == (os.getpid(), "42")
        held.require_held()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_second_run_is_refused_by_name(tmp_path: Path) -> None:
    with lock(tmp_path):
        with pytest.raises(ConfigError, match=f"another run is going on .* process {os.getpid()}"):
            lock(tmp_path).acquire()
        assert (tmp_path / OWNER_FILE).exists()


def test_a_killed_owner_of_this_machine_is_replaced_at_once(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"process {holder.pid} on"):
            lock(tmp_path).acquire()
        os.kill(holder.pid, signal.SIGKILL)
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # left a zombie, which is dead too
        RunLock(tmp_path, {}, stale_seconds=1e6).acquire()
    finally:
        holder.kill()
        holder.wait()


def test_a_process_id_that_is_used_again_is_no_owner(tmp_path: Path) -> None:
    here = Owner.here({})
    write_owner(tmp_path, replace(here, started=here.started - 1, token="old"))
    with RunLock(tmp_path, {}, stale_seconds=1e6):
        assert json.loads((tmp_path / OWNER_FILE).read_text())["token"] != "old"


def test_an_owner_elsewhere_is_replaced_once_its_heart_stands_still(tmp_path: Path) -> None:
    write_owner(tmp_path, elsewhere(token="old"))
    started = time.monotonic()
    with lock(tmp_path) as held:
        assert time.monotonic() - started >= STALE
        held.require_held()


def test_an_owner_elsewhere_whose_heart_beats_is_left_alone(tmp_path: Path) -> None:
    with lock(tmp_path):
        owner = json.loads((tmp_path / OWNER_FILE).read_text())
        write_owner(tmp_path, Owner(**owner | {"host": "node7", "place": "another boot"}))
        with pytest.raises(ConfigError, match=r"process .* on node7"):
            RunLock(tmp_path, {}, beat_seconds=BEAT, stale_seconds=600).acquire()


def test_an_earlier_life_of_the_same_job_is_dead(tmp_path: Path) -> None:
    write_owner(tmp_path, elsewhere(job="42", restarts=1))
    requeued = {"SLURM_JOB_ID": "42", "SLURM_RESTART_COUNT": "2"}
    with RunLock(tmp_path, requeued, stale_seconds=1e6):
        assert json.loads((tmp_path / OWNER_FILE).read_text())["restarts"] == 2


def test_a_half_written_file_is_of_an_owner_that_died(tmp_path: Path) -> None:
    (tmp_path / OWNER_FILE).write_text('{"host": "no')
    with lock(tmp_path) as held:
        held.require_held()


def test_one_of_many_that_find_a_dead_owner_gets_it(tmp_path: Path) -> None:
    here = Owner.here({})
    write_owner(tmp_path, replace(here, started=here.started - 1))
    locks = [RunLock(tmp_path, {}) for _ in range(8)]
    refused: list[ConfigError] = []

    def acquire(one: RunLock) -> None:
        try:
            one.acquire()
        except ConfigError as error:
            refused.append(error)

    threads = [threading.Thread(target=acquire, args=(one,)) for one in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7
    for one in locks:
        one.release()
    assert list(tmp_path.iterdir()) == []


def test_an_owner_that_stood_still_too_long_writes_nothing_more(tmp_path: Path) -> None:
    held = lock(tmp_path)
    held.acquire()
    write_owner(tmp_path, elsewhere(token="new"))
    with pytest.raises(RuntimeError, match=r"was taken over by process .* on node7"):
        held.require_held()
    held.release()
    assert (tmp_path / OWNER_FILE).exists()


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run_dir=.* cannot be written"):
        lock(tmp_path / "file" / "run").acquire()


def test_a_file_system_that_falters_does_not_stop_the_heart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, read = [], run_lock._read

    def faltering(path: Path) -> Owner | None:
        if threading.current_thread().name == "run lock":
            reads.append(path)
            if len(reads) < 3:
                raise OSError(116, "Stale file handle", str(path))
        return read(path)

    monkeypatch.setattr(run_lock, "_read", faltering)
    with lock(tmp_path):
        before = (tmp_path / OWNER_FILE).stat().st_mtime_ns
        deadline = time.monotonic() + 30
        while len(reads) < 4 and time.monotonic() < deadline:
            time.sleep(BEAT / 4)
        assert len(reads) >= 4
        assert (tmp_path / OWNER_FILE).stat().st_mtime_ns > before


def test_a_full_disk_leaves_no_file_without_an_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_lock.json, "dumps", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        lock(tmp_path).acquire()
    assert list(tmp_path.iterdir()) == []
