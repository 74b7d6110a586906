// The pages: run, step, group side by side, sample, all samples.

const filter = { low: null, high: null, stop: "", tools: "", trained: "" };

function keeps(sample) {
  if (filter.low !== null && !(sample.reward !== null && sample.reward >= filter.low)) return false;
  if (filter.high !== null && !(sample.reward !== null && sample.reward <= filter.high)) return false;
  if (filter.stop && sample.stop !== filter.stop) return false;
  if (filter.tools === "error" && !sample.errors) return false;
  if (filter.tools === "called" && !sample.calls) return false;
  if (filter.tools === "none" && sample.calls) return false;
  if (filter.trained === "yes" && !sample.trained) return false;
  if (filter.trained === "no" && sample.trained) return false;
  return true;
}

function isFiltered() { return filter.low !== null || filter.high !== null || Boolean(filter.stop || filter.tools || filter.trained); }

function filters(run) {
  const number = (name, label) => h("input", {
    type: "number", step: "any", value: filter[name] ?? "", "aria-label": label, placeholder: label,
    onchange: (event) => { filter[name] = event.target.value === "" ? null : Number(event.target.value); show(); },
  });
  const choice = (name, label, options) => h("label", {}, label, h("select", {
    "data-filter": name, onchange: (event) => { filter[name] = event.target.value; show(); },
  }, options.map(([value, shown]) => h("option", { value, selected: filter[name] === value }, shown))));
  return h("div", { class: "filters" },
    h("label", {}, "reward", number("low", "least"), "to", number("high", "most")),
    choice("stop", "stop reason", [["", "any"], ...run.stops.map((stop) => [stop, stop || "none"])]),
    choice("tools", "tools", [["", "any"], ["error", "with an error"], ["called", "called"], ["none", "not called"]]),
    choice("trained", "trained", [["", "any"], ["yes", "yes"], ["no", "no"]]),
    isFiltered() && h("button", { onclick: () => { Object.assign(filter, { low: null, high: null, stop: "", tools: "", trained: "" }); show(); } }, "clear"));
}

function squares(group) {
  const run = RUNS[state.run];
  if (!group.samples.length) {
    return h("span", { class: "squares", title: "samples not recorded" }, group.rewards.map((reward) => square(run, reward, "i", {})));
  }
  return h("span", { class: "squares" }, group.samples.map((sample) => square(run, sample.reward, "a", {
    href: `${base()}sample/${group.step.step}/${sample.index}`,
    title: `sample ${sample.number}: reward ${text(sample.reward)}, ${sample.stop}${sample.errors ? `, ${sample.errors} tool errors` : ""}`,
    class: `${keeps(sample) ? "" : "off "}${sample.errors ? "flag" : ""}`,
  })));
}

function square(run, reward, kind, given) {
  const node = h(kind, given);
  if (reward === null) node.classList.add("none"); else node.style.background = rewardColour(run, reward);
  return node;
}

function rowsTable(heads, rows, openers) {
  state.list = openers;
  const body = rows.map((cells, i) => h("tr", {
    class: i === state.selected ? "on" : "", onclick: (event) => { if (!event.target.closest("a")) openers[i](); },
  }, cells.map((cell, column) => h("td", { class: heads[column][1] }, cell))));
  return h("table", { class: "table" }, h("thead", {}, h("tr", {}, heads.map(([name, kind]) => h("th", { class: kind }, name)))), h("tbody", {}, body));
}

// Run ---------------------------------------------------------------------------------------------

