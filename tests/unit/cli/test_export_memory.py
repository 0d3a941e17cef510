"""An export in a process of its own: what it writes, what it needs, and what a kill leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import REPOSITORY
from tests.unit.cli.exported_run import write_exported_run

PEAK = """
import sys
from megatron_dapo.cli.main import main
code = main(sys.argv[1:])
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
sys.stderr.write("peak_kib=" + status["VmHWM"].split()[0])
sys.exit(code)
"""


STANDS_STILL = """
import sys, time
from megatron_dapo.checkpoint import safetensors_shards
from megatron_dapo.cli.main import main
next_bytes = safetensors_shards._next_bytes
def stand_still_at_the_last(arriving, name, *rest):
    if name == "lm_head.weight":
        print("in the middle", flush=True)
        time.sleep(600)
    return next_bytes(arriving, name, *rest)
safetensors_shards._next_bytes = stand_still_at_the_last
sys.exit(main(sys.argv[1:]))
"""


def export(run: Path, out: Path, *overrides: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """The finished command, and the most memory that it held, in MB."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, "export", str(run), str(out), *overrides],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    _, _, peak = done.stderr.rpartition("peak_kib=")
    return done, int(peak) * 1024 / 1e6


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("small")
    return folder, write_exported_run(folder, layers=2, dtype=torch.float32)


def test_an_export_needs_no_more_memory_for_a_model_ten_times_the_size(
    small: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, tensors = small
    done, peak_of_small = export(folder / "run", tmp_path / "small")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'small'}\n"), done.stderr
    written = load_file(tmp_path / "small" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())
    assert json.loads((tmp_path / "small" / "config.json").read_text())["dtype"] == "float32"
    large = write_exported_run(tmp_path / "large_run", layers=20, dtype=torch.float32)
    megabytes = sum(tensor.nbytes for tensor in large.values()) / 1e6
    assert megabytes > 200
    done, peak_of_large = export(tmp_path / "large_run" / "run", tmp_path / "large")
    assert done.returncode == 0, done.stderr
    assert peak_of_large - peak_of_small < 0.1 * megabytes


def test_the_dtype_may_be_rounded(
    small: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, tensors = small
    done, _ = export(folder / "run", tmp_path / "out", "model.dtype=bfloat16")
    assert done.returncode == 0, done.stderr
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], tensor.bfloat16()) for name, tensor in tensors.items())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_export_leaves_nothing_that_looks_finished(
    tmp_path: Path, number: signal.Signals
) -> None:
    write_exported_run(tmp_path, layers=2, dtype=torch.float32)
    out, unfinished = tmp_path / "out", tmp_path / ".out.tmp"
    process = subprocess.Popen(
        [sys.executable, "-c", STANDS_STILL, "export", tmp_path / "run", out],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "in the middle\n"
    assert list(unfinished.glob("*.safetensors"))
    process.send_signal(number)
    process.communicate()
    code = process.returncode
    assert not out.exists()
    if number == signal.SIGTERM:
        assert code == 128 + number
        assert not unfinished.exists()
    else:
        assert not (unfinished / "config.json").exists()


def test_a_damaged_checkpoint_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    write_exported_run(tmp_path, layers=1, dtype=torch.bfloat16)
    (file,) = (tmp_path / "run").rglob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    done, _ = export(tmp_path / "run", tmp_path / "out")
    assert done.returncode == 78
    step = file.parents[1]
    assert f"{step} is damaged: megatron/{file.name} differs from the digest" in done.stderr
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.tmp").exists()
