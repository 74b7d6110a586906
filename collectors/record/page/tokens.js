// A sample by token: who wrote each, coloured by what one wants to know of it.

const COLOURS = {
  writer: { label: "writer", of: () => null },
  ratio: {
    label: "log-ratio", title: "log π of the trainer − log π of the engine, nats",
    of: (t, i) => (t.trainer && t.trainer[i] !== null && t.log_probs[i] !== null ? t.trainer[i] - t.log_probs[i] : null),
    signed: true,
  },
  advantage: {
    label: "advantage", title: "advantage that the token was trained with",
    of: (t, i, sample) => (t.advantages ? t.advantages[i] : t.log_probs[i] === null ? null : sample.advantage),
    signed: true,
  },
  entropy: { label: "entropy", title: "entropy of the distribution it was drawn from, nats", of: (t, i) => (t.entropy ? t.entropy[i] : null) },
  surprise: { label: "surprise", title: "−log π of the engine, nats", of: (t, i) => (t.log_probs[i] === null ? null : -t.log_probs[i]) },
  gap: {
    label: "gap", title: "recorded log π − log π that was computed again (torchrl-agents verify), nats",
    of: (t, i) => (t.gaps ? t.gaps[i] : null), signed: true,
  },
  version: { label: "version", title: "policy version that sampled the token", of: (t, i) => t.versions[i], named: true },
};

function scaleOf(mode, samples) {
  const how = COLOURS[mode];
  const values = [];
  for (const sample of samples) {
    for (let i = 0; i < sample.tokens.ids.length; i++) {
      const value = how.of(sample.tokens, i, sample);
      if (value !== null && value !== undefined) values.push(value);
    }
  }
  if (how.named) return { values: [...new Set(values)].sort((a, b) => a - b), any: values.length > 0 };
  const sizes = values.map(Math.abs).sort((a, b) => a - b);
  // The largest percent do not flatten the rest.
  return { most: sizes.length ? sizes[Math.ceil(0.99 * sizes.length) - 1] || sizes.at(-1) : 0, any: values.length > 0 };
}

function colourOf(mode, value, scale) {
  if (value === null || value === undefined) return null;
  if (COLOURS[mode].named) return versionColour(typeof value === "number" ? value : scale.values.indexOf(value));
  if (!scale.most) return "transparent";
  return COLOURS[mode].signed ? signed(value / scale.most) : sequential(value / scale.most);
}

function legend(mode, scale) {
  if (mode === "writer") {
    const key = (name, variable) => h("span", { class: "key" }, h("i", { background: `var(${variable})` }), name);
    return h("span", { class: "legend" }, key("model", "--model"), key("user", "--user"), key("tool", "--tool"), key("template", "--faint"));
  }
  if (!scale.any) return h("span", { class: "legend" }, "not recorded here");
  if (COLOURS[mode].named) {
    return h("span", { class: "legend" }, "version", scale.values.slice(0, 12).map((value) =>
      h("span", { class: "key" }, h("i", { background: colourOf(mode, value, scale) }), String(value))));
  }
  const bar = h("span", { class: "scale" });
  const ends = COLOURS[mode].signed
    ? [[-1, 0, 1].map(signed), -scale.most] : [[0, 1].map(sequential), 0];
  bar.style.background = `linear-gradient(90deg, ${ends[0].join(", ")})`;
  return h("span", { class: "legend", title: COLOURS[mode].title }, text(ends[1], 2), bar, text(scale.most, 2));
}

function stream(sample, scale, from = 0) {
  const box = h("div", { class: `stream${state.template ? "" : " no-template"}` });
  let at = 0, turn = 0;
  for (const [writer, role, message, length] of sample.tokens.spans) {
    const start = at;
    at += length;
    if (writer === "model") turn += 1;
    if (at <= from) continue;
    const block = h("div", { class: `turn ${writer}` });
    if (writer !== "template") {
      const name = message !== null && sample.messages[message] ? sample.messages[message][1] : role;
      block.append(h("b", {}, writer === "model" ? `model, turn ${turn}` : name || "context"));
    }
    for (let i = Math.max(start, from); i < at; i++) block.append(token(sample, i, scale));
    box.append(block);
  }
  return box;
}

function token(sample, i, scale) {
  const spelled = sample.tokens.texts[i];
  const node = h("span", { class: "t" }, spelled === "\n" ? "↵\n" : spelled);
  const value = COLOURS[state.colour].of(sample.tokens, i, sample);
  const colour = state.colour === "writer" ? null : colourOf(state.colour, value, scale);
  if (colour) node.style.background = colour;
  node.at = [sample, i];
  return node;
}

function factsOfToken([sample, i]) {
  const t = sample.tokens;
  const ratio = COLOURS.ratio.of(t, i);
  const facts = [["token", `${i} · id ${t.ids[i]}`], ["text", JSON.stringify(t.texts[i])]];
  if (t.log_probs[i] !== null) {
    facts.push(["log π engine", text(t.log_probs[i], 4)]);
    if (ratio !== null) facts.push(["log π trainer", text(t.trainer[i], 4)], ["ratio", text(Math.exp(ratio), 4)]);
    if (t.entropy && t.entropy[i] !== null) facts.push(["entropy", text(t.entropy[i], 4)]);
    if (t.gaps && t.gaps[i] !== null) facts.push(["gap", text(t.gaps[i], 6)], ["cause", t.causes[i] || "none"]);
    const advantage = COLOURS.advantage.of(t, i, sample);
    if (advantage !== null) facts.push(["advantage", text(advantage, 3)]);
    facts.push(["version", text(t.versions[i])]);
  }
  return facts;
}

function factList(facts) {
  return h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", {}, name), h("dd", { class: "mono" }, value)]));
}

const tip = h("div", { class: "tip", hidden: true, role: "tooltip" });
let pinned = null;

function pointAt(node, event) {
  tip.replaceChildren(factList(factsOfToken(node.at)));
  tip.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = tip;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - width - 10)}px`;
  tip.style.top = `${event.clientY + 20 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 20}px`;
}

document.addEventListener("mousemove", (event) => {
  if (pinned) return;
  if (event.target.at) pointAt(event.target, event); else tip.hidden = true;
});
document.addEventListener("click", (event) => {
  if (pinned) { pinned.classList.remove("pinned"); pinned = null; tip.hidden = true; }
  if (event.target.at) { pinned = event.target; pinned.classList.add("pinned"); pointAt(pinned, event); }
});

function tokenTools(samples, again) {
  const modes = Object.keys(COLOURS).map((mode) => {
    const has = mode === "writer" || scaleOf(mode, samples).any;
    return h("button", {
      "aria-pressed": String(state.colour === mode), disabled: !has, title: COLOURS[mode].title || "who wrote the token",
      onclick: () => { state.colour = mode; again(); },
    }, COLOURS[mode].label);
  });
  return h("div", { class: "tools" }, h("span", { class: "segmented", role: "group", "aria-label": "colour of tokens" }, modes),
    legend(state.colour, scaleOf(state.colour, samples)), h("span", { class: "grow" }),
    h("button", { "aria-pressed": String(!state.template), onclick: () => { state.template = !state.template; again(); } }, "hide template"));
}
