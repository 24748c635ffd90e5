"""Writes a tiny model whose tokens can be read: the word `t123` is token 123. Its weights are made up at start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 1000
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")
"""Tokens 0 to 3."""

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ {'system': 't4', 'user': 't5', 'assistant': 't6'}[m['role']] }} {{ m['content'] }} "
    "{% endfor %}{% if add_generation_prompt %}t6 {% endif %}"
)


def words(tokens: list[int]) -> str:
    """The text of ordinary tokens (4 and up)."""
    return " ".join(f"t{token}" for token in tokens)


def write_model(folder: Path) -> None:
    """Writes the configuration and a tokenizer of words, as a checkpoint's folder holds them."""
    vocabulary = {name: number for number, name in enumerate(SPECIAL)}
    vocabulary |= {f"t{number}": number for number in range(len(SPECIAL), VOCABULARY)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": name, **flags, "special": True}
            for number, name in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": CONFIG["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    folder.mkdir(parents=True, exist_ok=True)
    files = {"config": CONFIG, "tokenizer": tokenizer, "tokenizer_config": settings}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1))
