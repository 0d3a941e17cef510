"""Which transport a run gets, and the combinations that are refused before a model is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import pytest

from megatron_dapo.config import ConfigError, RunConfig, check_config
from megatron_dapo.config.remarks import remarks
from megatron_dapo.config.resharding_checks import chosen_transport
from megatron_dapo.config.schema import ParallelConfig
from tests.unit.config.runs import DENSE, MOE, make_config

WIDE = DENSE | {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}
FP8 = {"engine_quantization": "fp8", "engine_dtype": "bfloat16"}
BLOCKS = "rollout.engine_quantization=fp8: scales are for blocks of 128 x 128, which the"
WIDE_HEADS = WIDE | {"num_attention_heads": 4, "num_key_value_heads": 2}
"""More ranks than key/value heads: each rank has a whole one of 128."""
BLOCKS_MOE = MOE | {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
}
Device = Literal["auto", "cpu", "cuda"]


def run(transport: str = "auto", device: Device = "auto", **rollout: object) -> RunConfig:
    config = make_config(resharding={"transport": transport}, rollout=rollout)
    return config.model_copy(update={"device": device})


def on_two_machines(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"parallel": ParallelConfig(data=2, nodes=2)})


def m2n(*, parallel: Mapping[str, object] | None = None, **rollout: object) -> RunConfig:
    config = make_config(
        resharding={"transport": "vllm_nccl_m2n"},
        rollout={"placement": "disaggregated", **rollout},
        parallel=parallel or {},
    )
    return config.model_copy(update={"device": "cuda"})


BROKEN: list[tuple[str, RunConfig, Mapping[str, object]]] = [
    *(
        (f"resharding.transport={name}: moves memory of GPUs", run(name, "cpu"), DENSE)
        for name in ("nccl", "cuda_ipc", "vllm_nccl", "vllm_ipc", "vllm_nccl_m2n")
    ),
    ("resharding.transport=gloo: moves memory of the CPU", run("gloo", "cuda"), DENSE),
    *(
        (
            f"resharding.transport={name}: engines must work on the trainers' GPUs",
            run(name, "cuda", placement="disaggregated"),
            DENSE,
        )
        for name in ("cuda_ipc", "vllm_ipc")
    ),
    *(
        (
            f"resharding.transport={name}: NCCL takes no two ranks on one GPU",
            run(name, "cuda", placement="colocated"),
            DENSE,
        )
        for name in ("nccl", "vllm_nccl", "vllm_nccl_m2n")
    ),
    *(
        (
            f"resharding.transport={name}: memory of a GPU cannot be opened on another machine",
            on_two_machines(run(name, "cuda")),
            DENSE,
        )
        for name in ("cuda_ipc", "vllm_ipc")
    ),
    *(
        (
            f"resharding.transport={name}: trainers and engines meet on 127.0.0.1",
            on_two_machines(
                run(name, "cuda", placement="disaggregated", endpoints=("unix:/engine",))
            ),
            DENSE,
        )
        for name in ("vllm_nccl", "vllm_nccl_m2n")
    ),
    *(
        (
            f"resharding.probe_tokens=0: resharding.transport={name} brings no digests",
            make_config(
                resharding={"transport": name, "probe_tokens": 0, "verify_digests": digests},
                rollout={"placement": placement},
            ).model_copy(update={"device": "cuda"}),
            DENSE,
        )
        for name, placement, digests in (
            ("vllm_nccl", "disaggregated", True),
            ("vllm_ipc", "colocated", False),
            ("vllm_nccl_m2n", "disaggregated", True),
        )
    ),
    (
        "resharding.probe_tokens=0: with resharding.verify_digests=false nothing would show",
        make_config(resharding={"probe_tokens": 0, "verify_digests": False}),
        DENSE,
    ),
    ("rollout.engine_quantization=fp8: engines on CPU", run(device="cpu", **FP8), WIDE),
    (
        "rollout.engine_quantization=fp8: engines compute in bfloat16",
        run(device="cuda", engine_quantization="fp8", engine_dtype="float32"),
        WIDE,
    ),
    (
        "rollout.engine_quantization=fp8: scales are for blocks",
        run(device="cuda", **FP8, engine_tensor=2, placement="disaggregated"),
        WIDE | {"intermediate_size": 128 * 3},
    ),
    *(
        (
            f"{BLOCKS} {what}",
            run(device="cuda", **FP8, engine_tensor=ranks, placement="disaggregated"),
            hf,
        )
        for what, ranks, hf in (
            ("576 of hidden_size", 1, WIDE | {"hidden_size": 576}),
            ("64 of the key heads", 1, WIDE | {"head_dim": 64, "num_key_value_heads": 1}),
            ("192 of moe_intermediate_size", 4, BLOCKS_MOE),
        )
    ),
    *(
        (f"resharding.transport=vllm_nccl_m2n and {key}", config, hf)
        for key, config, hf in (
            ("parallel.pipeline=2", m2n(parallel={"pipeline": 2}), DENSE),
            ("parallel.expert=2", m2n(parallel={"data": 2, "expert": 2}), MOE),
            (
                "parallel.expert_tensor=2",
                m2n(parallel={"tensor": 4, "expert_tensor": 2}),
                MOE | {"num_key_value_heads": 4},
            ),
            (
                "parallel.tensor=32",
                m2n(parallel={"tensor": 32}),
                DENSE | {"num_attention_heads": 32, "num_key_value_heads": 32},
            ),
            ("rollout.engines=2", m2n(engines=2), DENSE),
            ("rollout.engine_quantization=fp8", m2n(**FP8), WIDE),
        )
    ),
    (
        "rollout.engine_tensor=4: must divide the model's 6 key/value heads",
        run(engine_tensor=4),
        DENSE | {"num_attention_heads": 12, "num_key_value_heads": 6},
    ),
    (
        "rollout.engine_tensor=4: must divide the model's intermediate_size=250",
        run(engine_tensor=4),
        DENSE | {"intermediate_size": 250},
    ),
    (
        "rollout.engine_tensor=4: must divide the model's moe_intermediate_size=62",
        run(engine_tensor=4),
        MOE | {"moe_intermediate_size": 62},
    ),
    (
        "resharding.probe_tolerance=0.1: not read",
        make_config(resharding={"probe_tokens": 0, "probe_tolerance": 0.1}),
        DENSE,
    ),
]


@pytest.mark.parametrize(("message", "config", "hf"), BROKEN)
def test_what_cannot_work_is_refused(
    message: str, config: RunConfig, hf: Mapping[str, object]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(config, hf)
    assert [problem for problem in caught.value.problems if problem.startswith(message)]
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("config", "hf"),
    [
        (run(), DENSE),
        (run("files", "cpu"), DENSE),
        (make_config(resharding={"probe_tokens": 0}), DENSE),
        (make_config(resharding={"verify_digests": False}), DENSE),
        (run("gloo", "cpu"), DENSE),
        (run("gloo"), DENSE),
        (run("files", "cuda"), DENSE),
        (run("cuda_ipc", "cuda", placement="colocated"), DENSE),
        (run("nccl", "cuda", placement="disaggregated"), DENSE),
        (run(device="cuda", **FP8, engine_tensor=2, placement="disaggregated"), WIDE),
        (run(device="cuda", **FP8, engine_tensor=4, placement="disaggregated"), WIDE_HEADS),
        (run(device="cuda", **FP8, engine_tensor=2, placement="disaggregated"), BLOCKS_MOE),
        (m2n(parallel={"tensor": 2, "data": 2}), DENSE),
        (m2n(parallel={"tensor": 2, "expert_tensor": 1}), MOE),
        (run("vllm_nccl", "cuda", placement="disaggregated", **FP8), WIDE),
        (run("vllm_ipc", "cuda", placement="colocated"), DENSE),
        (run(engine_tensor=4), DENSE),
    ],
)
def test_what_can_work_is_not_refused(config: RunConfig, hf: Mapping[str, object]) -> None:
    check_config(config, hf)


@pytest.mark.parametrize(
    ("device", "placement", "transport"),
    [
        ("cpu", "colocated", "files"),
        ("cpu", "disaggregated", "files"),
        ("cuda", "colocated", "cuda_ipc"),
        ("cuda", "disaggregated", "nccl"),
    ],
)
def test_auto_takes_what_suits_device_and_placement(
    device: Literal["cpu", "cuda"], placement: str, transport: str
) -> None:
    assert chosen_transport(run(placement=placement), device) == transport
    several = on_two_machines(run(placement=placement))
    shared = "files" if transport == "cuda_ipc" else transport
    assert chosen_transport(several, device) == shared, "GPUs of other machines cannot be opened"
    assert chosen_transport(run("files", placement=placement), device) == "files"


@pytest.mark.parametrize(
    ("transport", "digests", "words"),
    [
        ("vllm_ipc", True, ["brings no digests", "sends pickled handles"]),
        ("vllm_ipc", False, ["sends pickled handles"]),
        ("vllm_nccl", True, ["brings no digests", "a port of 127.0.0.1 that asks nobody"]),
        ("vllm_nccl_m2n", False, ["a port of 127.0.0.1 that asks nobody"]),
        ("nccl", True, []),
        ("cuda_ipc", True, []),
        ("auto", False, []),
    ],
)
def test_what_a_transport_of_vllm_leaves_unguarded_is_remarked_on(
    transport: str, digests: bool, words: list[str]
) -> None:
    config = make_config(
        resharding={"transport": transport, "verify_digests": digests},
        data={"heldout": "h.jsonl"},
    )
    found = list(remarks(config))
    assert [word in said for word, said in zip(words, found, strict=True)] == [True] * len(words)
