// The ledger's page: where is prompt 17?

function keyOfPrompt(group) { return group.ordinal === null ? group.prompt_id : String(group.ordinal); }

function promptTable(run) {
  if (run.prompts) return run.prompts;
  const found = new Map();
  const of = (key) => {
    if (!found.has(key)) found.set(key, { key, ordinal: null, events: [], groups: [], prompt: "", group_id: "" });
    return found.get(key);
  };
  for (const event of run.events) {
    const prompt = of(String(event.ordinal));
    prompt.ordinal = event.ordinal;
    prompt.group_id = event.group_id;
    prompt.events.push(event);
  }
  for (const step of run.steps) {
    for (const group of step.groups) {
      const prompt = of(keyOfPrompt(group));
      prompt.groups.push(group);
      prompt.prompt = group.prompt;
      prompt.group_id = prompt.group_id || group.group_id;
      prompt.ordinal = group.ordinal;
    }
  }
  run.prompts = found;
  return found;
}

function whereIs(prompt) {
  const last = prompt.events.at(-1);
  if (!last) {
    const group = prompt.groups.at(-1);
    return group.num_trained ? ["good", `trained at step ${group.step.step}`] : ["", `${signalOf(group)} at step ${group.step.step}`];
  }
  const used = prompt.groups.find((group) => group.step.step === last.step + 1);
  if (last.name === "trained" && used && !used.num_trained) return ["", `${signalOf(used)} at step ${last.step + 1}`];
  if (last.name === "trained") return ["good", `trained at step ${last.step + 1}`];
  if (last.name === "dropped") return ["bad", `dropped: ${last.reason}`];
  if (last.name === "returned") return ["warn", "returned, not trained"];
  return ["warn", { offered: "waits for a slot", started: "running", finished: "finished, waits to be used", taken: `in step ${last.step + 1}` }[last.name] || last.name];
}

function count(prompt, name) { return prompt.events.filter((event) => event.name === name).length; }

function promptsView() {
  const run = RUNS[state.run];
  const all = [...promptTable(run).values()];
  const wanted = (state.search || "").trim().toLowerCase();
  const fits = (prompt) => !wanted || String(prompt.ordinal) === wanted || prompt.group_id.endsWith(`/${wanted}`) || prompt.group_id === wanted
    || (!/^\d+$/.test(wanted) && (prompt.prompt.toLowerCase().includes(wanted) || whereIs(prompt)[1].toLowerCase().includes(wanted)));
  const found = all.filter(fits), shown = found.slice(0, MOST_ROWS);
  const hasLedger = run.events.length > 0;
  const heads = [["prompt", "num"], ["text", "prompt"], ["where it is", ""], ...(hasLedger ? [["offered", "num"], ["dropped", "num"], ["returned", "num"]] : []), ["rewards by step", ""]];
  const rows = shown.map((prompt) => {
    const [kind, where] = whereIs(prompt);
    const counts = hasLedger ? ["offered", "dropped", "returned"].map((name) => text(count(prompt, name))) : [];
    return [prompt.ordinal === null ? prompt.group_id : text(prompt.ordinal), prompt.prompt || h("span", { class: "faint" }, `group ${prompt.group_id}`), h("span", { class: `chip ${kind}` }, where), ...counts,
      h("span", { class: "squares" }, prompt.groups.map((group) => { const reward = mean(group.rewards); return square(run, reward, "a", { href: `${base()}group/${group.step.step}/${group.place}`, title: `step ${group.step.step}: mean reward ${text(reward)}` }); }))];
  });
  const search = h("input", { class: "search", type: "search", value: state.search || "", placeholder: "17, a word of the prompt, dropped …", "aria-label": "which prompt",
    oninput: (event) => { state.search = event.target.value; state.selected = 0; show(); } });
  return [
    h("div", { class: "head" }, h("h1", {}, "Where is prompt …"), search, h("span", { class: "soft" }, `${text(found.length)} of ${text(all.length)}${hasLedger ? ", by the ledger of the run" : ""}`)),
    shown.length ? rowsTable(heads, rows, shown.map((prompt) => () => go(`prompt/${encodeURIComponent(prompt.key)}`))) : nothing("No prompt is like that."),
  ];
}

function told(event) {
  const attempt = `attempt ${event.attempt + 1}`;
  return {
    offered: `offered, ${attempt}${event.dispatch ? `, handed out again` : ""}, by version ${event.version} of the policy`,
    started: "its episodes begin", finished: "all of its episodes are over and scored", taken: `step ${event.step + 1} takes it`,
    trained: `trained at step ${event.step + 1}`, dropped: `dropped: ${event.reason}`, returned: "given back, to be offered again",
  }[event.name] || event.name;
}

function promptView(key) {
  const run = RUNS[state.run], prompt = promptTable(run).get(key);
  if (!prompt) return [nothing(`There is no prompt ${key}.`)];
  const [kind, where] = whereIs(prompt);
  const begin = run.events.length ? run.events[0].time : 0;
  const digest = prompt.groups.length ? prompt.groups[0].prompt_id : null;
  const groups = RUNS.flatMap((each, number) => (digest ? each.byPrompt.get(digest) || [] : []).map((group) => [number, group]));
  return [
    h("div", { class: "head" }, h("h1", {}, prompt.ordinal === null ? `Prompt ${prompt.group_id}` : `Prompt ${prompt.ordinal}`), h("span", { class: `chip ${kind}` }, where), h("span", { class: "soft" }, `group ${prompt.group_id}`)),
    prompt.prompt && h("div", { class: "panel" }, h("pre", {}, prompt.prompt)),
    groups.length > 0 && [h("h2", {}, "Its groups"), groupsTable(groups)],
    prompt.events.length > 0 && [h("h2", {}, "What the ledger says"), h("div", { class: "panel" }, h("ul", { class: "events" }, prompt.events.map((event) =>
      h("li", { class: event.name }, h("time", {}, `+${seconds(event.time - begin)}`), h("span", { class: "dot" }), h("span", {}, told(event))))))],
  ];
}

function groupsTable(groups) {
  const heads = [...(RUNS.length > 1 ? [["run", ""]] : []), ["step", "num"], ["attempt", "num"], ["rewards", ""], ["mean", "num"], ["trained", ""]];
  return rowsTable(heads, groups.map(([number, group]) => [...(RUNS.length > 1 ? [RUNS[number].name] : []), text(group.step.step), text(group.attempt + 1), squares(group), text(mean(group.rewards)),
    group.num_trained ? h("span", { class: "chip good" }, "trained") : h("span", { class: "chip" }, signalOf(group))]),
  groups.map(([number, group]) => () => go(`group/${group.step.step}/${group.place}`, number)));
}
