"""The steps of a weight update of one engine, in the only order that never mixes weights.

    pause -> start -> load everything -> finish -> compare digests
          -> forget cached prompts -> stamp the version -> check it -> resume
          -> probe -> let requests in

Whoever calls these keeps an engine that failed at any step from ever being used again.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Literal, cast

import msgspec
from pydantic import JsonValue

from megatron_dapo.rollout.engine import EngineError
from megatron_dapo.rollout.engine_http import EngineHttp

logger = logging.getLogger(__name__)

InFlight = Literal["wait", "keep"]
Digests = Mapping[str, str]
"""Parameter of one engine worker -> digest of its values, as the trainer expects it."""
INITIAL_VERSION = "default"
"""What vLLM calls the weights that it started with."""
MOST_NAMED = 5
"""Parameters that a message about wrong digests names."""


class _WeightInfo(msgspec.Struct):
    weight_version: str


class _ResetAnswer(msgspec.Struct):
    success: bool


class _WorkerDigests(msgspec.Struct):
    """Of every tensor-parallel rank, in order."""

    results: list[dict[str, str]]


class _WorkerReports(msgspec.Struct):
    results: list[dict[str, object]]


class _TakenOver(msgspec.Struct):
    """Of every tensor-parallel rank, in order; anything, where they belong to an earlier call."""

    results: list[object]


async def end_open_update(http: EngineHttp) -> None:
    """End an update that a run left open, and see that every worker answers what it is asked.

    After a call that failed on one of several workers, vLLM hands out the answers of the others
    one call late, to all who ask from then on.

    Raises:
        EngineError: this has happened to the engine.
    """
    asked = secrets.token_hex(8)
    call = {"method": "end_open_update", "args": [asked]}
    found = (await http.ask(_TakenOver, "POST", "/collective_rpc", call)).results
    if any(answer != asked for answer in found):
        raise EngineError(
            f"{http.label} answers calls of its workers with those of earlier ones: one of them "
            "failed in an update of another run. Start the engine again"
        )


async def load_weights(
    http: EngineHttp,
    init_info: Mapping[str, object] | None,
    payload: Mapping[str, object],
    in_flight: InFlight,
    *,
    pausing: EngineHttp,
) -> None:
    """Pause, and bring new values in. Returns once the engine has all of `payload`.

    An empty payload only starts the update: its values come by `deliver_weights`.

    Args:
        init_info: where weights come from; None: as the engine was told before.
        payload: what is to be loaded, as its transport describes it.
        in_flight: running requests end before the update, or stand still until its end.
        pausing: waits as long as running requests may take to end.
    """
    if init_info is not None:
        body = {"init_info": dict(init_info)}
        await http.send("POST", "/init_weight_transfer_engine", body)
    await pausing.send("POST", f"/pause?mode={in_flight}&clear_cache=false")
    await http.send("POST", "/start_weight_update")
    if payload:
        await deliver_weights(http, payload)


async def deliver_weights(http: EngineHttp, payload: Mapping[str, object]) -> None:
    """Have the engine take the values that `payload` describes."""
    await http.send("POST", "/update_weights", {"update_info": dict(payload)})


async def verify_weights(
    http: EngineHttp, expected: Sequence[Digests] | None
) -> list[dict[str, JsonValue]]:
    """Let the engine finish, and compare what it holds with what the trainer sent.

    Args:
        expected: digests by tensor-parallel rank; None: the transport brings no digests.

    Returns:
        What each worker says of the update; [] without digests.

    Raises:
        EngineError: a parameter differs; the message names it, the engine and the rank.
    """
    await http.send("POST", "/finish_weight_update", {"weight_version": None})
    if expected is None:
        return []
    found = await http.ask(
        _WorkerDigests, "POST", "/collective_rpc", {"method": "weight_digests"}, repeatable=True
    )
    compare_digests(http.label, found.results, expected)
    reports = await http.ask(
        _WorkerReports, "POST", "/collective_rpc", {"method": "weight_report"}, repeatable=True
    )
    logger.debug("%s after its update: %s", http.label, reports.results)
    return cast(list[dict[str, JsonValue]], reports.results)


def compare_digests(label: str, found: Sequence[Digests], expected: Sequence[Digests]) -> None:
    """Refuse an engine whose parameters are not bit for bit what the trainer sent.

    Raises:
        EngineError: the first differences by name, with engine and tensor-parallel rank.
    """
    if len(found) != len(expected):
        raise EngineError(
            f"{label} has {len(found)} tensor-parallel ranks, the trainer sent weights for "
            f"{len(expected)}; rollout.engine_tensor must be the engine's tensor parallelism"
        )
    wrong = [
        f"{name} on rank {rank} has {seen.get(name, 'no digest')}, "
        f"expected {wanted.get(name, 'no such parameter')}"
        for rank, (seen, wanted) in enumerate(zip(found, expected, strict=True))
        for name in sorted(seen.keys() | wanted.keys())
        if seen.get(name) != wanted.get(name)
    ]
    if wrong:
        rest = len(wrong) - MOST_NAMED
        named = "; ".join(wrong[:MOST_NAMED]) + (f"; and {rest} more" if rest > 0 else "")
        raise EngineError(
            f"{label} does not hold the weights that the trainer sent: {named}. The run stops "
            "before anything is sampled from them"
        )


async def stamp_weights(http: EngineHttp, policy_version: int, in_flight: InFlight) -> None:
    """Forget what was computed from old weights, stamp the new ones, and check the stamp.

    With `keep`, the requests that stood still lose their keys and values too and go on from a
    new pass over their tokens, so that the new weights alone decide on what follows.
    """
    reset = "/reset_prefix_cache"
    if in_flight == "keep":
        reset += "?reset_running_requests=true"
    if not (await http.ask(_ResetAnswer, "POST", reset)).success:
        raise EngineError(
            f"{http.label} could not reset its prefix cache after a weight update: "
            "requests of someone else still hold blocks of it"
        )
    await http.send("POST", "/update_weight_version", {"new_version": str(policy_version)})
    found = await served_stamp(http)
    if found != str(policy_version):
        raise EngineError(
            f"{http.label} serves weight version {found} after the update to version "
            f"{policy_version}; is another run using this engine?"
        )


async def resume(http: EngineHttp) -> None:
    """Have the engine go on with what stands still, and take new requests."""
    await http.send("POST", "/resume")


async def served_stamp(http: EngineHttp) -> str:
    """What the weights that the engine serves are stamped with."""
    info = await http.ask(_WeightInfo, "GET", "/weight_info", repeatable=True)
    return info.weight_version


def version_number(stamp: str) -> int:
    """A stamp as a number; 0: the weights that the engine started with.

    Raises:
        EngineError: nobody who keeps to this protocol stamps such a version.
    """
    if stamp == INITIAL_VERSION:
        return 0
    if not re.fullmatch("[0-9]{1,18}", stamp):
        raise EngineError(f"weight version {stamp[:50]!r} is not a number; set by someone else?")
    return int(stamp)
