"""Problems of a generator of reasoning-gym, with its own score (pip install reasoning-gym).

    python recipes/reasoning.py chain_sum max_terms=2 max_digits=1
    python train.py --model_name_or_path DIR --dataset_name data/chain_sum.jsonl \\
        --verifier recipes/reasoning.py:reward

Options are those of the generator; size is the number of problems (500).
"""

import argparse
import functools
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

try:
    import reasoning_gym
    from reasoning_gym.utils import extract_answer
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    sys.exit(f"reasoning.py: {error}: pip install reasoning-gym")

from plumbing.data.reward_functions import guard_rail


def rows(name, **options):
    """[{"prompt", "answer", "entry": what the generator's score needs}]"""
    return [{"prompt": entry["question"], "answer": entry["answer"] or "any that fits",
             "entry": entry} for entry in reasoning_gym.create_dataset(name, **options)]


@functools.cache
def find_score(name):
    sys.addaudithook(guard_rail)             # some scores evaluate the response
    return reasoning_gym.get_score_answer_fn(name)


def reward(response, answer, problem):
    """The generator's own score of the text in <answer> … </answer>, or of the whole response."""
    entry = problem["entry"]
    score = find_score(entry["metadata"]["source_dataset"])
    return score(extract_answer(response) or response, entry)


def read_value(text):
    """A value of an option: JSON, such as 2 or ["+", "-"], or a word."""
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="a generator of reasoning-gym")
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE")
    given = parser.parse_args()
    file = Path("data") / f"{given.name}.jsonl"
    pairs = (option.partition("=") for option in given.options)
    values = {option: read_value(text) for option, _, text in pairs}
    made = rows(given.name, **values)
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row, default=str) + "\n" for row in made), encoding="utf-8")
    print(file)
