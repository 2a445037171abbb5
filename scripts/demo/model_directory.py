"""The demo model's shape, tokenizer and chat template, and the files of its directory other than the weights."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, processors

from scripts.demo.training_text import PIECES, SPECIAL_TOKENS, TOKEN_IDS

NUM_LAYERS = 4
HIDDEN_SIZE = 128
FFN_SIZE = 384
NUM_HEADS = 4
HEAD_SIZE = 32
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


def weight_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the checkpoint, matrices as [out, in]; the head is the embedding."""
    heads = NUM_HEADS * HEAD_SIZE
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(PIECES), HIDDEN_SIZE)}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (HIDDEN_SIZE,)
        for name in ("q_proj", "k_proj", "v_proj"):
            shapes[f"{prefix}self_attn.{name}.weight"] = (heads, HIDDEN_SIZE)
        shapes[prefix + "self_attn.o_proj.weight"] = (HIDDEN_SIZE, heads)
        shapes[prefix + "post_attention_layernorm.weight"] = (HIDDEN_SIZE,)
        shapes[prefix + "mlp.gate_proj.weight"] = (FFN_SIZE, HIDDEN_SIZE)
        shapes[prefix + "mlp.up_proj.weight"] = (FFN_SIZE, HIDDEN_SIZE)
        shapes[prefix + "mlp.down_proj.weight"] = (HIDDEN_SIZE, FFN_SIZE)
    shapes["model.norm.weight"] = (HIDDEN_SIZE,)
    return shapes


def config() -> dict[str, object]:
    """Return the content of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "hidden_size": HIDDEN_SIZE,
        "initializer_range": 0.02,
        "intermediate_size": FFN_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": NUM_HEADS,
        "num_hidden_layers": NUM_LAYERS,
        "num_key_value_heads": NUM_HEADS,
        "rms_norm_eps": NORM_EPSILON,
        "rope_scaling": None,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": len(PIECES),
        **ENDS_IDS,
    }


def write_model_directory(directory: Path) -> None:
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
        "config.json": config(),
        "generation_config.json": {"do_sample": False, **ENDS_IDS},
        "special_tokens_map.json": ENDS,
        "tokenizer_config.json": tokenizer_config,
    }
    for name, content in contents.items():
        (directory / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
