// The browser of samples: filter, sort, read one with its reward's parts and its tokens.
const PAGE = 25;
const browser = { run: 0, kind: "", source: "", from: "", to: "", low: "", high: "", sort: "step", page: 0, paint: "ratio", chosen: null };

function drawSamples(place) {
  const run = runs[browser.run];
  if (!run.files.length && runs.length === 1) return nothing("No samples are recorded.");
  const table = element("div", { class: "card" }), detail = element("div", { class: "card detail" }, nothing("Choose a sample to read it."));
  const list = () => listSamples(table, detail);
  const field = (name, attributes) => element("input", { ...attributes, value: browser[name],
    oninput: (event) => { browser[name] = event.target.value; browser.page = 0; list(); } });
  const choice = (name, options) => element("select", { onchange: (event) => { browser[name] = event.target.value; browser.page = 0; list(); } },
    ...options.map(([value, text]) => element("option", { value, selected: browser[name] === value }, text)));
  const kinds = [...new Set(run.files.map((file) => file.kind))];
  const controls = element("div", { class: "controls" }, runChooser(browser, () => {
    Object.assign(browser, { kind: "", source: "", page: 0, chosen: null });
    place.replaceChildren(...[drawSamples(place)].flat());
  }),
  element("label", {}, "samples of", choice("kind", [["", "all"], ...kinds.map((kind) => [kind, kind])])),
  element("label", {}, "source", choice("source", [["", "all"], ...run.sources.map((source, i) => [String(i), source])])),
  element("label", {}, "step", field("from", { type: "number", placeholder: "from", "aria-label": "from step" }), "to", field("to", { type: "number", placeholder: "to", "aria-label": "to step" })),
  element("label", {}, "reward", field("low", { type: "number", step: "any", placeholder: "least", "aria-label": "least reward" }), "to", field("high", { type: "number", step: "any", placeholder: "most", "aria-label": "most reward" })),
  element("label", {}, "sort by", choice("sort", [["step", "step"], ["high", "reward, highest first"], ["low", "reward, lowest first"], ["long", "length, longest first"]])));
  list();
  return [controls, element("div", { class: "browser" }, table, detail)];
}

// [file, row] of every sample the filters let through, sorted.
function found() {
  const run = runs[browser.run], data = columns(browser.run), hits = [];
  const limit = (text, otherwise) => (text === "" ? otherwise : Number(text));
  const from = limit(browser.from, -Infinity), to = limit(browser.to, Infinity);
  const low = limit(browser.low, -Infinity), high = limit(browser.high, Infinity);
  const filtered = browser.low !== "" || browser.high !== "";
  run.files.forEach((file, number) => {
    if ((browser.kind && file.kind !== browser.kind) || file.step < from || file.step > to) return;
    for (let row = 0; row < file.rows; row++) {
      const at = file.begin + row, reward = data.reward[at];
      if (browser.source !== "" && data.source[at] !== Number(browser.source)) continue;
      if (filtered && !(reward >= low && reward <= high)) continue;
      hits.push([number, row, at]);
    }
  });
  const by = { high: (a, b) => data.reward[b[2]] - data.reward[a[2]], low: (a, b) => data.reward[a[2]] - data.reward[b[2]], long: (a, b) => data.length[b[2]] - data.length[a[2]] };
  return by[browser.sort] ? hits.sort(by[browser.sort]) : hits;
}

async function listSamples(table, detail) {
  const run = runs[browser.run], data = columns(browser.run), hits = found();
  const pages = Math.max(1, Math.ceil(hits.length / PAGE));
  browser.page = Math.min(browser.page, pages - 1);
  const rows = hits.slice(browser.page * PAGE, (browser.page + 1) * PAGE).map(([file, row, at]) => {
    const asked = element("td", { class: "words" }, "…"), words = element("td", { class: "words" }, "…"), reward = element("td", { class: "number" }, number(data.reward[at], 3));
    const line = element("tr", { tabindex: 0 },
      element("td", { class: "number" }, `${run.files[file].kind === "validation" ? "val " : ""}${run.files[file].step}`),
      element("td", {}, run.sources[data.source[at]]),
      reward, element("td", { class: "number" }, String(data.length[at])), asked, words);
    const open = () => {
      table.querySelector("tr.chosen")?.classList.remove("chosen");
      line.classList.add("chosen");
      showSample(detail, table, file, row);
    };
    line.addEventListener("click", open);
    line.addEventListener("keydown", (event) => { if (event.key === "Enter") open(); });
    chunk(browser.run, file).then((texts) => {
      asked.textContent = texts[row]?.q ?? texts[row]?.p ?? ""; // runs of older versions have whole prompts only
      words.textContent = row < texts.length ? texts[row].r : "(text not in this report)";
      if (texts[row]?.labels?.failure) reward.textContent = "failed";
    });
    return line;
  });
  const turn = (by, text, possible) => element("button", { disabled: !possible, onclick: () => { browser.page += by; listSamples(table, detail); } }, text);
  table.replaceChildren(
    element("div", { class: "controls" }, element("span", { class: "faint" }, `${hits.length} samples, page ${browser.page + 1} of ${pages}`),
      turn(-1, "previous", browser.page > 0), turn(1, "next", browser.page < pages - 1)),
    element("table", {}, element("thead", {}, element("tr", {}, element("th", { class: "number" }, "step"), element("th", {}, "source"),
      element("th", { class: "number" }, "reward"), element("th", { class: "number" }, "tokens"), element("th", {}, "prompt"), element("th", {}, "response"))), element("tbody", {}, ...rows)));
}

