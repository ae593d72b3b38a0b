"""The game of recipes/guess.yaml: find a number between 1 and 16 in at most five turns."""

import random
import re

PROMPT = ("I think of a number between 1 and 16. Guess it: answer with one number. I say higher if "
          "my number is higher than yours, and lower if it is lower.")


class Guess:
    """Every guess inside the interval that is still possible earns 0.1, the number 1."""

    def __init__(self, row, seed):
        self.number = random.Random(seed).randint(1, 16)
        self.low = 1
        self.high = 16

    @staticmethod
    def rows():
        """The data: games of one prompt, whose numbers are a matter of chance."""
        return [{"prompt": PROMPT, "game": i} for i in range(320)]

    def step(self, text):
        found = re.fullmatch(r"\s*(\d{1,2})\W*", text)
        if not found:
            return "Answer with one number between 1 and 16.", 0.0, False
        guess = int(found[1])
        if guess == self.number:
            return "", 1.0, True
        reward = 0.1 * (self.low <= guess <= self.high)
        if guess < self.number:
            self.low = max(self.low, guess + 1)
            return "higher", reward, False
        self.high = min(self.high, guess - 1)
        return "lower", reward, False
