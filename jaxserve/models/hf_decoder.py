"""The part of ``config.json`` that all families share: sizes, defaults, sliding windows."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from jaxserve.layers.model_config import RopeConfig
from jaxserve.models.decoder import DecoderConfig
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_rope import RopeDefaults, longest_context, read_rope

MAX_LAYERS: Final = 10_000
_DTYPES: Final = ("float32", "float16", "bfloat16")

ACTIVATIONS: Final[Mapping[str, str]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
}
"""Hugging Face's names of the supported activations; synonyms map to one name."""
PLAIN_ACTIVATIONS: Final[Mapping[str, str]] = {**ACTIVATIONS, "relu2": "relu2"}
"""The same of MLPs without gates."""


Windows = tuple[int | None, ...]


def same_windows(fields: ConfigFields, num_layers: int, window: int | None = None) -> Windows:
    """Return the same window for every layer of a family without ``layer_types``; a ``layer_types`` that differs is a
    problem."""
    types = _read_layer_types(fields, num_layers)
    if types is not None and any(slides != (window is not None) for slides in types):
        meaning = "full_attention" if window is None else "sliding_attention"
        fields.note(
            "layer_types", f"expected {meaning} in every layer: all layers of this architecture have the same attention"
        )
    return (window,) * num_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyDefaults:
    """Defaults of a family's class in transformers for fields that config.json omits.

    Attributes:
        num_kv_heads: Key/value heads; None means one per query head.
        head_dim: H; None means D / N.
        norm_eps: Added to the mean square in every RMSNorm.
        rope: Defaults of the rotary embedding.
        tie_embeddings: Whether the head is the embedding.
        bos_token_id: First token of a sequence.
        eos_token_ids: Tokens that end a generation.
        activation: The activation.
        activation_field: Its field.
        has_gates: Whether the MLP has gates; without them, further activations are supported.
        attention_bias: Whether all four projections of the attention have biases; None: they never have.
        mlp_bias: Whether the MLP has biases; None: it never has.
        norm_offset: Added to the weight of every RMSNorm.
        windows: Reads each layer's window, given the number of layers.
        sizes: Values of further fields; see ``class_sizes``.
    """

    num_kv_heads: int | None = None
    head_dim: int | None = None
    norm_eps: float = 1e-6
    rope: RopeDefaults = RopeDefaults()
    tie_embeddings: bool = False
    bos_token_id: int | None = 1
    eos_token_ids: tuple[int, ...] = (2,)
    activation: str = "silu"
    activation_field: str = "hidden_act"
    has_gates: bool = True
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    norm_offset: float = 0.0
    windows: Callable[[ConfigFields, int], Windows] = same_windows
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])


def class_sizes(vocab: int, hidden: int, ffn: int, layers: int, heads: int, positions: int) -> dict[str, int]:
    """Return the sizes of a class in transformers, which its checkpoints' config.json may leave out."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
    }


def read_decoder(fields: ConfigFields, architecture: str, defaults: FamilyDefaults) -> DecoderConfig:
    """Read a plain pre-norm decoder; the family replaces what differs.

    Problems are recorded in ``fields``: the result is usable only after ``fields.raise_problems()``.
    """
    fields = fields.with_defaults(defaults.sizes)
    hidden_size = fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads")
    head_dim = _read_head_dim(fields, hidden_size, num_heads, defaults)
    rope = read_rope(fields, head_dim, defaults.rope)
    has_bias = _read_bias(fields, "attention_bias", defaults.attention_bias)
    activations = ACTIVATIONS if defaults.has_gates else PLAIN_ACTIVATIONS
    return DecoderConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_read_kv_heads(fields, num_heads, defaults),
        head_dim=head_dim,
        ffn_size=fields.integer("intermediate_size"),
        norm_eps=fields.number("rms_norm_eps", defaults.norm_eps),
        norm_offset=defaults.norm_offset,
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=_read_bias(fields, "mlp_bias", defaults.mlp_bias),
        activation=read_activation(fields, defaults.activation_field, defaults.activation, activations),
        max_positions=longest_context(rope),
        tie_embeddings=fields.flag("tie_word_embeddings", defaults.tie_embeddings),
        rope=rope,
        rope_layers=(True,) * num_layers,
        sliding_windows=defaults.windows(fields, num_layers),
        bos_token_id=fields.nullable_integer("bos_token_id", defaults.bos_token_id, minimum=0),
        eos_token_ids=fields.token_ids("eos_token_id", defaults.eos_token_ids),
        dtype=read_dtype(fields),
    )


def read_local_rope(fields: ConfigFields, base: DecoderConfig, defaults: FamilyDefaults) -> RopeConfig:
    """Read the rotary embedding of the layers with a window, ``rope_parameters.sliding_attention``; that of the others
    if there are none.

    Args:
        fields: Fields of config.json.
        base: The model, with the rotary embedding of the other layers.
        defaults: Defaults of the family.
    """
    if all(window is None for window in base.sliding_windows):
        return base.rope
    local = RopeDefaults(is_partial=defaults.rope.is_partial, layer_type="sliding_attention")
    return read_rope(fields.with_defaults(defaults.sizes), base.head_dim, local)


def rotate_within_windows(base: DecoderConfig) -> DecoderConfig:
    """Return the model with a rotary embedding in the layers that have a window, and none in the others."""
    return dataclasses.replace(base, rope_layers=tuple(window is not None for window in base.sliding_windows))


def _read_bias(fields: ConfigFields, field: str, default: bool | None) -> bool:
    return default is not None and fields.flag(field, default)


def read_windows(fields: ConfigFields, window: int | None, sliding: Sequence[bool]) -> Windows:
    """Return each layer's window according to ``layer_types``, or to ``sliding`` if that is missing.

    Args:
        fields: Fields of config.json.
        window: Tokens that a sliding layer sees; None if the model has no window.
        sliding: For each layer, whether it slides if ``layer_types`` is missing and the model has a window.
    """
    types = _read_layer_types(fields, len(sliding))
    if types is not None and any(types) and window is None:
        fields.note("layer_types", "has sliding_attention, but the model has no sliding_window")
    return tuple(window if slides else None for slides in (sliding if types is None else types))


def read_late_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """Read Qwen's windows: off unless ``use_sliding_window``; then in the layers from ``max_window_layers`` on."""
    first = fields.integer("max_window_layers", 28, minimum=0)
    window = fields.nullable_integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else None
    return read_windows(fields, window, [layer >= first for layer in range(num_layers)])


