// What all parts of the page use: elements, numbers, colours, the tip.
const DATA = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["#5b8db8", "#d59a4c", "#6aa574", "#b0739b", "#8a8ec7", "#c77f6d", "#4fa3a0", "#a8a24e", "#7a94a6",
  "#c58fb5", "#88b06b", "#b39376"];
const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") element.style.cssText = value;
    else if (name.startsWith("on")) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function drawn(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function us(ns) {
  const [value, unit] = ns >= 1e6 ? [ns / 1e6, " ms"] : [ns / 1000, " µs"];
  const digits = value >= 10000 ? 0 : value >= 100 ? 1 : value >= 1 ? 2 : 3;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) + unit;
}

function share(part, whole) {
  return whole ? (100 * part / whole).toFixed(1) + " %" : "–";
}

function bytes(count) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (count >= size) return (count / size).toFixed(2) + " " + unit;
  }
  return count + " B";
}

function meter(part, whole, colour = "var(--accent)") {
  const width = whole ? Math.max(0, Math.min(100, 100 * part / whole)) : 0;
  return make("span", { class: "meter" }, make("i", { style: `width:${width.toFixed(2)}%;background:${colour}` }));
}

function table(heads, rows) {
  const head = make("tr", {}, ...heads.map(([text, kind]) => make("th", { class: kind || "" }, text)));
  const body = rows.map(({ cells, go }) => {
    const row = make("tr", go ? { "data-go": "" } : {},
      ...cells.map((cell, at) => make("td", { class: heads[at][1] || "" }, cell)));
    if (go) row.onclick = go;
    return row;
  });
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

function emptied(id, title) {
  const section = byId(id);
  section.replaceChildren(make("h2", {}, title));
  return section;
}

// The colour of a line: the lines that hold engines longest get colours of their own.
function colourOf(part, line) {
  if (!part.colours) {
    part.colours = new Array(part.lines.length).fill("#9a978f");
    const ranked = [...part.lineTimes].sort((a, b) => b[2] - a[2]);
    ranked.forEach(([number], at) => { part.colours[number] = COLOURS[at % COLOURS.length]; });
  }
  return part.colours[line];
}

function swatch(colour) {
  return make("i", { style: `display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px;background:${colour}` });
}

function showTip(event, lines) {
  const tip = byId("tip");
  tip.replaceChildren(...lines.map((line, at) => make("div", at ? { class: "soft" } : { style: "font-weight:600" }, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const x = event.clientX + 16 + box.width > innerWidth ? event.clientX - 12 - box.width : event.clientX + 16;
  const y = event.clientY + 16 + box.height > innerHeight ? event.clientY - 12 - box.height : event.clientY + 16;
  tip.style.left = Math.max(4, x) + "px";
  tip.style.top = Math.max(4, y) + "px";
}

function hideTip() {
  byId("tip").hidden = true;
}

// An event in words: its instruction, line, operands and times.
function described(part, event) {
  const events = part.events;
  const [where, code] = part.lines[events.line[event]];
  const out = [`${part.ops[events.op[event]]} #${event} · ${where}`];
  if (code) out.push(code);
  const marks = ["reads", "writes", "adds to"];
  for (let at = event ? events.ends[event - 1] : 0; at < events.ends[event]; at++) {
    const [tensor, kind, row, endRow, byte, endByte] = part.boxes[events.boxes[at]];
    const [name, shape, dtype, memory] = part.tensors[tensor];
    out.push(`${marks[kind]} ${name} [${shape}] ${dtype} in ${memory}: rows ${row}:${endRow}, bytes ${byte}:${endByte}`);
  }
  return out;
}

function waited(part, event) {
  const cause = part.events.cause[event];
  const reason = part.reasons[part.events.reason[event]];
  if (cause < 0) return reason;
  return `${reason} ${part.ops[part.events.op[cause]]} #${cause} · ${part.lines[part.events.line[cause]][0]}`;
}
