"""Real trainer ranks in processes of their own, beside engines that the test owns.

Each rank opens a `Trainer` as `megatron-dapo train` does; what it then does is up to the test.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_dapo.checkpoint.export import write_hf_folder
from megatron_dapo.config import load_config
from megatron_dapo.parallel.launch_env import LaunchEnv
from megatron_dapo.resharding.digest import as_hex, parameter_digest
from megatron_dapo.resharding.transfer import export_stream
from megatron_dapo.rollout.generate_route import request_body
from megatron_dapo.rollout.vllm_server import VllmServer
from megatron_dapo.session import open_trainer
from megatron_dapo.trainer import Trainer
from tests.e2e.conftest import (
    PARITY,
    generate,
    largest_gap,
    prompts,
    request,
    run_with_engine,
    stop_and_look,
    tiny_options,
)
from tests.e2e.runs import Start
from tests.plain_engine import vllm_tensors

SETTINGS = (
    "sampling.dynamic=false",
    "training.responses_per_update=16",  # one optimizer step in a rollout step
    "training.steps=9",
    "resharding.bucket_mib=1",
    "logging.console=false",
)
PAUSED_SECONDS = 0.4
"""An engine that is not paused answers two tokens in much less."""
MEETINGS = "MEGATRON_DAPO_TEST_MEETINGS"
"""Environment variable of ranks: folder of the files through which they find each other."""
FUSED_EXPERTS = ".mlp.experts."
_meetings = itertools.count()
_questions = itertools.count()


@dataclass(frozen=True)
class Scene:
    """Engines that serve the start's model, or none: then the trainers start their own."""

    start: Start
    tensor: int
    endpoints: tuple[str, ...] = ()

    @property
    def overrides(self) -> tuple[str, ...]:
        engines = (f"rollout.engine_tensor={self.tensor}",)
        if self.endpoints:
            listed = ",".join(self.endpoints)
            engines += (f"rollout.engines={len(self.endpoints)}", f"rollout.endpoints=[{listed}]")
        return SETTINGS + engines


@contextmanager
def running_engines(start: Start, *, tensor: int, count: int = 1) -> Iterator[Scene]:
    """Servers of the start's model; nothing of them is left afterwards."""
    servers = [
        VllmServer(tiny_options(start.model, start.folder / f"engine_{i}.log", tensor=tensor))
        for i in range(count)
    ]
    with ExitStack() as stack:
        for server in servers:
            stack.callback(stop_and_look, server)
            server.start()
        for server in servers:
            server.wait_ready()
        yield Scene(start, tensor, tuple(server.endpoint for server in servers))


