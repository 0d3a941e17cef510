"""One cluster a session; without SLURM the tests are skipped, and say why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Slurm, missing, running_slurm


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    reason = missing()
    if reason:
        pytest.skip(reason)
    with running_slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running
