"""Every endpoint that asks: right answers, right refusals, never a 500."""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.datastructures import UploadFile
from starlette.testclient import TestClient

import morecl
import tiny
from morecl.classifier import Classifier
from morecl.serve.app import create_app
from morecl.serve.limits import Limits
from morecl.serve.security import Guard
from morecl.serve.service import Service
from serving import CLASSES, EACH, NEW, parts, pictures, png
from waiting import until

LOW = Limits(file_bytes=5000, request_bytes=40_000, pixels=10_000, predict_images=4, teach_images=6, field_bytes=300)


@pytest.fixture(scope="module")
def limited(template: Path) -> Iterator[TestClient]:
    service = Service(template, device="cpu", limits=LOW)
    service.load()
    yield TestClient(create_app(service), base_url="http://localhost")
    service.close()


def error(response: Any, status: int) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    return str(response.json()["error"])


# ---- answers --------------------------------------------------------------------------------------------------


def test_answers_are_those_of_the_classifier(client: TestClient, template: Path, tmp_path: Path) -> None:
    files = [*pictures(0, 2), *pictures(1, 2), *pictures(NEW, 1)]
    for index, data in enumerate(files):
        (tmp_path / f"{index}.png").write_bytes(data)
    expected = Classifier.open(template, device="cpu").predict([tmp_path / f"{i}.png" for i in range(5)], top=2)
    form = [("files", (f"{index}.png", data)) for index, data in enumerate(files)]
    answers = client.post("/predict?top=2", files=form).json()["answers"]
    for index, (answer, wanted) in enumerate(zip(answers, expected, strict=True)):
        assert answer.keys() == {*wanted.as_dict(), "version"}
        assert answer["path"] == f"{index}.png" and answer["version"] == 2
        assert (answer["label"], answer["unknown"], answer["task"]) == (wanted.label, wanted.unknown, wanted.task)
        assert [one["label"] for one in answer["top"]] == [choice.label for choice in wanted.top]
        assert answer["confidence"] == pytest.approx(wanted.confidence, rel=1e-3)
        assert answer["ood_score"] == pytest.approx(wanted.ood_score, rel=1e-3)
        assert answer["threshold"] == wanted.threshold


def test_accepting_fewer_known_images_lowers_the_threshold(client: TestClient) -> None:
    form = parts(pictures(0, 4))
    strict, mild = (client.post(f"/predict?accept={a}", files=form).json()["answers"] for a in (0.1, 0.95))
    assert strict[0]["threshold"] < mild[0]["threshold"]
    for answer in (*strict, *mild):
        assert answer["unknown"] == (answer["ood_score"] > answer["threshold"]) == (answer["label"] is None)


def test_nearest_remembered_pictures_come_with_the_answer(client: TestClient) -> None:
    known = png(tiny.pictures(0, EACH)[0])
    answer = client.post("/predict?nearest=3", files=parts([known])).json()["answers"][0]
    assert [near["label"] for near in answer["nearest"]] == [CLASSES[0]] * 3
    similar = [near["similarity"] for near in answer["nearest"]]
    assert similar == sorted(similar, reverse=True) and -1 <= similar[-1] <= similar[0] <= 1.001
    assert all(near["image"].startswith("data:image/png;base64,") for near in answer["nearest"])
    assert "nearest" not in client.post("/predict", files=parts([known])).json()["answers"][0]


def test_a_broken_file_is_an_error_of_its_own(client: TestClient) -> None:
    good = pictures(1, 1)[0]
    response = client.post("/predict", files=parts([b"rubbish", good, good[:40], b""]))
    assert response.status_code == 200
    first, second, third, fourth = response.json()["answers"]
    assert second["label"] == CLASSES[1] or second["unknown"]
    assert "not an image" in first["error"] and "not an image" in third["error"] and "empty" in fourth["error"]


def test_only_broken_files_are_a_422(client: TestClient) -> None:
    response = client.post("/predict", files=parts([b"rubbish"], "bad.png"))
    assert error(response, 422).startswith("bad.png: not an image")
    assert response.json()["answers"][0]["path"] == "bad.png"


@pytest.mark.parametrize("name", ["../../etc/passwd", "..", "a\0b.png", "C:\\x.png", "ü" * 400, "<script>.png", " "])
def test_file_names_are_harmless(client: TestClient, name: str) -> None:
    response = client.post("/predict", files=parts(pictures(0, 1), name))
    assert response.status_code in (200, 400), response.text
    if response.status_code == 200:
        path = response.json()["answers"][0]["path"]
        assert "/" not in path and "\\" not in path and len(path) <= 200


