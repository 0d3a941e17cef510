"""The log of an engine that does not start names its cause far above its last lines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_dapo.rollout import vllm_server
from megatron_dapo.rollout.log_causes import MOST_CAUSES, MOST_LINES, causes
from megatron_dapo.rollout.vllm_server import LOG_TAIL_LINES, EngineStartError, VllmServer
from tests.unit.rollout.test_vllm_server import options

WORKER = "(Worker{rank} pid={pid}) ERROR 11-30 08:33:47 [multiproc_executor.py:953] "
CORE = "(EngineCore pid=6145) ERROR 11-30 08:33:52 [core.py:1510] "
SERVER = "(APIServer pid=7476) WARNING 11-30 08:16:02 [base.py:380] "
TRACEBACK = "Traceback (most recent call last):"


def trace(prefix: str, *conclusion: str, depth: int = 12) -> str:
    """A traceback as vLLM logs it: every line with its process, level and place."""
    frames = [
        line
        for frame in range(depth)
        for line in (
            f'  File "/venv/lib/python3.11/site-packages/vllm/v1/part.py", line {frame}, in part',
            "    return func(*args, **kwargs)",
            "           ^^^^^^^^^^^^^^^^^^^^^",
        )
    ]
    return "".join(f"{prefix}{line}\n" for line in (TRACEBACK, *frames, *conclusion))


def worker(*conclusion: str, rank: str = "", pid: int = 6191) -> str:
    prefix = WORKER.format(rank=rank, pid=pid)
    return f"{prefix}WorkerProc failed to start.\n{trace(prefix, *conclusion)}"


CONSEQUENCES = (
    "(EngineCore pid=6145) INFO 11-30 08:33:47 [multiproc_executor.py:479] [shutdown] waiting\n"
    f"{CORE}EngineCore failed to start.\n"
    + trace(
        CORE,
        "Exception: WorkerProc initialization failed due to an exception in a background process. "
        "See stack trace for root cause.",
    )
    + "Process EngineCore:\n"
    + trace(
        "",
        "Exception: WorkerProc initialization failed due to an exception in a background process. "
        "See stack trace for root cause.",
    )
    + trace(
        "",
        "RuntimeError: Engine core initialization failed. See root cause above. "
        "Failed core proc(s): {}",
    )
)
START = (
    "(APIServer pid=5120) WARNING 11-30 08:33:10 [system_utils.py:255] Found ulimit of 20000. This "
    "can cause fd limit errors like `OSError: [Errno 24] Too many open files`.\n"
    "Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]\n"
)
SIZES = "RuntimeError: start (0) + length (256) exceeds dimension size (128)."


def test_the_exception_of_the_worker_is_the_cause_and_not_what_followed() -> None:
    log = START + worker(SIZES) + CONSEQUENCES
    assert SIZES not in "\n".join(log.splitlines()[-LOG_TAIL_LINES:])
    assert causes(log) == [SIZES]


def test_workers_that_fail_alike_are_named_once_and_mixed_lines_are_told_apart() -> None:
    memory = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    first = worker(memory, rank="_TP0", pid=11).splitlines()
    second = worker(SIZES, rank="_TP1", pid=12).splitlines()
    third = worker(memory, rank="_TP2", pid=13).splitlines()
    mixed = [line for lines in zip(first, second, third, strict=True) for line in lines]
    assert causes("\n".join(mixed) + "\n" + CONSEQUENCES) == [memory, SIZES]


def test_an_exception_of_several_lines_is_quoted_as_far_as_it_helps() -> None:
    text = [
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, max_model_len (22528) is greater than the derived max_model_len (256).",
    ]
    assert causes(trace("", *text)) == ["\n".join(text)]
    (long,) = causes(trace("", "ValueError: many", *(f"  - {n}" for n in range(20))))
    assert long.splitlines()[-1] == f"  ... {21 - MOST_LINES} more lines"
    assert len(long.splitlines()) == MOST_LINES + 1


def test_the_first_of_chained_exceptions_is_named_first() -> None:
    chained = (
        trace("", "KeyError: 'lm_head.weight'")
        + "\nThe above exception was the direct cause of the following exception:\n\n"
        + trace("", "ValueError: no parameter of that name")
    )
    assert causes(chained) == [
        "KeyError: 'lm_head.weight'",
        "ValueError: no parameter of that name",
    ]
    many = "".join(trace("", f"Error{n}: {n}") for n in range(9))
    assert causes(many) == [f"Error{n}: {n}" for n in range(9)][-MOST_CAUSES:]


def test_an_exception_without_a_text_ends_with_its_line() -> None:
    log = trace(CORE, "AssertionError") + f"{CORE}the next record\n"
    assert causes(log + "INFO of nobody\n") == ["AssertionError\nthe next record"]
    other = "(EngineCore pid=6145) INFO 11-30 08:33:53 [core.py:9] the next record\n"
    assert causes(trace(CORE, "AssertionError") + other) == ["AssertionError"]


def test_what_the_engine_went_on_from_is_no_cause() -> None:
    warmup = f"{SERVER}Chat template warmup failed\n" + trace(
        SERVER, "ValueError: Tokenizer not available when `skip_tokenizer_init=True`"
    )
    assert causes(START + warmup) == []
    assert causes(warmup + worker(SIZES)) == [SIZES]


def test_where_nothing_but_consequences_is_known_they_are_told() -> None:
    told = causes(CONSEQUENCES)
    assert [text.split(":")[0] for text in told] == ["Exception", "RuntimeError"]


def test_a_start_that_fails_names_the_cause_behind_the_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "said"
    said.write_text(START + worker(SIZES) + CONSEQUENCES)
    script = "import sys; sys.exit(open(sys.argv[1]).read())"
    command = [sys.executable, "-c", script, str(said)]
    monkeypatch.setattr(vllm_server, "server_command", lambda options, socket: command)
    server = VllmServer(options(tmp_path))
    server.start()
    with pytest.raises(EngineStartError) as caught:
        server.wait_ready()
    message = str(caught.value)
    tail, _, cause = message.partition("\nCause, as its log names it:\n")
    assert "Last lines of" in tail and "Engine core initialization failed" in tail
    assert SIZES not in tail
    assert cause == SIZES
