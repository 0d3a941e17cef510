"""One mixture-of-experts server: parity, and the reload that must repack the experts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_dapo.rollout.vllm_engine import VllmEngine
from tests.e2e.conftest import (
    PARITY,
    RunningServer,
    generate,
    largest_gap,
    prompts,
    request,
    running_server,
)
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory, "qwen3_moe") as running:
        yield running


def gap(running: RunningServer) -> float:
    asked = [request(prompt, row) for row, prompt in enumerate(prompts())]
    results = running.run(lambda engine: generate(engine, asked))
    return largest_gap(running.model, asked, results)


def test_logprobs_equal_transformers(moe: RunningServer) -> None:
    assert gap(moe) <= PARITY


class PlainReload(VllmEngine):
    """vLLM's own reload from a folder: the same layerwise machinery without our repacking."""

    async def reload(self) -> None:
        await self.http.send("POST", "/collective_rpc", {"method": "reload_weights"})
        await self.http.send("POST", "/reset_prefix_cache")


@pytest.mark.parametrize("cure", [True, False])
def test_reloading_identical_weights_moves_nothing(moe: RunningServer, cure: bool) -> None:
    if cure:
        moe.update(moe.model)
        assert gap(moe) <= PARITY
        return

    async def reload(_: VllmEngine) -> None:
        engine = PlainReload(moe.server.endpoint)
        try:
            await engine.reload()
        finally:
            await engine.close()

    moe.run(reload)
    assert gap(moe) > 0.1


def test_update_brings_the_new_weights_even_after_a_bad_reload(moe: RunningServer) -> None:
    for seed in (31, 32):
        moe.update(tiny_model("qwen3_moe", seed=seed))
        assert gap(moe) <= PARITY
