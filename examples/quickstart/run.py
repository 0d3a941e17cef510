"""The whole quickstart: make the model, train it with DAPO, say what came out.

    python examples/quickstart/run.py [section.key=value ...]

Exit code 0: trained, and more than 80 % of held-out prompts are answered right.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from megatron_dapo.checkpoint.completion import HF_FOLDER
from megatron_dapo.config import ConfigError, RunConfig, load_config
from megatron_dapo.observability.report import CURVE_FILE, REPORT_FILE, heldout_sets
from megatron_dapo.observability.run_files import METRICS_FILE, SAMPLES_FILE, read_metrics

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Path("examples/quickstart/dapo.yaml")
PREPARE = Path("examples/quickstart/prepare.py")
TARGET = 0.8


def main(overrides: list[str]) -> int:
    """Prepare if needed, train, report; returns the exit code."""
    os.chdir(ROOT)
    config = load_config(CONFIG, overrides)
    folder = config.model.path.parent
    if not folder.exists():
        prepared = subprocess.run([sys.executable, str(PREPARE), "--folder", str(folder)])
        if prepared.returncode != 0:
            print(f"preparing the model failed with exit code {prepared.returncode}")
            return prepared.returncode
    command = [sys.executable, "-m", "megatron_dapo.cli.main", "train", str(CONFIG), *overrides]
    trained = subprocess.run(command)
    if trained.returncode != 0:
        print(f"training failed with exit code {trained.returncode}; logs: {config.run_dir}/logs")
        return trained.returncode
    return summarise(config)


def summarise(config: RunConfig) -> int:
    """Print where the results are and the accuracy before and after; 0 when it is good."""
    run_dir = config.run_dir
    print()
    for what, where in {
        "metrics": run_dir / METRICS_FILE,
        "curves": run_dir / CURVE_FILE,
        "report": run_dir / REPORT_FILE,
        "samples": run_dir / SAMPLES_FILE,
        "model": run_dir / HF_FOLDER,
    }.items():
        print(f"{what:8} {os.path.relpath(where)}")
    metrics = read_metrics(run_dir / METRICS_FILE)
    accuracy = [
        values[name]
        for name in heldout_sets(metrics).values()
        for values in metrics.values()
        if name in values
    ]
    if not accuracy:
        print("held-out accuracy was not measured: evaluation.every is 0")
        return 1
    before, after = accuracy[0], accuracy[-1]
    print(f"held-out accuracy {100 * before:.0f} % before, {100 * after:.0f} % after")
    if after <= TARGET:
        print(f"expected more than {100 * TARGET:.0f} %: look at the curves and samples above")
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        sys.exit("\n".join(error.problems))
