"""Training runs through the command line, on tiny models with random weights."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_dapo.config import RunConfig, load_config
from megatron_dapo.config.load import RESOLVED_FILE
from megatron_dapo.observability.run_files import METRICS_FILE, read_metrics
from tests.conftest import REPOSITORY
from tests.e2e.rewards import GRADED_FILE
from tests.tiny_models import save_tiny_model

VOCABULARY = 512
PROMPTS = 40
LONGEST_RUN_SECONDS = 1200
CANARY = "hunter2canary"
SECRETS = {name: f"{CANARY}{name}" for name in ("WANDB_API_KEY", "HF_TOKEN", "MY_PASSWORD")}
"""In the environment of every run; no file of it and no message may show any."""
OFFLINE = {"WANDB_MODE": "offline"}
SECTIONS: dict[str, dict[str, object]] = {
    "data": {"prompt_format": "plain", "max_prompt_tokens": 16},
    "training": {"steps": 2, "responses_per_update": 8, "tokens_per_micro_batch": 128},
    "optimizer": {"lr": 1e-3, "warmup_steps": 0},
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_response_tokens": 16},
    "reward": {
        "plugin": "tests.e2e.rewards:even_ending",
        "plugin_environment": [GRADED_FILE],
        "overlong_buffer_tokens": 4,
    },
    "checkpoint": {"every": 0},
    "evaluation": {"every": 0, "samples_per_prompt": 2, "max_prompts": 6},
}
"""Two updates a step, of about two micro-batches each on one data-parallel rank."""


@dataclass(frozen=True)
class Start:
    """What a run starts from: model/, tokenizer/, train.jsonl and run.yaml in one folder."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def file(self) -> Path:
        return self.folder / "run.yaml"


def make_start(folder: Path, family: str) -> Start:
    """Write a start; no token is padding, whose embedding Hugging Face would not train."""
    start = Start(folder)
    save_tiny_model(start.model, family, pad_token_id=None)
    word_tokenizer().save_pretrained(folder / "tokenizer")
    with (folder / "train.jsonl").open("w") as file:
        for index in range(PROMPTS):
            words = [f"w{3 + (7 * index + column) % 500}" for column in range(5 + index % 4)]
            row = {
                "prompt": [{"role": "user", "content": " ".join(words)}],
                "reward_model": {"ground_truth": str(index)},
            }
            file.write(json.dumps(row) + "\n")
    tree = SECTIONS | {
        "device": "cpu",
        "run_dir": str(folder / "run"),
        "model": {
            "path": str(start.model),
            "tokenizer": str(folder / "tokenizer"),
            "dtype": "float32",
        },
        "data": SECTIONS["data"] | dict.fromkeys(("train", "heldout"), str(folder / "train.jsonl")),
    }
    start.file.write_text(yaml.safe_dump(tree))
    return start


def word_tokenizer() -> PreTrainedTokenizerFast:
    """w3 .. w511, split at spaces; 2 ends a text."""
    words = ["<pad>", "<unk>", "<end>", *(f"w{number}" for number in range(3, VOCABULARY))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", unk_token="<unk>"
    )


def depends_on_training(name: str) -> bool:
    """A metric of neither the clock, nor what an update moved, nor which surplus was under way."""
    clock = ("timing_s/", "perf/", "weight_sync/", "engine/")
    under_way = ("filter/discarded", "filter/put_back", "rollout/tokens_")
    return not name.startswith((*clock, *under_way)) and "seconds" not in name


def same_number(one: float, other: float) -> bool:
    """Equal to the last bit, or both NaN."""
    return one == other or (math.isnan(one) and math.isnan(other))


@dataclass(frozen=True)
class Finished:
    """A command that ended."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def output(self) -> str:
        return self.out + self.err


def command_line(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "megatron_dapo.cli.main", *map(str, arguments)]


def command_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The reward plug-in lies in this repository; a user's secrets; the rest is the caller's."""
    return os.environ | {"PYTHONPATH": str(REPOSITORY)} | SECRETS | OFFLINE | (extra or {})


def command(*arguments: object, environment: Mapping[str, str] | None = None) -> Finished:
    """Run `megatron-dapo ARGUMENTS` in a process of its own, to its end."""
    started = time.monotonic()
    done = subprocess.run(
        command_line(*arguments),
        env=command_environment(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONGEST_RUN_SECONDS,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr, time.monotonic() - started)


@dataclass(frozen=True)
class Run:
    """A finished run directory, and the start of its model."""

    start: Start
    folder: Path
    finished: Finished

    @property
    def config(self) -> RunConfig:
        return load_config(self.folder / RESOLVED_FILE)

    @property
    def hf(self) -> Path:
        return self.folder / "hf"

    @property
    def records(self) -> dict[int, dict[str, float]]:
        """Metrics by step; 0 where the start was evaluated."""
        return read_metrics(self.folder / METRICS_FILE)

    @property
    def metrics(self) -> dict[int, dict[str, float]]:
        """Metrics of the steps that trained."""
        return {step: record for step, record in self.records.items() if step > 0}


def train(start: Start, name: str, *overrides: str) -> Run:
    """`megatron-dapo train` with run directory `name` beside the start; it must succeed."""
    folder = start.folder / name
    finished = command("train", start.file, f"run_dir={folder}", *overrides)
    assert finished.code == 0, finished.output
    return Run(start, folder, finished)
