// The first section of the page: a prepared group of responses whose tokens one can drag. Moving a
// token up or down changes its log w; ratios, clips and weights follow, by losses.js.

const FIVE = ["grpo", "gspo", "gspo_token", "gmpo", "cispo"];
const REACH = 1;                   // log w of a token goes from -REACH to REACH
const BOX = 60;                    // pixels of a token's track, as in style.css
const GSPO_RANGES = {"paper": [3e-4, 4e-4], "wide": [0.03, 0.04]};
const START = [                    // tokens, log w, advantages of a conversation's turns or of all
  {tokens: [..."3,1,6,5."], logw: [0.02, 0, 0.25, 0, 0.01, 0, 0, 0], A: [1]},
  {tokens: [..."3,1,7,6."], logw: [0.02, 0, -0.02, 0, -0.3, 0, -0.05, 0], A: [-1]},
  {tokens: [..."3,2,7."], logw: [-0.01, 0.01, 0.28, 0, 0, 0], A: [-1]},
  {tokens: [..."3,1.6,4."], logw: [0.03, 0, 0.05, 0, 0.1, 0, -0.02, 0], A: [1, -1], turns: 4},
];

const dragged = {logw: START.map(one => [...one.logw]), range: "paper"};

// The group as losses.js reads it. perTurn: the last response has an advantage for each of its two
// turns; else one, their mean.
function preparedGroup(perTurn) {
  const advantages = START.map(one => {
    const mean = one.A.reduce((a, b) => a + b, 0) / one.A.length;
    return one.tokens.map((_, t) => perTurn && one.turns ? one.A[Number(t >= one.turns)] : mean);
  });
  const old = START.map(one => one.tokens.map(() => -1.5));
  return {mask: START.map(one => one.tokens.map(() => 1)), old_logp: old,
          new_logp: old.map((row, i) => row.map((x, t) => x + dragged.logw[i][t])),
          advantages: perTurn ? advantages : advantages.map(row => row[0])};
}

// [{factor, removed, push}] of the tokens of response i under an objective.
function weighDragged(name, i) {
  const row = DATA.objectives[name], group = preparedGroup(name === "gspo_token");
  const [epsilon, high] = row.ratio.endsWith("sequence") || row.ratio === "gspo-token"
    ? GSPO_RANGES[dragged.range] : [row.epsilon, row.epsilon_high];
  const part = share(row.reduction, group, i, 16);
  return scaleGradient(row, group, i, epsilon, high, {}).map((result, t) => (
    {...result, push: result.factor * advantage(group, i, t) * part}));
}

// The weight that a token has, or would have if the clip did not remove it; a dot where Â is 0.
function weightText(name, i, t, result) {
  const row = DATA.objectives[name], group = preparedGroup(name === "gspo_token");
  if (advantage(group, i, t) === 0) return "·";
  if (!result.removed) return result.factor.toFixed(2);
  const uncut = row.clip === "log-min"
    ? geometricMean(row, group, i, -row.epsilon, row.epsilon_high, t) : ratioAt(row, group, i)(t);
  return uncut.toFixed(2);
}

// What the clip compares with its range: s for the objectives of a sequence ratio; GRPO's range and
// GMPO's are for single tokens, and CISPO's limits a weight.
function placeText(name, i) {
  const {logs} = logRatios(preparedGroup(false), i);
  if (!name.startsWith("gspo")) {
    return {grpo: "w of a token in 0.8 … 1.2", gmpo: "log w of a token in ±0.4",
            cispo: "w counts at most 1.28"}[name];
  }
  const [low, high] = GSPO_RANGES[dragged.range], s = Math.exp(logs);
  const where = s > 1 + high ? "above" : s < 1 - low ? "below" : "inside";
  return `s ${s.toFixed(4)} ${where} ${short(1 - low, 5)} … ${short(1 + high, 5)}`;
}

