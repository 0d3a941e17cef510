"""One weight update of a 0.5B model, tensor parallel 2 -> 2: full gather and broadcast, or a plan.

    python -m benchmarks.resharding [--layers 24] [--bucket-mib 128] [--repeats 3]

Four processes with one thread each: two trainer ranks that hold Megatron's shards of a model of
the shape of Qwen2.5-0.5B (random weights, bfloat16), and two plain processes in place of engine
workers, with parameters of vLLM's names and shapes (no vLLM, no kernels). Contestants take turns:

copy    every worker copies the bytes that it owns once: the floor
gather  each trainer gathers full Hugging Face tensors, trainer rank 0 broadcasts them in buckets
        to the workers, each worker cuts out its part
files   the bridge over files in shared memory
gloo    the bridge point to point
*_plain the same without digests

Wall seconds are of the whole update; CPU seconds are of all four processes together, and say more
on a busy machine. Extra memory is the growth of the peak resident size of a process, for files
with the mapped files in it; staging is what the transport itself allocates. Both sides of the
bridge digest every byte unless told otherwise. Exit status 1: a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from transformers import Qwen2Config

from benchmarks.resharding_peer import TRAINERS, WORKERS, Gathered
from megatron_dapo.resharding.files import FileSender
from megatron_dapo.resharding.meeting import Meeting
from megatron_dapo.resharding.messages import Outbox
from megatron_dapo.resharding.name_map import family_for
from megatron_dapo.resharding.plan import EngineLayout, ReshardPlan, TrainLayout, build_plan
from megatron_dapo.resharding.point_to_point import PointToPointSender
from megatron_dapo.resharding.receive import PlannedWeights
from megatron_dapo.resharding.receivers import open_receiver
from megatron_dapo.resharding.transport import InitInfo, Sender, new_payload

TIMEOUT = timedelta(seconds=300)
MOST_OF_THE_BYTES = 0.55
"""Bar: what the bridge's workers receive, of what those of gather + broadcast receive."""
SHARED_MEMORY = Path("/dev/shm")


def model_shape(layers: int) -> Qwen2Config:
    """Qwen2.5-0.5B."""
    return Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )


class LiveParameters:
    """All parameters of one worker, written in place."""

    way: Literal["live"] = "live"

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.targets = {name: tuple(value.shape) for name, value in tensors.items()}

    def open(self) -> Mapping[str, Tensor]:
        return self.tensors

    def close(self) -> None:
        """They are in their final layout."""


class Bridged:
    """The bridge, without the control around it."""

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        held: Mapping[str, Tensor],
        directory: Path,
        transport: Literal["files", "gloo"],
    ) -> None:
        self.rank, self.transport = rank, transport
        self.version = 0
        directory = directory / transport
        directory.mkdir(exist_ok=True)
        group = dist.new_group(list(range(TRAINERS)))
        self.payload = new_payload(0, engines=1)
        if rank < TRAINERS:
            self.outbox = Outbox(plan, rank, held)
            self.quick = Outbox(plan, rank, held, with_digests=False)
            meeting = Meeting(directory, 0, 0, TRAINERS, WORKERS, "gloo", TIMEOUT)
            device = torch.device("cpu")
            self.sender: Sender = (
                FileSender(directory, lambda _: dist.barrier(group), leads=rank == 0)
                if transport == "files"
                else PointToPointSender([meeting], rank, device, plan.bucket_bytes)
            )
        else:
            worker = rank - TRAINERS
            init = InitInfo(
                transport=transport,
                directory=str(directory),
                train_layout=asdict(plan.train),
                engine_layout=asdict(plan.engine),
                bucket_bytes=plan.bucket_bytes,
                fingerprint=plan.fingerprint,
                replica=0,
                timeout_seconds=TIMEOUT.total_seconds(),
            )
            receiver = open_receiver(init, plan, worker, torch.device("cpu"))
            self.weights = PlannedWeights(plan, worker, [LiveParameters(held)], receiver)
        self.directory = directory

    def run(self, *, with_digests: bool) -> None:
        self.version += 1
        if self.rank < TRAINERS:
            outbox = self.outbox if with_digests else self.quick
            outbox.start()
            self.sender.prepare(self.version, outbox)
            if self.transport == "files":
                dist.barrier()  # stands for the request that tells the engines
            self.sender.send(self.version, outbox, (0,))
        else:
            if self.transport == "files":
                dist.barrier()
            self.payload["policy_version"] = self.version
            self.payload["folder"] = str(self.directory / f"policy_{self.version}")
            self.weights.receive(self.payload)
            if with_digests:
                self.weights.digests()

    def clean(self) -> None:
        """Between updates: one version of the files stays."""
        if self.rank < TRAINERS:
            self.sender.acknowledged(self.version)

    @property
    def bytes_received(self) -> int:
        if self.rank < TRAINERS:
            return 0
        return int(self.weights.report()["bytes_received"])

    @property
    def staging_bytes(self) -> int:
        if self.rank < TRAINERS:
            return self.sender.staging_bytes
        return self.weights.receiver.staging_bytes


