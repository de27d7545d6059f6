// Elements from plain text: nothing that comes from a server or a file is ever parsed as HTML.
export const $ = id => document.getElementById(id);

export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (key in element && key !== "list") element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children.filter(child => child !== null && child !== undefined && child !== false));
  return element;
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
export const points = value => value === null || value === undefined ? "–" : `${value.toFixed(1)} %`;
export const mebibytes = bytes => `${Math.ceil(bytes / 2 ** 20)} MiB`;
export const counted = (count, word, words = word + "s") => `${count} ${count === 1 ? word : words}`;

export function thumbnail(source, text, name = "thumb") {
  const image = h("img", { src: source, alt: text, className: name, loading: "lazy" });
  image.addEventListener("load", () => image.classList.toggle("tiny", image.naturalWidth <= 64));
  return image;
}

// Files dropped on `zone`, or chosen in the input inside it, are passed to `take`.
export function takesFiles(zone, take) {
  const input = zone.querySelector("input[type=file]");
  input.addEventListener("change", () => { take([...input.files]); input.value = ""; });
  for (const kind of ["dragenter", "dragover"]) {
    zone.addEventListener(kind, event => { event.preventDefault(); zone.classList.add("over"); });
  }
  zone.addEventListener("dragleave", () => zone.classList.remove("over"));
  zone.addEventListener("drop", event => {
    event.preventDefault();
    zone.classList.remove("over");
    take([...event.dataTransfer.files]);
  });
}
