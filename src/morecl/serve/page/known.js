// What it knows: figures, charts, classes with pictures, versions.
import { call } from "./api.js";
import { askToForget, askToRename } from "./change.js";
import { $, counted, h, points, svg, thumbnail } from "./dom.js";

const PICTURES = 8;
const DOT_ROOM = 14; // pixels of the chart's width for each lesson, or it has no dot of its own
let shown = null; // version whose classes are on the page
let drawn = null; // the curve on the page

function card(title, value, unit, small) {
  return h("div", { className: "card" }, h("span", {}, title), h("strong", {}, value, unit ? h("i", {}, unit) : null),
    small ? h("small", {}, small) : null);
}

function figures(info) {
  const { promise } = info;
  const images = info.classes.reduce((sum, one) => sum + one.images, 0);
  const held = info.classes.reduce((sum, one) => sum + one.held_back, 0);
  const cards = [
    card("Classes", info.classes.length, "", `${counted(info.tasks, "task")}, ${counted(images, "image")}`),
    info.accuracy === null ? card("Accuracy", "–", "", "nothing was held back to measure it")
      : card("Accuracy", info.accuracy.toFixed(1), "%", `on ${counted(held, "image")} it never trained on`),
    promise.share === null ? card("Called unknown by mistake", "–", "", promise.why)
      : card("Called unknown by mistake", `≤ ${(100 * promise.share).toFixed(0)}`, "%", "of images like those taught; how many unknown things are caught is not promised"),
    card("Room", info.tasks_left === null ? "–" : info.tasks_left, "", info.tasks_left === null ? "no limit known" : info.tasks_left ? "more lessons of this kind, about"
      : "full: it can still be taught, but may learn new classes less well"),
  ];
  $("figures").replaceChildren(...cards);
}

