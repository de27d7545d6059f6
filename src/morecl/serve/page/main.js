// The page: loads what the model knows, and keeps it up to date.
import { ENDED, call, post } from "./api.js";
import { startAsking } from "./ask.js";
import { $ } from "./dom.js";
import { drawKnown } from "./known.js";
import { findLessons, knows, startTeaching, teachThese } from "./teach.js";

const EVERY = 4000; // milliseconds between two looks for changes made elsewhere
let info = null, learning = false;

function status(text, kind) {
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").className = `pill ${kind}`;
}

async function refresh() {
  info = await call("/info");
  drawKnown(info);
  knows(info);
  $("problem").hidden = !info.problem;
  $("problem").textContent = info.problem ? `A newer version cannot be loaded: ${info.problem}` : "";
}

async function look() {
  try {
    const { version } = await call("/ready");
    if (version !== info?.version.number) await refresh();
    learning = await findLessons();
    status(learning ? "learning" : "ready", learning ? "busy" : "ready");
  } catch (failure) {
    status(failure.status === 503 ? "loading" : "not reachable", failure.status === 503 ? "" : "off");
  }
}

async function keepLooking() {
  for (;;) {
    if (!document.hidden) await look();
    await new Promise(resolve => setTimeout(resolve, info ? EVERY : 500));
  }
}

function startUndo() {
  $("undo").addEventListener("click", () => {
    const [newest, before] = info.versions.toReversed();
    $("undo-text").textContent = `Version ${newest.number} (${newest.what || newest.action}) is removed for good; version ${before.number} with ${before.classes} classes is used again.`;
    $("undo-dialog").returnValue = "no";
    $("undo-dialog").showModal();
  });
  $("undo-dialog").addEventListener("close", async () => {
    if ($("undo-dialog").returnValue !== "yes") return;
    $("undo").disabled = true;
    $("undo-said").classList.remove("wrong");
    $("undo-said").textContent = "Going back …";
    try {
      const { version } = await post("/undo");
      $("undo-said").textContent = `Version ${version.number} is in use again.`;
      await refresh();
    } catch (failure) {
      $("undo-said").classList.add("wrong");
      $("undo-said").textContent = failure.message;
      $("undo").disabled = false;
    }
  });
}

for (const kind of ["dragover", "drop"]) window.addEventListener(kind, event => event.preventDefault());
startTeaching(job => { if (ENDED.has(job.state)) { refresh(); look(); } else { status("learning", "busy"); } });
startAsking(() => info?.limits ?? { predict_images: 8 }, teachThese);
startUndo();
keepLooking();
