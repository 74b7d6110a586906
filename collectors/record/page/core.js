"use strict";
// Data arrive by RECORD.run and RECORD.chunk, from scripts that hold nothing but values. Whatever
// comes from a rollout becomes a text node: no markup is ever made of a string, and the page's
// Trusted Types policy, which has one rule for the addresses of those scripts, sees to it.

const RUNS = [];
const CHUNKS = new Map();  // "run/step/chunk" -> samples, by number in the step
const WAITING = new Map();
const state = { run: 0, colour: "writer", template: true, selected: 0, view: null };

const RECORD = {
  run(number, values) { RUNS[number] = prepared(values, number); },
  chunk(key, samples) {
    CHUNKS.set(key, new Map(samples));
    if (CHUNKS.size > 64) CHUNKS.delete(CHUNKS.keys().next().value);
    for (const tell of WAITING.get(key) || []) tell();
    WAITING.delete(key);
  },
};
globalThis.RECORD = RECORD;

function prepared(run, number) {
  run.number = number;
  run.byStep = new Map(run.steps.map((step) => [step.step, step]));
  run.byPrompt = new Map();
  run.tests = new Map(run.tests);
  for (const step of run.steps) {
    step.groups.forEach((group, place) => {
      group.place = place;
      group.step = step;
      group.samples = [];
      const same = run.byPrompt.get(group.prompt_id);
      if (same) same.push(group); else run.byPrompt.set(group.prompt_id, [group]);
    });
    step.samples = step.samples.map((values, index) => {
      const sample = { index, step, run };
      run.columns.forEach((name, i) => { sample[name] = values[i]; });
      sample.stop = run.stops[sample.stop];
      sample.group = step.groups[sample.group];
      sample.group.samples.push(sample);
      return sample;
    });
  }
  return run;
}

// Elements ----------------------------------------------------------------------------------------

function h(name, given, ...children) {
  const node = document.createElement(name);
  fill(node, given, children);
  return node;
}

function svg(name, given, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  fill(node, given, children);
  return node;
}

function fill(node, given, children) {
  for (const [key, value] of Object.entries(given || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "background") node.style.background = value;
    else if (key === "height" && node.style) node.style.height = value;
    else if (key === "width" && node.style) node.style.width = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(4)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child);  // a string becomes a text node
  }
}

// Where a page is; the run is named where there are several.
function base(run = state.run) { return RUNS.length > 1 ? `#/r${run}/` : "#/"; }

// Numbers -----------------------------------------------------------------------------------------

function text(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return value.toFixed(size >= 100 ? 1 : digits).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

function seconds(value) {
  if (value === null) return "not run";
  if (value < 1e-3) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}

// Colours: two ends through nothing, mixed by the browser so that they fit the theme. --------------

function signed(part) {  // -1 .. 1
  const strength = Math.round(Math.min(1, Math.abs(part)) * 62);
  return `color-mix(in srgb, var(${part < 0 ? "--bad" : "--good"}) ${strength}%, transparent)`;
}

function sequential(part) {  // 0 .. 1
  const strength = Math.round(Math.max(0, Math.min(1, part)) * 64);
  return `color-mix(in srgb, var(--accent-2) ${strength}%, transparent)`;
}

function rewardColour(run, reward) {
  const [low, high] = run.rewardRange;
  const part = high > low ? (reward - low) / (high - low) : 0.5;
  const [from, to, share] = part < 0.5 ? ["--low", "--middle", part * 2] : ["--middle", "--high", part * 2 - 1];
  return `color-mix(in oklab, var(${to}) ${Math.round(share * 100)}%, var(${from}))`;
}

const HUES = [220, 28, 150, 300, 95, 0, 190, 260];
function versionColour(version) {
  const hue = HUES[((version % HUES.length) + HUES.length) % HUES.length];
  return `oklch(65% .15 ${hue} / .33)`;
}

// Loading -----------------------------------------------------------------------------------------

const policy = globalThis.trustedTypes && trustedTypes.createPolicy("record-data", {
  createScriptURL(address) {
    if (!/^data\/\d+\/(run|step-\d+-\d+)\.js$/.test(address)) throw new TypeError(address);
    return address;
  },
});

function load(address, done) {
  const script = document.createElement("script");
  script.nonce = NONCE;
  script.addEventListener("error", () => done(false));
  script.addEventListener("load", () => { script.remove(); done(true); });
  script.src = policy ? policy.createScriptURL(address) : address;
  document.head.append(script);
}

function samplesOf(run, step, wanted) {
  const chunks = [...new Set(wanted.map((sample) => sample.chunk))];
  const all = chunks.map((chunk) => new Promise((resolve, reject) => {
    const key = `${run.number}/${step.step}/${chunk}`;
    if (CHUNKS.has(key)) return resolve(CHUNKS.get(key));
    if (WAITING.has(key)) return WAITING.get(key).push(() => resolve(CHUNKS.get(key)));
    WAITING.set(key, [() => resolve(CHUNKS.get(key))]);
    const name = `step-${String(step.step).padStart(6, "0")}-${chunk}`;
    return load(`data/${run.number}/${name}.js`, (found) => {
      if (!found) { WAITING.delete(key); reject(new Error(`data/${run.number}/${name}.js`)); }
    });
  }));
  return Promise.all(all).then((maps) => wanted.map((sample) => {
    for (const map of maps) if (map.has(sample.index)) return map.get(sample.index);
    throw new Error(`sample ${sample.index} of step ${step.step}`);
  }));
}
