"""The teacher of SDPO reads with its own routers' choices, also where the policy replays routes: it
is another policy with another prompt, and no ratio is formed with it.

python -m pytest tests/features/test_teacher_and_replay.py
"""

import copy
from contextlib import nullcontext

import torch

import train
from models import gradient
from routes import Pass, Routes, record_routes, replay_routes

RATE = 0.05                      # --teacher_update_rate


def row_logp(model, prompt, response, routes=None):
    """(log-probs [t] of one response after its prompt, the routes of this forward): a forward of
    one row without padding, with forced routes if some are given."""
    ids = torch.cat([prompt, response])[None]                                           # [1, S]
    with replay_routes(model, routes) if routes else nullcontext(), record_routes(model) as own:
        logits = model(input_ids=ids).logits[0, :-1].log_softmax(-1)                    # [S-1, V]
    return logits.gather(-1, ids[0, 1:, None])[len(prompt) - 1:, 0], own


def at_response(routes, prompt, told):
    """Routes for the row told + response from those of prompt + response: free at the prompt."""
    indices, logits = routes.passes[0]                                              # [L, 1, S, ·]
    return Routes([Pass(*(torch.cat([x.new_full((*x.shape[:2], len(told), x.shape[3]), fill),
                                     x[:, :, len(prompt):]], 2)
                          for x, fill in ((indices, -1), (logits, 0))))])


def sdpo_gradient(policy, old, teacher, mini, tokenizer, replaying_teacher):
    """The gradient of SDPO's loss by autograd in float64, row by row: CISPO's clip, the mean over
    responses of the mean over tokens, Â = log π_T - log π_old for wrong responses of groups that
    have a right one."""
    rollout = mini.rollout
    G = rollout.group_size
    loss = 0.0
    for i, mask in enumerate(rollout.mask):
        q = i // G
        rights = [j for j in range(q * G, q * G + G) if mini.parts[j, 0] >= 1]
        if not rights or i in rights:
            continue
        prompt = rollout.prompt_ids[q][rollout.prompt_mask[q]]                          # [p]
        response = rollout.response_ids[i][mask]                                        # [t]
        hint = f"{rollout.texts[rights[0]]} {mini.problems[q].prompt}"
        told = torch.tensor(tokenizer(hint)["input_ids"])                               # [p']
        with torch.no_grad():
            old_logp, routes = row_logp(old, prompt, response)                          # [t]
            forced = at_response(routes, prompt, told) if replaying_teacher else None
            A = row_logp(teacher, told, response, forced)[0] - old_logp                 # [t]
        new, _ = row_logp(policy, prompt, response, routes)                             # [t]
        w = (new - old_logp).exp().detach().clamp(0, 2)
        loss = loss - (w * A * new).mean() / len(rollout.mask)
    return gradient(policy, loss)


def test_the_teacher_of_sdpo_does_not_replay_routes(run, first, then):
    seen, gaps = {}, []

    def before(settings, learner, mini):
        seen["now"] = now = copy.deepcopy(learner.policy).double()
        if mini.step not in seen:                            # the first mini-batch of a batch
            seen[mini.step] = now
            teacher = seen.setdefault("teacher", copy.deepcopy(now))
            for mean, weight in zip(teacher.parameters(), now.parameters()):
                mean.data.lerp_(weight.data, RATE)

    def compare(stats, settings, learner, mini):
        if stats["grad_norm"] > 0:
            ours = torch.cat([p.grad.double().flatten() for p in learner.policy.parameters()])
            found = [sdpo_gradient(seen["now"], seen[mini.step], seen["teacher"], mini,
                                   learner.tokenizer, too) for too in (False, True)]
            gaps.append([((ours - one).norm() / ours.norm()).item() for one in found])
    first(train, "update", before)
    then(train, "update", compare)
    run("--algorithm sdpo --routing_replay old --steps 6 --warmup_steps 0 --learning_rate 0.003 "
        "--max_grad_norm 0")
    free, forced = zip(*gaps)
    assert len(gaps) >= 4 and max(free) < 1e-4
    assert max(forced) > 1e-2
