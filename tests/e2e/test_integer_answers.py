"""`data integer-answers` with a stock vLLM server that words the questions."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from megatron_dapo.data.integer_answers import Outcome, audit_path
from tests.e2e.runs import command, command_environment, word_tokenizer
from tests.tiny_models import save_tiny_model

LONGEST = 4096
"""Tokens of a conversation and its reply, which are one for each word here."""
REPLY_TOKENS = 24
PATIENCE_SECONDS = 600.0
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
ROWS = [
    {"prompt": "What is 3 + 4?", "answer": "7"},
    {"prompt": "How large is the angle?", "answer": "336^\\circ"},
    {"prompt": "What is 1 / 6?", "answer": "\\frac{1}{6}"},
    {"prompt": "How long is it?", "answer": "11-2\\sqrt{6}"},
    {"prompt": "Where?", "answer": "(1, 2)"},
    {"prompt": "too long " * LONGEST, "answer": "\\frac{1}{2}"},
]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A tiny model that knows the words w3 .. w511 and nothing of mathematics."""
    pytest.importorskip("vllm")
    model = tmp_path_factory.mktemp("model")
    save_tiny_model(model, "qwen3")
    tokenizer = word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    with tempfile.TemporaryDirectory(prefix="megatron_dapo_test_", dir="/tmp") as short:
        socket = Path(short, "vllm.sock")
        with (model / "server.log").open("wb") as log:
            server = subprocess.Popen(
                [
                    *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
                    *("--uds", str(socket), "--model", str(model), "--dtype", "float32"),
                    *("--max-model-len", str(LONGEST), "--max-num-batched-tokens", str(LONGEST)),
                    *("--enforce-eager", "--no-enable-chunked-prefill", "--seed", "0"),
                    *("--gpu-memory-utilization", "0.1"),
                    *("--hf-overrides", json.dumps({"max_position_embeddings": LONGEST})),
                ],
                env=command_environment({"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            wait_until_it_answers(server, socket, model / "server.log")
            yield f"unix:{socket}"
        finally:
            server.terminate()
            server.wait(240)


def wait_until_it_answers(server: subprocess.Popen[bytes], socket: Path, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://x") as http:
        while True:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                if http.get("/health").is_success:
                    return
            except httpx.TransportError:
                time.sleep(0.2)


def test_a_model_that_talks_nonsense_changes_no_problem_and_all_it_said_is_logged(
    tmp_path: Path, endpoint: str
) -> None:
    file, out = tmp_path / "raw.jsonl", tmp_path / "integers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = ("data", "integer-answers", file, "answer_column=answer", "--out", out)
    limits = ("--attempts", 2, "--max-tokens", REPLY_TOKENS, "--endpoint", endpoint)
    done = command(*words, *limits)
    assert done.code == 0, done.err
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["reward_model"]["ground_truth"] for row in written] == ["7", "336"]
    assert [row["prompt"][0]["content"] for row in written] == [r["prompt"] for r in ROWS[:2]]
    log = [Outcome.model_validate_json(line) for line in audit_path(out).read_text().splitlines()]
    assert [entry.status for entry in log] == ["kept", "kept", *["rejected"] * 4]
    assert [entry.reason for entry in log][2:4] == ["sections"] * 2
    assert (log[4].reason, log[5].reason) == ("several", "refused")
    said = [attempt.reply for entry in log[2:4] for attempt in entry.attempts]
    assert len(said) == len(set(said)) == 4  # each attempt has its own seed
    assert all(1 <= len(reply.split()) <= REPLY_TOKENS for reply in said)
