"""`megatron-dapo data`: look at prompt files, clean them, and make them ready for a run."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from megatron_dapo.config import ConfigError
from megatron_dapo.config.keys import refuse_unknown_keys
from megatron_dapo.config.load import explain
from megatron_dapo.config.schema import DataConfig

if TYPE_CHECKING:
    from megatron_dapo.data.selection import PromptReport
    from megatron_dapo.data.tokenizer import Tokenizer

KEYS = "data.key=value"
"""Columns and policies are given as a run's configuration gives them."""


def add_data_commands(parser: argparse.ArgumentParser) -> None:
    """The four commands with their arguments."""
    commands = parser.add_subparsers(required=True, metavar="WHAT")
    check = _command(
        commands, "check", "count rows, copies and contradictions; write nothing", _check
    )
    check.add_argument("--report", type=Path, help="JSON file with every line number")
    prepare = _command(commands, "prepare", "write a clean file and a report", _prepare)
    prepare.add_argument("--out", type=Path, required=True, help=".parquet or .jsonl file")
    prepare.add_argument(
        "--contradictory",
        choices=("drop", "keep"),
        default="drop",
        help="rows whose answer another row denies (default: drop)",
    )
    _add_integer_answers(commands)
    decontaminate = _command(
        commands,
        "decontaminate",
        "find rows that a benchmark asks, too; write the others",
        _decontaminate,
        tokenizer=False,
    )
    decontaminate.add_argument(
        "--against", nargs="+", required=True, metavar="FILE[:COLUMN]", help="benchmarks"
    )
    decontaminate.add_argument("--out", type=Path, help=".parquet or .jsonl file without them")
    decontaminate.add_argument("--report", type=Path, help="JSON file with every pair")
    decontaminate.add_argument("--ngram-words", type=int, default=8, help="default: 8")
    decontaminate.add_argument(
        "--least-share", type=float, default=0.5, help="of the n-grams of a question; default: 0.5"
    )


def _add_integer_answers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "integer-answers",
        "rewrite problems through a language model so that answers are integers",
        _integer_answers,
        tokenizer=False,
    )
    parser.add_argument("--out", type=Path, required=True, help=".parquet or .jsonl file")
    parser.add_argument(
        "--endpoint",
        required=True,
        help="OpenAI-compatible server: unix:/path or http://127.0.0.1:port",
    )
    parser.add_argument("--model", help="served name; default: the server's first")
    parser.add_argument("--remote", action="store_true", help="allow a server elsewhere")
    parser.add_argument("--api-key-variable", help="environment variable with the server's key")
    parser.add_argument("--attempts", type=int, default=3, help="replies a row; default: 3")
    parser.add_argument("--concurrency", type=int, default=64, help="rows at once; default: 64")
    parser.add_argument("--temperature", type=float, default=0.7, help="default: 0.7")
    parser.add_argument("--max-tokens", type=int, default=4096, help="of a reply; default: 4096")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling; default: 0")


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    about: str,
    run: Callable[[argparse.Namespace], int],
    *,
    tokenizer: bool = True,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=about)
    parser.add_argument(
        "file", metavar="FILE", help=".parquet, .jsonl, or a hub's owner/name[:file]"
    )
    parser.add_argument("overrides", nargs="*", metavar=KEYS)
    if tokenizer:
        parser.add_argument("--tokenizer", type=Path, help="folder; measures prompts in tokens")
    parser.set_defaults(run=run)
    return parser


