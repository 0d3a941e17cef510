"""The policy as vLLM's weight source, on two ranks, and vLLM's trainer-side engines driven by it.

Of those engines only what needs a GPU is replaced: the group, the broadcast, the handles, the
reshard. Their handshake, their order and their checks of the source are vLLM's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from megatron_dapo.config.schema import (
    DataConfig,
    ModelConfig,
    ParallelConfig,
    ReshardingConfig,
    RolloutConfig,
    RunConfig,
)
from megatron_dapo.device import install_cpu_support
from megatron_dapo.parallel.context import ParallelContext
from megatron_dapo.policy.model import build_chunks
from megatron_dapo.resharding.engine_layout import EngineLayout
from megatron_dapo.resharding.engine_map import EngineMap
from megatron_dapo.resharding.load import load_hf_weights
from megatron_dapo.resharding.name_map import family_for
from megatron_dapo.resharding.open_bridge import open_bridge
from megatron_dapo.resharding.quantize import dequantize_blocks
from megatron_dapo.resharding.transfer import export_stream
from tests.ranks import run_ranks
from tests.tiny_models import tiny_model

pytest.importorskip("vllm")
install_cpu_support()

from vllm.distributed.weight_transfer import (  # noqa: E402
    ipc_engine,
    m2n_trainer,
    nccl_engine,
    packed_tensor,
)
from vllm.distributed.weight_transfer.base import layerwise_groups  # noqa: E402
from vllm.distributed.weight_transfer.m2n_common import (  # noqa: E402
    REPLICATE,
    M2NParamMeta,
    resolve_layout,
    validate_layout,
)
from vllm.distributed.weight_transfer.m2n_engine import M2NWeightTransferInitInfo  # noqa: E402

from megatron_dapo.resharding import vllm_bridge  # noqa: E402
from megatron_dapo.resharding.vllm_bridge import VllmBridge  # noqa: E402
from megatron_dapo.resharding.vllm_client import ToldEngines  # noqa: E402
from megatron_dapo.resharding.vllm_source import PolicyShards, PolicySource  # noqa: E402

FAMILIES = ("qwen2_tied", "qwen3", "qwen3_moe")
PADDED_VOCAB, EVEN_VOCAB = 500, 512
SMALL_BUCKET = 40_000
FULL_LAYOUTS = [
    ("qwen2_tied", ParallelConfig(tensor=2)),
    ("qwen3", ParallelConfig(pipeline=2)),
    ("qwen3_moe", ParallelConfig(data=2, expert=2)),
]
SHARD_LAYOUTS = [
    ("qwen2_tied", ParallelConfig(tensor=2)),
    ("qwen2_tied", ParallelConfig(data=2)),
    ("qwen3_moe", ParallelConfig(tensor=2)),
    ("qwen3_moe", ParallelConfig(tensor=2, expert_tensor=1)),
]


def _config(folder: Path, layout: ParallelConfig, **options: object) -> RunConfig:
    return RunConfig(
        run_dir=folder,
        model=ModelConfig(path=folder, dtype="float32"),
        data=DataConfig(train=folder / "none.jsonl"),
        parallel=layout,
        **options,
    )


class Rank:
    """One rank's policy, loaded from a folder."""

    def __init__(self, folder: Path, layout: ParallelConfig, **options: object) -> None:
        self.config = _config(folder, layout, **options)
        self.hf_config = transformers.AutoConfig.from_pretrained(folder)
        self.parallel = ParallelContext.create(layout, seed=1)
        self.chunks = build_chunks(self.config, self.hf_config, self.parallel)
        load_hf_weights(self.chunks, self.hf_config, folder, self.parallel)

    @property
    def parts(self):  # type: ignore[no-untyped-def]
        return self.chunks, self.hf_config, self.parallel

    def exported(self) -> dict[str, Tensor]:
        """On rank 0."""
        return dict(export_stream(*self.parts))

    def close(self) -> None:
        dist.barrier()
        self.parallel.destroy()


def _declared(source) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:  # type: ignore[no-untyped-def]
    return [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]


