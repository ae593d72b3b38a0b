"""The game of recipes/guess.yaml: find a number between 1 and 16 in at most five turns."""

import random
import re

RULES = ("I think of a number between 1 and 16. You guess it, one number at a time; I say higher "
         "if mine is higher, lower if it is lower.")
EXAMPLE = ["8", "lower", "4", "higher", "6", "That is it! I think of another one."]


class Guess:
    """Every guess inside the interval that is still possible earns 0.1, the number 1."""

    def __init__(self, row, seed):
        self.number = random.Random(seed).randint(1, 16)
        self.low = 1
        self.high = 16

    @staticmethod
    def rows():
        """The data: games after one example, whose numbers are a matter of chance."""
        roles = ("assistant", "user")
        prompt = [{"role": "user", "content": RULES}]
        prompt += [{"role": roles[i % 2], "content": text} for i, text in enumerate(EXAMPLE)]
        return [{"prompt": prompt, "game": i} for i in range(320)]

    def step(self, text):
        found = re.search(r"\d+", text)
        if not found:
            return "Answer with one number between 1 and 16.", 0.0, False
        guess = int(found[0])
        if guess == self.number:
            return "That is it!", 1.0, True
        reward = 0.1 * (self.low <= guess <= self.high)
        if guess < self.number:
            self.low = max(self.low, guess + 1)
            return "higher", reward, False
        self.high = min(self.high, guess - 1)
        return "lower", reward, False
