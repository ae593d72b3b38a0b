"""The house: tests that documents, figures and code agree. They are a separate group because they
also fail on a correct change whose documents are not up to date. `python -m pytest` leaves them
out; `python -m pytest tests/house` or `-m house` runs them."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
USUAL = "not slow and not checkpoint"                        # pyproject.toml's -m

# What to do when a test fails, by the file of the test.
REMEDIES = {
    "test_readme.py": "correct the document that says otherwise",
    "test_documents.py": "correct the document, or its table, that the code contradicts",
    "test_reading.py": "correct docs/reading.md or the patch in docs/exercises/ by hand: "
                       "git apply --reject shows where it no longer fits",
    "test_evidence.py": "`python experiments/run.py` writes results/numbers.json from the runs, "
                        "`python experiments/fill.py` the pages",
    "test_notebook.py": "`python notebooks/make_gspo.py` writes gspo.ipynb from gspo.py",
    "test_house.py": "imports must point downwards: see .github/CONTRIBUTING.md",
    "test_exact.py": "the sampler is no longer exact; if this is intended, correct the test",
}


def pytest_collection_modifyitems(config, items):
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.house)
    named = any("house" in str(word) for word in config.args) or config.option.keyword
    if not named and config.option.markexpr == USUAL:
        config.hook.pytest_deselected(items=ours)
        items[:] = [item for item in items if HERE not in item.path.parents]


def pytest_terminal_summary(terminalreporter):
    failed = {report.nodeid.split("::")[0].split("/")[-1]
              for report in terminalreporter.stats.get("failed", ())
              if "tests/house/" in report.nodeid}
    for name in sorted(failed):
        remedy = REMEDIES.get(name, "compares documents with the code")
        terminalreporter.write_line(f"{name}: {remedy}")