def _full_source(folder: Path, layout: ParallelConfig, everywhere: bool) -> None:
    rank = Rank(folder, layout)
    source = PolicySource(
        *rank.parts, dtype=torch.float32, bucket_bytes=SMALL_BUCKET, everywhere=everywhere
    )
    yields = everywhere or rank.parallel.rank == 0
    stored = rank.exported()
    if everywhere and not stored:  # every rank needs what rank 0 knows
        stored = dict(export_stream(*rank.parts, everywhere=True))
    elif everywhere:
        list(export_stream(*rank.parts, everywhere=True))
    for _ in range(2):  # a fresh pass each time
        pairs = [(name, tensor.clone()) for name, tensor in source]
        if not yields:
            assert pairs == [] and source.held_names() == frozenset() and source.groups() == []
            continue
        assert source.held_names() is None
        found = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in pairs]
        assert found == _declared(source)
        assert all(torch.equal(tensor, stored[name]) for name, tensor in pairs)
    groups = [(names, [t.clone() for t in tensors]) for names, tensors in source.iter_groups()]
    if yields:
        assert [names for names, _ in groups] == layerwise_groups(list(stored)) == source.groups()
    else:
        assert groups == []
    with torch.no_grad():
        for chunk in rank.chunks:
            for parameter in chunk.parameters():
                parameter.add_(1.0)
    newer = dict(source)
    if yields:
        name = next(iter(stored))
        assert torch.equal(newer[name], stored[name] + 1.0)
    rank.close()


def _fp8_source(folder: Path, layout: ParallelConfig) -> None:
    rank = Rank(folder, layout)
    family = family_for(rank.hf_config)
    engine = EngineLayout(dtype="bfloat16", quantization="fp8")
    names = EngineMap(family, engine).quantized_tensors()
    source = PolicySource(
        *rank.parts, dtype=torch.bfloat16, bucket_bytes=SMALL_BUCKET, in_fp8=names, everywhere=True
    )
    pairs = [(name, tensor) for name, tensor in source]
    assert [(n, t.dtype, tuple(t.shape)) for n, t in pairs] == _declared(source)
    exact = {n: t.clone() for n, t in export_stream(*rank.parts, everywhere=True)}
    tensors = dict(pairs)
    scaled = [name for name in exact if name + "_scale_inv" in tensors]
    assert set(scaled) == set(names) and all(exact[name].dim() == 2 for name in names)
    assert not [name for name in scaled if "gate.weight" in name or "embed" in name]
    for name in scaled:
        back = dequantize_blocks(tensors[name], tensors[name + "_scale_inv"])
        torch.testing.assert_close(back, exact[name], rtol=1 / 15, atol=2e-3)
    for name in exact.keys() - set(scaled):
        assert torch.equal(tensors[name], exact[name].bfloat16()), name
    rank.close()


def _shards(folder: Path, layout: ParallelConfig) -> None:
    """The ranks' shards, put together as the declared mesh says, are the exported tensors."""
    rank = Rank(folder, layout)
    source = PolicyShards(*rank.parts, dtype=torch.float32)
    exported = rank.exported()
    mine = [(name, tensor.contiguous()) for name, tensor in source]
    metas = source.metadata()
    assert source.held_names() is None
    assert [name for name, _ in mine] == [meta.name for meta in metas]
    cut = 0
    for (name, tensor), meta in zip(mine, metas, strict=True):
        assert isinstance(meta, M2NParamMeta)
        mesh, placements = resolve_layout(source.mesh(), meta.placements)
        validate_layout(mesh, placements, meta.shape, "source")
        shards = [torch.empty_like(tensor) for _ in range(2)]
        dist.all_gather(shards, tensor)
        replicas = torch.stack(shards).view(*mesh.dims, *tensor.shape)
        if placements[0] == REPLICATE and mesh.dims[1] > 1:
            cut += 1
            full = torch.cat(list(replicas[0]), dim=placements[1])
        else:
            full = replicas[0, 0]
        for other in replicas[1:]:
            assert torch.equal(other, replicas[0])
        assert tuple(full.shape) == meta.shape
        if rank.parallel.rank == 0:
            assert torch.equal(full, exported[name]), (layout, name)
    assert (cut > 0) == (layout.tensor > 1)
    embedding = next(meta for meta in metas if meta.name == "model.embed_tokens.weight")
    even = rank.hf_config.vocab_size == EVEN_VOCAB
    assert (embedding.placements is None) == (layout.tensor == 1 or not even)  # type: ignore[attr-defined]
    rank.close()


