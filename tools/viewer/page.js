// The page. Everything a run saved is untrusted: it is shown by textContent and nothing else.

// A line of the data is a row of losses.OBJECTIVES, or a run.
const RECORDS = document.getElementById("data").textContent.split("\n").map(line => JSON.parse(line));
const RUNS = RECORDS.filter(record => record.groups);
const DATA = {objectives: Object.fromEntries(
  RECORDS.filter(record => !record.groups).map(row => [row.name, row]))};
const STEPS = [...new Set(RUNS.flatMap(run => run.groups.map(group => group.step)))]
  .sort((a, b) => a - b);
const CURVES = [         // title, value from a line of metrics.jsonl, top of the axis (if fixed)
  ["pass rate of the batch", c => c.pass_rate, 1],
  ["clipped share of tokens", c => c.clip_low === null ? null : c.clip_low + c.clip_high],
  ["spread of log s (standard deviation)",
   c => c.log_s_var === null ? null : Math.sqrt(c.log_s_var)],
  ["experts flipped by the updates", c => c.flip_rate],
];

const byId = id => document.getElementById(id);
const missing = x => x === null || x === undefined || Number.isNaN(x);
const short = (x, digits = 3) => missing(x) ? "–" : String(Number(x.toPrecision(digits)));

function signed(x, digits = 2) {
  if (missing(x) || x === 0) return missing(x) ? "–" : "0";
  const size = Math.abs(x), small = size < 0.5 * 10 ** -digits;
  return (x < 0 ? "−" : "+") + (small ? size.toExponential(0) : size.toFixed(digits));
}

const isDead = group => group.advantages.flat().every(a => a === 0);

function printable(token) {
  return token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";
}

