"""The client against a scripted HTTP server on a unix socket."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest

from megatron_dapo.rollout import vllm_engine
from megatron_dapo.rollout.engine import EngineError, EngineUnavailable, GenerationResult
from megatron_dapo.rollout.engine_http import engine_address
from megatron_dapo.rollout.generate_route import Choice, version_spans
from megatron_dapo.rollout.vllm_engine import VllmEngine
from tests.unit.rollout.scripted_server import (
    GENERATE,
    INFO,
    PAYLOAD,
    REQUEST,
    ScriptedServer,
    talk,
)


def test_token_ids_go_in_and_come_out(server: ScriptedServer) -> None:
    result = talk(server, lambda engine: engine.generate(REQUEST))
    assert result.token_ids == (7, 2)
    assert result.logprobs == (-1.75, -0.5)
    assert result.finish_reason == "stop"
    assert result.policy_version == 0
    assert result.version_spans == ((0, 0),)
    path, body = server.received[0]
    assert path == "/inference/v1/generate"
    assert isinstance(body, dict)
    assert body["token_ids"] == [3, 4]
    assert body["request_id"] == "train-1-0-3"
    assert body["sampling_params"] == {
        "seed": 2**62,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "max_tokens": 40,
        "stop_token_ids": [2, 9],
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }


def test_an_unknown_finish_reason_is_an_error(server: ScriptedServer) -> None:
    server.finish_reason = "repetition"
    with pytest.raises(EngineError, match="unknown form"):
        talk(server, lambda engine: engine.generate(REQUEST))


@pytest.mark.parametrize(
    ("tokens", "finish_reason", "message"),
    [
        ([7] * 41, "length", "41 tokens, 40 were asked for at most"),
        ([7, 9, 7], "length", "stop token 9 before its end"),
        ([9, 7, 2], "stop", "stop token 9 before its end"),
        ([7, 7], "stop", r"none of the stop tokens \(2, 9\) at its end"),
        ([], "stop", r"none of the stop tokens \(2, 9\) at its end"),
    ],
)
def test_a_response_that_the_request_cannot_lead_to_is_an_error(
    server: ScriptedServer, tokens: list[int], finish_reason: str, message: str
) -> None:
    server.tokens, server.logprobs, server.finish_reason = tokens, [-1.0] * 41, finish_reason
    with pytest.raises(EngineError, match=message):
        talk(server, lambda engine: engine.generate(REQUEST))


@pytest.mark.parametrize("starts", [[1], [0, 5, 3]])
def test_spans_of_weights_that_make_no_sense_are_an_error(starts: list[int]) -> None:
    spans = [{"version": "megatron_dapo-4", "start": start} for start in starts]
    choice = msgspec.convert(
        {
            "token_ids": [7] * 8,
            "logprobs": {"content": [{"logprob": -1.0}] * 8},
            "finish_reason": "length",
            "weight_versions": spans,
        },
        Choice,
    )
    with pytest.raises(EngineError, match="its weights changed at tokens"):
        version_spans("rollout engine 0", choice, ["megatron_dapo-4"])


def test_a_lost_connection_is_tried_again_with_the_same_request(server: ScriptedServer) -> None:
    server.drops["/inference/v1/generate"] = 2
    assert talk(server, lambda engine: engine.generate(REQUEST)).token_ids == (7, 2)
    assert len(server.received) == 3
    assert server.received[0] == server.received[1] == server.received[2]


def test_attempts_are_limited(server: ScriptedServer) -> None:
    server.drops["/inference/v1/generate"] = 99
    with pytest.raises(EngineUnavailable, match="after 5 attempts"):
        talk(server, lambda engine: engine.generate(REQUEST))
    assert len(server.received) == 5


def test_a_missing_socket_is_unavailable(server: ScriptedServer) -> None:
    async def call() -> None:
        engine = VllmEngine("unix:/nowhere/at/all")
        try:
            await engine.weight_version()
        finally:
            await engine.close()

    with pytest.raises(EngineUnavailable, match="cannot be reached"):
        asyncio.run(call())


@pytest.mark.parametrize("status", [400, 404, 500])
def test_a_refusal_is_not_tried_again(server: ScriptedServer, status: int) -> None:
    server.errors["/inference/v1/generate"] = status
    with pytest.raises(EngineError, match=f"answered {status}"):
        talk(server, lambda engine: engine.generate(REQUEST))
    assert len(server.received) == 1


async def interrupted(
    server: ScriptedServer, engine: VllmEngine, *ids: str
) -> list[GenerationResult]:
    """Results of requests that are interrupted once all of them sample their second token."""
    requests = [replace(REQUEST, request_id=name) for name in ids]
    tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    while server.sampled < 2 * len(ids):
        await asyncio.sleep(0.001)
    await engine.interrupt()
    return [await task for task in tasks]


TOKENS = list(range(1000, 2000))
LOGPROBS = [-token / 1000 for token in TOKENS]


def test_interrupted_requests_return_what_they_have_and_later_ones_run(
    server: ScriptedServer,
) -> None:
    server.tokens, server.logprobs, server.seconds_per_token = TOKENS, LOGPROBS, 0.01

    async def call(engine: VllmEngine) -> tuple[list[GenerationResult], GenerationResult]:
        first = await interrupted(server, engine, "a", "b", "c")
        server.tokens, server.logprobs = [7, 2], [-1.0, -2.0]
        return first, await engine.generate(replace(REQUEST, request_id="a"))

    first, later = talk(server, call)
    for result in first:
        count = len(result.token_ids)
        assert 2 <= count < 1000
        assert result.finish_reason == "abort"
        assert result.token_ids == tuple(TOKENS[:count])
        assert result.logprobs == tuple(LOGPROBS[:count])
        assert result.version_spans == ((0, 0),)
    assert (later.token_ids, later.finish_reason) == ((7, 2), "stop")
    assert not server.paused
    assert not [path for path in server.paths if "pause" in path or "resume" in path]


def test_a_request_that_is_still_on_its_way_is_interrupted_too(server: ScriptedServer) -> None:
    server.tokens, server.logprobs, server.seconds_per_token = TOKENS, LOGPROBS, 0.01
    answer = server._answer

    async def late(path: str, body: object) -> object:
        while path == GENERATE and "/abort_requests" not in server.paths:
            await asyncio.sleep(0.001)
        return await answer(path, body)

    server._answer = late  # type: ignore[method-assign]

    async def call(engine: VllmEngine) -> GenerationResult:
        task = asyncio.ensure_future(engine.generate(REQUEST))
        while GENERATE not in server.paths:
            await asyncio.sleep(0.001)
        await engine.interrupt()
        assert task.done()
        return await task

    result = talk(server, call)
    assert result.finish_reason == "abort"
    assert len(result.token_ids) < 100
    assert server.paths.count("/abort_requests") > 1


@pytest.mark.parametrize("fault", ["no answer", "no end", "an error"])
def test_an_engine_that_does_not_end_what_was_aborted_is_lost_and_its_requests_go_elsewhere(
    server: ScriptedServer, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 60.0 if fault == "an error" else 0.3
    monkeypatch.setattr(vllm_engine, "ABORT_LIMIT_SECONDS", seconds)
    server.hangs = {"/abort_requests" if fault == "no answer" else GENERATE}
    server.errors = {"/abort_requests": 500} if fault == "an error" else {}
    server.tokens, server.seconds_per_token = TOKENS, 0.01

    async def call(engine: VllmEngine) -> VllmEngine:
        task = asyncio.ensure_future(engine.generate(REQUEST))
        while GENERATE not in server.paths:
            await asyncio.sleep(0.001)
        reason = "answered 500" if fault == "an error" else "1 requests and had not within 0.3 s"
        with pytest.raises(EngineUnavailable, match=reason):
            await engine.interrupt()
        with pytest.raises(EngineUnavailable, match=reason):
            await task
        assert engine.gone.is_set()
        return engine

    assert talk(server, call).lost


async def in_an_update(
    engine: VllmEngine, server: ScriptedServer
) -> tuple[asyncio.Task[GenerationResult], asyncio.Task[None]]:
    """A request that is being sampled, and an update that waits for its end."""
    server.tokens, server.logprobs, server.seconds_per_token = TOKENS, LOGPROBS, 0.01
    sampling = asyncio.ensure_future(engine.generate(REQUEST))
    while server.sampled < 2:
        await asyncio.sleep(0.001)
    loading = asyncio.ensure_future(engine.load(INFO, PAYLOAD))
    while not server.paused:
        await asyncio.sleep(0.001)
    return sampling, loading


def test_an_interrupt_inside_an_update_may_take_as_long_as_that(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "ABORT_LIMIT_SECONDS", 0.1)

    async def call(engine: VllmEngine) -> GenerationResult:
        task, loading = await in_an_update(engine, server)
        server.hangs = {"/abort_requests"}
        interrupting = asyncio.ensure_future(engine.interrupt())
        await asyncio.sleep(0.3)
        assert not interrupting.done()
        server.hangs = set()
        await interrupting
        await loading
        return await task

    assert talk(server, call).finish_reason == "abort"


def test_a_request_that_waits_for_an_update_is_interrupted_without_tokens(
    server: ScriptedServer,
) -> None:
    async def call(engine: VllmEngine) -> GenerationResult:
        await engine.load(INFO, PAYLOAD)
        task = asyncio.ensure_future(engine.generate(REQUEST))
        await asyncio.sleep(0.01)
        await engine.interrupt()
        result = await task
        await engine.verify(None)
        await engine.release(4)
        engine.let_requests_in()
        assert (await engine.generate(REQUEST)).policy_version == 4
        return result

    result = talk(server, call)
    assert (result.token_ids, result.logprobs, result.finish_reason) == ((), (), "abort")
    assert server.paths.count(GENERATE) == 1


def test_an_interrupt_leaves_probes_alone(server: ScriptedServer) -> None:
    server.seconds_per_token = 0.05

    async def call(engine: VllmEngine) -> GenerationResult:
        task = asyncio.ensure_future(engine.probe(REQUEST))
        while not server.running:
            await asyncio.sleep(0.001)
        await engine.interrupt()
        return await task

    assert talk(server, call).finish_reason == "stop"
    assert "/abort_requests" not in server.paths


def test_an_interrupt_ends_the_wait_of_an_update_for_running_requests(
    server: ScriptedServer,
) -> None:
    async def call(engine: VllmEngine) -> GenerationResult:
        task, loading = await in_an_update(engine, server)
        await engine.interrupt()
        await loading
        assert server.paused
        return await task

    assert talk(server, call).finish_reason == "abort"


def test_sleep_does_nothing_without_sleep_mode(server: ScriptedServer) -> None:
    async def nap(engine: VllmEngine) -> None:
        await engine.sleep()
        await engine.wake_up("weights")
        engine.sleep_mode = True
        await engine.sleep()
        await engine.wake_up("weights")
        await engine.wake_up("kv_cache")

    talk(server, nap)
    assert server.paths == [
        "/sleep?level=2&mode=wait",
        "/wake_up?tags=weights",
        "/wake_up?tags=kv_cache",
    ]


@pytest.mark.parametrize(
    "endpoint", ["unix:/tmp/x", "http://127.0.0.1:8000", "http://localhost:8000/", "http://[::1]:1"]
)
def test_local_addresses_are_accepted(endpoint: str) -> None:
    engine_address(endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://10.0.0.3:8000",
        "http://0.0.0.0:8000",
        "http://127.0.0.1.evil.org:80",
        "http://127.0.0.1",
        "https://127.0.0.1:8000",
        "unix:relative",
        "node3:8000",
        "",
    ],
)
def test_other_addresses_are_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"rollout\.endpoints"):
        engine_address(endpoint)
