"""`eval.py view`: shows the tokens of a run and which of them the algorithm trains on.

train.py saves the tokens of one group per rollout batch in RUN/tokens.jsonl (--save_tokens).
`python eval.py view RUN [RUN2]` writes one HTML file that needs no network: the files of
tools/viewer/ and the data of the runs.

The responses of a model are untrusted. They are embedded as JSON in which every `<` is escaped, and
the script shows them only by textContent.
"""

import json
from dataclasses import asdict
from pathlib import Path

from losses import OBJECTIVES
from session.arguments import ALGORITHMS, read_run
from tools.dashboard import read_lines

FILES = ("index.html", "style.css", "losses.js", "group.js", "page.js", "drag.js",
         "challenges.js")                                       # of viewer/
LARGEST = 60                     # batches of a run; of longer runs, evenly spaced ones are shown
KEPT_SETTINGS = ("algorithm", "epsilon", "epsilon_high", "reduction", "dual_clip",
                 "off_policy_mask", "max_completion_length", "constants")
CURVES = ("step", "pass_rate", "clip_low", "clip_high", "log_s_var", "flip_rate", "epsilon",
          "epsilon_high")


def read_run_data(folder):
    """The data of a run for the page."""
    settings = read_run(folder)
    groups = read_lines(folder / "tokens.jsonl")
    return {"name": str(folder), "objective": ALGORITHMS[settings["algorithm"]]["objective"],
            **{name: settings.get(name) for name in KEPT_SETTINGS},
            "curves": [{name: record[name] for name in CURVES if name in record}
                       for record in read_lines(folder / "metrics.jsonl")],
            "groups": groups[::len(groups) // LARGEST + 1]}


def make_page(runs, folded=False):
    """The HTML file for one or two runs, as read_run_data returns them. folded: the tokens to drag
    come first, and the runs are shown when their title is clicked."""
    viewer = Path(__file__).parent / "viewer"
    html, style, *scripts = ((viewer / file).read_text(encoding="utf-8") for file in FILES)
    objectives = [asdict(row) | {"name": name} for name, row in OBJECTIVES.items()]
    records = json.loads(json.dumps([*objectives, *runs]), parse_constant=lambda name: None)
    data = "\n".join(map(json.dumps, records))               # NaN has become null
    places = {"@STYLE@": style, "@SCRIPT@": "\n".join(scripts), "@OPEN@": "" if folded else "open",
              "@DATA@": data.replace("<", "\\u003c")}
    for place, text in places.items():                       # the untrusted text last
        html = html.replace(place, text)
    return html


def write_page(folders, output=None):
    """The page of one run, or of two side by side; view.html in the first one's folder unless
    `output` names a file."""
    page = Path(output or Path(folders[0]) / "view.html")
    page.write_text(make_page([read_run_data(Path(folder)) for folder in folders[:2]]),
                    encoding="utf-8")
    print(f"open {page.resolve().as_uri()} in a browser")
