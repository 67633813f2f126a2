// Headline numbers of every run, the curves, and the configuration with what differs between runs.
const HEADLINES = [
  ["reward, mean", "critic/score/mean"],
  ["response length, mean", "response_length/mean"],
  ["entropy", "actor/entropy"],
  ["gradient norm", "actor/grad_norm"],
  ["turns of a response, mean", "num_turns/mean"],
  ["engine's probability and the trainer's apart, max (one-step-off: one update included)", "training/rollout_probs_diff_max"],
  ["staleness", "training/staleness"],
  ["rewards that failed", "reward/failures"],
  ["tokens a second and device", "perf/throughput"],
  ["idle share of the trainer", "perf/idle_share/trainer"],
  ["idle share of the rollouts", "perf/idle_share/rollout"],
];
const MAIN_CURVES = [
  "critic/score/mean", "response_length/mean", "response_length/clip_ratio", "actor/entropy", "actor/ppo_kl",
  "actor/kl_loss", "actor/pg_loss", "actor/pg_clipfrac", "actor/grad_norm", "actor/lr", "actor/zero_signal_groups",
  "critic/vf_loss", "critic/vf_explained_var", "training/rollout_probs_diff_mean", "training/rollout_probs_diff_max",
  "training/staleness", "timing_s/step", "perf/throughput", "perf/mfu/actor",
];
const curves = { smooth: 0, filter: "", all: false };

function drawOverview() {
  const head = element("tr", {}, element("th", {}, ""),
    ...runs.map((run, i) => element("th", { class: "number" }, swatch(colour(i)), " ", run.name)));
  const body = [];
  const row = (name, cell) => {
    const cells = runs.map(cell);
    if (cells.some((text) => text !== "–")) body.push(element("tr", {}, element("td", {}, name),
      ...cells.map((text) => element("td", { class: "number" }, text))));
  };
  row("steps", (run) => (run.steps.length ? String(run.steps.at(-1)) : "–"));
  for (const name of [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].filter((key) => key.startsWith("val-core/")).sort()) {
    row(name, (run) => change(run, name));
  }
  for (const [label, name] of HEADLINES) row(label, (run) => change(run, name));
  row("time in steps", (run) => seconds(sum(run.metrics["timing_s/step"])));
  row("time of a step, median", (run) => seconds(median(run.metrics["timing_s/step"])));
  row("optimizer steps skipped", (run) => (run.metrics["actor/skipped_updates"] ? String(sum(run.metrics["actor/skipped_updates"])) : "–"));
  row("folder", (run) => run.folder);
  row("faults", (run) => (run.spans.marks.length ? String(run.spans.marks.length) : "–"));
  row("resumed", (run) => {
    const count = run.spans.resumes.length;
    return count > 1 ? `${count} times, last ${resumed(run.spans.resumes.at(-1))}` : count ? resumed(run.spans.resumes[0]) : "–";
  });
  const faults = listed("faults", (run) => run.spans.marks.map((mark) => [
    mark.step === null ? `after ${seconds(mark.at / 1e3)}` : `step ${mark.step}`, mark.name,
    Object.entries(mark.args).map(([key, value]) => (key === "message" ? value : `${key}: ${value}`)).join(", ")]));
  const resumes = listed("resumes", (run) => (run.spans.resumes.length > 1 ? run.spans.resumes.map((one) => [resumed(one)]) : []));
  return [element("div", { class: "card wide" }, element("table", { class: "headlines" }, element("thead", {}, head), element("tbody", {}, ...body)),
    element("p", { class: "faint" }, "first → last value of the run")), ...resumes, ...faults];
}

// For each run that has any, a table to be opened; `rows` gives a run's, as lists of words.
function listed(what, rows) {
  return runs.filter((run) => rows(run).length).map((run) => element("details", { class: "card wide" },
    element("summary", {}, `${what} of ${run.name}`), element("table", {}, element("tbody", {},
      ...rows(run).map((cells) => element("tr", {}, ...cells.map((words) => element("td", {}, words))))))));
}

