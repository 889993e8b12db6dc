"""The smallest worker: HTTP/1.1 over the Unix socket of ENVSERVER_SOCKET, standard library only.

``GET /health`` answers ``{"status": "ok"}``. ``POST /run`` runs the Python program in its body in the worker and
returns the printed output, so that a test can inspect the worker from inside. FAKE_WORKER selects a misbehavior:
``die`` (immediately, with a log line), ``flood`` (its log), ``stubborn`` (ignores SIGTERM).
"""

import contextlib
import io
import os
import signal
import socketserver
import sys
import threading
import traceback
from http.server import BaseHTTPRequestHandler


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(b'{"status": "ok"}' if self.path == "/health" else b"{}")

    def do_POST(self) -> None:
        program = self.rfile.read(int(self.headers["content-length"])).decode()
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                exec(program, {})
            except BaseException:  # noqa: BLE001  # the test must see every error of its program
                traceback.print_exc(file=printed)
        self.answer(printed.getvalue().encode())

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        os.write(1, f"request {self.command} {self.path}\n".encode())  # one write: a flood's lines cannot split it


class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def server_bind(self) -> None:
        super().server_bind()
        os.chmod(str(self.server_address), 0o666)  # the gateway may be another user


def end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def flood() -> None:
    while True:
        os.write(1, b"x" * 120 + b"\n")


def main() -> None:
    misbehaviour = os.environ.get("FAKE_WORKER", "")
    if misbehaviour == "die":
        print("the worker cannot go on", flush=True)
        sys.exit(3)
    if misbehaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if misbehaviour == "flood":
        threading.Thread(target=flood, daemon=True).start()
    if os.environ.get("ENVSERVER_EXIT_ON_EOF") == "1":
        threading.Thread(target=end_with_stdin, daemon=True).start()
    print("the worker starts", flush=True)
    Server(os.environ["ENVSERVER_SOCKET"], Handler).serve_forever()


if __name__ == "__main__":
    main()
