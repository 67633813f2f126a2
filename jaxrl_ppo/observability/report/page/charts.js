// Line charts and histograms as SVG.
const WIDTH = 380, HEIGHT = 170, LEFT = 44, RIGHT = 8, TOP = 6, BOTTOM = 20;
const MOST_POINTS = 500;

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) values.push(Number((i * step).toPrecision(12)));
  return values;
}

// Axes over [x0, x1] × [y0, y1]; returns the svg and the two scales.
function frame(x0, x1, y0, y1, { width = WIDTH, height = HEIGHT, name = "" } = {}) {
  if (y0 === y1) { const pad = Math.abs(y0) * 0.1 || 0.5; y0 -= pad; y1 += pad; }
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  const x = (value) => LEFT + (value - x0) / (x1 - x0) * (width - LEFT - RIGHT);
  const y = (value) => height - BOTTOM - (value - y0) / (y1 - y0) * (height - TOP - BOTTOM);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name });
  for (const value of ticks(y0, y1, 5)) {
    svg.append(
      shape("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      shape("text", { x: LEFT - 5, y: y(value) + 3, "text-anchor": "end" }, number(value, 3)));
  }
  for (const value of ticks(x0, x1, Math.round(width / 80))) {
    svg.append(shape("text", { x: x(value), y: height - 5, "text-anchor": "middle" }, number(value)));
  }
  svg.inverse = (event) => {
    const box = svg.getBoundingClientRect();
    return x0 + ((event.clientX - box.left) / box.width * width - LEFT) / (width - LEFT - RIGHT) * (x1 - x0);
  };
  return { svg, x, y, height, width };
}

// An upright dashed line between the step that a run was resumed after and the next.
function resumeLine({ svg, x, height }, one, paint) {
  const at = x(one.step + 0.5);
  svg.append(shape("line", { class: "resumed", x1: at, x2: at, y1: TOP, y2: height - BOTTOM, style: `stroke:${paint}` }));
}

function smoothed(values, weight) {
  let mean = null;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean === null ? value : weight * mean + (1 - weight) * value;
    return mean;
  });
}

