"""Does GRPO collapse on a Mixture of Experts as experts flip, and does replay or GSPO prevent it?

Source: GSPO (arXiv 2507.18071, section 5.3): in a 48-layer MoE about 10 % of a token's experts
change with one update, token ratios fluctuate, and GRPO converges only with routing replay; GSPO
needs none. Here: train.py's own loop on its million-parameter policy (4 layers, 8 experts of width
96, top-2), on 16 experts of width 192, top-1, and on a dense policy of equal active size (one
expert of 192), at a constant learning rate, 16 optimizer steps of 8 answers per rollout batch. Seed
s of the arms that are judged starts from cold start s, 8 of them; other arms share four.

Written down before the runs that are counted: a collapse is a rollout batch's pass rate below half
of its best so far for 4 batches running (of 16); shares come with exact intervals (Clopper-Pearson,
95 %). The claim joins three sentences, each judged by held-out pass@1 at the end, paired by cold
start, on the MoE unless it says dense:

  GSPO prevents it     confirmed if GSPO minus GRPO lies above 0, refuted if below 0
  replay repairs it    confirmed if GRPO + replay minus GRPO lies above 0, refuted if below 0.05
  flips cause it       confirmed if the gain of GSPO over GRPO is larger on the MoE than dense,
                       refuted if it is smaller

  confirmed            all three are
  refuted              one of them is

`python experiments/moe_stability.py` runs what results/moe_stability_runs.jsonl does not have yet,
seed by seed, and may be stopped at any time (a run takes 15 to 60 seconds); --spike: one token
kills a run, in a minute; --quick: a look in three; --draw: the figure.
"""

import argparse
import json
import shutil
import sys
import time
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import torch
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from plumbing.data import running_sum
from plumbing.data import tasks  # noqa: E402
import train  # noqa: E402
from plumbing.run.arguments import parse  # noqa: E402
from eval import pass_at_1  # noqa: E402
from experiments.shared import claim  # noqa: E402
from tools import style  # noqa: E402
from plumbing.model.policy import load_policy  # noqa: E402
from plumbing.run.checkpoints import Saver  # noqa: E402
from plumbing.run.metrics import Recorder  # noqa: E402

RUNS = Path("results/moe_stability_runs.jsonl")
RESULT = Path("results/moe_stability.json")
FIGURE = Path("docs/figures/moe_stability.png")
BATCHES = 16
PATIENCE = 4
LR = 6e-4
LOWER = 3e-4
SPIKE_LR = 0.5
SPIKE_SEED = 4
BASE = "--device cpu --prompts_per_step 16 --plain --eval_prompts 128 --eval_samples 2"
JUDGED, COLD_STARTS = ("grpo", "gspo", "grpo_replay"), 8      # the others' seeds share four
ONE = "--num_experts_per_tok 1"
POLICIES = {"top2": "", "top1": f"--num_experts 16 {ONE}", "dense": f"--num_experts 1 {ONE}"}
NAMES = {"top2": "MoE", "top1": "top-1 MoE", "dense": "dense"}
ANSWERS = {"plain": "", "verbose": "--verbose_answers",      # about 21 and 60 tokens
           "long": "--verbose_answers --min_terms 20 --max_terms 24"}        # about 130
GRPO = "--algorithm grpo --epsilon_high 0.27"                # the band of GSPO's own baseline
ARMS = {"grpo": ("GRPO", GRPO), "gspo": ("GSPO", "--algorithm gspo"),
        "grpo_replay": ("GRPO + replay", GRPO + " --routing_replay old"),
        "grpo_dual": ("GRPO + dual clip 3", GRPO + " --dual_clip 3"),
        "grpo_matched": ("GRPO, GSPO's step", GRPO),         # see one_run
        "gspo_wide": ("GSPO, 100x band", "--algorithm gspo --epsilon 0.03 --epsilon_high 0.04"),
        "gspo_replay": ("GSPO + replay", "--algorithm gspo --routing_replay old"),
        "gmpo": ("GMPO", "--algorithm gmpo"), "rspo": ("RSPO", "--algorithm rspo")}


