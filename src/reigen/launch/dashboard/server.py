"""Server of a job's dashboard: the page, and its messages as server-sent events.

The page itself, which is the same for all jobs, is for everybody who reaches the port; what it shows is for those who
know the token alone. The token is in the fragment of the URL, which browsers send to nobody, and comes here as
``Authorization: Bearer``: a cookie would go to each port of the host. What a browser of somebody else is made to send
(by another site, or a name that points here) is refused by the ``Host`` header.

Everything is bounded: connections, streams, how long a request may take, and what waits to be sent. All of it is in one
thread, with which the job has nothing to do.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import mimetypes
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from reigen.errors import ConfigError
from reigen.launch.dashboard.feed import DashboardFeed, FeedCursor, JobEnd
from reigen.launch.dashboard.job_events import EventKind
from reigen.launch.metrics.job_metrics import JobMetrics
from reigen.launch.metrics.options import DashboardAddress
from reigen.net.listener import join_address

#: Connections at a time, and those of them that get messages.
MAX_CONNECTIONS = 48
MAX_STREAMS = 16
#: A connection without a request, and one that takes nothing of what is sent, is ended after so many seconds.
IDLE_SECONDS = 10.0
_LOOK_SECONDS = 1.0
#: How often the job is looked at, and less often where that would be more than such a part of a processor's time.
_TURN_SECONDS = 0.25
_MOST_TIME = 0.1
#: How long browsers may take to get the last message.
_LAST_SECONDS = 1.0
_JOIN_SECONDS = 5.0
_MAX_HEAD_BYTES = 16 << 10
_CHUNK_BYTES = 64 << 10
_PAGE_FILES = {"/": "index.html", "/dashboard.css": "dashboard.css", "/dashboard.js": "dashboard.js"}
_CHARTS_PATH = "/plotly.min.js"
_SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_RAW_HEADERS = [(name.lower().encode(), text.encode()) for name, text in _SECURITY_HEADERS.items()]
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:\[\]/@]+)(?::\d{1,5})?", re.ASCII | re.IGNORECASE)

_AsgiMessage = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_AsgiMessage]]
_Send = Callable[[_AsgiMessage], Awaitable[None]]
_ENCODER = msgspec.json.Encoder()


def is_allowed_host(host: str, names: frozenset[str]) -> bool:
    """Return whether a ``Host`` header may name this server: by an address, or by one of these names.

    No site can have its own pages read from an address (DNS rebinding needs a name). Ports may differ: of an ssh
    tunnel they do.
    """
    match = _HOST.fullmatch(host.strip())
    if match is None:
        return False
    name = match[1].removeprefix("[").removesuffix("]").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in names
    return True


class DashboardServer:
    """Server of a job's dashboard; its port is taken from the moment that it is made, and answers from `start` on.

    Args:
        address: where.
        metrics: of the job.
        program: of the job, by name.

    Raises:
        ConfigError: the port is taken, or may not be used.
    """

    def __init__(self, address: DashboardAddress, metrics: JobMetrics, program: str) -> None:
        self._address, self._metrics = address, metrics
        self._feed = DashboardFeed(program, time.monotonic())
        self._names = frozenset({"localhost"} if address.is_loopback else {"localhost", socket.gethostname().lower()})
        self._socket = _listen(address)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server = uvicorn.Server(self._config())
        #: exchanged when there is something to send
        self._changed = asyncio.Event()
        self._num_streams = 0
        #: behind everything that was said before
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="reigen-dashboard", daemon=True)

    @property
    def url(self) -> str:
        """Return the URL, with the token."""
        name = self._address.host
        if ipaddress.ip_address(name).is_unspecified:
            name = socket.gethostname()
        return f"http://{join_address(name, self._socket.getsockname()[1])}/#{self._address.token}"

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def note(self, kind: EventKind, text: str) -> None:
        """Add an event; from any thread."""
        self._call(lambda: self._feed.note(kind, text, time.time()))

    def finish(self, end: JobEnd) -> None:
        """Take note that the job has ended; from any thread."""
        self._call(lambda: self._feed.finish(end, time.time()))

    def close(self) -> None:
        """Answer no more; browsers that are connected have a second to get the last message."""
        if self._thread.is_alive():
            self._call(self._closing.set)
            self._thread.join(_JOIN_SECONDS)
        self._socket.close()

    def _call(self, function: Callable[[], None]) -> None:
        if self._loop is None:
            function()
        else:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(function)

    # ---------------------------------------------------------------- in the thread

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._closing.is_set() and not serving.done():
            now, begun = time.monotonic(), time.thread_time()
            if self._feed.turn(self._metrics.status(now), now, time.time()):
                self._wake()
            pause = max(_TURN_SECONDS, (time.thread_time() - begun) / _MOST_TIME)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), pause)
        self._feed.turn(self._metrics.status(time.monotonic()), time.monotonic(), time.time())
        self._wake()
        deadline = time.monotonic() + _LAST_SECONDS
        while self._num_streams and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        self._server.should_exit = True
        await serving

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _config(self) -> uvicorn.Config:
        pages = [Route(path, self._page, methods=["GET"]) for path in (*_PAGE_FILES, _CHARTS_PATH)]
        data = [Route("/state", self._state, methods=["GET"]), Route("/events", self._events, methods=["GET"])]
        return uvicorn.Config(
            _Guard(Starlette(routes=[*pages, *data]), self._names),
            http=_BoundedConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # what clients do wrong is no news for the user
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
            timeout_graceful_shutdown=1,
        )

    async def _page(self, request: Request) -> Response:
        path = request.url.path
        found = _charts_file() if path == _CHARTS_PATH else Path(__file__).parent / "page" / _PAGE_FILES[path]
        content = found.read_bytes()
        lifetime = "private, max-age=86400" if path == _CHARTS_PATH else "no-cache"
        headers = {"Content-Length": str(len(content)), "Cache-Control": lifetime}
        body = b"" if request.method == "HEAD" else content
        return StreamingResponse(_chunks(body), headers=headers, media_type=mimetypes.guess_type(found)[0])

    def _refusal(self, request: Request) -> Response | None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(), self._address.token.encode()):
            return PlainTextResponse("the token is missing, or another one", 403)
        return None

    async def _state(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        message, _ = self._feed.message(FeedCursor())
        return Response(_ENCODER.encode(message), media_type="application/json", headers={"Cache-Control": "no-store"})

    async def _events(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        if self._num_streams >= MAX_STREAMS:
            return PlainTextResponse(f"{MAX_STREAMS} browsers look already", 503)
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        self._num_streams += 1
        headers = {"Cache-Control": "no-store"}
        return _Stream(self._messages(), self._leave, media_type="text/event-stream", headers=headers)

    def _leave(self) -> None:
        self._num_streams -= 1

    async def _messages(self) -> AsyncIterator[bytes]:
        cursor = FeedCursor()
        while True:
            changed, is_last = self._changed, self._closing.is_set()
            message, cursor = self._feed.message(cursor)
            yield b"data: " + _ENCODER.encode(message) + b"\n\n"
            if is_last:
                return
            await changed.wait()


class _Stream(StreamingResponse):
    """Response of messages, which are counted until it ends, however it does."""

    def __init__(self, content: AsyncIterator[bytes], leave: Callable[[], None], **more: Any) -> None:
        super().__init__(content, **more)
        self._leave = leave

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


class _Guard:
    """ASGI application around another: refuses other hosts' names, and adds headers to each answer."""

    def __init__(self, application: Any, names: frozenset[str]) -> None:
        self._application, self._names = application, names

    async def __call__(self, scope: _AsgiMessage, receive: _Receive, send: _Send) -> None:
        async def send_guarded(message: _AsgiMessage) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_RAW_HEADERS]
            await send(message)

        hosts = [text.decode("latin-1") for name, text in scope.get("headers", ()) if name == b"host"]
        if len(hosts) == 1 and is_allowed_host(hosts[0], self._names):
            await self._application(scope, receive, send_guarded)
        else:
            refusal = PlainTextResponse("this server has another name: use its address, or localhost", 421)
            await refusal(scope, receive, send_guarded)