export function curve(points_, room) {
  const known = points_.map((point, index) => ({ ...point, index })).filter(point => point.accuracy !== null);
  if (!known.length) return h("p", {}, "Nothing was measured yet.");
  const [width, height, left, right, top, bottom] = [Math.max(260, room), 200, 48, 18, 24, 46];
  const lowest = Math.max(0, Math.floor((Math.min(...known.map(point => point.accuracy)) - 5) / 10) * 10);
  const x = index => left + (points_.length === 1 ? .5 : index / (points_.length - 1)) * (width - left - right);
  const y = value => top + (100 - value) / (100 - lowest) * (height - top - bottom);
  const marked = known.length * DOT_ROOM > width ? known.slice(-1) : known; // many dots would hide the line
  const words = marked.map(point => `lesson ${point.index + 1}: ${points(point.accuracy)} of ${counted(point.classes, "class", "classes")}`);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": `Accuracy after each lesson. ${words.join("; ")}` });
  for (const value of [lowest, (lowest + 100) / 2, 100]) {
    drawing.append(svg("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), class: "grid" }),
      svg("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, `${Math.round(value)} %`));
  }
  drawing.append(svg("polyline", { points: known.map(point => `${x(point.index)},${y(point.accuracy)}`).join(" "), class: "line" }));
  const step = Math.ceil(points_.length / 10);
  for (const [number, point] of marked.entries()) {
    const dot = svg("circle", { cx: x(point.index), cy: y(point.accuracy), r: 5, class: "dot" });
    dot.append(svg("title", {}, words[number]));
    drawing.append(dot);
  }
  for (const { index } of known.filter(point => point.index % step === 0)) {
    drawing.append(svg("text", { x: x(index), y: height - 20, "text-anchor": "middle" }, String(index + 1)));
  }
  const last = known.at(-1);
  const falls = known.length > 1 && known.at(-2).accuracy > last.accuracy; // its line comes from above
  const anchor = points_.length === 1 ? "middle" : "end";
  drawing.append(svg("text", { x: x(last.index), y: y(last.accuracy) + (falls ? 20 : -10), "text-anchor": anchor, class: "value" }, points(last.accuracy)),
    svg("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, "lesson"));
  return drawing;
}

function capacity(layers) {
  return h("dl", { className: "layers" }, ...Object.entries(layers).map(([layer, share]) => {
    const fill = h("div", { className: "fill" });
    fill.style.width = `${share}%`;
    return h("div", {}, h("dt", {}, layer), h("dd", { className: "track", ariaHidden: "true" }, fill), h("dd", {}, `${share.toFixed(0)} %`));
  }));
}

const watcher = new IntersectionObserver(entries => {
  for (const entry of entries.filter(one => one.isIntersecting)) {
    watcher.unobserve(entry.target);
    entry.target.fill();
  }
}, { rootMargin: "300px" });

function button(word, name, act) {
  const made = h("button", { type: "button", className: "quiet small", ariaLabel: `${word} ${name}` }, word);
  made.addEventListener("click", () => act(name));
  return made;
}

function classCard(one) {
  const pictures = h("div", { className: "pictures" });
  pictures.fill = async () => {
    try {
      const { images } = await call(`classes/images?name=${encodeURIComponent(one.name)}&count=${PICTURES}`);
      pictures.replaceChildren(...images.map(image => thumbnail(image, "")));
    } catch { /* the class is gone: the page will be drawn again */ }
  };
  watcher.observe(pictures);
  return h("li", { className: "class" },
    h("div", { className: "head" }, h("strong", {}, one.name),
      h("span", {}, one.accuracy === null ? "not measured" : `${points(one.accuracy)} right`)),
    pictures,
    h("div", { className: "foot" }, h("small", {}, `${counted(one.images, "image")}, ${one.held_back} held back`),
      h("div", {}, button("Rename", one.name, askToRename), button("Forget", one.name, askToForget))));
}

new ResizeObserver(() => { if (drawn) $("curve").replaceChildren(curve(drawn, $("curve").clientWidth)); }).observe($("curve-figure"));

function tasks(info) {
  const numbers = [...new Set(info.classes.map(one => one.task))];
  $("tasks").replaceChildren(...numbers.flatMap(number => {
    const own = info.classes.filter(one => one.task === number);
    return [h("h3", {}, `Task ${number}`, h("small", {}, counted(own.length, "class", "classes"))),
      h("ul", { className: "classes" }, ...own.map(classCard))];
  }));
}

const ACTIONS = { learn: "learned", add: "more images of", forget: "forgot", rename: "renamed" };

function versions(info) {
  $("versions").replaceChildren(...info.versions.toReversed().map((version, index) => h("tr", { className: index ? "" : "used" },
    h("td", {}, String(version.number), index ? "" : " · in use"),
    h("td", { className: "words" }, `${ACTIONS[version.action] ?? version.action} ${version.what}`.trim()),
    h("td", {}, new Date(version.created).toLocaleString([], { dateStyle: "medium", timeStyle: "short" })),
    h("td", {}, String(version.classes)), h("td", {}, String(version.images)), h("td", {}, points(version.accuracy)))));
  $("undo").disabled = info.versions.length < 2;
}

export function drawKnown(info) {
  if (info.version.number === shown) return;
  shown = info.version.number;
  document.title = `${info.model} · morecl`;
  $("model").textContent = info.model;
  $("summary").textContent = `Knows ${counted(info.classes.length, "class", "classes")}. Version ${info.version.number}, ${info.method} on ${info.backbone}, ${info.image_size} × ${info.image_size} pixels.`;
  $("about").textContent = `morecl ${info.morecl}`;
  figures(info);
  drawn = info.curve;
  $("curve").replaceChildren(curve(drawn, $("curve").clientWidth));
  $("capacity-figure").hidden = !Object.keys(info.capacity).length;
  if (!$("capacity-figure").hidden) $("capacity").replaceChildren(capacity(info.capacity));
  tasks(info);
  versions(info);
}
