"""A trace collector that takes everything and keeps nothing: `python -m bench.mock_otlp --port N`.

`GET /` tells how many bytes have come.
"""

import argparse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Sink(BaseHTTPRequestHandler):
    """Over one connection as long as the sender keeps it."""

    protocol_version = "HTTP/1.1"
    taken_bytes = 0

    def do_POST(self) -> None:
        Sink.taken_bytes += len(self.rfile.read(int(self.headers["content-length"])))
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(b"%d" % Sink.taken_bytes)

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Not a word."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    with ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Sink) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
