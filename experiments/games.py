"""The game of recipes/turns.py, its twelve terms in another number of turns."""

from recipes.turns import Sums


class Two(Sums):
    turns = 2
    terms_per_turn = 6


class Twelve(Sums):
    turns = 12
    terms_per_turn = 1
