"""A complete user's task: notes of a shop, each with a person and a city, become JSON.

    python recipes/notes.py                                          # writes data/notes.jsonl
    python train.py --config recipes/laptop-notes.yaml

Your own rows would come from a table.
"""

import argparse
import itertools
import json
import random
import sys
from pathlib import Path

NAMES = "Ana Ben Carla David Elena Felix Grace Hugo Ines Jonas".split()
CITIES = "Berlin Cairo Dublin Geneva Lima Madrid Oslo Prague Rome Tokyo".split()
NOTES = ["{name} called: the parcel to {city} came broken.",
         "The order for {city} is late, says {name}.",
         "{name}, now living in {city}, wants a new invoice."]


def rows(number=200):
    """[{"prompt": a note, "answer": its JSON}]"""
    every = list(itertools.product(NAMES, CITIES, NOTES))
    return [{"prompt": note.format(name=name, city=city),
             "answer": json.dumps({"name": name, "city": city})}
            for name, city, note in random.Random(0).sample(every, number)]


def reward(response, answer):
    """Two parts: the share of right fields, which decides what counts as right, and the form."""
    right = json.loads(answer)
    try:
        found = json.loads(response)
    except ValueError:
        found = None
    form = isinstance(found, dict) and found.keys() == right.keys()
    share = sum(found[name] == right[name] for name in right) / len(right) if form else 0.0
    return {"right": share, "form": float(form)}


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    argparse.ArgumentParser(description=__doc__).parse_args()
    Path("data").mkdir(exist_ok=True)
    Path("data/notes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()),
                                        encoding="utf-8")
    print("data/notes.jsonl")
