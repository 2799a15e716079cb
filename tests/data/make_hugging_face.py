"""Makes the tiny models of `tests/data/hugging_face/`, which `tests/test_hugging_face.py`
reads. It is run by hand, and only to change them:

    pip install torch transformers safetensors
    python tests/data/make_hugging_face.py

The files were made with transformers 5.24.0 and torch 2.13.0. Each folder holds what
`save_pretrained` writes, and `expected.safetensors`: the logits of `tokens`, and the greedy
continuation of `prompt` with a KV cache.
"""

import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

FOLDER = Path(__file__).parent / "hugging_face"
VOCABULARY = 61
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def models():
    """For each folder, a model."""
    gpt2 = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=48,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
    )
    yield "gpt2", transformers.GPT2LMHeadModel(gpt2)

    # As Llama 2, with the grouped heads of its largest model.
    llama = transformers.LlamaConfig(**LLAMA, tie_word_embeddings=False)
    yield "llama", transformers.LlamaForCausalLM(llama)

    # As Llama 3.2. Of the 8 frequencies some are kept, some scaled, some in between. The
    # heads are larger than `hidden_size / num_attention_heads`.
    llama = transformers.LlamaConfig(
        **LLAMA,
        tie_word_embeddings=True,
        head_dim=16,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    yield "llama_scaled", transformers.LlamaForCausalLM(llama)


def randomise(model):
    """No parameter keeps a value, such as 0 or 1, that a wrong model would have, too."""
    for name, x in model.named_parameters():
        is_scale = x.ndim == 1 and name.endswith("weight")
        torch.nn.init.normal_(x, mean=float(is_scale), std=0.15)


def main():
    torch.manual_seed(0)
    for name, model in models():
        model.set_attn_implementation("eager")
        randomise(model)
        model.eval()
        tokens = torch.randint(VOCABULARY, (40,))
        prompt = tokens[:7]
        with torch.no_grad():
            logits = model(tokens[None]).logits[0]
            generated = model.generate(
                prompt[None],
                attention_mask=torch.ones_like(prompt[None]),
                do_sample=False,
                use_cache=True,
                min_new_tokens=20,
                max_new_tokens=20,
                eos_token_id=None,
                pad_token_id=0,
            )[0, len(prompt) :]
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        model.save_pretrained(FOLDER / name)
        (FOLDER / name / "generation_config.json").unlink()
        expected = {
            "tokens": tokens.int(),
            "logits": logits.float(),
            "prompt": prompt.int(),
            "generated": generated.int(),
        }
        save_file(
            {key: x.contiguous() for key, x in expected.items()},
            FOLDER / name / "expected.safetensors",
        )


if __name__ == "__main__":
    main()
