// The page's data, small helpers to build elements, and which runs are shown.
const runs = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const shown = new Set(runs.keys());
const redraws = [], shows = [];

function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function shape(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function unpack(text, Type) {
  return new Type(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
}

function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return String(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value < 120) return `${number(value, 3)} s`;
  if (value < 7200) return `${number(value / 60, 3)} min`;
  return `${number(value / 3600, 3)} h`;
}

function percent(share) {
  return `${Math.round(share * 100)} %`;
}

// A resume as words.
function resumed(one) {
  return `after step ${one.step}, ${new Date(one.time * 1e3).toISOString().slice(0, 16).replace("T", " ")} UTC`;
}

function colour(run) {
  return `var(--r${run % 6})`;
}

function swatch(paint) {
  return element("i", { class: "swatch", style: `background:${paint}` });
}

function legend(entries) {
  return element("div", { class: "legend" },
    ...entries.map(([name, paint]) => element("span", {}, swatch(paint), name)));
}

function nothing(text) {
  return element("p", { class: "faint" }, text);
}

// A tooltip that follows the pointer over `node`; `text` is asked for the pointer's event and may say null.
const tipBox = document.getElementById("tip");
function tip(node, text) {
  node.addEventListener("pointermove", (event) => {
    const words = text(event);
    tipBox.hidden = !words;
    if (!words) return;
    tipBox.textContent = words;
    const right = event.clientX + 14 + tipBox.offsetWidth > innerWidth;
    tipBox.style.left = `${right ? event.clientX - 14 - tipBox.offsetWidth : event.clientX + 14}px`;
    tipBox.style.top = `${Math.min(event.clientY + 14, innerHeight - tipBox.offsetHeight - 4)}px`;
  });
  node.addEventListener("pointerleave", () => { tipBox.hidden = true; });
}

// A part of a section that is drawn when it first comes into view, and again when the runs shown change.
function part(section, draw) {
  const place = element("div");
  document.getElementById(section).append(place);
  let visible = false;
  const redraw = () => { if (visible) place.replaceChildren(...[draw(place)].flat()); };
  const show = () => {
    observer.disconnect();
    if (!visible) { visible = true; redraw(); }
  };
  const observer = new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) show();
  }, { rootMargin: "400px" });
  observer.observe(place);
  redraws.push(redraw);
  shows.push(show);
}

// A chooser among the runs, for views that show one run at a time; null when there is only one.
function runChooser(state, redraw) {
  if (runs.length === 1) return null;
  const options = runs.map((run, i) => element("option", { value: i, selected: i === state.run }, run.name));
  const change = (event) => { state.run = Number(event.target.value); redraw(true); };
  return element("label", {}, "run", element("select", { onchange: change }, ...options));
}

// The samples of a file, unpacked when first asked for; the last few files stay in memory.
const chunks = new Map();
function chunk(run, file) {
  const key = `chunk-${run}-${file}`;
  let rows = chunks.get(key);
  if (!rows) {
    const bytes = Uint8Array.from(atob(document.getElementById(key).textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    rows = new Response(stream).json();
    if (chunks.size >= 40) chunks.delete(chunks.keys().next().value);
  }
  chunks.delete(key);
  chunks.set(key, rows);
  return rows;
}

// Columns of all samples of a run, unpacked once: reward, length, ordinal, source, and where each file begins.
function columns(run) {
  const data = runs[run];
  if (!data.columns) {
    let begin = 0;
    for (const file of data.files) { file.begin = begin; begin += file.rows; }
    data.columns = {
      reward: unpack(data.reward, Float32Array),
      length: unpack(data.length, Uint32Array),
      ordinal: unpack(data.ordinal, Uint32Array),
      source: unpack(data.source, Uint16Array),
    };
  }
  return data.columns;
}
