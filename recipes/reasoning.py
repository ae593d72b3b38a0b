"""Problems of a generator of reasoning-gym, with its own score (pip install reasoning-gym).

    python recipes/reasoning.py chain_sum max_terms=2 max_digits=1
    python train.py --model_name_or_path DIR --dataset_name data/chain_sum.jsonl \\
        --verifier recipes/reasoning.py:reward

Options are those of the generator; size is the number of problems (500).
"""

import functools
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

import reasoning_gym
from reasoning_gym.utils import extract_answer

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
    if len(sys.argv) < 2 or "--help" in sys.argv:
        raise SystemExit(__doc__)
    _, name, *options = sys.argv
    file = Path("data") / f"{name}.jsonl"
    values = {option: read_value(text) for option, _, text in (o.partition("=") for o in options)}
    made = rows(name, **values)
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row, default=str) + "\n" for row in made), encoding="utf-8")
    print(file)
