"""A server on a loopback port that speaks the part of OpenAI's protocol that is used."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ChatServer:
    """Answers from a list of (status, body), the last one for ever, or by a function of what it is
    asked; keeps what it got."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, object]] = []
        self.answer: Callable[[str], tuple[int, object]] | None = None
        """Of the last message. Status 0: the connection ends without an answer."""
        self.got: list[tuple[str, str | None, dict[str, object]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, {"data": [{"id": "served"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.got.append((self.path, self.headers["Authorization"], body))
                if outer.answer is not None:
                    status, answer = outer.answer(body["messages"][-1]["content"])
                    if status:
                        self._answer(status, answer)
                    return
                answers = outer.answers
                self._answer(*(answers.pop(0) if len(answers) > 1 else answers[0]))

            def _answer(self, status: int, body: object) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


def completion(text: str | None) -> object:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


@contextmanager
def running_server() -> Iterator[ChatServer]:
    server = ChatServer()
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        thread.join()
        server.http.server_close()
