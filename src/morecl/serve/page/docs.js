// The API's schema as a page: no script from elsewhere is needed for it.
import { call } from "./api.js";
import { $, h } from "./dom.js";

const plain = text => (text ?? "").replaceAll("`", "");

function type(schema = {}) {
  if (schema.type === "array") return `list of ${type(schema.items)}`;
  const bounds = [];
  if (schema.minimum !== undefined) bounds.push(`≥ ${schema.minimum}`);
  if (schema.exclusiveMinimum !== undefined) bounds.push(`> ${schema.exclusiveMinimum}`);
  if (schema.maximum !== undefined) bounds.push(`≤ ${schema.maximum}`);
  if (schema.exclusiveMaximum !== undefined) bounds.push(`< ${schema.exclusiveMaximum}`);
  if (schema.default !== undefined) bounds.push(`default ${schema.default}`);
  const name = schema.format === "binary" ? "file" : schema.type ?? "any";
  return bounds.length ? `${name} (${bounds.join(", ")})` : name;
}

function example(method, path, fields) {
  const parts = ["curl"];
  if (method === "post") parts.push("-X POST");
  if (fields.old) parts.push("-F old=cat -F new=kitten");
  if (fields.name) parts.push("-F name=cat");
  if (fields.confirm) parts.push("-F confirm=true");
  if (fields.files) parts.push("-F files=@one.jpg -F files=@two.jpg");
  const address = path.replace("{identifier}", "JOB") + (path === "/classes/images" ? "?name=cat" : "");
  parts.push(`'${new URL(address.slice(1), document.baseURI)}'`);
  return parts.join(" ").replace("-X POST -F", "-F");
}

function endpoint(path, method, operation) {
  const schema = operation.requestBody?.content["multipart/form-data"]?.schema;
  const fields = schema?.properties ?? {};
  const rows = [
    ...(operation.parameters ?? []).map(one => [one.name, one.in, type(one.schema), one.description ?? one.schema?.description]),
    ...Object.entries(fields).map(([name, one]) => [name, "form", type(one), one.description]),
  ];
  const head = h("tr", {}, ...["Name", "Where", "Type", ""].map(text => h("th", { scope: "col" }, text)));
  const table = h("table", {}, h("thead", {}, head),
    h("tbody", {}, ...rows.map(row => h("tr", {}, ...row.map(text => h("td", {}, text ?? ""))))));
  return h("section", { className: "endpoint" },
    h("h3", {}, h("code", {}, h("span", { className: "verb" }, method.toUpperCase()), path)),
    h("p", {}, plain(operation.description ?? operation.summary)), rows.length ? table : null,
    h("pre", {}, h("code", {}, example(method, path, fields))));
}

const schema = await call("openapi.json");
$("about").textContent = `${schema.info.description} Version ${schema.info.version}.`;
for (const [path, methods] of Object.entries(schema.paths)) {
  for (const [method, operation] of Object.entries(methods)) $("endpoints").append(endpoint(path, method, operation));
}
