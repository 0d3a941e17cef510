"""Reward functions that behave badly when the response asks for it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from megatron_dapo.reward.plugin import RewardMeta


def act(prompt: str, response: str, answer: str, meta: RewardMeta) -> float | dict[str, float]:
    """What `response` names; 1.0 where it names nothing."""
    deed, _, rest = response.partition(" ")
    return DEEDS[deed](rest) if deed in DEEDS else 1.0


def hang(_: str) -> float:
    while True:
        pass


def sleep(seconds: str) -> float:
    time.sleep(float(seconds))
    return 1.0


def meet(where: str) -> float:
    """`FOLDER N`: come, and go once N files are there."""
    folder, _, count = where.rpartition(" ")
    Path(folder, str(os.getpid())).touch()
    while len(os.listdir(folder)) < int(count):
        time.sleep(0.01)
    return 1.0


def end_slowly(_: str) -> float:
    """The connection goes long before the process, as on a machine that is very busy."""
    os.closerange(3, 64)
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGXCPU)
    return 1.0


def tell_pid(seconds: str) -> dict[str, float]:
    time.sleep(float(seconds))
    return {"accuracy": 1.0, "pid": float(os.getpid())}


def hang_in_c(_: str) -> float:
    return float(9**9**9 > 0)


def ignore_signals(_: str) -> float:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGXCPU):
        signal.signal(number, signal.SIG_IGN)
    return hang("")


def fork_and_return(_: str) -> float:
    """Both processes come back from the call."""
    os.fork()
    return 1.0


def stop_children(_: str) -> dict[str, float]:
    """A child that forks and one that execs end by SIGTERM, as without a worker around them."""
    forked = os.fork()
    if forked == 0:
        time.sleep(600)
    os.kill(forked, signal.SIGTERM)
    started = subprocess.Popen(["sleep", "600"])
    started.terminate()
    return {"forked": float(os.waitpid(forked, 0)[1]), "started": float(started.wait())}


def leave_a_child(file: str) -> float:
    """A grandchild in a session of its own, which writes its number and lives on; then hang."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            draft = Path(f"{file}.draft")
            draft.write_text(str(os.getpid()))
            draft.rename(file)
            time.sleep(600)
        os._exit(0)
    while True:
        time.sleep(0.01)


def fork_for_ever(_: str) -> float:
    while True:
        if os.fork() == 0:
            time.sleep(600)
        time.sleep(0.001)


def allocate(_: str) -> float:
    return float(len(bytearray(100 << 30)))


def allocate_slowly(_: str) -> float:
    held = []
    while True:
        held.append(bytearray(1 << 20))


def kill_itself(_: str) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def leave(_: str) -> float:
    sys.exit(3)


def exit_hard(_: str) -> float:
    os._exit(0)


def crash(_: str) -> float:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 1.0


def say(text: str) -> float:
    """Everywhere: a reply must not be what is printed."""
    sys.stdout.write(f'{{"id": 1, "value": true}} {text}\n')
    os.write(1, b'{"id": 2, "value": {"": 5.0}}\n')
    subprocess.run(["echo", "from a child"], check=True)
    return 1.0


def read_input(_: str) -> float:
    return float(len(sys.stdin.read()))


def forge(_: str) -> float:
    """Write to whatever is open."""
    _write_everywhere(b'{"id": "x"}\n')
    return 1.0


def forge_depth(_: str) -> float:
    """A reply that takes a parser deeper than it can go."""
    _write_everywhere(b"[" * 200_000 + b"\n")
    return 1.0


def forge_size(_: str) -> float:
    """The right reply, but for a number that no float holds."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and "job" not in frame.f_locals:
        frame = frame.f_back
    assert frame is not None
    number = frame.f_locals["job"]["id"]
    _write_everywhere(b'{"id": %d, "value": {"": 1%s}}\n' % (number, b"0" * 400))
    return 1.0


def _write_everywhere(line: bytes) -> None:
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, line)
        except OSError:
            continue


def connect(address: str) -> dict[str, float]:
    """1 where a connection to `address` comes about."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return {"accuracy": 1.0, "connected": 0.0}
    return {"accuracy": 1.0, "connected": 1.0}


def look_for(text: str) -> dict[str, float]:
    """1 where the environment, or that of a parent as /proc shows it, holds `text`."""
    own = any(text in value for value in os.environ.values())
    return {"accuracy": 1.0, "found": float(own)}


def see(name: str) -> dict[str, float]:
    return {"accuracy": 1.0, "seen": float(name in os.environ)}


def imported(name: str) -> dict[str, float]:
    return {"accuracy": 1.0, "imported": float(name in sys.modules)}


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def fail(kind: str) -> float:
    if kind == "unprintable":
        raise Unprintable
    if kind == "interrupt":
        raise KeyboardInterrupt
    if kind == "deep":
        return fail(kind)
    raise ArithmeticError(f"cannot grade {kind} \udc80")


DEEDS = {
    function.__name__: function
    for function in (
        hang,
        sleep,
        meet,
        end_slowly,
        tell_pid,
        hang_in_c,
        ignore_signals,
        fork_and_return,
        stop_children,
        leave_a_child,
        fork_for_ever,
        allocate,
        allocate_slowly,
        kill_itself,
        leave,
        exit_hard,
        crash,
        say,
        read_input,
        forge,
        forge_depth,
        forge_size,
        connect,
        look_for,
        see,
        imported,
        fail,
    )
}
