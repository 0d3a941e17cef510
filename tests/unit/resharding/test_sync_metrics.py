"""What an update moved: summed over engines and their ranks, the worst of what they held."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.resharding.sync_metrics import sync_metrics


@dataclass
class Held:
    """What is read of a bridge."""

    directory: Path | None
    staging_bytes: int = 0


def report(received: int, extra: int) -> dict[str, object]:
    return {
        "plan": "0a",
        "live": 5,
        "rebuilt": 2,
        "loader": 1,
        "bytes_received": received,
        "peak_extra_bytes": extra,
        "seconds": 0.5,
    }


def test_ranks_are_summed_and_memory_is_of_the_worst(tmp_path: Path) -> None:
    for version in (1, 2):
        folder = tmp_path / f"policy_{version}"
        folder.mkdir()
        (folder / "from_0_to_0.safetensors").write_bytes(bytes(100))
    (tmp_path / "lock").write_bytes(bytes(7))
    reports = {0: [report(10, 4), report(20, 9)], 1: [report(30, 6)]}
    found = sync_metrics(reports, Held(tmp_path, 64))  # type: ignore[arg-type]
    assert found == {
        "weight_sync/received_bytes": 60.0,
        "weight_sync/engine_extra_bytes": 9.0,
        "weight_sync/live": 15.0,
        "weight_sync/rebuilt": 6.0,
        "weight_sync/loader": 3.0,
        "weight_sync/published_bytes": 200.0,
        "weight_sync/staging_bytes": 64.0,
    }


def test_what_no_engine_reports_is_left_out() -> None:
    found = sync_metrics({0: [], 1: []}, Held(None))  # type: ignore[arg-type]
    assert found == {"weight_sync/published_bytes": 0.0, "weight_sync/staging_bytes": 0.0}
