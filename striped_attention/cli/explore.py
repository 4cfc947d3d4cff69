"""The command `striped explore`: a web page that shows how layouts, masks and strategies balance attention."""

import dataclasses
import http.server
import pathlib
import webbrowser
from typing import Any

from striped_attention.errors import UsageError

PAGE = pathlib.Path(__file__).with_name("explorer.html")


@dataclasses.dataclass(frozen=True)
class ExploreConfig:
    """Open a web page that shows which device computes and which one waits, for any layout, mask and strategy.

    The page is one file that needs no network. This command serves it to browsers on this machine, until Ctrl-C. For
    example: striped explore --port 8000
    """

    port: int = 0
    """Port on this machine. 0: any free one."""
    no_open: bool = False
    """Print the address without opening a browser."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise UsageError(f"--port must be from 0 to 65535; got {self.port}.")


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers every request for / with the page."""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/":
            self.send_error(404)
            return
        page = PAGE.read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def make_server(port: int) -> http.server.ThreadingHTTPServer:
    """Return a server of the page that only this machine can reach."""
    try:
        return http.server.ThreadingHTTPServer(("127.0.0.1", port), _Handler)
    except OSError as error:
        raise UsageError(f"--port {port} cannot be used: {error.strerror}. Leave it out for any free one.") from error


def run(config: ExploreConfig) -> None:
    """Serve the page until Ctrl-C."""
    with make_server(config.port) as server:
        address = f"http://127.0.0.1:{server.server_port}/"
        print(f"{address} (Ctrl-C stops it)", flush=True)
        if not config.no_open:
            webbrowser.open(address)
        server.serve_forever()
