from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.evaluation.estimators import avg_at_k, maj_at_k, pass_at_k
from tests.unit.handed import Case, handed_cases


@pytest.mark.parametrize("case", handed_cases("p", "avg_at_k"))
def test_handed_scores_group_by_problem_id(case: Case) -> None:
    records, k = case["input"]["records"], case["input"]["k"]
    ids, scores = [r["id"] for r in records], [r["score"] for r in records]
    average, solved = avg_at_k(ids, scores, k), pass_at_k(ids, scores, k)
    assert average.problems == case["expect"]["problems"]
    assert average.value == pytest.approx(case["expect"]["avg"], abs=case["tol"])
    assert solved.value == pytest.approx(case["expect"]["pass_at_k"], abs=case["tol"])


SAMPLES = st.lists(st.lists(st.integers(0, 1), min_size=3, max_size=7), min_size=1, max_size=5)


def flat(problems: list[list[int]]) -> tuple[list[str], list[int]]:
    """Samples of all problems, interleaved."""
    pairs = [(str(p), score) for p, scores in enumerate(problems) for score in scores]
    random.Random(0).shuffle(pairs)
    return [p for p, _ in pairs], [score for _, score in pairs]


@settings(deadline=None)
@given(SAMPLES, st.integers(1, 3))
def test_pass_at_k_is_the_mean_over_all_subsets(problems: list[list[int]], k: int) -> None:
    subsets = [list(itertools.combinations(scores, k)) for scores in problems]
    chances = [statistics.fmean(map(max, subset)) for subset in subsets]
    assert pass_at_k(*flat(problems), k).value == pytest.approx(statistics.fmean(chances))


SMALL = st.lists(
    st.lists(st.sampled_from([0, 0.5, 1]), min_size=2, max_size=3), min_size=1, max_size=2
)


@settings(deadline=None)
@given(SMALL)
def test_sampling_error_is_the_spread_of_all_ways_to_sample_the_same_problems_again(
    problems: list[list[float]],
) -> None:
    """Every problem's samples drawn anew from what was seen, in all ways, problems independent."""
    redrawn = [
        [statistics.fmean(draw) for draw in itertools.product(scores, repeat=len(scores))]
        for scores in problems
    ]
    averages = [statistics.fmean(means) for means in itertools.product(*redrawn)]
    error = avg_at_k(*flat(problems)).sampling_error  # type: ignore[arg-type]
    assert error == pytest.approx(statistics.pstdev(averages))


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from([0, 1]), min_size=2, max_size=4), min_size=2, max_size=6))
def test_problem_error_is_the_standard_error_of_the_mean(problems: list[list[int]]) -> None:
    means = [statistics.fmean(scores) for scores in problems]
    expected = statistics.stdev(means) / math.sqrt(len(means))
    assert avg_at_k(*flat(problems)).problem_error == pytest.approx(expected)


def test_one_problem_says_nothing_of_the_spread_between_problems() -> None:
    assert avg_at_k(["a", "a"], [1, 0]).problem_error is None


def test_one_sample_a_problem_says_nothing_of_the_sampling_error() -> None:
    assert avg_at_k(["a", "b"], [1, 0]).sampling_error is None
    assert avg_at_k(["a", "a", "b"], [1, 0, 1]).sampling_error is None


VOTES = st.lists(
    st.sampled_from([("1", 0), ("01", 0), ("2", 1), ("2.0", 1), (r"\sqrt 2", 0), (None, 0)]),
    min_size=1,
    max_size=6,
)


@settings(deadline=None)
@given(st.lists(VOTES, min_size=1, max_size=3))
def test_maj_is_the_mean_over_all_ways_to_break_ties(
    problems: list[list[tuple[str | None, int]]],
) -> None:
    """The vote written out: values by hand, the winner drawn among the most frequent ones."""
    value = {"1": 1, "01": 1, "2": 2, "2.0": 2, r"\sqrt 2": 3}
    expected = []
    for samples in problems:
        cast = [value[answer] for answer, _ in samples if answer is not None]
        winners = [v for v in set(cast) if cast.count(v) == max(map(cast.count, cast))]
        expected.append(statistics.fmean(v == 2 for v in winners) if winners else 0.0)
    rows = [(str(p), answer, score) for p, found in enumerate(problems) for answer, score in found]
    ids, answers, correct = zip(*rows, strict=True)
    assert maj_at_k(ids, answers, correct).value == pytest.approx(statistics.fmean(expected))


