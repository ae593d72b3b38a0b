"""Counting: a pretrained model goes on with `18 by 1: 18 19 20 …` for twenty numbers.

    python experiments/counting.py         # data/counting_train.jsonl and data/counting_test.jsonl

The reward is the share of the twenty numbers before the first wrong one.
"""

import argparse
import json
import random
import sys
from pathlib import Path

TERMS = 20
SHOTS = ((7, 1), (12, 10), (31, 1), (5, 1))


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


def write(folder=Path("data")):
    """Starts 1 to 60 by 1, every third also by 10; a quarter of them is held out."""
    pairs = [(start, step) for start in range(1, 61) for step in (1, 10)
             if (step == 1 or start % 3 == 1) and (start, step) not in SHOTS]
    random.Random(0).shuffle(pairs)
    held_out = len(pairs) // 4
    shots = "".join("".join(row(*shot)) + "\n" for shot in SHOTS)
    folder.mkdir(parents=True, exist_ok=True)
    for name, some in (("test", pairs[:held_out]), ("train", pairs[held_out:])):
        lines = [json.dumps({"prompt": shots + prompt, "answer": answer})
                 for prompt, answer in (row(*pair) for pair in some)]
        (folder / f"counting_{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    write()
