"""Lessons over HTTP: learned in another process, switched to in one step, cancelled, undone; nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import tiny
from morecl.classifier import ModelFolder
from morecl.classifier.capacity import IS_FULL
from morecl.errors import InputError
from morecl.locking import LOCK, belongs_to_claim, claimed
from morecl.serve import teaching
from morecl.serve.app import create_app
from morecl.serve.limits import Limits
from morecl.serve.private import PREFIX
from morecl.serve.service import Service
from serving import CLASSES, DIES, FAILS, NEW, QUICK, SLOW, Below, parts, pictures, program
from waiting import until

Serve = Callable[..., tuple[Service, TestClient]]
FORM = {"name": "green frog"}


@pytest.fixture
def serve(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Starts a service over a copy of the model with this program as its teacher."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    services = []

    def start(teacher: str, **limits: Any) -> tuple[Service, TestClient]:
        service = Service(model, device="cpu", command=program(teacher), limits=Limits(**limits))
        services.append(service)
        service.load()
        return service, TestClient(create_app(service), base_url="http://localhost")

    yield start
    for service in services:
        service.close()
    assert list((tmp_path / "tmp").iterdir()) == []  # no upload outlives the server


def teach(client: TestClient, files: list[bytes], **form: Any) -> dict[str, Any]:
    response = client.post("/teach", data=form or FORM, files=parts(files))
    assert response.status_code == 202, response.text
    job: dict[str, Any] = response.json()
    assert response.headers["location"] == f"jobs/{job['id']}"  # also right below the path of a proxy
    return job


def state(client: TestClient, job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"/jobs/{job['id']}").json()
    return found


def ended(client: TestClient, job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = until(lambda: (s := state(client, job))["state"] in ("done", "failed", "cancelled") and s)
    return found


def running(client: TestClient, job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = until(lambda: (s := state(client, job))["share"] > 0 and s)
    return found


def uploads(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "tmp").rglob("*.npy"))


def test_a_class_is_taught_known_and_undone(serve: Serve, tmp_path: Path, model: Path) -> None:
    service, client = serve(QUICK)
    question = parts(pictures(NEW, 4, draw=3))
    before = client.post("/predict", files=question).json()["answers"]
    job = teach(client, [*pictures(NEW, 30), b"rubbish"])
    assert job["state"] in ("queued", "running")
    assert job["classes"] == {"green frog": 30} and "not an image" in job["unreadable"][0]
    during = client.post("/predict", files=question).json()["answers"]
    assert [a["version"] for a in during] == [2] * 4 or ended(client, job)  # the old version goes on
    done = ended(client, job)
    assert done["state"] == "done", done
    assert (done["version"], done["share"], done["error"]) == (3, 1.0, None)
    (lesson,) = done["lessons"]
    assert lesson["classes"] == {"green frog": 24} and lesson["held_back"] == 6
    assert uploads(tmp_path) == []
    info = client.get("/info").json()
    assert info["version"]["number"] == 3 and info["version"]["what"] == "'green frog'"
    assert [one["name"] for one in info["classes"]] == [*CLASSES, "green frog"]
    after = client.post("/predict", files=question).json()["answers"]
    assert {a["version"] for a in after} == {3} and {a["top"][0]["label"] for a in after} == {"green frog"}
    assert ModelFolder(model).load(device="cpu").classes == [*CLASSES, "green frog"]

    assert client.post("/undo").json()["version"]["number"] == 2
    assert [one["name"] for one in client.get("/info").json()["classes"]] == list(CLASSES)
    again = client.post("/predict", files=question).json()["answers"]
    assert [a["top"] for a in again] == [a["top"] for a in before]
    assert len(ModelFolder(model).versions()) == 2
    assert client.post("/undo").json()["version"]["number"] == 1
    response = client.post("/undo")
    assert response.status_code == 409 and "no earlier version" in response.json()["error"]
    assert service.metrics.jobs.labels("done")._value.get() == 1


def test_the_location_of_a_job_is_right_below_the_path_of_a_proxy(serve: Serve) -> None:
    service, _ = serve(QUICK)
    app = Below(create_app(service), "/photos")
    client = TestClient(app, base_url="http://localhost/photos/")
    response = client.post("teach", data=FORM, files=parts(pictures(NEW, 2)))
    where = response.url.join(response.headers["location"])
    assert where.path == f"/photos/jobs/{response.json()['id']}"
    assert client.get(where).json()["id"] == response.json()["id"]
    assert client.get(f"http://localhost/jobs/{response.json()['id']}").status_code == 404


def test_more_images_of_a_known_class_and_a_new_one_are_one_version(serve: Serve, model: Path) -> None:
    _, client = serve(QUICK)
    files = [*pictures(0, 10, draw=4), *pictures(NEW, 20)]
    done = ended(client, teach(client, files, name=[CLASSES[0]] * 10 + ["green frog"] * 20, more="true"))
    assert done["state"] == "done", done
    assert [(one["action"], one["classes"]) for one in done["lessons"]] == [
        ("add", {CLASSES[0]: 8}),
        ("learn", {"green frog": 16}),
    ]
    classes = {one["name"]: one["images"] for one in client.get("/info").json()["classes"]}
    assert classes == {CLASSES[0]: 48, CLASSES[1]: 40, "green frog": 16}
    assert ModelFolder(model).versions()[-1].number == 3


def test_a_picture_in_a_known_and_a_new_class_is_learned_as_neither(serve: Serve) -> None:
    _, client = serve(QUICK)
    files = [*pictures(0, 10, draw=4), *pictures(NEW, 20)]
    names = [CLASSES[0]] * 10 + ["green frog"] * 20
    hostile = "<img src=x onerror=alert(1)>.png"  # a name to show, whatever is in it
    given = [("files", (f"photos/{number}.png", data)) for number, data in enumerate([b"rubbish", *files])]
    form = {"name": [CLASSES[0], *names, "green frog"], "more": "true"}
    response = client.post("/teach", data=form, files=[*given, ("files", (hostile, files[0]))])
    assert response.status_code == 202, response.text
    done = ended(client, response.json())
    assert done["state"] == "done", done
    assert done["unreadable"][0].startswith("0.png: ")
    assert [(one["action"], sum(one["classes"].values()) + one["held_back"]) for one in done["lessons"]] == [
        ("add", 9),
        ("learn", 20),
    ]
    (note,) = done["lessons"][0]["notes"]
    assert f"in several classes at once: 1.png ({CLASSES[0]!r}) and {hostile} ('green frog')" in note


def test_new_classes_are_learned_though_nothing_of_the_known_ones_is_new(serve: Serve, model: Path) -> None:
    _, client = serve(QUICK)
    seen = pictures(0, 10, draw=4)
    assert ended(client, teach(client, seen, name=CLASSES[0], more="true"))["state"] == "done"
    names = [CLASSES[0]] * 10 + ["green frog"] * 20
    done = ended(client, teach(client, [*seen, *pictures(NEW, 20)], name=names, more="true"))
    assert done["state"] == "done", done
    (lesson,) = done["lessons"]
    assert lesson["classes"] == {"green frog": 16}
    assert lesson["notes"] == [f"nothing new of {CLASSES[0]!r}: every image was seen before", IS_FULL]
    assert ModelFolder(model).versions()[-1].what == "'green frog'"
    again = ended(client, teach(client, seen, name=CLASSES[0], more="true"))
    assert again["state"] == "done" and again["note"] == "Nothing new: every image was seen before"


def test_a_lesson_reports_and_can_be_cancelled(serve: Serve, tmp_path: Path, model: Path) -> None:
    _, client = serve(SLOW)
    before = {file: file.read_bytes() for file in model.rglob("*") if file.is_file()}
    job = teach(client, pictures(NEW, 3))
    shown = running(client, job)
    assert shown["state"] == "running" and shown["step"].startswith("epoch") and shown["seconds_left"] == 3
    assert len(uploads(tmp_path)) == 1
    assert uploads(tmp_path)[0].parent.stat().st_mode & 0o077 == 0  # private
    response = client.post("/undo")
    assert response.status_code == 409 and "lesson is under way" in response.json()["error"]
    for path, fields in (("/rename", {"old": CLASSES[0], "new": "b"}), ("/forget", {"name": CLASSES[0]})):
        response = client.post(path, files=form(**fields, confirm="true"))
        assert response.status_code == 409 and "lesson is under way" in response.json()["error"]
    answer = client.post(f"/jobs/{job['id']}/cancel").json()
    assert answer["cancelling"] or answer["state"] == "cancelled"  # it may be over by now
    assert ended(client, job)["state"] == "cancelled"
    assert uploads(tmp_path) == []
    assert {file: file.read_bytes() for file in model.rglob("*") if file.is_file()} == before
    response = client.post(f"/jobs/{job['id']}/cancel")
    assert response.status_code == 409 and "ended already" in response.json()["error"]


def form(**fields: str) -> list[tuple[str, tuple[None, str]]]:
    """Text fields alone, sent as a form with parts."""
    return [(key, (None, value)) for key, value in fields.items()]


def test_a_class_is_renamed(serve: Serve, model: Path) -> None:
    _, client = serve(QUICK)
    question = parts(pictures(0, 2, draw=3))
    before = client.post("/predict", files=question).json()["answers"]
    new = "<b>re\u0301nard</b>"  # stored as one way to write it
    response = client.post("/rename", files=form(old=CLASSES[0], new=f" {new} "))
    assert response.status_code == 200, response.text
    named = "<b>r\u00e9nard</b>"
    assert response.json()["message"] == f"{CLASSES[0]!r} is now {named!r}: version 3"
    assert response.json()["version"]["number"] == 3
    assert ModelFolder(model).load(device="cpu").classes == [named, CLASSES[1]]
    after = client.post("/predict", files=question).json()["answers"]
    assert [a["top"][0]["label"] for a in after] == [named] * 2
    assert [a["confidence"] for a in after] == [a["confidence"] for a in before]
    for fields, status, message in (
        ({"old": CLASSES[0], "new": "x"}, 404, "unknown class 'red fox'"),
        ({"old": CLASSES[1], "new": named}, 409, "there already is a class"),
        ({"old": CLASSES[1], "new": "Unknown"}, 400, "cannot name a class"),
        ({"old": CLASSES[1], "new": " "}, 400, "cannot name a class"),
        ({"old": CLASSES[1], "new": "x" * 201}, 400, "cannot name a class"),
        ({"old": CLASSES[1]}, 400, "the field 'new' is missing"),
    ):
        response = client.post("/rename", files=form(**fields))
        assert (response.status_code, message in response.json()["error"]) == (status, True), response.text
    assert client.post("/rename", json={"old": "a", "new": "b"}).status_code == 415
    assert client.post("/rename", files=[*form(old="a", new="b"), *parts([b"x"])]).status_code == 413
    assert ModelFolder(model).versions()[-1].number == 3
    assert client.post("/undo?version=2").status_code == 409  # somebody has changed it since
    assert client.post("/undo?version=3").json()["version"]["number"] == 2


def test_a_class_is_found_however_its_accents_are_written(serve: Serve, model: Path) -> None:
    _, client = serve(QUICK)
    assert client.post("/rename", files=form(old=CLASSES[0], new="r\u00e9nard")).status_code == 200
    other = "re\u0301nard"
    assert len(client.get("/classes/images", params={"name": other}).json()["images"]) == 8
    assert client.post("/rename", files=form(old=other, new="caf\u00e9")).status_code == 200
    assert client.post("/forget", files=form(name="cafe\u0301", confirm="true")).status_code == 200
    assert ModelFolder(model).load(device="cpu").classes == [CLASSES[1]]


def test_a_change_that_cannot_be_saved_says_why(serve: Serve, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, client = serve(QUICK)

    def full(*_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

    with monkeypatch.context() as patch:
        patch.setattr(service.folder, "commit", full)
        response = client.post("/rename", files=form(old=CLASSES[0], new="x"))
    assert response.status_code == 500 and "No space left on device" in response.json()["error"]
    assert client.post("/rename", files=form(old=CLASSES[0], new="x")).status_code == 200  # it waits for nobody


def test_to_teach_the_same_images_again_is_no_mistake(serve: Serve, model: Path) -> None:
    _, client = serve(QUICK)
    images = pictures(NEW, 30)
    assert ended(client, teach(client, images))["version"] == 3
    done = ended(client, teach(client, images, **FORM, more="true"))
    assert (done["state"], done["version"], done["lessons"]) == ("done", 3, [])
    assert done["note"] == "Nothing new: every image was seen before"
    assert [version.number for version in ModelFolder(model).versions()] == [1, 2, 3]
    failed = ended(client, teach(client, images, name=CLASSES[0], more="true"))  # as another class it is one
    assert failed["state"] == "failed" and failed["note"] is None


def test_a_class_is_forgotten_only_if_that_is_confirmed(serve: Serve, model: Path) -> None:
    _, client = serve(QUICK)
    before = {file: file.read_bytes() for file in model.rglob("*") if file.is_file()}
    for fields, status, message in (
        ({"name": CLASSES[0]}, 400, "cannot be undone and removes 2 older versions, and without 'red fox' too few "),
        ({"name": CLASSES[0]}, 400, "(10), so nothing will be called unknown; confirm it with confirm=true"),
        ({"name": CLASSES[0], "confirm": "false"}, 400, "cannot be undone"),
        ({"name": CLASSES[0], "confirm": "maybe"}, 400, "must be true or false"),
        ({"name": "green frog", "confirm": "true"}, 404, "unknown class 'green frog'"),
        ({"confirm": "true"}, 400, "the field 'name' is missing"),
    ):
        response = client.post("/forget", files=form(**fields))
        assert (response.status_code, message in response.json()["error"]) == (status, True), response.text
    with ModelFolder(model).changing():  # another process
        for path, fields in (
            ("/forget", {"name": CLASSES[0], "confirm": "true"}),
            ("/rename", {"old": "a", "new": "b"}),
            ("/undo", {}),
        ):
            response = client.post(path, files=form(**fields))
            assert (response.status_code, response.json()["error"]) == (409, teaching.BUSY)  # no path, no process
    assert {file: file.read_bytes() for file in model.rglob("*") if file.is_file()} == before
    assert client.get("/info").json()["ends_of_unknown"].keys() == {*CLASSES}
    done = client.post("/forget", files=form(name=CLASSES[0], confirm="true")).json()
    assert done["message"].startswith(f"{CLASSES[0]!r} is forgotten: version 3; 2 older versions removed; with 10 held")
    assert done["message"].endswith("; nothing is called unknown")
    assert client.get("/info").json()["ends_of_unknown"] == {}
    assert [version.number for version in ModelFolder(model).versions()] == [3]
    assert [path.name for path in (model / "versions").iterdir()] == ["3"]
    (answer,) = client.post("/predict", files=parts(pictures(0, 1, draw=3))).json()["answers"]
    assert [one["label"] for one in answer["top"]] == [CLASSES[1]] and answer["version"] == 3
    assert client.get(f"/classes/images?name={CLASSES[0]}").status_code == 404
    only = client.post("/forget", files=form(name=CLASSES[1], confirm="true"))
    assert only.status_code == 409 and "is the only class" in only.json()["error"]
    assert client.post("/undo").status_code == 409


def test_lessons_wait_for_each_other_and_the_queue_is_bounded(serve: Serve, tmp_path: Path) -> None:
    _, client = serve(SLOW, queued_jobs=2)
    first = teach(client, pictures(NEW, 1))
    running(client, first)
    second, third = teach(client, pictures(NEW, 1)), teach(client, pictures(NEW, 1))
    assert state(client, second)["state"] == state(client, third)["state"] == "queued"
    response = client.post("/teach", data=FORM, files=parts(pictures(NEW, 1)))
    assert response.status_code == 503 and response.headers["retry-after"]
    assert [job["id"] for job in client.get("/jobs").json()["jobs"]] == [third["id"], second["id"], first["id"]]
    assert client.post(f"/jobs/{second['id']}/cancel").json()["state"] == "cancelled"
    assert len(uploads(tmp_path)) == 2
    client.post(f"/jobs/{first['id']}/cancel")
    assert running(client, third)["state"] == "running"
    assert ended(client, first)["state"] == "cancelled"


def test_events_tell_each_change_until_the_end(serve: Serve) -> None:
    _, client = serve('print(\'{"step": "one", "share": 0.5}\')\n' + FAILS)
    job = teach(client, pictures(NEW, 1))
    response = client.get(f"/jobs/{job['id']}", headers={"accept": "text/event-stream"})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    assert [event["changes"] for event in events] == sorted({event["changes"] for event in events})
    assert events[-1]["state"] == "failed"
    assert client.get("/jobs/none").status_code == 404


@pytest.mark.parametrize(
    ("teacher", "reason"), [(FAILS, "no luck"), (DIES, "was ended"), ("raise SystemExit(1)", "code 1"), ("?", "code 1")]
)
def test_a_lesson_that_fails_says_why_and_changes_nothing(serve: Serve, teacher: str, reason: str) -> None:
    _, client = serve(teacher)
    job = ended(client, teach(client, pictures(NEW, 1)))
    assert job["state"] == "failed" and reason in job["error"]
    assert client.get("/ready").json()["version"] == 2


def test_a_lesson_gets_half_of_the_cores_that_the_server_may_use(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (variables := ("OMP_NUM_THREADS", "MKL_NUM_THREADS")):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    _, client = serve(
        f"import json, os; print(json.dumps({{'error': ' '.join(os.environ[name] for name in {variables})}}))"
    )
    assert ended(client, teach(client, pictures(NEW, 1)))["error"] == "3 3"


def test_a_lesson_that_was_saved_counts_even_if_it_was_killed_after_that(serve: Serve, model: Path) -> None:
    """The process is cancelled between the commit and its last word."""
    saves = f"""
