"""A chat-completions endpoint with scripted answers: the model of runs whose trainer samples from an HTTP server."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[[Mapping[str, Any]], str]
"""Returns the answer to a request: the text of the model, or the argument of its one tool, if the request has tools."""


@contextlib.contextmanager
def chat_model(script: Script) -> Iterator[str]:
    """Serve *script* on a free port, and yield the base URL. A request that fails is answered with status 400."""
    handler = type("Handler", (_Handler,), {"script": staticmethod(script)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: Script

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = self._message(request)
        reason = "tool_calls" if "tool_calls" in message else "stop"
        whole = {"id": "scripted", "created": 0, "model": request["model"]}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        if request.get("stream"):
            chunk = whole | {"object": "chat.completion.chunk"}
            parts: list[Any] = [
                chunk | {"choices": [{"index": 0, "delta": message, "finish_reason": None}]},
                chunk | {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
                chunk | {"choices": [], "usage": usage},
            ]
            lines = "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n"
            self._answer(lines.encode(), "text/event-stream")
        else:
            choice = {"index": 0, "message": message, "finish_reason": reason}
            body = whole | {"object": "chat.completion", "choices": [choice], "usage": usage}
            self._answer(json.dumps(body).encode(), "application/json")

    def _message(self, request: Mapping[str, Any]) -> dict[str, Any]:
        has_called = any(message["role"] == "tool" for message in request["messages"])
        answer = self.script(request)
        if not request.get("tools") or has_called:
            return {"role": "assistant", "content": answer}
        function = request["tools"][0]["function"]
        (argument,) = function["parameters"]["required"]
        call = {"name": function["name"], "arguments": json.dumps({argument: answer})}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"index": 0, "id": "call-0", "type": "function", "function": call}],
        }

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Log nothing: the run's own output is enough."""
