"""The measured parts of README.md, from results/*.json: `python experiments/readme.py` rewrites what stands between its markers.

`<!-- claims -->` … `<!-- /claims -->` and so on; tests/test_readme.py keeps README and results equal.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from plumbing.memory import table                                                             # noqa: E402

mean = lambda values: sum(values) / len(values)


def load(name):
    path = ROOT / "results" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def default_run():
    runs = load("reference_runs")["default"]["runs"]
    column = lambda key: mean([r[key] for r in runs])
    rows = "\n".join(f"| {i} | {r['pass_at_1_before']:.3f} | {r['pass_at_1_after']:.3f} [{r['interval_after'][0]:.3f}, "
                     f"{r['interval_after'][1]:.3f}] | {r['greedy_before']:.3f} | {r['greedy_after']:.3f} | {r['seconds']:.0f} s |"
                     for i, r in enumerate(runs))
    return ("| seed | held-out pass@1 before | after [95 %] | greedy before | after | time, cold start included |\n"
            "| --- | --- | --- | --- | --- | --- |\n" + rows
            + f"\n| mean | {column('pass_at_1_before'):.3f} | **{column('pass_at_1_after'):.3f}** | {column('greedy_before'):.3f} | "
            f"**{column('greedy_after'):.3f}** | **{column('seconds'):.0f} s** |\n\n({load('reference_runs')['default']['machine']}; "
            "256 queries × 4 samples; `python experiments/reference_runs.py default`)")


def smollm2():
    entry = load("reference_runs")["smollm2"]
    r = entry["runs"][0]
    low, high = r["interval_after"]
    return (f"Held-out pass@1 {r['pass_at_1_before']:.3f} → **{r['pass_at_1_after']:.3f}** [{low:.3f}, {high:.3f}] "
            f"(greedy {r['greedy_before']:.3f} → {r['greedy_after']:.3f}) in {r['steps']} rollout batches, {r['seconds']:.0f} s with both "
            f"evaluations on {entry['machine']}; the curve is in `results/reference_runs.json` (`python experiments/reference_runs.py smollm2`).\n\n"
            "![pass rate over rollout batches of the two reference runs](docs/figures/reference_runs.png)")


def claims():
    cell = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
    rows = load("claims")
    return ("| claim | reported | measured here | seeds | verdict |\n| --- | --- | --- | --- | --- |\n"
            + "\n".join(f"| {cell(r['claim'])} ({cell(r['source'])}) | {cell(r['reported'])} | {cell(r['measured'])}; "
                        f"spread {cell(r['spread'])} | {r['seeds']} | [{cell(r['verdict'])}]({r['figure']}) |" for r in rows))


def figures():
    rows = load("claims")
    return "\n\n".join(f"![{r['claim']}]({r['figure']})\n`{r['command']}`" for r in rows if (ROOT / r["figure"]).is_file())


TARGETS = {"tiny_moe": 2, "tiny_moe_sampler": 2.5, "default_run": 3, "smollm2_max": 8, "smollm2": 3}


def speed():
    results = load("versus_trl")["cpu"]
    what = {"tiny_moe": "tiny MoE, 256 answers × 24 tokens, old log-probs recomputed", "tiny_moe_sampler": "the same, log-probs of sampling reused",
            "tiny_moe_long": "tiny MoE, 256 × 128", "tiny_dense": "tiny dense, 256 × 24", "default_run": "the default run, natural ends",
            "smollm2_max": "SmolLM2-135M, 4-shot `max`, 64 answers", "smollm2": "SmolLM2-135M, 64 prompt tokens, 64 new, G 8"}
    rows = [f"| {what[name]} | {r['trl']['total']['median']:.2f} | {r['ours']['total']['median']:.2f} | **{r['ratio_median']:.2f}** "
            f"[{r['ratio']['min']:.2f}, {r['ratio']['max']:.2f}] | {TARGETS.get(name, '–')} | {r['trl']['peak_mb']:.0f} / {r['ours']['peak_mb']:.0f} | "
            + " / ".join(f"{r[side]['share_of_limit']:.0%}" if "share_of_limit" in r[side] else "–" for side in ("trl", "ours")) + " |"
            for name, r in results.items() if name in what]
    machine = results["machine"]
    return ("| same work, same process, in turns | TRL s | ours s | TRL ÷ ours, median [min, max] | target | peak MB TRL / ours | "
            "share of matmul limit |\n| --- | --- | --- | --- | --- | --- | --- |\n" + "\n".join(rows)
            + f"\n\n{machine['threads']} threads, TRL 1.16.0, torch {machine['torch']}, limit {machine['limit_gflops']:.0f} GFLOP/s; "
            "`python benchmarks/versus_trl.py`. On a GPU: not measured.\n\n"
            "| one technique off: seconds of our batch relative to all on | the default run | SmolLM2, 4-shot `max` |\n| --- | --- | --- |\n"
            + "\n".join(f"| {name} | {ratio:.2f} | {results['smollm2_max']['one_off'][name]:.2f} |"
                        for name, ratio in results["default_run"]["one_off"].items()))


def memory():
    found = load("memory")
    cell = lambda sides, name, i: f"{sides[name][i]:,}" if name in sides else "–"
    rows = "\n".join(f"| {int(T):,} | " + " | ".join(cell(sides, name, i) for i in (0, 1) for name in ("ours", "at once", "trl")) + " |"
                     for T, sides in found["vocabulary"].items())
    checks = "; ".join(f"{name} {r['estimated_mb'] / r['measured_mb']:.2f}" for name, r in found["estimate"].items())
    return ("| response tokens | log-probs: ours | all logits at once | TRL | update: ours | all logits at once | TRL |\n"
            "| --- | --- | --- | --- | --- | --- | --- |\n" + rows
            + "\n\nPeak MB beyond the weights, one response, vocabulary 151,936, a backbone of width 64 (`python benchmarks/memory.py`).\n\n"
            + "What fits on a GPU, computed by `plumbing/memory.py` (`python -m plumbing.memory` prints it):\n\n```\n" + table() + "\n```\n\n"
            + f"The estimate divided by the measured peak of an update on a CPU: {checks}.")


def scaling():
    found = load("scaling")
    rows = "\n".join(f"| {name} | {', '.join(f'{x:,}' for x in r['sizes'])} | {r['slope_seconds']:.2f} | {r['slope_last']:.2f} | "
                     f"{r['slope_memory']:.2f} | {r['why']} |" for name, r in found["growth"].items())
    costs = ", ".join(f"{name} {r['relative']:.2f}" for name, r in found["algorithms"].items())
    return ("| what grows | sizes | slope of seconds | between the last two | of memory | why |\n| --- | --- | --- | --- | --- | --- |\n" + rows
            + "\n\nLog-log slopes of a rollout batch of the tiny MoE (`python benchmarks/scaling.py`). "
            f"Seconds of a rollout batch relative to GSPO's: {costs}.")


def file_map(text):
    """The line counts of the file map."""
    def count(match):
        files = re.findall(r"`([\w/]+\.py)`", match[2])
        return f"| {match[1]} |{match[2]}| {sum(len((ROOT / f).read_text().splitlines()) for f in files)} |"
    head, body = text.split("| read | file |", 1)
    table, rest = body.split("\n\n", 1)
    return head + "| read | file |" + re.sub(r"^\| (\d) \|([^|]*)\|[^|]*\|", count, table, flags=re.M) + "\n\n" + rest


BLOCKS = {"default run": default_run, "smollm2": smollm2, "claims": claims, "figures": figures, "speed": speed, "memory": memory,
          "scaling": scaling}


def build(text):
    for name, block in BLOCKS.items():
        pattern = re.compile(rf"<!-- {name} -->.*?<!-- /{name} -->", re.S)
        assert pattern.search(text), f"README.md has no <!-- {name} --> … <!-- /{name} -->"
        text = pattern.sub(lambda _: f"<!-- {name} -->\n{block()}\n<!-- /{name} -->", text)
    return file_map(text)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(build(readme.read_text()))