def cell(arm, seed, policy="top2", lr=LR, minibatches=16, answers="plain", optim="adamw"):
    return dict(arm=arm, seed=seed, policy=policy, optim=optim, lr=lr, minibatches=minibatches,
                answers=answers)


def grid():
    """All runs, the most informative first and seed by seed, so that complete rows remain wherever
    the experiment is stopped."""
    others = ("grpo_dual", "gspo_wide", "gspo_replay", "grpo_matched", "gmpo", "rspo")
    for seed in range(8):
        yield from (cell(arm, seed) for arm in ("grpo", "gspo", "grpo_replay"))
        yield from (cell(arm, seed, "dense") for arm in ("grpo", "gspo"))
    for seed in range(4):
        yield from (cell(arm, seed) for arm in others)
        yield from (cell(arm, seed, lr=lr) for lr in (5e-4, LOWER) for arm in ("grpo", "gspo"))
        yield from (cell(arm, seed, minibatches=4) for arm in ("grpo", "gspo"))
    for seed in range(4):
        yield from (cell(arm, seed, "top1") for arm in ("grpo", "gspo", "grpo_replay"))
    for lr in (SPIKE_LR, 0.2):                               # SGD: how often a token kills a run
        for seed in range(8):
            yield from (cell(arm, seed, lr=lr, minibatches=4, optim="sgd")
                        for arm in ("grpo", "grpo_dual"))
    for answers in ("verbose", "long"):
        for seed in range(4):
            yield from (cell(arm, seed, answers=answers) for arm in ("grpo", "gspo"))
    for seed in range(4, 8):                                 # as many again: narrower intervals
        yield from (cell(arm, seed) for arm in others)


# ---------------------------------------------------------------------------------------- one run

@contextmanager
def watched(seen, optim):
    """train.py's update and loss, which also record what train.py does not log: the largest |log
    w|, the largest w of a token with A < 0, and the length of the step. optim "sgd" replaces AdamW
    by plain gradient descent."""
    update = train.update
    loss = train.policy_loss
    optimizer = train.make_optimizer

    def watched_loss(name, logp, old_logp, advantages, mask, **options):
        log_w = (logp.detach() - old_logp)[mask]                                     # [loss tokens]
        bad = (advantages < 0)[:, None].expand_as(mask)[mask]                        # [loss tokens]
        largest = log_w.masked_fill(~bad, -torch.inf).max().exp().item()
        seen.append(dict(log_w_largest=log_w.abs().max().item(), w_negative=largest))
        return loss(name, logp, old_logp, advantages, mask, **options)

    def watched_update(args, learner, mini):
        parameters = list(learner.policy.parameters())
        weights = lambda: torch.nn.utils.parameters_to_vector(parameters).detach()
        before = weights()                                                           # [parameters]
        stats = update(args, learner, mini)
        seen[-1]["step"] = (weights() - before).norm().item()
        return stats

    def descent(args, actor):
        return torch.optim.SGD(actor.parameters(), args.learning_rate)

    train.update = watched_update
    train.policy_loss = watched_loss
    train.make_optimizer = descent if optim == "sgd" else optimizer
    try:
        yield
    finally:
        train.update = update
        train.policy_loss = loss
        train.make_optimizer = optimizer


