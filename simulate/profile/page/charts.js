// Summary, roofline, and the run of several launches.
function showSummary(part) {
  const roof = part.roofline, length = part.length || 1;
  const fact = (value, text) => make("div", { class: "fact" }, make("b", {}, value), make("span", {}, text));
  const facts = make("div", { class: "facts" },
    make("div", {}, make("div", { class: "big" }, us(part.length)),
      make("span", { class: "soft" }, `${part.title} · ${part.reading} reading`)),
    fact(share(roof.flops / length, roof.peak), `MFU, of ${(roof.peak / 1e3).toFixed(1)} TFLOP/s (16-bit)`),
    fact(share(roof.hbmBytes / length, roof.hbmPeak), `MBU, of ${roof.hbmPeak.toFixed(0)} GB/s`),
    fact(bytes(roof.hbmBytes), `HBM bytes; ${bytes(roof.neededBytes)} needed`),
    fact(us(roof.least), `roofline (${roof.bound} bound)`),
    fact(part.events.op.length.toLocaleString("en"), `instructions on ${part.cores} core${part.cores > 1 ? "s" : ""}, ${part.core}`));
  const left = make("div", {}, make("h3", {}, "readings: what may overlap"));
  const longest = Math.max(...part.bracket.map((each) => each[1]), 1);
  for (const [name, time] of part.bracket) {
    const own = name === part.reading;
    left.append(make("div", { style: "display:grid;grid-template-columns:84px 1fr 96px;gap:8px;align-items:center" },
      make("span", { style: own ? "font-weight:600" : "" }, name), meter(time, longest, own ? "var(--accent)" : "var(--soft)"),
      make("span", { class: "n" }, us(time))));
  }
  left.append(make("p", { class: "hint" }, `Device time. Starting and ending the kernel takes ${us(part.overhead)} more, and a synchronous call from the host about ${us(part.host_overhead_ns)} on top.`));
  const right = make("div", {}, make("h3", {}, "numbers that the length rests on"));
  const colours = { published: "var(--good)", derived: "var(--accent)", assumed: "var(--hot)" };
  right.append(make("div", { class: "stack" },
    ...part.basis.filter((each) => each[1] > 0).map(([name, time]) => make("i", { style: `width:${100 * time / length}%;background:${colours[name]}` }))));
  right.append(make("p", {}, ...part.basis.map(([name, time]) =>
    make("span", { class: "key" }, make("i", { style: `background:${colours[name]}` }), `${name} ${share(time, length)}`))));
  right.append(make("p", { class: "hint" }, part.numbers.slice(0, 5).map(([name, kind, time]) => `${name} ${share(time, length)} (${kind})`).join(", ")));
  byId("summary").replaceChildren(facts, make("div", { class: "pair" }, left, right));
}