@settings(deadline=None)
@given(SAMPLES)
def test_avg_weighs_problems_equally_and_equals_pass_at_1(problems: list[list[int]]) -> None:
    average = avg_at_k(*flat(problems))
    assert average.value == pytest.approx(statistics.fmean(map(statistics.fmean, problems)))
    assert average.value == pytest.approx(pass_at_k(*flat(problems), 1).value)
    assert average.samples == sum(map(len, problems))


def test_partial_credit_is_no_pass() -> None:
    assert pass_at_k(["a", "a"], [0.5, 0.9], 2).value == 0.0
    assert pass_at_k(["a", "a"], [0.5, 1.0], 1).value == 0.5


def test_only_the_first_k_samples_count() -> None:
    ids, scores = ["a", "b", "a", "b", "a"], [1.0, 0.0, 0.0, 0.0, 0.0]
    assert avg_at_k(ids, scores, 1).value == 0.5
    assert avg_at_k(ids, scores, 2).value == 0.25
    assert avg_at_k(ids, scores, 2).samples == 4


def test_standard_errors_are_those_of_the_protocol() -> None:
    """30 problems x 32 samples, half of them coin flips: sqrt(sum p(1-p)/32)/30."""
    ids = [str(p) for p in range(30) for _ in range(32)]
    scores = [(i % 2 if p < 15 else 1) for p in range(30) for i in range(32)]
    estimate = avg_at_k(ids, scores)
    assert estimate.value == 0.75
    assert estimate.sampling_error == pytest.approx(math.sqrt(15 * 0.25 / 32) / 30)
    spread = statistics.stdev([0.5] * 15 + [1.0] * 15)
    assert estimate.problem_error == pytest.approx(spread / math.sqrt(30))


def test_the_most_frequent_answer_wins_by_value() -> None:
    answers = ["45", "045", "7", "7,0", None, None, None]
    assert maj_at_k(["a"] * 7, answers, [1, 1, 0, 0, 0, 0, 0]).value == 1.0
    assert maj_at_k(["a"] * 3, [r"$\sqrt3$", r"\sqrt{3}", "3"], [1, 1, 0]).value == 1.0
    assert maj_at_k(["a"] * 3, [r"\frac12", "0.5", "2"], [1, 1, 0]).value == 1.0


def test_a_tie_scores_its_expectation_in_any_order() -> None:
    ids, answers, correct = ["a"] * 4, ["1", "2", "3", None], [0, 1, 0, 0]
    for order in itertools.permutations(range(4)):
        shuffled = maj_at_k(ids, [answers[i] for i in order], [correct[i] for i in order])
        assert shuffled.value == pytest.approx(1 / 3)


@pytest.mark.parametrize("correct", [[1, 0, 0], [0, 1, 0]])
def test_spellings_that_the_grader_tells_apart_share_their_score(correct: list[int]) -> None:
    assert maj_at_k(["a"] * 3, ["45", "045", "7"], correct).value == 0.5


def test_a_problem_without_any_answer_scores_zero() -> None:
    assert maj_at_k(["a", "b"], [None, "x"], [0, 1]).value == 0.5
    assert maj_at_k(["a", "a"], ["1", "2"], [0, 1], k=1).value == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: avg_at_k([], []), "0 problem ids"),
        (lambda: avg_at_k(["a"], [1, 0]), "1 problem ids but 2"),
        (lambda: avg_at_k(["a"], [math.nan]), "nan"),
        (lambda: avg_at_k(["a"], [1], 2), "problem a has 1 samples"),
        (lambda: avg_at_k(["a"], [1], 0), "k=0"),
        (lambda: pass_at_k(["a"], [1], 2), "problem a has 1 samples"),
        (lambda: pass_at_k(["a"], [math.nan], 1), "nan"),
        (lambda: maj_at_k(["a"], ["7"], [math.nan]), "nan"),
        (lambda: maj_at_k(["a"], [], [1]), "0 answers"),
    ],
)
def test_what_cannot_be_estimated_is_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
