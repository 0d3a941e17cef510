"""Make the quickstart's tokenizer, model and prompts from nothing, on one CPU core.

The task is to add four digits. A model of 115,136 parameters first learns it by imitation,
from demonstrations of two kinds:

    careful    3+8=11 / 11+5=16 / 16+9=25 / Answer: 25        (one in twenty slips)
    careless   Answer: 17                                      (a guess)

Most demonstrations are careless. So the warm model can add but seldom does: it answers about
three prompts in ten right. That is the gap that reinforcement learning closes.

    python examples/quickstart/prepare.py
    python examples/quickstart/prepare.py --family qwen3_moe --folder runs/moe_start

The second makes a mixture of experts, for the same prompts and tokenizer:

    megatron-dapo train examples/quickstart/dapo.yaml model.path=runs/moe_start/model \\
        run_dir=runs/quickstart_moe
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

logger = logging.getLogger("quickstart")

FOLDER = Path("runs/quickstart_start")
FAMILIES: dict[str, dict[str, object]] = {
    "qwen2": {"num_attention_heads": 2},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
}
"""What each family adds to the common shape."""
TERMS = 4
PROMPT_TOKENS = 2 * TERMS + 1  # four digits, three plus signs, "=" and a newline
MAX_RESPONSE_TOKENS = 32
HELDOUT_PROMPTS = 256
VOCABULARY = 128  # divides by every tensor-parallel size of a small machine

Problem = tuple[int, ...]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer: every number below 100 is one token, and so is "Answer:"."""
    words = ["<|endoftext|>", "<|pad|>", "<unk>", *map(str, range(100)), *"+-*=;() \n", "Answer:"]
    words += [f"<|extra_{index}|>" for index in range(VOCABULARY - len(words))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    pieces = Regex(r"Answer:|\d{1,2}|[\s\S]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pieces, "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def build_model(family: str, *, seed: int) -> PreTrainedModel:
    """A float32 model of two layers with random weights; its heads have size 32."""
    shape: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 1,
    }
    config = AutoConfig.for_model(family, **shape | FAMILIES[family])
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def split_problems(*, seed: int) -> tuple[list[Problem], list[Problem]]:
    """All ways to write four digits 1-9 in a row, shuffled: (training, held out), disjoint."""
    problems = list(itertools.product(range(1, 10), repeat=TERMS))
    random.Random(seed).shuffle(problems)
    return problems[HELDOUT_PROMPTS:], problems[:HELDOUT_PROMPTS]


def prompt_text(problem: Problem) -> str:
    return "+".join(map(str, problem)) + "=\n"


def careful_answer(problem: Problem, *, slip_at: int | None = None) -> str:
    """Partial sums, a line each, then the answer; the sum at `slip_at` comes out one too high."""
    lines, total = [], problem[0]
    for position, term in enumerate(problem[1:], start=1):
        partial = total + term + (position == slip_at)
        lines.append(f"{total}+{term}={partial}")
        total = partial
    return "\n".join([*lines, f"Answer: {total}"])


def demonstration(
    problem: Problem, rng: random.Random, *, careful: float = 0.3, slips: float = 0.05
) -> str:
    """What the warm-up imitates: careful with probability `careful`, else a guess."""
    if rng.random() >= careful:
        return f"Answer: {rng.randint(TERMS, 9 * TERMS)}"
    return careful_answer(
        problem, slip_at=rng.randrange(1, TERMS) if rng.random() < slips else None
    )


def imitation_batch(
    tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem], rng: random.Random
) -> tuple[Tensor, Tensor]:
    """(token ids, labels), both [problems, tokens]; only responses and their end are labelled."""
    texts = [
        prompt_text(problem) + demonstration(problem, rng) + tokenizer.eos_token
        for problem in problems
    ]
    encoded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    labels = encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)
    labels[:, :PROMPT_TOKENS] = -100
    return encoded["input_ids"], labels


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    *,
    steps: int,
    seed: int,
    batch_size: int = 128,
    lr: float = 2e-3,
) -> None:
    """Train `model` in place to imitate demonstrations, with a cosine learning rate."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda done: min(1.0, (done + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * done / steps)),
    )
    model.train()
    started = time.monotonic()
    for step in range(1, steps + 1):
        tokens, labels = imitation_batch(tokenizer, rng.choices(problems, k=batch_size), rng)
        logits = model(input_ids=tokens).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            seconds = time.monotonic() - started
            logger.info("warm-up %d/%d loss %.3f, %.0f s", step, steps, loss.item(), seconds)


@torch.no_grad()
def sampled_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    *,
    seed: int,
) -> float:
    """Share of problems answered right by one response sampled at temperature 1."""
    torch.manual_seed(seed)
    model.eval()
    prompts = tokenizer([prompt_text(problem) for problem in problems], return_tensors="pt")
    sampled = model.generate(  # type: ignore[operator]
        **prompts, do_sample=True, top_k=0, max_new_tokens=MAX_RESPONSE_TOKENS
    )
    responses = tokenizer.batch_decode(sampled[:, PROMPT_TOKENS:], skip_special_tokens=True)
    right = sum(
        response.rpartition("Answer:")[2].strip() == str(sum(problem))
        for response, problem in zip(responses, problems, strict=True)
    )
    return right / len(problems)


def write_rows(path: Path, problems: Sequence[Problem], *, name: str) -> None:
    """JSONL in the row format of DAPO-Math-17k."""
    with path.open("w", encoding="utf-8") as file:
        for index, problem in enumerate(problems):
            row = {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": prompt_text(problem)}],
                "ability": "MATH",
                "reward_model": {"ground_truth": str(sum(problem)), "style": "rule"},
                "extra_info": {"index": f"{name}-{index}"},
            }
            file.write(json.dumps(row) + "\n")


def prepare(
    folder: Path = FOLDER, *, family: str = "qwen3", seed: int = 0, warmup_steps: int = 800
) -> None:
    """Write model/, tokenizer/, train.jsonl and heldout.jsonl under `folder`.

    `folder` appears only when it is complete. The same seed gives the same bytes.
    """
    draft = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    training, heldout = split_problems(seed=seed)
    write_rows(draft / "train.jsonl", training, name="train")
    write_rows(draft / "heldout.jsonl", heldout, name="heldout")
    tokenizer, model = build_tokenizer(), build_model(family, seed=seed)
    logger.info("%s model with %s parameters", family, f"{model.num_parameters():,}")
    if warmup_steps:
        warm_up(model, tokenizer, training, steps=warmup_steps, seed=seed)
        accuracy = sampled_accuracy(model, tokenizer, heldout, seed=seed)
        logger.info("warm model: %.0f %% of held-out prompts right", 100 * accuracy)
    model.save_pretrained(draft / "model")
    # Apart as well: beside a qwen2 config.json transformers would swap its pre-tokenizer.
    for name in ("model", "tokenizer"):
        tokenizer.save_pretrained(draft / name)
    draft.rename(folder)
    logger.info("wrote %s", folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="must not exist yet")
    parser.add_argument("--family", choices=tuple(FAMILIES), default="qwen3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warmup-steps", type=int, default=800, help="0: random weights")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if options.folder.exists():
        parser.error(f"{options.folder} exists: remove it or name another --folder")
    disable_progress_bar()
    torch.set_num_threads(1)
    prepare(
        options.folder,
        family=options.family,
        seed=options.seed,
        warmup_steps=options.warmup_steps,
    )


if __name__ == "__main__":
    main()
