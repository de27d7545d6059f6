"""Who may ask, how much they may send, and what a browser may do with the answer. A layer around the whole app."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import time
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from morecl.errors import InputError
from morecl.serve.limits import Limits, RefusedError
from morecl.serve.metrics import Metrics

OPEN_PATHS = frozenset({"/", "/health", "/docs", "/favicon.ico"})  # and the page's files; the rest needs the token
PAGE = "/page/"
METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST"})
SAFE = frozenset({"GET", "OPTIONS"})
SHORTEST_TOKEN = 8

# No inline script or style, nothing from elsewhere, no frame around the page. data: and blob: are thumbnails.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_RAW_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


def is_local(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_names(names: Iterable[str]) -> None:
    """Raise :class:`InputError` unless each is a host's name as browsers send it, perhaps with a port."""
    for name in names:
        if not re.fullmatch(r"([a-z0-9_-]+\.)*[a-z0-9_-]+(:[0-9]{1,5})?", name, re.ASCII | re.IGNORECASE):
            raise InputError(f"--name {name}: give a host's name alone, such as example.com or example.com:8443")


def check_token(host: str, token: str | None, names: Iterable[str] = ()) -> None:
    """Raise :class:`InputError` if the server would be open to others without a token, or if the token is a bad one."""
    if token is None:
        if foreign := [name for name in names if not is_local(_name(name))]:
            raise InputError(
                f"--name {foreign[0]} is a name for other machines, so a token is needed: "
                "--token TEXT, or the variable MORECL_TOKEN"
            )
        if not is_local(host):
            raise InputError(
                f"--host {host} can be reached from other machines, so a token is needed: "
                "--token TEXT, or the variable MORECL_TOKEN"
            )
        return
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise InputError(f"the token must have at least {SHORTEST_TOKEN} characters: letters, digits, signs, no spaces")


class Guard:
    """Checks each request before the app sees it, and adds the security headers to each answer.

    Args:
        local: accept only requests for a name of this machine, so that no foreign site's name can be pointed at it.
        names: further names of the server, such as that of a proxy in front of it: requests for them are accepted, and
            those that their pages make, whatever name the proxy passes on.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        local: bool,
        limits: Limits,
        metrics: Metrics,
        names: Iterable[str] = (),
    ):
        self._app, self._local, self.limits, self._metrics = app, local, limits, metrics
        self._places = frozenset(name.lower() for name in names)  # host, or host:port
        self._names = frozenset(_name(place) for place in self._places)
        self._token = None if token is None else token.encode()
        self.in_flight = 0  # bytes of all requests that are being read or answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange, asked = _Exchange(self, receive, send), scope["method"]
        if asked == "HEAD":
            scope = {**scope, "method": "GET"}  # the web server leaves out the body
        try:
            self._check(scope)
            await self._app(scope, exchange.receive, exchange.send)
        except RefusedError as refused:
            await answer_refused(refused)(scope, exchange.receive, exchange.send)
        finally:
            self.in_flight -= exchange.taken
            route = getattr(scope.get("route"), "path", "other")  # never the path itself: anyone can make up many
            method = asked if asked in METHODS else "other"
            self._metrics.requests.labels(method, route, exchange.status).inc()
            self._metrics.seconds.labels(route).observe(time.monotonic() - exchange.started)

    def take(self, size: int, taken: int) -> None:
        """Count ``size`` more bytes of a request of which ``taken`` have come in all; raise if it is too much."""
        self.in_flight += size
        if taken > self.limits.request_bytes:
            raise self._too_large()
        if self.in_flight > self.limits.bytes_in_flight:
            raise RefusedError(503, "too much is being uploaded at once; try again in a moment", retry_after=2)

    def _check(self, scope: Scope) -> None:
        """Raise :class:`RefusedError` if this request may not be answered."""
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        name = _name(host)
        if self._local and not is_local(name) and name not in self._names:
            raise RefusedError(421, f"this server answers only to local names and those of --name, not to {host!r:.80}")
        if scope["method"] not in SAFE:
            self._check_origin(headers, host)
        if self._token is not None and not _is_open(scope["path"]):
            given = headers.get("authorization", "")
            kind, _, value = given.partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(value.strip().encode("latin-1"), self._token):
                raise RefusedError(401, "a token is needed: send the header 'Authorization: Bearer TOKEN'")
        length = headers.get("content-length", "0")
        if not length.isdecimal():
            raise RefusedError(400, "the header Content-Length is not a number")
        if len(length) > 15 or int(length) > self.limits.request_bytes:
            raise self._too_large()

    def _check_origin(self, headers: Mapping[str, str], host: str) -> None:
        """Refuse what another site's page makes a browser send."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        foreign = origin is not None and _place(origin) not in {host.lower(), *self._places}
        if foreign or site in ("cross-site", "same-site"):
            raise RefusedError(403, "requests from pages of other sites are refused; behind a proxy, see --name")

    def _too_large(self) -> RefusedError:
        return RefusedError(
            413, f"the request is too large; at most {self.limits.request_bytes / 2**20:g} MiB are accepted"
        )


class _Exchange:
    """One request and its answer: counts what comes in, adds headers to what goes out."""

    def __init__(self, guard: Guard, receive: Receive, send: Send):
        self._guard, self._receive, self._send = guard, receive, send
        self._complete = False  # whether the whole request was read
        self.started, self.status, self.taken = time.monotonic(), 500, 0

    async def receive(self) -> Message:
        try:
            message = await asyncio.wait_for(self._receive(), None if self._complete else self._guard.limits.silence)
        except TimeoutError:
            raise RefusedError(408, "the rest of the request did not come") from None
        if message["type"] == "http.request":
            self._complete = not message.get("more_body", False)
            size = len(message.get("body", b""))
            self.taken += size
            self._guard.take(size, self.taken)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            present = {name.lower() for name, _ in message["headers"]}
            added = [pair for pair in _RAW_HEADERS if pair[0] not in present]
            message = {**message, "headers": [*message["headers"], *added]}
        await self._send(message)


def answer_refused(refused: RefusedError) -> JSONResponse:
    """The answer to a refused request."""
    headers = {}
    if refused.retry_after is not None:
        headers["Retry-After"] = str(refused.retry_after)
    if refused.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if refused.status in (408, 413, 507):
        headers["Connection"] = "close"  # what is still to come of the request is not read
    return JSONResponse({"error": str(refused)}, refused.status, headers)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(PAGE)


def _place(origin: str) -> str | None:
    """``host:port`` of an Origin header; ``None`` for one that is not an address, such as ``null``."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def _name(host: str) -> str:
    """The host's name without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""
