// Small changes of the model: rename a class, forget one, go back a version. Each is asked for in a dialog.
import { post } from "./api.js";
import { $, counted } from "./dom.js";

let about = () => null, changed = async () => {};
let chosen = ""; // the class that a dialog is about

function say(where, text, wrong = false) {
  $(where).textContent = text;
  $(where).classList.toggle("wrong", wrong);
}

// Sends the change, and says in the element `where` how it went.
async function send(where, path, fields, text) {
  const form = new FormData();
  for (const [key, value] of Object.entries(fields ?? {})) form.append(key, value);
  say(where, text);
  try {
    const answer = await post(path, fields ? form : undefined);
    await changed().catch(() => { /* it is changed all the same; the page looks again by itself */ });
    say(where, answer.message ? `${answer.message}.` : `Version ${answer.version.number} is in use again.`);
    return true;
  } catch (failure) {
    say(where, failure.message, true);
    return false;
  }
}

function open(dialog) {
  $(dialog).returnValue = "no";
  $(dialog).showModal();
}

function whenConfirmed(dialog, act) {
  $(dialog).addEventListener("close", () => { if ($(dialog).returnValue === "yes") act(); });
}

export function askToRename(name) {
  chosen = name;
  $("rename-text").textContent = `“${name}” gets another name; nothing else changes.`;
  open("rename-dialog");
  $("rename-to").value = name;
  $("rename-to").select();
}

export function askToForget(name) {
  chosen = name;
  const { classes, versions, ends_of_unknown: ends } = about();
  if (classes.length === 1) { say("known-said", `“${name}” is the only class; delete the model instead.`, true); return; }
  const older = versions.length === 1 ? "The older version, which holds it, is" : `All ${counted(versions.length, "older version")}, which hold it, are`;
  const warning = Object.hasOwn(ends, name) ? ` Note: ${ends[name]}.` : "";
  $("forget-text").textContent = `“${name}” is never an answer any more, and its images leave the model. ${older} removed too.${warning} This cannot be undone.`;
  open("forget-dialog");
}

export function startChanging(info, onChange) {
  about = info;
  changed = onChange;
  let newest = null;
  $("undo").addEventListener("click", () => {
    const [last, before] = about().versions.toReversed();
    newest = last.number;
    $("undo-text").textContent = `Version ${newest} (${last.what || last.action}) is removed for good; version ${before.number} with ${counted(before.classes, "class", "classes")} is used again.`;
    open("undo-dialog");
  });
  whenConfirmed("undo-dialog", async () => {
    $("undo").disabled = true;
    if (!await send("undo-said", `undo?version=${newest}`, null, "Going back …")) $("undo").disabled = false;
  });
  whenConfirmed("rename-dialog", () => {
    const to = $("rename-to").value.trim();
    if (to !== chosen) send("known-said", "rename", { old: chosen, new: to }, "Renaming …");
  });
  whenConfirmed("forget-dialog", () => send("known-said", "forget", { name: chosen, confirm: "true" }, "Forgetting …"));
}
