"""`megatron-dapo plan` prints what an update moves, without weights and without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dapo.cli.main import main
from tests.conftest import REPOSITORY
from tests.unit.cli.test_dry_run import SHIPPED
from tests.unit.config.runs import write_run


@pytest.fixture(autouse=True)
def shipped_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("MODEL", raising=False)
    monkeypatch.chdir(REPOSITORY)


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("file", SHIPPED)
def test_every_shipped_configuration_has_a_plan(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = " ".join(plan(capsys, file).split())
    assert "1.000 of the lower bound" in text
    assert "straight into the parameters that the engines keep as they are" in text
    assert "memory of a rank at its peak" in text


def test_the_32b_update_is_spelled_out(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(plan(capsys, "examples/qwen32b/dapo.yaml", "rollout.engine_tensor=2").split())
    assert "128 trainer ranks -> 2 engine(s) of 2 rank(s), bfloat16, transport files" in text
    assert "128 of 128 ranks send" in text
    assert "buckets: 123 of 512 MiB; either side holds at most two beside its model, 1.000" in text
    assert "0-63" in text and "64-127" in text


def test_files_and_transports_that_do_not_follow_the_plan_say_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    update = ("examples/qwen32b/dapo.yaml", "rollout.engine_tensor=2")
    found = json.loads(plan(capsys, *update, "--json"))
    text = " ".join(plan(capsys, *update, "run_dir=shared/run").split())
    two = 2 * found["bytes_moved"] / 2 / 2**30  # versions, engines
    assert f"files of 2 versions take {two:,.3f} GiB in " in text and "/shared/run" in text
    assert f"up to {found['rebuilt_bytes'] / 2**30:.3f} GiB of them" in text
    one_machine = ("parallel.nodes=1", "rollout.placement=disaggregated", "device=cuda")
    text = " ".join(plan(capsys, *update, *one_machine, "resharding.transport=vllm_nccl").split())
    assert "vllm_nccl does not follow this plan: vLLM moves full tensors" in text
    assert "files of" not in text and "straight into" not in text


def test_an_fp8_update_moves_what_the_engines_own(capsys: pytest.CaptureFixture[str]) -> None:
    fp8 = ("rollout.engine_quantization=fp8", "rollout.engine_tensor=2")
    text = " ".join(plan(capsys, "examples/qwen3_30b_a3b/gspo.yaml", *fp8).split())
    assert "2 rank(s), fp8/bfloat16, transport" in text
    assert "1.000 of the lower bound" in text
    assert "straight into the parameters that the engines keep as they are" in text
    assert "FP8: 1,824,768 blocks of 128 x 128" in text
    assert "each lies on one trainer rank" in text
    found = json.loads(plan(capsys, "examples/qwen3_30b_a3b/gspo.yaml", *fp8, "--json"))
    whole = json.loads(plan(capsys, "examples/qwen3_30b_a3b/gspo.yaml", fp8[1], "--json"))
    assert found["bytes_moved"] == found["lower_bound"]
    assert 0.5 < found["bytes_moved"] / whole["bytes_moved"] < 0.53
    assert whole["blocks"] == whole["shared_blocks"] == 0
    # Four attention matrices and 128 experts a layer, in blocks.
    layer = 16 * (2 * 32 + 2 * 4) + 128 * 3 * 16 * 6
    assert found["blocks"] == 48 * layer


def test_blocks_that_trainers_cut_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    fp8 = ("rollout.engine_quantization=fp8", "rollout.engine_tensor=2", "--json")
    cut = ("examples/qwen3_30b_a3b/gspo.yaml", "parallel.expert_tensor=4", "parallel.expert=8")
    found = json.loads(plan(capsys, *cut, *fp8))
    assert found["shared_blocks"] == 48 * 128 * 3 * 2 * 16
    assert found["bytes_moved"] == found["lower_bound"]
    text = " ".join(plan(capsys, *cut, *fp8[:-1]).split())
    assert "589,824 lie on several trainer ranks, which exchange their maxima first" in text


def test_programs_get_the_bytes_of_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("examples/qwen3_30b_a3b/gspo.yaml", "resharding.bucket_mib=64", "--json")
    found = json.loads(plan(capsys, *arguments))
    sent = [found["bytes_by_sender"][str(rank)] for rank in range(32)]
    received = [found["bytes_by_receiver"][str(rank)] for rank in range(8)]
    assert sum(sent) == sum(received) == found["bytes_moved"] == found["lower_bound"]
    assert max(sent) <= 1.1 * min(sent)
    assert 2 * 63 * 2**20 < found["memory_bound"] <= 2 * 64 * 2**20
    # Keys and values of 4 heads fit 4 ranks, so an engine owns each weight once; norms, their
    # copies for heads and the routers are on every rank.
    copied = 48 * (2 * 2048 + 2 * 128 + 128 * 2048) + 2048
    assert found["bytes_moved"] == 2 * 2 * (30_532_122_624 + 3 * copied)


def test_few_ranks_are_listed_one_by_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_run(tmp_path)
    lines = plan(capsys, str(config), "device=cpu").splitlines()
    assert any("transport files" in line for line in lines)
    assert any(line.split()[1:4] == ["0", "│", "0"] for line in lines if line.startswith("│"))


def test_a_layout_that_the_model_does_not_fit_is_bad_configuration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "examples/qwen32b/dapo.yaml", "rollout.engine_tensor=7"]) == 78
    assert "rollout.engine_tensor=7" in capsys.readouterr().err
