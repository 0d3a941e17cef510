"""A W&B service on 127.0.0.1 that knows just enough to take a run."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Behaviour = Literal["works", "silent", "broken", "refuses"]
STATUS = {"works": 200, "broken": 500, "refuses": 401}
ARTIFACT = {"id": "A", "state": "COMMITTED", "artifactSequence": {"latestArtifact": {"id": "A"}}}


@dataclass
class Service:
    """What it does, which may change while a run goes on, and what it was sent."""

    behaviour: Behaviour
    port: int = 0
    history: list[dict[str, object]] = field(default_factory=list)
    """Rows of the run, in the order in which they came."""
    runs: set[object] = field(default_factory=set)
    """Identities of the runs that were begun or continued."""
    over: threading.Event = field(default_factory=threading.Event)

    def take(self, path: str, body: bytes) -> dict[str, object]:
        """Remember what counts of a request; the reply."""
        if path == "/graphql":
            return {"data": self._data(json.loads(body))}
        if path.endswith("/file_stream"):
            lines = json.loads(body).get("files", {}).get("wandb-history.jsonl", {})
            self.history += [json.loads(line) for line in lines.get("content", [])]
        return {}

    def _data(self, request: dict[str, dict[str, object]]) -> dict[str, object]:
        query, variables = str(request["query"]), request.get("variables") or {}
        if "upsertBucket" in query:
            self.runs.add(variables["name"])
            entity = {"id": "E", "name": "me"}
            project = {"id": "P", "name": variables["project"], "entity": entity}
            bucket = {"id": "B", "name": variables["name"], "config": "{}", "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "createArtifact(" in query:
            return {"createArtifact": {"artifact": ARTIFACT}}
        if "createRunFiles" in query:
            url = f"http://127.0.0.1:{self.port}/upload/"
            names = variables["files"]
            assert isinstance(names, list), names
            files = [{"name": name, "uploadUrl": url + name} for name in names]
            return {"createRunFiles": {"runID": "R", "uploadHeaders": [], "files": files}}
        if "viewer" in query:
            teams: dict[str, object] = {"edges": []}
            return {"viewer": {"id": "V", "entity": "me", "flags": "{}", "teams": teams}}
        if "serverInfo" in query:
            return {"serverInfo": {"features": []}}
        return {"model": {"bucket": None}, "project": None}


@contextmanager
def running_service(behaviour: Behaviour) -> Iterator[Service]:
    """Serve until the end of the block."""
    service = Service(behaviour)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if service.behaviour == "silent":
                service.over.wait()
                return
            reply: dict[str, object] = {"errors": [{"message": "out of order"}]}
            if service.behaviour == "works":
                reply = service.take(self.path, body)
            data = json.dumps(reply).encode()
            self.send_response(STATUS[service.behaviour])
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = answer

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            pass  # a client that was killed

    server = Server(("127.0.0.1", 0), Handler)
    service.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield service
    finally:
        service.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
