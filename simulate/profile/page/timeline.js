// The timeline: tracks on a canvas that zooms and pans, with a strip above it that shows the whole.
const LEFT = 128, ROW = 17, GAP = 5, TOP = 40, LANES = 4;

class Timeline {
  constructor() {
    this.canvas = byId("tracks");
    this.strip = byId("overview");
    this.hover = null;
    this.chosen = -1;
    this.listen();
  }

  show(part, view) {
    this.part = part;
    this.length = Math.max(part.length, 1);
    if (!part.rows) this.prepare(part);
    this.pathEvents = new Set(part.path.map((stretch) => stretch[0]));
    this.chosen = view && view.event >= 0 && view.event < part.events.op.length ? view.event : -1;
    this.look(view && view.to > view.from ? view.from : 0, view && view.to > view.from ? view.to : this.length, false);
    this.choose(this.chosen);
  }

  // Rows of slices that do not overlap: a queue whose data phases do gets several.
  prepare(part) {
    part.rows = [];
    part.place = new Map();
    for (const track of part.tracks) {
      const lanes = [];
      for (let at = 0; at < track.start.length; at++) {
        let lane = lanes.findIndex((each) => each.end <= track.start[at] + 0.05);
        if (lane < 0 && lanes.length < LANES) lane = lanes.push({ start: [], stop: [], event: [], kind: [], end: 0 }) - 1;
        if (lane < 0) lane = at % LANES;
        const into = lanes[lane];
        into.start.push(track.start[at]);
        into.stop.push(track.start[at] + track.length[at]);
        into.event.push(track.event[at]);
        into.kind.push(track.kind[at]);
        into.end = Math.max(into.end, track.start[at] + track.length[at]);
        part.place.set(track.event[at], [track.start[at], track.start[at] + track.length[at]]);
      }
      lanes.forEach((lane, at) => part.rows.push({ ...lane, track, lane: at, last: at === lanes.length - 1 }));
    }
    let y = TOP;
    for (const row of part.rows) {
      row.y = y;
      y += ROW + (row.last ? GAP : 0);
    }
    part.height = y + 4;
  }

  look(from, to, remember = true) {
    const least = Math.min(2, this.length);
    let width = Math.min(Math.max(to - from, least), this.length);
    from = Math.min(Math.max(from, 0), this.length - width);
    this.from = from;
    this.to = from + width;
    this.draw();
    if (remember) saveView();
  }

