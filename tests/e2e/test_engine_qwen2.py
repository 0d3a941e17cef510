"""One server with QKV biases and raw log-probs: parity at temperature 1, and why raw is a trap."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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

pytestmark = pytest.mark.slow
"""test_training.py runs Qwen2 every time, with biases, at temperature 1."""


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory, "qwen2", logprobs="raw") as running:
        yield running


def test_logprobs_equal_transformers_before_and_after_an_update(qwen2: RunningServer) -> None:
    asked = [request(prompt, row) for row, prompt in enumerate(prompts())]
    results = qwen2.run(lambda engine: generate(engine, asked))
    assert largest_gap(qwen2.model, asked, results) <= PARITY
    qwen2.update(tiny_model("qwen2", seed=41))
    results = qwen2.run(lambda engine: generate(engine, asked))
    assert largest_gap(qwen2.model, asked, results) <= PARITY


def test_raw_logprobs_ignore_the_temperature(qwen2: RunningServer) -> None:
    """What `rollout.logprobs: processed` cures; test_engine_qwen3 shows the cured case."""
    asked = [request(p, row, temperature=0.7) for row, p in enumerate(prompts())]
    results = qwen2.run(lambda engine: generate(engine, asked))
    assert largest_gap(qwen2.model, asked, results) > 0.1
    assert largest_gap(qwen2.model, asked, results, temperature=1.0) <= PARITY
