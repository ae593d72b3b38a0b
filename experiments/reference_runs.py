"""The two reference runs of the README, the commands that make them, the figure that shows them.

    python experiments/reference_runs.py default   python train.py, cold start included, three seeds
    python experiments/reference_runs.py smollm2   GSPO on SmolLM2-135M-Instruct, four-shot
                                                   max(a,b)= (tests/make_smollm2.py first)
    python experiments/reference_runs.py lora      the same by LoRA; then three batches of both
                                                   ways: seconds and peak memory
    python experiments/reference_runs.py --draw    the figure, from results/reference_runs.json

Every run is the real script in a process of its own, its cold start made anew. What is promised of
them (the project's targets): default: held-out pass@1 from about 0.5 to at least 0.95, greedy at
least 0.99, mean of three seeds, within 90 s on two cores; smollm2: from about 0.5 to at least 0.9
within 20 rollout batches and five minutes on two cores.
"""

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from plumbing.run.checkpoints import write_text  # noqa: E402
from tools.style import BLUE, GREY, band, label, panels, save  # noqa: E402

RESULT = Path("results/reference_runs.json")
FIGURE = Path("docs/figures/reference_runs.png")
SMOLLM2 = ("python train.py --model_name_or_path checkpoints/SmolLM2-135M-Instruct "
           "--dataset_name data/max_of_two_train.jsonl "
           "--test_dataset_name data/max_of_two_test.jsonl --no_chat_template --stop '\\n' "
           "--verifier exact --max_completion_length 5 --learning_rate 1.5e-5 "
           "--lr_scheduler_type constant_with_warmup --prompts_per_step 16 "
           "--steps_per_generation 4 --steps 20 --eval_prompts 128")
LORA = SMOLLM2.replace("--learning_rate 1.5e-5",
                       "--learning_rate 1e-4 --use_peft --lora_r 16 --lora_alpha 32")
CURVES = ("pass_rate", "clip_low", "clip_high", "perplexity_new", "seconds_rollout",
          "seconds_update")


def run(command):
    """Run train.py once -> its summary, the metrics of every rollout batch, and of the whole
    process the seconds, the processor seconds (which depend less on what else runs) and the peak
    resident memory."""
    folder = Path("runs/reference")
    shutil.rmtree(folder, ignore_errors=True)
    began = time.perf_counter()
    words = [sys.executable, *shlex.split(command)[1:], "--output_dir", str(folder)]
    process = subprocess.Popen(words)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command}: exit {os.waitstatus_to_exitcode(status)}")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {**json.loads((folder / "summary.json").read_text()),
            "whole_process_seconds": round(time.perf_counter() - began, 1),
            "processor_seconds": round(used.ru_utime + used.ru_stime, 1),
            "peak_mb": round(used.ru_maxrss / 1024),
            "curve": {key: [r[key] for r in records] for key in CURVES}}


def draw(results):
    figure, axes = panels(1, 2, sharey=True)
    for ax, name in zip(axes, ("default", "smollm2")):
        runs = results[name]["runs"]
        n = len(runs[0]["curve"]["pass_rate"])
        band(ax, range(1, n + 1), [r["curve"]["pass_rate"] for r in runs], "rollouts", BLUE)
        for when, x in (("before", 0), ("after", n + 1)):
            values = [r[f"pass_at_1_{when}"] for r in runs]
            ax.plot([x] * len(values), values, "o", color=GREY, markersize=5,
                    label="held out" if x == 0 else None)
        seconds = sum(r["seconds"] for r in runs) / len(runs)
        label(ax, f"{results[name]['title']}, {seconds:.0f} s", "rollout batch",
              "pass@1" if name == "default" else "")
        ax.legend(loc="lower right")
    axes[0].set_ylim(0, 1.02)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", nargs="?", choices=["default", "smollm2", "lora"])
    parser.add_argument("--draw", action="store_true")
    args = parser.parse_args()
    os.chdir(ROOT)
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    python = f"Python {platform.python_version()}"
    machine = f"{os.cpu_count()} CPU cores, {platform.machine()}, {python}"
    if args.which == "default":
        shutil.rmtree("runs/cold_start", ignore_errors=True)
        results["default"] = {
            "title": "tiny MoE, three seeds", "command": "python train.py --seed {0,1,2}",
            "machine": machine,
            "runs": [run(f"python train.py --seed {seed}") for seed in range(3)]}
    if args.which in ("smollm2", "lora"):
        subprocess.run([sys.executable, "tests/make_max_data.py", "data"], check=True)
    if args.which == "smollm2":
        results["smollm2"] = {
            "title": "SmolLM2-135M, max(a,b)=", "command": SMOLLM2, "machine": machine,
            "runs": [run(f"{SMOLLM2} --seed {seed}") for seed in range(3)]}
    if args.which == "lora":
        short = " --steps 3 --eval_samples 0"
        beside = {name: run(c + short) for name, c in (("lora", LORA), ("full", SMOLLM2))}
        results["lora"] = {"command": LORA, "machine": machine, "beside": beside,
                           "runs": [run(LORA)]}
    if args.which:
        RESULT.parent.mkdir(exist_ok=True)
        write_text(RESULT, json.dumps(results))
    if args.which != "lora" and {"default", "smollm2"} <= set(results):
        save(draw(results), FIGURE)
