"""The smallest worker as a third-party server: on a TCP port, the first argument, and without the gateway's
conventions.

It answers as ``tests/fakes/worker/server.py`` does, which has to be in its working directory.
"""

import importlib
import os
import signal
import socketserver
import sys

sys.path.insert(0, os.getcwd())
Handler = importlib.import_module("server").Handler


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


def main() -> None:
    misbehaviour = os.environ.get("FAKE_WORKER", "")
    if misbehaviour == "die":
        print("the worker cannot go on", flush=True)
        sys.exit(3)
    if misbehaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if misbehaviour == "deaf":
        signal.pause()
    print("the worker starts", flush=True)
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()


if __name__ == "__main__":
    main()
