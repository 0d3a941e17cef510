"""Updates of one engine: their order, their failures, and the requests that run meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from pydantic import JsonValue

from megatron_dapo.rollout.engine import EngineError, EngineUnavailable, GenerationResult
from megatron_dapo.rollout.vllm_engine import VllmEngine
from megatron_dapo.rollout.weight_update import InFlight, compare_digests
from tests.unit.rollout.scripted_server import (
    GENERATE,
    INFO,
    PAYLOAD,
    REQUEST,
    ScriptedServer,
    talk,
)

DIGESTS = [{"w": "0a"}]
UPDATE_ORDER = [
    "/init_weight_transfer_engine",
    "/pause?mode=wait&clear_cache=false",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/collective_rpc",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/update_weight_version",
    "/weight_info",
    "/resume",
]
RESUME = UPDATE_ORDER[-1]


async def update(engine: VllmEngine, version: int = 4) -> None:
    await engine.update(INFO, PAYLOAD, version, DIGESTS)


def test_an_update_goes_through_every_step_in_order(server: ScriptedServer) -> None:
    async def twice(engine: VllmEngine) -> list[dict[str, JsonValue]]:
        await update(engine, 4)
        reports = await engine.update(INFO, PAYLOAD, 5, DIGESTS)
        assert (await engine.generate(REQUEST)).policy_version == 5
        return reports

    assert talk(server, twice, fresh=True) == [{"rank": 0}]
    assert server.paths == [*UPDATE_ORDER, *UPDATE_ORDER[1:], GENERATE]
    sent = dict(server.received)
    assert sent["/init_weight_transfer_engine"] == {"init_info": INFO}
    assert sent["/update_weights"] == {"update_info": PAYLOAD}


def test_a_changed_place_of_the_weights_is_told_again(server: ScriptedServer) -> None:
    async def moved(engine: VllmEngine) -> None:
        await update(engine, 4)
        await engine.update({"directory": "/dev/shm/v"}, PAYLOAD, 5, DIGESTS)

    talk(server, moved, fresh=True)
    assert server.paths == [*UPDATE_ORDER, *UPDATE_ORDER]


def test_a_transport_without_digests_asks_for_none(server: ScriptedServer) -> None:
    reports = talk(server, lambda engine: engine.update(INFO, PAYLOAD, 4, None), fresh=True)
    assert reports == []
    assert "/collective_rpc" not in server.paths
    assert server.paths[-1] == RESUME


def test_kept_requests_lose_what_they_computed_from_old_weights(server: ScriptedServer) -> None:
    talk(server, update, in_flight="keep", fresh=True)
    assert server.paths[1] == "/pause?mode=keep&clear_cache=false"
    assert "/reset_prefix_cache?reset_running_requests=true" in server.paths


@pytest.mark.parametrize("step", dict.fromkeys(UPDATE_ORDER))
@pytest.mark.parametrize("failure", ["refuses", "dies", "hangs"])
def test_an_engine_with_a_failed_update_is_not_used_again(
    server: ScriptedServer, step: str, failure: str
) -> None:
    if failure == "hangs":
        server.hangs.add(step)
        server.hang_seconds = 600
        expected = r"did not answer \w+ /.* within 60 s: it hangs"
    elif failure == "refuses":
        server.errors[step] = 500
        expected = "answered 500"
    else:
        server.drops[step] = 500
        expected = "did not answer|cannot be reached"

    async def use(engine: VllmEngine) -> None:
        with pytest.raises(EngineError, match=expected):
            await update(engine)
        server.errors.clear()
        server.drops.clear()
        server.hangs.clear()
        for again in (engine.generate(REQUEST), update(engine)):
            with pytest.raises(EngineError, match=r"restart the engine|is lost"):
                await again
        assert engine.lost == (failure != "refuses")

    talk(server, use, fresh=True, update_seconds=60.0)
    place = UPDATE_ORDER.index(step)
    assert [path for path in server.paths if path != step] == UPDATE_ORDER[:place]
    assert RESUME not in server.paths or step == RESUME


def test_a_probe_that_hangs_ends_as_a_step_of_an_update_does(server: ScriptedServer) -> None:
    async def use(engine: VllmEngine) -> None:
        await engine.load(INFO, PAYLOAD)
        await engine.verify(None)
        await engine.release(4)
        server.hangs.add(GENERATE)
        server.hang_seconds = 600
        with pytest.raises(EngineUnavailable, match="within 60 s: it hangs"):
            await engine.probe(REQUEST)

    talk(server, use, update_seconds=60.0)


def test_requests_that_run_may_take_longer_than_a_step_of_an_update(server: ScriptedServer) -> None:
    server.seconds_per_token = 0.01
    server.tokens, server.logprobs = [5] * 39 + [2], [-0.5] * 40

    async def update_for_long(engine: VllmEngine) -> None:
        updating = asyncio.ensure_future(update(engine, 5))
        while not server.paused:
            await asyncio.sleep(0.001)
        assert server.running
        server.seconds_ahead += 600
        await updating

    async def use(engine: VllmEngine) -> list[GenerationResult]:
        await update(engine, 4)
        return await overlapping(server, engine, lambda: update_for_long(engine))

    *early, late = talk(server, use, fresh=True, update_seconds=60.0)
    assert {result.policy_version for result in early} == {4}
    assert late.policy_version == 5


def test_a_step_of_an_update_is_never_sent_twice(server: ScriptedServer) -> None:
    server.drops["/update_weights"] = 1
    with pytest.raises(EngineUnavailable, match="did not answer POST /update_weights"):
        talk(server, update)
    assert server.paths.count("/update_weights") == 1


def test_an_engine_that_keeps_its_old_version_is_found_out(server: ScriptedServer) -> None:
    server.keeps_version = True
    with pytest.raises(EngineError, match="serves weight version default after the update to ve"):
        talk(server, lambda engine: update(engine, 0))
    assert RESUME not in server.paths


def test_a_cache_that_cannot_be_reset_is_an_error(server: ScriptedServer) -> None:
    server.reset_succeeds = False
    with pytest.raises(EngineError, match="could not reset its prefix cache"):
        talk(server, update)
    assert RESUME not in server.paths


def test_an_engine_with_other_weights_never_resumes(server: ScriptedServer) -> None:
    server.digests = [{"w": "0a"}, {"w": "0b"}]

    async def use(engine: VllmEngine) -> None:
        with pytest.raises(EngineError, match=r"w on rank 1 has 0b, expected 0c"):
            await engine.update(INFO, PAYLOAD, 4, [{"w": "0a"}, {"w": "0c"}])
        with pytest.raises(EngineError, match="restart the engine"):
            await engine.generate(REQUEST)

    talk(server, use)
    assert server.paths[-1] == "/collective_rpc"
    assert server.paused


def test_differences_are_named_with_engine_parameter_and_rank() -> None:
    same = {"a": "01", "b": "02"}
    compare_digests("engine 3", [same, same], [dict(same), dict(same)])
    with pytest.raises(EngineError, match=r"engine 3 .*: b on rank 1 has 03, expected 02") as one:
        compare_digests("engine 3", [same, same | {"b": "03"}], [same, same])
    assert "a on rank" not in str(one.value)
    with pytest.raises(EngineError, match="b on rank 0 has no digest, expected 02"):
        compare_digests("engine 3", [{"a": "01"}], [same])
    with pytest.raises(EngineError, match="c on rank 0 has 03, expected no such parameter"):
        compare_digests("engine 3", [same | {"c": "03"}], [same])
    with pytest.raises(EngineError, match=r"has 1 tensor-parallel ranks, .* for 2"):
        compare_digests("engine 3", [same], [same, same])
    many = {f"p{index}": "01" for index in range(9)}
    with pytest.raises(EngineError, match=r"p4 on rank 0 .*; and 4 more\. The run stops"):
        compare_digests("engine 3", [dict.fromkeys(many, "02")], [many])


async def overlapping(
    server: ScriptedServer, engine: VllmEngine, meanwhile: Callable[[], Awaitable[None]]
) -> list[GenerationResult]:
    """Results of four requests that are half done when `meanwhile` starts, and of a later one."""
    early = [asyncio.create_task(engine.generate(REQUEST)) for _ in range(4)]
    while server.running < len(early):
        await asyncio.sleep(0.001)
    await asyncio.sleep(3 * server.seconds_per_token)
    update_task = asyncio.ensure_future(meanwhile())
    await asyncio.sleep(0)
    late = asyncio.create_task(engine.generate(REQUEST))
    await update_task
    return list(await asyncio.gather(*early, late))


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_requests_that_run_at_an_update_end_on_the_old_weights_or_carry_both_versions(
    server: ScriptedServer, mode: InFlight
) -> None:
    server.seconds_per_token = 0.005
    server.tokens, server.logprobs = [5] * 39 + [2], [-0.5] * 40

    async def use(engine: VllmEngine) -> list[GenerationResult]:
        await update(engine, 4)
        return await overlapping(server, engine, lambda: update(engine, 5))

    *early, late = talk(server, use, in_flight=mode, fresh=True)
    assert late.version_spans == ((0, 5),)
    for result in early:
        assert result.policy_version == 4
        assert [version for _, version in result.version_spans] == (
            [4] if mode == "wait" else [4, 5]
        )
        assert result.version_spans[0][0] == 0
        assert all(0 < start < 40 for start, _ in result.version_spans[1:])


def test_a_request_that_comes_during_an_update_is_sent_after_it(server: ScriptedServer) -> None:
    async def use(engine: VllmEngine) -> int:
        await engine.load(INFO, PAYLOAD)
        request = asyncio.create_task(engine.generate(REQUEST))
        await asyncio.sleep(0.01)
        assert GENERATE not in server.paths
        await engine.verify(DIGESTS)
        await engine.release(7)
        await asyncio.sleep(0.01)
        assert GENERATE not in server.paths
        engine.let_requests_in()
        return (await request).policy_version

    assert talk(server, use) == 7
    assert server.paths == [*UPDATE_ORDER, GENERATE]


def test_a_probe_is_answered_before_requests_are_let_in(server: ScriptedServer) -> None:
    async def use(engine: VllmEngine) -> None:
        await engine.load(INFO, PAYLOAD)
        request = asyncio.create_task(engine.generate(REQUEST))
        await engine.verify(DIGESTS)
        await engine.release(7)
        assert (await engine.probe(REQUEST)).version_spans == ((0, 7),)
        assert server.paths.count(GENERATE) == 1
        assert not request.done()
        engine.let_requests_in()
        assert (await request).policy_version == 7

    talk(server, use)
    assert server.paths.count(GENERATE) == 2


def test_an_engine_without_weights_of_this_run_is_not_probed(server: ScriptedServer) -> None:
    with pytest.raises(EngineError, match="has no weights of this run yet"):
        talk(server, lambda engine: engine.probe(REQUEST), fresh=True)
    assert server.paths == []


@pytest.mark.parametrize("proven", [True, False])
def test_what_a_kept_request_samples_from_new_weights_waits_for_their_proof(
    server: ScriptedServer, proven: bool
) -> None:
    server.seconds_per_token = 0.005
    server.tokens, server.logprobs = [5] * 39 + [2], [-0.5] * 40

    async def use(engine: VllmEngine) -> None:
        await update(engine, 4)
        kept = asyncio.create_task(engine.generate(REQUEST))
        while not server.sampled:
            await asyncio.sleep(0.001)
        await engine.load(INFO, PAYLOAD)
        await engine.verify(DIGESTS)
        await engine.release(5)
        await engine.probe(REQUEST)
        assert server.running == 0
        assert not kept.done()
        if proven:
            engine.let_requests_in()
            assert [version for _, version in (await kept).version_spans] == [4, 5]
        else:
            engine.give_up("its probe differs")
            with pytest.raises(EngineError, match="its probe differs"):
                await kept

    talk(server, use, in_flight="keep", fresh=True)


def test_an_answer_of_old_weights_waits_for_no_proof_of_new_ones(server: ScriptedServer) -> None:
    server.seconds_per_token = 0.005

    async def use(engine: VllmEngine) -> int:
        await update(engine, 4)
        running = asyncio.create_task(engine.generate(REQUEST))
        while not server.sampled:
            await asyncio.sleep(0.001)
        await engine.load(INFO, PAYLOAD)
        return (await asyncio.wait_for(running, 60)).policy_version

    assert talk(server, use, fresh=True) == 4


def test_a_sleeping_engine_has_its_cache_before_it_goes_on_and_its_stamp_before_that(
    server: ScriptedServer,
) -> None:
    async def use(engine: VllmEngine) -> None:
        engine.sleep_mode = True
        await update(engine)

    talk(server, use, fresh=True)
    assert server.paths == [*UPDATE_ORDER[:-1], "/wake_up?tags=kv_cache", RESUME]


def test_requests_that_stand_still_in_a_failed_update_end_with_it(server: ScriptedServer) -> None:
    server.seconds_per_token = 0.005
    server.tokens, server.logprobs = [5] * 400, [-0.5] * 400
    server.errors["/finish_weight_update"] = 500

    async def failing(engine: VllmEngine) -> None:
        with pytest.raises(EngineError, match="answered 500"):
            await update(engine, 5)

    async def use(engine: VllmEngine) -> None:
        with pytest.raises(EngineError, match="failed while verifying"):
            await asyncio.wait_for(overlapping(server, engine, lambda: failing(engine)), 60)

    talk(server, use, in_flight="keep")


def test_a_second_update_inside_one_is_refused(server: ScriptedServer) -> None:
    async def use(engine: VllmEngine) -> None:
        await engine.load(INFO, PAYLOAD)
        with pytest.raises(RuntimeError, match="already being updated"):
            await engine.load(INFO, PAYLOAD)
        await engine.verify(None)
        await engine.release(4)
        with pytest.raises(RuntimeError, match="already being updated"):
            await engine.load(INFO, PAYLOAD)
        engine.let_requests_in()
        assert (await engine.generate(REQUEST)).policy_version == 4

    talk(server, use)


def test_an_engine_without_weights_of_this_run_is_not_asked(server: ScriptedServer) -> None:
    with pytest.raises(EngineError, match="has no weights of this run yet"):
        talk(server, lambda engine: engine.generate(REQUEST), fresh=True)
    assert server.paths == []


@pytest.mark.parametrize("found", ["default", "3", "9", "latest"])
def test_weights_that_this_client_did_not_install_are_never_taken_for_current(
    server: ScriptedServer, found: str
) -> None:
    """default: the engine was restarted; 3: somebody went back; the others: someone else's."""

    async def use(engine: VllmEngine) -> None:
        for version in (0, 3, 4):
            await update(engine, version)
        server.version = found
        with pytest.raises(EngineError, match=f"from weight version '{found}', this run inst.* 4:"):
            await engine.generate(REQUEST)

    talk(server, use)


def test_the_start_weights_are_not_version_0_of_a_run(server: ScriptedServer) -> None:
    async def use(engine: VllmEngine) -> None:
        await update(engine, 0)
        assert (await engine.generate(REQUEST)).version_spans == ((0, 0),)
        await server.close()
        await server.open()
        with pytest.raises(EngineError, match="the engine was restarted"):
            await engine.generate(REQUEST)

    talk(server, use)


def test_tokens_of_unknown_weights_are_an_error(server: ScriptedServer) -> None:
    server.says_versions = False
    with pytest.raises(EngineError, match="does not say which weights"):
        talk(server, lambda engine: engine.generate(REQUEST))


def test_an_answer_without_tokens_counts_as_of_the_weights_that_are_served(
    server: ScriptedServer,
) -> None:
    server.tokens, server.logprobs, server.finish_reason = [], [], "abort"

    async def use(engine: VllmEngine) -> GenerationResult:
        await update(engine, 6)
        return await engine.generate(REQUEST)

    result = talk(server, use)
    assert (result.version_spans, result.policy_version) == ((), 6)