import sys, time
sys.stdin.readline()
from morecl.classifier import ModelFolder
folder = ModelFolder({str(model)!r})
with folder.changing():
    print('{{"step": "loading", "from": 2}}', flush=True)
    folder.commit(folder.load(1, device="cpu"), "learn", "again")
print('{{"step": "saved", "share": 0.9}}', flush=True)
time.sleep(60)
"""
    _, client = serve(saves)
    job = teach(client, pictures(NEW, 1))
    running(client, job)
    client.post(f"/jobs/{job['id']}/cancel")
    assert ended(client, job)["state"] == "done"
    assert client.get("/ready").json()["version"] == 3


def save_again(model: Path) -> None:
    """As another process does: a further version, as the newest."""
    folder = ModelFolder(model)
    with folder.changing():
        folder.commit(folder.load(device="cpu"), "again")


def test_a_change_made_elsewhere_is_noticed(serve: Serve, model: Path) -> None:
    service, client = serve(SLOW)
    folder = ModelFolder(model)
    with folder.changing():
        folder.undo()
    until(lambda: client.get("/ready").json()["version"] == 1)
    weights = next((model / "versions" / "1").glob("held*"))
    with folder.changing(), service._loading:  # it does not look before the damage is done
        number = folder.commit(folder.load(device="cpu"), "learn", "twice")
        broken = next((model / "versions" / str(number)).glob("held*"))
        broken.write_bytes(weights.read_bytes()[:-5])
    until(lambda: client.get("/info").json()["problem"])
    assert "damaged" in client.get("/info").json()["problem"]
    assert client.get("/ready").json()["version"] == 1  # the last good one goes on
    assert client.post("/predict", files=parts(pictures(0, 1))).status_code == 200
    with pytest.raises(InputError):
        service._refused = None
        service.refresh()


def test_a_version_that_the_device_cannot_hold_stops_nothing(
    serve: Serve, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, client = serve(QUICK)

    def too_large(*_: Any) -> Any:
        raise RuntimeError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(service, "_read", too_large)
        save_again(model)
        until(lambda: client.get("/ready").json()["problem"])
        assert client.get("/ready").json() == {
            "status": "ready",
            "version": 2,
            "problem": "RuntimeError: CUDA out of memory",
        }
        renamed = client.post("/rename", files=form(old=CLASSES[0], new="fox"))
        assert renamed.status_code == 500 and "saved, but the new version cannot be loaded" in renamed.json()["error"]
    done = ended(client, teach(client, pictures(NEW, 30)))  # lessons go on
    assert done["state"] == "done" and done["version"] == 5
    assert client.get("/ready").json() == {"status": "ready", "version": 5, "problem": None}
    assert client.get("/info").json()["classes"][0]["name"] == "fox"


def test_a_bug_in_a_lesson_stops_no_other(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    service, client = serve(QUICK)
    with monkeypatch.context() as patch:
        patch.setattr(service.jobs, "_start", lambda *_: 1 / 0)
        failed = ended(client, teach(client, pictures(NEW, 2)))
    assert failed["state"] == "failed" and "ZeroDivisionError" in failed["error"]
    assert ended(client, teach(client, pictures(NEW, 30)))["state"] == "done"


def test_what_another_process_saves_is_not_taken_for_the_lesson(serve: Serve, model: Path) -> None:
    """It came before the lesson had the model for itself."""
    waits = """
