// Puts the page together, and keeps what is shown in the address: #l=launch&a=from&b=to&e=event, times in ns.
const timeline = new Timeline();
let current = 0;

function currentPart() {
  return DATA.parts[current];
}

function show(number, view) {
  current = number;
  const part = currentPart();
  byId("launch").value = number;
  showRun((part) => show(part), number);
  showSummary(part);
  timeline.show(part, view);
  showAdvice(part);
  showWhatIf(part);
  showPath(part);
  showIdle(part);
  showRoofline(part);
  showTraffic(part);
  showSource(part);
  const memories = document.querySelectorAll("#memory .memory");
  memories.forEach((each, at) => { each.hidden = at !== number; });
  byId("memory").hidden = !memories[number] || !memories[number].firstElementChild;
}

function saveView() {
  const whole = timeline.from <= 0 && timeline.to >= timeline.length;
  const parts = [];
  if (current) parts.push("l=" + current);
  if (!whole) parts.push("a=" + timeline.from.toFixed(1), "b=" + timeline.to.toFixed(1));
  if (timeline.chosen >= 0) parts.push("e=" + timeline.chosen);
  try {
    history.replaceState(null, "", parts.length ? "#" + parts.join("&") : location.pathname + location.search);
  } catch (error) { /* a viewer that forbids it loses only the address */ }
}

function savedView() {
  const found = new URLSearchParams(location.hash.slice(1));
  const number = (name, otherwise) => {
    const value = found.has(name) ? Number(found.get(name)) : NaN;
    return Number.isFinite(value) ? value : otherwise;
  };
  const launch = Math.trunc(number("l", 0));
  return [launch >= 0 && launch < DATA.parts.length ? launch : 0,
    { from: number("a", 0), to: number("b", 0), event: Math.trunc(number("e", -1)) }];
}

if (DATA.parts.length) {
  DATA.parts.forEach((part, number) => byId("launch").append(make("option", { value: number }, part.title)));
  byId("pick").hidden = DATA.parts.length < 2;
  byId("launch").onchange = (event) => show(Number(event.target.value));
  addEventListener("hashchange", () => show(...savedView()));
  show(...savedView());
} else {
  document.querySelector("main").replaceChildren(make("section", {}, "No kernel was launched."));
}
