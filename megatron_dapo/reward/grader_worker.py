"""Worker of the grader pool: one call at a time on untrusted text, inside limits.

Run as a script by `GraderProcess`, in a session of its own. Standard library only, until the first
message says what to import. It is a fence against accidents, not against a determined attacker:
code in here may read and write the files of its user.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
LONGEST_TRACEBACK = 8192
"""Characters of a traceback that are sent back, its end."""
NO_FORMULA = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError),
    *(SyntaxError, TypeError, ValueError),
)
"""What math-verify raises on text that it cannot read: a wrong answer, no failure of ours."""

Job = Mapping[str, object]
Call = Callable[[Job], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="process that must be alive")
    parent: int = parser.parse_args().parent
    _outlive_stop_signals()
    channel = _take_channel()
    with channel.makefile("rb") as lines:
        setup = json.loads(lines.readline() or "null")
        if setup is None:
            return
        isolated = setup["network"] or _leave_network()
        _prctl(PR_SET_CHILD_SUBREAPER, 1)  # what the call starts stays below, to be ended with it
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after the last change of credentials
        if os.getppid() != parent:
            return
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        calls: list[Call] = []
        reply = _attempt(lambda job: calls.append(_load(job)), setup)
        _send(channel, reply | {"isolated": isolated})
        if not calls:
            return
        _limit_memory(setup["memory_mib"])
        with contextlib.suppress(ConnectionError):  # the parent ends workers without a word
            for line in lines:
                _limit_cpu(setup["cpu_seconds"])
                _send(channel, _attempt(calls[0], json.loads(line)))


def _outlive_stop_signals() -> None:
    """SLURM signals every process of a step, and the trainers still need their graders then.

    What the calls start must be as usual: exec ends handlers (not so ignored signals), and a fork
    gets the usual ones before it hears any.
    """

    def hear(handler: Callable[..., None] | signal.Handlers) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, handler)

    def mask(how: int) -> None:
        signal.pthread_sigmask(how, STOP_SIGNALS)

    def begin_as_usual() -> None:
        hear(signal.SIG_DFL)
        mask(signal.SIG_UNBLOCK)

    hear(lambda *_: None)
    os.register_at_fork(
        before=lambda: mask(signal.SIG_BLOCK),
        after_in_parent=lambda: mask(signal.SIG_UNBLOCK),
        after_in_child=begin_as_usual,
    )


def _take_channel() -> socket.socket:
    """The parent's socket, moved away from standard input, where a call could read from it."""
    channel = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return channel


def _send(channel: socket.socket, reply: Mapping[str, object]) -> None:
    channel.sendall(json.dumps(reply).encode() + b"\n")


def _attempt(call: Call, job: Job) -> dict[str, object]:
    """Reply with the value of `call(job)`, or with what it raised, whatever that is."""
    own = os.getpid()
    reply: dict[str, object] = {"id": job["id"]}
    try:
        reply["value"] = call(job)
    except BaseException as error:
        text = traceback.format_exc()
        reply["error"] = text.strip().rpartition("\n")[2][:LONGEST_TRACEBACK]
        reply["traceback"] = text[-LONGEST_TRACEBACK:]
        reply["out_of_memory"] = isinstance(error, MemoryError)
    if os.getpid() != own:
        os._exit(0)  # a fork came back from the call; only the worker itself answers
    return reply


# --- what is called -----------------------------------------------------------------------------


def _load(setup: Job) -> Call:
    """Import what the setup names: the user's function, or math-verify."""
    sys.path[:] = cast(list[str], setup["path"])
    if setup["plugin"] is None:
        return _load_math_verify()
    from megatron_dapo.reward.plugin import RewardMeta, check_parts, load_plugin

    function = load_plugin(str(setup["plugin"]))

    def call(job: Job) -> dict[str, float]:
        meta = RewardMeta(**job["meta"])  # type: ignore[arg-type]
        result = function(str(job["prompt"]), str(job["response"]), str(job["answer"]), meta)
        named = dict(result) if isinstance(result, Mapping) else {"": result}
        values = {str(name): _as_number(value) for name, value in named.items()}
        if not values or not math.isfinite(math.fsum(values.values())):
            raise ValueError(f"a reward function must return finite numbers, not {result!r:.200}")
        check_parts(values)
        return values

    return call


def _as_number(value: object) -> float:
    """What a reward function returned; text is no number, even where it holds digits."""
    if isinstance(value, str | bytes | bytearray):
        raise TypeError(f"a reward function must return numbers, not {value!r:.200}")
    return float(value)  # type: ignore[arg-type]


def _load_math_verify() -> Call:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ValueError(
            "reward.math_verify=true needs the package math-verify "
            f'({error}); install it with: pip install "megatron_dapo[math]"'
        ) from error

    def read(text: object) -> list[object]:
        return parse(f"${str(text).replace('$', ' ')}$", parsing_timeout=None, raise_on_error=True)

    def call(job: Job) -> bool:
        truth = read(job["truth"])
        try:
            answer = read(job["answer"])
        except NO_FORMULA:
            return False
        return bool(verify(truth, answer, timeout_seconds=None, raise_on_error=True))

    call({"truth": "2", "answer": "\\frac{4}{2}"})  # sympy loads much on first use
    return call


# --- limits -------------------------------------------------------------------------------------


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def _leave_network() -> bool:
    """Into a network namespace without any interface; False where the kernel refuses."""
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    if unshare(CLONE_NEWNET) == 0:
        return True
    user, group = os.getuid(), os.getgid()
    if unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        return False
    with contextlib.suppress(OSError):  # without a map the worker is nobody, which does as well
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True


def _limit_memory(mib: int) -> None:
    """Address space: what the imports took, and `mib` more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_cpu(seconds: int) -> None:
    """CPU time of the next call; the kernel ends the worker that takes more (SIGXCPU)."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = math.ceil(resource.getrusage(resource.RUSAGE_SELF).ru_utime) + seconds
    soft += math.ceil(resource.getrusage(resource.RUSAGE_SELF).ru_stime)
    if hard == resource.RLIM_INFINITY or soft < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


if __name__ == "__main__":
    main()
