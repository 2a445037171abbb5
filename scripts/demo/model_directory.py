"""The demo model's shape, tokenizer and chat template, and the files of its directory other than the weights."""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, processors

from scripts.demo.training_text import PIECES, SPECIAL_TOKENS, TOKEN_IDS


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Llama."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    head_size: int


DEMO = Sizes(num_layers=4, hidden_size=128, ffn_size=384, num_heads=4, head_size=32)
"""The demo model."""
SMALL = Sizes(num_layers=2, hidden_size=64, ffn_size=192, num_heads=2, head_size=32)
"""A model that drafts for it."""

ROPE_THETA = 10000.0
NORM_EPSILON = 1e-5
MAX_POSITIONS = 512

ENDS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
ENDS_IDS = {f"{name}_id": TOKEN_IDS[token] for name, token in ENDS.items() if name != "unk_token"}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('expected role user or assistant, got ' + message['role']) }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Jinja template of a chat; it writes the beginning-of-sequence token itself."""


def build_tokenizer() -> Tokenizer:
    """Return the tokenizer, which adds ``<s>`` at the start of a text."""
    tokenizer = Tokenizer(models.BPE(vocab=TOKEN_IDS, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=False))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", TOKEN_IDS["<s>"])]
    )
    return tokenizer


def weight_shapes(sizes: Sizes = DEMO) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the checkpoint, matrices as [out, in]; the head is the embedding."""
    heads = sizes.num_heads * sizes.head_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(PIECES), sizes.hidden_size)}
    for layer in range(sizes.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (sizes.hidden_size,)
        for name in ("q_proj", "k_proj", "v_proj"):
            shapes[f"{prefix}self_attn.{name}.weight"] = (heads, sizes.hidden_size)
        shapes[prefix + "self_attn.o_proj.weight"] = (sizes.hidden_size, heads)
        shapes[prefix + "post_attention_layernorm.weight"] = (sizes.hidden_size,)
        shapes[prefix + "mlp.gate_proj.weight"] = (sizes.ffn_size, sizes.hidden_size)
        shapes[prefix + "mlp.up_proj.weight"] = (sizes.ffn_size, sizes.hidden_size)
        shapes[prefix + "mlp.down_proj.weight"] = (sizes.hidden_size, sizes.ffn_size)
    shapes["model.norm.weight"] = (sizes.hidden_size,)
    return shapes


def config(sizes: Sizes = DEMO) -> dict[str, object]:
    """Return the content of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "head_dim": sizes.head_size,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": sizes.ffn_size,
        "max_position_embeddings": MAX_POSITIONS,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": sizes.num_heads,
        "num_hidden_layers": sizes.num_layers,
        "num_key_value_heads": sizes.num_heads,
        "rms_norm_eps": NORM_EPSILON,
        "rope_scaling": None,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": len(PIECES),
        **ENDS_IDS,
    }


def write_model_directory(directory: Path, sizes: Sizes = DEMO) -> None:
    """Write the Hugging Face directory without the weights: configuration, tokenizer, chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        **ENDS,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    contents: dict[str, object] = {
        "config.json": config(sizes),
        "generation_config.json": {"do_sample": False, **ENDS_IDS},
        "special_tokens_map.json": ENDS,
        "tokenizer_config.json": tokenizer_config,
    }
    for name, content in contents.items():
        (directory / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