function make(tag, className, text, parent) {
  const svg = ["svg", "path", "line"].includes(tag);
  const space = svg ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const element = document.createElementNS(space, tag);
  if (className) element.setAttribute("class", className);
  if (!missing(text)) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

function attributes(element, values) {
  for (const [name, value] of Object.entries(values)) element.setAttribute(name, value);
  return element;
}

// GSPO is blue and GRPO orange on every page; a second run of the same objective has another color.
function colourOf(p) {
  const name = RUNS[p].objective;
  if (p && RUNS[0].objective === name) return "second";
  return ["gspo", "grpo"].includes(name) ? name : "other";
}

// The color of a box: purple below 0, green above, logarithmic from |log w| = 1e-4 to 1.
function paint(box, logw) {
  box.setAttribute("class", `box ${logw < 0 ? "less" : "more"}`);
  box.style.setProperty("--much", clamp(1 + Math.log10(Math.abs(logw)) / 4, 0, 1).toFixed(3));
}

// The objectives whose formula is known and whose inputs the run saved. One ratio per response
// cannot be combined with advantages per token; policy_loss refuses that too.
function usable(run) {
  const group = run.groups[0], perToken = Array.isArray(group.advantages[0]);
  return Object.keys(DATA.objectives).filter(name => {
    const row = DATA.objectives[name];
    return known(row)
      && (row.ratio !== "log-shifted" || group.router_shift)
      && (!perToken || ["none", "token", "gspo-token"].includes(row.ratio));
  });
}

// ------------------------------------------------------------------------------------- the state

const state = {step: firstStep(), everywhere: false, dark: false,
               panels: RUNS.map(() => ({group: 0, chosen: 0}))};
RUNS.forEach((run, p) => choose(p, usable(run).includes(run.objective) ? run.objective : "grpo"));

// The page opens where the first run's own clip comes nearest to removing half of a group's tokens.
function firstStep() {
  const run = RUNS[0], row = DATA.objectives[run.objective];
  if (!usable(run).includes(run.objective)) return STEPS[0];
  const fromHalf = group => {
    const results = group.mask.flatMap(
      (_, i) => scaleGradient(row, group, i, ...runRange(run, row, group.step), run));
    const removed = results.filter(r => r.removed).length / count(group.mask.flat());
    return Math.abs(removed - 0.5) + isDead(group);
  };
  return run.groups.reduce((a, b) => fromHalf(b) < fromHalf(a) ? b : a).step;
}

// [epsilon, epsilon high] of a run's batch under its own objective. metrics.jsonl has those of every
// batch, null for an open end; of older runs config.json has one that was set.
function runRange(run, row, step) {
  const batch = run.curves.find(c => c.step === step);
  if (row.epsilon === null) return [null, null];
  if (batch && "epsilon" in batch) return [batch.epsilon, batch.epsilon_high].map(x => x ?? Infinity);
  return missing(run.epsilon) ? [row.epsilon, row.epsilon_high] : [run.epsilon, run.epsilon_high];
}

// Show an objective in panel p: the run's own with the constants and the clip range of the run's
// batch, others with those of their papers.
function choose(p, name) {
  const run = RUNS[p], paper = DATA.objectives[name], own = name === run.objective;
  const row = {...paper, constants: {...paper.constants, ...(own ? run.constants : null)}};
  const [epsilon, epsilonHigh] = own ? runRange(run, row, state.step)
    : [row.epsilon, row.epsilon_high];
  Object.assign(state.panels[p], {name, row, epsilon, epsilonHigh, byHand: false});
}

// ------------------------------------------------------------------------------------ the curves

function drawCurves() {
  byId("curves").replaceChildren();
  for (const [title, get, top] of CURVES) {
    const all = RUNS.flatMap(run => run.curves.map(get)).filter(v => !missing(v));
    if (all.length) drawCurve(title, get, top || Math.max(...all) || 1);
  }
}

function drawCurve(title, get, top) {
  const last = Math.max(...RUNS.flatMap(run => run.curves.map(c => c.step)), 2);
  const x = step => 1 + 198 * (step - 1) / (last - 1);
  const y = value => 57 - 53 * Math.min(value / top, 1);
  const figure = make("figure", "", null, byId("curves"));
  const caption = make("figcaption", "", null, figure);
  make("div", "", `${title}, 0 to ${short(top, 2)}`, caption);
  RUNS.forEach((run, p) => {
    const now = run.curves.find(c => c.step === state.step);
    make("span", `now ${colourOf(p)}`, `${run.algorithm} ${now ? short(get(now)) : "–"}`, caption);
  });
  const svg = attributes(make("svg", "", null, figure), {
    viewBox: "0 0 200 60", preserveAspectRatio: "none", role: "img",
    "aria-label": `${title} over ${last} batches; at batch ${state.step}: ${caption.textContent}`});
  attributes(make("line", "floor", null, svg), {x1: 0, y1: 57, x2: 200, y2: 57});
  RUNS.forEach((run, p) => {
    const points = run.curves.filter(c => !missing(get(c))).map(c => `${x(c.step)} ${y(get(c))}`);
    attributes(make("path", colourOf(p), null, svg),
               {d: points.length ? `M${points.join("L")}` : "", stroke: "currentColor"});
  });
  make("div", "sum", `rollout batch 1 to ${last}`, figure);
  const at = x(state.step);
  attributes(make("line", "cursor", null, svg), {x1: at, y1: 0, x2: at, y2: 60});
  svg.addEventListener("click", event => {
    const box = svg.getBoundingClientRect();
    const wanted = 1 + (event.clientX - box.left) / box.width * (last - 1);
    goTo(STEPS.reduce((a, b) => Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a));
  });
}

// ---------------------------------------------------------------------------- redrawing and keys

function redraw(focused = document.activeElement?.id) {
  const batch = byId("batch");
  batch.max = STEPS.length - 1;
  batch.value = STEPS.indexOf(state.step);
  batch.setAttribute("aria-valuetext", `batch ${state.step}`);
  byId("batchname").textContent = `${state.step} of ${STEPS[STEPS.length - 1]}`;
  byId("experts").setAttribute("aria-pressed", state.everywhere);
  byId("theme").setAttribute("aria-pressed", state.dark);
  document.documentElement.dataset.theme = state.dark ? "dark" : "light";
  drawCurves();
  RUNS.forEach((_, p) => drawPanel(p));
  if (focused) byId(focused)?.focus({preventScroll: true});
}

function goTo(step) {
  state.step = step;
  state.panels.forEach((here, p) => { if (!here.byHand) choose(p, here.name); });
  redraw();
}

const move = by => goTo(STEPS[clamp(STEPS.indexOf(state.step) + by, 0, STEPS.length - 1)]);

function everyPanel(act) {
  RUNS.forEach((run, p) => act(p, state.panels[p], usable(run)));
  redraw();
}

function widen(by) {
  everyPanel((p, here) => {
    here.byHand = true;
    for (const key of ["epsilon", "epsilonHigh"]) {
      if (here[key] !== null) here[key] = Number(clamp(here[key] * by, 1e-5, 2).toPrecision(3));
    }
  });
}

function flip(name) {
  state[name] = !state[name];
  redraw();
}

const KEYS = {
  g: ["GRPO ↔ GSPO", () => everyPanel((p, here, names) => choose(
    p, here.name.startsWith("gspo") ? "grpo" : names.find(name => name.startsWith("gspo"))))],
  a: ["the next algorithm", () => everyPanel(
    (p, here, names) => choose(p, names[(names.indexOf(here.name) + 1) % names.length]))],
  n: ["the next batch", () => move(1)],
  p: ["the previous batch", () => move(-1)],
  "[": ["a narrower clip range", () => widen(1 / 1.5)],
  "]": ["a wider clip range", () => widen(1.5)],
  r: ["reset the clip range", () => everyPanel((p, here) => choose(p, here.name))],
  e: ["experts under every response, or only under the chosen one", () => flip("everywhere")],
  d: ["dark or light", () => flip("dark")],
};

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const token = event.target.closest?.(".token");
  const arrows = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]};
  const by = arrows[event.key];
  if (token && by) {
    const [p, i, t] = token.id.slice(5).split("-").map(Number);
    byId(`token${p}-${i + by[0]}-${t + by[1]}`)?.focus();
    event.preventDefault();
  } else if (KEYS[event.key] && event.target.tagName !== "SELECT") {
    KEYS[event.key][1]();
    event.preventDefault();
  }
});