// Points of a curve; a long one keeps the lowest and the highest of every stretch, so that no spike is lost.
function thinned(steps, values) {
  const points = [];
  values.forEach((value, i) => { if (value !== null) points.push([steps[i], value]); });
  if (points.length <= 2 * MOST_POINTS) return points;
  const stretch = Math.ceil(points.length / MOST_POINTS), kept = [];
  for (let i = 0; i < points.length; i += stretch) {
    const some = points.slice(i, i + stretch);
    const low = some.reduce((a, b) => (b[1] < a[1] ? b : a)), high = some.reduce((a, b) => (b[1] > a[1] ? b : a));
    kept.push(...(low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
  }
  return kept;
}

// series: [{name, paint, steps, values, low?, high?, resumes?}]; null when there is nothing to draw.
function lineChart(title, series, { smooth = 0 } = {}) {
  series = series.filter((one) => one.values.some((value) => value !== null));
  if (!series.length) return null;
  const lines = series.map((one) => thinned(one.steps, smooth ? smoothed(one.values, smooth) : one.values));
  const bands = series.flatMap((one) => (one.low ? [...one.low, ...one.high] : [])).filter((value) => value !== null);
  const heights = [...lines.flatMap((points) => points.map((point) => point[1])), ...bands];
  const firsts = lines.map((points) => points[0][0]), lasts = lines.map((points) => points.at(-1)[0]);
  const first = Math.min(...firsts), last = Math.max(...lasts);
  const chart = frame(
    first, last,
    heights.reduce((a, b) => Math.min(a, b)), heights.reduce((a, b) => Math.max(a, b)), { name: title });
  const { svg, x, y, height } = chart;
  const resumes = series.flatMap((one) => (one.resumes ?? []).filter((resume) => resume.step >= first && resume.step < last)
    .map((resume) => ({ ...resume, name: one.name, paint: one.paint })));
  for (const resume of resumes) resumeLine(chart, resume, resume.paint);
  lines.forEach((points, i) => {
    const one = series[i];
    if (one.low) {
      const edge = [...one.steps.map((step, j) => [step, one.high[j]]), ...one.steps.map((step, j) => [step, one.low[j]]).reverse()];
      const path = edge.filter((point) => point[1] !== null).map((point) => `${x(point[0])},${y(point[1])}`).join(" ");
      svg.append(shape("polygon", { points: path, style: `fill:${one.paint};opacity:0.18` }));
    }
    const path = points.map((point) => `${x(point[0]).toFixed(1)},${y(point[1]).toFixed(1)}`).join(" ");
    svg.append(points.length === 1
      ? shape("circle", { cx: x(points[0][0]), cy: y(points[0][1]), r: 3, style: `fill:${one.paint}` })
      : shape("polyline", { class: "curve", points: path, style: `stroke:${one.paint}` }));
    if (points.length > 1 && points.length <= 25) {
      svg.append(...points.map((point) => shape("circle", { cx: x(point[0]), cy: y(point[1]), r: 2, style: `fill:${one.paint}` })));
    }
  });
  const cross = shape("line", { class: "cross", y1: TOP, y2: height - BOTTOM, visibility: "hidden" });
  svg.append(cross);
  tip(svg, (event) => {
    const at = svg.inverse(event);
    const near = series.map((one) => nearest(one, at)).filter((found) => found);
    if (!near.length) return null;
    cross.setAttribute("x1", x(near[0].step));
    cross.setAttribute("x2", x(near[0].step));
    cross.setAttribute("visibility", "visible");
    return [`step ${near[0].step}`, ...near.map((found) => `${series.length > 1 ? `${found.name}: ` : ""}${number(found.value)}`),
      ...resumes.filter((one) => Math.abs(x(one.step + 0.5) - x(at)) < 5).map((one) => `${series.length > 1 ? `${one.name} ` : ""}resumed ${resumed(one)}`)].join("\n");
  });
  svg.addEventListener("pointerleave", () => cross.setAttribute("visibility", "hidden"));
  return element("div", { class: "card" }, element("h3", {}, title), svg);
}

function nearest(one, at) {
  let best = null;
  one.steps.forEach((step, i) => {
    if (one.values[i] !== null && (best === null || Math.abs(step - at) < Math.abs(one.steps[best] - at))) best = i;
  });
  return best === null ? null : { name: one.name, step: one.steps[best], value: one.values[best] };
}

// sets: [{name, paint, values, outline}], shares of each set in common bins.
function histogram(title, sets, { bins = 24, whole = false } = {}) {
  sets = sets.map((set) => ({ ...set, values: Array.from(set.values).filter((value) => !Number.isNaN(value)) })).filter((set) => set.values.length);
  if (!sets.length) return null;
  const all = sets.flatMap((set) => set.values);
  let low = all.reduce((a, b) => Math.min(a, b)), high = all.reduce((a, b) => Math.max(a, b));
  if (low === high) { low -= 0.5; high += 0.5; }
  const size = whole ? Math.max(1, Math.ceil((high - low + 1) / bins)) : (high - low) / bins;
  const count = whole ? Math.ceil((high - low + 1) / size) : bins;
  const shares = sets.map((set) => {
    const bin = new Array(count).fill(0);
    for (const value of set.values) bin[Math.min(count - 1, Math.floor((value - low) / size))] += 1 / set.values.length;
    return bin;
  });
  const { svg, x, y } = frame(low, low + size * count, 0, Math.max(...shares.flat()), { name: title });
  shares.forEach((bin, i) => bin.forEach((share, j) => {
    if (!share) return;
    const from = low + j * size, paint = sets[i].paint;
    const box = { x: x(from) + 0.5, width: Math.max(1, x(from + size) - x(from) - 1), y: y(share), height: y(0) - y(share) };
    const style = sets[i].outline ? `fill:none;stroke:${paint};stroke-width:1.3` : `fill:${paint};opacity:0.55`;
    const bar = shape("rect", { ...box, style });
    const range = whole && size === 1 ? number(from) : `${number(from)} to ${number(from + size)}`;
    tip(bar, () => `${sets[i].name}\n${range}: ${percent(share)} of ${sets[i].values.length}`);
    svg.append(bar);
  }));
  return element("div", { class: "card" }, element("h3", {}, title), svg, legend(sets.map((set) => [set.name, set.paint])));
}