function runView() {
  const run = RUNS[state.run];
  const total = run.steps.reduce((sum, step) => sum + step.samples.length, 0);
  const about = run.about;
  const known = new Set(MAIN.map(([name]) => name));
  const others = [...run.metrics, ...run.tests.keys()].filter((name) => !known.has(name)).map((name) => [name, name]);
  const heads = [["step", "num"], ["rewards", ""], ["mean", "num"], ["groups", "num"], ["with a signal", "num"], ["tokens", "num"], ["tool errors", "num"], ["truncated", "num"], ["recorded", "num"]];
  const rows = run.steps.map((step) => {
    const rewards = step.groups.flatMap((group) => group.rewards);
    const value = (name) => text(run.metrics.includes(name) ? step.values[run.metrics.indexOf(name)] : null);
    return [text(step.step), histogram(rewards, run.rewardRange), text(mean(rewards)), text(step.groups.length),
      text(step.groups.filter((group) => group.num_trained > 0).length), value("sampled_tokens"), value("tool_errors"), value("truncated_fraction"), text(step.samples.length)];
  });
  const more = h("details", {}, h("summary", {}, `${others.length} further metrics`));
  more.addEventListener("toggle", () => { if (more.open && !more.querySelector(".cards")) more.append(charts(others)); });
  return [
    h("div", { class: "head" }, h("h1", {}, run.name), about.status && h("span", { class: `chip ${about.status === "finished" ? "good" : about.status === "failed" ? "bad" : "warn"}` }, about.status),
      h("span", { class: "soft" }, `${text(run.steps.length)} step${run.steps.length === 1 ? "" : "s"}, ${text(total)} samples recorded${about.started ? `, started ${about.started}` : ""}`),
      RUNS.length > 1 && h("span", { class: "soft" }, "beside ", RUNS.filter((other) => other !== run).map((other) => h("a", { class: `chip r${other.number}`, href: base(other.number) }, other.name)))),
    run.damage.length > 0 && h("p", { class: "note" }, `Not all could be read: ${run.damage.join("; ")}`),
    charts(MAIN), others.length > 0 && more,
    h("h2", {}, "Steps"),
    rowsTable(heads, rows, run.steps.map((step) => () => go(`step/${step.step}`))),
  ];
}

// Step --------------------------------------------------------------------------------------------

function stepView(number) {
  const run = RUNS[state.run], step = run.byStep.get(Number(number));
  if (!step) return [nothing(`There is no step ${number}.`)];
  const groups = step.groups.filter((group) => !isFiltered() || group.samples.some(keeps));
  const heads = [["prompt", "prompt"], ["group", ""], ["attempt", "num"], ["rewards", ""], ["mean", "num"], ["trained", ""]];
  const rows = groups.map((group) => [
    group.prompt || "(no text)", h("span", { class: "mono" }, nameOf(group)), text(group.attempt + 1), squares(group), text(mean(group.rewards)),
    group.num_trained ? h("span", { class: "chip good" }, "trained") : h("span", { class: "chip" }, signalOf(group)),
  ]);
  return [
    h("div", { class: "head" }, h("h1", {}, `Step ${step.step}`),
      h("span", { class: "soft" }, `reward ${text(mean(step.groups.flatMap((group) => group.rewards)))}, ${text(step.groups.length)} groups, ${text(step.samples.length)} samples recorded`),
      h("span", { class: "grow" }), stepLinks(run, step)),
    filters(run),
    groups.length ? rowsTable(heads, rows, groups.map((group) => () => go(`group/${step.step}/${group.place}`))) : nothing("No group has a sample like that."),
  ];
}

function nameOf(group) { return group.ordinal === null ? group.group_id : `prompt ${group.ordinal}`; }

function signalOf(group) {
  const known = group.rewards.filter((reward) => reward !== null);
  return new Set(known).size <= 1 ? "no signal" : "not trained";
}

function stepLinks(run, step) {
  const at = run.steps.indexOf(step);
  const link = (other, shown) => other && h("a", { class: "chip", href: `${base()}step/${other.step}` }, shown);
  return h("span", { class: "trail" }, link(run.steps[at - 1], `← step ${run.steps[at - 1]?.step}`), link(run.steps[at + 1], `step ${run.steps[at + 1]?.step} →`));
}

// Group -------------------------------------------------------------------------------------------

function groupView(number, place) {
  const run = RUNS[state.run], step = run.byStep.get(Number(number)), group = step && step.groups[Number(place)];
  if (!group) return [nothing("There is no such group.")];
  state.list = group.samples.map((sample) => () => go(`sample/${step.step}/${sample.index}`));
  const body = h("div", {});
  const page = [
    h("div", { class: "head" }, h("h1", {}, group.ordinal === null ? `Group ${group.group_id}` : `Prompt ${group.ordinal}`), h("span", { class: "soft" }, `step ${step.step}, mean reward ${text(mean(group.rewards))}`),
      group.num_trained ? h("span", { class: "chip good" }, `${group.num_trained} rows trained`) : h("span", { class: "chip" }, signalOf(group)),
      group.attempt > 0 && h("span", { class: "chip warn" }, `attempt ${group.attempt + 1}`), h("span", { class: "grow" }), samePrompt(group)),
    body,
  ];
  if (!group.samples.length) { body.append(nothing("The samples of this group were not recorded.")); return page; }
  fetched(run, step, group.samples, body, (samples) => {
    const draw = () => body.replaceChildren(...groupBody(group, samples, draw));
    draw();
  });
  return page;
}

