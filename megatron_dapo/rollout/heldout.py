"""Held-out sets: read, sampled and graded. Nothing of them reaches a batch of training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from megatron_dapo.config import ConfigError, RunConfig
from megatron_dapo.config.heldout import HeldoutFile, heldout_files
from megatron_dapo.data.prompt_format import bare_problem
from megatron_dapo.data.prompts import PromptSet
from megatron_dapo.data.selection import PromptReport
from megatron_dapo.data.tokenizer import Tokenizer
from megatron_dapo.reward.grade import grade_response
from megatron_dapo.reward.grader_pool import GraderPool
from megatron_dapo.rollout.dispatch import gather_or_cancel
from megatron_dapo.rollout.engine import Generate, GenerationRequest
from megatron_dapo.rollout.grading import Decode, ThreadedGrader
from megatron_dapo.rollout.seeds import sample_seed
from megatron_dapo.types import Group, Prompt, Response, Reward

logger = logging.getLogger(__name__)

UNNAMED = "heldout"
"""Set of the prompts of `data.heldout` whose rows name none."""


@dataclass(frozen=True)
class HeldoutSet:
    """Prompts whose accuracy is reported under one name."""

    name: str
    prompts: tuple[Prompt, ...]
    file: HeldoutFile
    """Where they come from, and how they are sampled and graded."""
    report: PromptReport
    """What became of the rows of that file."""


def read_heldout(config: RunConfig, tokenizer: Tokenizer) -> tuple[HeldoutSet, ...]:
    """All held-out sets of a run, names all different.

    Raises:
        ConfigError: two sets have one name.
        ValueError: a file or a row of it cannot be used.
    """
    sets = [found for file in heldout_files(config) for found in _read_file(file, tokenizer)]
    names = [found.name for found in sets]
    for found in sets:
        if names.count(found.name) > 1:
            raise ConfigError(
                f"{found.file.key}: a set of the name {found.name} is there already, from rows "
                "of data.heldout; their metrics would be one. Choose another name."
            )
    return tuple(sets)


def warn_of_overlap(train: Sequence[Prompt], sets: Sequence[HeldoutSet]) -> None:
    """Say which held-out sets ask what is trained on, word for word."""
    trained = {bare_problem(prompt.text) for prompt in train} if sets else set()
    for found in sets:
        known = sum(bare_problem(prompt.text) in trained for prompt in found.prompts)
        if known:
            logger.warning(
                "%s: %d of the %d prompts of %s are in data.train too; `megatron-dapo data "
                "decontaminate` takes them out",
                found.file.key,
                known,
                len(found.prompts),
                found.name,
            )


def _read_file(file: HeldoutFile, tokenizer: Tokenizer) -> list[HeldoutSet]:
    assert file.data.heldout is not None, f"{file.key} has no file"
    loaded = PromptSet.load(file.data.heldout, file.data, tokenizer)
    by_name: dict[str, list[Prompt]] = {}
    for prompt in loaded.prompts:
        by_name.setdefault(file.name or prompt.source or UNNAMED, []).append(prompt)
    return [
        HeldoutSet(name, tuple(prompts[: file.max_prompts]), file, loaded.report)
        for name, prompts in by_name.items()
    ]


@dataclass(frozen=True, kw_only=True)
class HeldoutSampling:
    """Samples and grades held-out sets; the same object for every evaluation of a run."""

    sets: tuple[HeldoutSet, ...]
    decode: Decode
    """From several threads at once."""
    stop_token_ids: tuple[int, ...]
    max_response_tokens: int
    seed: int
    graders: GraderPool | None
    """Started; None where no grader needs one."""
    grader_threads: int

    async def sample(
        self,
        generate: Generate,
        *,
        step: int,
        policy_version: int,
        on_response: Callable[[str], None] = lambda name: None,
    ) -> dict[str, list[Group]]:
        """Groups of each set by its name, in the order of its prompts.

        Every response has a seed of its own, which follows from the run's seed, the step, the set,
        the place of the prompt in it and the number of the sample alone.

        Args:
            generate: samples one response, on engines that serve `policy_version`. More requests
                may come at once than engines take.
            on_response: called with the set's name after each response is graded.

        Raises:
            RuntimeError: an engine serves older weights than `policy_version`.
            EngineUnavailable: no engine is left. Nothing is kept; another call samples the same.
            EngineError: an engine refuses.
        """
        graders = {found.name: self._grader(found) for found in self.sets}

        async def sampled(found: HeldoutSet, row: int, index: int) -> tuple[Response, Reward]:
            request = self._request(found, step, row, index)
            response = await _respond(generate, found.prompts[row], request, index)
            _check_version(response, step, policy_version)
            graded = await graders[found.name](found.prompts[row], response)
            on_response(found.name)
            return graded

        work = [
            sampled(found, row, index)
            for found in self.sets
            for row in range(len(found.prompts))
            for index in range(found.file.samples_per_prompt)
        ]
        try:
            flat = iter(await gather_or_cancel(work))
        finally:
            for grader in graders.values():
                grader.close()
        return {
            found.name: [
                _group(prompt, [next(flat) for _ in range(found.file.samples_per_prompt)])
                for prompt in found.prompts
            ]
            for found in self.sets
        }

    def expected_responses(self) -> Mapping[str, int]:
        """Responses of each set."""
        return {s.name: len(s.prompts) * s.file.samples_per_prompt for s in self.sets}

    def _grader(self, found: HeldoutSet) -> ThreadedGrader:
        grade = partial(
            grade_response,
            config=found.file.reward,
            max_response_tokens=self.max_response_tokens,
            pool=self.graders,
        )
        return ThreadedGrader(grade, self.decode, self.grader_threads)

    def _request(self, found: HeldoutSet, step: int, row: int, index: int) -> GenerationRequest:
        event = f"{found.name}/{row}"
        return GenerationRequest(
            prompt_token_ids=found.prompts[row].token_ids,
            seed=sample_seed(self.seed, step, event, index, purpose="evaluate"),
            temperature=found.file.temperature,
            top_p=found.file.top_p,
            top_k=-1,
            max_tokens=self.max_response_tokens,
            stop_token_ids=self.stop_token_ids,
            request_id=f"evaluate-{step}-{event}-{index}",
        )


async def _respond(
    generate: Generate, prompt: Prompt, request: GenerationRequest, index: int
) -> Response:
    result = await generate(request)
    return Response(
        prompt_id=prompt.id,
        sample_index=index,
        token_ids=result.token_ids,
        rollout_logprobs=result.logprobs,
        finish_reason=result.finish_reason,
        policy_version=result.policy_version,
        seed=request.seed,
        version_spans=result.version_spans,
    )


def _check_version(response: Response, step: int, expected: int) -> None:
    if response.policy_version < expected:
        raise RuntimeError(
            f"a held-out response of step {step} came from policy version "
            f"{response.policy_version}, expected {expected}; update the weights of every engine "
            "before evaluating"
        )


def _group(prompt: Prompt, members: Sequence[tuple[Response, Reward]]) -> Group:
    responses, rewards = zip(*members, strict=True)
    return Group(prompt, responses, rewards)
