"""Writes max_of_two_train.jsonl and max_of_two_test.jsonl: the larger of two numbers below 91, as a
few-shot line.

    python tests/make_max_data.py FOLDER
    python train.py --model_name_or_path … --dataset_name FOLDER/max_of_two_train.jsonl \
        --test_dataset_name FOLDER/max_of_two_test.jsonl --no_chat_template --stop '\n' \
        --verifier exact

A prompt is four worked lines, always the same, and a fifth to complete. A small base model takes
the pattern from the lines and is right about half the time, which leaves something to learn. Pairs
{a, b} asked for in the test file occur nowhere in the train file.
"""
import argparse
import json
import random
from pathlib import Path

SHOTS = ((15, 62), (83, 40), (29, 33), (71, 58))


def make_max_data(folder, train_size=2000, test_size=256, seed=0):
    """Writes the two files and returns their paths."""
    rng, folder = random.Random(seed), Path(folder)
    shown = {frozenset(pair) for pair in SHOTS}
    pairs = [(a, b) for a in range(91) for b in range(a) if {a, b} not in shown]
    rng.shuffle(pairs)
    held_out, known = pairs[:test_size], pairs[test_size:]

    def rows(questions):
        for pair in questions:
            a, b = rng.sample(pair, 2)                       # either number may come first
            prompt = "".join(f"max({x},{y})={max(x, y)}\n" for x, y in SHOTS) + f"max({a},{b})="
            yield {"prompt": prompt, "answer": str(max(a, b))}

    paths = []
    for name, questions in (("train", known[:train_size]), ("test", held_out)):
        paths.append(folder / f"max_of_two_{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows(questions)),
                             encoding="utf-8")
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the two files go")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for path in make_max_data(folder):
        print(path)
