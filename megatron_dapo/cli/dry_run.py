"""`megatron-dapo train CONFIG --dry-run`: what would run, where, in what batches and memory.

Needs neither a GPU nor weights. Rules between keys and the model's shape are always errors.
What only this machine lacks (files, packages, a device) is an error where the run would start,
and a warning where the configuration is meant for another machine: `device: cuda` read where
no CUDA device is visible.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from megatron_dapo.cli.terminal import open_console
from megatron_dapo.config.checks import check_config
from megatron_dapo.config.errors import ConfigError
from megatron_dapo.config.layout_checks import pack_multiple
from megatron_dapo.config.load import resolved_yaml
from megatron_dapo.config.machine_checks import (
    decide_device,
    machine_problems,
    meant_for_another_machine,
)
from megatron_dapo.config.model_shape import ModelShape, read_hf_config
from megatron_dapo.config.remarks import remark_on_prompts, remarks
from megatron_dapo.config.schema import RunConfig
from megatron_dapo.data.rows import Row, read_rows
from megatron_dapo.parallel.rank_map import RankPlace, as_ranges, rank_map
from megatron_dapo.planning.memory import (
    FORMULAS,
    GIB,
    MemoryPlan,
    padded_vocab,
    parameter_count,
    plan_engine,
    plan_stage,
)

MOST_RANKS_LISTED = 16


def dry_run(config: RunConfig) -> int:
    """Check `config`, print what would run, and return 0.

    Raises:
        ConfigError: the run would be refused.
    """
    hf_config = read_hf_config(config.model.path)
    check_config(decide_device(config), hf_config)
    problems = list(machine_problems(config))
    elsewhere = meant_for_another_machine(config)
    if problems and not elsewhere:
        raise ConfigError(problems)
    shape = ModelShape.from_hf(hf_config)
    console = open_console()
    _show_config(console, config)
    _show_ranks(console, config)
    _show_batches(console, config)
    show_memory(console, config, shape)
    for remark in (*remarks(config), *_remarks_on_data(config)):
        console.print(f"note: {remark}", markup=False, highlight=False)
    if elsewhere:
        _show_warnings(console, problems)
    console.print("[green]The configuration is sound.[/] Nothing was built.")
    return 0


def _show_config(console: Console, config: RunConfig) -> None:
    console.rule("configuration")
    text = resolved_yaml(config).rstrip()
    console.print(Syntax(text, "yaml", background_color="default", word_wrap=True))


def _show_ranks(console: Console, config: RunConfig) -> None:
    places = rank_map(config.parallel)
    parallel = config.parallel
    console.rule(f"{len(places)} trainer ranks on {parallel.nodes} nodes")
    if len(places) <= MOST_RANKS_LISTED:
        rows = [[place] for place in places]
    else:
        rows = [[p for p in places if p.node == node] for node in range(parallel.nodes)]
    table = Table("node", "devices", "ranks", "pipeline", "data", "context", "expert", "tensor")
    for row in rows:
        table.add_row(*_place_cells(row))
    console.print(table)
    rollout = config.rollout
    where = "given as endpoints" if rollout.endpoints else rollout.placement
    console.print(
        f"{rollout.engines} rollout engine(s) of {rollout.engine_tensor} device(s), {where}; "
        f"resharding.transport={config.resharding.transport} (`megatron-dapo plan` prints who "
        "sends what)."
    )


def _place_cells(places: list[RankPlace]) -> list[str]:
    columns = ("node", "device", "rank", "pipeline", "data", "context", "expert", "tensor")
    return [as_ranges(vars(place)[column] for place in places) for column in columns]


def _show_batches(console: Console, config: RunConfig) -> None:
    console.rule("batches")
    rollout, training = config.rollout, config.training
    longest, multiple = config.max_sequence_tokens, pack_multiple(config)
    epochs = f" x {training.epochs} epochs" if training.epochs > 1 else ""
    per_rank = training.responses_per_update / config.parallel.data
    for line in (
        f"step: {rollout.prompts_per_step:,} prompts x {rollout.group_size} responses = "
        f"{config.responses_per_step:,} responses",
        f"      {config.updates_per_step} updates of {training.responses_per_update:,} responses"
        f"{epochs}, {per_rank:g} responses per data-parallel rank and update",
        f"run:  {training.steps:,} steps, {training.steps * config.updates_per_step:,} updates, "
        f"at most {in_words(training.steps * config.responses_per_step * longest)} tokens",
        f"pack: {training.tokens_per_micro_batch:,} tokens a micro-batch, sequences of at most "
        f"{longest:,}, padded to multiples of {multiple}",
    ):
        console.print(line, markup=False)


def in_words(count: int) -> str:
    """`count` to three digits: 950, 49.2 thousand, 1.5 million, 3.69 billion."""
    for size, unit in ((10**12, " trillion"), (10**9, " billion"), (10**6, " million")):
        if count >= 0.9995 * size:
            return f"{count / size:,.3g}{unit}" if count < 999.5 * size else f"{count:.2e}"
    return f"{count / 1000:.3g} thousand" if count >= 1000 else str(count)


def _remarks_on_data(config: RunConfig) -> Iterator[str]:
    """What the training file itself shows, read only as far as one step would read it."""
    if not config.data.train.is_file():
        return
    try:
        found = _first_prompts(config)
    except ValueError as error:
        yield f"data.train cannot be used: {error}"
        return
    if remark := remark_on_prompts(config, found):
        yield remark


def _first_prompts(config: RunConfig) -> int:
    """Prompts of the training file, counted to `rollout.prompts_per_step` at most; 1 at least."""
    data = config.data
    rows = read_rows(data.train, prompt_column=data.prompt_column, answer_column=data.answer_column)
    found: set[str] = set()
    for row in rows:
        if isinstance(row, Row):
            found.add(json.dumps(row.messages) if data.deduplicate else str(row.line))
        if len(found) == config.rollout.prompts_per_step:
            break
    if not found:
        raise ValueError(f"{data.train} holds no row that can be read")
    return len(found)


def show_memory(console: Console, config: RunConfig, shape: ModelShape) -> None:
    """Print what a rank of every stage and of an engine holds."""
    console.rule("memory of a rank at its peak, GiB (estimate)")
    table = Table("stage", "parameters", *_PARTS, "total")
    for stage in range(config.parallel.pipeline):
        table.add_row(*_memory_cells(plan_stage(config, shape, stage)))
    console.print(table)
    engine = plan_engine(config, shape)
    vocab = padded_vocab(shape.vocab, config.parallel.tensor)
    for line in (
        f"model: {parameter_count(shape):,} parameters; vocabulary {shape.vocab:,}, in training "
        f"{vocab:,}",
        f"engine rank: weights {engine.weights / GIB:.2f} GiB, cache "
        f"{engine.cache_per_token / 1024:.1f} KiB a token, {engine.cache_when_full / GIB:.1f} GiB "
        f"with {config.rollout.max_concurrent_sequences} sequences at their longest (it takes "
        f"{config.rollout.gpu_memory_utilization:.0%} of a GPU)",
        *FORMULAS,
    ):
        console.print(line, markup=False, highlight=False)


_PARTS = ("weights", "gradients", "optimizer", "activations", "head", "reference", "critic")


def _memory_cells(plan: MemoryPlan) -> list[str]:
    parts = (
        plan.parameters,
        plan.gradients,
        plan.optimizer,
        plan.activations,
        plan.head,
        plan.reference,
        plan.critic,
        plan.total,
    )
    count = f"{plan.parameter_count:,}"
    return [str(plan.stage), count, *(f"{part / GIB:.2f}" for part in parts)]


def _show_warnings(console: Console, problems: list[str]) -> None:
    console.rule("warnings")
    console.print(
        "This configuration is for a machine with CUDA devices. Here is none, so what follows was "
        "only noted; where it runs, each is an error:"
    )
    for problem in problems:
        console.print(f"warning: {problem}", markup=False, highlight=False)