class _BoundedConnection(H11Protocol):
    """Connection that ends where there are too many, where no request comes, and where nothing is read."""

    def connection_made(self, transport: Any) -> None:
        """Begin to watch a connection."""
        super().connection_made(transport)
        self._quiet_since, self._seen = self.loop.time(), (False, 0)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._timer = self.loop.call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        if self.transport.is_closing() and not self.transport.get_write_buffer_size():
            return
        is_answering = self.cycle is not None and not self.cycle.response_complete
        seen = is_answering, self.transport.get_write_buffer_size()
        now = self.loop.time()
        if (is_answering and not seen[1]) or seen != self._seen:
            self._quiet_since, self._seen = now, seen
        if now - self._quiet_since >= IDLE_SECONDS:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(_LOOK_SECONDS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Watch it no more."""
        super().connection_lost(exc)
        if (timer := getattr(self, "_timer", None)) is not None:
            timer.cancel()


def _listen(address: DashboardAddress) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address.host, address.port))
        listening.listen(MAX_CONNECTIONS)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"--dashboard: {join_address(address.host, address.port)} cannot be used: {error.strerror}. Without a port "
            "one that is free is taken"
        ) from None
    return listening


def _charts_file() -> Path:
    """Return the library that draws the charts, of the package plotly, which is not loaded."""
    spec = find_spec("plotly")
    assert spec is not None, "it is there: the options were checked"
    assert spec.submodule_search_locations is not None, "it is a package"
    return Path(spec.submodule_search_locations[0]) / "package_data" / "plotly.min.js"


async def _chunks(content: bytes) -> AsyncIterator[bytes]:
    for begin in range(0, len(content), _CHUNK_BYTES):
        yield content[begin : begin + _CHUNK_BYTES]
