// The second section: log s of responses against their length. A response of L tokens has
// x = (sum of log w) / L^a. Tokens that move independently, with standard deviation σ and mean -KL,
// give x the mean -KL·L^(1-a) and the standard deviation σ·L^(1/2-a). What the clip removes says
// losses.js, for a response of one token whose log w is x: its s is e^x.

const DOTS = 150, SHORTEST = 4, LONGEST = 16384;
const WIDE = 640, TALL = 330, LEFT = 78, BOTTOM = 26;      // of the drawing
const UNIT = 3e-4;                                         // below it the axis of x is linear
const FAN = {L: 200, sigma: 0.07, kl: 0.0025, mini: 4, a: 1, range: "paper"};
const SLIDERS = {                    // name: [lowest, highest, steps, logarithmic, what it says]
  L: [8, 8192, 60, true, x => `L about ${Math.round(x)} tokens`],
  sigma: [0.003, 0.3, 60, true, x => `σ of log w before mini-batch 4: ${short(x, 2)}`],
  kl: [1e-6, 0.05, 60, true, x => `KL per token before mini-batch 4: ${short(x, 2)}`],
  mini: [1, 4, 3, false, x => `before the update on mini-batch ${x}`],
  a: [0, 1, 2, false, x => ({"0": "exponent 0: the product", "1": "exponent 1: log s, GSPO",
                             "0.5": "exponent ½: constant spread, mean −√L·KL"})[x]],
};

// Numbers that look random and are the same in every browser: DOTS of {u, z, A}.
const NOISE = (() => {
  let seed = 7;
  const next = () => (seed = seed * 48271 % 2147483647) / 2147483647;
  return Array.from({length: DOTS}, () => {
    const u = next(), radius = Math.sqrt(-2 * Math.log(next()));
    return {u, z: radius * Math.cos(2 * Math.PI * next()), A: next() < 0.5 ? 1 : -1};
  });
})();

// Mean and standard deviation of x for a length. The policy moves by equal steps: σ grows with
// their number, the KL with its square.
function fanMoments(L) {
  const moved = (FAN.mini - 1) / 3;
  return {mean: -FAN.kl * moved ** 2 * L ** (1 - FAN.a), std: FAN.sigma * moved * L ** (0.5 - FAN.a)};
}

// [ε, ε_high] of a response of L tokens.
function fanRange(L) {
  return FAN.range === "paper" ? GSPO_RANGES.paper : [0.2 / Math.sqrt(L), 0.2 / Math.sqrt(L)];
}

// The responses: their length, from L/4 to 4L, x, Â, clip range, and what the clip removes.
function fanDots() {
  return NOISE.map(({u, z, A}) => {
    const L = Math.max(1, Math.round(FAN.L * 4 ** (2 * u - 1)));
    const {mean, std} = fanMoments(L), x = mean + z * std, [epsilon, high] = fanRange(L);
    const group = {mask: [[1]], old_logp: [[0]], new_logp: [[x]], advantages: [A]};
    const [{removed}] = scaleGradient(DATA.objectives.gspo, group, 0, epsilon, high, {});
    return {L, x, A, epsilon, high, removed};
  });
}

const across = L => LEFT + (WIDE - LEFT - 8) * Math.log(L / SHORTEST) / Math.log(LONGEST / SHORTEST);
const upward = x => {
  const half = (TALL - BOTTOM) / 2;
  return half - half * Math.asinh(clamp(x, -3, 3) / UNIT) / Math.asinh(3 / UNIT);
};

function fanLine(svg, name, height) {
  const points = Array.from({length: 60}, (_, i) => SHORTEST * (LONGEST / SHORTEST) ** (i / 59));
  const d = points.map((L, i) => `${i ? "L" : "M"}${across(L)} ${upward(height(L))}`).join("");
  attributes(make("path", name, null, svg), {d});
}

function fanText(svg, x, y, text, anchor) {
  attributes(make("text", "", text, svg), {x, y, "text-anchor": anchor});
}

function drawFan() {
  for (const [name, [, , , , says]] of Object.entries(SLIDERS)) {
    byId(`fan${name}text`).textContent = says(FAN[name]);
  }
  const svg = byId("fan"), dots = fanDots();
  svg.replaceChildren();
  const [low, high] = GSPO_RANGES.paper;
  attributes(make("rect", "band", null, svg), {
    x: LEFT, width: WIDE - LEFT - 8, y: upward(high), height: upward(-low) - upward(high)});
  for (const sign of [-1, 1]) {
    fanLine(svg, "rule", L => sign * 0.2 / Math.sqrt(L));
    fanLine(svg, "spread", L => fanMoments(L).mean + sign * fanMoments(L).std);
  }
  fanLine(svg, "mean", L => fanMoments(L).mean);
  for (const {L, x, A, removed} of dots) {
    attributes(make("circle", `${A > 0 ? "good" : "bad"} ${removed ? "removed" : ""}`, null, svg),
               {cx: across(L), cy: upward(x), r: 4});
  }
  for (const L of [10, 100, 1000, 10000]) fanText(svg, across(L), TALL - 8, String(L), "middle");
  for (const x of [-1, -0.1, -0.01, -0.001, 0, 0.001, 0.01, 0.1, 1]) {
    fanText(svg, LEFT - 6, upward(x) + 5, String(x), "end");
  }
  const sorted = [...dots].sort((p, q) => p.L - q.L), third = DOTS / 3;
  byId("fancount").textContent = ["short", "middle", "long"].map((name, k) => {
    const some = sorted.slice(k * third, (k + 1) * third);
    const gone = some.filter(dot => dot.removed).length;
    return `${name} (${some[0].L} to ${some[third - 1].L} tokens): ${gone} of ${third} clipped`;
  }).join("; ");
}

for (const [name, [low, high, steps, log]] of Object.entries(SLIDERS)) {
  const label = make("label", "", "", byId("fansliders"));
  make("span", "", "", label).id = `fan${name}text`;
  const input = attributes(make("input", "", null, label),
                           {id: `fan${name}`, type: "range", min: 0, max: steps, step: 1});
  input.value = Math.round(steps * (log ? Math.log(FAN[name] / low) / Math.log(high / low)
                                        : (FAN[name] - low) / (high - low)));
  input.addEventListener("input", () => {
    const share = input.value / steps;
    FAN[name] = log ? low * (high / low) ** share : low + share * (high - low);
    drawFan();
  });
}
byId("fanrange").addEventListener("change", () => {
  FAN.range = byId("fanrange").value;
  drawFan();
});
drawFan();