def read_repeated_windows(
    fields: ConfigFields, num_layers: int, pattern: int, *, absent: int = 4096, first_full: int | None = None
) -> Windows:
    """Read windows in every layer but each ``pattern``-th, unless ``layer_types`` says otherwise.

    Args:
        fields: Fields of config.json.
        num_layers: Number of layers.
        pattern: Every how many layers one has no window.
        absent: ``sliding_window`` if that is missing.
        first_full: Index of the first layer without a window; None: ``pattern - 1``.
    """
    window = fields.nullable_integer("sliding_window", absent)
    first = pattern - 1 if first_full is None else first_full
    return read_windows(fields, window, [(index - first) % pattern != 0 for index in range(num_layers)])


def read_listed_windows(fields: ConfigFields, num_layers: int, *, absent: int, slides: bool) -> Windows:
    """Read windows in the layers that ``layer_types`` lists.

    Args:
        fields: Fields of config.json.
        num_layers: Number of layers.
        absent: ``sliding_window`` if that is missing.
        slides: Whether all layers slide if ``layer_types`` is missing.
    """
    window = fields.nullable_integer("sliding_window", absent)
    return read_windows(fields, window, (slides,) * num_layers)


def read_one_window(fields: ConfigFields, num_layers: int, absent: int | None = None) -> Windows:
    """Read one ``sliding_window`` for all layers; ``absent`` is its default."""
    return same_windows(fields, num_layers, fields.nullable_integer("sliding_window", absent))


def read_layer_list(
    fields: ConfigFields, field: str, num_layers: int, kinds: Sequence[str | int]
) -> tuple[object, ...] | None:
    """Return the list with one entry for each layer; None if config.json has no such list or an invalid one.

    Args:
        fields: Fields of config.json.
        field: Name of the list.
        num_layers: Number of layers.
        kinds: The entries that it may have.
    """
    entries = fields.items(field)
    if entries is None:
        return None
    unknown = sorted({str(each) for each in entries if each not in kinds})
    if unknown:
        fields.note(field, f"expected {' or '.join(map(str, kinds))}, got {', '.join(unknown)}")
    if len(entries) != num_layers:
        fields.note(field, f"expected {num_layers} entries, one per layer, got {len(entries)}")
    return None if unknown or len(entries) != num_layers else entries


def read_layer_indices(fields: ConfigFields, field: str, num_layers: int) -> tuple[bool, ...] | None:
    """Return for each layer whether a list names its index; None if config.json has no such list."""
    indices = fields.items(field)
    if indices is None:
        return None
    outside = [str(each) for each in indices if each not in range(num_layers)]
    if outside:
        fields.note(field, f"expected indices of layers, 0 to {num_layers - 1}, got {', '.join(outside)}")
    return tuple(index in indices for index in range(num_layers))


def _read_layer_types(fields: ConfigFields, num_layers: int) -> tuple[bool, ...] | None:
    """Return for each layer whether it slides; None if config.json has no such list or an invalid one."""
    types = read_layer_list(fields, "layer_types", num_layers, ("full_attention", "sliding_attention"))
    return None if types is None else tuple(each == "sliding_attention" for each in types)


def _read_head_dim(fields: ConfigFields, hidden_size: int, num_heads: int, defaults: FamilyDefaults) -> int:
    if fields.is_given("head_dim") or defaults.head_dim is not None:
        return fields.integer("head_dim", defaults.head_dim)
    if hidden_size % num_heads:
        fields.note("head_dim", f"is missing, and hidden_size {hidden_size} is not divisible by {num_heads} heads")
    return max(1, hidden_size // num_heads)


def _read_kv_heads(fields: ConfigFields, num_heads: int, defaults: FamilyDefaults) -> int:
    absent = num_heads if defaults.num_kv_heads is None else defaults.num_kv_heads
    num_kv_heads = fields.nullable_integer("num_key_value_heads", absent) or num_heads
    if num_heads % num_kv_heads:
        fields.note("num_key_value_heads", f"expected a divisor of the {num_heads} query heads, got {num_kv_heads}")
    return num_kv_heads


def read_activation(
    fields: ConfigFields, field: str, default: str, activations: Mapping[str, str] = ACTIVATIONS
) -> str:
    """Return our name of the activation in a field, one of ``activations``."""
    name = fields.text(field, default)
    if name not in activations:
        fields.note(field, f"expected one of {', '.join(activations)}, got {name!r}")
    return activations.get(name, "silu")


def read_dtype(fields: ConfigFields) -> str:
    """Read ``dtype``, or ``torch_dtype`` as it was called before transformers 5; both are checked."""
    found = ["float32"]
    for field in ("torch_dtype", "dtype"):
        if fields.is_given(field):
            found.append(fields.text(field, "float32").removeprefix("torch."))
            if found[-1] not in _DTYPES:
                fields.note(field, f"expected one of {', '.join(_DTYPES)}, got {found[-1]!r}")
    return found[-1]