function groupBody(group, samples, again) {
  const scale = scaleOf(state.colour, samples);
  const first = samples[0];
  const prompt = first.messages.slice(0, first.messages.findIndex((_, i) => first.tokens.spans.some(([writer, , at]) => writer === "model" && at === i)));
  return [
    prompt.length > 0 && h("div", { class: "panel" }, prompt.map(([role, title, said]) => h("div", { class: `turn ${role === "tool" ? "tool" : "user"}` }, h("b", {}, title), h("pre", {}, said)))),
    tokenTools(samples, again),
    h("div", { class: "columns" }, samples.map((sample, i) => h("section", { class: `column${i === state.selected ? " on" : ""}${keeps(group.samples[i]) ? "" : " off"}` },
      h("div", { class: "top" }, h("a", { class: "reward", href: `${base()}sample/${group.step.step}/${group.samples[i].index}` }, text(sample.reward)),
        h("span", { class: "soft" }, `${!sample.trained ? "not trained" : sample.advantage === null ? "trained" : `advantage ${text(sample.advantage, 2)}`}, ${numTokens(sample)}`), h("span", { class: "grow" }), sample.place && h("span", { class: "chip", title: sample.place }, agentOrPlace(sample)), chips(sample)),
      stream(sample, scale, sample.prompt_tokens)))),
  ].filter(Boolean);
}

function chips(sample) {
  return [
    h("span", { class: `chip ${sample.truncated ? "warn" : ""}` }, sample.end || "no stop reason"),
    sample.reward === null && sample.reward_errors && h("span", { class: "chip bad" }, "not scored: error"),
    sample.errors > 0 && h("span", { class: "chip bad" }, `${sample.errors} tool error${sample.errors > 1 ? "s" : ""}`),
  ];
}

/* Agents of an episode share its reward, and each is paid its own. */
function agentOrPlace(sample) {
  if (!sample.agent) return sample.place;
  const own = sample.rewards.find(([name]) => name === sample.agent);
  return own ? `${sample.agent}: ${text(own[1])}` : sample.agent;
}

/* A source without a value: it failed, if the errors name it, or has nothing to say of this one. */
function sourceText(name, value, errors) {
  if (value !== null) return text(value);
  return errors && errors.includes(name) ? "failed" : "does not apply";
}

function numTokens(sample) { return `${text(sample.tokens.log_probs.filter((value) => value !== null).length)} tokens`; }

function samePrompt(group) {
  const links = [];
  RUNS.forEach((run, number) => {
    for (const other of run.byPrompt.get(group.prompt_id) || []) {
      if (other === group) continue;
      links.push(h("a", { class: RUNS.length > 1 ? `chip r${number}` : "chip", href: `${base(number)}group/${other.step.step}/${other.place}` },
        `${RUNS.length > 1 ? `${run.name} ` : ""}step ${other.step.step}: ${text(mean(other.rewards))}`));
    }
  });
  return h("span", { class: "trail" }, links.length > 0 && h("span", { class: "soft" }, "the same prompt"), links.slice(0, 8),
    h("a", { class: "chip", href: `${base()}prompt/${encodeURIComponent(keyOfPrompt(group))}` }, "its history"));
}

function fetched(run, step, wanted, body, draw) {
  body.replaceChildren(h("p", { class: "empty" }, "Loading …"));
  const view = state.view;
  samplesOf(run, step, wanted).then((samples) => { if (state.view === view) draw(samples.map((values, i) => merged(values, wanted[i]))); },
    (error) => body.replaceChildren(nothing(`The data of these samples are missing: ${error.message}`)));
}

function merged(values, sample) { return { ...values, reward: sample.reward, advantage: sample.advantage, trained: sample.trained, stop: sample.stop, errors: sample.errors, truncated: sample.truncated }; }

// Sample ------------------------------------------------------------------------------------------