for (const [key, [text]] of Object.entries({...KEYS, "← → ↑ ↓": ["from token to token"]})) {
  const line = make("li", "", null, byId("keys"));
  make("kbd", "", key, line);
  line.append(` ${text}`);
}
byId("batch").addEventListener("input", () => goTo(STEPS[byId("batch").value]));
byId("flip").addEventListener("click", KEYS.g[1]);
byId("theme").addEventListener("click", () => flip("dark"));
byId("experts").addEventListener("click", () => flip("everywhere"));
const GROUPS = RUNS.flatMap(run => run.groups);
byId("expertsign").hidden = !GROUPS.some(group => group.old_experts);
byId("toolsign").hidden = !GROUPS.some(group => group.mask.flat().includes(0));
byId("wrongsign").hidden = !GROUPS.some(group => group.first_error?.some(t => !missing(t)));
make("b", "", "log w: less likely after the updates", byId("scale"));
for (const x of [-1, -0.1, -0.01, -0.001, 0, 0.001, 0.01, 0.1, 1]) {
  paint(make("i", "", short(x), byId("scale")), x);
}
make("b", "", "more likely", byId("scale"));
byId("panels").classList.toggle("two", RUNS.length > 1);
if (byId("runs").open) byId("runs").parentElement.prepend(byId("runs"));   // one's own come first
RUNS.forEach((_, p) => {
  attributes(make("section", "panel", null, byId("panels")), {"aria-labelledby": `run${p}`});
});
const preference = window.matchMedia("(prefers-color-scheme: dark)");
state.dark = preference.matches;
preference.addEventListener("change", () => {
  state.dark = preference.matches;
  redraw();
});
redraw();