import json, sys, time
from pathlib import Path
from morecl.classifier import ModelFolder
order = json.loads(sys.stdin.readline())
folder = ModelFolder(order["model"])
print(json.dumps({"step": "waiting", "share": 0.1}), flush=True)
while len(folder.versions()) < 3:
    time.sleep(0.05)
print(json.dumps({"step": "loading", "share": 0.2, "from": folder.versions()[-1].number}), flush=True)
time.sleep(600)
"""
    _, client = serve(waits)
    job = teach(client, pictures(NEW, 2))
    running(client, job)
    save_again(model)
    until(lambda: state(client, job)["share"] == 0.2)
    client.post(f"/jobs/{job['id']}/cancel")
    assert ended(client, job)["state"] == "cancelled"


def test_a_lesson_cancelled_while_it_waits_did_not_make_what_another_process_saved(serve: Serve, model: Path) -> None:
    waits = """
import sys, time
sys.stdin.readline()
print('{"step": "waiting", "share": 0.1}', flush=True)
time.sleep(600)
"""
    _, client = serve(waits)
    job = teach(client, pictures(NEW, 2))
    running(client, job)
    save_again(model)
    client.post(f"/jobs/{job['id']}/cancel")
    assert ended(client, job)["state"] == "cancelled"


def test_a_lesson_waits_for_another_process(serve: Serve, model: Path) -> None:
    _, client = serve(f"import morecl.serve.teaching as teaching; teaching.POLL = 0.05; {QUICK}")
    with ModelFolder(model).changing():
        job = teach(client, pictures(NEW, 30))
        until(lambda: state(client, job)["step"] == "waiting for another process that changes the model")
    done = ended(client, job)
    assert (done["state"], done["version"]) == ("done", 3), done


def test_a_lesson_does_not_wait_for_ever(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teaching, "PATIENCE", 0.05)
    monkeypatch.setattr(teaching, "POLL", 0.02)
    said: list[dict[str, Any]] = []
    with ModelFolder(model).changing(), pytest.raises(InputError) as caught:
        teaching.teach(teaching.Order(str(model), "", [], [], False, "cpu"), said.append)
    assert str(caught.value) == teaching.BUSY
    assert [list(event) for event in said] == [["step"]]  # told once


def test_bad_lessons_are_refused_at_once(serve: Serve, tmp_path: Path) -> None:
    _, client = serve(SLOW)
    good = pictures(NEW, 2)

    def refused(status: int, files: list[bytes] = good, **form: Any) -> str:
        response = client.post("/teach", data=form, files=parts(files))
        assert response.status_code == status, response.text
        return str(response.json()["error"])

    assert "name of the class is missing" in refused(400)
    assert "one name for all files, or one for each: files 2, names 3" in refused(400, name=["a", "b", "c"])
    for name in ("", "  ", "unknown", "a\nb", "x" * 201, "\u202e"):
        assert "cannot name a class" in refused(400, name=name)
    assert "more=true" in refused(409, name=CLASSES[0])
    assert "'more' must be true or false" in refused(400, name="a", more="perhaps")
    assert "no image of 'b' can be read" in refused(422, [good[0], b"rubbish"], name=["a", "b"])
    assert client.get("/jobs").json()["jobs"] == [] and uploads(tmp_path) == []


def test_names_go_with_their_files(serve: Serve, tmp_path: Path) -> None:
    echo = """
