from __future__ import annotations

from pathlib import Path

import pyarrow.parquet
import pytest

from megatron_dapo.data.prompt_format import dapo_prompt, format_prompt
from tests.unit.data.word_tokenizer import WordTokenizer

TEXT = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    'What is 1 + 1?\n\nRemember to put your answer on its own line after "Answer:".'
)
PROBLEM = [{"role": "user", "content": "What is 1 + 1?"}]


def test_the_dapo_text_is_the_paper_s_and_is_not_doubled() -> None:
    assert dapo_prompt("What is 1 + 1?") == TEXT
    assert dapo_prompt(TEXT) == TEXT
    assert format_prompt(PROBLEM, "dapo", WordTokenizer()) == TEXT


def test_plain_and_chat_prompts() -> None:
    assert format_prompt(PROBLEM, "plain", WordTokenizer()) == "What is 1 + 1?"
    assert format_prompt(PROBLEM, "chat", WordTokenizer()) == "<user> What is 1 + 1? <assistant>"


@pytest.mark.parametrize("style", ["dapo", "plain"])
def test_a_conversation_needs_the_chat_format(style: str) -> None:
    turns = [{"role": "system", "content": "Be brief."}, *PROBLEM]
    with pytest.raises(ValueError, match=r"\(system, user\).*prompt_format=chat"):
        format_prompt(turns, style, WordTokenizer())  # type: ignore[arg-type]


def test_the_published_evaluation_prompts_stay_as_they_are(shared_data: Path) -> None:
    table = pyarrow.parquet.read_table(shared_data / "aime-2024.parquet").to_pylist()
    assert len(table) == 960
    for row in table:
        assert dapo_prompt(row["extra_info"]["raw_problem"]) == row["prompt"][0]["content"]
        assert dapo_prompt(row["prompt"][0]["content"]) == row["prompt"][0]["content"]
