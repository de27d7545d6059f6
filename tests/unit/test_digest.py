from __future__ import annotations

import hashlib
from pathlib import Path

from morecl.digest import file_sha256


def test_the_digest_is_that_of_all_bytes(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000
    (tmp_path / "file").write_bytes(content)
    assert file_sha256(tmp_path / "file") == hashlib.sha256(content).hexdigest()
