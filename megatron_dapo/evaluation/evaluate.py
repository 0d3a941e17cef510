"""Reports of held-out sets -> the numbers that a run logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_dapo.evaluation.phrases import ALL
from megatron_dapo.evaluation.set_report import SetReport
from megatron_dapo.reward.grade import grading_errors
from megatron_dapo.types import Group


def evaluation_metrics(reports: Mapping[str, SetReport]) -> dict[str, float]:
    """`val-core/<set>/acc/{mean@k,best@k,maj@k}`, and `val-aux/<set>/...` beside them.

    Args:
        reports: by the set's name.
    """
    metrics: dict[str, float] = {}
    for name, report in reports.items():
        metrics |= _of_one_set(name, report)
    return metrics


def ungraded_responses(groups: Mapping[str, Sequence[Group]], failures: Sequence[str] = ()) -> str:
    """Which responses nobody graded, and why, in one line; "" where every one was graded.

    A score of wrong answers that nobody looked at must not pass for one.

    Args:
        groups: graded responses by the set's name.
        failures: what the first graders that failed have said, a line each.
    """
    told, failed = [], 0
    for name, found in groups.items():
        samples = sum(len(group.responses) for group in found)
        ungraded = sum(r.accuracy is None for group in found for r in group.rewards)
        errors = grading_errors(found)
        failed += errors
        if ungraded:
            told.append(
                f"{name}: {ungraded} of {samples} responses were not graded and count as wrong "
                f"(the grader failed on {errors}, {ungraded - errors} were aborted)"
            )
    if failed and failures:
        told.append(f"graders said first: {', '.join(failures)}")
    return "; ".join(told)


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
