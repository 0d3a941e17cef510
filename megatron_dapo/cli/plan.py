"""`megatron-dapo plan CONFIG`: what a weight update moves, and what every rank holds.

Needs neither a GPU nor weights, only the model's config.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from megatron_dapo.cli.dry_run import show_memory
from megatron_dapo.cli.terminal import open_console
from megatron_dapo.config.checks import check_config
from megatron_dapo.config.errors import ConfigError
from megatron_dapo.config.load import load_config
from megatron_dapo.config.machine_checks import decide_device
from megatron_dapo.config.model_shape import ModelShape, read_hf_config
from megatron_dapo.config.resharding_checks import VLLM_BACKENDS, chosen_transport
from megatron_dapo.config.schema import RunConfig
from megatron_dapo.parallel.rank_map import as_ranges
from megatron_dapo.planning.memory import GIB, padded_vocab
from megatron_dapo.resharding.block_grid import BLOCK
from megatron_dapo.resharding.free_space import VERSIONS
from megatron_dapo.resharding.plan import EngineLayout, ReshardPlan, TrainLayout, build_plan
from megatron_dapo.resharding.plan_summary import PlanSummary, summarize
from megatron_dapo.resharding.private_directory import SHARED_MEMORY

MIB = 2**20
MOST_RANKS_LISTED = 16


def plan_main(options: argparse.Namespace) -> int:
    """Check the configuration, print the plan of its weight updates, and return 0.

    Raises:
        ConfigError: the run would be refused.
    """
    config = decide_device(load_config(options.config, options.overrides))
    hf_config = read_hf_config(config.model.path)
    check_config(config, hf_config)
    shape = ModelShape.from_hf(hf_config)
    plan = plan_of_run(config, shape)
    if options.json:
        sys.stdout.write(json.dumps(asdict(summarize(plan)), indent=2) + "\n")
        return 0
    console = open_console()
    _show_update(console, config, plan)
    show_memory(console, config, shape)
    return 0


def plan_of_run(config: RunConfig, shape: ModelShape) -> ReshardPlan:
    """The plan that trainer and engines of a run will follow.

    Raises:
        ConfigError: the model cannot be read, or cut over one of the layouts.
    """
    from megatron_dapo.config.pretrained import pretrained_config
    from megatron_dapo.resharding.name_map import family_for

    hf_config = pretrained_config(config.model)
    padded = padded_vocab(shape.vocab, config.parallel.tensor)
    try:
        return build_plan(
            TrainLayout.from_config(config.parallel, padded),
            EngineLayout.from_config(config),
            family_for(hf_config),
            bucket_bytes=config.resharding.bucket_mib * MIB,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _show_update(console: Console, config: RunConfig, plan: ReshardPlan) -> None:
    summary = summarize(plan)
    engine = plan.engine
    console.rule("weight update")
    for line in (
        f"{summary.trainer_ranks} trainer ranks -> {engine.replicas} engine(s) of "
        f"{engine.tensor} rank(s), {_numbers(engine)}, transport {_transport(config)}; plan "
        f"{summary.fingerprint}",
        f"moved: {_gib(summary.bytes_moved)} GiB, the engines own {_gib(summary.lower_bound)} GiB: "
        f"{summary.ratio:.3f} of the lower bound",
        _balance(summary),
        f"buckets: {summary.num_buckets} of {config.resharding.bucket_mib} MiB; either side holds "
        f"at most two beside its model, {_gib(summary.memory_bound)} GiB",
        *_beside(config, summary),
        *_blocks(summary),
    ):
        console.print(line, markup=False, highlight=False)
    senders = Table("trainer ranks", "stage", "GiB to all engines", "least", "most")
    for ranks in _groups(plan):
        stage = plan.train.coordinates(ranks[0]).pipeline
        senders.add_row(*_sender_cells(ranks, stage, summary))
    console.print(senders)
    receivers = Table("engine ranks", "GiB received")
    for ranks, size in _equal(summary.bytes_by_receiver):
        receivers.add_row(as_ranges(ranks), _gib(size))
    console.print(receivers)


def _numbers(engine: EngineLayout) -> str:
    """In what the engines keep their parameters."""
    return engine.dtype if engine.quantization is None else f"{engine.quantization}/{engine.dtype}"


def _beside(config: RunConfig, summary: PlanSummary) -> Iterable[str]:
    """What the figures of the plan do not hold for, or do not contain."""
    transport = _transport(config)
    if transport in VLLM_BACKENDS:
        yield (
            f"transport {transport} does not follow this plan: vLLM moves "
            + ("shards" if transport == "vllm_nccl_m2n" else "full tensors")
            + " in buffers of its own"
        )
        return
    yield (
        "straight into the parameters that the engines keep as they are; modules whose kernel "
        f"keeps another layout are rebuilt, up to {_gib(summary.rebuilt_bytes)} GiB of them on an "
        "engine rank at a time"
    )
    if transport == "files":
        engines = config.rollout.engines
        yield (
            f"files of {VERSIONS} versions take {_gib(VERSIONS * summary.bytes_moved / engines)} "
            f"GiB in {SHARED_MEMORY if config.on_one_machine else config.run_dir}"
        )


def _blocks(summary: PlanSummary) -> Iterable[str]:
    """What FP8 matrices need beside the transfers; nothing without them."""
    if not summary.blocks:
        return
    shared = summary.shared_blocks
    yield (
        f"FP8: {summary.blocks:,} blocks of {BLOCK} x {BLOCK}, made by the ranks that send them; "
        + (
            f"{shared:,} lie on several trainer ranks, which exchange their maxima first"
            if shared
            else "each lies on one trainer rank"
        )
    )


def _transport(config: RunConfig) -> str:
    assert config.device != "auto", "the device is decided before the plan is shown"
    return chosen_transport(config, config.device)


def _balance(summary: PlanSummary) -> str:
    busy = sum(1 for sent in summary.bytes_by_sender.values() if sent)
    return (
        f"balance: {busy} of {summary.trainer_ranks} ranks send; the busiest sends "
        f"{summary.imbalance:.3f} x its even share of what it holds"
    )


def _groups(plan: ReshardPlan) -> list[list[int]]:
    """Ranks one by one, or by pipeline stage where they are many."""
    world, size = plan.train.world_size, plan.train.stage_size
    step = 1 if world <= MOST_RANKS_LISTED else size
    return [list(range(first, first + step)) for first in range(0, world, step)]


def _sender_cells(ranks: list[int], stage: int, summary: PlanSummary) -> list[str]:
    sent = [summary.bytes_by_sender[rank] for rank in ranks]
    sizes = (sum(sent), min(sent), max(sent))
    return [as_ranges(ranks), str(stage), *(_gib(size) for size in sizes)]


def _equal(sizes: dict[int, int]) -> Iterable[tuple[list[int], int]]:
    """Ranks that receive equally much, together."""
    found: dict[int, list[int]] = {}
    for rank, size in sizes.items():
        found.setdefault(size, []).append(rank)
    return ((ranks, size) for size, ranks in found.items())


def _gib(size: float) -> str:
    return f"{size / GIB:,.3f}"
