"""Data position: the order of the prompts."""

import random


class PromptStream:
    """An endless shuffled sequence of problem numbers, epoch by epoch. state_dict() returns the
    current position.

    count: the number of problems, at least 1.
    """

    def __init__(self, count, seed=0):
        self.count = count
        self.seed = seed
        self.epoch = 0
        self.position = 0
        self.shuffle()

    def problems(self):
        """The numbers of the problems of this epoch, in their order."""
        return list(range(self.count))

    def shuffle(self):
        self.order = self.problems()
        random.Random(f"{self.seed} {self.epoch}").shuffle(self.order)

    def new_epoch(self):
        self.epoch += 1
        self.position = 0
        self.shuffle()

    def next(self, n):
        """The next n problem numbers. If the epoch ends before n numbers are drawn, the next epoch
        provides the rest."""
        numbers = []
        while len(numbers) < n:
            if self.position == len(self.order):
                self.new_epoch()
            part = self.order[self.position:self.position + n - len(numbers)]
            self.position += len(part)
            numbers += part
        return numbers

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]
        self.position = state["position"]
        self.shuffle()
