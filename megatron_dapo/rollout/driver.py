"""The rollouts of a run on global rank 0: engines, prompts and graders behind plain calls."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

from pydantic import JsonValue

from megatron_dapo.config import ConfigError, RunConfig
from megatron_dapo.config.remarks import remark_on_prompts
from megatron_dapo.data.prompts import PromptStream
from megatron_dapo.reward.grade import grade_response
from megatron_dapo.reward.grader_pool import GraderPool
from megatron_dapo.rollout.dispatch import Dispatcher
from megatron_dapo.rollout.engine import GenerationRequest, GenerationResult
from megatron_dapo.rollout.fleet import EngineFleet, of_the_living
from megatron_dapo.rollout.grading import ThreadedGrader
from megatron_dapo.rollout.group_state import DraftStateError
from megatron_dapo.rollout.heldout import HeldoutSampling
from megatron_dapo.rollout.inputs import RolloutInputs
from megatron_dapo.rollout.probe import Probe, probe_engine
from megatron_dapo.rollout.response_store import FOLDER, ResponseStore
from megatron_dapo.rollout.sampler import RolloutStep
from megatron_dapo.rollout.scheduler import GroupScheduler
from megatron_dapo.rollout.scheduler_state import state_to_json, usable_state
from megatron_dapo.rollout.server_options import Device
from megatron_dapo.rollout.vllm_engine import VllmEngine
from megatron_dapo.rollout.weight_update import Digests
from megatron_dapo.types import Group

logger = logging.getLogger(__name__)


class RolloutDriver:
    """Owns engines, graders and the order of prompts.

    Every method blocks, but for the start of an update. While one thread is in `collect`, another
    may update the engines; nothing else may overlap.

    Args:
        config: of the run.
        device: that engines of ours run on.

    Raises:
        ConfigError: prompts, tokenizer or reward plug-in cannot be used.
    """

    def __init__(self, config: RunConfig, *, device: Device) -> None:
        self._config = config
        inputs = RolloutInputs.read(config)
        self._decode = Counted(inputs.tokenizer.decode)
        self._stop_ids = inputs.stop_token_ids
        self._prompts = PromptStream(inputs.train, config.seed)
        if remark := remark_on_prompts(config, len(inputs.train.prompts)):
            logger.warning(remark)
        self._graders = GraderPool.of_run(config.reward, config.run_dir)
        grade = partial(
            grade_response,
            config=config.reward,
            max_response_tokens=config.rollout.max_response_tokens,
            pool=self._graders,
        )
        self._grader = ThreadedGrader(grade, self._decode, self._grader_threads)
        self._heldout = HeldoutSampling(
            sets=inputs.heldout,
            decode=self._decode,
            stop_token_ids=self._stop_ids,
            max_response_tokens=config.rollout.max_response_tokens,
            seed=config.seed,
            graders=self._graders,
            grader_threads=self._grader_threads,
        )
        self._probe_prompt = inputs.train.prompts[0].token_ids
        self._fleet = EngineFleet(config, device)
        self._interrupted = threading.Event()
        self._dispatcher: Dispatcher | None = None
        self._store = ResponseStore(config.run_dir / FOLDER, config.rollout.logprobs)
        self._coming_version = 0
        """Of the weights that are on their way into engines."""
        self._scheduler = GroupScheduler(
            self._generate,
            self._prompts,
            self._grader,
            config.rollout,
            config.sampling,
            interrupt=self._interrupt,
            seed=config.seed,
            stop_token_ids=self._stop_ids,
            capacity=self._capacity,
            last_step=config.training.steps,
            max_error_share=config.reward.max_error_share,
            grading_failures=lambda: self.grading_failures,
        )
        logger.info("generation stops at token ids %s", list(self._stop_ids))

    def start(self) -> None:
        """Start graders and our engines. Returns at once, except where engines must first give up
        the device."""
        if self._graders is not None:
            self._graders.start()
        self._fleet.start()

    def wait_ready(self) -> None:
        """Block until every engine answers.

        Raises:
            EngineStartError: one of them ended or took too long.
        """
        self._fleet.wait_ready()
        places = self._config.rollout.max_concurrent_sequences
        self._dispatcher = Dispatcher(self._fleet.engines, places)

    def collect(self, step: int, policy_version: int) -> RolloutStep:
        """The groups that `step` trains on, with weights `policy_version`.

        With rollout.mode other than sync, sampling goes on after this returns.

        Raises:
            EnginesLost: no engine is left. What is finished is kept, and another call for the
                same step goes on with it.
            Interrupted: `interrupt` was called. What was sampled is not handed out.
        """
        rollout = self._fleet.run_interruptible(self._scheduler.collect(step, policy_version))
        if self._graders is not None:
            rollout.metrics.update(self._graders.take_counts())
        # Beside the sampling: no phase of the step.
        rollout.metrics["rollout/grade_seconds"] = self._grader.take_seconds()
        rollout.metrics["data/epoch"] = float(self._prompts.epoch)
        rollout.metrics.update(self._fleet.take_counts())
        self._fleet.step_done()
        self._fleet.sleep()
        return rollout

    def sample_heldout(self, step: int, policy_version: int) -> dict[str, list[Group]]:
        """Graded responses of each held-out set by its name; {} without any.

        They share the engines with what is sampled for training meanwhile (rollout.mode=async), in
        the order of asking.

        Raises:
            EngineUnavailable: no engine is left; another call for the same step samples the same.
            Interrupted: `interrupt` was called.
        """
        return self._fleet.run_interruptible(
            self._heldout.sample(self._generate, step=step, policy_version=policy_version)
        )

    def interrupt(self) -> None:
        """End `collect` and `sample_heldout` early, now and later. From any thread.

        `state_dict` then waits for no response.
        """
        self._interrupted.set()
        self._fleet.interrupt()

    def remove_when_orphaned(self, directory: Path) -> None:
        """Have `directory` (published weights) removed should this process be killed."""
        self._fleet.remove_when_orphaned(directory)

    def to_update(self, *, all_engines: bool) -> dict[int, bool]:
        """Engines that need weights now, and which of them are fresh since their restart.

        Blocks until there is one, unless another one serves. With rollout.mode=one_step_off it
        first waits until the next step is sampled, whole from the weights that are there.

        Args:
            all_engines: those that serve need weights, too: there is a new version.

        Raises:
            EngineError: an engine was lost more often than `rollout.max_restarts`.
            Interrupted: `interrupt` was called.
        """
        if all_engines and self._config.rollout.mode == "one_step_off":
            self._fleet.run_interruptible(self._scheduler.drain())
        return self._fleet.to_update(all_engines=all_engines)

    def start_update(
        self,
        infos: Mapping[int, Mapping[str, object]],
        payload: Mapping[str, object],
        policy_version: int,
    ) -> None:
        """First half of an update: these engines pause and start to take weights.

        Returns at once. `finish_update` says whether it went well.

        Args:
            infos: by engine: where it gets weights from.
            payload: description of this update, the same for all.
            policy_version: that the engines will serve.
        """
        self._coming_version = policy_version
        self._fleet.run(self._store.serve(policy_version, None))  # until it is proven
        self._fleet.start_update(infos, payload, policy_version)

    def abandon_update(self) -> list[int]:
        """Instead of the second half, when the weights could not be sent: its engines are
        replaced. Those among them that are lost, and so the cause of it."""
        return self._fleet.abandon_update()

    def deliver(self, payload: Mapping[str, object]) -> None:
        """Between the halves, from any thread: all engines of the update take one more `payload`.

        Raises:
            EngineError: an engine failed; `finish_update` raises it again.
        """
        self._fleet.deliver(payload)

    def update_failure(self) -> BaseException | None:
        """Between the halves, from any thread: what an engine has failed with so far."""
        return self._fleet.update_failure()

    def finish_update(self, expected_digests: Sequence[Digests] | None) -> tuple[Probe, ...]:
        """Second half: wait for the weights, prove them, let the engines go on, and probe each.

        Other requests still wait, for `let_requests_in`. An engine that is lost on the way is left
        out and replaced.

        Args:
            expected_digests: by tensor-parallel rank of an engine, parameter -> digest. None: there
                is nothing to compare.

        Returns:
            What each of the updated engines sampled as a probe, for `check_probes`; () with
            resharding.probe_tokens=0.

        Raises:
            EngineError: an engine refused, or holds other weights than were sent; none of those
                that were to be updated is used any more and the run has to stop.
        """
        updated = self._fleet.finish_update(expected_digests)
        self._fleet.run(self._store.serve(self._coming_version, expected_digests))
        return self._fleet.run(self._probe(updated))

    def let_requests_in(self) -> None:
        """Once the probes are right too: the engines that were updated last answer requests."""
        self._fleet.let_requests_in()

    @property
    def responses(self) -> int:
        """Received so far, for training and evaluation. From any thread."""
        return self._decode.calls

    @property
    def grading_failures(self) -> Sequence[str]:
        """What the first graders of the run that failed have said, a line each."""
        return () if self._graders is None else self._graders.first_failures

    @property
    def update_reports(self) -> Mapping[int, list[dict[str, JsonValue]]]:
        """Of the last update, by engine: what each worker says of it; [] without digests."""
        return self._fleet.reports

    def state_dict(self) -> dict[str, JsonValue]:
        """Position in the prompt order, groups and responses that wait, as JSON.

        Waits until nothing runs that would be lost; with sampling.unfinished=continue, running
        responses stop for it and go on afterwards.
        """
        return self._fleet.run(self._settled_state())()

    def snapshot(self) -> Callable[[], dict[str, JsonValue]]:
        """`state_dict` of this moment, made when it is called for; takes no time now.

        Between two steps. Tokens of responses that still run are not in it.
        """
        return self._fleet.run(self._snapshot())

    def check_state_dict(self, state: Mapping[str, JsonValue]) -> None:
        """Refuse, before anything is started, what `load_state_dict` could not go on with.

        Raises:
            ConfigError: keys of this run do not fit to what the state holds; they are named.
        """
        if "sampling" not in state:
            return
        sampling = cast(dict[str, JsonValue], state["sampling"])
        try:
            usable_state(sampling, self._config.rollout, self._config.sampling)
        except DraftStateError as error:
            raise ConfigError(str(error)) from error

    def load_state_dict(self, state: Mapping[str, JsonValue]) -> None:
        """Go on at a saved state. One of an earlier release has no groups that wait."""
        self._prompts.load_state_dict(cast(dict[str, int | str], state["prompts"]))
        if "sampling" in state:
            self._scheduler.load_state_dict(cast(dict[str, JsonValue], state["sampling"]))

    def forget_responses_before(self, policy_version: int) -> None:
        """No run goes on from older weights any more: delete what they have sampled."""
        self._store.forget_before(policy_version)

    @property
    def prompts_fingerprint(self) -> str:
        """Changes with any prompt or answer that is trained on, or with their order in the file."""
        return self._prompts.fingerprint

    def close(self) -> None:
        """Release connections, end our servers and graders, whatever state they are in."""
        try:
            self._fleet.close()
        finally:
            self._grader.close()
            self._store.close()
            if self._graders is not None:
                self._graders.close()

    @property
    def _grader_threads(self) -> int:
        """Threads that grade: one waits for each worker, and our own check needs but one."""
        return 1 if self._graders is None else self._config.reward.workers

    async def _settled_state(self) -> Callable[[], dict[str, JsonValue]]:
        await self._scheduler.settle(hurry=self._interrupted.is_set())
        state = await self._snapshot()
        self._scheduler.go_on()
        return state

    async def _snapshot(self) -> Callable[[], dict[str, JsonValue]]:
        prompts = cast(JsonValue, self._prompts.state_dict())
        sampling = self._scheduler.snapshot()
        return lambda: {"prompts": prompts, "sampling": state_to_json(sampling)}

    async def _generate(self, request: GenerationRequest) -> GenerationResult:
        assert self._dispatcher is not None, "wait_ready comes first"
        return await self._store.sampled(request, self._dispatcher.generate)

    async def _interrupt(self) -> None:
        assert self._dispatcher is not None, "wait_ready comes first"
        await self._dispatcher.interrupt()

    def _capacity(self) -> int:
        return 0 if self._dispatcher is None else self._dispatcher.capacity

    async def _probe(self, engines: Mapping[int, VllmEngine]) -> tuple[Probe, ...]:
        if self._config.resharding.probe_tokens == 0:
            return ()
        probes = await of_the_living(
            engines,
            lambda number, engine: probe_engine(
                engine.probe, self._probe_prompt, self._config, number=number
            ),
        )
        return tuple(probes.values())


class Counted:
    """`decode`, and how often it was called."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self.calls = 0

    def __call__(self, token_ids: Sequence[int]) -> str:
        self.calls += 1
        return self._decode(token_ids)
