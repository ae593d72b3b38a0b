"""What 16 bits do to GSPO's log s, against the length of the response.

    python tests/make_smollm2.py && python benchmarks/bfloat16.py        # -> results/bfloat16.json
    python benchmarks/bfloat16.py --model_name_or_path DIR               # of another model: printed

An AdamW step moves the policy; log w of every token is computed in float32 and as autocast computes
it. The error of autocast has two parts, which are measured apart:

    arithmetic    rounded activations: autocast's log w minus that of float32 with rounded weights
    lost update   autocast rounds the weights to 16 bits, and a small update vanishes: float32 with
                  rounded weights minus float32. A published checkpoint's weights are bfloat16
                  numbers, on which most small steps are lost; `spread` weights lie anywhere between
                  two such numbers, as after long training

log s of a response of L tokens is stood in for by the mean of log w over windows of L tokens of the
sampled responses.
"""

import copy
import math
import sys
from contextlib import contextmanager
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import rollout as plain  # noqa: E402
from losses import OBJECTIVES, policy_loss  # noqa: E402
from plumbing.model.policy import load_policy  # noqa: E402
from plumbing.speed.fast import fast_sample  # noqa: E402
from session.arguments import parse  # noqa: E402
from timing import command_line, publish, table  # noqa: E402

SMOLLM2 = "checkpoints/SmolLM2-135M-Instruct"
PROMPTS = ("Tell me about the sea.\n", "How do I bake bread?\n")
LENGTHS = (5, 20, 60, 125, 250, 500)
RATE = 16e-6                     # of one AdamW step: as far as sixteen steps of 1e-6 in a row go
FORMATS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def compute_logp(model, rollout, dtype=torch.float32):
    """Log-probs [B, T] of the rollout without gradient, computed under autocast to `dtype`; the LM
    head in float32, as rollout.make_head does."""
    with (torch.no_grad(),
          torch.autocast(model.device.type, dtype, enabled=dtype != torch.float32)):
        return plain.response_logp(model, rollout, entropy=False).logp              # [B, T]


@contextmanager
def rounded_weights(model, dtype):
    """The weights that autocast rounds, those of linear layers but the LM head, as numbers of
    `dtype`."""
    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    before = [m.weight.data for m in layers]
    for m in layers:
        m.weight.data = m.weight.data.to(dtype).float()
    yield
    for m, weight in zip(layers, before):
        m.weight.data = weight


def measure_moves(model, rollout, train):
    """log w [B, T] of a training step in float32 and, for each format, as autocast sees it and in
    float32 with rounded weights: {name: log w}, {(name, "rounded"): log w}."""
    def every():
        found = {"float32": compute_logp(model, rollout)}
        for name, dtype in FORMATS.items():
            found[name] = compute_logp(model, rollout, dtype)
            with rounded_weights(model, dtype):
                found[name, "rounded"] = compute_logp(model, rollout)
        return found
    before = every()
    train(model)
    return {name: logp - before[name] for name, logp in every().items()}