def one_run(c, done, batches=BATCHES):
    """Take the cold start from the cache, train, evaluate -> one record with its curves.

    done: the finished runs, which the arm grpo_matched needs."""
    began = time.perf_counter()
    lr = c["lr"]
    cold = cold_start(c)
    seen = []
    shape = f"{BASE} {POLICIES[c['policy']]} {ANSWERS[c['answers']]}"
    if c["arm"] == "grpo_matched":                           # Adam's steps grow with its rate
        same = [r for r in done if key(r | {"arm": 0}) == key(c | {"arm": 0})]
        length = {r["arm"]: sum(r["curve"]["step"][:10]) for r in same}
        lr *= length["gspo"] / length["grpo"]
    args = parse(f"{shape} --steps {batches} --steps_per_generation {c['minibatches']} "
                 f"--learning_rate {lr} --seed {c['seed']} "
                 f"--lr_scheduler_type constant_with_warmup {ARMS[c['arm']][1]} "
                 f"--max_grad_norm {0 if c['optim'] == 'sgd' else 1.0}".split())
    run = Path("runs/moe_stability") / "-".join(map(str, c.values()))
    task = tasks.from_arguments(args)
    device = torch.device("cpu")
    if c["answers"] == "long":                               # a habit of 0.6 would leave few right
        task = running_sum.running_sum(args.min_terms, args.max_terms, args.verbose_answers,
                                       habit=0.2)
    policy, tokenizer = load_policy(parse(f"{shape} --seed {cold}".split()), task, device)
    progress = {"bad": 0, "best_pass_rate": 0.0, "verifier_errors": 0}
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    with open(run / "log.txt", "w") as log, redirect_stdout(log), watched(seen, c["optim"]):
        learner = train.make_learner(args, task, policy, tokenizer, device)
        recorder = Recorder(args, run, task, learner, progress, device)
        step = train.train(args, learner, task, recorder, Saver(args, run, learner, progress))
    if step < batches:                                       # Ctrl-C: train.py let the batch end
        raise SystemExit("stopped; the same command continues and repeats this run")
    answers = train.held_out(args, learner.actor, tokenizer, task)["sampled"]
    held_out = pass_at_1(answers["rewards"])[0]
    shutil.rmtree(run / "checkpoints")
    records = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    updates = [seen[i:i + c["minibatches"]] for i in range(0, len(seen), c["minibatches"])]
    curve = {name: [r[name] for r in records]
             for name in ("pass_rate", "entropy", "log_w_var", "log_s_var", "flip_rate")}
    curve |= {name: [max(u[name] for u in batch) for batch in updates]
              for name in ("log_w_largest", "w_negative")}
    curve["step"] = [mean([u["step"] for u in batch]) for batch in updates]
    curve["clipped"] = [r["clip_low"] + r["clip_high"] for r in records]
    curve["grad_norm"] = [max(m["grad_norm"] for m in r["minibatches"]) for r in records]
    return c | {"rate": lr, "cold_start": cold, "collapsed_at": collapsed_at(curve["pass_rate"]),
                "last": mean(curve["pass_rate"][-PATIENCE:]), "held_out": held_out,
                "seconds": time.perf_counter() - began,
                "flips_per_layer": [mean(layer) for layer in
                                    zip(*(r["flip_rate_per_layer"] for r in records))],
                "curve": {name: [float(f"{x:.4g}") for x in values]
                          for name, values in curve.items()}}


def cold_start(c):
    """The seed of the cold start that a run begins with."""
    return c["seed"] % (COLD_STARTS if c["arm"] in JUDGED and c["optim"] == "adamw" else 4)


def collapsed_at(pass_rates):
    """The first of PATIENCE successive batches whose pass rate is below half of the best so far.
    Counted from 1; None if there is none."""
    best = running = 0
    for step, rate in enumerate(pass_rates, 1):
        best = max(best, rate)
        running = running + 1 if rate < best / 2 else 0
        if running == PATIENCE:
            return step - PATIENCE + 1
    return None


def key(c):
    return tuple(c[name] for name in cell(0, 0))


def setting(c):
    """What the runs of a table row have in common besides the arm and the policy."""
    return c["optim"], c["lr"], c["minibatches"], c["answers"]


def mean(values):
    return sum(values) / len(values)


# ---------------------------------------------------------------------------- tables and verdicts

def interval(k, n):
    """Clopper and Pearson's 95 % interval for k of n."""
    found = stats.binomtest(k, n).proportion_ci(method="exact")
    return float(found.low), float(found.high)