def _refused_shards(folder: Path, layout: ParallelConfig, message: str) -> None:
    rank = Rank(folder, layout)
    with pytest.raises(ValueError, match=message):
        PolicyShards(*rank.parts, dtype=torch.float32)
    rank.close()


@contextmanager
def _bridge(rank: Rank, deliver=None) -> Iterator[VllmBridge]:  # type: ignore[no-untyped-def]
    bridge = open_bridge(rank.config, *rank.parts, deliver=deliver)
    assert isinstance(bridge, VllmBridge)
    yield bridge
    bridge.close()
    bridge.close()


def _settings(transport: str, engines: int = 1) -> dict[str, object]:
    return {
        "resharding": ReshardingConfig(transport=transport, bucket_mib=1, timeout_seconds=60),
        "rollout": RolloutConfig(engines=engines, engine_tensor=2),
    }


def _nccl(folder: Path) -> None:
    """Two engines, and one of them restarted."""
    rank = Rank(folder, ParallelConfig(tensor=2), **_settings("vllm_nccl", engines=2))
    exported, lead = rank.exported(), rank.parallel.rank == 0
    groups: list[SimpleNamespace] = []
    breaks: list[str] = []
    sent: dict[str, Tensor] = {}

    def join(info):  # type: ignore[no-untyped-def]
        destroyed: list[int] = []
        groups.append(
            SimpleNamespace(info=info, gone=destroyed, destroy=lambda: destroyed.append(1))
        )
        return groups[-1]

    def broadcast(iterator, group, **_):  # type: ignore[no-untyped-def]
        assert group is groups[-1]
        sent.update((name, tensor.clone()) for name, tensor in iterator)
        for reason in breaks:
            raise RuntimeError(reason)

    with (
        patch.object(nccl_engine, "open_trainer_endpoint", join),
        patch.object(nccl_engine, "packed_nccl_broadcast_producer", broadcast),
        _bridge(rank) as bridge,
    ):
        payload = bridge.prepare(1)
        infos = [bridge.init_info(engine) for engine in range(2)]
        bridge.send(1)
        assert bridge.expected_digests() is None
        bridge.acknowledged(1)
        if lead:
            _check_told(infos, payload, groups[0].info, exported)
            assert all(torch.equal(sent[name], exported[name]) for name in exported)
        assert bridge.prepare(2) == payload
        bridge.send(2)
        assert [bridge.init_info(engine) for engine in range(2)] == infos
        assert len(groups) == (1 if lead else 0)  # joined once
        bridge.rejoin(1)
        assert bridge.init_info(0) == infos[0]
        bridge.send(2, [1])
        if lead:
            alone = bridge.init_info(1)
            assert (alone["rank_offset"], alone["world_size"]) == (1, 3)
            assert groups[1].info.master_port == alone["master_port"] != infos[1]["master_port"]
        bridge.prepare(3)
        together = [bridge.init_info(engine) for engine in range(2)]
        bridge.send(3)
        if lead:
            assert [info["world_size"] for info in together] == [5, 5]
            assert groups[0].gone and groups[1].gone and not groups[2].gone
        with pytest.raises(RuntimeError, match="version 4 is to be sent, 3 was prepared"):
            bridge.send(4)
        breaks.append("the library broke")
        wanted = "failed: the library broke" if lead else "rank 0 failed"
        with pytest.raises(RuntimeError, match=wanted):
            bridge.send(3)
    rank.close()


def _check_told(infos, payload, joined, exported) -> None:  # type: ignore[no-untyped-def]
    """What the workers are told is what vLLM's own types take, and each has its own rank."""
    assert json.loads(json.dumps([infos, payload])) == [infos, payload]
    workers = [nccl_engine.NCCLWeightTransferInitInfo(**info) for info in infos]
    assert [worker.rank_offset for worker in workers] == [1, 3]
    assert all(worker.world_size == joined.world_size == 5 for worker in workers)
    assert all(worker.master_port == joined.master_port for worker in workers)
    update = nccl_engine.NCCLWeightTransferUpdateInfo(**payload)
    assert update.names == list(exported)


