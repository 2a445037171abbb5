"""Families whose layers other rows of ``test_models.py`` have already, in the same tests.

Their layouts are one device, two and four, two replicas, two stages, and experts on two.
"""

from typing import Any

import pytest
import transformers

from tests.jaxserve import test_models as models
from tests.jaxserve.row_checkpoints import Maker, saved_checkpoints, with_greedy_tokens
from tests.jaxserve.test_models import DEEPSEEK, GEMMA3_LAYERS, GRANITE, LONGROPE, QWEN_MOE, Row, rope

torch = pytest.importorskip("torch")

LAYOUTS = ("tp1", "tp2", "tp4", "dp2", "pp2", "ep2", "tp2-experts2-gather")
CONFIG_CLASSES = {"Gemma3": "Gemma3TextConfig", "Gemma4": "Gemma4TextConfig", "Llama4": "Llama4TextConfig"}
ENCODERS = {
    "MuseGlimmer": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
}
TIED = ("gemma2", "gemma3")
"""Rows of ``test_models.py`` in which each token is followed by itself; not so with the embedding as it is here."""
GLM_MOE = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "num_nextn_predict_layers": 1}
GEMMA4 = {
    "tie_word_embeddings": True,
    "sliding_window": 9,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 509,
    "final_logit_softcapping": 20.0,
    "global_head_dim": 24,
}
SELECTED = {name: value for name, value in DEEPSEEK.items() if name != "rope_interleave"}
SELECTED |= {"index_topk": 20, "index_n_heads": 32, "index_head_dim": 16}
LAYERS = {"sliding_window": 9, "layer_types": GEMMA3_LAYERS}
TWO_ROPES = {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}}
TWO_ROPES["rope_parameters"]["full_attention"] = rope(
    "yarn", factor=4.0, original_max_position_embeddings=24, beta_fast=6.0
)["rope_parameters"]
OLMOE = {"num_experts": 6, "num_experts_per_tok": 3, "hidden_size": 96, "num_key_value_heads": 4}
ROWS = {
    "ministral3": Row(
        family="Ministral3",
        raw=rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            beta_fast=6.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.5,
        ),
    ),
    "olmo3": Row(
        family="Olmo3",
        raw={"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": rope(
                    "yarn",
                    factor=4.0,
                    original_max_position_embeddings=24,
                    beta_fast=6.0,
                    attention_factor=1.2,
                )["rope_parameters"],
            }
        },
    ),
    "exaone4": Row(family="Exaone4", raw={"sliding_window": 9, "sliding_window_pattern": 3}),
    "exaone4-full": Row(
        family="Exaone4",
        raw={"sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True},
        seed=1,
        fast=(),
    ),
    "ministral": Row(family="Ministral", raw=LAYERS | {"num_key_value_heads": 2}),
    "seed-oss": Row(family="SeedOss", raw={"attention_out_bias": True}),
    "glm4-moe": Row(
        family="Glm4Moe",
        raw=GLM_MOE
        | {"use_qk_norm": True, "attention_bias": True, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5},
        fast=("tp2-experts2-gather",),
        num_experts=6,
    ),
    "glm4-moe-air": Row(family="Glm4Moe", raw=GLM_MOE | {"n_shared_experts": 2}, fast=(), num_experts=6),
    "solar-open": Row(family="SolarOpen", raw=GLM_MOE, num_experts=6),
    "glm4-moe-lite": Row(
        family="Glm4MoeLite",
        raw={name: value for name, value in DEEPSEEK.items() if name != "first_k_dense_replace"},
        num_experts=8,
    ),
    "minimax-m2": Row(
        family="MiniMaxM2",
        raw={"num_local_experts": 6, "num_experts_per_tok": 3, "rotary_dim": 6},
        seed=1,
        num_experts=6,
    ),
    "hy-v3": Row(family="HYV3", raw=QWEN_MOE | {"num_experts": 6}, fast=("tp2-experts2-gather",), num_experts=6),
    "mellum": Row(
        family="Mellum",
        raw=LAYERS | TWO_ROPES | QWEN_MOE | {"num_experts": 6, "mlp_layer_types": ["sparse", "dense", "sparse"]},
        num_experts=6,
    ),
    "laguna": Row(
        family="Laguna",
        raw=LAYERS
        | TWO_ROPES
        | QWEN_MOE
        | {"num_experts": 6, "shared_expert_intermediate_size": 36, "num_attention_heads_per_layer": [8, 12, 4]}
        | {"moe_router_logit_softcapping": 1.5, "moe_routed_scaling_factor": 2.5},
        num_experts=6,
    ),
    "laguna-element-gates": Row(
        family="Laguna",
        raw=LAYERS | QWEN_MOE | {"num_experts": 6, "gating": "per-element", "attention_bias": True},
        num_experts=6,
    ),
    "afmoe": Row(
        family="Afmoe",
        raw=LAYERS | QWEN_MOE | {"num_experts": 6, "route_scale": 2.5, "mup_enabled": True},
        num_experts=6,
    ),
    "muse-glimmer": Row(
        family="MuseGlimmer",
        raw={"sliding_window": 9, "num_hidden_layers": 4, "final_logit_softcapping": 12.0, "post_norm_eps": 1e-3},
    ),
    "glm": Row(family="Glm", raw={"num_key_value_heads": 2} | rope("default", partial_rotary_factor=0.5)),
    "glm4": Row(family="Glm4", raw=rope("default", partial_rotary_factor=0.5)),
    "ernie": Row(family="Ernie4_5", raw={"use_bias": True, "tie_word_embeddings": True}),
    "ernie-moe": Row(
        family="Ernie4_5_Moe",
        raw={"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 28, "hidden_size": 96},
        num_experts=6,
    ),
    "hunyuan": Row(
        family="HunYuanDenseV1",
        raw=rope("dynamic", alpha=50.0, factor=1.0) | {"attention_bias": True},
    ),
    "hunyuan-moe": Row(family="HunYuanMoEV1", raw={"num_experts": 6, "moe_topk": [3, 3, 3]}, num_experts=6),
    "cohere2": Row(
        family="Cohere2",
        raw={"hidden_size": 64, "sliding_window": 9, "sliding_window_pattern": 3, "logit_scale": 0.25}
        | {"layer_norm_eps": 1e-4, "tie_word_embeddings": True},
        seed=1,
    ),
    "cohere2-moe": Row(
        family="Cohere2Moe",
        raw={"num_experts": 6, "num_experts_per_tok": 3, "num_shared_experts": 2, "prefix_dense_intermediate_size": 44}
        | {"sliding_window": 9, "sliding_window_pattern": 2, "first_k_dense_replace": 1, "logit_scale": 0.25}
        | {"layer_norm_eps": 1e-4, "rms_norm_eps": None},
        num_experts=6,
    ),
    "cohere2-moe-sigmoid": Row(
        family="Cohere2Moe",
        raw={"num_experts": 6, "num_experts_per_tok": 3, "num_shared_experts": 1, "expert_selection_fn": "sigmoid"}
        | LAYERS
        | {"norm_topk_prob": False, "shared_expert_combination_strategy": "sum"},
        num_experts=6,
    ),
    "cohere": Row(
        family="Cohere",
        raw={"hidden_size": 96, "layer_norm_eps": 1e-4, "tie_word_embeddings": True, "logit_scale": 0.5},
        fast=(),
    ),
    "olmoe": Row(family="Olmoe", raw=OLMOE, num_experts=6),
    "flex-olmo": Row(family="FlexOlmo", raw=OLMOE | {"norm_topk_prob": True}, num_experts=6),
    "arcee": Row(family="Arcee", raw={"attention_bias": True, "mlp_bias": True}),
    "cwm": Row(family="Cwm", raw={"bos_token_id": 1, "sliding_window": 9, "mlp_bias": True}, seed=1),
    "dots1": Row(
        family="Dots1",
        raw=GLM_MOE | {"first_k_dense_replace": 1, "n_shared_experts": 2, "n_group": 3, "topk_group": 2},
        num_experts=6,
    ),
    "exaone-moe": Row(
        family="ExaoneMoe",
        raw={"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "sliding_window": 9}
        | {"sliding_window_pattern": 3},
        num_experts=6,
    ),
    "helium": Row(family="Helium", raw={"hidden_size": 96, "attention_bias": True, "mlp_bias": True}),
    "youtu": Row(family="Youtu", raw={name: DEEPSEEK[name] for name in DEEPSEEK if "experts" not in name}, seed=1),
    "nemotron": Row(
        family="Nemotron", raw={"norm_eps": 1e-4, "num_hidden_layers": 2} | rope("default", partial_rotary_factor=0.5)
    ),
    "jais2": Row(family="Jais2", raw={"layer_norm_eps": 1e-4}),
    "phi": Row(
        family="Phi", raw={"hidden_size": 96, "layer_norm_eps": 1e-4} | rope("default", partial_rotary_factor=0.5)
    ),
    "stablelm": Row(
        family="StableLm",
        raw={"hidden_size": 96, "layer_norm_eps": 1e-4, "use_qkv_bias": True}
        | rope("default", partial_rotary_factor=0.5),
    ),
    "stablelm-parallel": Row(
        family="StableLm",
        raw={"hidden_size": 96, "layer_norm_eps": 1e-4, "use_parallel_residual": True}
        | rope("default", partial_rotary_factor=0.5),
    ),
    "opt": Row(family="OPT", raw={"ffn_dim": 52, "word_embed_proj_dim": 40, "tie_word_embeddings": True}),
    "vaultgemma": Row(
        family="VaultGemma",
        raw={"tie_word_embeddings": True, "sliding_window": 9, "query_pre_attn_scalar": 20}
        | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 20.0},
    ),
    "hyperclovax": Row(family="HyperCLOVAX", raw=GRANITE | {"logits_scaling": 2.0}),
    "gpt-neo": Row(
        family="GPTNeo",
        raw={"tie_word_embeddings": True, "window_size": 9, "attention_types": [[["global"], 1], [["local"], 2]]},
    ),
    "gptj": Row(family="GPTJ", raw={"hidden_size": 96, "rotary_dim": 8}, fast=()),
    "gpt-bigcode": Row(family="GPTBigCode", raw={"tie_word_embeddings": True}),
    "starcoder2": Row(family="Starcoder2", raw={"norm_epsilon": 1e-4, "sliding_window": 11}),
    "apertus": Row(family="Apertus", raw={"hidden_act": "xielu"}),
    "nanochat": Row(family="NanoChat", raw={"hidden_act": "relu2"}),
    **{f"{name}-other-tokens": models.ROWS[name] for name in TIED},
    "gemma4-e2b": Row(
        family="Gemma4",
        raw=GEMMA4
        | {"num_hidden_layers": 6, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}
        | {"layer_types": [*GEMMA3_LAYERS[:1], GEMMA3_LAYERS[2]] * 3, "hidden_size_per_layer_input": 20},
    ),
    "gemma4-31b": Row(
        family="Gemma4",
        raw=GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "layer_types": GEMMA3_LAYERS},
    ),
    "gemma4-26b": Row(
        family="Gemma4",
        raw=GEMMA4
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 28}
        | {"layer_types": GEMMA3_LAYERS},
        num_experts=6,
    ),
    "phimoe": Row(
        family="Phimoe",
        raw=rope("longrope", **LONGROPE, short_mscale=1.1, long_mscale=1.3, original_max_position_embeddings=44)
        | {"num_local_experts": 6, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.2},
        is_fixed_rope=False,
        num_experts=6,
    ),
    "granite4": Row(
        family="GraniteMoeHybrid",
        raw=GRANITE
        | {"num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 28}
        | {"layer_types": ["full_attention"] * 3, "hidden_size": 96, "mamba_n_heads": 12},
        num_experts=6,
    ),
    "granite4-dense": Row(
        family="GraniteMoeHybrid",
        raw=GRANITE
        | {"num_local_experts": 0, "shared_intermediate_size": 28, "position_embedding_type": "rope"}
        | {"layer_types": ["full_attention"] * 3, "hidden_size": 96, "mamba_n_heads": 12},
        fast=(),
    ),
    "mistral4": Row(
        family="Mistral4",
        raw=DEEPSEEK
        | rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.5,
        )
        | {"n_shared_experts": 1, "first_k_dense_replace": 0, "head_dim": 22},
        num_experts=8,
    ),
    "llama4": Row(
        family="Llama4",
        raw={"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 28, "intermediate_size_mlp": 52}
        | {"moe_layers": [1], "no_rope_layers": [1, 0, 1], "floor_scale": 16, "attn_scale": 0.5}
        | {"attention_chunk_size": 16},
        num_experts=6,
    ),
    "deepseek-v32": Row(family="DeepseekV32", raw=SELECTED | {"n_group": 2, "topk_group": 1}, seed=1, num_experts=8),
    "glm-moe-dsa": Row(
        family="GlmMoeDsa",
        raw=SELECTED | {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
        seed=1,
        fast=(),
        num_experts=8,
    ),
    "llama4-dense": Row(
        family="Llama4",
        raw={"moe_layers": [], "intermediate_size_mlp": 52, "no_rope_layers": [1, 1, 0], "use_qk_norm": False}
        | {"attention_chunk_size": 24},
        seed=1,
        fast=(),
    ),
}


SLOW = {
    "arcee",
    "cohere",
    "cohere2-moe-sigmoid",
    "cwm",
    "dots1",
    "exaone-moe",
    "helium",
    "jais2",
    "laguna-element-gates",
}
SLOW |= {f"{name}-other-tokens" for name in TIED}
SLOW |= {"mellum", "ministral", "olmoe", "stablelm", "stablelm-parallel", "vaultgemma", "youtu"}
"""Rows whose layers others have already: all their tests are slow."""


def make_hf(row: Row) -> Any:
    """Transformers' model with random weights, none of them neutral.

    An embedding that is the head is small beside the layers: the next token would be the last one again.
    """
    name = CONFIG_CLASSES.get(row.family, f"{row.family}Config")
    raw, kind = {**models.SIZES, **row.raw}, "CausalLM"
    if row.family in ENCODERS:
        raw, kind = {"text_config": raw, "vision_config": ENCODERS[row.family]}, "ConditionalGeneration"
    config = getattr(transformers, name)(**raw)
    config._attn_implementation = "eager"
    torch.manual_seed(row.seed)
    model = getattr(transformers, f"{row.family}For{kind}")(config).to(torch.float32).eval()
    embed_gain = 0.1 if config.get_text_config().tie_word_embeddings else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                gain = 6.0 if "lm_head" in name else embed_gain if "embed_tokens." in name else 1.6
                parameter.normal_(0.0, gain if "embed" in name else gain * parameter.shape[-1] ** -0.5)
            elif "norm" in name and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
        model.tie_weights()
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """Makes a row's checkpoint, once, without tokens."""
    return saved_checkpoints(ROWS, make_hf, tmp_path_factory)


@pytest.fixture(scope="module")
def checkpoint(saved: Maker) -> Maker:
    """Makes a row's checkpoint with transformers' greedy tokens, once."""
    return with_greedy_tokens(ROWS, saved)


def slow(name: str, is_slow: bool = False) -> list[pytest.MarkDecorator]:
    """The marks of a test of a row."""
    return [pytest.mark.slow] if is_slow or name in SLOW else []


def combinations() -> list[Any]:
    """Every row on its layouts; some of them slow."""
    return [
        pytest.param(name, layout, marks=slow(name, layout not in row.fast), id=f"{name}-{layout}")
        for name, row in ROWS.items()
        for layout in LAYOUTS
        if layout in models.LAYOUTS or layout in row.expert_layouts
    ]


@pytest.mark.parametrize(("name", "layout"), combinations())
def test_greedy_tokens_equal_those_of_transformers(name: str, layout: str, checkpoint: Maker) -> None:
    """Ragged, in chunks, with pages for one request at a time, and from the cache."""
    models.test_greedy_tokens_equal_those_of_transformers(name, layout, checkpoint)


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow(name)) for name in ROWS])
def test_a_module_on_its_own_gives_the_logits_of_transformers(name: str, saved: Maker) -> None:
    models.test_a_module_on_its_own_gives_the_logits_of_transformers(name, saved)
