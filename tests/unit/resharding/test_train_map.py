"""The trainer's side of a plan agrees with Megatron's groups and with the weights' loader."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.config.schema import ParallelConfig
from megatron_dapo.resharding.layout import check_agrees, local_parameters
from megatron_dapo.resharding.name_map import family_for
from megatron_dapo.resharding.plan import EngineLayout, TrainLayout, build_plan
from tests.unit.resharding.layouts import Case, cases, numbered, train_parameters, train_placements

SIZES = st.sampled_from([1, 2, 3, 4])


@settings(deadline=None)
@given(tensor=SIZES, pipeline=SIZES, context=SIZES, data=SIZES, expert=SIZES, expert_tensor=SIZES)
def test_coordinates_are_those_of_megatrons_groups(
    tensor: int, pipeline: int, context: int, data: int, expert: int, expert_tensor: int
) -> None:
    from megatron.core.parallel_state import RankGenerator

    inside = tensor * context * data
    if inside % (expert * expert_tensor):
        expert = expert_tensor = 1
    layout = TrainLayout(
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        data=data,
        expert=expert,
        expert_tensor=expert_tensor,
        padded_vocab_size=tensor,
    )
    order = "tp-cp-ep-dp-pp"  # the default of initialize_model_parallel
    dense = RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order=order)
    experts = RankGenerator(
        tp=expert_tensor,
        ep=expert,
        dp=inside // (expert * expert_tensor),
        pp=pipeline,
        cp=1,
        order=order,
    )
    for generator, name, attribute in (
        (dense, "tp", "tensor"),
        (dense, "pp", "pipeline"),
        (dense, "cp", "context"),
        (dense, "dp", "data"),
        (experts, "tp", "expert_tensor"),
        (experts, "ep", "expert"),
        (experts, "dp", "expert_data"),
        (experts, "pp", "pipeline"),
    ):
        groups = generator.get_ranks(name)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
        for group in groups:
            places = [vars(layout.coordinates(rank))[attribute] for rank in group]
            assert places == list(range(len(group))), (name, group)


@settings(deadline=None, max_examples=40)
@given(case=cases(), data=st.data())
def test_placements_are_where_the_loader_puts_the_weights(case: Case, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, case.train.world_size - 1))
    tensors = numbered(case.family)
    held = train_parameters(case, tensors, rank)
    rebuilt = {name: torch.full_like(value, -1) for name, value in held.items()}
    for place in train_placements(case.family, case.train, rank):
        source = tensors[place.tensor]
        source = source.view(source.shape[0], -1)
        target = rebuilt[place.parameter].view(held[place.parameter].shape[0], -1)
        part = place.part
        target[place.row : place.row + part.rows, place.col : place.col + part.cols] = source[
            part.row : part.row + part.rows, part.col : part.col + part.cols
        ]
    for name, value in held.items():
        padding = value == 0  # elements are numbered from 1
        assert torch.equal(rebuilt[name][~padding], value[~padding]), name
        assert (rebuilt[name][padding] == -1).all(), name


@settings(deadline=None, max_examples=40)
@given(case=cases(), data=st.data())
def test_a_plan_knows_the_shapes_that_a_rank_holds(case: Case, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, case.train.world_size - 1))
    plan = build_plan(case.train, case.engine, case.family, bucket_bytes=case.bucket_bytes)
    held = train_parameters(case, numbered(case.family), rank)
    assert plan.sources(rank) == {name: tuple(value.shape) for name, value in held.items()}


@settings(deadline=None, max_examples=40)
@given(case=cases())
def test_every_rank_finds_itself_among_the_holders_of_its_shards(case: Case) -> None:
    for rank in range(case.train.world_size):
        for kind, (shard, replica) in case.train.shards_of(rank).items():
            assert shard.kind == kind
            assert case.train.rank(shard, replica) == rank


def test_a_layout_is_read_from_the_configuration() -> None:
    config = ParallelConfig(tensor=2, pipeline=2, virtual_pipeline=2, data=4, expert=4)
    layout = TrainLayout.from_config(config, 256)
    assert layout == TrainLayout(
        tensor=2, pipeline=2, virtual_pipeline=2, data=4, expert=4, padded_vocab_size=256
    )
    assert layout.world_size == config.world_size == 16
    assert TrainLayout.from_config(ParallelConfig(tensor=2), 256).expert_tensor == 2


def test_impossible_grids_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parallel\.expert=4 x expert_tensor=1 must divide .* 2"):
        TrainLayout(tensor=2, expert=4, padded_vocab_size=128)
    with pytest.raises(ValueError, match=r"129 rows must be a multiple of parallel\.tensor=2"):
        TrainLayout(tensor=2, padded_vocab_size=129)


def test_a_router_bias_is_refused_by_name() -> None:
    """Megatron keeps it as a buffer, which no table of parameters would miss."""
    chunk, router = torch.nn.Module(), torch.nn.Module()
    router.register_buffer("expert_bias", torch.zeros(4))
    chunk.decoder = torch.nn.Module()
    chunk.decoder.layers = torch.nn.ModuleList([torch.nn.Module()])
    chunk.decoder.layers[0].layer_number = 1  # type: ignore[assignment]
    chunk.decoder.layers[0].router = router
    config = transformers.AutoConfig.for_model("qwen3", num_hidden_layers=1)
    one_rank = SimpleNamespace(pp_size=1, pp_rank=0, ep_size=1, ep_rank=0)
    with pytest.raises(ValueError, match=r"'decoder\.layers\.0\.router\.expert_bias' steers"):
        local_parameters([chunk], family_for(config), one_rank)  # type: ignore[arg-type, list-item]


def live(**places: int) -> SimpleNamespace:
    """What `check_agrees` reads of a ParallelContext: rank 3 of 2 tensor x 2 data ranks."""
    standard = dict(
        rank=3, world_size=4, tp_rank=1, tp_size=2, pp_rank=0, pp_size=1, cp_rank=0, cp_size=1
    )
    rest = dict(dp_rank=1, dp_size=2, ep_rank=0, ep_size=1, etp_rank=1, etp_size=2)
    return SimpleNamespace(**(standard | rest | places))


def test_ranks_that_sit_elsewhere_or_hold_something_else_are_refused() -> None:
    config = transformers.Qwen3Config(
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=4,
        hidden_size=8,
        intermediate_size=16,
        vocab_size=100,
    )
    plan = build_plan(
        TrainLayout(tensor=2, data=2, expert_tensor=2, padded_vocab_size=128),
        EngineLayout(),
        family_for(config),
        bucket_bytes=1000,
    )
    sources = {name: torch.empty(shape) for name, shape in plan.sources(3).items()}
    check_agrees(plan, live(), sources)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="made for 4 trainer ranks, 8 are running"):
        check_agrees(plan, live(world_size=8), sources)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"parallel\.data: rank 3 is number 0 of 2 .* number 1"):
        check_agrees(plan, live(dp_rank=0), sources)  # type: ignore[arg-type]
    norm = "model.norm.weight"
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight has shape \(7,\) .* \(8,\)"):
        check_agrees(plan, live(), sources | {norm: torch.empty(7)})  # type: ignore[arg-type]
    del sources[norm]
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight has shape None"):
        check_agrees(plan, live(), sources)  # type: ignore[arg-type]