import json, sys, numpy
order = json.loads(sys.stdin.readline())
means = numpy.load(order["images"]).mean((1, 2, 3)).round(3).tolist()
print(json.dumps({"error": json.dumps([order["names"], means, order["more"]])}))
"""
    service, client = serve(echo)
    images = [tiny.pictures(kind, 1, draw=9)[0] for kind in (0, 1, 2)]
    side = service.current.classifier.side
    assert images[0].shape == (side, side, 3)
    files = [data for kind in (0, 1, 2) for data in pictures(kind, 1)]
    job = ended(client, teach(client, files, name=[" Cafe\u0301 ", CLASSES[0], "b"], more="true"))
    names, means, more = json.loads(job["error"])
    assert names == ["Café", CLASSES[0], "b"] and more is True
    assert means == pytest.approx([float(np.mean(image)) for image in images], abs=1e-3)


def test_the_teacher_ends_with_the_server(model: Path, tmp_path: Path) -> None:
    """kill -9 of a process that started a lesson: the lesson ends too, and removes its images and those that wait."""
    private = tmp_path / f"{PREFIX}x"
    folder, waiting = private / "job", private / "next"
    folder.mkdir(parents=True)
    waiting.mkdir()
    (waiting / "images.npy").touch()
    np.save(folder / "images.npy", tiny.pictures(NEW, 400, draw=1))
    order = {"model": str(model), "images": str(folder / "images.npy"), "more": False, "device": "cpu"}
    order |= {"names": ["frog"] * 400, "files": [f"{i}.png" for i in range(400)]}
    server = f"""
