"use strict";
// The formulas of ratios.py and losses.py on one group of responses: the factor of Â·∇log π of each
// token, and the tokens whose gradient the clip removes. Clip ranges and constants come from the rows
// of losses.OBJECTIVES in the page's data. tests/tools/test_view.py compares every row with
// autograd through losses.policy_loss, in a browser.

// The ratios and clips that are implemented here; the page says so if a run was trained with others.
const RATIOS = ["none", "token", "sequence", "gspo-token", "product", "log-token", "log-shifted"];
const CLIPS = ["none", "min", "log-min", "weight", "tv", "kl", "sigmoid", "gamma",
               "two-sided", "square"];
const THROUGH_RATIO = ["min", "log-min", "sigmoid"];         // others: constant · log π
// Clips whose range limits log w or a change of probability.
const AROUND_0 = ["log-min", "tv", "kl"];

// Whether this page implements a row: its ratio, its clip, and their combination.
function known(row) {
  if (!RATIOS.includes(row.ratio) || !CLIPS.includes(row.clip)) return false;
  if (row.ratio.startsWith("log-") !== (row.clip === "log-min")) return false;
  return row.ratio !== "none" || !THROUGH_RATIO.includes(row.clip);
}

const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
const count = mask => mask.reduce((a, b) => a + b, 0);

// The clip range [low, high] of an objective, null if it has none. An end that is null is open.
function clipRange(row, epsilon, epsilonHigh) {
  if (row.epsilon === null) return null;
  const center = AROUND_0.includes(row.clip) ? 0 : 1;
  return [center - (epsilon ?? Infinity), center + (epsilonHigh ?? Infinity)];
}

// Response i: log w per token (0 outside the mask), their sum and mean log s, |y|.
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
  const kl = (p, q) => Math.exp(p) * (p - q) + rest(p) * Math.log(rest(p) / rest(q));
  return kl(oldLogp, logp) * Math.sign(change);
}

// The weight of every token by the run's --mismatch and --entropy_quantile. Where tokens share one
// ratio, the gradient of each token of the answer has the mean of the weights.
function tokenWeights(row, group, i, length) {
  const mask = group.mask[i], own = group.factors ? group.factors[i] : mask.map(() => 1);
  const shared = ["sequence", "product"].includes(row.ratio) || row.clip === "log-min";
  if (!shared || !THROUGH_RATIO.includes(row.clip)) return own;
  const sum = own.reduce((a, x, t) => a + (mask[t] ? x : 0), 0);
  return own.map(() => sum / Math.max(length, 1));
}

// What multiplies ∇log π whatever the advantage: the pull of DRO towards the old policy.
function pull(row, logw) {
  return row.clip === "square" ? -row.constants.beta * logw : 0;
}

// GMPO, RSPO: the geometric mean of the ratios of answer i, each cut at the clip range, but that of
// token `uncut`.
function geometricMean(row, group, i, low, high, uncut = -1) {
  const mask = group.mask[i], ratio = ratioAt(row, group, i);
  const held = mask.map((m, t) => !m ? 0 : t === uncut ? ratio(t)
    : advantage(group, i, t) > 0 ? Math.min(ratio(t), high) : Math.max(ratio(t), low));
  return Math.exp(held.reduce((a, b) => a + b, 0) / Math.max(count(mask), 1));
}

// Per token of answer i {factor, extra, removed}: what multiplies Â·∇log π before the reduction, what
// is added to factor·Â, and why the factor is 0: the clip removed the gradient below ("low") or above
// the clip range ("high"), or the run's weights are 0 ("weight"), else null. options are the run's:
// dual_clip and off_policy_mask, null or numbers.
function scaleGradient(row, group, i, epsilon, epsilonHigh, options) {
  const mask = group.mask[i], ratio = ratioAt(row, group, i);
  const {logw, logs, length} = logRatios(group, i);
  const both = row.clip === "two-sided";                     // a mask that ignores the sign of A
  const [low, high] = clipRange(row, epsilon, epsilonHigh) || [NaN, NaN];
  const stops = options.dual_clip && row.ratio === "token" && row.clip === "min";
  const stale = options.off_policy_mask && -logs > options.off_policy_mask;
  const looks = {                          // what the clip compares with its range
    "min": ratio, "log-min": ratio, "two-sided": ratio,
    "tv": t => probabilityChange("tv", group.new_logp[i][t], group.old_logp[i][t]),
    "kl": t => probabilityChange("kl", group.new_logp[i][t], group.old_logp[i][t]),
  }[row.clip];
  const weights = tokenWeights(row, group, i, length);
  const geometric = row.clip === "log-min" ? geometricMean(row, group, i, low, high) : 0;
  return mask.map((m, t) => {
    const A = advantage(group, i, t), r = ratio(t);
    if (!m) return {factor: 0, extra: 0, removed: null};
    if (A < 0 && stale) return {factor: 0, extra: 0, removed: "low"};
    const weight = weights[t], extra = weight * pull(row, logw[t]);
    const up = both ? A !== 0 : A > 0, down = both ? A !== 0 : A < 0;  // the sides that may be cut
    if (up && looks && looks(t) > high) return {factor: 0, extra, removed: "high"};
    if (down && looks && looks(t) < low) return {factor: 0, extra, removed: "low"};
    if (A < 0 && stops && r > options.dual_clip) return {factor: 0, extra, removed: "high"};
    return {factor: weight * slope(row, r, A, length, geometric, low, high), extra,
            removed: weight === 0 ? "weight" : null};
  });
}

// d surrogate / d log π of a token that is not cut, divided by A.
function slope(row, r, A, length, geometric, low, high) {
  if (row.clip === "log-min") return geometric;
  if (row.clip === "weight") return clamp(r, low, high);
  const c = row.constants, reach = row.ratio === "product" ? length : 1;  // |y| tokens move ∏w
  if (["tv", "kl"].includes(row.clip)) return Math.min(r, c.cap);
  if (row.clip === "none" || row.clip === "square") return 1;
  if (row.clip === "two-sided") return r;
  if (row.clip === "sigmoid") {
    const p = 1 / (1 + Math.exp(-(A > 0 ? c.tau_positive : c.tau_negative) * (r - 1)));
    return 4 * p * (1 - p) * r * reach;
  }
  if (row.clip === "gamma") {
    const W = clamp(r, 1e-8, 4.85e8), k = A >= 0 ? c.k_positive : c.k_negative;
    const lambda = A >= 0 ? c.lambda_positive : c.lambda_negative;
    return Math.exp(lambda + k * Math.log(W) - lambda * W);
  }
  return r * reach;
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
