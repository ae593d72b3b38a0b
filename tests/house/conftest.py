"""The house: tests that documents, figures and code agree. They are a separate group because they
also fail on a correct change whose documents are not up to date. `python -m pytest` leaves them
out; `python -m pytest tests/house` or `-m house` runs them."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
USUAL = "not slow and not checkpoint"                        # pyproject.toml's -m


def pytest_collection_modifyitems(config, items):
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.house)
    named = any("house" in str(word) for word in config.args)
    if not named and config.option.markexpr == USUAL:
        config.hook.pytest_deselected(items=ours)
        items[:] = [item for item in items if HERE not in item.path.parents]
