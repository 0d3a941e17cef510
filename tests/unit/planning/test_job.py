"""Facts of a job for launch scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dapo.planning.job import main
from megatron_dapo.planning.ports import master_port
from tests.conftest import REPOSITORY
from tests.unit.config.runs import write_run


def test_the_papers_job_is_128_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert main(["1000123", "examples/qwen32b/dapo.yaml", "run_dir=/scratch/my run"]) == 0
    facts = dict(line.split("=", 1) for line in capsys.readouterr().out.splitlines())
    assert facts["RUN_DIR"] == "'/scratch/my run'"
    assert (facts["NODES"], facts["RANKS_PER_NODE"], facts["DEVICE"]) == ("16", "8", "cuda")
    assert int(facts["CHECKPOINT_GIB"]) == 428  # 32.76e9 parameters x 14 bytes
    assert int(facts["MASTER_PORT"]) == master_port(1000123)


def test_a_refused_configuration_gives_no_facts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["1", str(write_run(tmp_path)), "parallel.tensor=3"]) == 78
    assert capsys.readouterr().out == ""


def test_a_job_id_is_a_number() -> None:
    assert main(["1_2", "x.yaml"]) == 2
