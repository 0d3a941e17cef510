"""avg@k, pass@k and maj@k over graded samples, with standard errors.

Samples are grouped by problem id, never by prompt text: two problems may share their wording.
Every problem weighs the same, whatever its number of samples.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from megatron_dapo.reward.math_answer import answer_value

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A score over a set of problems."""

    value: float
    problems: int
    samples: int
    problem_error: float | None
    """Standard error for "other problems like these": spread between problems / sqrt(problems).
    None with one problem, which has no spread."""
    sampling_error: float | None = None
    """Standard error for "the same problems sampled again": sqrt(sum of p(1-p)/k) / problems, with
    the observed share p. Of `avg_at_k` alone; None where a problem has one sample only, which says
    nothing of its spread."""


def avg_at_k(problem_ids: Sequence[str], scores: Sequence[float], k: int | None = None) -> Estimate:
    """Mean over problems of the mean score of their samples (the paper's AIME avg@32).

    Args:
        problem_ids: [samples], in any order.
        scores: [samples], usually 1 right and 0 wrong.
        k: use the first k samples of each problem; default all.

    Raises:
        ValueError: lengths differ, no samples, a score that is not finite, or a problem with
            fewer than k samples.
    """
    _check_finite(scores)
    groups = _by_problem(problem_ids, list(scores), k)
    means = [math.fsum(group) / len(group) for group in groups]
    noise = [
        math.fsum((score - mean) ** 2 for score in group) / len(group) ** 2
        for group, mean in zip(groups, means, strict=True)
    ]
    known = all(len(group) > 1 for group in groups)
    error = math.sqrt(math.fsum(noise)) / len(groups) if known else None
    return _estimate(means, groups, sampling_error=error)


def pass_at_k(problem_ids: Sequence[str], correct: Sequence[float], k: int) -> Estimate:
    """Chance that at least one of k samples is right, mean over problems, unbiased.

    Per problem with c right of n samples: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, Eq. 1).

    Args:
        problem_ids: [samples], in any order.
        correct: [samples], 1 or more right, anything less wrong (partial credit is no pass).
        k: samples drawn; every problem needs at least so many.

    Raises:
        ValueError: as `avg_at_k`.
    """
    _check_finite(correct)
    _check_k(problem_ids, k)
    groups = _by_problem(problem_ids, list(correct), None)
    chances = []
    for group in groups:
        wrong = sum(value < 1 for value in group)
        chances.append(float(1 - Fraction(math.comb(wrong, k), math.comb(len(group), k))))
    return _estimate(chances, groups)


def maj_at_k(
    problem_ids: Sequence[str],
    answers: Sequence[str | None],
    correct: Sequence[float],
    k: int | None = None,
) -> Estimate:
    """Score of the most frequent answer of each problem, mean over problems (cons@k).

    Answers that say the same are the same answer ("045" and "45", "\\frac12" and "0.5"); a missing
    answer never wins. Among equally frequent answers one is drawn at random: the expected score
    counts, as it does among spellings of one value that a grader of texts tells apart.
    A problem without any answer scores 0.

    Args:
        problem_ids: [samples], in any order.
        answers: [samples], extracted answers; None where none was found.
        correct: [samples], score of each answer.
        k: use the first k samples of each problem; default all.

    Raises:
        ValueError: as `avg_at_k`.
    """
    _check_finite(correct)
    if len(answers) != len(correct):
        raise ValueError(f"{len(answers)} answers but {len(correct)} values of correct")
    groups = _by_problem(problem_ids, list(zip(answers, correct, strict=True)), k)
    return _estimate([_majority_score(group) for group in groups], groups)


def _majority_score(samples: Sequence[tuple[str | None, float]]) -> float:
    scores: defaultdict[Fraction | str, list[float]] = defaultdict(list)
    for answer, value in samples:
        if answer is not None:
            scores[answer_value(answer)].append(value)
    if not scores:
        return 0.0
    most = max(len(values) for values in scores.values())
    winners = [math.fsum(values) / most for values in scores.values() if len(values) == most]
    return math.fsum(winners) / len(winners)


def _by_problem(
    problem_ids: Sequence[str], values: Sequence[_Value], k: int | None
) -> list[list[_Value]]:
    if len(problem_ids) != len(values) or not values:
        raise ValueError(f"{len(problem_ids)} problem ids but {len(values)} values; need one each")
    groups: dict[str, list[_Value]] = {}
    for problem, value in zip(problem_ids, values, strict=True):
        groups.setdefault(problem, []).append(value)
    if k is not None:
        _check_k(problem_ids, k)
    return [group[:k] for group in groups.values()]


def _check_finite(scores: Sequence[float]) -> None:
    if bad := [score for score in scores if not math.isfinite(score)]:
        raise ValueError(f"a score is {bad[0]}: leave samples that were not graded out")


def _check_k(problem_ids: Sequence[str], k: int) -> None:
    counts = Counter(problem_ids)
    for problem, count in counts.items():
        if not 1 <= k <= count:
            raise ValueError(f"k={k}, but problem {problem} has {count} samples; need 1 <= k <= it")


def _estimate(
    scores: Sequence[float],
    groups: Sequence[Sequence[object]],
    sampling_error: float | None = None,
) -> Estimate:
    problems = len(scores)
    mean = math.fsum(scores) / problems
    spread = math.fsum((score - mean) ** 2 for score in scores)
    return Estimate(
        value=mean,
        problems=problems,
        samples=sum(len(group) for group in groups),
        problem_error=math.sqrt(spread / (problems - 1) / problems) if problems > 1 else None,
        sampling_error=sampling_error,
    )
