"""The game of recipes/turns.py: its twelve terms in another number of turns, or an early end."""

from recipes.turns import Sums


class Two(Sums):
    turns = 2
    terms_per_turn = 6


class Twelve(Sums):
    turns = 12
    terms_per_turn = 1


class Ended(Sums):
    """It ends at the first wrong turn: a response has as many turns as it earns, at most four."""

    def step(self, text):
        reads, reward, done = super().step(text)
        return reads, reward, done or not reward
