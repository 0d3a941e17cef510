"""The exceptions that an engine's log names: what began a failure, not what it ended in.

vLLM runs an engine in several processes. When a worker fails, the engine core and the server above
it fail too, each with a traceback of its own that only says that something failed further up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MOST_CAUSES = 4
MOST_LINES = 4
"""Of one exception's text: some list all that is wrong."""
MOST_READ = 4000
"""Lines from the end of a log: one traceback a worker, of many workers."""
_PREFIX = re.compile(
    r"(?:(?P<process>\([^()]*\bpid=\d+\))(?: |$))?"
    r"(?:(?P<logged>(?:CRITICAL|DEBUG|ERROR|INFO|WARNING) \d\d-\d\d [\d:]+ \[[^\]]*\])(?: |$))?"
)
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning|Group)\b(?::|$)")
_CONCLUSION = re.compile(r"[A-Za-z_][\w.]*(?::\s|:?$)")
"""The first line of a traceback that is not indented."""
_TRACEBACK = "Traceback (most recent call last):"
_HARMLESS = ("DEBUG", "INFO", "WARNING")
"""Levels at which an exception is logged that is gone on from."""
_CONSEQUENCES = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "EngineDeadError",
    "See root cause above",
    "See stack trace",
)


def causes(log: str) -> list[str]:
    """Texts of the exceptions in `log`, each once, oldest first, a few of the last.

    Those that only refer to an earlier one are left out, unless there is no other.
    """
    found = list(dict.fromkeys(_exceptions(log.splitlines()[-MOST_READ:])))
    own = [text for text in found if not any(word in text for word in _CONSEQUENCES)]
    return (own or found)[-MOST_CAUSES:]


def _exceptions(lines: list[str]) -> Iterator[str]:
    """The last lines of every traceback; tracebacks of several processes may be mixed."""
    tracing: set[str] = set()
    ending: dict[str, list[str]] = {}
    for line in lines:
        prefix = _PREFIX.match(line)
        assert prefix is not None, "every part of the prefix may be missing"
        process, text = prefix["process"] or "", line[prefix.end() :]
        told = ending.get(process)
        if told is not None and _goes_on(text, prefix["logged"], told):
            told.append(text)
            continue
        if told is not None:
            yield _joined(ending.pop(process))
        if text == _TRACEBACK and not (prefix["logged"] or "").startswith(_HARMLESS):
            tracing.add(process)
        elif process in tracing and _CONCLUSION.match(text):
            tracing.remove(process)
            ending[process] = [f"{prefix['logged'] or ''}", text]
    for told in ending.values():
        yield _joined(told)


def _goes_on(text: str, logged: str | None, told: list[str]) -> bool:
    """Whether `text` is one more line of an exception: not another event of the log."""
    same_record = (logged or "") == told[0]
    return same_record and bool(text.strip()) and text != _TRACEBACK and not _is_event(text)


def _is_event(text: str) -> bool:
    chained = text.startswith(("During handling of", "The above exception"))
    return chained or bool(_EXCEPTION.match(text)) or text.startswith("Process ")


def _joined(told: list[str]) -> str:
    lines = told[1:]
    more = [f"  ... {len(lines) - MOST_LINES} more lines"] if len(lines) > MOST_LINES else []
    return "\n".join([*lines[:MOST_LINES], *more])