  zoom(factor, at = (this.from + this.to) / 2) {
    this.look(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  goTo(from, to, event = -1) {
    const margin = Math.max((to - from) * 0.6, 20);
    this.look(from - margin, to + margin);
    this.choose(event);
    byId("time").scrollIntoView({ block: "start", behavior: "instant" });
  }

  x(ns) {
    return LEFT + (ns - this.from) / (this.to - this.from) * (this.width - LEFT);
  }

  ns(x) {
    return this.from + (x - LEFT) / (this.width - LEFT) * (this.to - this.from);
  }

  sized(canvas, height) {
    const scale = devicePixelRatio || 1;
    const width = Math.max(canvas.clientWidth, 200);
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = height + "px";
    const paint = canvas.getContext("2d");
    paint.setTransform(scale, 0, 0, scale, 0, 0);
    paint.font = "11px ui-sans-serif, system-ui, sans-serif";
    paint.textBaseline = "middle";
    this.width = width;
    return paint;
  }

  draw() {
    const style = getComputedStyle(document.documentElement);
    this.ink = style.getPropertyValue("--ink");
    this.soft = style.getPropertyValue("--soft");
    this.lineColour = style.getPropertyValue("--line");
    this.field = style.getPropertyValue("--field");
    this.hot = style.getPropertyValue("--hot");
    this.card = style.getPropertyValue("--card");
    this.drawStrip();
    const paint = this.sized(this.canvas, this.part.height);
    this.axis(paint);
    this.drawPath(paint);
    for (const row of this.part.rows) this.drawRow(paint, row);
    if (this.chosen >= 0) this.drawCauses(paint);
    paint.fillStyle = this.card;
    paint.fillRect(0, 0, LEFT - 4, this.part.height);
    paint.fillStyle = this.soft;
    paint.fillText("critical path", 0, TOP - 11);
    for (const row of this.part.rows) {
      if (row.lane) continue;
      paint.fillStyle = this.ink;
      paint.fillText(row.track.name, 0, row.y + ROW / 2, LEFT - 56);
      paint.fillStyle = this.soft;
      paint.textAlign = "right";
      paint.fillText(share(row.track.busy, this.part.length), LEFT - 8, row.y + ROW / 2);
      paint.textAlign = "left";
    }
    byId("window").textContent = `${us(this.from)} … ${us(this.to)} (${us(this.to - this.from)} of ${us(this.length)})`;
  }

  axis(paint) {
    const span = this.to - this.from;
    const rough = span / Math.max(2, (this.width - LEFT) / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
    paint.fillStyle = this.soft;
    paint.strokeStyle = this.lineColour;
    for (let at = Math.ceil(this.from / step) * step; at <= this.to; at += step) {
      const x = Math.round(this.x(at)) + 0.5;
      paint.beginPath();
      paint.moveTo(x, 18);
      paint.lineTo(x, this.part.height);
      paint.stroke();
      paint.fillText(us(at), Math.min(x + 3, this.width - 50), 9);
    }
  }

  drawPath(paint) {
    for (const [event, start, end] of this.part.path) {
      if (end < this.from || start > this.to) continue;
      const x = this.x(start);
      paint.fillStyle = colourOf(this.part, this.part.events.line[event]);
      paint.fillRect(x, TOP - 18, Math.max(this.x(end) - x - 0.5, 0.7), 13);
    }
  }

  drawRow(paint, row) {
    const { start, stop, event, kind } = row;
    const onlyPath = byId("only-path").checked;
    const perPixel = (this.to - this.from) / (this.width - LEFT);
    paint.fillStyle = this.field;
    paint.fillRect(LEFT, row.y, this.width - LEFT, ROW - 2);
    let at = firstAfter(stop, this.from);
    while (at < start.length && start[at] < this.to) {
      const x = Math.max(this.x(start[at]), LEFT - 2), end = Math.min(this.x(stop[at]), this.width + 2);
      const number = event[at];
      paint.globalAlpha = onlyPath && !this.pathEvents.has(number) ? 0.12 : kind[at] === 0 ? 0.45 : 1;
      paint.fillStyle = colourOf(this.part, this.part.events.line[number]);
      const narrow = end - x < 1, width = narrow ? 1 : end - x - (end - x > 3 ? 0.6 : 0);
      paint.fillRect(narrow ? Math.floor(x) : x, row.y, width, ROW - 2);
      if (number === this.chosen) {
        paint.globalAlpha = 1;
        paint.strokeStyle = this.ink;
        paint.lineWidth = 2;
        paint.strokeRect(x, row.y - 1, Math.max(width, 2), ROW);
        paint.lineWidth = 1;
      }
      if (width > 46) {
        paint.fillStyle = "#17181a";
        const name = (kind[at] === 0 ? "table load · " : "") + this.part.ops[this.part.events.op[number]];
        if (paint.measureText(name).width < width - 8) paint.fillText(name, x + 4, row.y + ROW / 2 - 0.5);
      }
      // What is narrower than a pixel is drawn once for each pixel.
      at = narrow ? Math.max(at + 1, firstAfter(stop, start[at] + perPixel)) : at + 1;
    }
    paint.globalAlpha = 1;
  }

  // The chain of what the chosen event waited for, as far as it is in sight.
  drawCauses(paint) {
    let event = this.chosen;
    paint.strokeStyle = this.hot;
    paint.lineWidth = 1.5;
    for (let steps = 0; steps < 40; steps++) {
      const cause = this.part.events.cause[event];
      const to = this.spot(event, true), from = cause >= 0 && this.spot(cause, false);
      if (!from || !to) break;
      const x1 = this.x(from[0]), x2 = this.x(to[0]);
      if (x2 < LEFT) break;
      const bend = Math.max(12, Math.abs(x2 - x1) / 2);
      paint.beginPath();
      paint.moveTo(x1, from[1]);
      paint.bezierCurveTo(x1 + bend, from[1], x2 - bend, to[1], x2, to[1]);
      paint.stroke();
      event = cause;
    }
    paint.lineWidth = 1;
  }

  // Where an event waits (its first slice's start) or gives its result (its last slice's end).
  spot(event, first) {
    if (!this.part.spots) {
      this.part.spots = new Map();
      for (const row of this.part.rows) {
        for (let at = 0; at < row.event.length; at++) {
          const known = this.part.spots.get(row.event[at]) || { first: null, last: null };
          const y = row.y + ROW / 2;
          if (row.kind[at] === 1 || row.kind[at] === 2) known.first = [row.start[at], y];
          if (row.kind[at] === 1 || row.kind[at] === 3) known.last = [row.stop[at], y];
          if (row.kind[at] === 2 && !known.last) known.last = [row.stop[at], y];
          this.part.spots.set(row.event[at], known);
        }
      }
    }
    const known = this.part.spots.get(event);
    return known && (first ? known.first : known.last);
  }

  drawStrip() {
    const paint = this.sized(this.strip, 34);
    const scale = (this.width - LEFT) / this.length;
    paint.fillStyle = this.soft;
    paint.fillText("whole", 0, 17);
    const rows = this.part.rows, high = 30 / Math.max(rows.length, 1);
    paint.fillStyle = this.field;
    paint.fillRect(LEFT, 2, this.width - LEFT, 30);
    if (!this.part.strip || this.part.stripWidth !== this.width) {
      this.part.stripWidth = this.width;
      this.part.strip = rows.map((row) => busyPixels(row, scale));
    }
    rows.forEach((row, number) => {
      for (const [x, end, line] of this.part.strip[number]) {
        paint.fillStyle = colourOf(this.part, line);
        paint.fillRect(LEFT + x, 2 + number * high, Math.max(end - x, 0.7), Math.max(high - 0.5, 0.7));
      }
    });
    paint.strokeStyle = this.ink;
    paint.lineWidth = 1.5;
    const x = LEFT + this.from * scale, width = Math.max((this.to - this.from) * scale, 2);
    paint.strokeRect(x + 0.75, 1, width - 1.5, 32);
    paint.lineWidth = 1;
  }

  // What is under the pointer: a slice, a stretch of the critical path, or a gap.
  at(x, y) {
    const ns = this.ns(x), near = 2 * (this.to - this.from) / this.width;
    if (x < LEFT) return null;
    if (y > TOP - 20 && y < TOP - 3) {
      const stretch = this.part.path.find(([, start, end]) => start <= ns && ns < end);
      return stretch ? { event: stretch[0], stretch } : null;
    }
    const row = this.part.rows.find((each) => y >= each.y - 1 && y < each.y + ROW);
    if (!row) return null;
    const at = firstAfter(row.stop, ns - near);
    if (at < row.start.length && row.start[at] <= ns + near) {
      return { event: row.event[at], start: row.start[at], stop: row.stop[at], kind: row.kind[at], row };
    }
    const gap = this.part.gaps.find((each) => each[0] === row.track.number && each[1] <= ns && ns < each[2]);
    return gap ? { event: -1, gap, row } : null;
  }

  words(found) {
    const part = this.part;
    if (found.gap) return gapWords(part, found.gap);
    const out = described(part, found.event);
    if (found.stretch) {
      const [, start, end, reason, phases] = found.stretch;
      out.push(`${us(end - start)} of the critical path, ${share(end - start, part.length)}: ` +
        phases.map(([name, time]) => `${name} ${us(time)}`).join(", "));
      out.push(`waits: ${part.reasonNames[reason]}`);
    } else {
      out.push(`${part.kinds[found.kind]} on ${found.row.track.name}: ${us(found.start)} to ${us(found.stop)}, ${us(found.stop - found.start)}`);
      out.push(`result ready at ${us(part.events.ready[found.event])}`);
      out.push(waited(part, found.event));
    }
    return out;
  }

  choose(event) {
    this.chosen = event;
    const detail = byId("detail");
    detail.hidden = event < 0;
    if (event >= 0) {
      const cause = this.part.events.cause[event];
      const lines = described(this.part, event).map((line, at) => make("div", at ? { class: "code" } : { style: "font-weight:600" }, line));
      lines.push(make("div", {}, `result ready at ${us(this.part.events.ready[event])}; `,
        cause >= 0 ? make("a", { onclick: () => this.goToEvent(cause) }, waited(this.part, event)) : waited(this.part, event)));
      detail.replaceChildren(...lines);
    }
    this.draw();
    saveView();
  }

  goToEvent(event) {
    const place = this.part.place.get(event);
    if (place) this.goTo(place[0], place[1], event);
  }

  listen() {
    const canvas = this.canvas;
    let drag = null;
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.offsetX, from: this.from, to: this.to, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (drag) {
        const by = (event.offsetX - drag.x) / (this.width - LEFT) * (drag.to - drag.from);
        if (Math.abs(event.offsetX - drag.x) > 3) drag.moved = true;
        if (drag.moved) this.look(drag.from - by, drag.to - by);
        return;
      }
      const found = this.at(event.offsetX, event.offsetY);
      if (found) showTip(event, this.words(found));
      else hideTip();
    });
    canvas.addEventListener("pointerup", (event) => {
      if (drag && !drag.moved) {
        const found = this.at(event.offsetX, event.offsetY);
        this.choose(found ? found.event >= 0 ? found.event : found.gap[4] : -1);
      }
      drag = null;
    });
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("dblclick", (event) => this.zoom(0.25, this.ns(event.offsetX)));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
      event.preventDefault();
      if (event.shiftKey) {
        const by = (event.deltaY || event.deltaX) / 600 * (this.to - this.from);
        this.look(this.from + by, this.to + by);
      } else this.zoom(Math.exp(event.deltaY / 300), this.ns(event.offsetX));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const by = (this.to - this.from) / 5;
      const acts = {
        "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), "0": () => this.look(0, this.length),
        ArrowLeft: () => this.look(this.from - by, this.to - by), ArrowRight: () => this.look(this.from + by, this.to + by),
        Escape: () => this.choose(-1),
      };
      if (!acts[event.key]) return;
      event.preventDefault();
      acts[event.key]();
    });
    let begun = null;
    const there = (event) => Math.max(0, Math.min(this.length, (event.offsetX - LEFT) / (this.width - LEFT) * this.length));
    this.strip.addEventListener("pointerdown", (event) => {
      begun = there(event);
      this.strip.setPointerCapture(event.pointerId);
    });
    this.strip.addEventListener("pointermove", (event) => {
      if (begun !== null && Math.abs(there(event) - begun) > this.length / 300) {
        this.look(Math.min(begun, there(event)), Math.max(begun, there(event)));
      }
    });
    this.strip.addEventListener("pointerup", (event) => {
      const now = there(event), half = (this.to - this.from) / 2;
      if (begun !== null && Math.abs(now - begun) <= this.length / 300) this.look(now - half, now + half);
      begun = null;
    });
    byId("zoom-in").onclick = () => this.zoom(0.5);
    byId("zoom-out").onclick = () => this.zoom(2);
    byId("zoom-all").onclick = () => this.look(0, this.length);
    byId("only-path").onchange = () => this.draw();
    addEventListener("resize", () => this.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }
}

// The first of ascending numbers that lies above a value.
function firstAfter(numbers, value) {
  let low = 0, high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
}

function busyPixels(row, scale) {
  const out = [];
  const per = 1 / scale;
  let at = 0;
  while (at < row.start.length) {
    const x = row.start[at] * scale, end = row.stop[at] * scale;
    out.push([x, end, currentPart().events.line[row.event[at]]]);
    at = end - x < 1 ? Math.max(at + 1, firstAfter(row.stop, row.start[at] + per)) : at + 1;
  }
  return out;
}

function gapWords(part, [track, start, end, why, event, cause, tensor]) {
  const out = [`idle for ${us(end - start)}`];
  if (event < 0) return [...out, why];
  const name = (number) => `${part.ops[part.events.op[number]]} #${number} · ${part.lines[part.events.line[number]][0]}`;
  out.push(`until ${name(event)}`);
  if (tensor >= 0) out.push(`waited for ${part.tensors[tensor][0]}`);
  out.push(cause >= 0 ? `${why} ${name(cause)}` : why);
  return out;
}
