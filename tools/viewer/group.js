// One group of responses under one objective: a panel of the page.

function drawPanel(p) {
  const run = RUNS[p], here = state.panels[p];
  const panel = byId("panels").children[p];
  panel.replaceChildren();
  make("h2", colourOf(p), `${run.name}, trained with ${run.algorithm}`, panel).id = `run${p}`;
  const groups = run.groups.filter(group => group.step === state.step);
  drawControls(p, panel, groups);
  if (!usable(run).includes(run.objective)) {
    const {ratio, clip} = DATA.objectives[run.objective];
    make("p", "sum unknown", `This page cannot show ${run.objective}, which trained the run: it `
      + `does not know the ratio "${ratio}" with the clip "${clip}", or the run did not save what they `
      + `need. It shows ${here.name} on the run's tokens; tools/viewer/losses.js has the `
      + "formulas.", panel);
  }
  if (!groups.length) {
    make("p", "sum", `This run saved no tokens of batch ${state.step}.`, panel);
    return;
  }
  const group = groups[Math.min(here.group, groups.length - 1)];
  make("div", "query", `prompt  ${group.prompt.trim()}`, panel);
  make("div", "sum", advantageRule(group), panel);
  const results = group.mask.map(
    (_, i) => scaleGradient(here.row, group, i, here.epsilon, here.epsilonHigh, run));
  const tokens = results.flat(), all = count(group.mask.flat());
  const [below, above, unweighted] = ["low", "high", "weight"].map(
    why => tokens.filter(r => r.removed === why).length);
  make("p", "sum", isDead(group)
    ? "All rewards are equal, so every Â is 0: " + (tokens.some(r => r.extra)
      ? `${here.name} only pulls its tokens towards the old policy.`
      : "no algorithm learns from this group.")
    : `${here.name} removes the gradient of ${below + above} of ${all} tokens: `
      + `${below} below the clip range, ${above} above.`
      + (unweighted ? ` ${unweighted} more have weight 0 (--entropy_quantile or --mismatch).` : ""),
    panel);
  const list = attributes(make("div", "answers", null, panel), {role: "list"});
  group.mask.forEach((_, i) => list.append(drawAnswer(p, group, i, results[i])));
}

// How the advantages follow from the rewards shown, for the reader who asks why they are not ±1.
function advantageRule(group) {
  const rewards = group.rewards, n = rewards.length;
  const mean = rewards.reduce((a, b) => a + b, 0) / n;
  const deviation = Math.sqrt(rewards.reduce((a, r) => a + (r - mean) ** 2, 0) / n);
  const says = `rewards of the group: mean ${short(mean)}, standard deviation ${short(deviation)}`;
  const follows = deviation > 0 && rewards.every((r, i) => !Array.isArray(group.advantages[i])
    && Math.abs((r - mean) / deviation - group.advantages[i]) < 1e-3);
  return follows ? `${says}: Â = (reward − ${short(mean)}) / ${short(deviation)}` : says;
}

function drawControls(p, panel, groups) {
  const here = state.panels[p], place = make("div", "controls", null, panel);
  const add = (text, tag, id) => {
    const control = make(tag, "", null, make("label", "", text, place));
    control.id = id + p;
    return control;
  };
  const objective = add("algorithm", "select", "objective");
  for (const name of usable(RUNS[p])) {
    const own = name === RUNS[p].objective ? " (as trained)" : "";
    make("option", "", name + own, objective).value = name;
  }
  objective.value = here.name;
  objective.addEventListener("change", () => {
    choose(p, objective.value);
    redraw();
  });
  const pick = add("group", "select", "group");
  groups.forEach((_, i) => { make("option", "", `${i + 1} of ${groups.length}`, pick).value = i; });
  pick.disabled = groups.length < 2;
  pick.value = Math.min(here.group, groups.length - 1);
  pick.addEventListener("change", () => {
    here.group = Number(pick.value);
    redraw();
  });
  if (here.epsilon === null) {
    make("span", "sum", "no clip range: nothing is removed", place);
    return;
  }
  for (const [key, text] of [["epsilon", "ε"], ["epsilonHigh", "ε high"]]) {
    const slider = add(text, "input", key);
    Object.assign(slider, {type: "range", min: -5, max: 0.3, step: 0.05});
    slider.value = Math.log10(here[key]);
    slider.setAttribute("aria-valuetext", short(here[key]));
    make("output", "", short(here[key]), slider.parentElement);
    slider.addEventListener("input", () => {
      here[key] = Number((10 ** slider.value).toPrecision(3));
      here.byHand = true;
      redraw();
    });
  }
}

