// The page: loads what the model knows, and keeps it up to date.
import { ENDED, call } from "./api.js";
import { startAsking } from "./ask.js";
import { startChanging } from "./change.js";
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
  info = await call("info");
  drawKnown(info);
  knows(info);
  $("problem").hidden = !info.problem;
  $("problem").textContent = info.problem ? `A newer version cannot be loaded: ${info.problem}` : "";
}

async function look() {
  try {
    const { version, problem } = await call("ready");
    if (version !== info?.version.number || problem !== info.problem) await refresh();
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

for (const kind of ["dragover", "drop"]) window.addEventListener(kind, event => event.preventDefault());
startTeaching(job => { if (ENDED.has(job.state)) { refresh(); look(); } else { status("learning", "busy"); } });
startAsking(() => info?.limits ?? { predict_images: 8, file_bytes: Infinity, request_bytes: Infinity }, teachThese);
startChanging(() => info, refresh);
keepLooking();