def table(runs):
    """One row per arm and setting: the number of collapses with its interval, the values of all
    seeds, and means and extremes over the seeds."""
    names = [name for name in cell(0, 0) if name != "seed"]
    rows = {}
    for r in runs:
        rows.setdefault(tuple(r[name] for name in names), []).append(r)
    result = []
    for name, rs in rows.items():
        rs.sort(key=lambda r: r["seed"])
        collapsed = sum(r["collapsed_at"] is not None for r in rs)
        row = dict(zip(names, name), runs=len(rs), collapsed=collapsed,
                   interval=interval(collapsed, len(rs)))
        row |= {x: [r[x] for r in rs] for x in ("seed", "last", "held_out")}
        row |= {"rate": mean([r["rate"] for r in rs]),
                "entropy": mean([r["curve"]["entropy"][-1] for r in rs]),
                "flips_per_layer": [mean(layer) for layer in
                                    zip(*(r["flips_per_layer"] for r in rs))]}
        row |= {x: torch.tensor([r["curve"][x] for r in rs]).median().item()
                for x in ("log_w_var", "log_s_var", "step")}
        row |= {x: max(max(r["curve"][x]) for r in rs)
                for x in ("log_w_largest", "w_negative", "grad_norm")}
        result.append(row)
    return result


def show(rows):
    print(f"{'policy':7}{'optim':6}{'rate':>8}{'mb':>3} {'answers':8}{'arm':19}{'collapsed':>9}  "
          f"{'95 %':11}{'last':>6}{'held out':>9}{'flips':>7}{'var log w':>10}{'log s':>9}"
          f"{'max|log w|':>11}{'max w,A<0':>10}{'max |g|':>9}{'entropy':>8}{'step':>7}")
    for r in rows:
        low, high = r["interval"]
        print(f"{r['policy']:7}{r['optim']:6}{r['rate']:8.1e}{r['minibatches']:3} "
              f"{r['answers']:8}{ARMS[r['arm']][0]:19}{r['collapsed']:4} of {r['runs']}  "
              f"{low:.2f} - {high:.2f}{mean(r['last']):6.2f}{mean(r['held_out']):9.2f}"
              f"{mean(r['flips_per_layer']):7.1%}{r['log_w_var']:10.1e}{r['log_s_var']:9.1e}"
              f"{r['log_w_largest']:11.2f}{r['w_negative']:10.3g}{r['grad_norm']:9.3g}"
              f"{r['entropy']:8.3f}{r['step']:7.3f}")


def gains(rows):
    """The differences that the three sentences are judged by, as {sentence: one per cold start}."""
    ends = {(r["policy"], r["arm"]): dict(zip(r["seed"], r["held_out"])) for r in rows}

    def gain(arm, policy="top2"):
        return claim.paired(ends[policy, arm], ends[policy, "grpo"])

    moe = gain("gspo")
    dense = gain("gspo", "dense")
    return {"GSPO prevents it": list(moe.values()),
            "replay repairs it": list(gain("grpo_replay").values()),
            "flips cause it": claim.differences(moe, dense)}


RATES = (LOWER, 5e-4, LR)                # of GRPO and GSPO, in the main setting otherwise


def over_rates(rows):
    """Held-out pass@1 of GSPO minus that of GRPO, averaged over the learning rates; one value per
    cold start that has all of them."""
    ends = {(r["arm"], r["lr"]): dict(zip(r["seed"], r["held_out"])) for r in rows
            if (r["policy"], setting(r)) == ("top2", setting(cell(0, 0, lr=r["lr"])))}
    seeds = set.intersection(*(set(ends[arm, lr]) for arm in ("grpo", "gspo") for lr in RATES))
    return [mean([ends["gspo", lr][seed] - ends["grpo", lr][seed] for lr in RATES])
            for seed in sorted(seeds)]


def rounded(p):
    return None if p is None else float(f"{p:.3g}")


