"""What bfloat16 does to log s of SmolLM2-135M, on a CPU.

    python tests/make_smollm2.py && python benchmarks/bfloat16.py        # -> results/bfloat16.json
    python benchmarks/bfloat16.py --model_name_or_path DIR               # of another model: printed

Weights that are bfloat16 numbers, as published ones are; answers of up to 64 tokens; a step
of AdamW (1e-6, and 16 of them at once), and how far GSPO's log s moved, in float32 and as other
arithmetic sees it. `head in bfloat16`: the LM head's product under autocast too, as it was before
rollout.make_head kept it in float32.
"""

import sys
from pathlib import Path
from unittest.mock import patch

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import rollout as plain  # noqa: E402
from losses import OBJECTIVES, policy_loss  # noqa: E402
from plumbing.model.policy import load_policy  # noqa: E402
from session.arguments import parse  # noqa: E402
from plumbing.speed.fast import fast_sample  # noqa: E402
from ratios import sequence_log_ratio  # noqa: E402
from timing import command_line, publish, table  # noqa: E402

SMOLLM2 = "checkpoints/SmolLM2-135M-Instruct"
LOW = -OBJECTIVES["gspo"].epsilon            # GSPO's clip range of log s
HIGH = OBJECTIVES["gspo"].epsilon_high
PROMPTS = ("Tell me about the sea.\n", "How do I bake bread?\n")
ARITHMETICS = {  # (autocast's dtype, whether the LM head stays in float32)
    "float32": (torch.float32, True), "bfloat16": (torch.bfloat16, True),
    "bfloat16, head in bfloat16": (torch.bfloat16, False), "float16": (torch.float16, True)}


def head_under_autocast(model):
    return lambda hidden: model.get_output_embeddings()(hidden).float()


def compute_logp(model, rollout, dtype, exact_head):
    """Log-probs [B, T] of the rollout without gradient, computed in `dtype`."""
    head = plain.make_head if exact_head else head_under_autocast
    with (torch.no_grad(), patch.object(plain, "make_head", head),
          torch.autocast("cpu", dtype, enabled=dtype != torch.float32)):
        return plain.response_logp(model, rollout, entropy=False).logp


def noise(model, tokenizer, tokens):
    """What each arithmetic measures of an AdamW step, beside the true change, as {arithmetic:
    figures}, after one step and after sixteen."""
    torch.manual_seed(0)
    for p in model.parameters():  # a tenth of a 4-bit file lies halfway between two
        p.data.copy_(p.data.bfloat16())
    rollout = fast_sample(model, tokenizer, list(PROMPTS), 8, tokens)
    mask = rollout.mask
    before = {name: compute_logp(model, rollout, *how)
              for name, how in ARITHMETICS.items()}                                 # [B, T] each
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
        moved = {name: sequence_log_ratio(compute_logp(model, rollout, *how), before[name], mask)
                 for name, how in ARITHMETICS.items()}                              # [B] each
        true = moved.pop("float32")                                                 # [B]
        found[str(steps)] = {"true_rms": rms(true), "arms": {name: {
            "error_rms": rms(x - true), "correlation": torch.corrcoef(torch.stack([x, true]))[0, 1]
            .item(), "outside": ((x - true < LOW) | (x - true > HIGH)).float().mean().item()}
            for name, x in moved.items()}}
        for p, old in zip(model.parameters(), start):
            p.data.copy_(old)
    errors = {name: (logp - before["float32"])[mask].std().item()
              for name, logp in before.items() if name != "float32"}
    return {"answers": len(mask), "tokens": mask.sum(-1).float().mean().item(),
            "log_prob_error": errors, "steps": found}


def rms(x):
    return x.square().mean().sqrt().item()


def texts(found):
    """The tables of docs/speed.md, and its figures of one step at 1e-6."""
    steps = found["noise"]["steps"]
    rows = []
    for name, error in found["noise"]["log_prob_error"].items():
        cells = [(f"{s['arms'][name]['error_rms']:.1e}", f"{s['arms'][name]['correlation']:.2f}",
                  f"{s['arms'][name]['outside']:.0%}") for s in steps.values()]
        rows.append((name, f"{error:.1e}", *(" / ".join(pair) for pair in zip(*cells))))
    one = steps["1"]
    error = one["arms"]["bfloat16"]["error_rms"]
    return {
        "bfloat16": table(("arithmetic", "error of a log-prob", "of log s",
                           "correlation with the truth",
                           "outside the band by the error alone"), *rows),
        "bf16_true": f"{one['true_rms']:.3f}", "bf16_error": f"{error:.3f}",
        "bf16_true_16": f"{steps['16']['true_rms']:.2f}", "bf16_bands": f"{error / HIGH:.0f}"}


def main(argv=None):
    parser = command_line(__doc__, "bfloat16.json", "answers of 4 tokens")
    parser.add_argument("--model_name_or_path", default=SMOLLM2, metavar="DIR",
                        help="checkpoint of another model, whose numbers are printed, and written "
                             "only with --json (default: %(default)s)")
    args = parser.parse_args(argv)
    flags = ["--model_name_or_path", args.model_name_or_path, "--dataset_name", "none"]
    try:
        settings = parse([*flags, "--device", "cpu"])
        model, tokenizer = load_policy(settings, None, torch.device("cpu"))
    except ValueError as error:
        parser.exit(2, f"bfloat16.py: {error}\n")
    found = {"noise": noise(model, tokenizer, 4 if args.quick else 64)}
    if args.model_name_or_path != SMOLLM2 and args.json == parser.get_default("json"):
        print(*texts(found).values(), sep="\n")
    else:
        publish(args.json, found, texts)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    main()
