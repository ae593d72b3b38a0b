"""Counting: a pretrained model goes on with `18 by 1: 18 19 20 …` for twenty numbers.

    python experiments/counting.py         # data/counting_train.jsonl and data/counting_test.jsonl

The reward is the share of the twenty numbers before the first wrong one.
"""

import argparse
import json
import random
from pathlib import Path

TERMS = 20
SHOTS = ((7, 1), (12, 10), (31, 1), (5, 1))
STEPS = (1, 1, 1, 10)


def row(start, step):
    return f"{start} by {step}:", "".join(f" {start + i * step}" for i in range(TERMS))


def share(response, answer):
    """The share of the numbers of the answer before the response's first wrong one."""
    right = 0
    said = response.split()
    for one, other in zip(said, answer.split()):
        if one != other:
            break
        right += 1
    return right / max(TERMS, len(said))


def write(folder=Path("data"), test=64):
    rng = random.Random(0)
    pairs = [(start, step) for start in range(1, 41) for step in (1, 10)
             if (start, step) not in SHOTS]
    rng.shuffle(pairs)
    weight = {1: 3, 10: 1}
    held_out = pairs[:len(pairs) // 4]
    known = pairs[len(pairs) // 4:]
    shots = "".join("".join(row(*shot)) + "\n" for shot in SHOTS)
    folder.mkdir(parents=True, exist_ok=True)
    for name, some, size in (("train", known, 1000), ("test", held_out, test)):
        drawn = rng.choices(some, [weight[step] for _, step in some], k=size)
        lines = [json.dumps({"prompt": shots + prompt, "answer": answer})
                 for prompt, answer in (row(*pair) for pair in drawn)]
        (folder / f"counting_{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    write()
