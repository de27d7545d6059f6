"""One small model for all tests of the server; those that change it get a copy."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from morecl.serve.app import create_app
from morecl.serve.service import Service
from serving import make_model


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "animals"
    make_model(path)
    return path


@pytest.fixture
def model(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "animals"))


@pytest.fixture(scope="session")
def shared(template: Path) -> Iterator[Service]:
    """A service that tests only ask."""
    service = Service(template, device="cpu")
    service.load()
    yield service
    service.close()


@pytest.fixture
def client(shared: Service) -> TestClient:
    return TestClient(create_app(shared), base_url="http://localhost")
