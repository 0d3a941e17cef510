"""Held-out sets that the user names: loaded, overridden, refused, saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_dapo.config import ConfigError, check_config, load_config
from megatron_dapo.config.evaluation_checks import best_problems, evaluation_problems
from megatron_dapo.config.keys import documented_as, documented_keys
from megatron_dapo.config.load import save_resolved
from tests.unit.config.runs import DENSE, make_config, write_run


def write_sets(folder: Path, sets: dict[str, object]) -> Path:
    file = write_run(folder)
    tree = yaml.safe_load(file.read_text()) | {"evaluation": {"sets": sets}}
    file.write_text(yaml.safe_dump(tree))
    return file


def test_sets_come_from_files_and_overrides_and_are_saved(tmp_path: Path) -> None:
    file = write_sets(tmp_path, {"aime-24": {"path": "a.parquet", "top_p": 0.9}})
    config = load_config(
        file,
        ["evaluation.sets.aime-24.samples_per_prompt=4", "evaluation.sets.gsm8k.path=g.jsonl"],
    )
    assert list(config.evaluation.sets) == ["aime-24", "gsm8k"]
    chosen = config.evaluation.sets["aime-24"]
    assert (chosen.top_p, chosen.samples_per_prompt, chosen.temperature) == (0.9, 4, None)
    assert chosen.path.is_absolute()
    assert load_config(save_resolved(config, tmp_path / "saved")) == config


WRONG = {
    "evaluation.sets.aime.pth=x": "unknown config key evaluation.sets.aime.pth in an override. "
    "Did you mean evaluation.sets.aime.path?",
    "evaluation.sets.aime.top_p=0": "evaluation.sets.aime.top_p=0",
    "evaluation.sets.aime.top_k=5": "Did you mean rollout.top_k?",
    "evaluation.sets.bad.name.path=x": "unknown config key evaluation.sets.bad.name",
    "evaluation.sets.two words.path=x": "evaluation.sets",
    "evaluation.sets.aime=x": "evaluation.sets.aime='x': must be a section with keys",
    "evaluation.sets.gsm8k.max_prompts=3": "evaluation.sets.gsm8k.path is required and not set: "
    ".parquet or .jsonl file. Add it, or evaluation.sets.gsm8k.path=...",
}


@pytest.mark.parametrize(("override", "message"), WRONG.items())
def test_a_wrong_key_of_a_set_is_named_with_the_set(
    tmp_path: Path, override: str, message: str
) -> None:
    file = write_sets(tmp_path, {"aime": {"path": "a.parquet"}})
    with pytest.raises(ConfigError) as refused:
        load_config(file, [override])
    assert message in str(refused.value)


def test_every_key_of_a_set_is_documented() -> None:
    assert documented_as("evaluation.sets.aime.top_p") == "evaluation.sets.NAME.top_p"
    assert documented_as("evaluation.top_p") == "evaluation.top_p"
    assert [key for key, text in documented_keys().items() if "NAME" in key and not text] == []


def problems(**sets: dict[str, object]) -> list[str]:
    return list(evaluation_problems(make_config(evaluation={"sets": sets})))


def test_sound_sets_are_accepted() -> None:
    greedy = {"path": "a.jsonl", "temperature": 0, "samples_per_prompt": 1}
    assert problems(aime={"path": "a.parquet"}, gsm8k=greedy) == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"temperature": 0},
            "evaluation.samples_per_prompt=32: at evaluation.sets.x.temperature=0",
        ),
        (
            {"temperature": 0, "samples_per_prompt": 2},
            "evaluation.sets.x.samples_per_prompt=2: at evaluation.sets.x.temperature=0",
        ),
        ({"temperature": 0.001}, "evaluation.sets.x.temperature=0.001: vLLM samples at 0.01"),
        ({"path": "a.csv"}, "must be a .parquet or .jsonl file"),
    ],
)
def test_a_set_that_cannot_be_sampled_is_refused(keys: dict[str, object], message: str) -> None:
    (problem,) = problems(x={"path": "a.jsonl"} | keys)
    assert message in problem


def test_a_style_beside_a_plugin_is_refused() -> None:
    config = make_config(
        reward={"plugin": "a:b"},
        evaluation={
            "answer_style": "boxed",
            "sets": {"x": {"path": "a.jsonl", "answer_style": "either"}},
        },
    )
    with pytest.raises(ConfigError) as refused:
        check_config(config, DENSE)
    general, own = refused.value.problems
    assert general.startswith("evaluation.answer_style=boxed: reward.plugin=a:b grades every")
    assert own.startswith("evaluation.sets.x.answer_style=either")


def test_how_a_set_is_sampled_does_not_matter_to_a_run_that_never_evaluates() -> None:
    config = make_config(data={"heldout": "h.jsonl"}, evaluation={"every": 0, "temperature": 0})
    assert list(evaluation_problems(config)) == []
    (problem,) = evaluation_problems(config, in_loop=False)
    assert problem.startswith("evaluation.samples_per_prompt=32: at evaluation.temperature=0")


SETS: dict[str, object] = {"sets": {"aime": {"path": "a.jsonl"}}}


@pytest.mark.parametrize(
    ("best", "evaluation", "message"),
    [
        ("val-core/aime/acc/mean@32", {}, "nothing is evaluated inside the loop"),
        ("val-core/aime/acc/mean@32", SETS | {"every": 0}, "nothing is evaluated"),
        ("val-core/amie/acc/mean@32", SETS, "names none of evaluation.sets, aime"),
        ("val-aux", SETS, ""),
        ("val-core/aime/acc/mean@32", SETS, ""),
        ("critic/score/mean", {}, ""),
    ],
)
def test_a_best_checkpoint_needs_a_set_that_is_evaluated(
    best: str, evaluation: dict[str, object], message: str
) -> None:
    config = make_config(checkpoint={"keep_best": best}, evaluation=evaluation)
    found = list(best_problems(config))
    assert len(found) == bool(message)
    assert all(message in problem for problem in found)


def test_a_best_checkpoint_of_rows_that_name_their_set_is_taken() -> None:
    kept = {"keep_best": "val-core/any/acc/mean@32"}
    assert list(best_problems(make_config(checkpoint=kept, data={"heldout": "h.jsonl"}))) == []
