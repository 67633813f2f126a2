// Where the time goes: phase bars for each step, and the timeline that shows what overlaps what.
const PHASES = {
  generation: "#3b82c4", reward: "#d9a441", tools: "#b0623c", old_log_prob: "#7a6fc2", ref: "#a58bd6", values: "#c58ac0", advantage: "#8a8f99",
  update_critic: "#c9705c", update_actor: "#3f9b6c", weight_sync: "#d1661a", validation: "#2aa3a3", checkpoint: "#7d7466",
};
const PHASE_OF_TIMING = { gen: "generation", adv: "advantage", update_weights: "weight_sync", stage_weights: "weight_sync", testing: "validation", save_checkpoint: "checkpoint" };
const TRAINING = ["old_log_prob", "ref", "values", "advantage", "update_critic", "update_actor"];
const BARS = 60;
const time = { run: 0, first: null, timelineStep: null, span: 4 };

function phasePaint(name) {
  return PHASES[name] ?? "#8a8f99";
}

function drawTime(place) {
  const redraw = (otherRun) => {
    if (otherRun) { time.first = null; time.timelineStep = null; }
    place.replaceChildren(...drawTime(place));
  };
  const run = runs[time.run], parts = [];
  const controls = [runChooser(time, redraw)];
  const bars = phaseBars(run, redraw);
  if (bars && run.steps.length > BARS) {
    controls.push(element("label", {}, "steps from", element("input", { type: "range", min: 0, max: run.steps.length - BARS, value: time.first,
      oninput: (event) => { time.first = Number(event.target.value); parts[1].replaceWith(parts[1] = phaseBars(run, redraw)); } })));
  }
  parts.push(element("div", { class: "controls" }, ...controls), bars ?? nothing("No step times are recorded."));
  parts.push(timeline(run, redraw));
  return parts;
}

function phaseBars(run, redraw) {
  const phases = Object.keys(run.metrics).filter((name) => name.startsWith("timing_s/") && name !== "timing_s/step")
    .map((name) => [PHASE_OF_TIMING[name.slice(9)] ?? name.slice(9), run.metrics[name]]);
  const whole = run.metrics["timing_s/step"];
  if (!whole) return null;
  time.first ??= Math.max(0, run.steps.length - BARS);
  const picked = run.steps.map((step, i) => i).slice(time.first, time.first + BARS).filter((i) => whole[i] !== null);
  if (!picked.length) return null;
  const stacked = phases.filter(([name]) => name !== "generation").sort((a, b) => order(a[0]) - order(b[0]));
  const generation = phases.find(([name]) => name === "generation")?.[1];
  const height = (i) => Math.max(whole[i], generation?.[i] ?? 0, stacked.reduce((total, [, values]) => total + (values[i] ?? 0), 0));
  const width = 1400, tall = 220;
  const first = run.steps[picked[0]], last = run.steps[picked.at(-1)];
  const chart = frame(first - 0.5, last + 0.5, 0, Math.max(...picked.map(height)), { width, height: tall, name: "seconds of each phase, by step" });
  const { svg, x, y } = chart;
  const each = Math.min(40, (width - LEFT - RIGHT) / (last - first + 1));
  for (const i of picked) {
    const step = run.steps[i], left = x(step) - each * 0.42, group = shape("g", { style: "cursor:pointer" });
    const bar = (from, to, at, wide, paint) => group.append(shape("rect", { x: at, y: y(to), width: Math.max(1, wide), height: Math.max(0, y(from) - y(to)), style: `fill:${paint}` }));
    if (generation?.[i]) bar(0, generation[i], left, each * 0.36, phasePaint("generation"));
    let base = 0;
    for (const [name, values] of stacked) {
      if (!values[i]) continue;
      bar(base, base + values[i], left + each * 0.4, each * 0.36, phasePaint(name));
      base += values[i];
    }
    group.append(shape("line", { x1: left - each * 0.04, x2: left + each * 0.82, y1: y(whole[i]), y2: y(whole[i]), style: "stroke:var(--text);stroke-width:1.5" }));
    group.addEventListener("click", () => { time.timelineStep = step; redraw(false); });
    tip(group, () => [`step ${step}: ${seconds(whole[i])}`, ...phases.filter(([, values]) => values[i]).sort((a, b) => order(a[0]) - order(b[0]))
      .map(([name, values]) => `${name} ${seconds(values[i])}`), "click: show in the timeline"].join("\n"));
    svg.append(group);
  }
  for (const one of run.spans.resumes.filter(({ step }) => step >= first - 1 && step <= last)) {
    resumeLine(chart, one, "var(--text)");
    tip(svg.lastChild, () => `resumed ${resumed(one)}`);
  }
  const used = Object.keys(PHASES).filter((name) => phases.some(([phase, values]) => phase === name && values.some((value) => value)));
  return element("div", { class: "card wide" }, element("h3", {}, "Seconds of each phase, by step (left bar: generation; right bar: the rest; line: the whole step; what runs beside something else is in both; dashed upright line: resumed there)"), svg,
    legend(used.map((name) => [name, phasePaint(name)])));
}

function order(name) {
  const place = Object.keys(PHASES).indexOf(name);
  return place < 0 ? 99 : place;
}

