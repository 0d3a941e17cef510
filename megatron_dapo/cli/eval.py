"""`eval`: held-out accuracy of a model folder, a checkpoint or a run, on engines of its own.

No trainer rank is started. A checkpoint is first exported into a temporary folder.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron_dapo.cli.eval_output import LEGEND, progress, result_table
from megatron_dapo.cli.eval_target import Target, find_target
from megatron_dapo.cli.export import export_checkpoint
from megatron_dapo.cli.signals import leaving_through_clean_up
from megatron_dapo.cli.terminal import open_console
from megatron_dapo.config import ConfigError, RunConfig
from megatron_dapo.config.evaluation_target import check_evaluation
from megatron_dapo.config.load import save_resolved
from megatron_dapo.config.run_dir_checks import run_dir_problems
from megatron_dapo.data.tokenizer import load_tokenizer, stop_token_ids
from megatron_dapo.evaluation.evaluate import ungraded_responses
from megatron_dapo.evaluation.set_report import SetReport, report_set, reports_json
from megatron_dapo.observability.evaluation_files import Sets, write_report, write_samples
from megatron_dapo.observability.logs import quiet_logs
from megatron_dapo.reward.grader_pool import GraderPool, check_graders
from megatron_dapo.reward.grader_process import GraderStartError
from megatron_dapo.rollout.dispatch import Dispatcher
from megatron_dapo.rollout.engine import EngineError
from megatron_dapo.rollout.heldout import HeldoutSampling, HeldoutSet, read_heldout
from megatron_dapo.rollout.loaded_engines import LoadedEngines
from megatron_dapo.rollout.server_options import Device
from megatron_dapo.rollout.vllm_server import EngineStartError

REPORT_FILE = "report.json"
SAMPLES_FILE = "samples.jsonl"


def eval_main(options: argparse.Namespace) -> int:
    """`megatron-dapo eval TARGET`; returns the exit code.

    Raises:
        ConfigError: target, configuration or held-out rows cannot be used, or OUT holds an
            evaluation already.
    """
    quiet_logs()
    with leaving_through_clean_up():
        target = find_target(
            options.target, options.overrides, config_file=options.config, out=options.out
        )
        out = target.config.run_dir
        if (out / REPORT_FILE).exists():
            raise ConfigError(f"OUT={out} holds an evaluation already: name another with --out")
        if problems := list(run_dir_problems(out, "OUT")):
            raise ConfigError(problems)
        config = check_evaluation(target.config, weights=target.folder is not None)
        try:
            return _evaluate(target, config, options.sets)
        except (EngineError, EngineStartError, GraderStartError) as error:
            sys.stderr.write(f"evaluation failed: {error}\n")
            return 1


def _evaluate(target: Target, config: RunConfig, names: str | None) -> int:
    device: Device = "cuda" if config.device == "cuda" else "cpu"
    started = time.monotonic()
    with _graders(config) as graders:
        sampling = _sampling(config, names, graders)
        with _served_folder(target, config) as folder, LoadedEngines(config, folder, device) as on:
            save_resolved(config, config.run_dir)
            dispatcher = Dispatcher(on.engines, config.rollout.max_concurrent_sequences)
            with progress(sampling.expected_responses()) as on_response:
                groups = on.run(
                    sampling.sample(
                        dispatcher.generate,
                        step=target.step,
                        policy_version=0,
                        on_response=on_response,
                    )
                )
    reports = {name: report_set(found) for name, found in groups.items()}
    _write(target, config, sampling.sets, groups, reports, seconds=time.monotonic() - started)
    console = open_console()
    console.print(result_table(reports))
    console.print(LEGEND, style="dim", highlight=False)
    if told := ungraded_responses(groups, () if graders is None else graders.first_failures):
        sys.stderr.write(f"{told}\n")
    for file in (REPORT_FILE, SAMPLES_FILE):
        sys.stdout.write(f"{config.run_dir / file}\n")
    return 0


def _sampling(config: RunConfig, names: str | None, graders: GraderPool | None) -> HeldoutSampling:
    """The chosen sets, read before any engine starts."""
    path = config.model.tokenizer or config.model.path
    try:
        check_graders(config.reward)
        tokenizer = load_tokenizer(path, trust_remote_code=config.model.trust_remote_code)
        sets = _chosen(read_heldout(config, tokenizer), names)
        stops = stop_token_ids(config.model.path, tokenizer)
    except (ValueError, GraderStartError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(str(error)) from error
    if graders is not None:
        graders.start()
    return HeldoutSampling(
        sets=sets,
        decode=tokenizer.decode,
        stop_token_ids=stops,
        max_response_tokens=config.rollout.max_response_tokens,
        seed=config.seed,
        graders=graders,
        grader_threads=1 if graders is None else config.reward.workers,
    )


def _chosen(sets: Sequence[HeldoutSet], names: str | None) -> tuple[HeldoutSet, ...]:
    known = [found.name for found in sets]
    wanted = known if names is None else names.split(",")
    absent = [name for name in wanted if name not in known]
    if absent:
        raise ConfigError(f"--sets {absent[0]!r}: no such set; sets are {', '.join(known)}")
    return tuple(found for found in sets if found.name in wanted)


@contextlib.contextmanager
def _graders(config: RunConfig) -> Iterator[GraderPool | None]:
    """Workers for graders that need them, not started; none left afterwards."""
    pool = GraderPool.of_run(config.reward, config.run_dir)
    try:
        yield pool
    finally:
        if pool is not None:
            pool.close()


@contextlib.contextmanager
def _served_folder(target: Target, config: RunConfig) -> Iterator[Path]:
    """The Hugging Face folder with the weights; an export of a checkpoint goes away again."""
    if target.folder is not None:
        yield target.folder
        return
    assert target.checkpoint is not None, "a target has a folder or a checkpoint"
    config.run_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hf_", dir=config.run_dir) as folder:
        out = Path(folder) / "model"
        try:
            export_checkpoint(target.checkpoint, config, out)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        yield out


def _write(
    target: Target,
    config: RunConfig,
    sets: Sequence[HeldoutSet],
    groups: Sets,
    reports: Mapping[str, SetReport],
    *,
    seconds: float,
) -> None:
    write_samples(config.run_dir / SAMPLES_FILE, target.step, groups)
    found = reports_json(reports)
    write_report(
        config.run_dir / REPORT_FILE,
        {
            "weights": str(target.source),
            "step": target.step,
            "seed": config.seed,
            "seconds": round(seconds, 1),
            "max_response_tokens": config.rollout.max_response_tokens,
            "sets": {s.name: {"protocol": _protocol(s), "result": found[s.name]} for s in sets},
        },
    )


def _protocol(found: HeldoutSet) -> dict[str, object]:
    """How a set was read and sampled."""
    report = found.report
    return {
        "file": str(report.path),
        "rows": report.rows,
        "copies": report.copies,
        "bad_rows": len(report.bad),
        "overlong_prompts": len(report.overlong_lines or ()),
        "prompts": len(found.prompts),
        "samples_per_prompt": found.file.samples_per_prompt,
        "temperature": found.file.temperature,
        "top_p": found.file.top_p,
        "prompt_format": found.file.data.prompt_format,
        "answer_style": found.file.reward.style,
        "reward_plugin": found.file.reward.plugin,
    }
