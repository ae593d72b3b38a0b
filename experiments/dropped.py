"""Between GRPO and GSPO: every token keeps its own weight w_t, the clip drops whole responses by s.

    python experiments/dropped.py --drop_by_s --algorithm grpo --epsilon 0.03 --epsilon_high 0.04

GRPO and GSPO differ in two things at once: the weight of a token's gradient (w_t or s), and what
the clip leaves out (a token by w_t, a response by s). This changes only the second. All flags are
train.py's; without --drop_by_s it is train.py.
"""

import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import losses                                                                        # noqa: E402
import train                                                                         # noqa: E402
from ratios import sequence_ratio                                                    # noqa: E402

FLAG = "--drop_by_s"
PLAIN = losses.token_surrogate


def token_surrogate(clip, ratio, A, logp, old_logp, mask, low, high, constants):
    """losses.token_surrogate with one more case."""
    if clip != "drop by s":
        return PLAIN(clip, ratio, A, logp, old_logp, mask, low, high, constants)
    s = sequence_ratio(logp.detach(), old_logp, mask)                                # [B]
    s = losses.broadcast_to_tokens(s, mask)                                          # [B, T]
    below, above = losses.find_clipped(s, A, low, high)                              # [B, T] each
    return (ratio * A).masked_fill(below | above, 0.0), below, above


def main(argv):
    by_s = "--drop_by_s" in argv
    if not by_s:
        return train.main(argv)
    row = replace(losses.OBJECTIVES["grpo"], clip="drop by s")
    with mock.patch.dict(losses.OBJECTIVES, grpo=row), \
            mock.patch.object(losses, "token_surrogate", token_surrogate):
        train.main([word for word in argv if word != FLAG])


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    main(sys.argv[1:])
