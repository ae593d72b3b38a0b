"""`eval.py dashboard`: the curves of runs. python -m pytest tests/tools/test_dashboard.py"""

import eval
from tiny_run import jsonl
from tools import dashboard


def test_dashboard_draws_a_panel_per_metric_and_a_line_per_run(tmp_path):
    """Metrics that are null leave an empty panel; a logarithmic axis survives zeros; a reward that
    is the pass rate is drawn once."""
    whole = [dict.fromkeys(dashboard.CURVES) | dict(step=i, reward=i / 4, grad_norm=norm)
             for i, norm in enumerate([0.0, .1, 0.0, .01])]
    figure = dashboard.draw({"run": whole, "other": whole[:1]})
    figure.canvas.draw()
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert tuple(panels) == dashboard.CURVES[:-1]
    same = dashboard.draw({"run": [record | {"pass_rate": record["reward"]} for record in whole]})
    assert [axes.get_title(loc="left") for axes in same.axes] == [*dashboard.CURVES[1:]]
    first, second = panels["reward"].get_lines()
    assert first.get_xydata().tolist() == [[0, 0], [1, .25], [2, .5], [3, .75]]
    assert second.get_xydata().tolist() == [[0, 0]]
    assert panels["grad_norm"].get_yscale() == "log" and panels["reward"].get_yscale() == "linear"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["run", "other"]
    (tmp_path / "run").mkdir()
    jsonl(tmp_path / "run/metrics.jsonl", whole)
    eval.main(["dashboard", str(tmp_path / "run")])
    assert (tmp_path / "run/dashboard.png").read_bytes()[:4] == b"\x89PNG"
