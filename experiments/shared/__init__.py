"""What experiments/*.py share, and none of which is an experiment itself.

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