SHORT = {"GSPO prevents it": "", "replay repairs it": "replay: ", "flips cause it": "flips: "}
BOUNDS = {"GSPO prevents it": ((0, 1), (-1, 0)), "replay repairs it": ((0, 1), (-1, .05)),
          "flips cause it": ((0, 2), (-2, 0))}


# --------------------------------------------------------------------------------------- the runs

def read():
    return [json.loads(text) for text in RUNS.read_text().splitlines()] if RUNS.exists() else []


def run_all(cells):
    """Make the runs that are missing in the file of finished runs, and append each as a line."""
    RUNS.parent.mkdir(exist_ok=True)
    for i, c in enumerate(cells, 1):
        done = read()
        if key(c) not in map(key, done):
            r = one_run(c, done)
            with open(RUNS, "a") as f:
                f.write(json.dumps(r) + "\n")
            at = r["collapsed_at"]
            fate = "survived" if at is None else f"collapsed at batch {at}"
            print(f"run {i} of {len(cells)}: {', '.join(map(str, key(c)))}: {fate}, last "
                  f"{r['last']:.2f}, held out {r['held_out']:.2f}, w at A < 0 up to "
                  f"{max(r['curve']['w_negative']):.3g}, {r['seconds']:.0f} s", flush=True)


def write():
    """Write results/moe_stability.json from all finished runs: the row of the claim, a table, and
    every curve."""
    runs = read()
    rows = table(runs)
    main = [r for r in rows if setting(r) == setting(cell(0, 0))]
    found = gains(main)
    answers = {name: claim.verdict(values, *BOUNDS[name]) for name, values in found.items()}
    show(rows)
    name = lambda r: f"{NAMES[r['policy']]} {ARMS[r['arm']][0]}"
    shown = [f"{sentence}: {claim.number(values, '{:+.2f}')} pass@1, {answers[sentence]}"
             for sentence, values in found.items()]
    print("\n" + "\n".join(shown))
    verdict = claim.all_of(*answers.values())
    pooled = over_rates(rows)
    rates = ", ".join(f"{rate:g}" for rate in RATES)
    shown.append(f"GSPO minus GRPO, mean of the rates {rates} per cold start: "
                 f"{claim.number(pooled, '{:+.2f}')} ({len(pooled)} cold starts)")
    collapsed = [f"{name(r)} {r['collapsed']} of {r['runs']}" for r in main]
    result = {
        "claim": "GRPO collapses on a Mixture of Experts because experts flip; routing replay "
                 "repairs it; GSPO needs none",
        "source": "GSPO, arXiv 2507.18071, section 5.3",
        "reported": "GRPO without routing replay does not converge on a 48-layer MoE, GSPO does",
        "measured": "; ".join(shown) + "; collapsed: " + ", ".join(collapsed),
        "regime": "1 M parameters, 4 layers, answers of about 20 tokens, 16 rollout batches of 128 "
                  "answers, rate 6e-4, 16 mini-batches",
        "number": claim.number(found["GSPO prevents it"], "{:+.2f}", "pass@1, GSPO minus GRPO: "
                               + "; ".join(f"{short}{answers[sentence].split(' (')[0]}"
                                           for sentence, short in SHORT.items())),
        "seeds": min(map(len, found.values())), "verdict": str(verdict), "p": rounded(verdict.p),
        "figure": str(FIGURE), "command": "python experiments/moe_stability.py",
        "seconds": round(sum(r["seconds"] for r in runs)), "table": rows, "runs": runs}
    RESULT.write_text(json.dumps(result, ensure_ascii=False) + "\n")


