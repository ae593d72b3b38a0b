"""Data position: the order of the prompts, with SRPO's two stages and history resampling."""

import random


class PromptStream:
    """An endless shuffled sequence of problem numbers, epoch by epoch. state_dict() returns the
    current position.

    sizes: the number of problems of each source (Task.sizes). Two options are from SRPO
    (2504.14286). stage2_step, its two stages: the first stage2_step rollout batches use only the
    first source; then a new epoch begins with all sources; 0: all sources from the start. resample,
    its history resampling: at the end of an epoch, problems whose last responses were all correct
    are removed for good; problems with mixed or only wrong responses stay. say: called with a line
    of text when stage 2 begins and when no problem is left. Raises ValueError for invalid sizes.
    """

    def __init__(self, sizes, seed=0, stage2_step=0, resample=False, say=print):
        if not sizes or min(sizes) < 1:
            raise ValueError(f"sizes {sizes}: every source needs at least one problem")
        if stage2_step and len(sizes) < 2:
            raise ValueError(f"stage2_step {stage2_step} needs two sources; sizes are {sizes}")
        self.sizes = list(sizes)
        self.seed = seed
        self.stage2_step = stage2_step
        self.resample = resample
        self.say = say
        self.epoch = self.position = 0
        self.stage = 1 if stage2_step else 2
        self.solved = set()
        self.dropped = set()
        self.shuffle()

    def shuffle(self):
        everything = range(sum(self.sizes) if self.stage == 2 else self.sizes[0])
        self.order = [i for i in everything if i not in self.dropped]
        if not self.order:
            self.say(f"epoch {self.epoch}: all responses to all problems were correct; history "
                     "resampling starts again with all")
            self.dropped = set()
            self.order = list(everything)
        random.Random(f"{self.seed} {self.epoch}").shuffle(self.order)

    def new_epoch(self):
        self.epoch += 1
        self.position = 0
        if self.resample:
            self.dropped |= self.solved
            self.solved = set()
        self.shuffle()

    def next(self, n, step=1):
        """The next n problem numbers, for rollout batch `step` (counted from 1). If the epoch ends
        before n numbers are drawn, the next epoch provides the rest."""
        if self.stage == 1 and step > self.stage2_step:
            self.stage = 2
            self.say(f"stage 2: {sum(self.sizes[1:])} problems of the second source join after "
                     f"{step - 1} batches")
            self.new_epoch()
        numbers = []
        while len(numbers) < n:
            if self.position == len(self.order):
                self.new_epoch()
            part = self.order[self.position:self.position + n - len(numbers)]
            self.position += len(part)
            numbers += part
        return numbers

    def record(self, numbers, all_correct):
        """Record for history resampling, for each problem drawn, whether all its responses were
        correct."""
        for number, correct in zip(numbers, all_correct, strict=True):
            (self.solved.add if correct else self.solved.discard)(number)

    def state_dict(self):
        return {"sizes": self.sizes, "seed": self.seed, "epoch": self.epoch, "stage": self.stage,
                "position": self.position, "solved": sorted(self.solved),
                "dropped": sorted(self.dropped)}

    def load_state_dict(self, state):
        if (state["sizes"], state["seed"]) != (self.sizes, self.seed):
            raise ValueError(f"the saved data position is of sizes {state['sizes']}, seed "
                             f"{state['seed']}; this task has sizes {self.sizes}, seed {self.seed}")
        self.epoch, self.position, self.stage = (state[k] for k in ("epoch", "position", "stage"))
        self.solved = set(state["solved"])
        self.dropped = set(state["dropped"])
        self.shuffle()


if __name__ == "__main__":
    stream = PromptStream([6], resample=True)
    first = stream.next(6)
    stream.record(first, [number < 2 for number in first])
    print(f"epoch 0: {first}; all responses to 0 and 1 were correct; epoch 1: {stream.next(4)}")
