"""Pieces of an interrupted response are one response again, exactly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.rollout.continuation import Unfinished, joined, next_request, unfinished
from megatron_dapo.rollout.engine import GenerationRequest, GenerationResult
from megatron_dapo.types import FinishReason

FIRST = GenerationRequest((5, 6), 1, 1.0, 1.0, -1, 10, (2,), "train-1-0-0")


def piece(
    tokens: tuple[int, ...],
    *versions: tuple[int, int],
    reason: FinishReason = "abort",
    serving: int = 9,
) -> GenerationResult:
    logprobs = tuple(-0.1 * token for token in tokens)
    oldest = min((version for _, version in versions), default=serving)
    return GenerationResult(tokens, logprobs, reason, versions, oldest)


def test_what_goes_on_asks_for_the_rest_behind_what_is_there() -> None:
    begun = Unfinished((7, 8, 9), (-1.0, -2.0, -3.0), ((0, 4),), pieces=2)
    request = next_request(FIRST, begun, seed=77)
    assert request.prompt_token_ids == (5, 6, 7, 8, 9)
    assert (request.max_tokens, request.seed, request.request_id) == (7, 77, "train-1-0-0-2")
    assert (request.stop_token_ids, request.temperature) == (FIRST.stop_token_ids, 1.0)


def test_what_has_no_token_yet_is_asked_for_again_as_it_was() -> None:
    nothing = joined(FIRST, None, piece(()))
    assert unfinished(nothing, None) is None
    assert next_request(FIRST, None, seed=77) is FIRST


def test_pieces_are_joined_with_their_logprobs_and_versions() -> None:
    begun = unfinished(joined(FIRST, None, piece((7, 8), (0, 3))), None)
    begun = unfinished(joined(FIRST, begun, piece((9,), (0, 3))), begun)
    whole = joined(FIRST, begun, piece((10, 11, 2), (0, 4), (2, 5), reason="stop"))
    assert whole.token_ids == (7, 8, 9, 10, 11, 2)
    assert whole.logprobs == tuple(-0.1 * token for token in whole.token_ids)
    assert whole.version_spans == ((0, 3), (3, 4), (5, 5))
    assert (whole.policy_version, whole.finish_reason) == (3, "stop")
    assert begun is not None and begun.pieces == 2


def test_an_interruption_before_the_next_token_changes_nothing() -> None:
    begun = Unfinished((7,), (-0.7,), ((0, 3),), pieces=1)
    assert unfinished(joined(FIRST, begun, piece(())), begun) == begun


def test_a_response_that_was_interrupted_after_its_end_is_complete() -> None:
    assert joined(FIRST, None, piece((7, 2), (0, 3))).finish_reason == "stop"
    begun = Unfinished(tuple(range(3, 12)), (-1.0,) * 9, ((0, 3),), pieces=1)
    assert joined(FIRST, begun, piece((30,), (0, 3))).finish_reason == "length"
    assert joined(FIRST, None, piece((7, 8), (0, 3))).finish_reason == "abort"


@given(
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    versions=st.lists(st.integers(0, 3), min_size=6, max_size=6),
)
def test_any_cut_gives_the_same_response(sizes: list[int], versions: list[int]) -> None:
    """Versions only rise, one for each piece."""
    first = GenerationRequest((5,), 1, 1.0, 1.0, -1, 100, (2,), "r")
    tokens, by_token = iter(range(10, 100)), []
    begun: Unfinished | None = None
    for size, version in zip(sizes, sorted(versions), strict=False):
        new = tuple(next(tokens) for _ in range(size))
        by_token += [version] * size
        whole = joined(first, begun, piece(new, *([(0, version)] if new else [])))
        begun = unfinished(whole, begun)
    assert whole.token_ids == tuple(range(10, 10 + len(by_token)))
    told = dict(whole.version_spans)
    version, read = -1, []
    for index in range(len(by_token)):
        version = told.get(index, version)
        read.append(version)
    assert read == by_token
    assert len(whole.version_spans) == len(set(by_token))
