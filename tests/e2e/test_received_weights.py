"""vLLM's own models take planned updates: the same bytes as a load from a folder, in every way.

Model and kernels are vLLM's, for one tensor rank and for two; only scheduler and server are left
out. The processes walk through all cases, because vLLM takes long to import.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from megatron_dapo.resharding.plan import ReshardPlan
from megatron_dapo.resharding.train_map import TrainLayout
from megatron_dapo.resharding.transport import new_payload
from tests.e2e.vllm_models import (
    VLLM_ENVIRONMENT,
    digests_of,
    init_info,
    kernel_state,
    load_model,
    plan_of,
    publish_messages,
    tensors_of,
    vllm_config,
)
from tests.tiny_models import save_tiny_model

DENSE = TrainLayout(tensor=2, pipeline=2, data=2, padded_vocab_size=640)
MOE = TrainLayout(tensor=2, pipeline=2, data=2, expert=2, expert_tensor=1, padded_vocab_size=512)
BUCKET_BYTES = 200_000
CASES = {
    "qwen2": ("float32", DENSE),
    "qwen2_tied": ("bfloat16", DENSE),
    "qwen3_moe": ("float32", MOE),
}
LAYERS = 2


@dataclass
class Worker:
    """One engine worker: our weight-transfer engine around a model of vLLM."""

    rank: int
    folder: Path
    plan: ReshardPlan
    config: object
    engine: object
    model: nn.Module
    weights: Path
    version: int = 0

    def connect(self) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(self.init_info()))

    def init_info(self, **changes: object) -> dict[str, object]:
        return init_info(self.plan, self.weights) | changes

    def publish(self, name: str) -> tuple[dict[str, object], dict[str, str]]:
        """Both ranks publish for themselves, in directories of their own."""
        self.version += 1
        tensors = tensors_of(self.folder / name)
        payload, digests = publish_messages(self.plan, tensors, self.weights, self.version)
        return payload, digests[self.rank]

    def update(self, payload: dict[str, object]) -> None:
        self.engine.start_weight_update()
        self.engine.update_weights(payload)
        self.engine.finish_weight_update()

    def digests(self) -> dict[str, str]:
        return self.engine.planned.digests()

    def holds(self, state: dict[str, Tensor]) -> bool:
        found = kernel_state(self.model)
        return found.keys() == state.keys() and all(
            torch.equal(found[name], value) for name, value in state.items()
        )


def refused(call: Callable[[], object], *words: str) -> None:
    """`call` must raise an error that says all the words."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        assert all(word in str(error) for word in words), f"{words} are not in {error!r}"
        return
    raise AssertionError(f"nothing was raised; expected were {words}")


def shorten(worker: Worker, payload: dict[str, object]) -> None:
    """Cut the last file of a version for this worker short."""
    path = sorted(Path(str(payload["folder"])).glob(f"*_to_{worker.rank}.*"))[-1]
    os.truncate(path, path.stat().st_size - 100)


