"""What is exact in this implementation and need not be in another: correct the test if it is meant
to change. python -m pytest tests/house/test_exact.py"""

import json
import math
import re
from pathlib import Path

import torch
from documents import DOCUMENTS

from rollout import draw
from session.screen import ROUNDING

RESULTS = Path(__file__).resolve().parents[2] / "experiments/results"


def test_the_inverse_cdf_gives_every_token_its_share_of_the_quantiles():
    logits, n = torch.tensor([2.0, 0.0, -1.0, -30.0, 1.0]), 100_000
    grid = (torch.arange(n) + 0.5) / n         # every quantile once: exact to 1e-5
    counts = torch.bincount(draw(logits.expand(n, -1), grid), minlength=5) / n
    assert torch.allclose(counts, logits.softmax(-1), atol=2e-5)


def test_the_rounding_of_log_s_that_a_run_is_warned_of_is_the_measured_one():
    """Over lengths, times √L, within a sixth: the part that averages out."""
    read = lambda name: json.loads((RESULTS / name).read_text(encoding="utf-8"))    # noqa: E731
    grid = read("bfloat16.json")["weights"]["grid"]
    measured = {"TF32": read("cuda_graphs.json")["tf32"], **{
        dtype: {L: x["formats"][dtype]["arithmetic"] for L, x in grid.items()}
        for dtype in ("bfloat16", "float16")}}
    for dtype, errors in measured.items():
        for L, error in errors.items():
            assert abs(error * math.sqrt(int(L)) / ROUNDING[dtype][0] - 1) < 1 / 6, (dtype, L)


TERM = r"(?:(?:exp|log|[-\d.()/·+ ]|\de)*[\d)])"              # of digits, signs, exp and log


def test_every_equation_of_corrections_holds_to_its_printed_digits():
    found = 0
    page = DOCUMENTS["docs/corrections.md"].replace("¼", "0.25").replace("−", "-")
    for line in page.splitlines():
        for left, right in re.findall(rf"(?<!\w)({TERM})\s+= (?=({TERM}))", line):
            if left.count("(") < left.count(")"):                    # the end of p(1 - p)
                continue
            one, other = (eval(re.sub(r"log ([\d.]+)", r"log(\1)", term).replace("·", "*"), {
                "exp": math.exp, "log": math.log}) for term in (left.strip(), right.strip()))
            digits = len(right.partition(".")[2]) if re.fullmatch(r"[+\d.]+", right) else 4
            assert abs(one - other) <= .5 * 10**-digits + 1e-12, line
            found += 1
    assert found >= 12


def test_bfloat16_is_as_coarse_as_corrections_say():
    assert (torch.tensor([1 + 4e-4, 1 - 3e-4]).bfloat16() == 1).all()
    above, below = (torch.tensor(1.).bfloat16().nextafter(torch.tensor(x).bfloat16()).item()
                    for x in (2., 0.))
    assert (f"{above - 1:.4f}", f"{1 - below:.4f}") == ("0.0078", "0.0039")
    for (low, high), error in {(1, 2): "0.0039", (4, 8): "0.0156"}.items():
        x = torch.linspace(low, high, 10**5)                                         # [10**5]
        assert f"{(x.bfloat16().float() - x).abs().max():.4f}" == error
