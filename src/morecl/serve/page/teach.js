// Teach: groups of images with a name each become a lesson; lessons are shown with their progress.
import { ENDED, bytes, call, follow, post } from "./api.js";
import { $, counted, h, mebibytes, percent, points, takesFiles, thumbnail } from "./dom.js";

const PREVIEWS = 12;
const NAMED = 3; // unreadable files that are named
let classes = new Set(), limits = {}, changed = () => {};
const groups = [];
const followed = new Map(); // job's id -> its element

// What stands in a field, with each letter written in the one way that the server compares.
const typed = input => input.value.trim().normalize();

class Group {
  constructor() {
    const number = groups.length + 1;
    this.files = [];
    this.name = h("input", { type: "text", maxLength: 200, required: true, placeholder: "for example: oak leaf", list: "class-names" });
    this.name.setAttribute("aria-label", "Name of the class");
    this.name.addEventListener("input", () => this.hint());
    this.known = h("p", { className: "hint", hidden: true });
    this.chosen = h("div", { className: "chosen" });
    const input = h("input", { type: "file", accept: "image/*", multiple: true });
    this.zone = h("label", { className: "drop slim" }, input, h("strong", {}, "Drop its images here, or choose them"));
    takesFiles(this.zone, files => this.take(files));
    const remove = h("button", { type: "button", className: "quiet" }, "Remove");
    remove.addEventListener("click", () => this.remove());
    this.element = h("fieldset", { className: "group" }, h("legend", {}, "Class"),
      h("div", { className: "row" }, this.name, remove), this.known, this.zone, this.chosen);
    groups.push(this);
    $("groups").append(this.element);
    tidy();
    if (number > 1) this.name.focus();
  }

  take(files) {
    this.files.push(...files);
    this.draw();
  }

  draw() {
    for (const image of this.chosen.querySelectorAll("img")) URL.revokeObjectURL(image.src);
    const shown = this.files.slice(0, PREVIEWS).map(file => thumbnail(URL.createObjectURL(file), ""));
    const clear = h("button", { type: "button", className: "quiet small" }, "Clear");
    clear.addEventListener("click", () => { this.files = []; this.draw(); this.name.focus(); });
    this.chosen.replaceChildren(...this.files.length
      ? [...shown, h("span", { className: "count", role: "status" }, counted(this.files.length, "image")), clear] : []);
  }

  hint() {
    const known = classes.has(typed(this.name));
    this.known.hidden = !known;
    this.known.textContent = known ? "It knows this class: these images are added to what it has seen of it." : "";
  }

  remove() {
    groups.splice(groups.indexOf(this), 1);
    this.element.remove();
    if (!groups.length) new Group();
    tidy();
    groups[0].name.focus();
  }
}

function tidy() {
  groups.forEach((group, index) => {
    group.element.querySelector("legend").textContent = groups.length > 1 ? `Class ${index + 1}` : "Class";
    group.element.querySelector("button").hidden = groups.length === 1;
  });
}

function say(text, wrong = false) {
  $("teach-said").textContent = text;
  $("teach-said").classList.toggle("wrong", wrong);
}

async function submit(event) {
  event.preventDefault();
  const wrong = groups.find(group => !typed(group.name) || !group.files.length);
  if (wrong) {
    say(typed(wrong.name) ? "Choose some images first." : "Give the class a name first.", true);
    (typed(wrong.name) ? wrong.zone.querySelector("input") : wrong.name).focus();
    return;
  }
  const count = groups.reduce((sum, group) => sum + group.files.length, 0);
  const size = bytes(groups.flatMap(group => group.files));
  const most = count > limits.teach_images ? counted(limits.teach_images, "image") : size > limits.request_bytes ? mebibytes(limits.request_bytes) : null;
  if (most) {
    say(`${counted(count, "image")} of ${mebibytes(size)} are too much for one lesson, which takes at most ${most}. Teach them in several lessons.`, true);
    return;
  }
  const form = new FormData();
  for (const group of groups) {
    for (const file of group.files) { form.append("name", typed(group.name)); form.append("files", file); }
  }
  if (groups.some(group => classes.has(typed(group.name)))) form.append("more", "true");
  const button = $("teach-form").querySelector("[type=submit]");
  button.disabled = true;
  say(`Sending ${counted(count, "image")} …`);
  try {
    const job = await post("teach", form);
    say("");
    for (const group of [...groups]) group.remove();
    watch(job);
  } catch (failure) {
    say(failure.message, true);
  } finally {
    button.disabled = false;
  }
}