def spike():
    """Show that one token can end a run with plain SGD and no norm clipping.

    The same run with --dual_clip 3 is identical up to that token."""
    print(f"GRPO by plain SGD, rate {SPIKE_LR}, no norm clip, 4 mini-batches, seed {SPIKE_SEED}; "
          "without and with --dual_clip 3\n")
    pair = [one_run(cell(arm, SPIKE_SEED, lr=SPIKE_LR, minibatches=4, optim="sgd"), [])["curve"]
            for arm in ("grpo", "grpo_dual")]
    widths = {"pass_rate": 10, "w_negative": 12, "grad_norm": 10}
    print(f"{'':8}{'without':^34}  {'with':^34}\nbatch   "
          + f"{'pass rate':>10}{'max w, A<0':>12}{'max |g|':>10}    " * 2)
    for i in range(BATCHES):
        cells = ["".join(f"{c[x][i]:{width}.4g}" for x, width in widths.items()) for c in pair]
        print(f"{i + 1:5}   {'    '.join(cells)}" + "    <- they differ" * (cells[0] != cells[1]))


def quick():
    """`--quick`: one seed and half as many batches, three minutes. Writes nothing."""
    cells = (cell("grpo", 0), cell("gspo", 0), cell("grpo", 0, "dense"))
    show(table([one_run(c, [], batches=8) for c in cells]))


# ------------------------------------------------------------------------------------- the figure

LINES = {"grpo": "-", "grpo_replay": ":", "grpo_dual": "--", "gspo": "-"}    # of a figure's arms
MARKERS = {"grpo": "s", "gspo": "o"}                         # the others: a mean without its seeds


def draw():
    """Draw docs/figures/moe_stability.png from results/moe_stability.json."""
    result = json.loads(RESULT.read_text())
    figure, axes = style.panels(2, 2, height=7.2, width=9)
    batches = range(1, BATCHES + 1)
    for ax, policy, lr, title in (
            (axes[0, 0], "top2", LR, "Mixture of Experts (top-2 of 8), rate 6e-4"),
            (axes[0, 1], "dense", LR, "Dense policy of equal active size, rate 6e-4"),
            (axes[1, 0], "top2", LOWER, "Mixture of Experts, rate 3e-4")):
        for arm in LINES:
            runs = [r for r in result["runs"] if key(r) == key(cell(arm, r["seed"], policy, lr))]
            if len(runs) > 1:
                collapsed = sum(r["collapsed_at"] is not None for r in runs)
                name = f"{ARMS[arm][0]}: {collapsed} of {len(runs)} collapsed"
                curves = [r["curve"]["pass_rate"] for r in runs]
                if arm not in MARKERS:
                    curves = [[sum(column) / len(runs) for column in zip(*curves)]]
                style.band(ax, batches, curves, name, style.colour(arm.split("_")[0]),
                           MARKERS.get(arm), LINES[arm])
        style.label(ax, title, "rollout batch (16 updates each)", "pass rate (mean and seeds)")
        ax.set_ylim(0, 1)
        ax.legend()
    ax = axes[1, 1]
    for r in result["runs"]:
        if (r["optim"], r["lr"], r["seed"]) == ("sgd", SPIKE_LR, SPIKE_SEED):
            ax.plot(batches, r["curve"]["pass_rate"], LINES[r["arm"]], color=style.ORANGE,
                    label=ARMS[r["arm"]][0])
            if r["arm"] == "grpo":
                largest = r["curve"]["w_negative"]
                at = max(range(BATCHES), key=largest.__getitem__)    # the token that kills it
                ax.annotate(f"a token with\nw = {largest[at]:.3g}, A < 0",
                            (at + 1, r["curve"]["pass_rate"][at]), xytext=(0.02, 0.2),
                            textcoords="axes fraction", fontsize=8.5,
                            arrowprops=dict(arrowstyle="->", color="0.4"))
    style.label(ax, f"One token: SGD without a norm clip, seed {SPIKE_SEED}",
                "rollout batch (4 updates each)", "pass rate")
    ax.set_ylim(0, 1)
    ax.legend()
    style.save(figure, FIGURE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, eight batches; no result")
    parser.add_argument("--spike", action="store_true", help="one token kills a run")
    parser.add_argument("--draw", action="store_true", help="make no runs: result and figure")
    options = parser.parse_args()
    if options.quick:
        quick()
    elif options.spike:
        spike()
    else:
        if not options.draw:
            run_all(list(grid()))
        write()
        draw()
