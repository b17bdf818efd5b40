// The sections of rows: critical path, idle time, traffic, what-if, source.
function showPath(part) {
  const section = emptied("path", "Critical path");
  section.append(make("p", { class: "soft" },
    "The chain of instructions that decides the length. Its parts follow one another without a gap, so they add up."));
  section.append(table([["instruction"], ["steps", "n"], ["", "n"], ["share", "n"], ["mostly", "w"]],
    part.pathLines.map(([op, where, steps, total, mostly]) => {
      const line = part.lines.findIndex(([name]) => name === where);
      return {
        cells: [make("span", {}, swatch(colourOf(part, line)), op, " ", make("code", {}, where)),
          steps, us(total), share(total, part.length), mostly],
        go: () => {
          const own = part.path.filter((each) => part.events.line[each[0]] === line);
          own.sort((a, b) => (b[2] - b[1]) - (a[2] - a[1]));
          if (own.length) timeline.goTo(own[0][1], own[0][2], own[0][0]);
        },
      };
    })));
  const groups = new Map();
  for (const stretch of part.path) {
    const [event, start, end, reason] = stretch;
    const key = `${part.events.op[event]} ${part.events.line[event]} ${reason}`;
    const group = groups.get(key) || { count: 0, total: 0, longest: stretch };
    group.count += 1;
    group.total += end - start;
    if (end - start > group.longest[2] - group.longest[1]) group.longest = stretch;
    groups.set(key, group);
  }
  const listed = [...groups.values()].sort((a, b) => b.longest[2] - b.longest[1] - (a.longest[2] - a.longest[1]));
  section.append(make("h3", {}, "its longest stretches, by instruction and wait"));
  section.append(table([["longest", "n"], ["times", "n"], ["together", "n"], ["instruction"], ["waits", "w"]],
    listed.slice(0, 60).map(({ count, total, longest: [event, start, end, reason] }) => ({
      cells: [us(end - start), count.toLocaleString("en"), us(total),
        make("span", {}, part.ops[part.events.op[event]], " ", make("code", {}, part.lines[part.events.line[event]][0])),
        part.reasonNames[reason]],
      go: () => timeline.goTo(start, end, event),
    }))));
}

function showAdvice(part) {
  const section = emptied("advice", "Advice");
  if (!part.advice.length) {
    section.append(make("p", { class: "soft" }, "No change of the kernel that was tried gains 2 %."));
    return;
  }
  section.append(make("p", { class: "soft" },
    "Changes of the kernel, each scheduled alone with the recorded instructions: what the launch would then take."));
  section.append(table([["takes", "n"], ["change", "n"], ["what to change"]],
    part.advice.map(([length, sentence, lines]) => ({
      cells: [us(length), (100 * (length / part.length - 1)).toFixed(1).replace("-", "−") + " %",
        make("span", {}, sentence, make("div", { class: "soft code" }, lines.join(", ")))],
    }))));
}

function showIdle(part) {
  const section = emptied("idle", "Idle time");
  section.append(make("p", { class: "soft" }, "Gaps of every engine and DMA queue, each with the instruction that ended it and the cause of its wait."));
  section.append(table([["track", "w"], ["cause"], ["gaps", "n"], ["idle", "n"], ["of length", "n"], ["longest", "n"]],
    part.idle.map(([track, sentence, count, total, longest]) => ({
      cells: [track, sentence, count, us(total), share(total, part.length), us(longest)],
      go: () => {
        const number = part.tracks.find((each) => each.name === track).number;
        const gap = part.gaps.find((each) => each[0] === number && Math.abs(each[2] - each[1] - longest) < 0.25);
        if (gap) timeline.goTo(gap[1], gap[2], gap[4]);
      },
    }))));
}

function showTraffic(part) {
  const section = emptied("traffic", "HBM traffic");
  if (!part.traffic.length) {
    section.append(make("p", { class: "soft" }, "This launch moves nothing to or from HBM."));
    return;
  }
  const most = Math.max(...part.traffic.map((each) => each[5] + each[6]));
  section.append(make("p", { class: "soft" },
    "Bytes moved over bytes of the tensor: above 1 something is moved again."));
  section.append(table([["tensor"], ["size", "n"], ["read", "n"], ["", "n"], ["written", "n"], ["", "n"], ["moved"]],
    part.traffic.map(([name, shape, dtype, argument, size, read, written]) => {
      const times = (moved) => {
        if (!moved) return "";
        const text = (moved / size).toFixed(2) + " ×";
        return moved > 1.005 * size ? make("b", { style: "color:var(--hot)" }, text) : text;
      };
      return {
        cells: [make("span", {}, name, make("div", { class: "soft" }, `[${shape}] ${dtype}${argument ? "" : ", allocated by the kernel"}`)),
          bytes(size), read ? bytes(read) : "", times(read), written ? bytes(written) : "", times(written), meter(read + written, most)],
      };
    })));
}

function showWhatIf(part) {
  const section = emptied("what-if", "Twice as fast");
  section.append(make("p", { class: "soft" }, "The launch scheduled again with one cost halved: what it would then take."));
  const most = Math.max(0.01, ...part.whatIf.map((each) => part.length - each[2]));
  section.append(table([["what"], ["takes", "n"], ["change", "n"], [""]],
    part.whatIf.map(([what, where, length]) => ({
      cells: [make("span", {}, what, where ? " " : "", where ? make("code", {}, where) : ""), us(length),
        part.length ? (100 * (length / part.length - 1)).toFixed(1).replace("-", "−") + " %" : "–",
        meter(part.length - length, most, "var(--good)")],
    }))));
}

function showSource(part) {
  const section = emptied("source", "Source");
  section.append(make("p", { class: "soft" },
    "Time by line: the number and the shade are its part of the critical path, for a line that calls others theirs " +
    "included; point at a line for what it holds."));
  const times = new Map([...part.callers, ...part.lineTimes].map((each) => [each[0], each]));
  const issues = new Set(part.lineTimes.map((each) => each[0]));
  const most = Math.max(1, ...part.lineTimes.map((each) => each[3]), ...part.callers.map((each) => each[3]));
  for (const { file, rows } of part.sources) {
    const listing = make("div", { class: "listing code" });
    for (const row of rows) {
      if (!row) {
        listing.append(make("div", { class: "cut" }, "⋮"));
        continue;
      }
      const [number, text, line] = row;
      const time = times.get(line);
      const element = make("div", { class: "row" }, make("span", {}, number),
        make("span", {}, time ? share(time[3], part.length) : ""), make("span", {}, text));
      if (time) {
        element.classList.add("used");
        const heat = Math.round(62 * time[3] / most);
        const shade = issues.has(line) ? "var(--hot)" : "var(--accent)";
        element.style.background = `color-mix(in srgb, ${shade} ${issues.has(line) ? heat : heat / 2}%, transparent)`;
        if (issues.has(line)) element.style.boxShadow = `inset 3px 0 ${colourOf(part, line)}`;
        element.onpointermove = (event) => showTip(event, [`${file}:${number}`,
          `${time[1].toLocaleString("en")} instructions${issues.has(line) ? "" : " that it calls for"} hold engines and DMA queues for ${us(time[2])}`,
          `${us(time[3])} of the critical path, ${share(time[3], part.length)}`]);
        element.onpointerleave = hideTip;
      }
      listing.append(element);
    }
    section.append(make("h3", {}, file), listing);
  }
  if (!part.sources.length) section.append(make("p", { class: "soft" }, "The source is not to be read."));
}