def data_config(path: Path, overrides: Sequence[str]) -> DataConfig:
    """The data section that `overrides` describe; `data.` before a key may be left out.

    Raises:
        ConfigError: unknown key or wrong value.
    """
    items = [item if item.startswith("data.") else f"data.{item}" for item in overrides]
    try:
        tree = OmegaConf.to_container(OmegaConf.from_dotlist(items), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{' '.join(items)}: cannot be read as YAML: {error}") from error
    named = cast(dict[str, object], tree)
    refuse_unknown_keys(named, "an override")
    try:
        return DataConfig.model_validate({"train": path} | cast(dict, named.get("data", {})))
    except ValidationError as error:
        raise ConfigError(explain(found, "data") for found in error.errors()) from None


def _inputs(options: argparse.Namespace) -> tuple[Path, DataConfig]:
    from megatron_dapo.data.hub import HuggingFaceHub, find_file

    path = find_file(options.file, HuggingFaceHub())
    return path, data_config(path, options.overrides)


def _tokenizer(options: argparse.Namespace) -> Tokenizer | None:
    if options.tokenizer is None:
        return None
    from megatron_dapo.data.tokenizer import load_tokenizer

    return load_tokenizer(options.tokenizer)


def _check(options: argparse.Namespace) -> int:
    from megatron_dapo.data.row_files import check_report_file, report_content, write_json
    from megatron_dapo.data.selection import select_rows

    try:
        check_report_file(options.report)
        path, config = _inputs(options)
        selection = select_rows(path, config, _tokenizer(options))
    except ValueError as error:
        raise _refused(error) from error
    _show(selection.report)
    if options.report is not None:
        write_json(options.report, report_content(selection.report))
    if refusals := selection.refusals(config):
        raise ConfigError(refusals)
    return 0


def _prepare(options: argparse.Namespace) -> int:
    from megatron_dapo.data.prepare import prepare_file

    try:
        path, config = _inputs(options)
        prepared = prepare_file(
            path,
            options.out,
            config,
            tokenizer=_tokenizer(options),
            contradictory=options.contradictory,
        )
    except ValueError as error:
        raise _refused(error) from error
    _show(prepared.report)
    if prepared.contradictory:
        _say(f"left out as contradictory: {len(prepared.contradictory)} rows")
    _say(f"{options.out}: {prepared.written} rows; report {prepared.report_file}")
    return 0


def _integer_answers(options: argparse.Namespace) -> int:
    from megatron_dapo.data.chat_endpoint import ChatEndpoint
    from megatron_dapo.data.integer_answers import audit_path, check_options, integer_answers

    async def rewrite() -> Mapping[str, int]:
        counts = {"attempts": options.attempts, "concurrency": options.concurrency}
        check_options(options.out, **counts)
        path, config = _inputs(options)
        endpoint = ChatEndpoint(
            options.endpoint,
            model=options.model,
            remote=options.remote,
            api_key_variable=options.api_key_variable,
            temperature=options.temperature,
            max_tokens=options.max_tokens,
        )
        async with endpoint as model:
            return await integer_answers(
                path,
                options.out,
                config,
                model,
                **counts,
                seed=options.seed,
            )

    try:
        counts = asyncio.run(rewrite())
    except ValueError as error:
        raise _refused(error) from error
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    for what, count in sorted(counts.items()):
        _say(f"{count:8,} {what}")
    _say(f"{options.out}; every row: {audit_path(options.out)}")
    return 0


def _decontaminate(options: argparse.Namespace) -> int:
    from megatron_dapo.data.decontaminate import decontaminate_file, read_benchmark
    from megatron_dapo.data.hub import HuggingFaceHub, find_file

    try:
        path, config = _inputs(options)
        benchmarks = []
        for name in options.against:
            file, colon, column = name.rpartition(":")
            if not colon or Path(name).exists():
                file, column = name, config.prompt_column
            benchmarks.append(read_benchmark(find_file(file, HuggingFaceHub()), column))
        found = decontaminate_file(
            path,
            config,
            benchmarks,
            out=options.out,
            report=options.report,
            ngram_words=options.ngram_words,
            least_share=options.least_share,
        )
    except ValueError as error:
        raise _refused(error) from error
    for pair in found.overlaps:
        how = "the same question" if pair.exact else f"{pair.share:.0%} of its n-grams"
        _say(f"line {pair.line} and {pair.benchmark} line {pair.benchmark_line}: {how}")
    for benchmark in benchmarks:
        pairs = [pair for pair in found.overlaps if pair.benchmark == benchmark.path]
        exact = sum(pair.exact for pair in pairs)
        _say(f"{benchmark.path}: {len(pairs)} pairs, {exact} of them the same question")
    _say(f"{path}: {len(found.lines)} of {found.rows} rows overlap")
    if found.written is not None:
        _say(f"{options.out}: {found.written} rows")
    return 0


def _refused(error: ValueError) -> ConfigError:
    return error if isinstance(error, ConfigError) else ConfigError(str(error))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _show(report: PromptReport) -> None:
    from rich.markup import escape
    from rich.table import Table

    from megatron_dapo.cli.terminal import open_console
    from megatron_dapo.data.selection import listed

    table = Table(title=escape(str(report.path)), title_justify="left")
    for column in ("what", "count", "where"):
        table.add_column(column, justify="right" if column == "count" else "left")

    def add(what: str, count: int, where: str = "") -> None:
        table.add_row(what, f"{count:,}", where)

    add("rows", report.rows)
    for reason, count in report.bad_counts.items():
        lines = [bad.line for bad in report.bad if bad.reason == reason]
        add(f"bad: {reason}", count, f"lines {listed(lines)}")
    add("unique prompts", report.unique_prompts)
    fate = "dropped" if report.deduplicated else "kept"
    add(f"copies, {fate}", report.copies, f"of {len(report.duplicate_lines):,} prompts")
    groups = [f"({', '.join(map(str, lines))})" for lines in report.conflicting_lines]
    add(
        "asked alike, answered differently",
        len(groups),
        f"lines {listed(groups)}" if groups else "",
    )
    text = report.text_answer_lines
    add("answers that are no integers", len(text), f"lines {listed(text)}" if text else "")
    if report.overlong_lines is None:
        table.add_row(
            f"over {report.max_prompt_tokens} tokens", "-", "not measured: no --tokenizer"
        )
    else:
        fate = "dropped" if report.overlong_dropped else "cut on the left"
        over = report.overlong_lines
        add(
            f"over {report.max_prompt_tokens} tokens, {fate}",
            len(over),
            f"lines {listed(over)}" if over else "",
        )
    add("kept", report.kept)
    open_console().print(table)
