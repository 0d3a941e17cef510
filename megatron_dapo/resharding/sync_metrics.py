"""What a weight update moved and held, as metrics of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pydantic

from megatron_dapo.resharding.open_bridge import WeightBridge


class _Report(pydantic.BaseModel):
    """The part that we read of what an engine worker says of an update."""

    live: int
    rebuilt: int
    loader: int
    bytes_received: int
    peak_extra_bytes: int


def sync_metrics(
    reports: Mapping[int, Sequence[Mapping[str, object]]], bridge: WeightBridge
) -> dict[str, float]:
    """Metrics of the update that the engines have just proven. Call it before `acknowledged`.

    Args:
        reports: by engine, of each of its workers; none where the transport or
            `resharding.verify_digests` brings none.
        bridge: of global rank 0.
    """
    metrics = {
        "weight_sync/published_bytes": float(published_bytes(bridge.directory)),
        "weight_sync/staging_bytes": float(bridge.staging_bytes),
    }
    workers = [_Report.model_validate(report) for each in reports.values() for report in each]
    if workers:
        metrics |= {
            "weight_sync/received_bytes": float(sum(each.bytes_received for each in workers)),
            "weight_sync/engine_extra_bytes": float(max(each.peak_extra_bytes for each in workers)),
            "weight_sync/live": float(sum(each.live for each in workers)),
            "weight_sync/rebuilt": float(sum(each.rebuilt for each in workers)),
            "weight_sync/loader": float(sum(each.loader for each in workers)),
        }
    return metrics


def published_bytes(directory: Path | None) -> int:
    """Bytes of the files in `directory`: every version that is not removed yet."""
    if directory is None:
        return 0
    return sum(path.stat().st_size for path in directory.rglob("*.safetensors"))
