"""Engines as samplers, on a CPU: do their log-probs follow the policy, how fast are they, does a
run learn?

    python benchmarks/engines.py --learned runs/vllm runs/continuous      # -> results/engines.json

in an environment with vLLM (tests/requirements-vllm.txt), after `python tests/make_smollm2.py`.

Differences: the largest difference between the log-probs that an engine recorded and those of the
policy, as loaded and after each of ten AdamW updates. Fault: the same after one update whose
transfer leaves out the tied LM head. Speed: tokens per processor second of one thread, in turns, so
that other work on the machine counts less. --learned: runs of train.py with --sampler vllm and
--sampler continuous, whose evaluations are copied.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from make_max_data import SHOTS  # noqa: E402
from memory import write_json  # noqa: E402
from plumbing.data.running_sum import builtin_tokenizer  # noqa: E402
from plumbing.engines import vllm  # noqa: E402
from plumbing.engines.continuous import ContinuousSampler  # noqa: E402
from plumbing.model.adapters import add_adapters  # noqa: E402
from plumbing.model.cold_start import tiny_config  # noqa: E402
from plumbing.model.policy import load_policy  # noqa: E402
from plumbing.run.arguments import parse  # noqa: E402
from plumbing.speed.fast import FastSampler  # noqa: E402
from moe import TinyMoE  # noqa: E402
from rollout import response_logp  # noqa: E402

SMOLLM2 = "checkpoints/SmolLM2-135M-Instruct"
FEW_SHOT = "".join(f"max({a},{b})={max(a, b)}\n" for a, b in SHOTS)
SAMPLERS = {"vllm": vllm.VllmSampler, "continuous": ContinuousSampler}
CASES = {  # policy: (rate of the updates, prompts, tokens of a response)
    "SmolLM2": (1.5e-5, [FEW_SHOT + "max(12,44)="], 16),
    "SmolLM2 with LoRA": (1e-3, [FEW_SHOT + "max(12,44)="], 16),
    "tiny MoE": (1e-3, ["3+8+5+9=", "1+1="], 24)}
SPEED = {  # name: (policy, prompts, group size, tokens of a response)
    "SmolLM2, 4-shot max, 8 x 8 responses of 5": (
        "SmolLM2", [f"{FEW_SHOT}max({a},{90 - a})=" for a in range(10, 18)], 8, 5),
    "SmolLM2, 2 x 8 responses of 64": (
        "SmolLM2", ["Tell me about the sea.\n", "How do I bake bread?\n"], 8, 64),
    "tiny MoE, 32 x 8 responses of 24": (
        "tiny MoE", [f"{a}+{b}+3+5+7=" for a in range(1, 9) for b in (1, 3, 5, 7)], 8, 24)}


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
    found, moved = [], []
    for _ in range(updates + 1):
        rollout = sampler.sample(prompts, 8)
        found.append(difference(policy, rollout, temperature))
        update(policy, optimizer, rollout, temperature)
        moved.append(difference(policy, rollout, temperature))
    return {"loaded": found[0], "after": found[1:], "moved": moved[:-1]}


class HeadLeftOut:
    """A policy whose state_dict() has no tied LM head, as named_parameters() has none."""

    def __init__(self, policy):
        self.policy, self.save_pretrained = policy, policy.save_pretrained

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


def learned(folder):
    """What a run of train.py says of itself."""
    summary = json.loads((Path(folder) / "summary.json").read_text())
    config = json.loads((Path(folder) / "config.json").read_text())
    records = [json.loads(x) for x in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    arguments = config.get("arguments", config)
    return {"sampler": arguments["sampler"], "steps": summary["steps"],
            **{key: summary[key] for key in summary if key.startswith(("pass_at_1", "interval",
                                                                       "greedy"))},
            "mismatch_kl": [record["mismatch_kl"] for record in records]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--learned", nargs="*", default=[], help="run folders")
    parser.add_argument("--only", nargs="*", default=["differences", "fault", "speed"])
    parser.add_argument("--repeats", type=int, default=2, help="of each measurement of speed")
    asked = parser.parse_args()
    path = ROOT / "results/engines.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    if "differences" in asked.only:
        for engine in SAMPLERS:
            for name in CASES:
                got = differences(engine, name)
                found.setdefault("differences", {}).setdefault(engine, {})[name] = got
                print(engine, name, got, flush=True)
                write_json(path, found)
    if "fault" in asked.only:
        found["fault"] = fault()
        print(found["fault"], flush=True)
    if "speed" in asked.only:
        found["speed"] = speed(asked.repeats)
    for folder in asked.learned:
        run = learned(folder)
        found.setdefault("learned", {})[run["sampler"]] = run
    write_json(path, found)
    vllm.close_engine()
