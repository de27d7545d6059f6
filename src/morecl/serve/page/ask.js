// Ask: images in, answers out.
import { bytes, post } from "./api.js";
import { $, counted, h, mebibytes, percent, takesFiles, thumbnail } from "./dom.js";

const SHOWN = 60; // answers
const NEAREST = 6;
const AT_ONCE = 8; // files in one request, so that the first answers come soon
let busy = 0, asked = 0;
const count = { known: 0, unknown: 0, unreadable: 0 };

function bars(top) {
  const list = h("dl", { className: "bars" });
  for (const { label, confidence } of top) {
    const fill = h("div", { className: "fill" });
    fill.style.width = `${100 * confidence}%`;
    list.append(
      h("dt", { title: label }, label),
      h("dd", {}, h("div", { className: "track", ariaHidden: "true" }, fill), h("span", {}, percent(confidence))));
  }
  return list;
}

function near(pictures) {
  if (!pictures?.length) return null;
  return h("div", { className: "near" }, h("span", {}, "Most similar of what it remembers"),
    ...pictures.map(({ label, similarity, image }) => h("figure", { title: `${label}, similarity ${similarity.toFixed(2)}` },
      thumbnail(image, `${label}, similarity ${similarity.toFixed(2)}`), h("figcaption", { ariaHidden: "true" }, label))));
}

function show(card, file, answer, teach) {
  const head = h("div", { className: "head" });
  const more = h("div", { className: "more" });
  const says = h("p", { className: "says" });
  card.querySelector(".body").replaceChildren(head, says);
  card.querySelector(".body").after(more);
  if (answer.error) {
    card.classList.add("broken");
    says.textContent = answer.error;
    head.append(h("span", { className: "file" }, file.name));
    return;
  }
  const first = answer.top[0];
  if (answer.unknown) {
    card.classList.add("unknown");
    head.append(h("span", { className: "mark" }, "unknown"));
    says.textContent = `Unlike what it was taught. Nearest: ${first.label}.`;
  } else {
    head.append(h("span", { className: "label" }, answer.label),
      h("span", { className: "sure" }, `${percent(answer.confidence)} sure`));
    says.hidden = true;
  }
  head.append(h("span", { className: "file" }, file.name));
  const button = h("button", { type: "button", className: answer.unknown ? "small" : "quiet small" }, answer.unknown ? "Teach this" : "Wrong? Teach it");
  button.addEventListener("click", () => teach([file]));
  more.append(...[bars(answer.top), near(answer.nearest), button].filter(Boolean));
}

function say() {
  $("ask-bar").hidden = asked === 0;
  const answered = count.known + count.unknown + count.unreadable;
  const kinds = Object.entries(count).filter(([, number]) => number).map(([kind, number]) => `${number} ${kind}`);
  $("ask-said").textContent = busy ? `Asking: ${answered} of ${counted(asked, "image")}` : `${counted(answered, "answer")}: ${kinds.join(", ")}`;
}

function newCard(file) {
  const address = URL.createObjectURL(file);
  const image = thumbnail(address, file.name, "");
  image.addEventListener("error", () => image.replaceWith(h("div", { className: "blank", ariaHidden: "true" }, "?")));
  const card = h("li", { className: "answer" }, image, h("div", { className: "body" }, h("p", { className: "says" }, "…")));
  card.forget = () => URL.revokeObjectURL(address);
  return card;
}

// Cuts what is asked about into requests that the server accepts.
function requests(cards, limits) {
  const found = [];
  let room = 0;
  for (const card of cards) {
    const size = bytes([card.file]);
    if (!found.length || found.at(-1).length === Math.min(AT_ONCE, limits.predict_images) || size > room) {
      found.push([]);
      room = limits.request_bytes;
    }
    found.at(-1).push(card);
    room -= size;
  }
  return found;
}

function told(answer) {
  count[answer.error ? "unreadable" : answer.unknown ? "unknown" : "known"] += 1;
}

async function askAbout(files, teach) {
  const form = new FormData();
  for (const { file } of files) form.append("files", file);
  let answers;
  try {
    answers = (await post(`predict?nearest=${NEAREST}`, form)).answers;
  } catch (failure) {
    answers = failure.body?.answers ?? files.map(() => ({ error: failure.message }));
  }
  files.forEach(({ file, card }, index) => show(card, file, answers[index], teach));
  answers.forEach(told);
  say();
}

export function startAsking(limits, teach) {
  const list = $("answers");
  const take = async files => {
    const cards = files.map(file => ({ file, card: newCard(file) }));
    list.prepend(...cards.map(({ card }) => card));
    while (list.children.length > Math.max(SHOWN, files.length)) { list.lastChild.forget(); list.lastChild.remove(); }
    asked += files.length;
    busy += 1;
    say();
    const { file_bytes: most } = limits();
    for (const { file, card } of cards.filter(one => one.file.size > most)) {
      const answer = { error: `the file is too large; at most ${mebibytes(most)} are accepted` };
      show(card, file, answer, teach);
      told(answer);
    }
    for (const part of requests(cards.filter(one => one.file.size <= most), limits())) await askAbout(part, teach);
    busy -= 1;
    say();
  };
  takesFiles($("ask-drop"), take);
  document.addEventListener("paste", event => {
    const files = [...event.clipboardData.files];
    if (files.length) { event.preventDefault(); take(files); }
  });
  $("ask-clear").addEventListener("click", () => {
    for (const card of list.children) card.forget();
    list.replaceChildren();
    asked = count.known = count.unknown = count.unreadable = 0;
    say();
    $("ask-files").focus();
  });
}