async function showSample(detail, table, file, row) {
  const run = runs[browser.run], data = columns(browser.run), info = run.files[file], at = info.begin + row;
  const texts = await chunk(browser.run, file);
  const where = `samples/${info.kind}_${String(info.step).padStart(6, "0")}.jsonl, line ${row + 1}`;
  const title = element("h3", {}, `Step ${info.step}, ${info.kind}, prompt ${data.ordinal[at]}, reward ${number(data.reward[at])}, ${data.length[at]} tokens`);
  if (row >= texts.length) {
    detail.replaceChildren(title, nothing(`The text of this sample is not in the report, to keep it small; it is in ${where}.`));
    return;
  }
  const sample = texts[row], parts = Object.entries(sample.parts ?? {});
  const siblings = [];
  for (let other = 0; other < info.rows; other++) {
    if (data.ordinal[info.begin + other] !== data.ordinal[at]) continue;
    siblings.push(element("button", { "aria-pressed": String(other === row), onclick: () => showSample(detail, table, file, other) }, number(data.reward[info.begin + other], 3)));
  }
  detail.replaceChildren(title,
    siblings.length > 1 ? element("div", { class: "controls" }, element("span", { class: "faint" }, "rewards of this prompt's samples"), ...siblings) : "",
    element("p", { class: "faint" }, [`source ${run.sources[data.source[at]]}`, `finished by ${sample.f === "length" ? "length limit" : sample.f}`,
      sample.a === undefined ? null : `advantage ${number(sample.a)}`, sample.turns?.length ? `${sample.turns.length} turns, ${sample.turns.filter(([role]) => role === "tool").length} by tools` : null,
      `weight version ${sample.v.map(([version, count]) => (sample.v.length > 1 ? `${version} (${count} tokens)` : version)).join(", ") || "–"}`, where].filter((one) => one).join(" · ")),
    element("h3", {}, "Prompt"), element("div", { class: "text" }, sample.p),
    element("h3", {}, "Response"), sample.t ? tokens(sample, () => showSample(detail, table, file, row)) : element("div", { class: "text" }, sample.r),
    element("h3", {}, "Expected"), element("div", { class: "text" }, typeof sample.g === "string" ? sample.g : JSON.stringify(sample.g)),
    ...(Object.keys(sample.labels ?? {}).length ? [element("h3", {}, "What the reward function said"), element("table", {}, element("tbody", {}, ...Object.entries(sample.labels).map(([name, text]) => element("tr", {}, element("td", {}, name), element("td", {}, text)))))] : []),
    ...(parts.length ? [element("h3", {}, "Parts of the reward"), element("table", {}, element("tbody", {}, ...parts.map(([name, value]) => element("tr", {}, element("td", {}, name), element("td", { class: "number" }, number(value))))))] : []));
}

// The response's tokens, coloured by how the trainer's log-prob differs from the engine's, by version, or by log-prob.
function tokens(sample, redraw) {
  const version = spread(sample.v), inside = sample.m ? spread(sample.m) : null;
  const modes = [["ratio", "log-prob ratio", sample.d], ["version", "weight version", sample.v.length > 1 ? version : null], ["logprob", "log-prob", sample.l]];
  const usable = modes.filter(([, , values]) => values);
  const mode = usable.some(([name]) => name === browser.paint) ? browser.paint : usable[0][0];
  const oldest = Math.min(...version);
  const paint = (i) => {
    if (inside && !inside[i]) return "";
    if (mode === "version") return `background:color-mix(in srgb, ${colour(version[i] - oldest)} 30%, transparent)`;
    const share = mode === "ratio" ? sample.d[i] / 0.5 : sample.l[i] / 5;
    return `background:rgba(${share > 0 ? "var(--up)" : "var(--down)"}, ${(Math.min(1, Math.abs(share)) * 0.75).toFixed(2)})`;
  };
  const text = element("div", { class: "text" }, ...sample.t.map((word, i) => {
    const token = element("span", { class: inside && !inside[i] ? "token outside" : "token", style: paint(i) }, word);
    tip(token, () => [`token ${i + 1}: ${JSON.stringify(word)}`, `engine's log-prob ${number(sample.l[i])}`,
      sample.d ? `trainer's less the engine's ${number(sample.d[i])}` : null, `weight version ${version[i]}`,
      inside && !inside[i] ? "not sampled: written by a tool, not trained on" : null].filter((one) => one).join("\n"));
    return token;
  }));
  const meaning = { ratio: "red: the trainer finds the token likelier than the engine did; blue: less likely; full colour at ±0.5",
    version: "one colour for each weight version", logprob: "the bluer, the less likely the token was; full colour at −5" };
  return element("div", {},
    element("div", { class: "controls" }, element("span", { class: "faint" }, "colour tokens by"), ...usable.map(([name, label]) =>
      element("button", { "aria-pressed": String(name === mode), onclick: () => { browser.paint = name; redraw(); } }, label))),
    text, element("p", { class: "faint" }, meaning[mode]));
}

function spread(pairs) {
  return pairs.flatMap(([value, count]) => new Array(count).fill(value));
}
