"""Seconds to sample responses of four turns against one turn with as many tokens, on a CPU.

    python benchmarks/turn_speed.py           # needs python tests/make_smollm2.py

SmolLM2 writes 2 × 8 responses of 64 tokens to prompts of 64: at once, or in four turns of 16
tokens, each followed by 8 that it reads. As features/turns.py does, each turn after the first
computes prompt and response again, and responses of a group share nothing from there on.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from plumbing.speed.fast import FastSampler  # noqa: E402
from rollout import end_tokens  # noqa: E402
from timing import command_line, in_turns, publish, quotients, spread, timed  # noqa: E402

CHECKPOINT = "checkpoints/SmolLM2-135M-Instruct"
PROMPTS, G, TOKENS, TURNS, READ = 2, 8, 64, 4, 8


def sides():
    """{name: function of the round}: responses of one turn and of several."""
    policy = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    sampler = FastSampler(policy, tokenizer, TOKENS + READ * (TURNS - 1))
    ends = end_tokens(policy, tokenizer)
    never = lambda logits, t, live: logits.index_fill(-1, torch.tensor(ends), float("-inf"))

    def sample(prompts, group_size, tokens):
        limits = torch.full((len(prompts) * group_size,), tokens)
        return sampler.sample(prompts, group_size, limits=limits, leave=never).token_lists()

    def prompts(turn):
        generator = torch.Generator().manual_seed(turn)
        return torch.randint(len(tokenizer), (PROMPTS, 64), generator=generator).tolist()

    def several(turn):
        so_far = [prompt for prompt in prompts(turn) for _ in range(G)]
        written = sample(prompts(turn), G, TOKENS // TURNS)
        for _ in range(TURNS - 1):
            so_far = [one + new + new[:READ] for one, new in zip(so_far, written)]
            written = sample(so_far, 1, TOKENS // TURNS)
    return {"one": lambda turn: sample(prompts(turn), G, TOKENS), "several": several}


def texts(found):
    times = found["several / one"]
    return {"several turns": f"{times['median']:.1f} [{times['min']:.1f}, {times['max']:.1f}]"}


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    options = command_line(__doc__, "turn_speed.json").parse_args()
    seconds = in_turns({name: timed(work) for name, work in sides().items()}, rounds=3)
    found = {name: spread(values) for name, values in seconds.items()}
    found["several / one"] = quotients(seconds["several"], seconds["one"])
    publish(options.json, found, texts)
