"""Everything that is said of one held-out set: exact counts and estimates, whole and by problem."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from megatron_dapo.evaluation.estimators import Estimate, avg_at_k, maj_at_k, pass_at_k
from megatron_dapo.evaluation.phrases import ALL, PhraseRate, count_phrases, phrase_rates
from megatron_dapo.reward.math_answer import answer_value
from megatron_dapo.types import Group, Response, Reward


@dataclass(frozen=True, slots=True)
class Lengths:
    """Response lengths in tokens."""

    mean: float
    min: int
    p50: int
    """Percentiles are lengths that occur: the smallest that the share does not exceed."""
    p95: int
    max: int
    mean_right: float | None
    """Of the right responses; None without any."""
    mean_wrong: float | None


@dataclass(frozen=True, slots=True)
class Counts:
    """Exact numbers of responses, and of their tokens."""

    samples: int
    right: int
    """With full credit."""
    ungraded: int
    """Counted wrong: an evaluation has no second draw."""
    truncated: int
    """Ended by the length limit."""
    unanswered: int
    """No answer was found in them, the ungraded ones included."""
    tokens: int


@dataclass(frozen=True)
class ProblemReport:
    """One problem with all of its samples."""

    id: str
    answer: str
    counts: Counts
    avg: float
    maj: float | None
    """Expected score of the vote; None where nothing was extracted in the whole set."""
    votes: dict[str, int]
    """Votes of each answer, the most frequent first, in its first spelling."""
    lengths: Lengths
    phrases: dict[str, PhraseRate]
    """Those that occur, and "all"."""


@dataclass(frozen=True)
class SetReport:
    """One set."""

    problems: int
    k: int
    """Samples of each problem."""
    counts: Counts
    avg: Estimate
    passed: dict[int, Estimate]
    """pass@k' by k': the powers of two below k, and k itself; 1 is the average."""
    maj: Estimate | None
    """None for k = 1, and where no answer was extracted (a reward plug-in grades)."""
    truncated_share: float
    lengths: Lengths
    phrases: dict[str, PhraseRate]
    phrases_right: dict[str, PhraseRate] | None
    """Of the right responses alone; None without any."""
    phrases_wrong: dict[str, PhraseRate] | None
    problem_reports: tuple[ProblemReport, ...]


def report_set(groups: Sequence[Group]) -> SetReport:
    """What the graded responses of a set say.

    Args:
        groups: every prompt with its k graded responses; problems are told apart by prompt id.

    Raises:
        ValueError: no groups, or problems with different numbers of samples.
    """
    sizes = {len(group.responses) for group in groups}
    if len(sizes) != 1:
        raise ValueError(f"samples a problem: {sorted(sizes)}; need one number, the same for all")
    (k,) = sizes
    ids = [group.prompt.id for group in groups for _ in group.responses]
    pairs = [pair for group in groups for pair in _pairs(group)]
    correct = [reward.accuracy or 0.0 for _, reward in pairs]
    extracted = [reward.extracted for _, reward in pairs]
    voted = k > 1 and any(answer is not None for answer in extracted)
    counts = _counts(pairs)
    found = [count_phrases(response.text) for response, _ in pairs]
    return SetReport(
        problems=len(groups),
        k=k,
        counts=counts,
        avg=avg_at_k(ids, correct),
        passed={chosen: pass_at_k(ids, correct, chosen) for chosen in passing_ks(k)},
        maj=maj_at_k(ids, extracted, correct) if voted else None,
        truncated_share=counts.truncated / counts.samples,
        lengths=_lengths(pairs),
        phrases=phrase_rates(found, counts.tokens),
        phrases_right=_phrases_where(pairs, found, right=True),
        phrases_wrong=_phrases_where(pairs, found, right=False),
        problem_reports=tuple(
            _report_problem(group, found[row * k : (row + 1) * k], voted=voted)
            for row, group in enumerate(groups)
        ),
    )


def reports_json(reports: Mapping[str, SetReport]) -> dict[str, object]:
    """Reports by set as plain values, for a JSON file."""
    return {name: asdict(report) for name, report in reports.items()}


def passing_ks(k: int) -> list[int]:
    """The k' of pass@k' that are reported for k samples: 2, 4, 8, ... below k, and k."""
    return [2**power for power in range(1, k.bit_length()) if 2**power < k] + [k] * (k > 1)


_Pairs = Sequence[tuple[Response, Reward]]


def _pairs(group: Group) -> _Pairs:
    return list(zip(group.responses, group.rewards, strict=True))


def _report_problem(group: Group, found: Sequence[dict[str, int]], *, voted: bool) -> ProblemReport:
    pairs = _pairs(group)
    counts = _counts(pairs)
    ids = [group.prompt.id] * len(pairs)
    correct = [reward.accuracy or 0.0 for reward in group.rewards]
    extracted = [reward.extracted for reward in group.rewards]
    rates = phrase_rates(found, counts.tokens)
    return ProblemReport(
        id=group.prompt.id,
        answer=group.prompt.answer,
        counts=counts,
        avg=math.fsum(correct) / len(correct),
        maj=maj_at_k(ids, extracted, correct).value if voted else None,
        votes=_votes(extracted),
        lengths=_lengths(pairs),
        phrases={n: r for n, r in rates.items() if r.occurrences or n == ALL},
    )


def _counts(pairs: _Pairs) -> Counts:
    return Counts(
        samples=len(pairs),
        right=sum(_is_right(reward) for _, reward in pairs),
        ungraded=sum(reward.accuracy is None for _, reward in pairs),
        truncated=sum(response.finish_reason == "length" for response, _ in pairs),
        unanswered=sum(reward.extracted is None for _, reward in pairs),
        tokens=sum(len(response.token_ids) for response, _ in pairs),
    )


def _is_right(reward: Reward) -> bool:
    """With full credit."""
    return (reward.accuracy or 0.0) >= 1


def _phrases_where(
    pairs: _Pairs, found: Sequence[dict[str, int]], *, right: bool
) -> dict[str, PhraseRate] | None:
    chosen = [
        (counts, len(response.token_ids))
        for (response, reward), counts in zip(pairs, found, strict=True)
        if _is_right(reward) is right
    ]
    if not chosen:
        return None
    return phrase_rates([counts for counts, _ in chosen], sum(tokens for _, tokens in chosen))


def _votes(extracted: Sequence[str | None]) -> dict[str, int]:
    answers = [answer for answer in extracted if answer is not None]
    spelling: dict[object, str] = {}
    for answer in answers:
        spelling.setdefault(answer_value(answer), answer)
    votes = Counter(spelling[answer_value(answer)] for answer in answers)
    return dict(votes.most_common())


def _lengths(pairs: _Pairs) -> Lengths:
    by_right = [(len(r.token_ids), _is_right(reward)) for r, reward in pairs]
    tokens = sorted(length for length, _ in by_right)
    return Lengths(
        mean=sum(tokens) / len(tokens),
        min=tokens[0],
        p50=_percentile(tokens, 50),
        p95=_percentile(tokens, 95),
        max=tokens[-1],
        mean_right=_mean([length for length, right in by_right if right]),
        mean_wrong=_mean([length for length, right in by_right if not right]),
    )


def _percentile(ascending: Sequence[int], percent: int) -> int:
    """The nearest rank: the smallest value that at least `percent` of all do not exceed."""
    return ascending[max(-(-percent * len(ascending) // 100), 1) - 1]


def _mean(values: Sequence[int]) -> float | None:
    return sum(values) / len(values) if values else None
