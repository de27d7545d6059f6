"""Who may ask: tokens, foreign sites, foreign names, and what a browser is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.testclient import TestClient

from morecl.errors import InputError
from morecl.serve.app import create_app
from morecl.serve.limits import Limits
from morecl.serve.metrics import Metrics
from morecl.serve.security import Guard, check_names, check_token, is_local
from morecl.serve.service import Service
from serving import parts, pictures

TOKEN = "correct-horse"
PROTECTED = ["/info", "/ready", "/metrics", "/jobs", "/jobs/x", "/openapi.json", "/classes/images?name=x", "/nothing"]
OPEN = ["/", "/docs", "/health", "/page/style.css", "/page/main.js", "/favicon.ico"]


@pytest.fixture
def guarded(shared: Service) -> TestClient:
    return TestClient(create_app(shared, token=TOKEN, local=False), base_url="http://photos.example")


@pytest.mark.parametrize("path", PROTECTED)
def test_without_the_token_nothing_is_told(guarded: TestClient, path: str) -> None:
    wrong = ["", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer ", f"Basic {TOKEN}", TOKEN, "Bearer \xff\xfe"]
    for given in wrong:
        response = guarded.get(path, headers={"authorization": given.encode("latin-1")})
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
        assert "token is needed" in response.json()["error"]
    assert guarded.get(path).status_code == 401
    assert guarded.get(path, headers={"authorization": f"Bearer {TOKEN}"}).status_code != 401


@pytest.mark.parametrize("path", ["/predict", "/teach", "/undo", "/rename", "/forget", "/jobs/x/cancel"])
def test_without_the_token_nothing_is_done(guarded: TestClient, path: str) -> None:
    assert guarded.post(path, files=parts(pictures(0, 1))).status_code == 401


@pytest.mark.parametrize("path", OPEN)
def test_the_page_and_health_need_no_token(guarded: TestClient, path: str) -> None:
    assert guarded.get(path).status_code == 200


@pytest.mark.parametrize("path", [*OPEN, *PROTECTED])
def test_head_is_answered_as_get_without_a_body(guarded: TestClient, path: str) -> None:
    for headers in ({}, {"authorization": f"Bearer {TOKEN}"}):
        asked, told = guarded.head(path, headers=headers), guarded.get(path, headers=headers)
        assert asked.status_code == told.status_code and asked.content == b""
        if path != "/metrics":
            assert asked.headers == told.headers


def test_the_token_opens_everything(guarded: TestClient) -> None:
    headers = {"authorization": f"bearer {TOKEN}"}
    assert guarded.get("/info", headers=headers).json()["model"] == "animals"
    assert guarded.post("/predict", files=parts(pictures(0, 1)), headers=headers).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example", "", "[::1", "1.2.3.4"])
def test_a_foreign_name_that_points_here_is_refused(client: TestClient, host: str) -> None:
    response = client.get("/info", headers={"host": host})
    assert response.status_code == 421 and "local names" in response.json()["error"]


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST", "127.9.9.9"]
)
def test_local_names_are_accepted(client: TestClient, host: str) -> None:
    assert client.get("/info", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:9000"},
        {"origin": "http://[bad"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_other_sites_cannot_post(client: TestClient, headers: dict[str, str]) -> None:
    for path in ("/predict", "/teach", "/undo", "/rename", "/forget", "/jobs/x/cancel"):
        response = client.post(path, files=parts(pictures(0, 1)), headers=headers)
        assert response.status_code == 403 and "other sites" in response.json()["error"]


@pytest.mark.parametrize("headers", [{}, {"origin": "http://localhost"}, {"sec-fetch-site": "same-origin"}])
def test_the_own_page_and_programs_can_post(client: TestClient, headers: dict[str, str]) -> None:
    assert client.post("/predict", files=parts(pictures(0, 1)), headers=headers).status_code == 200


PROXY = "photos.example:8443"


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("host", ["127.0.0.1:8000", "photos.example", PROXY, "PHOTOS.example:8443"])
def test_pages_of_a_proxy_whose_name_is_given_can_post(shared: Service, host: str, local: bool) -> None:
    app = create_app(shared, token=TOKEN, local=local, names=[PROXY])
    client = TestClient(app, base_url="http://localhost", headers={"host": host, "authorization": f"Bearer {TOKEN}"})
    asked = {"files": parts(pictures(0, 1))}
    good = {"origin": f"https://{PROXY}", "sec-fetch-site": "same-origin"}
    assert client.post("/predict", **asked, headers=good).status_code == 200
    for bad in ("https://photos.example:9000", "https://evil.example", "https://photos.example.evil.example", "null"):
        assert client.post("/predict", **asked, headers={"origin": bad}).status_code == 403
    assert client.post("/predict", **asked, headers=good | {"sec-fetch-site": "same-site"}).status_code == 403
    if local:
        for other in ("evil.example", "x.photos.example", ""):
            assert client.get("/info", headers={"host": other}).status_code == 421


def test_names_for_others_are_plain_and_need_a_token() -> None:
    check_names(["example.com", PROXY, "my_host"])
    for bad in ("", "https://example.com", "example.com/", "a b", "a@b", "*", "b\u00fccher.example", "a.:80", "a:b"):
        with pytest.raises(InputError, match="give a host's name alone"):
            check_names([bad])
    check_token("127.0.0.1", TOKEN, [PROXY])
    check_token("127.0.0.1", None, ["localhost:9000"])
    with pytest.raises(InputError, match=f"--name {PROXY} is a name for other machines, so a token is needed"):
        check_token("127.0.0.1", None, [PROXY])


@pytest.mark.parametrize("path", ["/", "/info", "/nothing", "/page/main.js"])
def test_browsers_are_told_to_be_strict(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["connect-src"] == "'self'" and policy["frame-ancestors"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == ("no-cache" if path in ("/", "/page/main.js") else "no-store")
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("length", ["x", "-1", "99999999999999999999", str(2**40)])
def test_a_bad_length_is_refused_before_anything_is_read(client: TestClient, length: str) -> None:
    response = client.post("/predict", content=b"", headers={"content-length": length})
    assert response.status_code in (400, 413)


def test_whoever_falls_silent_is_let_go() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while True:
            await receive()

    async def silent() -> Any:
        await asyncio.sleep(60)

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    guard = Guard(app, token=None, local=False, limits=Limits(silence=0.05), metrics=Metrics())
    scope = {"type": "http", "method": "POST", "path": "/predict", "headers": []}
    asyncio.run(guard(scope, silent, send))
    assert sent[0]["status"] == 408


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.5", False),
        ("example.org", False),
        ("", False),
    ],
)
def test_only_local_addresses_do_without_a_token(host: str, local: bool) -> None:
    assert is_local(host) == local
    if local:
        check_token(host, None)
    else:
        with pytest.raises(InputError, match="a token is needed"):
            check_token(host, None)
    check_token(host, TOKEN)
    for bad in ("", "short", "with space in it", "ünïcödé-token", "line\nbreak-token"):
        with pytest.raises(InputError, match="at least 8 characters"):
            check_token(host, bad)