// Rates over intensity, both logarithmic: the roofs, and this launch as it moves bytes and as it would have to.
function showRoofline(part) {
  const section = emptied("roof", "Roofline");
  const roof = part.roofline;
  if (!roof.flops || !roof.hbmBytes) {
    section.append(make("p", { class: "soft" }, roof.flops ? "No HBM bytes are moved." :
      `No matmul: the launch is judged by its ${bytes(roof.hbmBytes)} of HBM, ${share(roof.hbmBytes / (part.length || 1), roof.hbmPeak)} of the bandwidth.`));
    return;
  }
  const width = 560, height = 300, left = 54, bottom = 34, top = 14, right = 12;
  const rate = roof.flops / part.length, intensity = roof.flops / roof.hbmBytes;
  const needed = roof.neededBytes ? roof.flops / roof.neededBytes : intensity;
  const ridge = roof.peak / roof.hbmPeak, highest = Math.max(...roof.peaks.map((each) => each[1]));
  const lowX = Math.min(0.3, intensity / 3), highX = Math.max(10 * ridge, 3 * needed);
  const highY = 2 * highest, lowY = Math.min(rate / 4, lowX * roof.hbmPeak);
  const log = Math.log10;
  const x = (value) => left + (log(value) - log(lowX)) / (log(highX) - log(lowX)) * (width - left - right);
  const y = (value) => height - bottom - (log(value) - log(lowY)) / (log(highY) - log(lowY)) * (height - bottom - top);
  const picture = drawn("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img" });
  const text = (at, up, words, attributes = {}) => drawn("text", { x: at, y: up, ...attributes }, words);
  for (let power = Math.ceil(log(lowX)); power <= log(highX); power++) {
    const at = x(10 ** power);
    picture.append(drawn("line", { x1: at, y1: top, x2: at, y2: height - bottom, stroke: "var(--line)" }),
      text(at, height - bottom + 14, power < 0 ? (10 ** power).toFixed(-power) : 10 ** power, { "text-anchor": "middle", class: "soft" }));
  }
  for (let power = Math.ceil(log(lowY)); power <= log(highY); power++) {
    const at = y(10 ** power), tera = 10 ** (power - 3);
    picture.append(drawn("line", { x1: left, y1: at, x2: width - right, y2: at, stroke: "var(--line)" }),
      text(left - 6, at + 4, tera >= 1 ? tera : tera.toFixed(3 - power), { "text-anchor": "end", class: "soft" }));
  }
  picture.append(text(left, height - 3, "FLOP per HBM byte", { class: "soft" }), text(2, 10, "TFLOP/s", { class: "soft" }));
  const slope = (peak) => `M${x(lowX)},${y(Math.max(lowY, lowX * roof.hbmPeak))} L${x(peak / roof.hbmPeak)},${y(peak)} L${x(highX)},${y(peak)}`;
  for (const [name, peak] of roof.peaks) {
    picture.append(drawn("path", { d: slope(peak), fill: "none", stroke: "var(--soft)", "stroke-width": name === "16-bit" ? 2 : 1 }),
      text(width - right, y(peak) - 4, `${name} ${(peak / 1e3).toFixed(1)}`, { "text-anchor": "end", class: "soft" }));
  }
  const atRoof = Math.min(roof.ownPeak, needed * roof.hbmPeak);
  picture.append(
    drawn("line", { x1: x(needed), y1: y(rate), x2: x(needed), y2: y(atRoof), stroke: "var(--accent)", "stroke-dasharray": "3 3" }),
    drawn("line", { x1: x(intensity), y1: y(rate), x2: x(needed), y2: y(rate), stroke: "var(--accent)", "stroke-dasharray": "3 3" }),
    drawn("circle", { cx: x(needed), cy: y(rate), r: 4.5, fill: "var(--card)", stroke: "var(--accent)", "stroke-width": 1.5 }),
    drawn("circle", { cx: x(intensity), cy: y(rate), r: 5, fill: "var(--hot)" }));
  section.append(picture, make("p", {},
    make("span", { class: "key" }, make("i", { style: "background:var(--hot);border-radius:50%" }),
      `as it runs: ${(rate / 1e3).toFixed(2)} TFLOP/s at ${intensity.toFixed(1)} FLOP per byte`),
    make("span", { class: "key" }, make("i", { style: "border:1.5px solid var(--accent);border-radius:50%" }),
      `with each byte moved once: ${needed.toFixed(1)} FLOP per byte, ${share(part.roofline.least, part.length)} of this length at the roof`)));
}

// A run of several launches: a strip for each outermost group, and sums by every level of names.
function showRun(choose, chosen) {
  const body = byId("run-body");
  byId("run").hidden = DATA.steps.length < 2;
  if (DATA.steps.length < 2) return;
  body.replaceChildren();
  const groups = new Map();
  DATA.steps.forEach(([names, part], number) => {
    const group = names.length > 1 ? names[0] : "";
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push({ names: names.length > 1 ? names.slice(1) : names, part, number, time: DATA.parts[part].length });
  });
  const colours = new Map();
  const colour = (name) => {
    if (!colours.has(name)) colours.set(name, COLOURS[colours.size % COLOURS.length]);
    return colours.get(name);
  };
  for (const [group, steps] of groups) {
    const total = steps.reduce((sum, step) => sum + step.time, 0);
    body.append(make("h3", {}, runTitle(group, steps.length, total)));
    const lane = make("div", { class: "lane" });
    for (const step of steps) {
      const kernel = step.names[step.names.length - 1];
      const mark = make("i", { style: `width:${100 * step.time / (total || 1)}%;background:${colour(kernel)}`, class: step.part === chosen ? "on" : "" });
      mark.onpointermove = (event) => showTip(event, [step.names.join(" · "), `${us(step.time)}, ${share(step.time, total)}`]);
      mark.onpointerleave = hideTip;
      mark.onclick = () => choose(step.part);
      lane.append(mark);
    }
    body.append(lane);
    const pair = make("div", { class: "pair" });
    const kernels = summed(steps, (step) => step.names[step.names.length - 1]);
    pair.append(sums("kernel", kernels, total, (name) => swatch(colour(name)), choose));
    if (steps.some((step) => step.names.length > 1)) {
      pair.append(sums("part of the model", summed(steps, (step) => step.names[0]), total, () => "", choose));
    }
    body.append(pair);
  }
}

function runTitle(group, count, total) {
  return `${group || "all"}: ${count} ${count === 1 ? "launch" : "launches"}, ${us(total)}`;
}

function summed(steps, name) {
  const out = new Map();
  for (const step of steps) {
    const entry = out.get(name(step)) || { count: 0, time: 0, part: step.part };
    entry.count += 1;
    entry.time += step.time;
    out.set(name(step), entry);
  }
  return out;
}

function sums(head, rows, total, mark, choose) {
  return table([[head], ["launches", "n"], ["takes", "n"], ["share", "n"], [""]],
    [...rows].map(([name, { count, time, part }]) => ({
      cells: [make("span", {}, mark(name), name), count, us(time), share(time, total), meter(time, total)],
      go: () => choose(part),
    })));
}
