"""Serves the dashboard to a browser on this machine, with textual-serve (an optional extra).

Every page that is opened starts a dashboard of its own. All addresses are below a random token, and the page asks for
nothing from elsewhere: not even a font.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddpwatch.errors import UsageError
from ddpwatch.run.subprocesses import module_command
from ddpwatch.wire.loopback import listen

if TYPE_CHECKING:
    from aiohttp import web

INSTALL = "install ddpwatch with its extra browser, e.g. pip install '.[browser]' in a checkout"
END_S = 2.0  # for the dashboards, at the end
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}
_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>ddpwatch</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="static/css/xterm.css">
<style>
@font-face { font-family: "Roboto Mono"; src: url("static/fonts/RobotoMono-VariableFont_wght.ttf") }
body { margin: 0; background: #111 }
#closed { display: none; color: #ccc; font: 16px sans-serif; padding: 2em }
body.-closed #closed { display: block }
body.-closed #terminal { display: none }
</style>
<p id="closed">The dashboard has ended. Reload the page to open another.</p>
<div id="terminal" class="textual-terminal" data-font-size="14"></div>
<script>
new MutationObserver((_, observer) => {  // keys go to the terminal once it is there
  if (document.body.classList.contains("-first-byte")) {
    observer.disconnect();
    document.querySelector("textarea").focus();
  }
}).observe(document.body, {attributes: true});
document.getElementById("terminal").dataset.sessionWebsocketUrl = new URL("ws", location).href.replace(/^http/, "ws");
</script>
<script src="static/js/textual.js"></script>
</html>
"""


def serve(arguments: Sequence[str], port: int) -> None:
    """Serves dashboards until Ctrl-C or SIGTERM; prints the address first.

    Args:
        arguments: What ddpwatch is started with for each page.
        port: On loopback; 0 for any that is free.

    Raises:
        UsageError: textual-serve is missing, or the port is taken.
    """
    try:
        from aiohttp import web
    except ImportError as error:
        raise UsageError("textual-serve is not installed", INSTALL) from error
    listener, token, address = listen(port)
    app = _app(shlex.join(module_command("ddpwatch", *arguments)), token)
    with listener:
        print(address, flush=True)
        web.run_app(app, sock=listener, print=None, access_log=None, shutdown_timeout=END_S)


async def _app(command: str, token: str) -> web.Application:
    from aiohttp import web

    try:
        from textual_serve.server import Server
    except ImportError as error:
        raise UsageError("textual-serve is not installed", INSTALL) from error

    class DashboardServer(Server):
        """Starts the command for each page; says nothing."""

        async def handle_index(self, request: web.Request) -> web.Response:
            return web.Response(text=_PAGE, content_type="text/html")

        async def on_startup(self, app: web.Application) -> None:
            """Prints nothing."""

    async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(_HEADERS)

    app = web.Application()
    app.add_subapp(f"/{token}/", await DashboardServer(command)._make_app())
    app.on_response_prepare.append(add_headers)
    return app
