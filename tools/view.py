"""A run under the microscope: which tokens an algorithm still pushes, on the run's own tokens.

train.py saves a group per rollout batch in RUN/tokens.jsonl (--save_tokens). `python eval.py
view RUN [RUN2]` puts what the run saved into one HTML file that needs no network: the files of
tools/viewer/ with the data between them.

A model's answers are untrusted. They enter the page as JSON in which every `<` is escaped, the
script shows them by textContent only, and the page's Content-Security-Policy runs nothing but
that script (by its hash) and loads nothing.
"""

import base64
import hashlib
import json
import math
from dataclasses import asdict
from pathlib import Path

from losses import OBJECTIVES
from plumbing.run.arguments import PRESETS
from plumbing.loop.batches import old_and_new
from plumbing.speed.cutting import cut_routes, rows_of
from plumbing.run.metrics import read_metrics
from plumbing.speed.processes import rank
from plumbing.run.folder import append
from routes import router_shift

FILES = ("index.html", "style.css", "losses.js", "group.js", "page.js")  # in tools/viewer/
LARGEST_PAGE = 3_000_000         # bytes; of longer runs fewer batches are shown, evenly spaced
KEPT_ARGUMENTS = ("algorithm", "epsilon", "epsilon_high", "reduction", "dual_clip",
                  "off_policy_mask", "max_completion_length")
CURVES = ("pass_rate", "clip_low", "clip_high", "log_s_var", "flip_rate")


# -------------------------------------------------------------------------- what a run saves

def save_tokens(args, folder, step, tokenizer, task, batch, problems, index, new):
    """Append to tokens.jsonl: of a mini-batch's groups the first one that is not dead (all A = 0).

    batch: the last mini-batch, a batches.Batch of those of the queries `problems` that `index` [q]
    names; new: its Forward under the policy after the updates. Nothing is computed again.
    """
    if not args.save_tokens or rank():
        return
    G = batch.rollout.group_size
    live = batch["advantages"].reshape(len(index), -1).ne(0).any(-1)         # [prompts]
    group = live.int().argmax().cpu()                        # the first; without any, group 0
    rows, one, more = rows_of(batch.rollout, group[None]), batch.prompts(group[None]), {}
    if task.first_error:
        problem = problems[index[group]]
        more["first_error"] = [task.first_error(text, problem) for text in one.rollout.texts]
    if one.routes is not None and new.routes is not None:
        old, now = old_and_new(one, cut_routes(new.routes, rows, batch.rollout))
        shift = router_shift(old.logits, now.logits, old.indices, one.rollout.mask)       # [G, T]
        more |= dict(old_experts=old.indices, new_experts=now.indices, router_shift=shift)
    append(folder / "tokens.jsonl", token_record(
        step, one.rollout, tokenizer, one["old_logp"], new.logp[rows], one["rewards"],
        one["advantages"], **more))


def token_record(step, rollout, tokenizer, old_logp, new_logp, rewards, advantages, *,
                 first_error=None, old_experts=None, new_experts=None, router_shift=None):
    """A line of tokens.jsonl: the G answers of one group.

    old_logp, new_logp        [G, T] under the policy before and after the batch's updates
    rewards, advantages       [G]; advantages also [G, T]
    first_error               G indices of a token, or None: the answer's first wrong step
    old_experts, new_experts  [L, G, T, K] chosen before and after the updates
    router_shift              [G, T] RSPO's γ̃

    An answer ends at its last loss token; what a tool wrote before that has mask 0. Seven digits
    behind the point are kept, far less than GSPO's band of 3e-4; what is not finite becomes null.
    """
    mask = rollout.mask.tolist()                             # [G, T]
    ends = [len(row) - row[::-1].index(True) if any(row) else 0 for row in mask]
    cut = lambda table: [row[:end] for row, end in zip(table, ends)]
    per_token = lambda x: [rounded(row) for row in cut(x.tolist())]
    experts = lambda x: [x[:, i, :end].tolist() for i, end in enumerate(ends)]
    ids, prompt = cut(rollout.response_ids.tolist()), rollout.prompt_ids[rollout.prompt_mask]
    per_answer = advantages.dim() == 1
    record = {
        "step": step, "prompt": tokenizer.decode(prompt.tolist()), "ids": ids,
        "tokens": [[tokenizer.decode([token]) for token in row] for row in ids],
        "mask": [[int(m) for m in row] for row in cut(mask)],
        "old_logp": per_token(old_logp), "new_logp": per_token(new_logp),
        "sampler_logp": per_token(rollout.sampler_logp), "rewards": rounded(rewards.tolist()),
        "advantages": rounded(advantages.tolist()) if per_answer else per_token(advantages)}
    if first_error is not None:
        record["first_error"] = first_error
    if old_experts is not None:
        record |= {"old_experts": experts(old_experts), "new_experts": experts(new_experts)}
    if router_shift is not None:
        record["router_shift"] = per_token(router_shift)
    return record


