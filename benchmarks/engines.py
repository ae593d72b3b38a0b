"""Engines as samplers, on a CPU: does a run learn, do their log-probs follow the policy, how fast
are they?

    python benchmarks/engines.py                          # -> results/engines.json; an hour
    python benchmarks/engines.py --only speed             # one part; the others stay as they are

in an environment with vLLM (tests/requirements-vllm.txt), after `python tests/make_smollm2.py`.

learned      train.py on SmolLM2 with each engine: held out before and after
differences  the largest difference between the log-probs that an engine recorded and those of the
             policy, as loaded and after each of ten AdamW updates
fault        what the run says after an update whose transfer leaves out the tied LM head
speed        tokens per processor second of one thread, beside the built-in sampler, in turns, so
             that other work on the machine counts less
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = "1"          # of train.py, too; read when torch is loaded
import torch  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from make_max_data import SHOTS, make_max_data  # noqa: E402
from memory import write_json  # noqa: E402
from plumbing.data.running_sum import builtin_tokenizer  # noqa: E402
from plumbing.engines import vllm  # noqa: E402
from plumbing.model.adapters import add_adapters  # noqa: E402
from plumbing.model.cold_start import tiny_config  # noqa: E402
from plumbing.model.policy import load_policy  # noqa: E402
from plumbing.run.arguments import parse  # noqa: E402
from plumbing.speed.fast import FastSampler  # noqa: E402
from moe import TinyMoE  # noqa: E402
from rollout import response_logp  # noqa: E402

SMOLLM2 = "checkpoints/SmolLM2-135M-Instruct"
FEW_SHOT = "".join(f"max({a},{b})={max(a, b)}\n" for a, b in SHOTS)
SAMPLERS = {"vllm": vllm.VllmSampler}
LEARN = (f"--model_name_or_path {SMOLLM2} --no_chat_template --verifier exact "
         "--max_completion_length 5 --learning_rate 1.5e-5 --epsilon 0.03 --epsilon_high 0.04 "
         "--lr_scheduler_type constant_with_warmup --prompts_per_step 16 --steps_per_generation 4 "
         "--steps 10 --eval_prompts 64 --eval_samples 2 --device cpu").split()
CASES = {  # policy: (rate of the updates, prompts, tokens of a response)
    "SmolLM2": (1.5e-5, ["max(12,44)="], 8),
    "SmolLM2 with LoRA": (1e-3, ["max(12,44)="], 8),
    "tiny MoE": (1e-3, ["3+8+5+9=", "1+1="], 24)}
SPEED = {  # name: (policy, prompts, group size, tokens of a response)
    "SmolLM2, 2 x 8 responses of 16": (
        "SmolLM2", ["Tell me about the sea.\n", "How do I bake bread?\n"], 8, 16),
    "tiny MoE, 8 x 8 responses of 24": (
        "tiny MoE", [f"{a}+{b}+3+5+7=" for a in (1, 2) for b in (1, 3, 5, 7)], 8, 24)}


def policy_of(name):
    """(policy, tokenizer) in float32; the tiny MoE has random weights and heads of width 32."""
    torch.manual_seed(0)
    if name == "tiny MoE":
        tokenizer = builtin_tokenizer()
        return TinyMoE(tiny_config(parse(["--hidden_size", "128"]), tokenizer)).eval(), tokenizer
    args = parse(["--model_name_or_path", SMOLLM2, "--use_peft", "--max_completion_length", "64"])
    policy, tokenizer = load_policy(args, None, torch.device("cpu"))
    return (add_adapters(policy, args) if "LoRA" in name else policy), tokenizer


def difference(policy, rollout, temperature):
    """The largest difference of a log-prob, in nats."""
    own = response_logp(policy, rollout, temperature, entropy=False).logp           # [B, T]
    return (own - rollout.sampler_logp)[rollout.mask].abs().max().item()


def update(policy, optimizer, rollout, temperature):
    """Half of the responses become more likely, half less."""
    sign = torch.tensor([1.0, -1.0]).repeat(len(rollout.mask) // 2)[:, None]        # [B, 1]
    optimizer.zero_grad()
    (response_logp(policy, rollout, temperature).logp * sign).mean().backward()
    optimizer.step()


def differences(engine, name, updates=10, temperature=0.8):
    """The difference as loaded, and after each update."""
    rate, prompts, tokens = CASES[name]
    policy, tokenizer = policy_of(name)
    sampler = SAMPLERS[engine](policy, tokenizer, tokens, temperature)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=rate)
    found = []
    moved = []
    for _ in range(updates + 1):
        rollout = sampler.sample(prompts, 8)
        found.append(difference(policy, rollout, temperature))
        update(policy, optimizer, rollout, temperature)
        moved.append(difference(policy, rollout, temperature))
    return {"loaded": found[0], "after": found[1:], "moved": moved[:-1]}


class HeadLeftOut:
    """A policy whose state_dict() has no tied LM head, as named_parameters() has none."""

    def __init__(self, policy):
        self.policy = policy
        self.save_pretrained = policy.save_pretrained

    def state_dict(self):
        return dict(self.policy.named_parameters())


def fault(temperature=0.8):
    """What --sampler vllm says after one update whose transfer leaves out the LM head."""
    rate, prompts, tokens = CASES["SmolLM2"]
    policy, tokenizer = policy_of("SmolLM2")
    sampler = vllm.VllmSampler(policy, tokenizer, tokens, temperature)
    update(policy, torch.optim.AdamW(policy.parameters(), lr=rate), sampler.sample(prompts, 8),
           temperature)
    with patch.object(vllm, "plain", HeadLeftOut):
        try:
            sampler.sample(prompts, 8)
        except ValueError as error:
            return str(error)
    raise AssertionError("the fault was not noticed")


def tokens_per_second(sampler, prompts, group_size, tokens, turn, clock=time.process_time):
    """Tokens that the sampler draws per second of the clock. tokens: of the longest response; turn:
    the seed of what is drawn."""
    uniforms = torch.rand(len(prompts) * group_size, tokens,
                          generator=torch.Generator().manual_seed(turn))            # [B, T]
    began = clock()
    rollout = sampler.sample(prompts, group_size, uniforms=uniforms)
    seconds = clock() - began
    return int(rollout.mask.sum()) / seconds


def speed(repeats):
    """{case: {sampler: median tokens per processor second}}"""
    found = {}
    for name, (policy, prompts, group_size, tokens) in SPEED.items():
        model, tokenizer = policy_of(policy)
        kinds = {"built-in": FastSampler, **SAMPLERS}
        samplers = {kind: made(model, tokenizer, tokens) for kind, made in kinds.items()}
        rates = {kind: [] for kind in kinds}
        for turn in range(repeats + 1):      # the first one warms up: vLLM compiles its sampling
            for kind, sampler in samplers.items():
                rates[kind].append(tokens_per_second(sampler, prompts, group_size, tokens, turn))
        found[name] = {kind: median(values[1:]) for kind, values in rates.items()}
        print(name, found[name], flush=True)
    return found


def learned(engine):
    """A run of train.py with this engine: what its summary and its metrics say."""
    with tempfile.TemporaryDirectory() as folder:
        train, test = make_max_data(folder)
        subprocess.run([sys.executable, str(ROOT / "train.py"), *LEARN, "--stop", "\\n",
                        "--dataset_name", str(train), "--test_dataset_name", str(test),
                        "--sampler", engine, "--output_dir", f"{folder}/run"], check=True, cwd=ROOT)
        summary = json.loads(Path(folder, "run/summary.json").read_text())
        lines = Path(folder, "run/metrics.jsonl").read_text().splitlines()
    return {"steps": summary["steps"],
            **{key: summary[key] for key in summary if key.startswith(("pass_at_1", "interval",
                                                                       "greedy"))},
            "mismatch_kl": [json.loads(line)["mismatch_kl"] for line in lines]}


def all_differences():
    return {engine: {name: differences(engine, name) for name in CASES} for engine in SAMPLERS}


PARTS = {"learned": lambda asked: {engine: learned(engine) for engine in asked.engines},
         "differences": lambda asked: all_differences(),
         "fault": lambda asked: fault(), "speed": lambda asked: speed(asked.repeats)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--engines", nargs="*", choices=SAMPLERS, default=list(SAMPLERS),
                        help="for the part `learned`")
    parser.add_argument("--repeats", type=int, default=2, help="of each measurement of speed")
    asked = parser.parse_args()
    path = ROOT / "results/engines.json"
    for part in asked.only:
        got = PARTS[part](asked)
        print(part, json.dumps(got), flush=True)
        found = json.loads(path.read_text()) if path.is_file() else {}
        got = found.get(part, {}) | got if part == "learned" else got
        write_json(path, {name: (found | {part: got})[name] for name in PARTS
                          if name in {*found, part}})
    vllm.close_engine()