def _ipc(folder: Path) -> None:
    rank = Rank(folder, ParallelConfig(pipeline=2), **_settings("vllm_ipc"))
    delivered: list[dict[str, object]] = []
    seen: dict[str, Tensor] = {}

    def chunks(iterator, gpu_uuid, post_iter_func, buffer_size_bytes):  # type: ignore[no-untyped-def]
        while packed := packed_tensor.pack_tensors(iterator, post_iter_func, buffer_size_bytes):
            for name, tensor in packed_tensor.unpack_tensor(
                packed.packed_tensor,
                packed.names,
                packed.shapes,
                packed.dtypes,
                packed.tensor_sizes,
            ):
                seen[name] = tensor.clone()
            yield SimpleNamespace(
                names=packed.names,
                dtype_names=[str(dtype).split(".")[-1] for dtype in packed.dtypes],
                shapes=packed.shapes,
                ipc_handle={gpu_uuid: ("handle", b"\x00\xff")},
                tensor_sizes=packed.tensor_sizes,
            )

    properties = SimpleNamespace(uuid=f"gpu-{rank.parallel.rank}")
    with (
        patch.object(ipc_engine, "packed_ipc_producer", chunks),
        patch.object(torch.cuda, "get_device_properties", lambda _: properties),
        patch.object(torch.cuda, "synchronize", lambda: None),
        patch.object(torch.cuda, "ipc_collect", lambda: None),
        patch.object(torch.accelerator, "current_device_index", lambda: 0),
        patch.dict("os.environ", VLLM_ALLOW_INSECURE_SERIALIZATION="1"),
        _bridge(rank, delivered.append) as bridge,
    ):
        bridge._buffer_bytes = 100_000  # several updates
        assert bridge.prepare(1) == {}
        assert bridge.init_info(0) == {"packed": True}
        bridge.send(1)
        exact = dict(export_stream(*rank.parts, everywhere=True))
        assert list(seen) == list(exact)
        assert all(torch.equal(seen[name], exact[name]) for name in exact)
        if rank.parallel.rank == 0:
            assert len(delivered) > 2
            assert json.loads(json.dumps(delivered)) == delivered
            updates = [ipc_engine.IPCWeightTransferUpdateInfo(**update) for update in delivered]
            assert [name for update in updates for name in update.names] == list(exact)
            assert all(set(u.ipc_handles) == {"gpu-0", "gpu-1"} for u in updates)
        else:
            assert delivered == []
    rank.close()


def _m2n(folder: Path) -> None:
    rank = Rank(folder, ParallelConfig(tensor=2), **_settings("vllm_nccl_m2n"))
    resharded: list[Tensor] = []

    def reshard(shard, out, comm, stream, **layout):  # type: ignore[no-untyped-def]
        assert out is None
        assert layout["src_mesh"] in (((1, 2), 0), ((2, 1), 0))
        resharded.append(shard.clone())

    stream = SimpleNamespace(synchronize=lambda: None)
    handle = SimpleNamespace(destroy=lambda: None)
    library = SimpleNamespace(
        Handle=SimpleNamespace(create=lambda config: handle),
        Config=lambda max_cta: None,
        Mesh=lambda dims, start_rank: (dims, start_rank),
        Replicate=lambda: "replicate",
        Shard=lambda dim: dim,
        reshard=reshard,
    )
    joined: list[dict[str, object]] = []

    def join(info, rank):  # type: ignore[no-untyped-def]
        joined.append({**info, "rank": rank})
        return SimpleNamespace(comm=1, destroy=lambda: None)

    with (
        patch.object(m2n_trainer, "import_m2n", lambda: library),
        patch.object(m2n_trainer, "trainer_init", join),
        patch.object(
            m2n_trainer, "publish_destination_placements", lambda *arguments: [None] * arguments[3]
        ),
        patch.object(torch.cuda, "current_stream", lambda: stream),
        patch.object(torch.Tensor, "record_stream", lambda self, stream: None),
        patch.object(torch.accelerator, "synchronize", lambda: None),
        _bridge(rank) as bridge,
    ):
        payload = bridge.prepare(1)
        info = bridge.init_info(0)
        for _ in range(2):
            bridge.send(1)
        shards = list(PolicyShards(*rank.parts, dtype=torch.float32))
        assert payload == {"names": [name for name, _ in shards]}
        assert len(resharded) == 2 * len(shards)
        for one, (name, shard) in zip(resharded, shards, strict=False):
            assert torch.equal(one, shard), name
        assert len(joined) == 1 and joined[0]["rank"] == rank.parallel.rank
        if rank.parallel.rank == 0:
            worker = M2NWeightTransferInitInfo(**json.loads(json.dumps(info)))
            assert (worker.rank_offset, worker.world_size) == (2, 4)
            assert worker.src_mesh_dims == [1, 2] and worker.dst_mesh_dims == [1, 2]
            assert worker.master_port == joined[0]["master_port"]
        ports = [None, None]
        dist.all_gather_object(ports, joined[0]["master_port"])
        assert ports[0] == ports[1] != 0
    rank.close()


