"""Requests that are to end now, with the tokens that they have."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from megatron_dapo.rollout.engine import EngineFault, EngineUnavailable
from megatron_dapo.rollout.engine_http import EngineHttp
from megatron_dapo.rollout.generate_route import ENGINE_ID_PREFIX, GenerateResponse

INTERRUPT_SECONDS = 0.1
"""What requests get to end after they were aborted; those on the way are then aborted again."""
ABORT_LIMIT_SECONDS = 60.0
"""An engine that has not ended them by then never will: vLLM ends aborted requests between two
steps of the model, which take a few seconds at most. Beyond an update that it is in."""


async def abort(
    http: EngineHttp, requests: Mapping[asyncio.Task[GenerateResponse], str], seconds: float
) -> None:
    """Returns once all of `requests`, by their request_id, have ended.

    Args:
        seconds: longest wait for that.

    Raises:
        EngineUnavailable: the engine cannot be reached, something broke in it (5xx), or requests
            did not end in time.
        EngineError: it refuses.
    """
    left = dict(requests)
    try:
        async with asyncio.timeout(seconds):
            while left:
                names = [f"{ENGINE_ID_PREFIX}{name}" for name in left.values()]
                body = {"request_ids": names}
                await http.send("POST", "/abort_requests", body, repeatable=True)
                await asyncio.wait(left, timeout=INTERRUPT_SECONDS)
                left = {task: name for task, name in left.items() if not task.done()}
    except TimeoutError as error:
        raise EngineUnavailable(
            f"{http.label} was told to end {len(left)} requests and had not within {seconds:g} s"
        ) from error
    except EngineFault as error:
        raise EngineUnavailable(str(error)) from error