function drawAnswer(p, group, i, result) {
  const here = state.panels[p], chosen = i === here.chosen;
  const {logs, length} = logRatios(group, i), reward = short(group.rewards[i]);
  const answer = make("div", chosen ? "answer chosen" : "answer");
  const A = Array.isArray(group.advantages[i]) ? "per token" : signed(group.advantages[i]);
  attributes(answer, {role: "listitem", "aria-label":
    `Response ${i + 1}, reward ${reward}, advantage ${A}, `
    + (length ? `s ${Math.exp(logs).toFixed(5)}, ` : "")
    + `${result.filter(r => r.removed).length} of ${length} loss tokens removed: `
    + group.tokens[i].join("")});
  const verdict = make("div", "verdict", null, answer);
  make("b", "", `${group.rewards[i] >= 1 ? "✓" : "✗"} ${reward}`, verdict);
  make("div", "", `Â ${A}`, verdict);
  if (group.cut_off?.[i]) make("div", "sum", "cut off, not in the loss", verdict);
  const strip = make("div", "tokens", null, answer);
  const experts = group.old_experts && (state.everywhere || chosen);
  if (experts) {
    const names = make("div", "layers", null, strip);
    group.old_experts[i].forEach((_, layer) => make("div", "", `L${layer}`, names));
  }
  group.mask[i].forEach((_, t) => strip.append(drawToken(p, group, i, t, result[t], experts)));
  drawPlace(p, group, i, answer);
  answer.addEventListener("click", event => {
    here.chosen = i;
    redraw(event.target.closest(".token")?.id);
  });
  return answer;
}

// To the right of a response: its s (for objectives with the product ratio, the product) and the
// clip range.
function drawPlace(p, group, i, answer) {
  const here = state.panels[p], row = here.row;
  const {logw, sum, logs, length} = logRatios(group, i);
  const product = row.ratio === "product", log = row.clip === "log-min";
  const name = product ? "∏w" : log ? "log s" : "s";
  const value = product ? Math.exp(sum) : log ? logs : Math.exp(logs);
  const place = make("div", "place", null, answer);
  if (!length) {
    make("div", "sum", "no loss token", place);
    return;
  }
  const probability = AROUND_0.includes(row.clip) && !log;     // its clip range is not one of s
  const range = probability ? null : clipRange(row, here.epsilon, here.epsilonHigh);
  const where = !range ? "" : value < range[0] ? "▼ below" : value > range[1] ? "▲ above" : "inside";
  const digits = Math.abs(value) < 100 ? value.toFixed(5) : value.toExponential(1);
  make("div", "", `${name} ${digits} ${where}`, place);
  if (range) {
    const gauge = make("div", "gauge", null, place);
    make("i", "", null, gauge);
    const at = 0.25 + 0.5 * (value - range[0]) / (range[1] - range[0]);
    make("b", "", null, gauge).style.setProperty("--at", clamp(at, 0, 1));
    const edges = range.map(edge => short(edge, 5)).join(" to ");
    attributes(gauge, {role: "img", "aria-label": `${name} is ${where} the clip range, ${edges}`});
  }
  const w = logw.filter((_, t) => group.mask[i][t]).map(Math.exp);
  make("div", "sum", `w ${Math.min(...w).toFixed(2)} … ${Math.max(...w).toFixed(2)}`, place);
}

