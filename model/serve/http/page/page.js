"use strict";
const byId = (id) => document.getElementById(id);
const EVERY = 2000, KEPT = 60;
const talk = { messages: [], abort: null };
const seen = { before: null, then: 0, series: {} };
let key = "", model = "", context = Infinity;

function ask(path, options = {}) {
  const headers = { ...(options.body ? { "content-type": "application/json" } : {}) };
  if (key) headers.authorization = `Bearer ${key}`;
  return fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", referrerPolicy: "no-referrer" });
}

async function failure(response) {
  const body = await response.json().catch(() => ({}));
  if (response.status === 401) byId("login").hidden = false;
  const error = new Error(body.error?.message ?? `status ${response.status}`);
  error.code = body.error?.code;
  return error;
}

/* The conversation */

function say(role, text) {
  byId("empty").hidden = true;
  const box = document.createElement("div");
  box.className = `message ${role}`;
  box.textContent = text;
  byId("messages").append(box);
  box.scrollIntoView({ block: "end" });
  return box;
}

/* The data of each server-sent event, as JSON. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const each of parts) {
      const data = each.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

/* Why an answer ended, unless the model ended it. */
function cut(note) {
  if (note.why !== "length") return "";
  return note.total >= context ? `; the context of ${context} tokens is full` : "; cut at its length";
}

function full() {
  return `The context of ${context} tokens is full. Your message is in the field again: shorten it, or begin a new conversation.`;
}

/* Answers the last message, which `asked` shows; without an answer its text goes back into the field. */
async function answer(asked) {
  const box = say("assistant writing", ""), text = document.createTextNode("");
  const pane = byId("messages"), begun = performance.now();
  const note = { first: 0, tokens: 0, total: 0, why: "" };
  box.append(text);
  talk.abort = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  try {
    const response = await ask("v1/chat/completions", { method: "POST", signal: talk.abort.signal, body: JSON.stringify({
      model, messages: talk.messages, stream: true, stream_options: { include_usage: true },
      max_tokens: Number(byId("tokens").value), temperature: Number(byId("temperature").value) }) });
    if (!response.ok) throw await failure(response);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) [note.tokens, note.total] = [event.usage.completion_tokens, event.usage.total_tokens];
      const choice = event.choices[0];
      if (choice?.finish_reason) note.why = choice.finish_reason;
      if (!choice?.delta.content) continue;
      note.first ||= performance.now();
      const follows = pane.scrollHeight - pane.scrollTop - pane.clientHeight < 60;
      text.data += choice.delta.content;
      if (follows) pane.scrollTop = pane.scrollHeight;
    }
    if (note.tokens && note.first) {
      const small = document.createElement("small");
      const rate = note.tokens / Math.max(performance.now() - begun, 1) * 1000;
      small.textContent = `${note.tokens} tokens, ${rate.toFixed(1)} a second, the first after ` +
        `${((note.first - begun) / 1000).toFixed(2)} s${cut(note)}`;
      box.append(small);
    }
  } catch (error) {
    if (error.name !== "AbortError") say("error", error.code === "context_length_exceeded" ? full() : error.message);
  } finally {
    box.classList.remove("writing");
    if (text.data) talk.messages.push({ role: "assistant", content: text.data });
    else {
      for (const each of [box, asked]) each.remove();
      const { content } = talk.messages.pop();
      byId("text").value ||= content;
    }
    talk.abort = null;
    byId("send").disabled = false;
    byId("stop").disabled = true;
  }
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const content = byId("text").value || byId("text").placeholder;
  if (talk.abort) return;
  byId("text").value = "";
  talk.messages.push({ role: "user", content });
  answer(say("user", content));
});
byId("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});
byId("stop").addEventListener("click", () => talk.abort?.abort());
byId("fresh").addEventListener("click", () => {
  talk.abort?.abort();
  talk.messages = [];
  for (const each of document.querySelectorAll(".message")) each.remove();
  byId("empty").hidden = false;
});
byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  byId("key").value = "";
  byId("login").hidden = true;
  begin();
});

/* What the server does */

/* The samples of Prometheus' text by name, added up over labels; buckets are left out. */
function samples(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const parts = /^nkw_(\w+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!parts || parts[1].endsWith("_bucket")) continue;
    found[parts[1]] = (found[parts[1]] ?? 0) + Number(parts[3]);
    for (const [, label, value] of (parts[2] ?? "").matchAll(/(target|lnc)="([^"]*)"/g)) found[label] = value;
  }
  return found;
}

function show(id, text) { byId(id).textContent = text; }

function trace(id, value) {
  const series = seen.series[id] ??= [];
  series.push(value);
  if (series.length > KEPT) series.shift();
  const most = Math.max(...series, 1e-9);
  const points = series.map((each, at) => `${100 * (at + KEPT - series.length) / (KEPT - 1)},${27 - 25 * each / most}`);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", points.join(" "));
  byId(id).setAttribute("viewBox", "0 0 100 28");
  byId(id).setAttribute("preserveAspectRatio", "none");
  byId(id).replaceChildren(line);
}

function seconds(value) {
  return value >= 1 ? `${value.toFixed(2)} s` : value >= 1e-3 ? `${(value * 1e3).toFixed(1)} ms` : `${(value * 1e6).toFixed(0)} µs`;
}

function update(now, at) {
  const before = seen.before, share = (part, whole) => whole ? `${(100 * part / whole).toFixed(1)} %` : "none yet";
  const rate = before ? (now.generation_tokens_total - before.generation_tokens_total) / (at - seen.then) * 1000 : 0;
  for (const [id, line, value, text] of [
    ["rate", "rates", rate, rate.toFixed(1)],
    ["running", "runnings", now.num_requests_running, now.num_requests_running],
    ["waiting", "waitings", now.num_requests_waiting, now.num_requests_waiting],
    ["pages", "pageses", now.kv_cache_usage_perc, `${(100 * now.kv_cache_usage_perc).toFixed(0)} %`],
  ]) {
    show(id, text);
    trace(line, value);
  }
  show("wall", now.steps_total ? seconds(now.step_seconds_total / now.steps_total) : "none yet");
  show("target", `${now.target} (LNC ${now.lnc})`);
  const whole = now.steps_total && !now.unpredicted_step_parts;
  show("predicted", whole ? seconds(now.predicted_step_seconds_total / now.steps_total) : "none yet");
  show("padding", share(now.padding_tokens_total, now.step_tokens_total + now.padding_tokens_total));
  show("hits", share(now.prefix_cache_hits_total, now.prefix_cache_queries_total));
  show("preemptions", now.num_preemptions_total);
  seen.before = now;
  seen.then = at;
}

async function look() {
  if (document.hidden || !model) return;
  try {
    const response = await ask("metrics");
    if (!response.ok) throw await failure(response);
    update(samples(await response.text()), performance.now());
    show("state", "ready");
  } catch (error) {
    show("state", error.message === "Failed to fetch" ? "the server does not answer" : error.message);
  }
}

async function begin() {
  try {
    const response = await ask("v1/models");
    if (!response.ok) throw await failure(response);
    ({ id: model, max_model_len: context } = (await response.json()).data[0]);
    show("model", model);
    document.title = `${model} · NKI Workbench`;
    await look();
  } catch (error) {
    show("state", error.message);
  }
}

begin();
setInterval(look, EVERY);
