"""Held-out sets: how they are named, read, sampled and graded."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from megatron_dapo.config import ConfigError, RunConfig, load_config
from megatron_dapo.config.heldout import heldout_files
from megatron_dapo.rollout.dispatch import Dispatcher
from megatron_dapo.rollout.engine import EngineUnavailable, GenerationRequest
from megatron_dapo.rollout.heldout import HeldoutSampling, read_heldout, warn_of_overlap
from megatron_dapo.rollout.seeds import sample_seed
from megatron_dapo.types import Group
from tests.unit.config.runs import write_run
from tests.unit.data.word_tokenizer import WordTokenizer
from tests.unit.rollout.fake_engine import STOP, FakeEngine

DAPO_ROWS = [
    {"data_source": source, "prompt": f"{n} + 0", "reward_model": {"ground_truth": str(n)}}
    for n, source in enumerate(["sums", "sums", "", "primes"])
]
GSM8K_ROWS = [{"question": "two and five", "answer": "2 + 5 = 7\n#### 7"}]


def write(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(folder: Path, *overrides: str) -> RunConfig:
    file = write_run(folder)
    write(folder / "heldout.jsonl", DAPO_ROWS)
    write(folder / "gsm8k.jsonl", GSM8K_ROWS)
    return load_config(file, ["data.prompt_format=plain", *overrides])


def sampling(config: RunConfig, **changes: object) -> HeldoutSampling:
    arguments: dict[str, object] = {
        "sets": read_heldout(config, WordTokenizer()),
        "decode": lambda ids: "Answer: 7" if 7 in ids else "Answer: 8",
        "stop_token_ids": (STOP,),
        "max_response_tokens": 64,
        "seed": 3,
        "graders": None,
        "grader_threads": 2,
    }
    return HeldoutSampling(**arguments | changes)  # type: ignore[arg-type]


def sample(
    heldout: HeldoutSampling, *engines: FakeEngine, step: int = 5, version: int = 5
) -> dict[str, list[Group]]:
    generate = Dispatcher(engines, 4).generate
    return asyncio.run(heldout.sample(generate, step=step, policy_version=version))


def test_each_set_of_a_file_is_cut_to_its_first_prompts(tmp_path: Path) -> None:
    heldout = f"data.heldout={tmp_path / 'heldout.jsonl'}"
    sets = read_heldout(run(tmp_path, heldout, "evaluation.max_prompts=1"), WordTokenizer())
    assert {found.name: [prompt.answer for prompt in found.prompts] for found in sets} == {
        "sums": ["0"],
        "heldout": ["2"],
        "primes": ["3"],
    }


def test_rows_name_the_sets_of_data_heldout_and_others_have_the_name_of_their_key(
    tmp_path: Path,
) -> None:
    config = run(
        tmp_path,
        f"data.heldout={tmp_path / 'heldout.jsonl'}",
        f"evaluation.sets.gsm8k.path={tmp_path / 'gsm8k.jsonl'}",
    )
    sets = {found.name: found for found in read_heldout(config, WordTokenizer())}
    assert {name: len(found.prompts) for name, found in sets.items()} == {
        "sums": 2,
        "heldout": 1,
        "primes": 1,
        "gsm8k": 1,
    }
    assert sets["gsm8k"].prompts[0].answer == "7"


def test_a_set_keeps_its_own_keys_and_takes_the_others_from_their_sections(tmp_path: Path) -> None:
    gsm8k = "evaluation.sets.gsm8k"
    config = run(
        tmp_path,
        f"data.heldout={tmp_path / 'heldout.jsonl'}",
        "data.prompt_column=prompt",
        "evaluation.answer_style=boxed",
        *(f"{gsm8k}.path={tmp_path / 'gsm8k.jsonl'}", f"{gsm8k}.temperature=0"),
        *(f"{gsm8k}.samples_per_prompt=1", f"{gsm8k}.prompt_format=dapo"),
        f"{gsm8k}.answer_style=either",
    )
    general, own = heldout_files(config)
    assert (general.samples_per_prompt, general.temperature, general.top_p) == (32, 1.0, 0.7)
    assert general.reward.style == "boxed"
    assert general.data.prompt_column == "prompt"
    assert (own.samples_per_prompt, own.temperature, own.top_p) == (1, 0.0, 0.7)
    assert own.reward.style == "either"
    assert own.data.prompt_format == "dapo"
    assert own.data.prompt_column is None
    assert config.reward.style == "answer_line"


def test_copies_of_a_problem_are_one_problem(tmp_path: Path) -> None:
    config = run(tmp_path, f"data.heldout={tmp_path / 'copies.jsonl'}", "data.deduplicate=false")
    write(tmp_path / "copies.jsonl", DAPO_ROWS * 32)
    sets = read_heldout(config, WordTokenizer())
    assert sum(len(found.prompts) for found in sets) == len(DAPO_ROWS)


def test_two_sets_of_one_name_are_refused(tmp_path: Path) -> None:
    config = run(
        tmp_path,
        f"data.heldout={tmp_path / 'heldout.jsonl'}",
        f"evaluation.sets.sums.path={tmp_path / 'gsm8k.jsonl'}",
    )
    with pytest.raises(ConfigError, match="a set of the name sums is there already"):
        read_heldout(config, WordTokenizer())


def both_sets(tmp_path: Path, *overrides: str) -> RunConfig:
    return run(
        tmp_path,
        f"evaluation.sets.sums.path={tmp_path / 'heldout.jsonl'}",
        f"evaluation.sets.gsm8k.path={tmp_path / 'gsm8k.jsonl'}",
        "evaluation.sets.gsm8k.samples_per_prompt=3",
        "evaluation.samples_per_prompt=2",
        *overrides,
    )


def test_every_prompt_is_sampled_as_its_set_says(tmp_path: Path) -> None:
    engine = FakeEngine(version=5)
    heldout = sampling(both_sets(tmp_path, "evaluation.sets.gsm8k.temperature=0.5"))
    groups = sample(heldout, engine)
    assert heldout.expected_responses() == {"sums": 8, "gsm8k": 3}
    assert {name: [len(g.responses) for g in found] for name, found in groups.items()} == {
        "sums": [2, 2, 2, 2],
        "gsm8k": [3],
    }
    prompts = {found.name: found.prompts for found in heldout.sets}
    for name, found in groups.items():
        assert [group.prompt for group in found] == list(prompts[name])
        for group in found:
            assert [response.sample_index for response in group.responses] == list(
                range(len(group.responses))
            )
            assert {response.prompt_id for response in group.responses} == {group.prompt.id}
    drawn = Counter((r.temperature, r.top_p, r.top_k, r.max_tokens) for r in engine.requests)
    assert drawn == {(1.0, 0.7, -1, 64): 8, (0.5, 0.7, -1, 64): 3}
    assert len({request.request_id for request in engine.requests}) == 11


def test_responses_are_graded_by_the_style_of_their_set(tmp_path: Path) -> None:
    config = both_sets(tmp_path, "evaluation.sets.gsm8k.answer_style=boxed")
    groups = sample(sampling(config, decode=lambda ids: "Answer: 0"), FakeEngine(version=5))
    first = groups["sums"][0]
    assert first.prompt.answer == "0"
    assert [reward.accuracy for reward in first.rewards] == [1.0, 1.0]
    assert [reward.extracted for reward in groups["gsm8k"][0].rewards] == [None] * 3


def test_aborted_responses_are_not_graded(tmp_path: Path) -> None:
    engine = FakeEngine(version=5, finish=lambda request: "abort")
    groups = sample(sampling(both_sets(tmp_path)), engine)
    assert {r.accuracy for found in groups.values() for g in found for r in g.rewards} == {None}


def seeds(groups: Mapping[str, list[Group]]) -> list[int]:
    return [r.seed for found in groups.values() for group in found for r in group.responses]


def test_every_response_has_a_seed_of_its_own_that_training_never_draws(tmp_path: Path) -> None:
    heldout = sampling(both_sets(tmp_path))
    drawn = [seeds(sample(heldout, FakeEngine(version=9), step=step)) for step in (0, 5, 9)]
    flat = [seed for found in drawn for seed in found]
    assert len(set(flat)) == len(flat) == 33
    training = {sample_seed(3, 5, event, n) for event in range(20) for n in range(4)}
    assert not training & set(flat)


def test_seeds_and_answers_do_not_depend_on_engines_or_on_other_sets(tmp_path: Path) -> None:
    together = sample(sampling(both_sets(tmp_path)), FakeEngine(version=5))
    again = sample(
        sampling(both_sets(tmp_path)), FakeEngine(version=5, dies_after=2), FakeEngine(version=5)
    )
    assert again == together
    alone = run(
        tmp_path,
        f"evaluation.sets.gsm8k.path={tmp_path / 'gsm8k.jsonl'}",
        "evaluation.samples_per_prompt=3",
    )
    of_one = sample(sampling(alone), FakeEngine(version=5))
    assert seeds(of_one) == seeds({"gsm8k": together["gsm8k"]})
    other = sample(sampling(alone, seed=4), FakeEngine(version=5))
    assert not set(seeds(other)) & set(seeds(together))


def test_each_graded_response_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    heldout = sampling(both_sets(tmp_path))
    generate = Dispatcher([FakeEngine(version=0)], 4).generate
    asyncio.run(heldout.sample(generate, step=0, policy_version=0, on_response=told.append))
    assert Counter(told) == heldout.expected_responses()


def test_older_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="policy version 4, expected 5"):
        sample(sampling(both_sets(tmp_path)), FakeEngine(version=4))


def test_engines_that_also_sample_for_training_are_not_asked_for_more(tmp_path: Path) -> None:
    engine = FakeEngine(version=5, seconds=lambda request: 0.001)
    alone = sample(sampling(both_sets(tmp_path)), FakeEngine(version=5))

    async def both() -> dict[str, list[Group]]:
        dispatcher = Dispatcher([engine], 4)
        trained = [
            GenerationRequest((50, 0, n), n, 1.0, 1.0, -1, 8, (STOP,), f"train-6-{n}-0")
            for n in range(30)
        ]
        others = [asyncio.ensure_future(dispatcher.generate(request)) for request in trained]
        heldout = sampling(both_sets(tmp_path))
        groups = await heldout.sample(dispatcher.generate, step=5, policy_version=5)
        await asyncio.gather(*others)
        return groups

    assert asyncio.run(both()) == alone
    assert engine.most_running <= 5  # 4 at once, and one that waits inside


def test_without_engines_left_it_ends(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="all 1 rollout engines are lost"):
        sample(sampling(both_sets(tmp_path)), FakeEngine(version=5, dies_after=3))


def test_prompts_that_are_trained_on_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sets = read_heldout(both_sets(tmp_path), WordTokenizer())
    with caplog.at_level(logging.WARNING):
        warn_of_overlap(sets[0].prompts[:3], sets)
    (warning,) = (r.message for r in caplog.records if r.levelno == logging.WARNING)
    assert warning.startswith("evaluation.sets.sums: 3 of the 4 prompts of sums are in data.train")
