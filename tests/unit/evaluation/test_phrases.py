"""Words of reflection are counted whole, in any case."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.evaluation.phrases import ALL, PHRASES, PhraseRate, count_phrases, phrase_rates

FOUND = {
    "wait": ["Wait, that is wrong", "...WAIT!", "wait"],
    "recheck": ["I recheck it", "re-check again", "Re-checking gives", "rechecked"],
    "double_check": [
        "double-check",
        "double-check again",
        "double check again",
        "Double check this",
        "double-checked",
    ],
    "verify": ["Let me verify", "verified.", "a verification"],
    "alternatively": ["Alternatively, use"],
    "reconsider": ["Reconsidering"],
    "rethink": ["rethink", "re-thinking"],
    "reexamine": ["re-examine", "reexamined"],
    "let_me_check": ["Let me check", "let's check", "let\u2019s check", "Let us check"],
    "hold_on": ["Hold on."],
    "check_again": ["Check again", "let me check again", "I checked again"],
    "however": ["However, 7"],
    "go_back": ["Go back", "I went back", "going back"],
    "mistake": ["a mistake", "Mistaken", "mistakes"],
    "another_approach": ["try another approach", "a different approach"],
}


def test_every_phrase_has_examples() -> None:
    assert set(FOUND) == set(PHRASES)


@pytest.mark.parametrize(
    ("name", "text"), [(n, text) for n, texts in FOUND.items() for text in texts]
)
def test_a_phrase_counts_once_and_as_itself_alone(name: str, text: str) -> None:
    assert count_phrases(text) == dict.fromkeys(PHRASES, 0) | {name: 1}


@pytest.mark.parametrize("text", ["waiter", "await", "waiting", "verifiable", "checked", "holdon"])
def test_parts_of_words_do_not_count(text: str) -> None:
    assert sum(count_phrases(text).values()) == 0


@given(st.lists(st.lists(st.sampled_from(["wait", "7", "verify", "so"]), max_size=5), min_size=1))
def test_rates_are_those_of_a_loop(responses: list[list[str]]) -> None:
    tokens = sum(map(len, responses))
    rates = phrase_rates([count_phrases(" ".join(words)) for words in responses], tokens)
    counted = {"wait": {"wait"}, "verify": {"verify"}, ALL: {"wait", "verify"}, "recheck": set()}
    for name, words in counted.items():
        hits = [sum(word in words for word in response) for response in responses]
        assert rates[name] == PhraseRate(
            responses=sum(hit > 0 for hit in hits),
            share=sum(hit > 0 for hit in hits) / len(responses),
            occurrences=sum(hits),
            per_response=sum(hits) / len(responses),
            per_1k_tokens=1000 * sum(hits) / tokens if tokens else 0.0,
        )
