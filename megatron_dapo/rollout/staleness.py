"""How old what is trained on may be, counted in weight updates; and waiting with a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable

from megatron_dapo.rollout.draft import Draft


def split_stale(
    drafts: Iterable[Draft], version: int, max_staleness: int
) -> tuple[list[Draft], list[Draft]]:
    """(may be trained on by weights `version`, oldest first; too old for that)."""
    ordered = sorted(drafts, key=lambda draft: draft.order)
    fresh = [draft for draft in ordered if not too_old(draft, version, max_staleness)]
    stale = [draft for draft in ordered if too_old(draft, version, max_staleness)]
    return fresh, stale


def too_old(draft: Draft, version: int, max_staleness: int) -> bool:
    """True where weights `version` may not train on it any more."""
    return version - draft.oldest_version > max_staleness


def must_finish(drafts: Iterable[Draft], version: int, max_staleness: int) -> bool:
    """True while one of the unfinished `drafts` can be trained on in this step and in no later one.

    The step waits for it. Ending it instead would cost the longest responses most.
    """
    return any(version - draft.oldest_version == max_staleness for draft in drafts)


async def waits_until(work: Coroutine[object, object, None], deadline: float | None) -> bool:
    """Wait for `work`; False where the loop's clock comes to `deadline` first and ends it."""
    if deadline is None:
        await work
        return True
    left = deadline - asyncio.get_running_loop().time()
    try:
        await asyncio.wait_for(work, max(left, 0.0))
    except TimeoutError:
        return False
    return True
