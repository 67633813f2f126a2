// Rewards, lengths and weight versions of the samples: over the steps, and at one step.
const distribution = { run: 0, kind: "rollout", at: null };

function drawDistributions(place) {
  const redraw = (otherRun) => {
    if (otherRun) distribution.at = null;
    place.replaceChildren(...[drawDistributions(place)].flat());
  };
  const run = runs[distribution.run], data = columns(distribution.run);
  const kinds = [...new Set(run.files.map((file) => file.kind))];
  const controls = [runChooser(distribution, redraw)];
  if (!kinds.length) return [element("div", { class: "controls" }, ...controls.filter((one) => one)), nothing("No samples are recorded.")];
  if (!kinds.includes(distribution.kind)) distribution.kind = kinds[0];
  const files = run.files.filter((file) => file.kind === distribution.kind);
  distribution.at = Math.min(distribution.at ?? files.length - 1, files.length - 1);
  const label = element("b", {}, `step ${files[distribution.at].step}`);
  const histograms = element("div", { class: "grid" });
  const drawHistograms = () => {
    const now = files[distribution.at], first = files[0];
    label.textContent = `step ${now.step}`;
    const sets = (values) => [
      { name: `step ${now.step}`, paint: colour(distribution.run), values: values.subarray(now.begin, now.begin + now.rows) },
      ...(now === first ? [] : [{ name: `step ${first.step}`, paint: "var(--faint)", outline: true, values: values.subarray(first.begin, first.begin + first.rows) }]),
    ];
    histograms.replaceChildren(...[histogram("Reward", sets(data.reward)), histogram("Response length, tokens", sets(data.length), { whole: true })].filter((one) => one));
  };
  drawHistograms();
  controls.push(
    kinds.length > 1 ? element("label", {}, "samples of", element("select", { onchange: (event) => { distribution.kind = event.target.value; redraw(true); } },
      ...kinds.map((kind) => element("option", { selected: kind === distribution.kind }, kind)))) : null,
    element("label", {}, "at", element("input", { type: "range", min: 0, max: files.length - 1, value: distribution.at,
      oninput: (event) => { distribution.at = Number(event.target.value); drawHistograms(); } }), label));
  const steps = files.map((file) => file.step);
  const band = (title, values) => {
    const cuts = files.map((file) => cutsOf(values.subarray(file.begin, file.begin + file.rows)));
    return lineChart(`${title}: mean, and the middle 80 %`, [{ name: run.name, paint: colour(distribution.run), steps,
      values: cuts.map((cut) => cut[1]), low: cuts.map((cut) => cut[0]), high: cuts.map((cut) => cut[2]) }]);
  };
  const staleness = run.metrics["training/staleness"];
  const versions = files.filter((file) => file.versions);
  return [element("div", { class: "controls" }, ...controls.filter((one) => one)), histograms, element("div", { class: "grid", style: "margin-top:12px" }, ...[
    band("Reward", data.reward), band("Response length", data.length),
    staleness ? lineChart("Staleness (steps between the weights that generated and those trained)", [{ name: run.name, paint: colour(distribution.run), steps: run.steps, values: staleness }]) : null,
    versions.length ? lineChart("Weight versions in the batch: newest, down to the oldest", [{ name: "newest", paint: colour(distribution.run),
      steps: versions.map((file) => file.step), values: versions.map((file) => file.versions[1]), low: versions.map((file) => file.versions[0]), high: versions.map((file) => file.versions[1]) }]) : null,
  ].filter((one) => one))];
}

// The 10 % quantile, the mean, the 90 % quantile.
function cutsOf(values) {
  const sorted = Float64Array.from(values).filter((value) => !Number.isNaN(value)).sort();
  if (!sorted.length) return [null, null, null];
  const at = (share) => sorted[Math.round(share * (sorted.length - 1))];
  return [at(0.1), sorted.reduce((total, value) => total + value, 0) / sorted.length, at(0.9)];
}