def rounded(values):
    return [round(x, 7) if math.isfinite(x) else None for x in values]


# -------------------------------------------------------------------------------- the page

def read_run(folder):
    """What the page shows of a run. Raises ValueError if it saved no tokens."""
    curves = [{name: m.get(name) for name in ("step", *CURVES)} for m in read_metrics(folder)]
    file, groups = folder / "tokens.jsonl", []
    if not file.is_file():
        raise ValueError(f"{folder} holds no tokens.jsonl: train it with --save_tokens, which is "
                         "on by default for the built-in task")
    for line in file.read_text(errors="replace").splitlines():
        try:
            groups.append(json.loads(line))
        except ValueError:                                   # was being written when the run died
            break
    if not groups:
        raise ValueError(f"{file} holds no whole line: nothing to show")
    try:
        arguments = json.loads((folder / "config.json").read_text())["arguments"]
        objective = PRESETS[arguments["algorithm"]]["objective"]
    except (OSError, ValueError, KeyError):
        raise ValueError(f"{folder}/config.json does not say which algorithm was trained") from None
    kept = {name: arguments.get(name) for name in KEPT_ARGUMENTS}
    return {"name": str(folder), "objective": objective, **kept, "curves": curves, "groups": groups}


def thinned(run, room):
    """The run with so few batches, evenly spaced, that they fit into `room` bytes (at least 2)."""
    size = sum(len(embedded(group)) for group in run["groups"])
    steps = sorted({group["step"] for group in run["groups"]})
    if size > room and len(steps) > 2:
        count = max(2, int(len(steps) * room / size))
        kept = {steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)}
        run = run | {"groups": [group for group in run["groups"] if group["step"] in kept]}
    return run


def embedded(data):
    """JSON that may stand inside a <script>: no `<`, so no end tag and no comment; NaN is null."""
    return json.dumps(finite(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def finite(x):
    if isinstance(x, dict):
        return {key: finite(value) for key, value in x.items()}
    if isinstance(x, list):
        return [finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def page(runs):
    """The whole HTML file of one or two runs as read_run gives them."""
    html, style, *scripts = ((Path(__file__).parent / "viewer" / f).read_text() for f in FILES)
    script = "\n".join(scripts)
    curves = sum(len(embedded(run["curves"])) for run in runs)
    room = (LARGEST_PAGE - len(html + style + script) - curves - 20_000) / len(runs)
    data = embedded({"objectives": {name: asdict(row) for name, row in OBJECTIVES.items()},
                     "runs": [thinned(run, room) for run in runs]})
    allow = f"script-src {digest(script)}; style-src {digest(style)}"
    policy = f"default-src 'none'; {allow}; base-uri 'none'; form-action 'none'"
    places = {"@POLICY@": policy, "@STYLE@": style, "@SCRIPT@": script, "@DATA@": data}
    for place, text in places.items():                       # the untrusted text last
        html = html.replace(place, text)
    return html


def digest(text):
    """The source expression by which a Content-Security-Policy allows an inline element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def write_page(folders, output=None):
    """The page of one run, or of two side by side; view.html in the first one's folder unless
    `output` names a file. Returns its path."""
    if not 1 <= len(folders) <= 2:
        raise ValueError(f"{len(folders)} runs: one, or two side by side")
    output = Path(output) if output else Path(folders[0]) / "view.html"
    html = page([read_run(Path(folder)) for folder in folders])
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(html)
    return output
