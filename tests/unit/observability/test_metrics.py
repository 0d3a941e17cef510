import pytest
import torch

from megatron_dapo.observability.metrics import (
    Metric,
    MetricBag,
    maximum,
    mean,
    merge,
    minimum,
    reduce_bags,
    total,
)
from tests.unit.handed import Case, handed_cases


@pytest.mark.parametrize("case", handed_cases("p", "pool_metric"))
def test_a_mean_over_shards_weighs_every_observation_once(case: Case) -> None:
    bag = MetricBag()
    for shard in case["input"]["shards"]:
        bag.add("metric", mean(shard["sum"], shard["count"]))
    value = bag.values()["metric"]
    assert value == pytest.approx(case["expect"]["mean"], abs=case["tol"])
    for wrong in case["wrong"]:
        assert value != pytest.approx(wrong["value"], abs=1e-3), wrong["means"]


@pytest.mark.parametrize("case", handed_cases("p", "sum_contributions"))
def test_parts_that_are_divided_already_add_up(case: Case) -> None:
    bag = MetricBag()
    for part in case["input"]["already_normalised"]:
        bag.add("metric", total(part))
    assert bag.values()["metric"] == pytest.approx(case["expect"]["value"], abs=case["tol"])


@pytest.mark.parametrize("case", handed_cases("p", "reduce_metrics"))
def test_each_metric_has_its_own_reduction(case: Case) -> None:
    bag = MetricBag()
    for rank in case["input"]["ranks"]:
        bag.add("ratio_max", maximum(rank["ratio_max"]))
        bag.add("loss_mean", mean(rank["loss_sum"], rank["tokens"]))
        bag.add("tokens", total(rank["tokens"]))
    assert bag.values() == pytest.approx(case["expect"], abs=case["tol"])


def test_the_smallest_of_tensors_and_floats_is_found() -> None:
    merged = merge(minimum(torch.tensor(0.5)), minimum(0.25))
    assert float(merged.value) == 0.25


def test_a_mean_of_nothing_is_left_out() -> None:
    bag = MetricBag({"empty": mean(0.0, 0), "sum": total(torch.tensor(0.0))})
    assert bag.values() == {"sum": 0.0}


def test_an_extreme_of_nothing_is_left_out() -> None:
    bag = MetricBag()
    bag.add("ratio_max", Metric("max", float("-inf"), 0))
    assert bag.values() == {}
    bag.add("ratio_max", maximum(1.25))
    assert bag.values() == {"ratio_max": 1.25}


def test_one_name_has_one_kind() -> None:
    bag = MetricBag({"loss": total(1.0)})
    with pytest.raises(RuntimeError, match="sum metric with a mean metric"):
        bag.add("loss", mean(1.0, 1))


def test_a_metric_that_is_not_declared_is_refused_before_any_collective() -> None:
    with pytest.raises(RuntimeError, match=r"\['typo'\] are not declared"):
        reduce_bags(MetricBag({"typo": total(1.0)}), {"loss": "mean"}, None)


def test_a_bag_of_one_rank_is_its_own_reduction() -> None:
    bag = MetricBag({"loss": Metric("mean", 6.0, 4.0)})
    assert reduce_bags(bag, {"loss": "mean", "other": "max"}, None).values() == {"loss": 1.5}