def _on_two_ranks(_rank: int, _world: int, root: Path) -> None:
    for family, layout in FULL_LAYOUTS:
        for everywhere in (False, True):
            _full_source(root / family, layout, everywhere)
        _fp8_source(root / family, layout)
    for family, layout in SHARD_LAYOUTS:
        _shards(root / family, layout)
        _shards(root / f"{family}_even", layout)
    _refused_shards(root / "qwen3", ParallelConfig(pipeline=2), "parallel.pipeline=2: a rank holds")
    _refused_shards(
        root / "qwen3_moe", ParallelConfig(data=2, expert=2), "parallel.expert=2: a rank holds"
    )
    _nccl(root / "qwen2_tied")
    _ipc(root / "qwen3")
    _m2n(root / "qwen2_tied")


def test_vllms_trainer_engines_get_the_exported_weights(tmp_path: Path) -> None:
    for family in FAMILIES:
        for suffix, vocab in (("", PADDED_VOCAB), ("_even", EVEN_VOCAB)):
            model = tiny_model(
                family, layers=2, hidden_size=64, intermediate_size=96, vocab_size=vocab
            )
            model.save_pretrained(tmp_path / f"{family}{suffix}")
    run_ranks(2, _on_two_ranks, tmp_path)


def test_a_client_refuses_what_the_engines_were_not_told() -> None:
    told = ({"packed": True, "master_port": 1}, {"names": ["a"]})
    client = ToldEngines(told, None)
    client.init_weight_transfer_engine({"packed": True, "master_port": 1})
    client.update_weights({"names": ["a"]})
    with pytest.raises(RuntimeError, match="says master_port=2 in init_weight_transfer_engine"):
        client.init_weight_transfer_engine({"packed": True, "master_port": 2})
    with pytest.raises(RuntimeError, match="the engines were told None"):
        client.update_weights({"names": ["a"], "shapes": []})
    with pytest.raises(RuntimeError, match="give `deliver` on rank 0"):
        ToldEngines(({}, {}), None).update_weights({"names": ["a"]})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_work_that_fails_or_never_ends_is_an_error() -> None:
    def fail() -> None:
        raise ImportError("no such library")

    failed = vllm_bridge._within(timedelta(seconds=5), fail, None)
    assert "failed: no such library" in str(failed) and isinstance(failed.__cause__, ImportError)
    forever = vllm_bridge.threading.Event()
    late = vllm_bridge._within(timedelta(seconds=0.05), lambda: forever.wait() and None, None)
    assert re.search(r"not done after 0.05 s .*an engine did not come", str(late))
    said = RuntimeError("rollout engine 0 answered 400")
    with pytest.raises(RuntimeError, match="answered 400"):
        vllm_bridge._within(timedelta(minutes=5), lambda: forever.wait() and None, lambda: said)
    forever.set()
    assert vllm_bridge._within(timedelta(seconds=5), lambda: None, None) is None