// Build the rows once. A finger stays with the element that it touched, so later only texts,
// classes and positions change.
function buildDragged() {
  START.forEach((one, i) => {
    const block = make("div", "response", null, byId("dragged"));
    make("div", "sum", "", block).id = `sum${i}`;
    const grid = make("div", "grid", null, block);
    grid.style.setProperty("--tokens", one.tokens.length);
    make("div", "name", "log w", grid);
    one.tokens.forEach((text, t) => grid.append(buildHandle(i, t, text)));
    make("div", "place", "drag ↕ −1 … +1", grid);
    for (const name of FIVE) {
      make("div", "name", name, grid);
      one.tokens.forEach((_, t) => { make("div", "cell", "", grid).id = `${name}${i}-${t}`; });
      make("div", "place", "", grid).id = `place${name}${i}`;
    }
  });
}

function buildHandle(i, t, text) {
  const handle = make("div", `handle ${START[i].turns === t ? "turn" : ""}`);
  handle.id = `drag${i}-${t}`;
  handle.tabIndex = 0;
  attributes(handle, {role: "slider", "aria-orientation": "vertical", "aria-valuemin": -REACH,
                      "aria-valuemax": REACH,
                      "aria-label": `response ${i + 1}, token ${t + 1} “${text}”, log w`});
  make("div", "", text, handle);
  let from = null;
  handle.addEventListener("pointerdown", event => {
    event.preventDefault();
    handle.setPointerCapture(event.pointerId);
    handle.focus({preventScroll: true});
    from = {y: event.clientY, logw: dragged.logw[i][t]};
  });
  handle.addEventListener("pointermove", event => {
    if (from) moveToken(i, t, from.logw + (from.y - event.clientY) / BOX * REACH);
  });
  for (const end of ["pointerup", "pointercancel"]) {
    handle.addEventListener(end, () => { from = null; });
  }
  handle.addEventListener("keydown", event => {
    const by = {ArrowUp: 1, ArrowDown: -1}[event.key];
    const to = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (by) moveToken(i, t, dragged.logw[i][t] + by * (event.shiftKey ? 0.1 : 0.01));
    if (to) byId(`drag${i}-${t + to}`)?.focus();
    if (by || to) event.preventDefault();
  });
  return handle;
}

function drawDragged() {
  START.forEach((one, i) => {
    const {sum, logs} = logRatios(preparedGroup(false), i);
    const A = one.turns ? "turn 1: Â +1, turn 2: Â −1 (mean 0)" : `Â ${signed(one.A[0], 0)}`;
    byId(`sum${i}`).textContent = `response ${i + 1}: ${A}   s ${Math.exp(logs).toFixed(4)}   `
      + `∏w ${Math.exp(sum).toFixed(3)}`;
    one.tokens.forEach((_, t) => {
      const handle = byId(`drag${i}-${t}`), logw = dragged.logw[i][t];
      handle.setAttribute("aria-valuenow", logw.toFixed(2));
      paint(handle.firstChild, logw);
      handle.firstChild.style.setProperty("--shift", `${-logw / REACH * (BOX - 25) / 2}px`);
    });
    for (const name of FIVE) {
      byId(`place${name}${i}`).textContent = placeText(name, i);
      weighDragged(name, i).forEach((result, t) => {
        const cell = byId(`${name}${i}-${t}`);
        const way = result.push > 0 ? "up" : result.push < 0 ? "down" : "none";
        cell.className = `cell ${way} ${result.removed ? "removed" : ""} `
          + (one.turns === t ? "turn" : "");
        cell.textContent = weightText(name, i, t, result);
        Object.assign(cell.dataset, {name, push: result.push, removed: result.removed || ""});
      });
    }
  });
  if (byId("challenges").firstChild) checkChallenges();
}

function moveToken(i, t, logw) {
  dragged.logw[i][t] = Number(clamp(logw, -REACH, REACH).toFixed(3));
  drawDragged();
}

byId("dragrange").addEventListener("change", () => {
  dragged.range = byId("dragrange").value;
  drawDragged();
});
byId("dragreset").addEventListener("click", () => {
  dragged.logw = START.map(one => [...one.logw]);
  drawDragged();
});
buildDragged();
drawDragged();