def test_bad_requests_are_told_what_is_wrong(client: TestClient) -> None:
    assert "multipart" in error(client.post("/predict"), 415)
    assert "multipart" in error(client.post("/predict", json={"path": "/etc/passwd"}), 415)
    boundary = {"content-type": "multipart/form-data; boundary=x"}
    assert "no file" in error(client.post("/predict", content=b"--x--\r\n", headers=boundary), 400)
    text = b'--x\r\nContent-Disposition: form-data; name="files"\r\n\r\nhello\r\n--x--\r\n'
    assert "no file" in error(client.post("/predict", content=text, headers=boundary), 400)
    for content in (b"", b"--y", b"--x\r\n\r\n\r\n--x--", b"--x\r\nContent-Disposition\r\n\r\n", b"\0" * 100):
        error(client.post("/predict", content=content, headers=boundary), 400)
    error(client.post("/predict", content=b"x", headers={"content-type": "multipart/form-data"}), 400)
    for query in ("top=0", "top=x", "accept=1", "accept=nan", "accept=-1", "nearest=99", "top=1e9"):
        assert query.split("=")[0] in error(client.post(f"/predict?{query}", files=parts(pictures(0, 1))), 422)
    error(client.get("/predict"), 405)
    error(client.get("/nothing"), 404)
    error(client.get("/info/", follow_redirects=False), 404)
    error(client.get("/page/..%2fapp.py"), 404)


def test_limits_hold(limited: TestClient) -> None:
    small = pictures(0, 1)[0]
    assert limited.post("/predict", files=parts([small] * 4)).status_code == 200
    assert "at most 4 files" in error(limited.post("/predict", files=parts([small] * 5)), 413)
    assert "at most 6 files" in error(limited.post("/teach", data={"name": "n"}, files=parts([small] * 7)), 413)
    assert "too large" in error(limited.post("/predict", files=parts([b"x" * 5001])), 422)
    wide = png(tiny.np.zeros((101, 100, 3), "uint8"))
    assert "too many pixels: 100 x 101" in error(limited.post("/predict", files=parts([wide])), 422)
    assert "request is too large" in error(limited.post("/predict", files=parts([b"x" * 50_000])), 413)
    assert "too long" in error(limited.post("/teach", data={"name": "n" * 400}, files=parts([small])), 413)


def test_a_request_without_a_length_is_cut_off(limited: TestClient) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        yield b'--x\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n'
        while sent < 10_000_000:
            sent += 10_000
            yield b"x" * 10_000

    headers = {"content-type": "multipart/form-data; boundary=x"}
    assert "too large" in error(limited.post("/predict", content=endless(), headers=headers), 413)


def test_uploads_share_a_budget(template: Path, shared: Service) -> None:
    app = create_app(shared)
    assert isinstance(app, Guard)
    app.limits = replace(app.limits, bytes_in_flight=1000)
    client = TestClient(app, base_url="http://localhost")
    response = client.post("/predict", files=parts([b"x" * 2000]))
    assert "too much" in error(response, 503) and response.headers["retry-after"]
    assert app.in_flight == 0  # given back
    assert client.post("/predict", files=parts(pictures(0, 1))).status_code == 200