def check_ways(worker: Worker, old: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    """Messages into live and rebuilt parameters, then through vLLM's loader."""
    from megatron_dapo.resharding import vllm_layers

    worker.connect()
    reference = digests_of(
        load_model(worker.config, worker.folder / "new", kernels=False), worker.plan
    )
    payload, sent = worker.publish("new")
    worker.update(payload)
    report = worker.engine.planned.report()
    assert worker.digests() == sent == reference
    assert worker.holds(new)
    assert report["rebuilt"] and report["live"] and not report["loader"], report
    assert report["bytes_received"] == worker.plan.bytes_by_receiver()[worker.rank]
    original = vllm_layers.find_reload
    vllm_layers.find_reload = lambda: None
    worker.connect()
    vllm_layers.find_reload = original
    payload, sent = worker.publish("old")
    worker.update(payload)
    loaded = worker.engine.planned.report()
    assert worker.digests() == sent
    assert worker.holds(old)
    assert (loaded["rebuilt"], loaded["loader"]) == (0, report["rebuilt"]), loaded


def check_atomicity(worker: Worker, old: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    """What broke off cannot be finished; a complete update heals it."""
    worker.connect()
    engine = worker.engine
    payload, _ = worker.publish("new")
    shorten(worker, payload)
    engine.start_weight_update()
    refused(lambda: engine.update_weights(payload), "from_")
    assert engine.state.version is None
    refused(engine.finish_weight_update, "mixture of two versions")
    engine.start_weight_update()
    refused(engine.finish_weight_update, f"weights {worker.version} failed")
    payload, sent = worker.publish("new")
    worker.update(payload)
    assert worker.holds(new) and worker.digests() == sent
    assert engine.state.version == worker.version
    payload, _ = worker.publish("new")
    shorten(worker, payload)
    engine.start_weight_update()
    refused(lambda: engine.update_weights(payload), "from_")
    worker.update(worker.publish("old")[0])
    assert worker.holds(old)


def check_refusals(worker: Worker) -> None:
    """Everything that does not fit is refused before the first update, by name."""
    engine = worker.engine
    layout = worker.init_info()["engine_layout"]
    assert isinstance(layout, dict)
    other = "bfloat16" if layout["dtype"] == "float32" else "float32"
    wrong: list[tuple[dict[str, object], tuple[str, ...]]] = [
        ({"fingerprint": "0" * 16}, ("0" * 16, worker.plan.fingerprint)),
        ({"bucket_bytes": 5}, (worker.plan.fingerprint, "model or layouts differ")),
        ({"directory": "/nowhere"}, ("/nowhere", "does not exist")),
        ({"transport": "pigeon"}, ("pigeon",)),
        ({"replica": 3}, ("replica",)),
        ({"engine_layout": layout | {"tensor": 4}}, ("tensor ranks 4",)),
        ({"engine_layout": layout | {"dtype": other}}, (f"dtype torch.{other}",)),
        ({"engine_layout": layout | {"expert_parallel": True}}, ("expert parallelism True",)),
        ({"engine_layout": layout | {"quantization": "fp8"}}, ("quantization fp8",)),
    ]
    for changes, words in wrong:
        info = engine.parse_init_info(worker.init_info(**changes))
        refused(lambda info=info: engine.init_transfer_engine(info), *words)
        refused(lambda: worker.update(dict(new_payload(1, 1))), "init_weight_transfer_engine")
    refused(lambda: engine.parse_init_info({"directory": "/", "port": 3}), "port")
    payload, _ = worker.publish("old")
    worker.connect()
    worker.model.model.norm.register_parameter("extra", nn.Parameter(torch.zeros(3)))
    refused(worker.connect, "model.norm.extra", "does not write")
    del worker.model.model.norm.extra
    kept = worker.model.model.norm.weight
    worker.model.model.norm.weight = nn.Parameter(torch.zeros(5))
    refused(worker.connect, "model.norm.weight", "(5,)", "(128,)")
    worker.model.model.norm.weight = kept
    worker.connect()
    wrong_version = payload | {"policy_version": 77}
    engine.start_weight_update()
    refused(lambda: engine.update_weights(wrong_version), "policy_version", "77")


def walk(rank: int, tensor: int, root: str, results: str) -> None:
    """All cases, one after the other, as one worker."""
    os.environ.update(VLLM_ENVIRONMENT)
    from megatron_dapo.resharding.vllm_plugin import PolicyEngine

    folder = Path(root)
    try:
        for family, (dtype, train) in CASES.items():
            store = str(folder / f"{family}_store_{tensor}")
            models = folder / family
            plan = plan_of(
                models / "new", train, tensor=tensor, dtype=dtype, bucket_bytes=BUCKET_BYTES
            )
            settings = {"tensor": tensor, "rank": rank, "dtype": dtype, "store": store}
            with (
                vllm_config(models / "old", **settings) as config,  # type: ignore[arg-type]
                tempfile.TemporaryDirectory(dir=models) as weights,
            ):
                new = kernel_state(load_model(config, models / "new", kernels=True))
                model = load_model(config, models / "old", kernels=True)
                old = kernel_state(model)
                assert sum(not torch.equal(old[name], new[name]) for name in old) > len(old) / 2
                engine = PolicyEngine(
                    config.weight_transfer_config, config, torch.device("cpu"), model
                )
                worker = Worker(rank, models, plan, config, engine, model, Path(weights))
                check_ways(worker, old, new)
                check_atomicity(worker, old, new)
                check_refusals(worker)
    except Exception:
        Path(results, f"{tensor}_{rank}").write_text(traceback.format_exc())
        raise


@pytest.mark.parametrize("tensor", [1, 2])
def test_updates_equal_a_load_from_the_folder_and_never_mix(tensor: int, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    for family in CASES:
        for seed, name in enumerate(("old", "new")):
            save_tiny_model(tmp_path / family / name, family, seed=seed, layers=LAYERS)
    results = tmp_path / "results"
    results.mkdir()
    try:
        mp.spawn(walk, (tensor, str(tmp_path), str(results)), nprocs=tensor, join=True)
    except Exception as error:
        raised = "\n".join(path.read_text() for path in sorted(results.iterdir()))
        raise AssertionError(raised or str(error)) from error