function change(run, name) {
  const values = (run.metrics[name] ?? []).filter((value) => value !== null);
  if (!values.length) return "–";
  return values.length === 1 ? number(values[0], 3) : `${number(values[0], 3)} → ${number(values.at(-1), 3)}`;
}

function sum(values) {
  return values ? values.reduce((total, value) => total + (value ?? 0), 0) : null;
}

function median(values) {
  const sorted = (values ?? []).filter((value) => value !== null).sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : null;
}

function drawCurves() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].sort();
  if (!names.length) return nothing("No step has finished yet.");
  const parts = names.filter((name) => /^reward\/.*\/mean$/.test(name));
  const main = [...names.filter((name) => name.startsWith("val-core/")), ...parts, ...MAIN_CURVES.filter((name) => names.includes(name))];
  const grid = element("div", { class: "grid" });
  const draw = () => {
    const part = curves.filter.toLowerCase();
    const wanted = curves.all || part ? names.filter((name) => name.toLowerCase().includes(part)) : main;
    const cards = wanted.map((name) => lineChart(name, runs
      .map((run, i) => ({ name: run.name, paint: colour(i), steps: run.steps, values: run.metrics[name] ?? [], run: i, resumes: run.spans.resumes }))
      .filter((one) => shown.has(one.run)), { smooth: curves.smooth })).filter((card) => card);
    grid.replaceChildren(...(cards.length ? cards : [nothing(shown.size ? "No metric has this in its name." : "No run is chosen.")]));
  };
  draw();
  return [element("div", { class: "controls" },
    element("label", {}, "smoothing", element("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: curves.smooth,
      oninput: (event) => { curves.smooth = Number(event.target.value); draw(); } })),
    element("label", {}, "metric", element("input", { type: "search", placeholder: "part of a name", value: curves.filter,
      oninput: (event) => { curves.filter = event.target.value; draw(); } })),
    element("button", { "aria-pressed": String(curves.all), onclick: (event) => {
      curves.all = !curves.all;
      event.target.setAttribute("aria-pressed", curves.all);
      draw();
    } }, `all ${names.length} metrics`),
    runs.some((run) => run.spans.resumes.length) ? element("span", { class: "faint" }, "dashed upright line: resumed there") : null), grid];
}

// "key.path" → value of a block-style YAML text, good enough to compare two runs of one program.
function settings(text) {
  const found = new Map(), path = [];
  for (const line of text.split("\n")) {
    const match = line.match(/^( *)(- )?([^:#]+?):(?: (.*))?$/);
    if (!match) {
      if (line.trim()) found.set(path.map((level) => level.key).join("."), `${found.get(path.map((level) => level.key).join(".")) ?? ""} ${line.trim()}`.trim());
      continue;
    }
    while (path.length && path.at(-1).depth >= match[1].length) path.pop();
    path.push({ depth: match[1].length, key: match[3] });
    if (match[4] !== undefined) found.set(path.map((level) => level.key).join("."), match[4]);
  }
  return found;
}

function drawConfiguration() {
  const parts = [];
  if (runs.length > 1) {
    const all = runs.map((run) => settings(run.config));
    const keys = [...new Set(all.flatMap((one) => [...one.keys()]))].filter((key) => new Set(all.map((one) => one.get(key))).size > 1);
    parts.push(element("div", { class: "card wide" }, element("h3", {}, "What differs"), keys.length
      ? element("table", {},
        element("thead", {}, element("tr", {}, element("th", {}, "key"), ...runs.map((run, i) => element("th", {}, swatch(colour(i)), " ", run.name)))),
        element("tbody", {}, ...keys.map((key) => element("tr", {}, element("td", {}, key), ...all.map((one) => element("td", {}, one.get(key) ?? "–"))))))
      : nothing("Nothing: these runs have the same configuration.")));
  }
  parts.push(...runs.map((run) => element("details", { class: "card wide" }, element("summary", {}, `config.yaml of ${run.name}`),
    element("pre", {}, run.config || "not recorded"))));
  return parts;
}