def test_no_room_for_uploads_is_said(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(UploadFile, "write", full)  # into a temporary file, if it is large
    response = client.post("/predict", files=parts(pictures(0, 1)))
    assert error(response, 507) == "no room for uploads on the server's disk"


def test_requests_that_arrive_together_share_forward_passes(
    client: TestClient, shared: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier = shared.current.classifier
    passes: list[int] = []
    go = threading.Event()
    real = classifier._scores

    def counted(images: Any) -> Any:
        passes.append(len(images))
        assert go.wait(30)
        return real(images)

    monkeypatch.setattr(classifier, "_scores", counted)
    files = [*pictures(0, 12), *pictures(1, 12)]
    with ThreadPoolExecutor(24) as pool:
        futures = [pool.submit(client.post, "/predict", files=parts([data])) for data in files]
        until(lambda: shared.batcher.waiting + sum(passes) == 24)
        go.set()
        answers = [future.result().json()["answers"][0] for future in futures]
    assert sum(passes) == 24 and len(passes) <= 4, passes
    assert [answer["top"][0]["label"] for answer in answers] == [CLASSES[0]] * 12 + [CLASSES[1]] * 12


def test_a_full_queue_asks_to_come_back(template: Path) -> None:
    service = Service(template, device="cpu", limits=Limits(queued_images=1))
    service.load()
    try:
        client = TestClient(create_app(service), base_url="http://localhost")
        response = client.post("/predict", files=parts(pictures(0, 2)))
        assert "too many images wait" in error(response, 503) and response.headers["retry-after"] == "1"
    finally:
        service.close()


def test_until_the_model_is_loaded_only_health_answers(template: Path) -> None:
    service = Service(template, device="cpu")
    try:
        client = TestClient(create_app(service), base_url="http://localhost")
        assert client.get("/health").json() == {"status": "ok"}
        for response in (client.get("/ready"), client.get("/info"), client.post("/predict", files=parts([b"x"]))):
            assert "being loaded" in error(response, 503) and response.headers["retry-after"]
        service.load()
        assert client.get("/ready").json() == {"status": "ready", "version": 2, "problem": None}
    finally:
        service.close()


# ---- what it knows --------------------------------------------------------------------------------------------


def test_info_says_what_it_knows(client: TestClient, shared: Service) -> None:
    info = client.get("/info").json()
    assert info["model"] == "animals" and info["morecl"] == morecl.__version__
    assert [one["name"] for one in info["classes"]] == list(CLASSES)
    assert all(one["images"] == 40 and one["held_back"] == 10 for one in info["classes"])
    assert [version["number"] for version in info["versions"]] == [1, 2] and info["version"]["number"] == 2
    assert info["accuracy"] == shared.current.classifier.accuracy()
    assert len(info["curve"]) == 2 and info["problem"] is None
    assert info["limits"]["predict_images"] == Limits().predict_images
    assert str(shared.folder.path.parent) not in client.get("/info").text  # no path of this machine


def test_pictures_of_a_class(client: TestClient) -> None:
    for name in CLASSES:
        found = client.get("/classes/images", params={"name": name, "count": 3}).json()
        assert found["name"] == name and len(found["images"]) == 3
    assert "no class 'cow'" in error(client.get("/classes/images", params={"name": "cow"}), 404)
    error(client.get("/classes/images", params={"name": "x" * 300}), 422)
    error(client.get("/classes/images", params={"name": CLASSES[0], "count": 1000}), 422)
    error(client.get("/classes/images"), 422)


def samples(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(s.labels.values())): s.value for family in families for s in family.samples}


def test_metrics_count_what_happened(template: Path) -> None:
    service = Service(template, device="cpu")
    service.load()
    try:
        client = TestClient(create_app(service), base_url="http://localhost")
        client.post("/predict", files=parts([*pictures(0, 3), b"rubbish"]))
        client.get("/made/up/path")
        response = client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        found = samples(response.text)
        assert found["morecl_requests_total", ("POST", "/predict", "200")] == 1
        assert found["morecl_requests_total", ("GET", "other", "404")] == 1
        known, unknown = (found.get(("morecl_images_total", (kind,)), 0) for kind in ("known", "unknown"))
        assert known + unknown == 3 and found["morecl_images_total", ("unreadable",)] == 1
        assert found["morecl_batch_images_count", ()] == 1 and found["morecl_batch_images_sum", ()] == 3
        assert found["morecl_model_version", ()] == 2 and found["morecl_model_classes", ()] == 2
        assert found["morecl_queue_images", ()] == 0
    finally:
        service.close()


def test_a_bug_is_no_riddle(shared: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(images: Sequence[Any], **_: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr(shared.current.classifier, "predict", broken)
    client = TestClient(create_app(shared), base_url="http://localhost", raise_server_exceptions=False)
    response = client.post("/predict", files=parts(pictures(0, 1)))
    assert "mistake" in error(response, 500) and "secret" not in response.text


# ---- the page -------------------------------------------------------------------------------------------------


def test_the_page_loads_only_files_that_are_there(client: TestClient) -> None:
    waiting, seen = ["/", "/docs"], set[str]()
    while waiting:
        address = waiting.pop()
        if address in seen:
            continue
        seen.add(address)
        response = client.get(address)
        assert response.status_code == 200, address
        found = re.findall(r'(?:src|href)="([^"#]+)"|from "\./([^"]+)"', response.text)
        assert not any(one.startswith("/") for one, _ in found), address  # a proxy may have the server below a path
        waiting += [f"/{one.removeprefix('./')}" if one else f"/page/{other}" for one, other in found]
        assert not re.search(r"https?://(?!www\.w3\.org)", response.text), address
        assert not re.search(r"<[^>]+ (style|on\w+)=|<script>|innerHTML|eval\(", response.text), address
    assert {"/page/style.css", "/page/main.js", "/page/api.js", "/page/docs.js", "/page/icon.svg"} <= seen
    files = {f"/page/{file.name}" for file in (Path(morecl.__file__).parent / "serve" / "page").iterdir()}
    assert files - seen == {"/page/index.html", "/page/docs.html"}


def test_the_schema_names_every_endpoint(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    named = {"/predict", "/teach", "/jobs", "/jobs/{identifier}", "/jobs/{identifier}/cancel", "/undo", "/info"}
    assert paths.keys() == named | {"/rename", "/forget", "/classes/images", "/health", "/ready", "/metrics"}
    form = paths["/teach"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert form["properties"].keys() == {"files", "name", "more"} and form["required"] == ["files", "name"]
