// Curves as small multiples: one metric each, the same steps below each other.

const MAIN = [
  ["reward", "reward"], ["held_out/reward", "held-out reward"], ["groups/without_signal_fraction", "groups without signal"],
  ["sampled_tokens", "sampled tokens"], ["truncated_fraction", "truncated"],
  ["tool_errors", "tool errors"], ["entropy", "entropy, nats"],
  ["kl_approx", "log π_old − log π"], ["ESS", "effective samples"],
  ["clip_fraction/positive_advantage", "clipped, good tokens"],
  ["clip_fraction/negative_advantage", "clipped, bad tokens"],
  ["ledger/staleness/mean", "staleness, mean"], ["time/step_s", "seconds of a step"],
];

function series(run, name) {
  if (run.tests.has(name)) return run.tests.get(name);
  const at = run.metrics.indexOf(name);
  if (at < 0) return [];
  return run.steps.map((step) => [step.step, step.values[at]]).filter(([, value]) => value !== null);
}

function chart(name, label) {
  const curves = RUNS.map((run) => series(run, name));
  if (!curves.some((points) => points.length)) return null;
  const every = curves.flat();
  const steps = every.map(([step]) => step);
  const values = every.map(([, value]) => value);
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (low > 0 && low < high * 0.5) low = 0;
  // At least a tenth of the largest magnitude: a curve from 1.98 to 2.00 is drawn as flat as it is.
  const lacking = (0.1 * Math.max(Math.abs(low), Math.abs(high)) || 1) - (high - low);
  if (lacking > 0) { low -= lacking / 2; high += lacking / 2; }
  const x = (step) => (last > first ? (step - first) / (last - first) : 0.5) * 300;
  const y = (value) => 88 - ((value - low) / (high - low)) * 82;
  const line = (points) => points.map(([s, v], i) => `${i ? "L" : "M"}${x(s).toFixed(1)} ${y(v).toFixed(1)}`).join("");
  const shown = h("b", {}, "");
  const at = svg("line", { class: "at", y1: 0, y2: 92, x1: 0, x2: 0 });
  const box = svg("svg", { viewBox: "0 0 300 92", preserveAspectRatio: "none" });
  if (low <= 0 && high >= 0) box.append(svg("line", { class: "zero", x1: 0, x2: 300, y1: y(0), y2: y(0) }));
  curves.forEach((points, run) => {
    if (!points.length) return;
    const alone = points.length === 1 ? " alone" : "";
    if (alone) points = [points[0], points[0]];
    if (run === 0 && !alone) {
      const floor = y(Math.max(low, Math.min(0, high)));
      box.append(svg("path", { class: "area", d: `${line(points)}L${x(points.at(-1)[0])} ${floor}L${x(points[0][0])} ${floor}Z` }));
    }
    box.append(svg("path", { class: `curve r${run % 4}${alone}`, d: line(points) }));
  });
  box.append(at);
  const card = h("div", { class: "card", "data-metric": name },
    h("div", { class: "name" }, label || name, shown), box,
    h("div", { class: "ends" }, h("span", {}, `${text(low)} to ${text(high)}`), h("span", {}, `steps ${first}–${last}`)));
  card.show = (step) => {
    card.classList.toggle("pointed", step !== null);
    const of = (points) => { const hit = points.find(([s]) => s === step); return text(hit ? hit[1] : null); };
    shown.textContent = step === null
      ? curves.map((points) => text(points.length ? points.at(-1)[1] : null)).join(" · ")
      : `step ${step}: ${curves.map(of).join(" · ")}`;
    if (step !== null) { at.setAttribute("x1", x(step)); at.setAttribute("x2", x(step)); }
  };
  card.stepAt = (event, known = steps) => {
    const bounds = box.getBoundingClientRect();
    const part = (event.clientX - bounds.left) / bounds.width;
    const wanted = first + part * (last - first);
    return known.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best), known[0]);
  };
  card.show(null);
  return card;
}

function charts(names) {
  const cards = names.map(([name, label]) => chart(name, label)).filter(Boolean);
  for (const card of cards) {
    const box = card.querySelector("svg");
    box.addEventListener("mousemove", (event) => { const step = card.stepAt(event); cards.forEach((each) => each.show(step)); });
    box.addEventListener("mouseleave", () => cards.forEach((each) => each.show(null)));
    box.addEventListener("click", (event) => go(`step/${card.stepAt(event, [...RUNS[state.run].byStep.keys()])}`));
  }
  return h("div", { class: "cards" }, cards);
}

function histogram(rewards, range, bins = 12) {
  const known = rewards.filter((reward) => reward !== null);
  const counts = new Array(bins).fill(0);
  const [low, high] = range;
  for (const reward of known) {
    const part = high > low ? (reward - low) / (high - low) : 0.5;
    counts[Math.min(bins - 1, Math.floor(part * bins))] += 1;
  }
  const most = Math.max(1, ...counts);
  return h("span", { class: "histogram", title: `rewards from ${text(low)} to ${text(high)}` },
    counts.map((count) => h("i", { height: `${(100 * count) / most}%` })));
}