function drawToken(p, group, i, t, result, experts) {
  const run = RUNS[p], name = state.panels[p].name, A = advantage(group, i, t);
  const own = name === run.objective && run.reduction;
  const reduction = own ? run.reduction : DATA.objectives[name].reduction;
  const tool = !group.mask[i][t], wrong = group.first_error?.[i] === t;
  const logw = logRatios(group, i).logw[t], text = printable(group.tokens[i][t]);
  const weight = share(reduction, group, i, run.max_completion_length);
  const push = tool ? 0 : (result.factor * A + result.extra) * weight;
  const names = ["token", tool && "tool", result.removed && "struck", wrong && "wrong"];
  const token = make("div", names.filter(Boolean).join(" "));
  Object.assign(token.dataset, {push, removed: result.removed || ""});
  token.id = `token${p}-${i}-${t}`;
  token.tabIndex = i === state.panels[p].chosen && t === 0 ? 0 : -1;   // the arrow keys start there
  const box = make("div", "", text, token);
  paint(box, logw);
  if (endsTurn(group, i, t)) make("span", "earned", short(group.turn_rewards[i][t]), box);
  const beyond = A !== 0 && result.factor > 2 ? " beyond" : "";
  const bar = make("div", `bar ${A < 0 ? "down" : "up"}${beyond}`, null, token);
  const tall = A === 0 ? 0 : clamp(result.factor / 2, 0, 1);
  make("i", "", null, bar).style.setProperty("--tall", tall.toFixed(3));
  if (experts) drawExperts(group, i, t, token);
  attributes(token, {role: "img", "aria-label": describe(group, i, t, result, logw, push)});
  for (const kind of ["focus", "mouseenter"]) {
    token.addEventListener(kind, () => {
      byId("inspector").textContent = token.getAttribute("aria-label");
    });
  }
  return token;
}

// Whether a response of several turns has its reward of a turn at this token.
function endsTurn(group, i, t) {
  return group.turn_rewards && group.mask[i][t] && !group.mask[i][t + 1];
}

// One cell per layer with the experts before the updates. If the updates changed them, the cell has a
// frame and also shows the experts after the updates.
function drawExperts(group, i, t, token) {
  group.old_experts[i].forEach((layer, l) => {
    const before = layer[t], after = group.new_experts[i][l][t];
    const gone = before.filter(expert => !after.includes(expert)).length;
    const cell = make("div", gone ? "layer flip" : "layer", null, token);
    if (before.length > 2) make("span", "", `${gone}/${before.length}`, cell);
    else {
      make("span", "", before.join(" "), cell);
      if (gone) make("span", "", after.join(" "), cell);
    }
  });
}

// The description of a token, for screen readers and for the line at the bottom of the page.
function describe(group, i, t, result, logw, push) {
  const says = [`token ${t + 1} “${printable(group.tokens[i][t])}”`];
  if (group.first_error?.[i] === t) says.push("the first wrong step");
  if (!group.mask[i][t]) {
    says.push(group.cut_off?.[i] ? "of a response that was cut off, not a loss token: no gradient"
      : "read, not written by the policy: no loss token, no gradient");
  }
  else {
    const why = {low: "below the clip range", high: "above the clip range",
                 weight: "weight 0 by --entropy_quantile or --mismatch"}[result.removed];
    says.push(`log w ${signed(logw, 4)}, w ${Math.exp(logw).toFixed(4)}`,
              why ? `no gradient: ${why}` : `weight ${short(result.factor)}`,
              `Â ${signed(advantage(group, i, t))}`, `−∂loss/∂log π ${short(push)}`);
  }
  if (endsTurn(group, i, t)) says.push(`reward of the turn ${short(group.turn_rewards[i][t])}`);
  (group.old_experts?.[i] || []).forEach((layer, l) => {
    const before = layer[t].join(" "), after = group.new_experts[i][l][t].join(" ");
    says.push(`layer ${l}: experts ${before}${before === after ? "" : ` → ${after}`}`);
  });
  return says.join("; ");
}
