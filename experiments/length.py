"""Right answers of two lengths: does a loss that divides by the length shorten responses?

    python experiments/length.py FLAGS OF TRAIN.PY

The running sums of train.py, where the answer may be short (`3,1,6,5.`) or verbose
(`0+3=3,3+8=1,1+5=6,6+9=5.`). Both are right, and the teacher of the warm-up writes each of them
half of the time. experiments/run.py makes the runs of the question `length` with it.
"""

import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from plumbing.data.running_sum import longest_answer, running_sum                    # noqa: E402
from session.arguments import parse                                                  # noqa: E402
from train import run_script                                                         # noqa: E402


def short_or_verbose(min_terms, max_terms):
    """The Task: prompts of running_sum, both forms of the answer."""
    short, verbose = (running_sum(min_terms, max_terms, form) for form in (False, True))
    other = {p.prompt: p.answer for p in (*short.train, *short.test)}

    def verify(response, problem):
        return float(response in (problem.answer, other[problem.prompt]))

    def teacher(problem, rng):
        form = rng.choice((short, verbose))
        return form.teacher(problem, rng)

    task = replace(verbose, name=f"{short.name}, short or verbose", verify=verify, teacher=teacher,
                   first_error=None)
    task.max_completion_length = longest_answer(verbose)
    return task


def main(argv=None):
    settings = parse(sys.argv[1:] if argv is None else argv)
    run_script(settings, short_or_verbose(settings.min_terms, settings.max_terms))


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    main()
