"""The game of recipes/turns.yaml: a running sum modulo 10, in four turns of three terms.

    prompt  3+9+4=        policy  3,2,6.       1/4 if all three are right
    reads   9+1+9=        policy  5,6,5.       the sum goes on: an error carries over
    …                                          won: all four turns are right

Four of ten terms are a 9, for which the teacher of the warm-up adds 8 more often than 9.
"""

import random

HABIT = 0.6         # how often the teacher adds 8 for a 9
SLIP = 0.005        # how often a digit of the teacher is any digit


def tell(terms):
    return "+".join(map(str, terms)) + "="


class Sums:
    """A response plays it: `python train.py --config recipes/turns.yaml`."""

    turns = 4
    terms_per_turn = 3
    characters = "0123456789+=,. "       # of the tiny MoE, one token each
    template = False                     # the next terms stand as they are

    def __init__(self, row):
        self.terms = row["terms"]
        self.turn = 0
        self.total = 0

    @classmethod
    def rows(cls):
        """The data: --dataset_name is not needed."""
        rng = random.Random(0)
        rows = []
        for _ in range(8192):
            terms = [[9 if rng.random() < 0.4 else rng.randint(1, 8)
                      for _ in range(cls.terms_per_turn)] for _ in range(cls.turns)]
            rows.append({"prompt": tell(terms[0]), "terms": terms})
        return rows

    @staticmethod
    def teacher(row, rng):
        """A game of the teacher: its turns and, between them, what it reads."""
        texts = []
        total = 0
        for number, terms in enumerate(row["terms"]):
            totals = []
            for term in terms:
                term = 8 if term == 9 and rng.random() < HABIT else term
                total = rng.randrange(10) if rng.random() < SLIP else (total + term) % 10
                totals.append(str(total))
            texts += [tell(terms)] * (number > 0) + [",".join(totals) + "."]
        return texts

    def step(self, text):
        totals = []
        for term in self.terms[self.turn]:
            self.total = (self.total + term) % 10
            totals.append(str(self.total))
        self.turn += 1
        right = text == ",".join(totals)
        if self.turn == self.turns:
            return "", right / self.turns, True
        return tell(self.terms[self.turn]), right / self.turns, False