import json, subprocess, sys
from pathlib import Path
from morecl.locking import claimed
holding = claimed(Path({str(private)!r}))
holding.__enter__()
command = [sys.executable, "-m", "morecl.serve.teaching"]
teacher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
teacher.stdin.write(json.dumps({order!r}).encode() + b"\\n")
teacher.stdin.flush()
print(teacher.pid, flush=True)
for line in teacher.stdout:
    print(line.decode().strip(), flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", server],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    teacher = int(process.stdout.readline())
    assert "loading" in process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    until(lambda: not private.exists(), 30)
    until(lambda: not is_alive(teacher), 30)
    assert [version.number for version in ModelFolder(model).versions()] == [1, 2]


@pytest.mark.parametrize("name", ["morecl-serve-x", "else"])
def test_a_lesson_removes_no_folder_but_that_of_its_dead_server(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    for job in ("job", "next"):
        (folder / job).mkdir(parents=True)
    (folder / LOCK).touch()
    script = "from pathlib import Path; from morecl.serve import teaching; "
    script += f"teaching._end_with_the_server(Path({str(folder / 'job')!r}))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    def end() -> set[str]:
        done = subprocess.run([sys.executable, "-c", script], stdin=subprocess.DEVNULL, env=environment, timeout=60)
        assert done.returncode == 3
        return {path.name for path in folder.iterdir() if not belongs_to_claim(path)} if folder.exists() else set()

    with claimed(folder):  # its server lives
        assert end() == {"next"}
    assert end() == (set() if name.startswith(PREFIX) else {"next"})


def test_a_model_that_is_gone_is_said_to_be(serve: Serve, model: Path) -> None:
    """Its folder was moved, or is an empty one because nothing is mounted there."""
    _, client = serve(QUICK)
    model.rename(model.with_name("moved"))
    for empty in (False, True):
        if empty:
            model.mkdir()
        for path, fields in (("/undo", {}), ("/rename", {"old": CLASSES[0], "new": "x"})):
            response = client.post(path, files=form(**fields))
            assert (response.status_code, response.json()["error"]) == (409, teaching.GONE)
    assert ended(client, teach(client, pictures(NEW, 2)))["error"] == teaching.GONE
    assert list(model.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), OSError("10 requested and 2 written")])
