"""`eval.py view`: shows the tokens of a run and which of them the algorithm trains on.

train.py saves the tokens of one group per rollout batch in RUN/tokens.jsonl (--save_tokens).
`python eval.py view RUN [RUN2]` writes one HTML file that needs no network: the files of
tools/viewer/ and the data of the runs.

The responses of a model are untrusted. They are embedded as JSON in which every `<` is escaped, the
script shows them only by textContent, and the page's Content-Security-Policy allows only this
script (by its hash) and no network access.
"""

import base64
import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from losses import OBJECTIVES
from plumbing.refusal import Refusal, refuse_os_errors
from session.arguments import ALGORITHMS, read_run_config
from tools.dashboard import read_lines, read_metrics

FILES = ("index.html", "style.css", "losses.js", "group.js", "page.js", "drag.js", "challenges.js",
         "fan.js")                                              # of viewer/
LARGEST_PAGE = 3_000_000         # bytes; for longer runs, evenly spaced batches are left out
KEPT_ARGUMENTS = ("algorithm", "epsilon", "epsilon_high", "reduction", "dual_clip",
                  "off_policy_mask", "max_completion_length")
CURVES = ("pass_rate", "clip_low", "clip_high", "log_s_var", "epsilon_over_std", "flip_rate")


# -------------------------------------------------------------------------------- the page

def read_run(folder):
    """The data of a run for the page. Raises Refusal if the run saved no tokens."""
    records = read_metrics(folder)
    curves = [{name: m.get(name) for name in ("step", *CURVES)} for m in records]
    file = folder / "tokens.jsonl"
    if not file.is_file():
        raise Refusal(f"{folder} has no tokens.jsonl: train with --save_tokens, which is on by "
                      "default for the tiny MoE")
    groups = read_lines(file)
    try:
        arguments = read_run_config(folder)["resolved"]
        objective = ALGORITHMS[arguments["algorithm"]]["objective"]
    except KeyError:
        raise Refusal(f"{folder}/config.json does not name the algorithm of the run") from None
    kept = {name: arguments.get(name) for name in KEPT_ARGUMENTS}
    return {"name": str(folder), "objective": objective, **kept, "curves": curves,
            "groups": groups}


def drop_batches(run, room):
    """The run with as many evenly spaced batches as fit into `room` bytes, at least 2."""
    size = sum(len(encode_json(group)) for group in run["groups"])
    steps = sorted({group["step"] for group in run["groups"]})
    count = max(2, min(len(steps), int(len(steps) * room / size)))
    kept = {steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)}
    return run | {"groups": [group for group in run["groups"] if group["step"] in kept]}


def encode_json(data):
    """JSON that is safe inside a <script>: it contains no `<`, so no end tag and no comment. NaN
    becomes null."""
    finite = json.loads(json.dumps(data), parse_constant=lambda name: None)
    return json.dumps(finite, separators=(",", ":")).replace("<", "\\u003c")


def make_page(runs, largest=None, folded=False):
    """The HTML file for one or two runs, as read_run returns them, of about `largest` bytes;
    None: LARGEST_PAGE. folded: the runs are shown when their title is clicked."""
    viewer = Path(__file__).parent / "viewer"
    html, style, *scripts = ((viewer / file).read_text(encoding="utf-8") for file in FILES)
    script = "\n".join(scripts)
    curves = sum(len(encode_json(run["curves"])) for run in runs)
    room = ((largest or LARGEST_PAGE) - len(html + style + script) - curves - 20_000) / len(runs)
    data = encode_json({"objectives": {name: asdict(row) for name, row in OBJECTIVES.items()},
                        "runs": [drop_batches(run, room) for run in runs]})
    allow = f"script-src {digest(script)}; style-src {digest(style)}"
    policy = f"default-src 'none'; {allow}; base-uri 'none'; form-action 'none'"
    places = {"@POLICY@": policy, "@STYLE@": style, "@SCRIPT@": script,
              "@OPEN@": "" if folded else "open", "@DATA@": data}
    for place, text in places.items():                       # the untrusted text last
        html = html.replace(place, text)
    return html


def digest(text):
    """The source expression by which a Content-Security-Policy allows an inline element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@refuse_os_errors()
def write_page(folders, output=None, largest=None):
    """The page of one run, or of two side by side; view.html in the first one's folder unless
    `output` names a file. largest: in bytes, see make_page. Returns its path."""
    if not 1 <= len(folders) <= 2:
        raise Refusal(f"{len(folders)} runs: give one run, or two to compare")
    output = Path(output) if output else Path(folders[0]) / "view.html"
    html = make_page([read_run(Path(folder)) for folder in folders], largest)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(html, encoding="utf-8")
    return output