function sampleView(number, index) {
  const run = RUNS[state.run], step = run.byStep.get(Number(number)), sample = step && step.samples[Number(index)];
  if (!sample) return [nothing("There is no such sample.")];
  const mates = sample.group.samples, at = mates.indexOf(sample);
  state.mates = mates;
  state.sample = sample;
  const body = h("div", {});
  fetched(run, step, [sample], body, ([full]) => {
    const draw = () => body.replaceChildren(tokenTools([full], draw), h("div", { class: "split" },
      h("div", { class: "panel" }, stream(full, scaleOf(state.colour, [full]))), h("aside", {}, sidePanels(full, sample))));
    draw();
  });
  return [
    h("div", { class: "head" }, h("h1", {}, `Sample ${sample.number}`), h("span", { class: "soft" }, `${at + 1} of ${mates.length}, `, h("a", { href: `${base()}group/${step.step}/${sample.group.place}` }, nameOf(sample.group)), `, step ${step.step}`),
      sample.segment > 0 && h("span", { class: "chip" }, `segment ${sample.segment + 1}`),
      h("span", { class: "grow" }),
      h("span", { class: "trail" }, at > 0 && h("a", { class: "chip", href: `${base()}sample/${step.step}/${mates[at - 1].index}` }, "← sample before"), at + 1 < mates.length && h("a", { class: "chip", href: `${base()}sample/${step.step}/${mates[at + 1].index}` }, "sample after →"))),
    body,
  ];
}

function sidePanels(full, sample) {
  const calls = full.tool_calls, slowest = Math.max(...calls.map(([, , took]) => took || 0), 1e-9);
  const panel = (...content) => h("section", { class: "panel" }, content);
  return [
    panel(h("div", { class: "head" }, h("span", { class: "reward" }, text(full.reward)), h("span", { class: "soft" }, `reward, ${numTokens(full)}`), h("span", { class: "grow" }), chips(full)),
      factList([full.advantage !== null ? ["advantage", text(full.advantage)] : ["trained", full.trained ? "yes" : "no"], ...full.rewards.map(([name, value]) => [name, sourceText(name, value, full.reward_errors)]),
        ["turns", text(sample.turns)], ["prompt, all tokens", `${text(full.prompt_tokens)}, ${text(full.tokens.ids.length)}`], ["version at the start", text(full.policy_version)], ...(full.place ? [["place in the episode", full.place]] : []),
        ...full.logged.map(([name, value]) => [name, value])]),
      full.reward_errors && [h("h2", {}, "Errors of the rewards"), h("pre", {}, full.reward_errors)]),
    calls.length > 0 && panel(h("h2", {}, `Tool calls`), calls.map(([tool, turn, took, isError]) => h("div", { class: `call${isError ? " error" : ""}` },
      h("span", {}, h("span", { class: "mono" }, tool || "(unreadable)"), h("span", { class: "faint" }, ` turn ${turn}`)), h("span", { class: "soft" }, isError ? "error, " : "", seconds(took)),
      h("span", { class: "track" }, h("i", { width: `${(100 * (took || 0)) / slowest}%` }))))),
    full.row && panel(h("h2", {}, "Row of the data"), h("pre", {}, full.row)),
  ];
}

// Samples -----------------------------------------------------------------------------------------

const MOST_ROWS = 200;

function samplesView() {
  const run = RUNS[state.run];
  const all = run.steps.flatMap((step) => step.samples).filter(keeps);
  const shown = all.slice(0, MOST_ROWS);
  const heads = [["step", "num"], ["prompt", "prompt"], ["sample", "num"], ["reward", "num"], ["advantage", "num"], ["stop reason", ""], ["turns", "num"], ["tool calls", "num"], ["errors", "num"], ["tokens", "num"]];
  const rows = shown.map((sample) => [text(sample.step.step), sample.group.prompt, text(sample.number), h("span", { class: "valued" }, text(sample.reward), h("span", { class: "squares" }, square(run, sample.reward, "i", {}))), text(sample.advantage), sample.stop, text(sample.turns), text(sample.calls), text(sample.errors), text(sample.tokens)]);
  return [
    h("div", { class: "head" }, h("h1", {}, "Samples"), h("span", { class: "soft" }, `${text(all.length)} of ${text(run.steps.reduce((sum, step) => sum + step.samples.length, 0))}${all.length > MOST_ROWS ? `, the first ${MOST_ROWS} are shown` : ""}`)),
    filters(run),
    shown.length ? rowsTable(heads, rows, shown.map((sample) => () => go(`sample/${sample.step.step}/${sample.index}`))) : nothing("No sample is like that."),
  ];
}

function nothing(why) { return h("p", { class: "empty" }, why); }
