from __future__ import annotations

import pytest

from megatron_dapo.rollout.seeds import sample_seed
from tests.unit.handed import Case, handed_cases


@pytest.mark.parametrize("case", handed_cases("g", "sample_seeds"))
def test_handed_cases(case: Case) -> None:
    given = case["input"]

    def seeds() -> list[int]:
        return [
            sample_seed(given["base_seed"], step, 0, replica)
            for step in range(given["steps"])
            for replica in range(given["replicas"])
        ]

    assert case["expect"] == {"all_different": True, "repeatable": True}
    assert len(set(seeds())) == given["steps"] * given["replicas"]
    assert seeds() == seeds()


def test_all_seeds_of_two_runs_and_an_evaluation_differ() -> None:
    seeds = {
        sample_seed(run, step, event, sample, purpose=purpose)
        for run in (0, 1)
        for step in range(5)
        for event in range(40)
        for sample in range(16)
        for purpose in ("train", "evaluate")
    }
    assert len(seeds) == 2 * 5 * 40 * 16 * 2
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_seed_is_the_same_in_every_release() -> None:
    assert sample_seed(42, 3, 7, 15) == 1312570988619630172
