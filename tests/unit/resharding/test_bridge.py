"""What a trainer rank's bridge says without sending anything."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_dapo.resharding.bridge import Bridge
from tests.unit.resharding.transports import outbox


def bridge(directory: Path, transport: str = "files", *, verify_digests: bool = True) -> Bridge:
    box = outbox(0)
    return Bridge(
        box.plan,
        dict(box.sources),
        SimpleNamespace(rank=0, world_size=2),  # type: ignore[arg-type]
        transport=transport,
        directory=directory,
        timeout=timedelta(seconds=1),
        verify_digests=verify_digests,
    )


def test_without_digests_there_is_nothing_to_compare(tmp_path: Path) -> None:
    """And no engine may be taken for one that should have no parameters at all."""
    assert bridge(tmp_path, verify_digests=False).expected_digests() is None


def test_a_version_that_was_not_prepared_is_not_sent(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="version 3 is to be sent, -1 was prepared"):
        bridge(tmp_path).send(3)


@pytest.mark.parametrize("transport", ["vllm_nccl", "auto"])
def test_transports_that_move_no_messages_are_refused(tmp_path: Path, transport: str) -> None:
    with pytest.raises(ValueError, match=f"resharding.transport={transport}: moves full tensors"):
        bridge(tmp_path, transport)
