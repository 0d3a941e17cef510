from __future__ import annotations

from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.batch import packing
from megatron_dapo.batch.packing import context_slice, pack_update, plan_bins, split_updates
from megatron_dapo.batch.rollout_batch import build_rollout_batch
from megatron_dapo.config.schema import PrecisionConfig
from megatron_dapo.types import NO_LABEL, MicroBatch, Reward, RolloutBatch
from tests.unit.batch.batches import make_group, random_batch, run_config
from tests.unit.handed import Case, handed_cases

PER_TOKEN = (
    *("tokens", "labels", "position_ids", "loss_mask", "sequence_index", "advantages"),
    *("group_index", "rollout_logprobs"),
)


def pack_all(
    batch: RolloutBatch, rows: torch.Tensor, dp: int, **options: int
) -> list[list[MicroBatch]]:
    defaults = {"tokens_per_micro_batch": 64, "pad_multiple": 1}
    return [
        pack_update(batch, rows, dp_rank=rank, dp_size=dp, **defaults | options)  # type: ignore[arg-type]
        for rank in range(dp)
    ]


@pytest.mark.parametrize("case", handed_cases("m", "pad_multiple"))
def test_handed_pad_multiple(case: Case) -> None:
    given_ = case["input"]
    precision = "none" if given_["precision"] == "bf16" else given_["precision"]
    multiple = packing.pad_multiple(
        given_["tp"], given_["cp"], given_["sequence_parallel"], precision
    )
    assert multiple == case["expect"]["multiple"]
    batch = random_batch([(1, given_["tokens"] - 1)])
    (micro_batch,) = pack_update(
        batch,
        torch.tensor([0]),
        dp_rank=0,
        dp_size=1,
        tokens_per_micro_batch=given_["tokens"],
        pad_multiple=multiple,
    )
    assert micro_batch.num_tokens == case["expect"]["padded"]


def test_every_fp8_recipe_of_the_configuration_has_a_block() -> None:
    recipes = get_args(PrecisionConfig.model_fields["fp8"].annotation)
    assert get_args(packing.Fp8Recipe) == recipes
    assert [packing.pad_multiple(1, 1, False, recipe) for recipe in recipes] == [1, 128, 16, 16, 32]
    assert packing.pad_multiple(8, 4, False, "none") == 8
    assert packing.pad_multiple(3, 3, True, "none") == 18
    with pytest.raises(ValueError, match="bf16"):
        packing.pad_multiple(1, 1, False, "bf16")  # type: ignore[arg-type]


@pytest.mark.parametrize("case", handed_cases("i", "next_token_labels"))
def test_handed_labels_stay_inside_a_sequence(case: Case) -> None:
    ends = case["input"]["cu_seqlens"]
    packed = case["input"]["packed"]
    groups = [
        make_group([packed[start]], [packed[start + 1 : end]], [Reward(1.0, 1.0)])
        for start, end in pairwise(ends)
    ]
    batch = build_rollout_batch(groups, run_config())
    ((micro_batch,),) = pack_all(batch, torch.arange(len(groups)), 1)
    assert micro_batch.tokens.tolist() == packed
    assert micro_batch.cu_seqlens.tolist() == ends
    labels = [None if label == NO_LABEL else label for label in micro_batch.labels.tolist()]
    assert labels == case["expect"]["labels"]


@pytest.mark.parametrize("case", handed_cases("i", "align"))
def test_handed_logprobs_meet_their_tokens(case: Case) -> None:
    given_ = case["input"]
    group = make_group(given_["prompt"], [given_["response"]], [Reward(1.0, 1.0)])
    ((micro_batch,),) = pack_all(build_rollout_batch([group], run_config()), torch.tensor([0]), 1)
    step = {int(token): value for token, value in given_["step_logprob"].items()}
    logprobs = [step.get(label, float("nan")) for label in micro_batch.labels.tolist()]
    picked = torch.tensor(logprobs, dtype=torch.float64)[micro_batch.loss_mask]
    assert picked.tolist() == pytest.approx(case["expect"]["response_logprobs"], abs=case["tol"])


