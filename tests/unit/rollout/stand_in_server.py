"""Behaves like vLLM as far as processes go: a child, shared memory, /health on a unix socket."""

from __future__ import annotations

import http.server
import mmap
import os
import signal
import socketserver
import subprocess
import sys
from pathlib import Path


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def address_string(self) -> str:
        return "unix"


def main(socket: str, behaviour: str) -> None:
    if behaviour == "dies":
        sys.exit("out of luck")
    ignored = ", ".join(f"signal.signal({n}, signal.SIG_IGN)" for n in (2, 15))
    child = f"import signal, time; {ignored}; time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", child])
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    name = f"/dev/shm/psm_stand_in_{os.getpid()}"
    Path(name).write_bytes(bytes(4096))
    with open(name, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 4096)
    Path(socket).with_name("shared_memory").write_text(name)
    with socketserver.UnixStreamServer(socket, Health) as server:
        server.serve_forever()
    memory.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
