"""--sampler vllm on a CPU: do its log-probs follow the policy, and how fast is it?

    python benchmarks/engines.py                          # -> results/engines.json

in an environment with vLLM (tests/requirements-vllm.txt), after `python tests/make_smollm2.py`.

differences  the largest difference between the log-probs that vLLM recorded and those of the
             policy, as loaded and after each of ten AdamW updates
speed        tokens per processor second of one thread, beside the built-in sampler
"""

import os
import sys
import time
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"          # of train.py, too; read when torch is loaded
import torch  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from features import vllm_engine as vllm  # noqa: E402
from features.lora import add_adapters  # noqa: E402
from moe import TinyMoE  # noqa: E402
from plumbing.data.running_sum import builtin_tokenizer  # noqa: E402
from plumbing.model.cold_start import tiny_config  # noqa: E402
from plumbing.model.policy import load_policy  # noqa: E402
from plumbing.run.arguments import parse  # noqa: E402
from plumbing.speed.fast import FastSampler  # noqa: E402
from rollout import response_logp  # noqa: E402
from timing import command_line, in_turns, publish, spread, timed  # noqa: E402

SMOLLM2 = "checkpoints/SmolLM2-135M-Instruct"
CASES = {  # policy: (rate of the updates, prompts, tokens of a response)
    "SmolLM2": (1.5e-5, ["max(12,44)="], 8),
    "SmolLM2 with LoRA": (1e-3, ["max(12,44)="], 8),
    "tiny MoE": (1e-3, ["3+8+5+9=", "1+1="], 24)}
SPEED = {  # name: (policy, prompts, tokens of a response)
    "SmolLM2, 2 x 8 responses of 16": (
        "SmolLM2", ["Tell me about the sea.\n", "How do I bake bread?\n"], 16),
    "tiny MoE, 8 x 8 responses of 24": (
        "tiny MoE", [f"{a}+{b}+3+5+7=" for a in (1, 2) for b in (1, 3, 5, 7)], 24)}
TEMPERATURE = 0.8


def policy_of(name):
    """(policy, tokenizer) in float32; the tiny MoE has random weights and heads of width 32."""
    torch.manual_seed(0)
    if name == "tiny MoE":
        tokenizer = builtin_tokenizer()
        return TinyMoE(tiny_config(parse(["--hidden_size", "128"]), tokenizer)).eval(), tokenizer
    args = parse(["--model_name_or_path", SMOLLM2, "--use_peft", "--max_completion_length", "64"])
    policy, tokenizer = load_policy(args, None, torch.device("cpu"))
    return (add_adapters(policy, args) if "LoRA" in name else policy), tokenizer


def difference(policy, rollout):
    """The largest difference of a log-prob, in nats."""
    own = response_logp(policy, rollout, TEMPERATURE, entropy=False).logp           # [B, T]
    return (own - rollout.sampler_logp)[rollout.mask].abs().max().item()


def update(policy, optimizer, rollout):
    """Half of the responses become more likely, half less."""
    sign = torch.tensor([1.0, -1.0]).repeat(len(rollout.mask) // 2)[:, None]        # [B, 1]
    optimizer.zero_grad()
    (response_logp(policy, rollout, TEMPERATURE).logp * sign).mean().backward()
    optimizer.step()


def differences(name, updates=10):
    """The difference as loaded, and after each update."""
    rate, prompts, tokens = CASES[name]
    policy, tokenizer = policy_of(name)
    sampler = vllm.VllmSampler(policy, tokenizer, tokens, TEMPERATURE)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=rate)
    found = []
    moved = []
    for _ in range(updates + 1):
        rollout = sampler.sample(prompts, 8)
        found.append(difference(policy, rollout))
        update(policy, optimizer, rollout)
        moved.append(difference(policy, rollout))
    return {"loaded": found[0], "after": found[1:], "moved": moved[:-1]}


def rates(samplers, prompts, group_size, tokens, rounds, clock=time.process_time):
    """{sampler: median tokens per second of the clock}, on the same prompts and random numbers.
    tokens: of the longest response."""
    drawn = {name: [] for name in samplers}

    def once(name, turn):
        uniforms = torch.rand(len(prompts) * group_size, tokens,
                              generator=torch.Generator().manual_seed(turn))        # [B, T]
        rollout = samplers[name].sample(prompts, group_size, uniforms=uniforms)
        drawn[name].append(int(rollout.mask.sum()))
    seconds = in_turns({name: timed(partial(once, name), clock) for name in samplers}, rounds)
    return {name: spread(n / s for n, s in zip(drawn[name][1:], each))["median"]
            for name, each in seconds.items()}


def speed(case, rounds=2):
    policy, prompts, tokens = SPEED[case]
    model, tokenizer = policy_of(policy)
    kinds = {"built-in": FastSampler, "vllm": vllm.VllmSampler}
    samplers = {kind: made(model, tokenizer, tokens) for kind, made in kinds.items()}
    return rates(samplers, prompts, 8, tokens, rounds)


def texts(found):
    """The figures of docs/speed.md."""
    cases = found["differences"].values()
    moved = [x for r in cases for x in r["moved"]]
    rates = found["speed"].items()
    return {"vllm_apart": f"{max(x for r in cases for x in (r['loaded'], *r['after'])):.0e}",
            "vllm_moved": f"{min(moved):.2f} to {max(moved):.2f}",
            "vllm_speed": "; ".join(f"{name}: {r['vllm']:,.0f} against {r['built-in']:,.0f}"
                                    for name, r in rates)}


def main(argv=None):
    args = command_line(__doc__, "engines.json").parse_args(argv)
    publish(args.json, {"differences": {name: differences(name) for name in CASES},
                        "speed": {name: speed(name) for name in SPEED}}, texts)
    vllm.close_engine()


if __name__ == "__main__":
    main()
