// Which page is shown, and the keyboard.

const VIEWS = { run: runView, step: stepView, group: groupView, sample: sampleView, samples: samplesView, prompts: promptsView, prompt: promptView };
const place = document.getElementById("place");
const trail = document.getElementById("trail");

function go(path, run = state.run) { location.hash = base(run) + path; }

function route() {
  const all = location.hash.replace(/^#\//, "").split("/");
  const run = /^r(\d+)$/.exec(all[0]);
  if (run && RUNS[Number(run[1])]) state.run = Number(run[1]);
  const [name, ...parts] = run ? all.slice(1) : all;
  return [VIEWS[name] ? name : "run", parts.map((part) => { try { return decodeURIComponent(part); } catch { return part; } })];
}

function show() {
  const [name, parts] = route();
  state.shown = location.hash;
  const active = document.activeElement && place.contains(document.activeElement) ? document.activeElement : null;
  const typed = active && active.getAttribute("aria-label"), caret = active && active.type === "search" ? active.selectionStart : null;
  state.view = Symbol(name);
  state.list = [];
  state.mates = null;
  state.sample = null;
  tip.hidden = true;
  pinned = null;
  place.replaceChildren(...VIEWS[name](...parts).flat(3).filter(Boolean));
  place.classList.toggle("wide", name === "group" || name === "sample");
  crumbs(name, parts);
  if (typed) {
    const again = [...place.querySelectorAll("input")].find((each) => each.getAttribute("aria-label") === typed);
    if (again) { again.focus(); if (caret !== null) again.setSelectionRange(caret, caret); }
  }
}

// The address changes at once, and is told of later: a key pressed in between means the new page.
function follow() {
  if (state.shown === location.hash) return;
  state.selected = 0;
  show();
  scrollTo(0, 0);
}

function crumbs(name, parts) {
  const run = RUNS[state.run];
  const steps = [["run", "", run.name]];
  if (name === "samples") steps.push(["samples", "samples", "samples"]);
  if (name === "prompts" || name === "prompt") steps.push(["prompts", "prompts", "prompts"]);
  if (name === "prompt") steps.push(["prompt", `prompt/${encodeURIComponent(parts[0])}`, parts[0]]);
  if (["step", "group", "sample"].includes(name)) steps.push(["step", `step/${parts[0]}`, `step ${parts[0]}`]);
  const step = run.byStep.get(Number(parts[0]));
  const sample = name === "sample" && step && step.samples[Number(parts[1])];
  const group = name === "group" ? step && step.groups[Number(parts[1])] : sample && sample.group;
  if (group) steps.push(["group", `group/${step.step}/${group.place}`, nameOf(group)]);
  if (sample) steps.push(["sample", `sample/${step.step}/${sample.index}`, `sample ${sample.number}`]);
  state.trail = steps;
  trail.replaceChildren(...steps.flatMap(([, path, shown], i) => [i > 0 && h("i", {}, "›"), h("a", { href: `${base()}${path}`, class: i === steps.length - 1 ? "last" : "soft" }, shown)]).filter(Boolean));
  document.title = steps.map(([, , shown]) => shown).reverse().join(" · ");
  for (const link of document.querySelectorAll(".bar nav a")) {
    const own = link.getAttribute("href").slice(2) || "run";
    if (own === name || (own === "run" && ["step", "group", "sample"].includes(name)) || (own === "prompts" && name === "prompt")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function select(by) {
  if (!state.list.length) return;
  state.selected = Math.max(0, Math.min(state.list.length - 1, state.selected + by));
  const items = place.querySelectorAll(".table tbody tr, .column");
  items.forEach((item, i) => item.classList.toggle("on", i === state.selected));
  items[state.selected]?.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function neighbourStep(by) {
  const run = RUNS[state.run], [name, parts] = route();
  if (!["step", "group", "sample"].includes(name)) return;
  const at = run.steps.findIndex((step) => step.step === Number(parts[0])) + by;
  if (run.steps[at]) go(`step/${run.steps[at].step}`);
}

function next(by) {
  if (!state.mates) return select(by);
  const other = state.mates[state.mates.indexOf(state.sample) + by];
  if (other) go(`sample/${other.step.step}/${other.index}`);
}

function nextColour() {
  const buttons = [...place.querySelectorAll(".segmented button")].filter((button) => !button.disabled);
  const at = buttons.findIndex((button) => button.getAttribute("aria-pressed") === "true");
  buttons[(at + 1) % buttons.length]?.click();
}

function nextTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
}

function up() { const above = state.trail.at(-2); if (above) go(above[1]); }

function nextRun() { if (RUNS.length > 1) go("", (state.run + 1) % RUNS.length); }

const KEYS = {
  j: () => next(1), ArrowDown: () => next(1), k: () => next(-1), ArrowUp: () => next(-1),
  Enter: () => state.list[state.selected]?.(), Escape: up, u: up,
  "]": () => neighbourStep(1), "[": () => neighbourStep(-1), c: nextColour, t: nextTheme,
  "/": () => place.querySelector("input, select")?.focus(), r: nextRun,
  o: () => go(""), s: () => go("samples"), p: () => go("prompts"), "?": () => document.getElementById("help").showModal(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, select, dialog")) { if (event.key === "Escape") event.target.blur(); return; }
  if (event.key === "Enter" && event.target.closest("a, button, summary")) return;
  const action = KEYS[event.key];
  follow();
  if (action) { event.preventDefault(); action(); }
});
addEventListener("hashchange", follow);
document.getElementById("theme").addEventListener("click", nextTheme);
document.getElementById("keys").addEventListener("click", () => document.getElementById("help").showModal());
document.body.append(tip);

Promise.all(NUM_RUNS.map((number) => new Promise((done) => load(`data/${number}/run.js`, done)))).then((found) => {
  if (found.every(Boolean)) return show();
  return place.replaceChildren(nothing("The folder data/ beside this page is missing."));
});
