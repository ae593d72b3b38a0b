"use strict";
// The formulas of ratios.py and losses.py once more, on one group of answers: what
// multiplies Â·∇log π of each token, and which tokens the clip leaves without gradient.
// tests/tools/test_view.py compares them with autograd through losses.policy_loss, in a browser.

// The ratios and clips of losses.OBJECTIVES that are known here.
const RATIOS = ["none", "token", "sequence", "gspo-token", "product", "log-token", "log-shifted"];
const CLIPS = ["none", "min", "log-min", "weight", "tv", "kl", "sigmoid", "gamma"];
const AROUND_0 = ["log-min", "tv", "kl"];  // their band bounds log w or a change of probability

const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
const count = mask => mask.reduce((a, b) => a + b, 0);

// [low, high] of what an objective's clip looks at, null if it has no band.
function bandOf(row, epsilon, epsilonHigh) {
  if (row.epsilon === null) return null;
  return AROUND_0.includes(row.clip) ? [-epsilon, epsilonHigh] : [1 - epsilon, 1 + epsilonHigh];
}

// Answer i: log w per token (0 outside the mask), their sum and mean log s, |y|.
function logRatios(group, i) {
  const mask = group.mask[i], old = group.old_logp[i];
  const logw = group.new_logp[i].map((x, t) => mask[t] ? x - old[t] : 0);
  const length = count(mask), sum = logw.reduce((a, b) => a + b, 0);
  return {logw, sum, logs: sum / Math.max(length, 1), length};
}

function advantage(group, i, t) {
  return Array.isArray(group.advantages[i]) ? group.advantages[i][t] : group.advantages[i];
}

// The ratio that the objective puts into its clip, at token t.
function ratioAt(row, group, i) {
  const {logw, sum, logs} = logRatios(group, i);
  return {
    "none": () => 1,
    "token": t => Math.exp(logw[t]),
    "sequence": () => Math.exp(logs),
    "gspo-token": () => Math.exp(logs),
    "product": () => Math.exp(sum),
    "log-token": t => logw[t],
    "log-shifted": t => logw[t] + Math.log(group.router_shift[i][t]),
  }[row.ratio];
}

// DPPO: by how much the probability of a token has moved, signed; "kl" as KL(old || new) of this
// token against any other.
function probabilityChange(clip, logp, oldLogp) {
  const change = Math.exp(logp) - Math.exp(oldLogp);
  if (clip === "tv") return change;
  const rest = x => -Math.expm1(Math.min(x, -1e-8));
  const others = rest(oldLogp) * Math.log(rest(oldLogp) / rest(logp));
  return (Math.exp(oldLogp) * (oldLogp - logp) + others) * Math.sign(change);
}

// Per token of answer i {factor, removed}: what multiplies Â·∇log π before the reduction, and
// whether the clip removed the gradient below ("low") or above the band ("high"), else null.
// options are the run's: dual_clip and off_policy_mask, null or numbers.
function weigh(row, group, i, epsilon, epsilonHigh, options) {
  const mask = group.mask[i], ratio = ratioAt(row, group, i), {logs, length} = logRatios(group, i);
  const [low, high] = bandOf(row, epsilon, epsilonHigh) || [NaN, NaN];
  const stops = options.dual_clip && row.ratio === "token" && row.clip === "min";
  const stale = options.off_policy_mask && -logs > options.off_policy_mask;
  const looks = {                          // what the clip compares with the band
    "min": ratio, "log-min": ratio,
    "tv": t => probabilityChange("tv", group.new_logp[i][t], group.old_logp[i][t]),
    "kl": t => probabilityChange("kl", group.new_logp[i][t], group.old_logp[i][t]),
  }[row.clip];
  let geometric = 0;                       // GMPO, RSPO: the mean of log-ratios, cut ones included
  if (row.clip === "log-min") {
    const held = mask.map((m, t) => !m ? 0
      : advantage(group, i, t) > 0 ? Math.min(ratio(t), high) : Math.max(ratio(t), low));
    geometric = Math.exp(held.reduce((a, b) => a + b, 0) / Math.max(length, 1));
  }
  return mask.map((m, t) => {
    const A = advantage(group, i, t), r = ratio(t);
    if (!m) return {factor: 0, removed: null};
    if (A > 0 && looks && looks(t) > high) return {factor: 0, removed: "high"};
    if (A < 0 && (stale || looks && looks(t) < low)) return {factor: 0, removed: "low"};
    if (A < 0 && stops && r > options.dual_clip) return {factor: 0, removed: "high"};
    return {factor: slope(row, r, A, length, geometric, low, high), removed: null};
  });
}

// d surrogate / d log π of a token that is not cut, divided by A.
function slope(row, r, A, length, geometric, low, high) {
  if (row.clip === "log-min") return geometric;
  if (row.clip === "weight") return clamp(r, low, high);
  if (row.clip === "tv" || row.clip === "kl") return Math.min(r, 20);
  if (row.clip === "none") return 1;
  if (row.clip === "sigmoid") {
    const p = 1 / (1 + Math.exp(-(A > 0 ? 1 : 1.05) * (r - 1)));
    return 4 * p * (1 - p) * r;
  }
  if (row.clip === "gamma") {
    const W = clamp(r, 1e-8, 4.85e8), [k, lambda] = A >= 0 ? [2, 3] : [3, 2];
    return Math.exp(lambda + k * Math.log(W) - lambda * W);
  }
  return row.ratio === "product" ? length * r : r;   // each of |y| tokens moves the whole product
}

// The weight of a token of answer i under a reduction, as if this group were the
// whole mini-batch (losses.token_weights).
function share(reduction, group, i, maxLength) {
  const lengths = group.mask.map(count), N = lengths.length;
  const all = lengths.reduce((a, b) => a + b, 0);
  const divisor = {"sequence-mean": N * lengths[i], "token-mean": all, "group-token-mean": all,
                   "constant": N * maxLength, "sequence-sum": N}[reduction];
  return 1 / Math.max(divisor, 1);
}