def test_no_room_for_a_lesson_is_said(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    _, client = serve(QUICK)

    def full(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        response = client.post("/teach", data=FORM, files=parts(pictures(NEW, 2)))
    assert (response.status_code, response.json()["error"]) == (507, "no room for uploads on the server's disk")
    assert client.get("/jobs").json()["jobs"] == []
    assert not [path for path in (tmp_path / "tmp").glob("*/*") if not belongs_to_claim(path)]


def test_nobody_learns_where_the_model_lies(serve: Serve, model: Path) -> None:
    """A damaged model: in what a lesson says, in what a change says, and in why a new version is not in use."""
    _, client = serve(QUICK)
    save_again(model)
    newest = ModelFolder(model).versions()[-1].number
    (model / "versions" / str(newest) / "learner.json").unlink()
    until(lambda: client.get("/info").json()["problem"])
    said = [client.get("/info").json()["problem"]]
    said.append(client.post("/rename", files=form(old=CLASSES[0], new="fox")).json()["error"])
    script = """
import sys
from morecl.serve import teaching
teaching._end_with_the_server = lambda folder: None
sys.exit(teaching.main())
"""
    said.append(said_by(script, model, model / "none.npy"))
    wanted = f"the model's versions/{newest} is damaged: learner.json is missing. `morecl undo MODEL` removes it and"
    assert all(text.startswith(wanted) and str(model.parent) not in text for text in said), said


@pytest.mark.parametrize("folder", ["/srv/my model", "/srv/m", "m"])
def test_a_path_is_taken_out_of_a_message(folder: str) -> None:
    text = f"{folder}: no; `morecl undo {shlex.quote(folder)}` or {folder}/a/b, not {folder}2, /x{folder}2 and xm"
    wanted = f"the model: no; `morecl undo MODEL` or the model's a/b, not {folder}2, /x{folder}2 and xm"
    assert teaching.without_path(text, folder) == wanted


@pytest.mark.parametrize(
    ("images", "message"),
    [("x.npy", "the lesson cannot be saved: No space left on device"), ("y.npy", "the lesson failed: No such file")],
)
def test_a_lesson_that_fails_says_why(model: Path, tmp_path: Path, images: str, message: str) -> None:
    script = """
import errno, os, sys
from morecl.classifier import ModelFolder, lesson
from morecl.serve import teaching
def full(*_): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")
ModelFolder.commit = full
teaching.lesson = lambda *_: []
lesson.taught = lambda lessons: ("learn", "nothing")
teaching._end_with_the_server = lambda folder: None
sys.exit(teaching.main())
"""
    np.save(tmp_path / "x.npy", np.zeros((1, 8, 8, 3), np.uint8))
    assert said_by(script, model, tmp_path / images).startswith(message)


def said_by(script: str, model: Path, images: Path) -> str:
    """What a lesson that fails says at the end."""
    order = {
        "model": str(model),
        "images": str(images),
        "names": ["a"],
        "files": ["a.png"],
        "more": False,
        "device": "cpu",
    }
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, input=json.dumps(order) + "\n", capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 2
    return str(json.loads(done.stdout.splitlines()[-1])["error"])


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_folders_of_killed_servers_are_removed(serve: Serve, tmp_path: Path) -> None:
    dead, strange = tmp_path / "tmp" / "morecl-serve-dead", tmp_path / "tmp" / "morecl-serve-not-ours"
    (dead / "job").mkdir(parents=True)
    (dead / ".lock").touch()
    strange.mkdir()
    first, _ = serve(SLOW)
    folders = set((tmp_path / "tmp").iterdir())
    assert dead not in folders and strange in folders and len(folders) == 2
    second, _ = serve(SLOW)
    assert len(set((tmp_path / "tmp").iterdir())) == 3  # that of a living server stays
    first.close()
    second.close()
    strange.rmdir()
