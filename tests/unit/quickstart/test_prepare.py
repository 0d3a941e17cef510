import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.quickstart import prepare


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart") / "start"
    prepare.prepare(folder, warmup_steps=2)
    return folder


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_transformers_loads_what_was_prepared(prepared: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(prepared / "model")
    assert (model.num_parameters(), model.dtype) == (115_136, torch.float32)
    assert not prepared.with_name("start.unfinished").exists()


@pytest.mark.parametrize("name", ["model", "tokenizer"])
def test_the_tokenizer_brings_text_back_and_knows_its_ends(prepared: Path, name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(prepared / name)
    text = "3+8+5+9=\n3+8=11\n11+5=16\n16+9=25\nAnswer: 25"
    ids = tokenizer.encode(text + tokenizer.eos_token)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert (ids[-1], tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0, 1)
    assert len(tokenizer) == 128
    assert len(tokenizer.encode("3+8+5+9=\n")) == prepare.PROMPT_TOKENS


def test_held_out_prompts_are_in_no_training_row(prepared: Path) -> None:
    training, heldout = (rows(prepared / f"{name}.jsonl") for name in ("train", "heldout"))
    texts = [{row["prompt"][0]["content"] for row in part} for part in (training, heldout)]
    assert not texts[0] & texts[1]
    assert (len(texts[0]), len(texts[1])) == (9**4 - 256, 256)


def test_rows_have_the_dapo_format_and_the_right_answer(prepared: Path) -> None:
    row = rows(prepared / "heldout.jsonl")[0]
    (message,) = row["prompt"]
    assert message["role"] == "user"
    terms = [int(term) for term in message["content"].removesuffix("=\n").split("+")]
    assert row["reward_model"]["ground_truth"] == str(sum(terms))
    assert row["data_source"] == "sums"


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(
    prepared: Path, tmp_path: Path
) -> None:
    names = ["model/model.safetensors", "train.jsonl", "heldout.jsonl"]
    prepare.prepare(tmp_path / "again", warmup_steps=2)
    prepare.prepare(tmp_path / "other", warmup_steps=2, seed=1)
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (prepared / name).read_bytes()
        assert (tmp_path / "other" / name).read_bytes() != (prepared / name).read_bytes()


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_other_families_are_made_with_heads_of_a_size_that_engines_take(
    family: str, tmp_path: Path
) -> None:
    prepare.prepare(tmp_path / "start", family=family, warmup_steps=0)
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "start/model").config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert (config.model_type, width, config.num_key_value_heads) == (family, 32, 2)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "start/tokenizer")
    assert tokenizer.decode(tokenizer.encode("1+2=\n")) == "1+2=\n"


def test_a_careful_answer_adds_up_and_a_slip_carries_on() -> None:
    assert prepare.careful_answer((3, 8, 5, 9)) == "3+8=11\n11+5=16\n16+9=25\nAnswer: 25"
    slipped = prepare.careful_answer((3, 8, 5, 9), slip_at=2)
    assert slipped == "3+8=11\n11+5=17\n17+9=26\nAnswer: 26"


def test_three_demonstrations_in_ten_are_careful() -> None:
    rng = random.Random(0)
    texts = [prepare.demonstration((3, 8, 5, 9), rng) for _ in range(4000)]
    careful = [text for text in texts if "\n" in text]
    assert len(careful) / len(texts) == pytest.approx(0.3, abs=0.03)
    slipped = [text for text in careful if not text.endswith("Answer: 25")]
    assert len(slipped) / len(careful) == pytest.approx(0.05, abs=0.025)


def test_only_the_response_and_its_end_are_imitated() -> None:
    tokenizer = prepare.build_tokenizer()
    tokens, labels = prepare.imitation_batch(
        tokenizer, [(1, 2, 3, 4), (5, 6, 7, 8), (9, 9, 9, 9)], random.Random(3)
    )
    for row, target in zip(tokens, labels, strict=True):
        text = tokenizer.decode(row[target != -100])
        assert text.split("Answer: ")[0] == "" or text[0].isdigit()
        assert text.endswith(tokenizer.eos_token)
        assert tokenizer.decode(row[: prepare.PROMPT_TOKENS]).endswith("=\n")
        assert (target[: prepare.PROMPT_TOKENS] == -100).all()
        assert not (target == tokenizer.pad_token_id).any()


def test_accuracy_counts_right_answers_of_sampled_responses() -> None:
    problems = [(1, 2, 3, 4), (5, 6, 7, 8)]
    tokenizer = prepare.build_tokenizer()

    class Fixed:
        def eval(self) -> None:
            pass

        def generate(self, input_ids: torch.Tensor, **_: object) -> torch.Tensor:
            answers = tokenizer(["Answer: 10", "Answer: 10"], return_tensors="pt")["input_ids"]
            return torch.cat([input_ids, answers], dim=1)

    assert prepare.sampled_accuracy(Fixed(), tokenizer, problems, seed=0) == 0.5  # type: ignore[arg-type]


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(KeyError, match="llama9"):
        prepare.build_model("llama9", seed=0)
