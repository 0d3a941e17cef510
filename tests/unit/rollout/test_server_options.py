from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dapo.config.schema import ModelConfig, ReshardingConfig, RunConfig
from megatron_dapo.rollout.server_options import (
    CPU_MEMORY_FRACTION,
    Device,
    server_command,
    server_environment,
    server_options,
)
from tests.unit.config.runs import DENSE, MOE


def config(**rollout: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_dir": "/runs/a",
            "seed": 7,
            "model": {"path": "/models/tiny", "dtype": "bfloat16"},
            "data": {"train": "/data/train.jsonl", "max_prompt_tokens": 100},
            "rollout": {"max_response_tokens": 400, **rollout},
        }
    )


def flag(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_the_command_is_the_stock_server_on_a_unix_socket() -> None:
    command = server_command(server_options(config(), 1, device="cpu"), Path("/s/http"))
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert flag(command, "--uds") == "/s/http"
    assert not {"--host", "--port"} & set(command)
    assert flag(command, "--logprobs-mode") == "processed_logprobs"
    assert flag(command, "--max-model-len") == "500"
    assert flag(command, "--dtype") == "bfloat16"
    assert flag(command, "--weight-transfer-config") == '{"backend": "megatron_dapo"}'
    assert "--enforce-eager" in command
    assert "--trust-remote-code" not in command


def test_workers_can_be_asked_for_their_weights() -> None:
    command = server_command(server_options(config(), 0, device="cpu"), Path("/s/http"))
    module, _, name = flag(command, "--worker-extension-cls").rpartition(".")
    extension = getattr(importlib.import_module(module), name)
    assert {"weight_digests", "weight_report"} <= set(dir(extension))


@pytest.mark.parametrize(
    ("model", "routers"),
    [(DENSE, []), (MOE, [f"model.layers.{layer}.mlp.gate" for layer in range(4)])],
    ids=["dense", "moe"],
)
def test_a_quantized_engine_waits_for_weights_in_blocks_with_scales(
    tmp_path: Path, model: dict[str, object], routers: list[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    run = config(engine_quantization="fp8")
    run = run.model_copy(update={"model": ModelConfig(path=tmp_path, dtype="bfloat16")})
    command = server_command(server_options(run, 0, device="cuda"), Path("/s/http"))
    assert flag(command, "--quantization") == "fp8"
    assert flag(command, "--load-format") == "dummy"
    assert "--kv-cache-dtype" not in command  # its scales would not come with the weights
    assert json.loads(flag(command, "--hf-overrides"))["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", *routers],
    }
    plain = server_command(server_options(config(), 0, device="cuda"), Path("/s/http"))
    assert flag(plain, "--load-format") == "safetensors"
    assert not {"--quantization", "--hf-overrides"} & set(plain)


@pytest.mark.parametrize("backend", ["nccl", "ipc", "nccl_m2n"])
def test_an_engine_takes_weights_by_the_backend_of_vllm_that_the_run_asks_for(backend: str) -> None:
    run = config().model_copy(
        update={"resharding": ReshardingConfig.model_validate({"transport": f"vllm_{backend}"})}
    )
    options = server_options(run, 0, device="cuda")
    command = server_command(options, Path("/s/http"))
    assert json.loads(flag(command, "--weight-transfer-config")) == {"backend": backend}
    environment = server_environment(options, Path("/s"), {})
    assert ("VLLM_ALLOW_INSECURE_SERIALIZATION" in environment) == (backend == "ipc")


def test_a_relative_model_path_survives_the_server_s_own_working_directory() -> None:
    relative = config().model_copy(update={"model": ModelConfig(path=Path("models/tiny"))})
    options = server_options(relative, 0, device="cpu")
    assert options.model == Path.cwd() / "models" / "tiny"


def test_replicas_have_different_seeds_and_log_files() -> None:
    options = [server_options(config(), index, device="cpu") for index in range(3)]
    assert [o.seed for o in options] == [7, 8, 9]
    assert options[2].log_file == Path("/runs/a/logs/rollout_engine_2.log")


def test_configured_limits_reach_the_command() -> None:
    options = server_options(
        config(max_engine_tokens=450, engine_dtype="float32", engine_tensor=2, logprobs="raw"),
        0,
        device="cpu",
    )
    command = server_command(options, Path("/s/http"))
    assert flag(command, "--max-model-len") == "450"
    assert flag(command, "--dtype") == "float32"
    assert flag(command, "--tensor-parallel-size") == "2"
    assert flag(command, "--logprobs-mode") == "raw_logprobs"


@pytest.mark.parametrize(
    ("device", "placement", "sleeps"),
    [("cpu", "colocated", False), ("cuda", "colocated", True), ("cuda", "disaggregated", False)],
)
def test_only_colocated_engines_on_gpu_can_sleep(device, placement, sleeps) -> None:
    options = server_options(config(placement=placement), 0, device=device)
    command = server_command(options, Path("/s/http"))
    assert ("--enable-sleep-mode" in command) == options.sleep_mode == sleeps
    expected = 0.85 if device == "cuda" else CPU_MEMORY_FRACTION
    assert flag(command, "--gpu-memory-utilization") == str(expected)


def test_the_environment_keeps_launcher_secrets_and_unsafe_switches_out() -> None:
    inherited = {
        "PATH": "/bin",
        "RANK": "3",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "node0",
        "TORCHELASTIC_RUN_ID": "x",
        "SLURM_PROCID": "3",
        "WANDB_API_KEY": "canary",
        "HF_TOKEN": "canary",
        "TOKEN": "canary",
        "db_passwd": "canary",
        "HTTPS_PROXY": "http://user:canary@proxy:3128",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_HOST_IP": "10.0.0.1",
    }
    options = server_options(config(), 0, device="cpu")
    environment = server_environment(options, Path("/s"), inherited)
    assert environment["PATH"] == "/bin"
    assert set(inherited) & set(environment) == {"PATH", "VLLM_HOST_IP"}
    assert environment["VLLM_HOST_IP"] == "127.0.0.1"
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert environment["TMPDIR"] == "/s"
    assert environment["VLLM_PLUGINS"] == "megatron_dapo"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.parametrize(
    ("device", "tensor", "alone"), [("cpu", 1, True), ("cpu", 2, False), ("cuda", 1, False)]
)
def test_only_the_one_worker_of_a_cpu_engine_lives_in_its_process(
    device: Device, tensor: int, alone: bool
) -> None:
    options = replace(server_options(config(), 0, device=device), tensor=tensor)
    environment = server_environment(options, Path("/s"), {})
    assert ("VLLM_ENABLE_V1_MULTIPROCESSING" in environment) is alone


@pytest.mark.parametrize(
    ("seen", "named"),
    [({}, "2,3"), ({"CUDA_VISIBLE_DEVICES": "4,5,6,GPU-7f"}, "6,GPU-7f")],
    ids=["all of the machine", "some of the machine"],
)
def test_a_gpu_engine_gets_its_own_of_the_devices_that_the_trainer_sees(
    seen: dict[str, str], named: str
) -> None:
    options = server_options(config(), 0, device="cuda", visible_devices=(2, 3))
    environment = server_environment(options, Path("/s"), seen)
    assert environment["CUDA_VISIBLE_DEVICES"] == named
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment


def test_a_gpu_engine_never_takes_a_device_that_the_trainer_does_not_see() -> None:
    options = server_options(config(), 0, device="cuda", visible_devices=(1, 2))
    with pytest.raises(ValueError, match="needs device 2 of this process, which sees 2"):
        server_environment(options, Path("/s"), {"CUDA_VISIBLE_DEVICES": "0,1"})
