#!/usr/bin/env bash
# Five strangers' paths, from a clone to a served adapter; each says what it saw and the seconds.
#
#     tests/strangers.sh            all; the first installs requirements.txt in a fresh environment
#     tests/strangers.sh 2 3 4      those of a tiny model alone, with the python that is first on PATH
#
# 5 needs checkpoints/SmolLM2-135M-Instruct (tests/make_smollm2.py), peft and transformers[serving].
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
export TQDM_DISABLE=1 HF_HUB_OFFLINE=1 PIP_DISABLE_PIP_VERSION_CHECK=1

TINY=(--min_terms 1 --max_terms 2 --hidden_size 32 --num_experts 4 --num_hidden_layers 1
      --cold_start_steps 120 --cold_start_learning_rate 0.005 --prompts_per_step 4
      --num_generations 4 --steps_per_generation 2 --eval_samples 1 --eval_prompts 16)

must_say() {                               # must_say TEXT COMMAND...: TEXT is in what it prints
    local text=$1
    shift
    "$@" >said 2>&1 || true
    grep -e "$text" said >found || { tail -n 20 said; exit 1; }
    head -n 2 found | cut -c 1-200
}

path_1() {                                 # clone, install, first result
    git clone -q "$root" clone
    cd clone
    python3 -m venv .venv
    PATH=$PWD/.venv/bin:$PATH
    pip install -qq -r requirements.txt
    echo "installed after $((SECONDS - began)) s"
    must_say "mean reward" python gspo.py
    echo "gspo.py after $((SECONDS - began)) s"
    must_say "^after:" python train.py
}

path_2() {                                 # a recipe, one line of it changed
    cp "$root/recipes/laptop.yaml" mine.yaml
    sed -i 's/^steps: 50.*/steps: 2/' mine.yaml
    must_say "batch 2/2" python "$root/train.py" --config mine.yaml "${TINY[@]}"
    must_say "all of them" python "$root/train.py" --config mine.yaml "${TINY[@]}" --dry_run
}

path_3() {                                 # own data whose columns have other names
    echo '{"q": "1+2=", "a": "3"}' >rows.jsonl
    must_say "columns" python "$root/train.py" --dataset_name rows.jsonl \
        --model_name_or_path "$(model)"
    must_say "batch 1/1" python "$root/train.py" --dataset_name rows.jsonl --columns q a --steps 1 \
        --model_name_or_path "$(model)" --max_completion_length 4 --eval_samples 0
}

model() {                                  # the folder of a tiny policy of the built-in task
    ls -d runs/cold_start/*/ 2>/dev/null || {
        python "$root/train.py" "${TINY[@]}" --steps 1 --output_dir made >/dev/null
        ls -d runs/cold_start/*/
    }
}

path_4() {                                 # a killed run goes on
    python "$root/train.py" "${TINY[@]}" --steps 100 --save_steps 1 --output_dir killed >/dev/null &
    until ls killed/checkpoints/step_* >/dev/null 2>&1; do sleep 0.1; done
    kill -9 $!
    wait $! 2>/dev/null || true
    must_say "^batch" python "$root/train.py" --output_dir killed --resume
    [ "$(wc -l <killed/metrics.jsonl)" = 100 ]               # each batch once
}

path_5() {                                 # an adapter, loaded elsewhere, merged and served
    ln -s "$root/checkpoints" "$root/recipes" .
    python recipes/notes.py
    must_say "; next:" python "$root/train.py" --config recipes/laptop-notes.yaml --steps 1 \
        --prompts_per_step 2 --num_generations 4 \
        --eval_samples 1 --eval_prompts 2 --output_dir notes
    printf '%s\n' "from peft import PeftModel" \
        "from transformers import AutoModelForCausalLM, AutoTokenizer" \
        "base = AutoModelForCausalLM.from_pretrained('checkpoints/SmolLM2-135M-Instruct')" \
        "model = PeftModel.from_pretrained(base, 'notes/checkpoints/step_1')" \
        "model.merge_and_unload().save_pretrained('merged')" \
        "AutoTokenizer.from_pretrained('notes/checkpoints/step_1').save_pretrained('merged')" >load.py
    python load.py
    transformers serve "$PWD/merged" --device cpu --port 8765 >served 2>&1 &
    trap "kill $!" EXIT
    until curl -sf localhost:8765/health >/dev/null; do
        kill -0 $! || { tail -n 5 served; exit 1; }          # it has stopped: its last words
        sleep 1
    done
    must_say '"content"' curl -s localhost:8765/v1/chat/completions \
        -H 'Content-Type: application/json' -d "{\"model\": \"$PWD/merged\", \"max_tokens\": 8,
        \"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of France?\"}]}"
}

for n in ${*:-1 2 3 4 5}; do
    cd "$place"
    began=$SECONDS
    echo "== path $n"
    (path_"$n")
    echo "== path $n: $((SECONDS - began)) s"
done
