"""The `megatron-dapo` command. Heavy packages are imported by the command that needs them.

Exit codes: 0 done, 75 pre-empted and saved (start it again), 78 bad configuration, 1 crash.
"""

from __future__ import annotations

import argparse
import errno
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.config import ConfigError, check_run, load_config
from megatron_dapo.config.errors import EXIT_CONFIG, EXIT_FAILED, RunFailed
from megatron_dapo.config.run_dir_checks import run_dir_problems
from megatron_dapo.config.wrong_target import instead, what_is

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""A disk that takes nothing: no fault of the program."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code of the process."""
    options = parse(build_parser(), argv)
    try:
        code: int = options.run(options)
    except ConfigError as error:
        sys.stderr.write("".join(f"configuration: {problem}\n" for problem in error.problems))
        return EXIT_CONFIG
    except PermissionError as error:
        sys.stderr.write(f"configuration: {error.filename}: permission denied. Make it readable\n")
        return EXIT_CONFIG
    except RunFailed as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILED
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        sys.stderr.write(f"{error}. Make room, or name another place, and start again\n")
        return EXIT_FAILED
    except KeyboardInterrupt:  # before any rank runs; from then on the launcher listens
        return 128 + signal.SIGINT
    return code


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments of a command, with flags before, between or after its overrides.

    argparse fills `overrides` from the first run of positionals alone and leaves later ones over.
    """
    options, left = parser.parse_known_args(argv)
    wrong = [word for word in left if "=" not in word or word.startswith("-")]
    if wrong or (left and "overrides" not in options):
        parser.error(f"unrecognized arguments: {' '.join(wrong or left)}")
    if left:
        options.overrides = [*options.overrides, *left]
    return options


def build_parser() -> argparse.ArgumentParser:
    """Every command with its arguments."""
    parser = argparse.ArgumentParser(
        prog="megatron-dapo", description="DAPO reinforcement learning on Megatron-core and vLLM."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    _add_eval(commands)
    _add_plan(commands)
    _add_convert(commands)
    _add_export(commands)
    _add_report(commands)
    _add_replay(commands)
    _add_data(commands)
    _add_doctor(commands)
    return parser


Commands = argparse._SubParsersAction  # the type that add_subparsers returns


def _add_train(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("train", help="train on this machine, or check with --dry-run")
    parser.add_argument("config", type=Path, help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="resolve, check, print ranks, batches and memory; build nothing",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start a new run: refuse a run_dir that holds anything, instead of going on in it",
    )
    parser.set_defaults(run=_train)


def _add_eval(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("eval", help="held-out accuracy of a model, checkpoint or run")
    parser.add_argument(
        "target",
        type=Path,
        metavar="CONFIG|RUN_DIR|CHECKPOINT|HF_FOLDER",
        help="YAML file (its model.path), run or step of it, or Hugging Face folder",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--sets", metavar="NAME[,NAME]", help="only these sets; default: all")
    parser.add_argument(
        "--config", type=Path, help="YAML file, for a Hugging Face folder of no run"
    )
    parser.add_argument("--out", type=Path, help="folder to write to; default: eval in the run's")
    parser.set_defaults(run=_eval)


def _add_plan(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("plan", help="what a weight update moves, and memory of each rank")
    parser.add_argument("config", type=Path, help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--json", action="store_true", help="bytes of every rank, for programs")
    parser.set_defaults(run=_plan)


def _add_convert(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("convert", help="Hugging Face folder -> Megatron checkpoint")
    parser.add_argument("hf_folder", type=Path, metavar="HF_FOLDER")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("overrides", nargs="*", metavar="parallel.key=value")
    parser.set_defaults(run=_convert)


def _add_export(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("export", help="checkpoint of a run -> Hugging Face folder")
    parser.add_argument("checkpoint", type=Path, metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.set_defaults(run=_export)


def _add_report(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("report", help="draw the curves of a run")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.set_defaults(run=_report)


def _add_data(commands: Commands[argparse.ArgumentParser]) -> None:
    from megatron_dapo.cli.data import add_data_commands

    add_data_commands(commands.add_parser("data", help="check, clean and rewrite prompt files"))


def _add_doctor(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("doctor", help="versions, devices, and what is missing")
    parser.add_argument("--no-gpu", action="store_true", help="do not look for a CUDA device")
    parser.set_defaults(run=_doctor)


def _train(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.overrides)
    if options.fresh:
        _require_empty(config.run_dir)
    if options.dry_run:
        from megatron_dapo.cli.dry_run import dry_run

        return dry_run(config)
    check_run(config)
    from megatron_dapo.cli.launch import launch_training

    return launch_training(config)


def _require_empty(run_dir: Path) -> None:
    if problems := list(run_dir_problems(run_dir)):
        raise ConfigError(problems)
    if run_dir.is_dir() and any(run_dir.iterdir()):
        found = ", ".join(sorted(path.name for path in run_dir.iterdir())[:5])
        raise ConfigError(
            f"--fresh: run_dir={run_dir} is not empty (it holds {found}). Name another run_dir, "
            "move this one away, or leave --fresh out to go on with the run in it"
        )


def _eval(options: argparse.Namespace) -> int:
    from megatron_dapo.cli.eval import eval_main

    return eval_main(options)


def _plan(options: argparse.Namespace) -> int:
    from megatron_dapo.cli.plan import plan_main

    return plan_main(options)


def _convert(options: argparse.Namespace) -> int:
    from megatron_dapo.cli.convert import convert_main

    return convert_main(options)


def _export(options: argparse.Namespace) -> int:
    from megatron_dapo.cli.export import export_main

    return export_main(options)


def _add_replay(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("replay", help="run an update with a broken gradient again")
    parser.add_argument("dump", type=Path, metavar="RUN_DIR/dumps/step_N")
    parser.set_defaults(run=_replay)


def _replay(options: argparse.Namespace) -> int:
    from megatron_dapo.cli.replay import replay_dump

    return replay_dump(options.dump)


def _report(options: argparse.Namespace) -> int:
    from megatron_dapo.observability.report import write_report
    from megatron_dapo.observability.run_files import METRICS_FILE

    folder = options.run_dir
    try:
        report = write_report(folder)
    except FileNotFoundError as error:
        raise ConfigError(
            f"RUN_DIR={folder} {what_is(folder)}; a report needs the directory of a run that has "
            f"logged a step (in {METRICS_FILE}).{instead(folder)}"
        ) from error
    except (ImportError, OSError) as error:
        raise ConfigError(f"RUN_DIR={folder}: {error}") from error
    sys.stdout.write(f"{report}\n")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from megatron_dapo.cli.doctor import doctor

    return doctor(look_for_gpu=not options.no_gpu)


if __name__ == "__main__":
    sys.exit(main())
