"""The fingerprint by which a resumed run knows its prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_dapo.data.prompts import PromptSet, PromptStream
from megatron_dapo.data.selection import PromptReport
from megatron_dapo.types import Prompt

PROMPT = Prompt(id="7", text="two and two", token_ids=(5, 6, 7), answer="4", source="sums")
OTHER = replace(PROMPT, id="8")


def fingerprint(*prompts: Prompt) -> str:
    return PromptStream(PromptSet(prompts, REPORT), seed=1).fingerprint


REPORT: PromptReport = None  # type: ignore[assignment]  # not looked at


@pytest.mark.parametrize("change", [{"id": "9"}, {"token_ids": (5, 6)}, {"answer": "5"}])
def test_it_changes_with_ids_tokens_and_answers(change: dict[str, object]) -> None:
    assert fingerprint(replace(PROMPT, **change), OTHER) != fingerprint(PROMPT, OTHER)  # type: ignore[arg-type]


def test_it_changes_with_the_order_and_nothing_else() -> None:
    assert fingerprint(OTHER, PROMPT) != fingerprint(PROMPT, OTHER)
    assert fingerprint(replace(PROMPT, source="else"), OTHER) == fingerprint(PROMPT, OTHER)
