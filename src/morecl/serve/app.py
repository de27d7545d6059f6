"""The endpoints. Errors are ``{"error": "..."}`` with a fitting status."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable
from functools import partial
from importlib import resources
from typing import Annotated, Any

import numpy as np
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp

from morecl import __version__
from morecl.classifier.conformal import ACCEPT
from morecl.classifier.core import TOP
from morecl.classifier.names import check_name
from morecl.errors import InputError, shortened
from morecl.images import ImageArray
from morecl.labels import composed
from morecl.serve import metrics
from morecl.serve.jobs import Job, Labels
from morecl.serve.limits import RefusedError, not_kept
from morecl.serve.security import PAGE, Guard, answer_refused
from morecl.serve.service import Question, Service
from morecl.serve.uploads import decode, shown_name

EVENTS = "text/event-stream"
POLL = 0.1  # seconds between two looks at a job
HEARTBEAT = 15.0  # seconds after which an event stream says that it is still there
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

FILES = {"type": "array", "items": {"type": "string", "format": "binary"}}  # fields of forms, for the schema
NAMES = {"type": "array", "items": {"type": "string"}, "description": "one for all files, or one each"}
MORE = {"type": "boolean", "default": False, "description": "classes may be known already"}
CONFIRM = {"type": "boolean", "default": False, "description": "must be true: it cannot be undone"}


def create_app(service: Service, *, token: str | None = None, local: bool = True, names: Iterable[str] = ()) -> ASGIApp:
    """The whole server as an ASGI app.

    Args:
        token: everything but ``/health`` and the page's own files needs it; ``None``: nothing does.
        local: answer only requests for a local name, or for one of ``names``; see
            :class:`morecl.serve.security.Guard`.
    """
    app = FastAPI(
        title="morecl",
        version=__version__,
        description="Ask a classifier about images, teach it new classes, and have it say 'unknown'.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # the address would be wrong behind a proxy
    )
    app.add_exception_handler(RefusedError, _on_refused)
    app.add_exception_handler(InputError, _on_input_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(Exception, _on_bug)
    _add_answers(app, service)
    _add_lessons(app, service)
    _add_state(app, service)
    _add_page(app)
    return Guard(app, token=token, local=local, names=names, limits=service.limits, metrics=service.metrics)


# ---- endpoints ------------------------------------------------------------------------------------------------


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/predict", openapi_extra=_form(files=FILES), tags=["answers"])
    async def predict(
        request: Request,
        top: Annotated[int, Query(ge=1, le=100, description="How many classes to name.")] = TOP,
        accept: Annotated[float, Query(gt=0, lt=1, description="Share of known images to accept.")] = ACCEPT,
        nearest: Annotated[int, Query(ge=0, le=20, description="How many similar remembered pictures.")] = 0,
    ) -> JSONResponse:
        """What is in these images? One answer per file, in the same order; a file that cannot be read has an `error`.

        If none can be read, the status is 422.
        """
        side = service.current.classifier.side
        async with _Form(request, service, service.limits.predict_images) as form:
            names = [shown_name(file.filename) for file in form.files]
            read = [await form.image(file, side) for file in form.files]
        images = [image for image in read if not isinstance(image, str)]
        found: list[dict[str, Any]] = []
        if images:
            found = await asyncio.wrap_future(service.batcher.submit(images, Question(top, accept, nearest)))
        service.metrics.images.labels("unreadable").inc(len(read) - len(images))
        ready = iter(found)
        answers = [
            {"path": name, "error": image} if isinstance(image, str) else {**next(ready), "path": name}
            for name, image in zip(names, read, strict=True)
        ]
        if not images:
            return JSONResponse({"error": f"{names[0]}: {read[0]}", "answers": answers}, 422)
        return JSONResponse({"answers": answers})


def _add_lessons(app: FastAPI, service: Service) -> None:
    jobs = service.jobs

    @app.post("/teach", status_code=202, openapi_extra=_form(files=FILES, name=NAMES, more=MORE), tags=["lessons"])
    async def teach(request: Request) -> JSONResponse:
        """Learn new classes from images. `name`: of all files, or once per file, in the order of the files.

        With `more=true`, classes may be known already and get further images. Answers a job.

        While another process changes the model, the job waits, at most ten minutes.
        """
        jobs.check_room()
        classifier = service.current.classifier
        async with _Form(request, service, service.limits.teach_images) as form:
            names = _class_names(form.texts("name"), len(form.files))
            more = form.is_true("more")
            known = [name for name in dict.fromkeys(names) if name in classifier.classes]
            if known and not more:
                raise RefusedError(
                    409, f"already known: {shortened(known)}; send more=true to add images of known classes"
                )
            read = [await form.image(file, classifier.side) for file in form.files]
            shown = [shown_name(file.filename) for file in form.files]
        images = [image for image in read if not isinstance(image, str)]
        readable = [i for i, image in enumerate(read) if not isinstance(image, str)]
        kept = Labels([names[i] for i in readable], [shown[i] for i in readable])
        broken = [f"{file}: {image}" for file, image in zip(shown, read, strict=True) if isinstance(image, str)]
        if empty := [name for name in dict.fromkeys(names) if name not in kept.names]:
            raise RefusedError(422, f"no image of {shortened(empty)} can be read: {broken[0]}")
        stack = np.stack(images)
        job = await asyncio.to_thread(jobs.submit, stack, kept, more=more, unreadable=broken)
        return JSONResponse(jobs.snapshot(job), 202, {"Location": f"jobs/{job.id}"})

    @app.get("/jobs", tags=["lessons"])
    async def list_jobs() -> JSONResponse:
        """All lessons, newest first."""
        return JSONResponse({"jobs": jobs.all()})

    @app.get("/jobs/{identifier}", tags=["lessons"])
    async def job(identifier: str, request: Request) -> Response:
        """A lesson and how far it is. With `Accept: text/event-stream`: an event at each change, until it ends."""
        found = jobs.get(identifier)
        if EVENTS in request.headers.get("accept", ""):
            return StreamingResponse(_events(service, found), media_type=EVENTS)
        return JSONResponse(jobs.snapshot(found))

    @app.post("/jobs/{identifier}/cancel", tags=["lessons"])
    async def cancel(identifier: str) -> JSONResponse:
        """Stop a lesson; the model stays as it was."""
        found = jobs.get(identifier)
        await asyncio.to_thread(jobs.cancel, found)
        return JSONResponse(jobs.snapshot(found))

    @app.post("/undo", tags=["lessons"])
    async def undo(
        version: Annotated[
            int | None, Query(description="The version to take back; 409 if it is not the newest.")
        ] = None,
    ) -> JSONResponse:
        """Go back to the version before the last change."""
        now = await asyncio.to_thread(service.undo, version)
        return JSONResponse({"version": now.model_dump()})

    @app.post("/rename", openapi_extra=_form(old="the class", new="its new name"), tags=["lessons"])
    async def rename(request: Request) -> JSONResponse:
        """Give a class another name. Makes a version."""
        async with _Form(request, service, 0) as form:
            old, new = form.text("old"), _plain(form.text("new"))
        check_name(new)
        message = await asyncio.to_thread(service.rename, old, new)
        return JSONResponse({"message": message, "version": service.current.version.model_dump()})

    @app.post("/forget", openapi_extra=_form(name="the class", confirm=CONFIRM), tags=["lessons"])
    async def forget(request: Request) -> JSONResponse:
        """Forget a class for good. All older versions are removed, because they hold it, so there is no way back."""
        async with _Form(request, service, 0) as form:
            name, confirmed = form.text("name"), form.is_true("confirm")
        message = await asyncio.to_thread(partial(service.forget, name, confirmed=confirmed))
        return JSONResponse({"message": message, "version": service.current.version.model_dump()})


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/info", tags=["model"])
    async def info() -> JSONResponse:
        """What the model knows, its versions, and the limits of this server."""
        return JSONResponse(await asyncio.to_thread(service.info))

    @app.get("/classes/images", tags=["model"])
    async def class_images(
        name: Annotated[str, Query(max_length=200)], count: Annotated[int, Query(ge=1, le=64)] = 8
    ) -> JSONResponse:
        """Pictures of a class that the model keeps, as data URLs."""
        return JSONResponse({"name": name, "images": await asyncio.to_thread(service.pictures, name, count)})

    @app.get("/health", tags=["server"])
    async def health() -> dict[str, str]:
        """The server runs. Needs no token."""
        return {"status": "ok"}

    @app.get("/ready", tags=["server"])
    async def ready() -> dict[str, Any]:
        """The model is loaded; 503 until then. `problem`: why a newer version on disk is not in use."""
        return {"status": "ready", "version": service.current.version.number, "problem": service.problem}

    @app.get("/metrics", tags=["server"])
    async def prometheus() -> Response:
        """Figures for Prometheus."""
        return Response(service.metrics.text(), media_type=metrics.CONTENT_TYPE)


def _add_page(app: FastAPI) -> None:
    folder = resources.files("morecl.serve") / "page"
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}

    def answer(name: str) -> Response:
        if name not in files:
            raise RefusedError(404, "there is no such file")
        kind = TYPES["." + name.rpartition(".")[2]]
        return Response(files[name], media_type=kind, headers={"Cache-Control": "no-cache"})

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return answer("index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return answer("docs.html")

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        return answer("icon.svg")

    @app.get(PAGE + "{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        return answer(name)


async def _events(service: Service, job: Job) -> AsyncIterator[str]:
    """Server-sent events: the job at each change, and a comment now and then to keep the connection alive."""
    seen, spoken = -1, time.monotonic()
    while True:
        value = service.jobs.snapshot(job)
        if value["changes"] != seen:
            seen, spoken = value["changes"], time.monotonic()
            yield f"event: job\ndata: {json.dumps(value)}\n\n"
            if job.ended and value["state"] == job.state:
                return
        elif time.monotonic() - spoken > HEARTBEAT:
            spoken = time.monotonic()
            yield ": still there\n\n"
        await asyncio.sleep(POLL)


# ---- forms ----------------------------------------------------------------------------------------------------


class _Form:
    """The form of a request while it is read: up to ``most`` ``files``, one at least, and the text fields by name."""

    def __init__(self, request: Request, service: Service, most: int):
        self._request, self._service, self._most = request, service, most
        self._limits = service.limits

    async def __aenter__(self) -> _Form:
        if not self._request.headers.get("content-type", "").startswith("multipart/form-data"):
            what = "the files as a form" if self._most else "a form"
            raise RefusedError(415, f"send {what}: Content-Type: multipart/form-data")
        try:
            self._form = await self._request.form(
                max_files=self._most, max_fields=self._most + 10, max_part_size=self._limits.field_bytes
            )
        except HTTPException as error:
            raise _bad_form(str(error.detail), self._most) from error
        except OSError as error:
            raise not_kept(error) from error
        self.files = [value for _, value in self._form.multi_items() if isinstance(value, UploadFile)]
        if self._most and not self.files:
            await self._form.close()
            raise RefusedError(400, "there is no file in the form; send one or more as 'files'")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._form.close()

    def texts(self, name: str) -> list[str]:
        return [value for value in self._form.getlist(name) if isinstance(value, str)]

    def text(self, name: str) -> str:
        """A field that is there exactly once."""
        given = self.texts(name)
        if not given:
            raise RefusedError(400, f"the field {name!r} is missing")
        if len(given) > 1:
            raise RefusedError(400, f"send the field {name!r} once, not {len(given)} times")
        return given[0]

    def is_true(self, name: str) -> bool:
        values = {"true": True, "1": True, "false": False, "0": False, "": False}
        given = self.texts(name)
        if not given:
            return False
        if len(given) > 1 or given[0].lower() not in values:
            raise RefusedError(400, f"the field {name!r} must be true or false")
        return values[given[0].lower()]

    async def image(self, file: UploadFile, side: int) -> ImageArray | str:
        """The image in a file, or why it cannot be read. One after the other, so that other requests get their turn."""
        if (file.size or 0) > self._limits.file_bytes:
            return f"the file is too large; at most {self._limits.file_bytes / 2**20:g} MiB are accepted"
        data = await file.read()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._service.decoders, decode, data, side, self._limits.pixels)


def _bad_form(detail: str, most: int) -> RefusedError:
    if detail.startswith("Too many") and not most:
        return RefusedError(413, "too many fields in the form, or a file, which is not asked for")
    if detail.startswith("Too many"):
        return RefusedError(413, f"too many files or fields in one request; at most {most} files are accepted")
    if "exceeded" in detail:
        return RefusedError(413, "a field of the form is too long")
    return RefusedError(400, f"the form cannot be read: {detail}")


def _plain(name: str) -> str:
    """A name as a user means it: one way to write each letter, no spaces around it."""
    return composed(name).strip()


def _class_names(given: list[str], files: int) -> list[str]:
    """The class of each file."""
    names = [_plain(name) for name in given]
    if not names:
        raise RefusedError(400, "the name of the class is missing; send it as the field 'name'")
    for name in dict.fromkeys(names):
        check_name(name)
    if len(names) not in (1, files):
        raise RefusedError(400, f"send one name for all files, or one for each: files {files}, names {len(names)}")
    return names * files if len(names) == 1 else names


def _form(**fields: str | dict[str, Any]) -> dict[str, Any]:
    """The form of an endpoint, for the OpenAPI schema: the description of a text, or the schema of another field."""
    schemas = {
        key: {"type": "string", "description": field} if isinstance(field, str) else field
        for key, field in fields.items()
    }
    required = [key for key, field in schemas.items() if "default" not in field]
    schema = {"type": "object", "properties": schemas, "required": required}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


# ---- errors ---------------------------------------------------------------------------------------------------


async def _on_refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RefusedError)
    return answer_refused(error)


async def _on_input_error(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": str(error)}, 400)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    texts = [f"{problem['loc'][-1]}: {problem['msg'].lower()}" for problem in error.errors()]
    return JSONResponse({"error": "; ".join(texts)}, 422)


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": "the server made a mistake; its log says more"}, 500)