@pytest.mark.parametrize("case", handed_cases("h", "response_mask"))
def test_handed_mask_comes_from_lengths(case: Case) -> None:
    """The engine hands over tokens up to and with the first stop token, without filling."""
    given_, expect = case["input"], case["expect"]
    ids = given_["ids"]
    stops = [i + 1 for i, token in enumerate(ids) if token in given_["eos_ids"]]
    sampled = ids[: stops[0]] if given_["finish_reason"] == "stop" else ids
    group = make_group([9], [sampled], [Reward(1.0, 1.0)], finish=[given_["finish_reason"]])
    batch = build_rollout_batch([group], run_config())
    ((micro_batch,),) = pack_all(batch, torch.tensor([0]), 1, pad_multiple=1 + len(ids))
    assert micro_batch.loss_mask[: len(ids)].int().tolist() == expect["mask"]
    assert (group.responses[0].finish_reason == "length") is expect["truncated"]


@pytest.mark.parametrize("case", handed_cases("h", "keep_ids"))
def test_handed_ids_are_trained_as_sampled(case: Case) -> None:
    sampled = case["input"]["sampled_ids"]
    batch = build_rollout_batch(
        [make_group([9], sampled, [Reward(1.0, 1.0)] * len(sampled))], run_config()
    )
    ((micro_batch,),) = pack_all(batch, torch.arange(len(sampled)), 1)
    trained = [
        micro_batch.labels[micro_batch.loss_mask & (micro_batch.sequence_index == i)].tolist()
        for i in range(len(sampled))
    ]
    assert trained == case["expect"]["trained_ids"]


@pytest.mark.parametrize("case", handed_cases("b", "count_updates"))
def test_handed_number_of_updates(case: Case) -> None:
    given_ = case["input"]
    group_size = given_["group_size"]
    lengths = [(1, 1)] * (given_["prompts_per_rollout"] * group_size)
    batch = random_batch(lengths, group_size=group_size)
    updates = split_updates(batch, given_["mini_batch_samples"], given_["epochs"])
    assert len(updates) == case["expect"]["updates"]


def test_updates_hold_whole_groups_in_order() -> None:
    batch = random_batch([(1, 1)] * 12, group_size=2)
    updates = split_updates(batch, 4, epochs=2)
    assert [rows.tolist() for rows in updates] == [
        *([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]),
        *([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]),
    ]


def test_a_group_is_never_cut() -> None:
    batch = random_batch([(1, 1)] * 12, group_size=3)
    with pytest.raises(ValueError, match="responses_per_update=4 cuts a group"):
        split_updates(batch, 4)


def test_a_short_batch_ends_in_a_smaller_update_only_where_allowed() -> None:
    batch = random_batch([(1, 1)] * 10, group_size=2)
    with pytest.raises(ValueError, match="2 are left over"):
        split_updates(batch, 4)
    updates = split_updates(batch, 4, allow_partial=True)
    assert [rows.tolist() for rows in updates] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=24)
LAYOUTS = st.fixed_dictionaries(
    {
        "pad_multiple": st.sampled_from([4, 12, 16]),
        "tokens_per_micro_batch": st.integers(40, 150),
        "micro_batch_multiple": st.integers(1, 3),
        "min_micro_batches": st.integers(1, 4),
        "cp_size": st.sampled_from([1, 2]),
    }
)


@settings(deadline=None)
@given(LENGTHS, LAYOUTS, st.integers(1, 4))
def test_packs_keep_every_promise(
    lengths: list[tuple[int, int]], layout: dict[str, int], dp: int
) -> None:
    batch = random_batch(lengths)
    ranks = pack_all(batch, torch.arange(len(lengths)), dp, **layout)
    everything = [micro_batch for rank in ranks for micro_batch in rank]
    assert sorted(row for mb in everything for row in mb.rows.tolist()) == list(range(len(lengths)))
    (count,) = {len(rank) for rank in ranks}
    assert count % layout["micro_batch_multiple"] == 0
    assert count >= layout["min_micro_batches"]
    (padded,) = {micro_batch.num_tokens for micro_batch in everything}
    assert padded % layout["pad_multiple"] == 0
    assert padded < layout["tokens_per_micro_batch"] + layout["pad_multiple"]
    for micro_batch in everything:
        check_fields(batch, micro_batch, 4 if layout["cp_size"] == 2 else 1)


