from __future__ import annotations

import math

import pytest

from megatron_dapo.types import Response


def response(*logprobs: float) -> Response:
    return Response(
        prompt_id="p",
        sample_index=2,
        token_ids=(5, 6),
        rollout_logprobs=logprobs,
        finish_reason="stop",
        policy_version=0,
        seed=0,
    )


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_a_log_prob_that_is_no_number_is_refused_where_it_arrives(broken: float) -> None:
    with pytest.raises(RuntimeError, match=f"response 2 of prompt p has a log-prob of {broken}"):
        response(-0.1, broken)


def test_every_token_has_a_log_prob() -> None:
    with pytest.raises(RuntimeError, match="2 tokens but 1 log-probs"):
        response(-0.1)
