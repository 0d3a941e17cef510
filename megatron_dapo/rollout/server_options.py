"""How one vLLM server is started: its command line and its environment."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_dapo.config.model_shape import ModelShape, read_hf_config
from megatron_dapo.config.redact import names_a_secret, redact_text
from megatron_dapo.config.resharding_checks import VLLM_BACKENDS
from megatron_dapo.config.schema import RunConfig
from megatron_dapo.rollout.token_guard import TOKEN_FILE

Device = Literal["cpu", "cuda"]
"""That an engine runs on."""
SERVED_NAME = "policy"
BACKEND = "megatron_dapo"
"""Weight-transfer backend, registered on the engine's side by our plug-in."""
WORKER_EXTENSION = "megatron_dapo.resharding.vllm_worker.WeightReports"
"""What /collective_rpc can ask of a worker beside vLLM's own methods."""
GUARD = "megatron_dapo.rollout.token_guard.TokenGuard"
"""Before every route of a server with a port."""
FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
"""`quantization_config` of the engine's model, without the modules that stay as they are. Keys and
values in the cache keep the engine's dtype: no scales of theirs would come with new weights."""
CPU_MEMORY_FRACTION = 0.1
"""Of RAM. On CPU the cache has its own size (`rollout.cpu_kv_cache_gib`)."""

CPU_BATCHED_TOKENS = 2048
"""Tokens of one step of an engine on CPU, unless one sequence can be longer."""

