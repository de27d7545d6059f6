// Requests to the server. If it wants a token, the page asks for it once and keeps it until the tab is closed.
import { $ } from "./dom.js";

const KEY = "morecl-token";
const dialog = $("token-dialog");
let asking = null, answered = () => {};

export class Failure extends Error {
  constructor(status, message, body = null) { super(message); this.status = status; this.body = body; }
}

function askForToken(wrong) {
  asking ??= new Promise(resolve => {
    $("token-wrong").textContent = wrong ? "This token is not the right one." : "";
    $("token").value = "";
    dialog.showModal();
    answered = resolve;
  });
  return asking;
}

$("token-form").addEventListener("submit", () => {
  sessionStorage.setItem(KEY, $("token").value.trim());
  asking = null;
  answered();
});
// Escape closes the dialog, and a browser lets no page prevent that every time; nothing goes on without the token.
dialog.addEventListener("close", () => { if (asking && !dialog.open) dialog.showModal(); });

async function send(path, options) {
  for (;;) {
    const token = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure(0, "the server cannot be reached");
    }
    if (response.status !== 401) return response;
    if (token === sessionStorage.getItem(KEY)) await askForToken(token !== null);
  }
}

export async function call(path, options = {}) {
  const response = await send(path, options);
  let body = null;
  try { body = await response.json(); } catch { /* not JSON: the status says enough */ }
  if (!response.ok) throw new Failure(response.status, body?.error ?? `status ${response.status}`, body);
  return body;
}

// How much a form with these files is to send: each comes with headers, a file name and perhaps the name of its class.
const AROUND = 1500;
export const bytes = files => files.reduce((sum, file) => sum + file.size + AROUND, 0);

export const post = (path, body) => call(path, { method: "POST", body });

// Calls `hear` with the job at each change, until it has ended.
export async function follow(id, hear) {
  for (;;) {
    try {
      const response = await send(`jobs/${id}`, { headers: { Accept: "text/event-stream" } });
      if (!response.ok) throw new Failure(response.status, `status ${response.status}`);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        text += value;
        const events = text.split("\n\n");
        text = events.pop();
        for (const event of events) {
          const data = event.split("\n").find(line => line.startsWith("data: "));
          if (!data) continue;
          const job = JSON.parse(data.slice(6));
          hear(job);
          if (ENDED.has(job.state)) return job;
        }
      }
    } catch (error) {
      if (error.status === 404) throw error;
    }
    await new Promise(resolve => setTimeout(resolve, 1000));
  }
}

export const ENDED = new Set(["done", "failed", "cancelled"]);