def window_means(x, lengths, L):
    """The means of x [B, T] over the windows of L tokens of every row: log s of such responses."""
    rows = [row[:n // L * L].view(-1, L).mean(-1) for row, n in zip(x, lengths) if n >= L]
    return torch.cat(rows)                                                          # [windows]


def rms(x):
    return x.square().mean().sqrt().item()


def describe_moves(moves, lengths):
    """{L: {true, formats: {name: arithmetic, lost, …}}}: root mean squares in nats, and the shares
    of windows that the error alone moves outside the paper's range and outside 0.2/√L."""
    paper = OBJECTIVES["gspo"]
    found = {}
    for L in [L for L in LENGTHS if sum(n // L for n in lengths) >= 4]:
        true = window_means(moves["float32"], lengths, L)                           # [windows]
        wide = .2 / math.sqrt(L)
        found[L] = {"windows": len(true), "true": rms(true), "formats": {}}
        for name in FORMATS:
            seen = window_means(moves[name], lengths, L)                            # [windows]
            rounded = window_means(moves[name, "rounded"], lengths, L)              # [windows]
            error = seen - true                                                     # [windows]
            out = (error < -paper.epsilon) | (error > paper.epsilon_high)           # [windows]
            found[L]["formats"][name] = {
                "arithmetic": rms(seen - rounded), "lost": rms(rounded - true),
                "out_of_paper": out.float().mean().item(),
                "out_of_wide": (error.abs() > wide).float().mean().item()}
    return found


def measure(model, tokenizer, responses, tokens):
    """The errors for weights on bfloat16's grid and spread between its numbers."""
    torch.manual_seed(0)
    for p in model.parameters():
        p.data.copy_(p.data.bfloat16())
    rollout = fast_sample(model, tokenizer, list(PROMPTS), responses // len(PROMPTS), tokens)
    lengths = rollout.mask.sum(-1).tolist()
    advantages = torch.tensor([1.0, -1.0]).repeat(len(lengths) // 2).to(model.device)    # [B]

    def train(policy):
        logp = plain.response_logp(policy, rollout, entropy=False).logp             # [B, T]
        policy_loss("gspo", logp, logp.detach(), advantages, rollout.mask)[0].backward()
        torch.optim.AdamW(policy.parameters(), lr=RATE, weight_decay=0.0).step()
        policy.zero_grad()

    found = {}
    for weights in ("grid", "spread"):
        policy = copy.deepcopy(model)
        if weights == "spread":
            generator = torch.Generator().manual_seed(0)
            for p in policy.parameters():     # uniformly between the two halfway points around it
                cell = torch.exp2(torch.frexp(p.data).exponent.float() - 8)      # of 8 bits
                p.data.add_(cell * (torch.rand(p.shape, generator=generator) - .5).to(p.device))
        found[weights] = describe_moves(measure_moves(policy, rollout, train), lengths)
    return {"responses": len(lengths), "tokens": sum(lengths) / len(lengths), "weights": found}


def texts(found):
    """The table of docs/speed.md and figures of its sentences."""
    grid, spread = ({int(L): of for L, of in found["weights"][kind].items()}     # text in JSON
                    for kind in ("grid", "spread"))
    rows = []
    for L, of in grid.items():
        cells = [f"{of['formats'][name]['arithmetic']:.1e}" for name in ("bfloat16", "float16")]
        sixteen = of["formats"]["bfloat16"]
        rows.append((L, f"{of['true']:.1e}", *cells, f"{sixteen['lost']:.1e}",
                     f"{spread[L]['formats']['bfloat16']['lost']:.1e}",
                     f"{sixteen['out_of_paper']:.0%}", f"{sixteen['out_of_wide']:.0%}"))
    head = ("L", "true move", "bfloat16", "float16", "lost update, published weights",
            "spread weights", "outside 3e-4 / 4e-4", "outside 0.2/√L")
    scaled = [of["formats"]["bfloat16"]["arithmetic"] * math.sqrt(L) for L, of in grid.items()]
    return {"bfloat16": table(head, *rows),
            "bf16 arithmetic": f"{sum(scaled) / len(scaled):.3f}",
            "bf16 responses": str(found["responses"])}


def main(argv=None):
    parser = command_line(__doc__, "bfloat16.json", "two responses of 25 tokens")
    parser.add_argument("--model_name_or_path", default=SMOLLM2, metavar="DIR",
                        help="checkpoint of another model, whose numbers are printed, and written "
                             "only with --json (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    args = parser.parse_args(argv)
    flags = ["--model_name_or_path", args.model_name_or_path, "--dataset_name", "none"]
    try:
        settings = parse([*flags, "--device", args.device])
        model, tokenizer = load_policy(settings, None, torch.device(args.device))
    except ValueError as error:
        parser.exit(2, f"bfloat16.py: {error}\n")
    found = measure(model, tokenizer, *((2, 25) if args.quick else (6, max(LENGTHS))))
    if args.model_name_or_path != SMOLLM2 and args.json == parser.get_default("json"):
        print(*texts(found).values(), sep="\n")
    else:
        publish(args.json, found, texts)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    main()