_LAUNCHER_PREFIXES = ("MASTER_", "TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "SLURM_")
_LAUNCHER_NAMES = frozenset(
    [
        *("RANK", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    ]
)
_NEVER_PASSED = frozenset({"VLLM_ALLOW_INSECURE_SERIALIZATION", "HOST_IP", "LD_PRELOAD"})


@dataclass(frozen=True)
class Address:
    """Where a server listens for trainers of other machines. Every request needs the token."""

    host: str
    port: int
    token_file: Path


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """One engine of a run, resolved; built by `server_options`."""

    model: Path
    index: int
    """Replica number, 0 .. engines - 1."""
    seed: int
    device: Device
    visible_devices: tuple[int, ...] = ()
    """Of this engine, counted among the CUDA devices that the parent sees; empty: all of those."""
    tensor: int
    dtype: str
    quantization: Literal["fp8"] | None = None
    """The engine starts without weights then: the model folder's are not quantized."""
    unconverted: tuple[str, ...] = ()
    """Modules of the layers that quantization leaves alone."""
    backend: str = BACKEND
    """Of vLLM's weight transfer."""
    logprobs: Literal["processed", "raw"]
    max_model_tokens: int
    max_sequences: int
    memory_fraction: float
    cpu_kv_cache_gib: int
    trust_remote_code: bool
    sleep_mode: bool
    """Weights and cache can leave the device between phases (co-located engines on GPU)."""
    startup_timeout_seconds: float
    log_file: Path
    address: Address | None = None
    """None: a unix socket in a private directory."""


def server_options(
    config: RunConfig,
    index: int,
    *,
    device: Device,
    visible_devices: tuple[int, ...] = (),
    address: Address | None = None,
) -> ServerOptions:
    """Options of engine `index` of a run on `device`."""
    rollout = config.rollout
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    return ServerOptions(
        model=config.model.path.absolute(),
        index=index,
        seed=config.seed + index,
        device=device,
        visible_devices=visible_devices,
        tensor=rollout.engine_tensor,
        dtype=config.engine_dtype,
        quantization=rollout.engine_quantization,
        unconverted=_unconverted(config) if rollout.engine_quantization is not None else (),
        backend=VLLM_BACKENDS.get(config.resharding.transport, BACKEND),
        logprobs=rollout.logprobs,
        max_model_tokens=rollout.max_engine_tokens or longest,
        max_sequences=rollout.max_concurrent_sequences,
        memory_fraction=rollout.gpu_memory_utilization if device == "cuda" else CPU_MEMORY_FRACTION,
        cpu_kv_cache_gib=rollout.cpu_kv_cache_gib,
        trust_remote_code=config.model.trust_remote_code,
        sleep_mode=device == "cuda" and rollout.placement == "colocated",
        startup_timeout_seconds=rollout.startup_timeout_seconds,
        log_file=config.run_dir / "logs" / f"rollout_engine_{index}.log",
        address=address,
    )


def _unconverted(config: RunConfig) -> tuple[str, ...]:
    """Routers, layer by layer: vLLM compares whole names. Embedding and head it never converts."""
    shape = ModelShape.from_hf(read_hf_config(config.model.path))
    layers = range(shape.layers if shape.is_moe else 0)
    return ("lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in layers))


def server_command(options: ServerOptions, socket: Path) -> list[str]:
    """The stock vLLM server, listening on `socket` only, or on its address behind the guard."""
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *_listen(options.address, socket),
        *("--model", str(options.model), "--served-model-name", SERVED_NAME),
        *("--skip-tokenizer-init", "--generation-config", "vllm", "--enable-scale-out"),
        *("--load-format", "safetensors" if options.quantization is None else "dummy"),
        *("--dtype", options.dtype),
        *("--tensor-parallel-size", str(options.tensor), "--seed", str(options.seed)),
        *("--max-model-len", str(options.max_model_tokens)),
        *("--max-num-seqs", str(options.max_sequences)),
        *("--logprobs-mode", f"{options.logprobs}_logprobs"),
        *("--weight-transfer-config", json.dumps({"backend": options.backend})),
        *("--worker-extension-cls", WORKER_EXTENSION),
        *("--gpu-memory-utilization", str(options.memory_fraction)),
        *("--disable-uvicorn-access-log", "--enable-prompt-tokens-details"),
    ]
    if options.quantization is not None:
        blocks = FP8_BLOCKS | {"modules_to_not_convert": list(options.unconverted)}
        overrides = json.dumps({"quantization_config": blocks})
        command += ["--quantization", options.quantization, "--hf-overrides", overrides]
    if options.device == "cpu":
        # A seeded prompt that is cut between two steps ends vLLM's CPU worker.
        whole_prompts = max(options.max_model_tokens, CPU_BATCHED_TOKENS)
        command += ["--enforce-eager", "--no-enable-chunked-prefill"]
        command += ["--max-num-batched-tokens", str(whole_prompts)]
    if options.sleep_mode:
        command += ["--enable-sleep-mode"]
    if options.trust_remote_code:
        command += ["--trust-remote-code"]
    return command


def _listen(address: Address | None, socket: Path) -> list[str]:
    if address is None:
        return ["--uds", str(socket)]
    return ["--host", address.host, "--port", str(address.port), "--middleware", GUARD]


def server_environment(
    options: ServerOptions, scratch: Path, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Environment of the server: nothing of the launcher's, no secrets, no outside network.

    Args:
        scratch: the server's private directory for sockets and temporary files.
        inherited: environment of this process.

    Raises:
        ValueError: this process sees fewer CUDA devices than the engine asks for.
    """
    environment = {
        name: value
        for name, value in inherited.items()
        if name not in _LAUNCHER_NAMES | _NEVER_PASSED
        and not name.startswith(_LAUNCHER_PREFIXES)
        and not names_a_secret(name)
        and redact_text(value) == value
    }
    environment |= {
        "TMPDIR": str(scratch),
        "VLLM_RPC_BASE_PATH": str(scratch),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOOPBACK_IP": "127.0.0.1",
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "VLLM_SERVER_DEV_MODE": "1",  # the weight-update routes
        "VLLM_PLUGINS": BACKEND,
        "MEGATRON_DAPO_GUARDED": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if options.address is not None:  # trainers of other machines send weights to it
        environment[TOKEN_FILE] = str(options.address.token_file)
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            environment.pop(name)
            if name in inherited:
                environment[name] = inherited[name]
    if options.backend == "ipc":
        # Its handles are pickled. The socket lies in a directory of this user alone.
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if options.visible_devices:
        seen = inherited.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = _device_names(options.visible_devices, seen)
    if options.device == "cpu":
        environment |= {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": str(options.cpu_kv_cache_gib),
        }
    if options.device == "cpu" and options.tensor == 1:
        # The worker lives in the engine's process: as two they spin, waiting for each other, on
        # the cores that the trainers need. What vLLM keeps them apart for is threads; this has one.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return environment


def _device_names(places: Sequence[int], seen: str | None) -> str:
    """The devices at `places` as a child must name them: by the machine's numbers or UUIDs."""
    if seen is None:
        return ",".join(map(str, places))
    names = seen.split(",")
    if max(places) >= len(names):
        raise ValueError(
            f"rollout.engines x rollout.engine_tensor: an engine needs device {max(places)} of "
            f"this process, which sees {len(names)} (CUDA_VISIBLE_DEVICES={seen}). Show it more, "
            "or lower one of the two."
        )
    return ",".join(names[place] for place in places)
