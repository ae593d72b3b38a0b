"""Records of mini-batches: --save_minibatches writes the log-probs of whole batches as they were
before each optimizer step, in RUN/minibatches.jsonl.

Unlike tokens.jsonl, which has one group after the updates, it shows what the clip acted on. Groups
without a gradient are not scored, and therefore not recorded, except with --plain and where a
mini-batch has no others. Of several processes the first one's responses are recorded.
"""

import json
from dataclasses import dataclass

from features.feature import Feature, flag


@dataclass(frozen=True)
class Flags:
    save_minibatches: bool = flag(
        False, "save the log-probs of whole batches before each optimizer step in "
               "RUN/minibatches.jsonl (large)", section="records of mini-batches")


class Minibatches(Feature):
    flags = Flags
    records = ("minibatches.jsonl",)

    def __init__(self, learner):
        super().__init__(learner)
        self.last = None         # the mini-batch whose micro-batches arrive
        self.records = []        # of the mini-batches of this rollout batch: lists of responses

    def before_loss(self, micro, scores, mini):
        """Record the micro-batch. A response: its reward, its advantage (a number, or one per
        token), old_logp and logp of its loss tokens in nats."""
        if mini is not self.last:
            self.last = mini
            self.records.append([])
        self.records[-1] += responses(micro, scores.logp.detach())

    def report(self, folder, record):
        if self.records:
            line = json.dumps({"step": record["step"], "minibatches": self.records})
            with open(folder / "minibatches.jsonl", "a", encoding="utf-8") as file:
                file.write(line + "\n")
        self.records = []
        self.last = None


def responses(part, logp):
    """The records of the responses of a micro-batch, without padding."""
    rows = zip(part.rollout.mask, part.rewards.tolist(), part.advantages, part.old_logp, logp)
    return [{"reward": reward, "advantage": A.tolist() if A.dim() == 0 else A[mask].tolist(),
             "old_logp": old[mask].tolist(), "logp": new[mask].tolist()}
            for mask, reward, A, old, new in rows]
