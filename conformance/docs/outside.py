"""Stands for the internet in tests of the documents: hosts of these names, over HTTP and HTTPS.

    outside.py DIR    writes DIR/keep.toml, settings of a server whose sandboxes find it, and prints `ready`
"""

from __future__ import annotations

import http.server
import itertools
import json
import ssl
import subprocess
import sys
import threading
from pathlib import Path

NAMES = ["api.anthropic.com", "api.example.com", "example.org", "github.com", "www.example.org"]
# Where it listens: sandboxes see 127.0.b.c of the host as 100.97.b.c, if the settings allow it.
ADDRESSES = (f"127.0.{b}.{c}" for b, c in itertools.product(range(64, 192), range(1, 255)))


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        # A vendor's API takes its key and nothing else: not a placeholder.
        refused = self.headers["host"] == "api.anthropic.com" and self.headers["x-api-key"] != "sk-ant-the-key"
        body = json.dumps({"host": self.headers["host"], "path": self.path}).encode()
        self.send_response(401 if refused else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer

    def log_message(self, *_: object) -> None:
        pass


def servers(context: ssl.SSLContext) -> tuple[str, list[http.server.ThreadingHTTPServer]]:
    """Both ports of a free address."""
    for address in ADDRESSES:
        try:
            plain = http.server.ThreadingHTTPServer((address, 80), Answer)
        except OSError:
            continue
        secure = http.server.ThreadingHTTPServer((address, 443), Answer)
        secure.socket = context.wrap_socket(secure.socket, server_side=True)
        return address, [plain, secure]
    raise SystemExit("no address is free")


def main() -> None:
    place = Path(sys.argv[1])
    subprocess.run(["keep", "--data", place, "tls", "init", *NAMES], check=True, stdout=subprocess.DEVNULL)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(place / "tls/server.pem", place / "tls/server.key")
    address, both = servers(context)
    hosts = ", ".join(f'"{name}" = ["{address}"]' for name in NAMES)
    (place / "keep.toml").write_text(
        f"""[network]
except = ["{address}:80", "{address}:443"]
hosts = {{ {hosts} }}
ca = "{place}/tls/ca.pem"
"""
    )
    for server in both:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