def resident(key: str) -> int:
    """VmHWM (peak) or VmRSS of this process, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def measured(run: Callable[[], None]) -> tuple[float, float, float]:
    """(wall seconds of the slowest, CPU seconds of all, this rank's extra memory)."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, wall, cpu = resident("VmRSS"), time.monotonic(), time.process_time()
    run()
    cpu = time.process_time() - cpu
    dist.barrier()
    return time.monotonic() - wall, cpu, resident("VmHWM") - before


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Equal on all ranks for a tensor that all hold; cheap to make."""
    torch.manual_seed(seed)
    return {
        name: torch.randint(-(2**15), 2**15, shape, dtype=torch.int16)
        .bitwise_and_(-16385)  # no infinities and no NaN
        .view(torch.bfloat16)
        for name, shape in shapes.items()
    }


def contestants(
    plan: ReshardPlan, rank: int, held: Mapping[str, Tensor], directory: Path
) -> Iterator[tuple[str, Callable[[], None], Gathered | Bridged | None]]:
    """(name, one update, whose figures)."""
    spare = {name: torch.empty_like(value) for name, value in held.items()} if rank > 1 else {}

    def copy() -> None:
        for name, value in spare.items():
            value.copy_(held[name])

    copy()
    yield "copy", copy, None
    spare.clear()
    gathered = Gathered(plan, rank, held)
    yield "gather", gathered.run, gathered
    for transport in ("files", "gloo"):
        bridged = Bridged(plan, rank, held, directory, transport)  # type: ignore[arg-type]
        for name, checked in ((f"{transport}_plain", False), (transport, True)):
            yield name, partial(bridged.run, with_digests=checked), bridged


def measure(rank: int, store: str, arguments: argparse.Namespace, directory: str) -> None:
    """All contestants on one rank; rank 0 writes the figures."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    world = TRAINERS + WORKERS
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    plan = build_plan(
        TrainLayout(tensor=TRAINERS, padded_vocab_size=151936 + 2 * 64),
        EngineLayout(tensor=WORKERS, dtype="bfloat16"),
        family_for(model_shape(arguments.layers)),
        bucket_bytes=arguments.bucket_mib * 2**20,
    )
    shapes = plan.sources(rank) if rank < TRAINERS else plan.parameters(rank - TRAINERS)
    held = random_tensors(shapes, seed=rank)
    for entry in plan.entries:  # norms are the same on all tensor ranks
        if rank < TRAINERS and entry.rule.cut.dim is None:
            held[entry.key].view(torch.int16).fill_(len(entry.key) + (entry.layer or 0))
    results: dict[str, dict[str, float]] = {}
    reference: dict[str, Tensor] | None = None
    for name, run, owner in contestants(plan, rank, held, Path(directory)):
        rounds = []
        for _ in range(arguments.repeats + 1):
            rounds.append(measured(run))
            if isinstance(owner, Bridged):
                dist.barrier()
                owner.clean()
        received = 0 if owner is None else owner.bytes_received
        staging = owner.staging_bytes if isinstance(owner, Bridged) else 0
        results[name] = summed(rounds, received, staging, rank)
        if rank >= TRAINERS and owner is not None:
            if reference is None:
                reference = {key: value.clone() for key, value in held.items()}
            for key, value in held.items():
                same = torch.equal(value.view(torch.int16), reference[key].view(torch.int16))
                assert same, f"{name} and gather differ in {key!r} on worker {rank - TRAINERS}"
                value.zero_()
    if rank == 0:
        results["plan"] = {
            "bytes_moved": plan.bytes_moved,
            "lower_bound": plan.lower_bound,
            "buckets": plan.num_buckets,
        }
        Path(f"{store}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def summed(
    rounds: list[tuple[float, float, float]], received: int, staging: int, rank: int
) -> dict[str, float]:
    """Over all ranks: best round, bytes received by trainers and by workers, largest memory."""
    sums = torch.tensor([[cpu for _, cpu, _ in rounds[1:]]], dtype=torch.float64)
    dist.all_reduce(sums)
    of_trainers = received if rank < TRAINERS else 0
    got = torch.tensor([of_trainers, received - of_trainers])
    dist.all_reduce(got)
    side = 0 if rank < TRAINERS else 1
    most = torch.zeros(4, dtype=torch.float64)
    most[side], most[2 + side] = max(extra for *_, extra in rounds), staging
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return {
        "wall_s": min(wall for wall, *_ in rounds[1:]),
        "cpu_s": float(sums.min()),
        "trainers_get": float(got[0]),
        "workers_get": float(got[1]),
        "trainer_extra": float(most[0]),
        "worker_extra": float(most[1]),
        "trainer_staging": float(most[2]),
        "worker_staging": float(most[3]),
    }


def report(results: Mapping[str, Mapping[str, float]], bucket: int) -> bool:
    """Print all figures and the bars; True where all hold."""
    plan = results["plan"]
    write = sys.stdout.write
    write(f"load average {' '.join(f'{value:.1f}' for value in os.getloadavg())}\n")
    write(
        f"plan: {plan['bytes_moved'] / 1e6:.0f} MB in {plan['buckets']:.0f} buckets, "
        f"{plan['bytes_moved'] / plan['lower_bound']:.3f} x what the workers own\n"
    )
    write(
        f"{'':12} {'wall s':>8} {'CPU s':>8} {'MB to workers':>14} {'MB to trainers':>15} "
        f"{'extra MB trainer/worker':>24} {'staging MB':>14}\n"
    )
    for name, row in results.items():
        if name != "plan":
            extra = f"{row['trainer_extra'] / 1e6:.0f} / {row['worker_extra'] / 1e6:.0f}"
            staging = f"{row['trainer_staging'] / 1e6:.0f} / {row['worker_staging'] / 1e6:.0f}"
            write(
                f"{name:12} {row['wall_s']:8.2f} {row['cpu_s']:8.2f} "
                f"{row['workers_get'] / 1e6:14.0f} {row['trainers_get'] / 1e6:15.0f} "
                f"{extra:>24} {staging:>14}\n"
            )
    gather, good = results["gather"], True
    for name in ("files", "gloo"):
        row = results[name]
        checks = {
            f"bytes to workers <= {MOST_OF_THE_BYTES} x gather's": row["workers_get"]
            / gather["workers_get"]
            / MOST_OF_THE_BYTES,
            "wall seconds < gather's": row["wall_s"] / gather["wall_s"],
            "CPU seconds < gather's": row["cpu_s"] / gather["cpu_s"],
            "staging <= 2 buckets": max(row["trainer_staging"], row["worker_staging"])
            / (2 * bucket + 2**16),
        }
        for what, ratio in checks.items():
            good &= ratio <= 1
            write(f"{name:6} {what:40} {ratio:5.2f} of the bar{'' if ratio <= 1 else '  MISSED'}\n")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--bucket-mib", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as shared,
    ):
        store = str(Path(folder) / "store")
        mp.spawn(measure, (store, arguments, shared), nprocs=TRAINERS + WORKERS, join=True)
        results = json.loads(Path(f"{store}.json").read_text())
    return 0 if report(results, arguments.bucket_mib * 2**20) else 1


if __name__ == "__main__":
    sys.exit(main())