const left = seconds => seconds === null ? "" : seconds < 90 ? `, ${Math.ceil(seconds)} s left` : `, ${Math.ceil(seconds / 60)} min left`;

const few = texts => texts.slice(0, NAMED).join("; ") + (texts.length > NAMED ? `; and ${texts.length - NAMED} more` : "");

function result(job) {
  const words = job.note === null ? [] : [`${job.note}.`];
  for (const lesson of job.lessons) {
    const names = Object.keys(lesson.classes).join(", ");
    if (lesson.accuracy !== null) words.push(`${names}: ${points(lesson.accuracy)} right on images held back.`);
    else words.push(`${names}: learned; too few images to measure it.`);
    if (lesson.unknown_before !== null) words.push(`Before, ${points(lesson.unknown_before)} of these were unknown.`);
    if (lesson.accuracy_others !== null) {
      words.push(`Other classes: ${points(lesson.accuracy_others_before)} before, ${points(lesson.accuracy_others)} now.`);
    }
    if (lesson.duplicates) words.push(`${counted(lesson.duplicates, "image")} left out: seen before.`);
    words.push(...lesson.notes.map(note => `Note: ${note}.`));
  }
  if (job.unreadable.length) words.push(`${counted(job.unreadable.length, "file")} could not be read: ${few(job.unreadable)}.`);
  return words.join(" ") || "Learned.";
}

function draw(element, job) {
  const ended = ENDED.has(job.state);
  const names = Object.entries(job.classes).map(([name, count]) => `${name} (${count})`).join(", ");
  element.className = `job ${job.state}`;
  element.querySelector("strong").textContent = names;
  element.querySelector("progress").value = job.share;
  element.querySelector("progress").hidden = ended;
  element.querySelector("button").hidden = ended;
  element.querySelector("button").disabled = job.cancelling;
  const texts = { done: () => result(job), failed: () => `Failed: ${job.error}.`, cancelled: () => "Cancelled; nothing has changed." };
  element.querySelector(".says").textContent = (texts[job.state] ?? (() => `${percent(job.share, 0)} · ${job.step}${left(job.seconds_left)}`))();
  element.querySelector(".live").textContent = ended ? "" : job.state === "queued" ? "waiting" : "learning";
}

export function watch(job) {
  if (followed.has(job.id)) return;
  const cancel = h("button", { type: "button", className: "small", ariaLabel: "Cancel this lesson" }, "Cancel");
  const element = h("div", { className: "job" },
    h("div", { className: "head" }, h("strong"), cancel),
    h("progress", { max: 1, value: 0, ariaLabel: "Progress of the lesson" }), h("p", { className: "says" }),
    h("span", { className: "live", role: "status", hidden: true }));
  followed.set(job.id, element);
  cancel.addEventListener("click", async () => {
    cancel.disabled = true;
    try { await post(`jobs/${job.id}/cancel`); } catch { /* it has ended meanwhile */ }
  });
  $("jobs").prepend(element);
  draw(element, job);
  if (ENDED.has(job.state)) return;
  follow(job.id, heard => { draw(element, heard); changed(heard); }).catch(() => element.remove());
}

// Lessons that this or another page has started.
export async function findLessons() {
  const { jobs } = await call("jobs");
  for (const job of jobs.slice(0, 5).reverse()) watch(job);
  return jobs.some(job => !ENDED.has(job.state));
}

export function knows(info) {
  classes = new Set(info.classes.map(one => one.name));
  limits = info.limits;
  $("class-names").replaceChildren(...info.classes.map(one => h("option", { value: one.name })));
  for (const group of groups) group.hint();
}

// Images from elsewhere on the page: they join the newest class.
export function teachThese(files) {
  const group = groups.at(-1);
  group.take(files);
  group.name.focus();
  (groups.length === 1 ? $("teach") : group.element).scrollIntoView();
}

export function startTeaching(onChange) {
  changed = onChange;
  new Group();
  $("add-group").addEventListener("click", () => new Group());
  $("teach-form").noValidate = true;
  $("teach-form").addEventListener("submit", submit);
}
