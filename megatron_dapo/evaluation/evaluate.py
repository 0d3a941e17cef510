"""Reports of held-out sets -> the numbers that a run logs."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_dapo.evaluation.phrases import ALL
from megatron_dapo.evaluation.set_report import SetReport


def evaluation_metrics(reports: Mapping[str, SetReport]) -> dict[str, float]:
    """`val-core/<set>/acc/{mean@k,best@k,maj@k}`, and `val-aux/<set>/...` beside them.

    Args:
        reports: by the set's name.
    """
    metrics: dict[str, float] = {}
    for name, report in reports.items():
        metrics |= _of_one_set(name, report)
    return metrics


def _of_one_set(name: str, report: SetReport) -> dict[str, float]:
    core, aux, k = f"val-core/{name}/acc", f"val-aux/{name}", report.k
    metrics = {f"{core}/mean@{k}": report.avg.value}
    if report.avg.problem_error is not None:
        metrics[f"{core}/mean@{k}/standard_error"] = report.avg.problem_error
    if report.avg.sampling_error is not None:
        metrics[f"{core}/mean@{k}/sampling_error"] = report.avg.sampling_error
    for chosen, estimate in report.passed.items():
        metrics[f"{core if chosen == k else f'{aux}/acc'}/best@{chosen}"] = estimate.value
    if report.maj is not None:
        metrics[f"{core}/maj@{k}"] = report.maj.value
    reflection = report.phrases[ALL]
    return metrics | {
        f"{aux}/problems": float(report.problems),
        f"{aux}/ungraded": float(report.counts.ungraded),
        f"{aux}/response_length/mean": report.lengths.mean,
        f"{aux}/response_length/max": float(report.lengths.max),
        f"{aux}/response_length/p95": float(report.lengths.p95),
        f"{aux}/response_length/clip_ratio": report.truncated_share,
        f"{aux}/reflection/share": reflection.share,
        f"{aux}/reflection/per_response": reflection.per_response,
        f"{aux}/reflection/per_1k_tokens": reflection.per_1k_tokens,
    }
