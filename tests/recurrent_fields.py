"""Fields of config.json that families with recurrent layers need beside those that all families share."""

from collections.abc import Mapping
from typing import Any


def with_recurrent_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The same model with the fields that its architecture cannot do without."""
    (architecture,), width, num_layers = raw["architectures"], raw["hidden_size"], raw["num_hidden_layers"]
    size = raw.get("head_dim", 8)
    own: dict[str, dict[str, Any]] = {
        "BambaForCausalLM": {"mamba_n_heads": 2, "mamba_d_head": width, "mamba_n_groups": 1},
        "GraniteMoeHybridForCausalLM": {"layer_types": ["attention"] * num_layers},
        "Mamba2ForCausalLM": {"num_heads": 2 * width // size, "head_dim": size, "n_groups": 1},
        "NemotronHForCausalLM": {"hybrid_override_pattern": ("*-" * num_layers)[:num_layers]},
    }
    if architecture.endswith("Model"):
        architecture = f"{architecture.removesuffix('Model')}ForCausalLM"
    return {**raw, **own.get(architecture, {})}
