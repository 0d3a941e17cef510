"""The policy through vLLM's own transfer engines into a live vLLM server, on GPUs.

vllm_ipc shares one device with the server; vllm_nccl needs a second one for it. What the server
then computes must be what the trainer computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist

from megatron_dapo import device
from megatron_dapo.config.schema import (
    DataConfig,
    ModelConfig,
    ReshardingConfig,
    RolloutConfig,
    RunConfig,
)
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.parallel.launch_env import LaunchEnv, init_process_group
from megatron_dapo.policy.policy import Policy
from megatron_dapo.resharding.load import load_hf_weights
from megatron_dapo.resharding.open_bridge import open_bridge
from megatron_dapo.rollout.engine import GenerationRequest
from megatron_dapo.rollout.fleet import EngineFleet
from tests.tiny_models import save_tiny_model

PROMPT = (5, 7, 11, 13, 17, 19)
SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128, "vocab_size": 1024}


def _config(folder: Path, transport: str, quantization: Literal["fp8"] | None) -> RunConfig:
    placement: Literal["colocated", "disaggregated"] = (
        "colocated" if transport == "vllm_ipc" else "disaggregated"
    )
    return RunConfig(
        run_dir=folder / "run",
        device="cuda",
        model=ModelConfig(path=folder, dtype="bfloat16"),
        data=DataConfig(train=folder / "none.jsonl", max_prompt_tokens=64),
        resharding=ReshardingConfig.model_validate(
            {"transport": transport, "bucket_mib": 8, "timeout_seconds": 120}
        ),
        rollout=RolloutConfig(
            placement=placement,
            engine_quantization=quantization,
            max_response_tokens=64,
            gpu_memory_utilization=0.3,
        ),
    )


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ParallelContext]:
    device.select("cuda", local_rank=0)
    env = LaunchEnv(0, 1, 0, "127.0.0.1", None)
    init_process_group(env, timeout=timedelta(seconds=300), backend=device.backend())
    config = _config(tmp_path_factory.mktemp("layout"), "vllm_ipc", None)
    context = ParallelContext.create(config.parallel, seed=3)
    yield context
    context.destroy()
    dist.destroy_process_group()


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("transport", ["vllm_ipc", "vllm_nccl"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_server_computes_what_was_sent(
    family: str,
    transport: str,
    quantization: Literal["fp8"] | None,
    tmp_path: Path,
    parallel: ParallelContext,
) -> None:
    if transport == "vllm_nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs a GPU for the engine beside the trainer's")
    experts = {"moe_intermediate_size": 256} if family == "qwen3_moe" else {}
    served = save_tiny_model(tmp_path, family, layers=2, seed=1, **SHAPE | experts)
    config = _config(tmp_path, transport, quantization)
    policy = Policy.build(config, served.config, parallel)
    load_hf_weights(policy.chunks, served.config, tmp_path, parallel)
    save_tiny_model(tmp_path, family, layers=2, seed=2, **SHAPE | experts)  # the engine's start
    policy.weights_loaded()
    fleet = EngineFleet(config, "cuda")
    bridge = open_bridge(config, policy.chunks, served.config, parallel, deliver=fleet.deliver)
    try:
        fleet.start()
        fleet.wait_ready()
        for version in (1, 2):
            payload = bridge.prepare(version)
            fleet.start_update({0: bridge.init_info(0)}, payload, version)
            bridge.send(version)
            fleet.finish_update(bridge.expected_digests())
            fleet.let_requests_in()
            bridge.acknowledged(version)
        request = GenerationRequest(
            prompt_token_ids=PROMPT, seed=0, temperature=1.0, top_p=1.0, top_k=-1,
            max_tokens=16, stop_token_ids=(), request_id="probe",
        )  # fmt: skip
        result = fleet.run(fleet.engines[0].generate(request))
        assert result.policy_version == 2
        tokens = torch.tensor([*PROMPT, *result.token_ids])
        with torch.no_grad():
            logits = served.to("cuda").float()(tokens[None].cuda()).logits[0].float()
        wanted = logits.log_softmax(-1)[len(PROMPT) - 1 : -1].cpu()
        wanted = wanted.gather(1, tokens[len(PROMPT) :, None])[:, 0]
        gap = (torch.tensor(result.logprobs) - wanted).abs().mean()
        assert gap < (0.05 if quantization is None else 0.3)
    finally:
        bridge.close()
        fleet.close()
