"""How often responses look back at their own work, by the words that they use for it.

DAPO (arXiv 2503.14476, 4.4) reports that such behaviour appears in the course of training.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PHRASES = {
    "wait": r"wait",
    "recheck": r"re-?check(?:s|ed|ing)?",
    "double_check": r"double[- ]?check(?:s|ed|ing)?",
    "verify": r"verif(?:y|ies|ied|ying|ication)",
    "alternatively": r"alternatively",
    "reconsider": r"reconsider(?:s|ed|ing)?",
    "rethink": r"re-?think(?:s|ing)?",
    "reexamine": r"re-?examin(?:e|es|ed|ing)",
    "let_me_check": r"let(?: me| us|['\u2019]s) check(?! again)",
    "check_again": r"(?<!double[- ])(?<!re-)check(?:s|ed|ing)? again",
    "hold_on": r"hold on",
    "however": r"however",
    "go_back": r"(?:go(?:es|ing)?|went) back",
    "mistake": r"mistake[ns]?",
    "another_approach": r"(?:another|a different) approach",
}
"""Name -> whole words that count, in any case. They do not overlap."""
ALL = "all"
"""Name of all phrases together."""

_WORDS = {
    name: re.compile(rf"(?<!\w)(?:{words})(?!\w)", re.IGNORECASE) for name, words in PHRASES.items()
}


@dataclass(frozen=True, slots=True)
class PhraseRate:
    """One phrase over some responses."""

    responses: int
    """That hold it at least once."""
    share: float
    """Of all responses, those that hold it."""
    occurrences: int
    per_response: float
    per_1k_tokens: float
    """Of response tokens."""


def count_phrases(text: str) -> dict[str, int]:
    """Occurrences of each phrase in one response, by its name."""
    return {name: sum(1 for _ in words.finditer(text)) for name, words in _WORDS.items()}


def phrase_rates(counts: Sequence[Mapping[str, int]], tokens: int) -> dict[str, PhraseRate]:
    """Rates of each phrase, and of all of them under "all".

    Args:
        counts: of each response, by `count_phrases`; at least one.
        tokens: of all these responses together; without any, nothing was said a token.
    """
    by_name = {name: [found[name] for found in counts] for name in PHRASES}
    by_name[ALL] = [sum(found.values()) for found in counts]
    return {name: _rate(values, tokens) for name, values in by_name.items()}


def _rate(values: Sequence[int], tokens: int) -> PhraseRate:
    total, responses = sum(values), sum(value > 0 for value in values)
    return PhraseRate(
        responses=responses,
        share=responses / len(values),
        occurrences=total,
        per_response=total / len(values),
        per_1k_tokens=1000 * total / tokens if tokens else 0.0,
    )