function timeline(run, redraw) {
  const spans = run.spans, count = spans.start.length;
  if (!count) return nothing("No timeline is recorded.");
  const steps = [...new Set(spans.step.filter((step) => step !== null && step > 0))].sort((a, b) => a - b);
  time.timelineStep ??= steps[Math.max(0, Math.min(steps.length - 1, steps.length >> 1))] ?? null;
  const bounds = (of) => {
    const inside = [...of].filter((i) => i >= 0);
    return [Math.min(...inside.map((i) => spans.start[i])), Math.max(...inside.map((i) => spans.start[i] + spans.length[i]))];
  };
  // The window: from the start of the chosen step's training (or first span) over `span` steps.
  const of = (step, only) => [...Array(count).keys()].filter((i) => spans.step[i] === step && (!only || TRAINING.includes(spans.tracks[spans.track[i]])));
  const begin = steps.indexOf(time.timelineStep), lastStep = steps[Math.min(steps.length - 1, begin + time.span - 1)];
  const opening = of(time.timelineStep, true).length ? of(time.timelineStep, true) : of(time.timelineStep, false);
  const closing = of(lastStep, true).length ? of(lastStep, true) : of(lastStep, false);
  let [from] = bounds(opening), [, to] = bounds(closing);
  if (!(to > from)) [from, to] = bounds(opening);
  const visible = [...Array(count).keys()].filter((i) => spans.start[i] < to && spans.start[i] + spans.length[i] > from);
  const tracks = spans.tracks.map((track, i) => i).filter((i) => visible.some((j) => spans.track[j] === i))
    .sort((a, b) => order(spans.tracks[a].split("/")[0]) - order(spans.tracks[b].split("/")[0]) || spans.tracks[a].localeCompare(spans.tracks[b]));
  const width = 1400, row = 22, left = 110, tall = tracks.length * row + 26;
  const x = (ms) => left + (ms - from) / (to - from) * (width - left - 10);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${tall}`, role: "img", "aria-label": "timeline" });
  tracks.forEach((track, line) => svg.append(
    shape("text", { x: left - 8, y: line * row + 15, "text-anchor": "end" }, spans.tracks[track]),
    shape("line", { class: "axis", x1: left, x2: width - 10, y1: (line + 1) * row, y2: (line + 1) * row })));
  for (const value of ticks(0, (to - from) / 1e3, 10)) {
    svg.append(shape("text", { x: x(from + value * 1e3), y: tall - 6, "text-anchor": "middle" }, `${number(value)} s`));
  }
  for (const i of visible) {
    const line = tracks.indexOf(spans.track[i]), name = spans.names[spans.name[i]];
    const a = Math.max(from, spans.start[i]), b = Math.min(to, spans.start[i] + spans.length[i]);
    const wide = Math.max(1, x(b) - x(a));
    const shade = spans.step[i] !== null && spans.step[i] % 2 ? 1 : 0.68;
    const box = shape("rect", { x: x(a), y: line * row + 2, width: wide, height: row - 4, rx: 2, style: `fill:${phasePaint(spans.tracks[spans.track[i]].split("/")[0])};opacity:${shade}` });
    tip(box, () => `${name}${spans.step[i] === null ? "" : `, batch ${spans.step[i]}`}\n${seconds(spans.length[i] / 1e3)}`);
    svg.append(box);
    if (spans.step[i] !== null && spans.step[i] >= 0 && wide > 22) svg.append(shape("text", { x: x(a) + wide / 2, y: line * row + 15, "text-anchor": "middle", style: "fill:#fff;pointer-events:none;font-weight:600" }, spans.step[i]));
  }
  for (const mark of spans.marks.filter((one) => one.at >= from && one.at <= to)) {
    const line = shape("line", { x1: x(mark.at), x2: x(mark.at), y1: 0, y2: tall - 20, style: "stroke:rgb(var(--up));stroke-width:3" });
    tip(line, () => `fault: ${mark.name}`);
    svg.append(line);
  }
  for (const one of spans.resumes.filter(({ at }) => at >= from && at <= to)) {
    const line = shape("line", { class: "resumed", x1: x(one.at), x2: x(one.at), y1: 0, y2: tall - 20, style: "stroke:var(--text)" });
    tip(line, () => `resumed ${resumed(one)}`);
    svg.append(line);
  }
  const cut = (keep) => visible.filter(keep).map((i) => [Math.max(from, spans.start[i]), Math.min(to, spans.start[i] + spans.length[i])]);
  const generating = union(cut((i) => spans.tracks[spans.track[i]].split("/")[0] === "generation"));
  const training = union(cut((i) => TRAINING.includes(spans.tracks[spans.track[i]])));
  const share = (pairs) => percent(total(pairs) / (to - from));
  const slider = element("input", { type: "range", min: 0, max: Math.max(0, steps.length - 1), value: Math.max(0, begin),
    onchange: (event) => { time.timelineStep = steps[Number(event.target.value)]; redraw(false); } });
  const spanInput = element("input", { type: "number", min: 1, max: 40, value: time.span,
    onchange: (event) => { time.span = Math.min(40, Math.max(1, Number(event.target.value) || 1)); redraw(false); } });
  return element("div", { class: "card wide" },
    element("h3", {}, "Timeline (numbers: the batch a phase works on; red lines: faults; dashed: resumed there)"),
    element("div", { class: "controls" }, element("label", {}, "from step", slider, String(time.timelineStep)), element("label", {}, "steps", spanInput),
      element("span", { class: "faint" }, `in this window: generation ${share(generating)}, training ${share(training)}, both at once ${share(common(generating, training))} of the time`)),
    svg);
}

function union(pairs) {
  const merged = [];
  for (const [start, end] of pairs.sort((a, b) => a[0] - b[0])) {
    if (merged.length && start <= merged.at(-1)[1]) merged.at(-1)[1] = Math.max(end, merged.at(-1)[1]);
    else merged.push([start, end]);
  }
  return merged;
}

function common(first, second) {
  return first.flatMap((a) => second.map((b) => [Math.max(a[0], b[0]), Math.min(a[1], b[1])])).filter(([start, end]) => end > start);
}

function total(pairs) {
  return pairs.reduce((all, [start, end]) => all + end - start, 0);
}