def check_fields(batch: RolloutBatch, micro_batch: MicroBatch, sequence_multiple: int) -> None:
    """Every field of a pack against the rows that it holds, position by position."""
    ends = micro_batch.cu_seqlens.tolist()
    assert ends[0] == 0
    assert ends[-1] == micro_batch.num_tokens
    assert micro_batch.num_sequences == micro_batch.rows.numel()
    assert len(ends) - 1 - micro_batch.num_sequences in (0, 1)
    assert micro_batch.max_seqlen == max(b - a for a, b in pairwise(ends))
    token_starts = [0, *(batch.prompt_tokens + batch.response_tokens).cumsum(0).tolist()]
    logprob_starts = [0, *batch.response_tokens.cumsum(0).tolist()]
    expected = {name: torch.zeros_like(getattr(micro_batch, name)) for name in PER_TOKEN}
    expected["labels"].fill_(NO_LABEL)
    for start, end in pairwise(ends):
        expected["position_ids"][start:end] = torch.arange(end - start)
    for number, row in enumerate(micro_batch.rows.tolist()):
        start, end = ends[number], ends[number + 1]
        prompt, response = int(batch.prompt_tokens[row]), int(batch.response_tokens[row])
        assert 0 <= end - start - prompt - response < sequence_multiple
        assert (end - start) % sequence_multiple == 0
        expected["sequence_index"][start:end] = number
        expected["group_index"][start:end] = batch.group_index[row]
        for t in range(prompt + response):
            expected["tokens"][start + t] = batch.tokens[token_starts[row] + t]
            if t + 1 < prompt + response:
                expected["labels"][start + t] = batch.tokens[token_starts[row] + t + 1]
            answer = t + 1 - prompt  # place of the predicted token in the response
            if 0 <= answer < response:
                expected["loss_mask"][start + t] = batch.trained[row]
                expected["advantages"][start + t] = batch.advantages[row]
                expected["rollout_logprobs"][start + t] = batch.rollout_logprobs[
                    logprob_starts[row] + answer
                ]
    for name, tensor in expected.items():
        assert getattr(micro_batch, name).equal(tensor), name


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 50), max_size=60),
    st.integers(1, 5),
    st.integers(50, 200),
    st.integers(1, 3),
)
def test_bins_are_balanced(lengths: list[int], dp: int, budget: int, multiple: int) -> None:
    plan = plan_bins(
        lengths, dp_size=dp, tokens_per_micro_batch=budget, micro_batch_multiple=multiple
    )
    again = plan_bins(
        list(lengths), dp_size=dp, tokens_per_micro_batch=budget, micro_batch_multiple=multiple
    )
    assert plan == again
    loads = [[sum(lengths[i] for i in rows) for rows in rank] for rank in plan]
    every = [load for rank in loads for load in rank]
    assert max(every) <= budget
    assert max(every) <= sum(lengths) / len(every) + max(lengths, default=0)
    totals = [sum(rank) for rank in loads]
    assert max(totals) - min(totals) <= max(every) - min(every)
    ideal = -(-sum(lengths) // (budget * dp))
    assert len(plan[0]) <= max(2 * ideal, 1) + multiple


def test_long_sequences_are_placed_first() -> None:
    assert plan_bins([1, 1, 1, 1, 4], dp_size=1, tokens_per_micro_batch=4) == [[[0, 1, 2, 3], [4]]]


def test_a_count_that_does_not_fit_grows_by_the_multiple() -> None:
    plan = plan_bins([6, 6, 6], dp_size=1, tokens_per_micro_batch=10, micro_batch_multiple=2)
    assert plan == [[[0], [1], [2], []]]


def test_padding_for_context_ranks_does_not_count_against_the_budget() -> None:
    ((micro_batch,),) = pack_all(
        random_batch([(1, 62)]), torch.tensor([0]), 1, tokens_per_micro_batch=63, **CP2
    )
    assert micro_batch.num_tokens == 64


CP2 = {"cp_size": 2, "pad_multiple": 4}


def test_a_rank_without_sequences_gets_padding_only() -> None:
    ranks = pack_all(random_batch([(2, 3)]), torch.tensor([0]), 2, pad_multiple=8)
    full, empty = ranks[0][0], ranks[1][0]
    assert (full.num_sequences, empty.num_sequences) == (1, 0)
    assert full.num_tokens == empty.num_tokens == 8
    assert full.cu_seqlens.tolist() == [0, 5, 8]
    assert empty.cu_seqlens.tolist() == [0, 8]
    assert empty.rows.dtype == torch.int64
    assert not empty.loss_mask.any()
    assert empty.labels.eq(NO_LABEL).all()


def test_only_the_rows_of_the_update_are_packed() -> None:
    batch = random_batch([(2, 3)] * 6)
    ranks = pack_all(batch, torch.tensor([4, 2]), 1)
    assert ranks[0][0].rows.sort().values.tolist() == [2, 4]
    check_fields(batch, ranks[0][0], 1)


def test_a_sequence_over_the_budget_is_refused_with_the_cure() -> None:
    with pytest.raises(ValueError, match=r"70 tokens.*tokens_per_micro_batch=64.*max_prompt"):
        pack_all(random_batch([(30, 40)]), torch.tensor([0]), 1)


@pytest.mark.parametrize("cp", [2, 3])
def test_context_ranks_share_each_sequence_in_a_zig_zag(cp: int) -> None:
    batch = random_batch([(3, 8), (5, 19), (1, 2)])
    ((whole,),) = pack_all(
        batch, torch.arange(3), 1, cp_size=cp, pad_multiple=2 * cp * 5, tokens_per_micro_batch=90
    )
    whole = whole.replace(old_logprobs=torch.rand(whole.num_tokens))
    ends = whole.cu_seqlens.tolist()
    for rank in range(cp):
        part = context_slice(whole, rank, cp)
        assert part.num_tokens == whole.num_tokens // cp
        assert part.cu_seqlens.equal(whole.cu_seqlens)
        assert part.rows.equal(whole.rows)
        assert part.reference_logprobs is None
        index = []
        for start, end in pairwise(ends):
            chunks = torch.arange(start, end).chunk(2 * cp)
            index += [chunks[rank], chunks[2 * cp - 1 - rank]]
        for name in (*PER_TOKEN, "old_logprobs"):
            assert getattr(part, name).equal(getattr(whole, name)[torch.cat(index)]), name
    kept = torch.cat([context_slice(whole, rank, cp).labels for rank in range(cp)])
    assert kept.sort().values.equal(whole.labels.sort().values)


def test_without_context_parallelism_the_pack_stays_whole() -> None:
    ((whole,),) = pack_all(random_batch([(3, 8)]), torch.tensor([0]), 1)
    assert context_slice(whole, 0, 1) is whole


def test_a_pack_that_was_not_padded_for_context_ranks_is_refused() -> None:
    ((whole,),) = pack_all(random_batch([(3, 8)]), torch.tensor([0]), 1)
    with pytest.raises(ValueError, match="11 tokens does not divide into 4"):
        context_slice(whole, 0, 2)


def test_a_prompt_without_a_token_is_refused() -> None:
    """Nothing would predict its response's first token but the last token of its neighbour."""
    with pytest.raises(ValueError, match=r"prompt_tokens\[1\]=0"):
        pack_all(random_batch([(3, 4), (0, 5)]), torch.tensor([0, 1]), 1)
