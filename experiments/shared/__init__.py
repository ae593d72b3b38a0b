"""What experiments/*.py share, and none of which is an experiment itself.

    claim.py        rules of evidence, command line and result file of a claim
    maps.py         claims that are measured on a grid of training runs
    drift.py        policies that have drifted from the one that sampled
    run_claims.py   `python eval.py claims`: runs the experiments and tabulates them
    which.py        the text of docs/which.md, for experiments/readme.py
    sentences.py    sentences of the sources that existing runs speak to, for docs/claims.md

`python experiments/NAME.py` has only experiments/ on its path, a test only the root. Importing this
package adds what is missing: the root, where train.py and plumbing/ are, and experiments/ itself.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
if str(ROOT / "experiments") not in sys.path:
    sys.path.append(str(ROOT / "experiments"))
