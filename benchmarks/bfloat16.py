"""bfloat16 on SmolLM2-135M and the tiny MoE, on a CPU: what it does to log s, and to sampling.

    python tests/make_smollm2.py && python benchmarks/bfloat16.py        # -> results/bfloat16.json

Noise: weights that are bfloat16 numbers, as published ones are; answers of up to 64 tokens; a step
of AdamW (1e-6, and 16 of them at once), and how far GSPO's log s moved, in float32 and as other
arithmetic sees it. `head in bfloat16`: the LM head's product under autocast too, as it was before
rollout.head_of kept it in float32.

Sampling: processor seconds of a rollout with --sampler_dtype float32 and bfloat16, in turns, the
copy of the weights included; log-probs are recomputed in float32 in either case.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import rollout as plain  # noqa: E402
from losses import policy_loss  # noqa: E402
from make_max_data import SHOTS  # noqa: E402
from memory import write_json  # noqa: E402
from plumbing.data import running_sum
from plumbing.engines.samplers import sampling_copy  # noqa: E402
from plumbing.run.arguments import parse  # noqa: E402
from plumbing.speed.fast import sample  # noqa: E402
from plumbing.model.policy import load_policy  # noqa: E402
from ratios import sequence_log_ratio  # noqa: E402

SMOLLM2 = "checkpoints/SmolLM2-135M-Instruct"
LOW = -3e-4              # GSPO's band
HIGH = 4e-4              # of log s
PROMPTS = ("Tell me about the sea.\n", "How do I bake bread?\n")
ARMS = {  # (autocast's dtype, whether the LM head stays in float32)
    "bfloat16": (torch.bfloat16, True), "bfloat16, head in bfloat16": (torch.bfloat16, False),
    "float16": (torch.float16, True)}


def head_under_autocast(model):
    return lambda hidden: model.get_output_embeddings()(hidden).float()


def logp_of(model, rollout, dtype, exact_head):
    """Log-probs [B, T] of the rollout without gradient, computed in `dtype`."""
    head = plain.head_of if exact_head else head_under_autocast
    with (torch.no_grad(), patch.object(plain, "head_of", head),
          torch.autocast("cpu", dtype, enabled=dtype != torch.float32)):
        return plain.response_logp(model, rollout, entropy=False).logp


def noise(model, tokenizer, tokens):
    """What each arithmetic measures of an AdamW step, beside the true change, as {arm: figures},
    after one step and after sixteen."""
    torch.manual_seed(0)
    for p in model.parameters():  # a tenth of a 4-bit file lies halfway between two
        p.data.copy_(p.data.bfloat16())
    rollout = sample(model, tokenizer, list(PROMPTS), 8, tokens)
    mask = rollout.mask
    arms = {"float32": (torch.float32, True)} | ARMS
    before = {name: logp_of(model, rollout, *arm) for name, arm in arms.items()}    # [B, T] each
    logp = plain.response_logp(model, rollout, entropy=False).logp                  # [B, T]
    advantages = torch.tensor([1.0, -1.0]).repeat(len(mask) // 2)                   # [B]
    policy_loss("gspo", logp, logp.detach(), advantages, mask)[0].backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    found = {}
    for steps in (1, 16):
        start = [p.detach().clone() for p in model.parameters()]
        optimizer.param_groups[0]["lr"] = steps * 1e-6
        optimizer.state.clear()
        optimizer.step()
        moved = {name: sequence_log_ratio(logp_of(model, rollout, *arm), before[name], mask)
                 for name, arm in arms.items()}                                     # [B] each
        true = moved.pop("float32")                                                 # [B]
        found[steps] = {"true_rms": rms(true), "arms": {name: {
            "error_rms": rms(x - true), "correlation": torch.corrcoef(torch.stack([x, true]))[0, 1]
            .item(), "outside": ((x - true < LOW) | (x - true > HIGH)).float().mean().item()}
            for name, x in moved.items()}}
        for p, old in zip(model.parameters(), start):
            p.data.copy_(old)
    errors = {name: (before[name] - before["float32"])[mask].std().item() for name in ARMS}
    return {"answers": len(mask), "tokens": mask.sum(-1).float().mean().item(),
            "log_prob_error": errors, "steps": found}


def rms(x):
    return x.square().mean().sqrt().item()


def sampling(model, tokenizer, prompts, group, tokens, rounds=3):
    """Processor seconds of a rollout as {dtype: median}, and how many times as fast bfloat16 is."""
    seconds = {"float32": [], "bfloat16": []}
    for turn in range(rounds + 1):
        uniforms = torch.rand(len(prompts) * group, tokens,
                              generator=torch.Generator().manual_seed(turn))        # [B, T]
        for dtype, spent in seconds.items():
            began = time.process_time()
            sample(sampling_copy(model, dtype), tokenizer, prompts, group, tokens,
                   uniforms=uniforms)
            spent.append(time.process_time() - began)
    found = {dtype: median(spent[1:]) for dtype, spent in seconds.items()}          # 0: warms up
    return found | {"faster": found["float32"] / found["bfloat16"]}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="answers of 4 tokens, one round")
    parser.add_argument("--json", default="results/bfloat16.json", help="where the numbers go")
    args = parser.parse_args(argv)
    device = torch.device("cpu")
    tokens = 4 if args.quick else 64
    rounds = 1 if args.quick else 3
    few = "".join(f"max({a},{b})={max(a, b)}\n" for a, b in SHOTS)
    max_prompts = [f"{few}max({7 * i + 3},{90 - 5 * i})=" for i in range(8)]
    flags = parse(["--model_name_or_path", SMOLLM2, "--dataset_name", "none", "--device", "cpu"])
    model, tokenizer = load_policy(flags, None, device)
    result = {"sampling": {
        "SmolLM2, 4-shot max, 8 x 8 answers of 5": sampling(
            model, tokenizer, max_prompts, 8, 5, rounds),
        f"SmolLM2, 2 x 8 answers of {tokens}": sampling(
            model, tokenizer, list(PROMPTS), 8, tokens, rounds)}}
    print(result, flush=True)
    tiny = parse(["--device", "cpu"])
    task = running_sum.running_sum()
    policy, characters = load_policy(tiny, task, device)
    prompts = task.encode(characters, task.train[:32], False, 512)
    result["sampling"]["tiny MoE, 32 x 8 answers of 24"] = sampling(
        policy, characters, prompts, 8, 24, rounds)
    print(result, flush=True)
    result["noise"] = noise(model, tokenizer, tokens)
    print(result["noise"])
    write_json(args.json, result)


if __name__ == "__main__":
    main()
