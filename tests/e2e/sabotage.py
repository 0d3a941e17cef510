"""Breaks the first update of trained weights, from inside rank 0.

It stands for whatever may go wrong on a real machine at a moment that no outsider could hit: a bit
that falls over in shared memory, a file that is gone, an engine that is killed between two steps.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from megatron_dapo.resharding.bridge import Bridge
from megatron_dapo.rollout.engine_http import EngineHttp
from tests.conftest import REPOSITORY

FAULT = "MEGATRON_DAPO_TEST_FAULT"
"""Environment variable: a name of `DAMAGE`, or "kill before PATH", "kill after PATH", each with the
number of the exchange of that kind, "kill after PATH 7"; else its second."""
FIRST_TRAINED = 1


def engine_processes() -> list[psutil.Process]:
    """Of this process's engines, guardians first."""
    children = psutil.Process().children()
    guardians = [p for p in children if any("server_main.py" in word for word in p.cmdline())]
    return [p for guardian in guardians for p in (guardian, *guardian.children(recursive=True))]


def kill_engines() -> None:
    """kill -9 of everything that belongs to an engine."""
    for process in engine_processes():
        os.kill(process.pid, signal.SIGKILL)


def flip_a_bit(folder: Path) -> None:
    """The last byte of a file is a weight's."""
    path = sorted(folder.iterdir())[-1]
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def lose_a_file(folder: Path) -> None:
    sorted(folder.iterdir())[-1].unlink()


DAMAGE: dict[str, Callable[[Path], None]] = {
    "flip a bit": flip_a_bit,
    "lose a file": lose_a_file,
}


def damage_files(damage: Callable[[Path], None]) -> None:
    """`damage` the first trained weights between writing and reading."""
    prepare = Bridge.prepare

    def damaging(bridge: Bridge, version: int) -> object:
        payload = prepare(bridge, version)
        if version == FIRST_TRAINED:
            damage(Path(payload["folder"]))
        return payload

    Bridge.prepare = damaging  # type: ignore[assignment,method-assign]


def look_at_exchanges(look: Callable[[str, str], None]) -> None:
    """`look("before", path)` and `look("after", path)` of every exchange with an engine."""
    send = EngineHttp.send

    async def looking(http: EngineHttp, method: str, target: str, *rest: object, **more: object):  # type: ignore[no-untyped-def]
        path = target.split("?")[0]
        look("before", path)
        answer = await send(http, method, target, *rest, **more)  # type: ignore[arg-type]
        look("after", path)
        return answer

    EngineHttp.send = looking  # type: ignore[assignment,method-assign]


def kill_at(when: str, path: str, *, time: int) -> None:
    """Kill all engines before the request `path` is sent, or after it is answered."""
    seen: list[str] = []

    def look(now: str, at: str) -> None:
        if (now, at) == (when, path):
            seen.append(at)
            if len(seen) == time:
                kill_engines()

    look_at_exchanges(look)


@contextmanager
def mended() -> Iterator[None]:
    """What is broken inside is whole again afterwards."""
    http, bridge = EngineHttp.send, Bridge.send
    try:
        yield
    finally:
        EngineHttp.send, Bridge.send = http, bridge  # type: ignore[method-assign]


def kill_while_receiving() -> None:
    """Kill all engines, once, while they wait for the messages of the first trained weights."""
    send = Bridge.send
    killed: list[int] = []

    def killing(bridge: Bridge, version: int, *rest: object) -> None:
        if version == FIRST_TRAINED and bridge._parallel.rank == 0 and not killed:
            killed.append(version)
            kill_engines()
        send(bridge, version, *rest)  # type: ignore[arg-type]

    Bridge.send = killing  # type: ignore[method-assign]


STARTED_FIRST = """
import os, sys
if "megatron_dapo.train" in sys.orig_argv and os.environ.get("RANK") == "0":
    from tests.e2e.sabotage import break_this_process
    break_this_process()
"""


def sabotaged(fault: str, folder: Path) -> dict[str, str]:
    """Environment of a run whose rank 0 has this fault, and nothing else of the run.

    Args:
        folder: an empty one, for what Python starts before anything else.
    """
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(STARTED_FIRST)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}", FAULT: fault}


def break_this_process() -> None:
    """Install what the environment asks for."""
    fault = os.environ[FAULT]
    if fault in DAMAGE:
        damage_files(DAMAGE[fault])
    elif fault == "kill while receiving":
        kill_while_receiving()
    else:
        _, when, path, *number = fault.split(" ")
        kill_at(when, path, time=int(number[0]) if number else 2)  # 1: of the start's weights