def run_trainers(world: int, function: Callable[..., None], *args: object) -> None:
    """`function(rank, world, *args)` in `world` fresh processes that know nothing of each other.

    The first failing ranks' tracebacks are raised as an AssertionError.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(_enter, (world, folder, function, args), nprocs=world, join=True)
        except Exception as error:
            raised = [path.read_text() for path in sorted(Path(folder).glob("rank_*"))]
            raise AssertionError("\n".join(raised) or str(error)) from error


def _enter(
    rank: int, world: int, folder: str, function: Callable[..., None], args: tuple[object, ...]
) -> None:
    os.environ.update({"OMP_NUM_THREADS": "1", MEETINGS: folder})
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through every `finally`
    try:
        function(rank, world, *args)
    except Exception:
        Path(folder, f"rank_{rank}").write_text(traceback.format_exc())
        raise


@contextmanager
def opened_trainer(rank: int, world: int, scene: Scene, *overrides: str) -> Iterator[Trainer]:
    """This rank of a run, at its start. Every rank enters and leaves it together."""
    meeting = Path(os.environ[MEETINGS], f"meeting_{next(_meetings)}")
    folder = scene.start.folder / f"{meeting.parent.name}_{meeting.name}"
    config = load_config(scene.start.file, [f"run_dir={folder}", *scene.overrides, *overrides])
    place = LaunchEnv(rank, world, rank, "", None, f"file://{meeting}")
    try:
        with open_trainer(config, place) as trainer:
            dist.barrier()  # rank 0 has waited for its engines
            yield trainer
            dist.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def ask_engine(
    endpoint: str, method: str, path: str, body: object = None, *, seconds: float = 120.0
) -> httpx.Response:
    """One request of somebody who knows nothing of the run."""
    transport = httpx.HTTPTransport(uds=endpoint.removeprefix("unix:"))
    with httpx.Client(transport=transport, base_url="http://engine", timeout=seconds) as client:
        return client.request(method, path, json=body)


def stamp(endpoint: str) -> str:
    """What the engine says that its weights are."""
    return str(ask_engine(endpoint, "GET", "/weight_info").json()["weight_version"])


def answers(endpoint: str) -> bool:
    """Whether the engine samples for anybody now; one that is paused does not."""
    asked = request((5, 6, 7), 10_000 + next(_questions), max_tokens=2, stop_token_ids=())
    try:
        body = request_body(asked)
        found = ask_engine(endpoint, "POST", "/inference/v1/generate", body, seconds=PAUSED_SECONDS)
    except httpx.TransportError:
        return False
    return found.is_success


def change_weights(trainer: Trainer, factor: float) -> None:
    """Other weights on every rank, the same ones where several hold them."""
    with torch.no_grad():
        for chunk in trainer.policy.chunks:
            for parameter in chunk.parameters():
                parameter.mul_(factor)


def record_expected(trainer: Trainer) -> list[list[dict[str, str]] | None]:
    """What the trainer expects of its engines, update by update."""
    seen: list[list[dict[str, str]] | None] = []
    original = trainer.bridge.expected_digests

    def expected_digests() -> list[dict[str, str]] | None:
        seen.append(original())
        return seen[-1]

    trainer.bridge.expected_digests = expected_digests  # type: ignore[method-assign]
    return seen


def export(trainer: Trainer, folder: Path) -> None:
    """The policy of now as a Hugging Face folder. Collective."""
    stream = export_stream(trainer.policy.chunks, trainer.hf_config, trainer.parallel)
    write_hf_folder(
        stream,
        trainer.config.model.path,
        folder,
        expected=stream.tensors,
        dtype=stream.dtype,
        overwrite=True,
    )


def check_engine(
    trainer: Trainer,
    endpoint: str,
    expected: list[dict[str, str]] | None,
    folder: Path,
    version: int,
) -> None:
    """The engine holds the folder's weights, byte for byte, and computes what they compute."""
    stored = load_file(folder / "model.safetensors")
    tensor = trainer.bridge.plan.engine.tensor
    found = ask_engine(endpoint, "POST", "/collective_rpc", {"method": "weight_digests"}).json()
    dump = folder.with_name("dump")
    shutil.rmtree(dump, ignore_errors=True)
    dump.mkdir()
    body = {"method": "save_sharded_state", "kwargs": {"path": str(dump)}}
    assert ask_engine(endpoint, "POST", "/collective_rpc", body).is_success
    for rank in range(tensor):
        wanted = vllm_tensors(stored, trainer.hf_config, tensor, rank)
        independent = {
            name: as_hex(
                int(parameter_digest(value, word_bytes=trainer.bridge.plan.word_bytes(name)))
            )
            for name, value in wanted.items()
        }
        assert expected is not None
        assert found["results"][rank] == expected[rank] == independent
        live = live_tensors(dump, rank, wanted)
        assert any("embed_tokens" in name for name in live)
        assert any("norm" in name for name in live)
        different = [name for name, value in live.items() if not torch.equal(value, wanted[name])]
        assert not different, different
    asked = [request(prompt, row, max_tokens=8) for row, prompt in enumerate(prompts(3))]
    results = run_with_engine(endpoint, lambda engine: generate(engine, asked))
    assert {result.policy_version for result in results} == {version}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert largest_gap(model, asked, results) <= PARITY


def live_tensors(dump: Path, rank: int, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of what vLLM itself wrote of a worker's model: what its kernels keep as it was loaded.

    Of tied tensors it writes one, under the head's name. Fused experts are packed in place: they
    keep their shape, and not their order.
    """
    held = load_file(dump / f"model-rank-{rank}-part-0.safetensors")
    if "lm_head.weight" not in wanted:
        held["model.embed_tokens.weight"] = held.pop("lm_head.weight")
    kept = (name for name in wanted if name in held and FUSED_EXPERTS not in name)
    return {name: held[name] for name in kept if held[name].numel()}


def connect_again(trainer: Trainer) -> None:
    """Fresh clients of the same engines, as a run that starts again has them. On rank 0."""
    assert trainer.rollouts is not None
    fleet = trainer.rollouts._fleet
    for replica in fleet._replicas:
        fleet.run(replica.close("a run starts again"))
        replica.failure = None
        fleet.run(replica.connect())
    fleet.engines[:] = [replica.engine for replica in fleet._replicas]
