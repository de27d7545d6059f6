"""The served page in a real browser: ask, unknown, teach, the class appears, reload, undo; wide, narrow, dark."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn

import tiny
from browser import CHROMIUM, Browser
from morecl.classifier import ModelFolder, changes
from morecl.serve.app import create_app
from morecl.serve.limits import Limits
from morecl.serve.service import Service
from serving import CLASSES, NEW, QUICK, Below, make_model, pictures, png, program
from tiny import np
from waiting import until

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")

FIT = """(() => {
  const width = document.documentElement.clientWidth;
  const cut = [...document.querySelectorAll("body *")].filter(element => {
    if (!element.checkVisibility() || element.closest(".scroll, .skip, svg, pre")) return false;
    return element.getBoundingClientRect().right > width + 1;
  });
  return {overflow: document.documentElement.scrollWidth - width, cut: cut.map(one => one.outerHTML.slice(0, 80))};
})()"""
# Contrast of each visible text with what is behind it, by the formula of WCAG 2; at least 4.5 for small text.
CONTRAST = """(() => {
  const light = colour => colour.slice(0, 3).map(v => v / 255)
    .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const numbers = text => text.match(/[\\d.]+/g).map(Number);
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const found = numbers(getComputedStyle(e).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility() || element.disabled || element.closest("svg, script, noscript")) continue;
    const [a, b] = [light(numbers(getComputedStyle(element).color)), light(behind(element))].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < 4.5) poor.push(`${ratio.toFixed(2)} ${element.outerHTML.slice(0, 80)}`);
  }
  return poor;
})()"""
# Every control has a name that a screen reader can say, and every picture says what it is or that it is decoration.
NAMELESS = """[...document.querySelectorAll("input, button, a, progress, img, svg")].filter(element => {
  if (element.hidden || element.closest("[aria-hidden=true]") || element.ariaHidden === "true") return false;
  if (element.tagName === "IMG") return !element.hasAttribute("alt");
  const labels = [...element.labels ?? []].map(label => label.textContent).join("");
  return !(element.ariaLabel || element.textContent + labels).trim();
}).map(element => element.outerHTML.slice(0, 100))"""


@contextmanager
def served(model: Path, token: str | None = None, below: str = "", **limits: int) -> Iterator[str]:
    """The address of a running server whose lessons are short; ``below``: a path, without it nothing is answered."""
    service = Service(model, device="cpu", command=program(QUICK), limits=Limits(**limits))
    app = Below(create_app(service, token=token), below)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", ws="none", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        service.load()
        until(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}{below}/"
    finally:
        server.should_exit = True
        thread.join(20)
        service.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images as files: one that is known, 30 of a new kind, one unlike anything."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "known.png").write_bytes(pictures(0, 1)[0])
    for index, data in enumerate(pictures(NEW, 30)):
        (folder / f"new-{index}.png").write_bytes(data)
    (folder / "broken.png").write_bytes(b"no image")
    noise = np.random.default_rng(1).integers(0, 256, (300, 400, 3)).astype("uint8")
    (folder / "odd <b>name.png").write_bytes(png(noise))
    return folder


def ask(browser: Browser, *chosen: Path) -> list[dict[str, str]]:
    """The answers on the page, after asking about these files."""
    browser.run("document.getElementById('ask-clear').click()")
    browser.choose("#ask-files", chosen)
    browser.wait_for(f"document.querySelectorAll('.answer .file').length === {len(chosen)}")
    return browser.run(  # type: ignore[no-any-return]
        "[...document.querySelectorAll('.answer')].map(a => ({kind: a.className,"
        " file: a.querySelector('.file').innerText, text: a.innerText,"
        " label: (a.querySelector('.label, .mark') ?? {}).innerText,"
        " bars: a.querySelectorAll('.bars dt').length, near: a.querySelectorAll('.near img').length}))"
    )


def known(browser: Browser) -> list[str]:
    return browser.run("[...document.querySelectorAll('.class strong')].map(one => one.innerText)")  # type: ignore[no-any-return]


def test_the_story_of_a_page(tmp_path: Path, files: Path) -> None:
    model = tmp_path / "animals"
    make_model(model)
    with served(model) as address, Browser(tmp_path / "profile") as browser:
        browser.open(address)
        browser.wait_for("document.getElementById('status').textContent === 'ready'")
        assert known(browser) == list(CLASSES)
        browser.run("document.getElementById('tasks').scrollIntoView()")  # pictures are loaded when they are seen
        browser.wait_for("document.querySelectorAll('.class img').length === 16")

        # ask: a known one, one that was never taught, one that is no image, a name that looks like HTML
        new = sorted(files.glob("new-*.png"))
        first, unknown, broken, odd = ask(
            browser, files / "known.png", new[0], files / "broken.png", *files.glob("odd*")
        )
        assert first["label"] == CLASSES[0] and first["bars"] == 2 and first["near"] == 6 and "sure" in first["text"]
        assert "unknown" in unknown["kind"] and unknown["label"] == "unknown" and unknown["bars"] == 2
        assert "broken" in broken["kind"] and "not an image" in broken["text"]
        assert odd["file"] == "odd <b>name.png"
        assert "4 answers: " in browser.run("document.getElementById('ask-said').textContent")
        width = browser.run("document.querySelector('.answer .fill').getBoundingClientRect().width")
        track = browser.run("document.querySelector('.answer .track').getBoundingClientRect().width")
        share = float(first["text"].split(" % sure")[0].split()[-1]) / 100
        assert width / track == pytest.approx(share, abs=0.01)

        # every size, light and dark: nothing is cut, everything can be read
        for wide in (1400, 420):
            browser.resize(wide)
            for dark in (False, True):
                browser.dark(dark)
                fit = browser.run(FIT)
                assert fit == {"overflow": 0, "cut": []}, (wide, dark)
                assert browser.run(CONTRAST) == [], (wide, dark)
        assert browser.run(NAMELESS) == []
        browser.resize(1400)

        # teach by keyboard: the button of the unknown answer puts the image there and the cursor into the name
        browser.run("document.querySelector('.answer.unknown button').focus()")
        browser.press_enter()
        assert browser.run("document.activeElement.ariaLabel") == "Name of the class"
        browser.write("green frog")
        browser.choose(".group input[type=file]", new[1:])
        assert browser.run("document.querySelector('.chosen .count').textContent") == "30 images"
        browser.run("document.querySelector('#teach-form [type=submit]').focus()")
        browser.press_enter()
        browser.wait_for("document.querySelectorAll('.job').length")
        browser.wait_for("document.querySelectorAll('.job.done, .job.failed').length", 120)
        assert "right on images held back" in browser.run("document.querySelector('.job.done').innerText")
        browser.wait_for("document.querySelectorAll('.class').length === 3")
        assert known(browser) == [*CLASSES, "green frog"]
        (answer,) = ask(browser, new[0])
        assert "green frog" in answer["text"].splitlines() and answer["bars"] == 3

        # reload: everything is still there
        browser.open(address)
        browser.wait_for("document.querySelectorAll('.class').length === 3")
        assert browser.run("document.querySelectorAll('#versions tr').length") == 3
        assert "green frog" in browser.wait_for("document.querySelector('.job.done')?.innerText")

        # undo asks first
        browser.run("document.getElementById('undo').click()")
        assert "Version 3" in browser.run("document.getElementById('undo-text').textContent")
        browser.run("document.querySelector('#undo-dialog [value=no]').click()")
        assert browser.run("document.querySelectorAll('.class').length") == 3
        browser.run("document.getElementById('undo').click()")
        browser.run("document.querySelector('#undo-dialog [value=yes]').click()")
        browser.wait_for("document.querySelectorAll('.class').length === 2")

        browser.open(f"{address}docs")
        browser.wait_for("document.querySelectorAll('.endpoint').length === 13")
        assert all(url.startswith((address, "data:", "blob:")) for url in browser.requested)
        # the two refusals that the story contains are logged by the browser itself
        assert [text for text in browser.console if "status of 4" not in text] == []


def test_a_wrong_answer_is_corrected(tmp_path: Path, files: Path) -> None:
    model, taught, (fox, jay) = tmp_path / "animals", tmp_path / "taught.png", CLASSES
    make_model(model)
    taught.write_bytes(png(tiny.pictures(0, 1)[0]))

    def correct(number: int, name: str) -> None:
        """Teach the image of answer ``number`` as ``name``, by keyboard, and wait for the end of the lesson."""
        jobs = browser.run("document.querySelectorAll('.job').length")
        browser.run(f"document.querySelectorAll('.answer')[{number}].querySelector('button').focus()")
        browser.press_enter()
        assert browser.run("document.querySelector('.chosen .count').textContent") == "1 image"
        browser.write(name)
        assert "are added to what it has seen" in browser.run("document.querySelector('.group .hint').textContent")
        browser.press_enter()
        browser.wait_for(f"document.querySelectorAll('.job.done, .job.failed').length === {jobs + 1}", 120)

    with served(model) as address, Browser(tmp_path / "profile") as browser:
        browser.open(address)
        browser.wait_for("document.querySelectorAll('.class').length === 2")
        new = sorted(files.glob("new-*.png"))
        kinds = ask(browser, files / "known.png", new[0], taught, files / "broken.png")
        assert [one.get("label") for one in kinds] == [fox, "unknown", fox, None]
        buttons = "[...document.querySelectorAll('.answer')].map(a => a.querySelector('button'))"
        wrong, unknown = "Wrong? Teach it: quiet small", "Teach this: small"
        shown = browser.run(f"{buttons}.map(one => one && `${{one.innerText}}: ${{one.className}}`)")
        assert shown == [wrong, unknown, wrong, None]

        correct(0, jay)
        browser.wait_for("document.querySelectorAll('.class')[1].innerText.includes('41 images')")
        assert f"more images of {jay!r}" in browser.run("document.querySelector('#versions .used').innerText")
        assert known(browser) == [fox, jay]

        # an image that was taught stays what it was taught as, and the page says why
        correct(2, jay)
        said = browser.run("document.querySelector('.job.failed .says').textContent")
        assert f"taught.png (taught as {fox!r}, now {jay!r})" in said and "To correct it, undo the lesson" in said
        for wide in (1400, 390):
            browser.resize(wide)
            for dark in (False, True):
                browser.dark(dark)
                assert browser.run(FIT) == {"overflow": 0, "cut": []}, (wide, dark)
                assert browser.run(CONTRAST) == [], (wide, dark)
        assert browser.run(NAMELESS) == []

        # two wrong answers, two classes: an image joins the class that was added last, which then is in sight
        for wide in (1400, 390):
            browser.resize(wide, 420)
            browser.run("document.querySelectorAll('.answer button')[0].click()")
            browser.run("document.getElementById('add-group').click()")
            browser.run("scrollTo(0, 0)")
            browser.run("document.querySelectorAll('.answer button')[2].click()")
            chosen = "[...document.querySelectorAll('.group')].map(one => one.querySelectorAll('.chosen img').length)"
            assert browser.run(chosen) == [1, 1]
            name = "document.querySelector('.group:last-child input[type=text]')"
            assert browser.run(f"document.activeElement === {name}")
            box = browser.run(f"{name}.getBoundingClientRect().toJSON()")
            bar = browser.run("document.querySelector('nav').getBoundingClientRect().bottom")
            assert bar <= box["top"] and box["bottom"] <= 420, (wide, bar, box)
            for _ in range(2):
                browser.run("document.querySelector('.group .row button').click()")
        assert browser.console == []


SAID = "document.getElementById('known-said').textContent"
LONG = "n" * 200


def test_a_known_class_is_recognised_however_its_accent_is_typed(tmp_path: Path) -> None:
    model = tmp_path / "animals"
    make_model(model)
    folder = ModelFolder(model)
    with folder.changing():
        changes.rename(folder, folder.load(), CLASSES[0], "caf\u00e9")
    with served(model) as address, Browser(tmp_path / "profile") as browser:
        browser.open(address)
        browser.wait_for("document.querySelectorAll('.class').length === 2")
        for name, is_known in (("caf\u00e9", True), ("cafe\u0301", True), ("cafe", False)):
            browser.run(f"document.querySelector('.group input').value = {name!r}")
            browser.run("document.querySelector('.group input').dispatchEvent(new Event('input', {bubbles: true}))")
            assert browser.run("document.querySelector('.group .hint').hidden") is not is_known, name


def test_a_class_is_renamed_and_forgotten_on_the_page(tmp_path: Path) -> None:
    model = tmp_path / "animals"
    make_model(model)
    hostile = "<img src=x onerror=alert(1)>"

    def click(word: str, name: str, answer: str | None = None) -> None:
        buttons = "[...document.querySelectorAll('.class button')]"
        browser.run(f"{buttons}.find(one => one.ariaLabel === {json.dumps(f'{word} {name}')}).click()")
        if answer:
            browser.run(f"document.querySelector('#{word.lower()}-dialog [value={answer}]').click()")

    with served(model) as address, Browser(tmp_path / "profile") as browser:
        browser.open(address)
        browser.wait_for("document.querySelectorAll('.class').length === 2")
        click("Rename", CLASSES[0])
        assert browser.run("document.activeElement.id") == "rename-to"
        browser.write(hostile)  # in place of the old name, which is selected
        browser.press_enter()
        browser.wait_for(f"{SAID}.includes('version 3')")
        assert known(browser) == [hostile, CLASSES[1]] and not browser.run("document.querySelector('[src=x]')")
        click("Rename", CLASSES[1])
        browser.write(hostile)
        browser.press_enter()
        browser.wait_for(f"{SAID}.includes('there already is a class')")
        click("Rename", hostile)
        browser.write(LONG)
        browser.press_enter()
        browser.wait_for(f"{SAID}.includes('version 4')")
        for wide in (1400, 420):
            browser.resize(wide)
            for dialog in ("", "Rename", "Forget"):
                if dialog:
                    click(dialog, LONG)
                for dark in (False, True):
                    browser.dark(dark)
                    assert browser.run(FIT) == {"overflow": 0, "cut": []}, (wide, dialog, dark)
                    assert browser.run(CONTRAST) == [], (wide, dialog, dark)
                if dialog:
                    browser.run(f"document.querySelector('#{dialog.lower()}-dialog [value=no]').click()")
        assert browser.run(NAMELESS) == []

        # forgetting asks first, and the answer at hand is no
        click("Forget", LONG)
        assert browser.run("document.activeElement.value") == "no"
        text = browser.run("document.getElementById('forget-text').textContent")
        assert "All 4 older versions, which hold it, are removed too. Note: without " in text
        assert text.endswith("(10), so nothing will be called unknown. This cannot be undone.")
        browser.press_enter()
        browser.wait_for("!document.querySelector('dialog[open]')")
        assert "Forgetting" not in browser.run(SAID)
        assert known(browser) == [LONG, CLASSES[1]] and len(ModelFolder(model).versions()) == 4
        click("Forget", LONG, "yes")
        browser.wait_for(f"{SAID}.includes('4 older versions removed')")
        assert browser.run("document.querySelectorAll('.class').length") == 1
        assert browser.run("document.getElementById('undo').disabled")
        assert len(ModelFolder(model).versions()) == 1
        click("Forget", CLASSES[1])
        assert "is the only class" in browser.run(SAID) and not browser.run("document.querySelector('dialog[open]')")
        assert [text for text in browser.console if "status of 4" not in text] == []


def test_a_page_sees_that_a_version_was_replaced_elsewhere(tmp_path: Path) -> None:
    model = tmp_path / "animals"
    make_model(model)
    with served(model) as address, Browser(tmp_path / "profile") as browser:
        browser.open(address)
        browser.wait_for("document.querySelectorAll('.class').length === 2")
        folder = ModelFolder(model)
        with folder.changing():
            folder.undo()
            changes.rename(folder, folder.load(), CLASSES[0], "other")
        browser.wait_for("document.querySelectorAll('.class').length === 1")
        assert known(browser) == ["other"]
        assert browser.run("document.getElementById('problem').hidden")
        with folder.changing():
            number = folder.commit(folder.load(), "again")
            (model / "versions" / str(number) / "state.safetensors").write_bytes(b"rubbish")
            (model / "model.json").touch()  # if the server was faster than the damage
        browser.wait_for("!document.getElementById('problem').hidden")
        assert "A newer version cannot be loaded" in browser.run("document.getElementById('problem').textContent")


def test_a_lesson_names_the_files_it_leaves_out(tmp_path: Path) -> None:
    model, folder = tmp_path / "animals", tmp_path / "files"
    make_model(model)
    hostile = "<img src=x onerror=alert(1)>.png"
    for name, first in (("a", 0), ("b", 5)):
        (folder / name).mkdir(parents=True)
        for number, data in enumerate(pictures(NEW, 10)[first : first + 5]):
            (folder / name / f"{name}{number}.png").write_bytes(data)
    (folder / "a" / hostile).write_bytes((folder / "b" / "b0.png").read_bytes())
    (folder / "a" / "<b>broken.png").write_bytes(b"rubbish")
    with served(model) as address, Browser(tmp_path / "profile", 420) as browser:
        browser.open(address)
        browser.wait_for("document.querySelectorAll('.class').length === 2")
        browser.run("document.getElementById('add-group').click()")
        for number, name in ((1, "a"), (2, "b")):
            browser.run(f"document.querySelector('.group:nth-child({number}) input[type=text]').focus()")
            browser.write(name)
            browser.choose(f".group:nth-child({number}) input[type=file]", sorted((folder / name).iterdir()))
        browser.run("document.querySelector('#teach-form [type=submit]').click()")
        browser.wait_for("document.querySelectorAll('.job.done, .job.failed').length", 120)
        said = browser.run("document.querySelector('.job.done .says').textContent")
        assert f"in several classes at once: {hostile} ('a') and b0.png ('b')" in said
        assert "1 file could not be read: <b>broken.png: not an image" in said
        assert not browser.run("document.querySelector('[src=x], .job b')")
        assert browser.run(FIT) == {"overflow": 0, "cut": []}


def test_the_end_of_a_long_form_can_be_reached_beside_many_answers(tmp_path: Path, files: Path) -> None:
    model = tmp_path / "animals"
    make_model(model)
    with served(model) as address, Browser(tmp_path / "profile", 1366, 650) as browser:
        browser.open(address)
        browser.wait_for("document.querySelectorAll('.class').length === 2")
        browser.dark(False)  # and no smooth scrolling
        new = sorted(files.glob("new-*.png"))
        assert len(ask(browser, *new[:20])) == 20
        browser.run("document.getElementById('add-group').click()")
        for number in (1, 2):
            browser.choose(f".group:nth-child({number}) input[type=file]", new)
        browser.wait_for("document.querySelectorAll('.chosen img').length === 24")
        browser.run("document.querySelector('.answer:nth-child(5)').scrollIntoView()")
        button = "document.querySelector('#teach-form [type=submit]')"
        browser.run(f"{button}.scrollIntoView({{ block: 'nearest' }})")
        hit = f"(({{x, y, width, height}}) => document.elementFromPoint(x + width / 2, y + height / 2) === {button})"
        assert browser.run(f"{hit}({button}.getBoundingClientRect())")
        assert browser.run(FIT)["overflow"] == 0


def test_long_names_of_classes_can_be_told_apart(tmp_path: Path, files: Path) -> None:
    model = tmp_path / "animals"
    make_model(model)
    folder = ModelFolder(model)
    for name in CLASSES:
        with folder.changing():
            changes.rename(folder, folder.load(), name, f"class number 000 of many {name}")
    with served(model) as address, Browser(tmp_path / "profile") as browser:
        browser.open(address)
        browser.wait_for("document.querySelectorAll('.class').length === 2")
        for wide in (1400, 420):
            browser.resize(wide)
            ask(browser, files / "known.png")
            cut = "[...document.querySelectorAll('.bars dt')].filter(one => one.scrollHeight > one.clientHeight + 1 || "
            assert browser.run(f"{cut} one.scrollWidth > one.clientWidth).length") == 0, wide
            assert browser.run("document.querySelector('.bars .track').clientWidth") > 50, wide


def test_the_page_says_what_is_too_large_before_it_is_sent(tmp_path: Path, files: Path) -> None:
    model, large = tmp_path / "animals", tmp_path / "large.png"
    make_model(model)
    large.write_bytes(b"x" * 2_000_000)
    with (
        served(model, file_bytes=2**20, request_bytes=2**20, teach_images=200) as address,
        Browser(tmp_path / "profile") as browser,
    ):
        browser.open(address)
        browser.wait_for("document.querySelectorAll('.class').length === 2")
        first, second = ask(browser, large, files / "known.png")
        assert "the file is too large; at most 1 MiB are accepted" in first["text"] and second["bars"] == 2
        assert "2 answers: 1 known, 1 unreadable" in browser.run("document.getElementById('ask-said').textContent")
        # five files of 300 kB are asked about in two requests, and are too much for one lesson
        noise = np.random.default_rng(1).integers(0, 256, (320, 320, 3)).astype("uint8")
        photos = [tmp_path / f"photo-{number}.png" for number in range(5)]
        for photo in photos:
            photo.write_bytes(png(noise))
        assert all(answer["bars"] == 2 for answer in ask(browser, *photos))
        browser.run("document.querySelector('.group input[type=text]').focus()")
        browser.write("noise")
        browser.choose(".group input[type=file]", photos)
        browser.run("document.querySelector('#teach-form [type=submit]').click()")
        said = "document.getElementById('teach-said').textContent"
        assert browser.run(said) == (
            "5 images of 2 MiB are too much for one lesson, which takes at most 1 MiB. Teach them in several lessons."
        )
        for _ in range(40):
            browser.choose(".group input[type=file]", photos)
        browser.run("document.querySelector('#teach-form [type=submit]').click()")
        assert "205 images" in browser.run(said) and "at most 200 images" in browser.run(said)
        assert not any(url.endswith("/teach") for url in browser.requested)


def test_the_chart_of_many_lessons(tmp_path: Path) -> None:
    model = tmp_path / "animals"
    make_model(model)
    with served(model) as address, Browser(tmp_path / "profile") as browser:
        browser.open(address)
        browser.wait_for("document.querySelectorAll('.class').length === 2")
        script = """(async accuracies => {
          const { curve } = await import("/page/known.js");
          const drawing = curve(accuracies.map(accuracy => ({ accuracy, classes: 2 })), 500);
          const dot = [...drawing.querySelectorAll("circle")].at(-1);
          return {
            below: drawing.querySelector(".value").getAttribute("y") - dot.getAttribute("cy"),
            dots: drawing.querySelectorAll("circle").length, label: drawing.getAttribute("aria-label"),
          };
        })"""
        for falls in ([80, 70], [99, 95]):
            assert browser.run(f"{script}({falls})")["below"] > 0, falls
        for rises in ([70, 80], [70, 99], [95]):
            assert browser.run(f"{script}({rises})")["below"] < 0, rises  # the value stands beside its line
        assert browser.run(f"{script}({list(range(60, 90))})")["dots"] == 30
        crowded = browser.run(f"{script}({[90] * 364 + [95]})")
        assert crowded["dots"] == 1  # more would hide the line
        assert crowded["label"] == "Accuracy after each lesson. lesson 365: 95.0 % of 2 classes"


def test_the_page_works_below_a_path_of_a_proxy(tmp_path: Path, files: Path) -> None:
    model = tmp_path / "animals"
    make_model(model)
    with served(model, below="/photos") as address, Browser(tmp_path / "profile") as browser:
        browser.open(address)
        browser.wait_for("document.getElementById('status').textContent === 'ready'")
        assert ask(browser, files / "known.png")[0]["label"] == CLASSES[0]
        browser.run("document.getElementById('tasks').scrollIntoView()")
        browser.wait_for("document.querySelectorAll('.class img').length === 16")
        browser.run("document.querySelector('.group input[type=text]').focus()")
        browser.write("green frog")
        browser.choose(".group input[type=file]", sorted(files.glob("new-*.png")))
        browser.run("document.querySelector('#teach-form [type=submit]').click()")
        browser.wait_for("document.querySelectorAll('.job.done').length", 120)
        browser.wait_for("document.querySelectorAll('.class').length === 3")
        browser.run("document.getElementById('undo').click()")
        browser.run("document.querySelector('#undo-dialog .main').click()")
        browser.wait_for("document.querySelectorAll('.class').length === 2")
        browser.run("document.querySelector('.class .foot button').click()")
        browser.run("document.getElementById('rename-to').value = 'vixen'")
        browser.run("document.querySelector('#rename-dialog .main').click()")
        browser.wait_for("document.querySelector('.class strong').textContent === 'vixen'")
        browser.run("document.querySelector('nav .last').click()")
        browser.wait_for("document.querySelectorAll('.endpoint').length > 5")
        assert f"'{address}predict'" in browser.run("document.body.innerText")
        assert all(url.startswith((address, "blob:", "data:")) for url in browser.requested)
        assert browser.console == []


def test_a_page_with_a_token_asks_for_it_once(tmp_path: Path) -> None:
    model = tmp_path / "animals"
    make_model(model)
    with served(model, token="correct-horse") as address, Browser(tmp_path / "profile", 420) as browser:
        browser.open(address)
        browser.wait_for("document.getElementById('token-dialog').open")
        for token in ("wrong-horse", "correct-horse"):
            browser.wait_for("document.activeElement.id === 'token'")
            for _ in range(3):  # a browser closes the dialog in spite of the page
                browser.press_escape()
                browser.wait_for("document.getElementById('token-dialog').open")
            browser.write(token)
            browser.run("document.querySelector('#token-dialog [type=submit]').click()")
            if token == "wrong-horse":
                browser.wait_for("document.getElementById('token-wrong').textContent.includes('not the right one')")
        browser.wait_for("document.querySelectorAll('.class').length === 2")
        browser.open(address)  # the tab still knows it
        browser.wait_for("document.querySelectorAll('.class').length === 2")
        assert not browser.run("document.getElementById('token-dialog').open")
