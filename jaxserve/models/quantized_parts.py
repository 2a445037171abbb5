"""Which float matrices of a model are quantized while they are loaded, and how."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from checkpoints import is_gguf
from checkpoints.quantized.on_load import METHODS
from checkpoints.quantized.records import SPANS, Records
from checkpoints.quantized.settings import read_settings
from jaxserve.api.errors import ConfigError
from jaxserve.api.quantization import NAME, QuantizationSettings, is_module
from jaxserve.models.abstract import AbstractModel, LogicalParam
from jaxserve.models.loading import on_load_method

_IS_ROUTER: Final = re.compile(r"\.(router|shared\.gate)\.")
_MOST_NAMED: Final = 3


class Rules(NamedTuple):
    """How float weights are quantized while they are loaded; ways are names of ``on_load.METHODS``, None: they stay.

    Attributes:
        methods: The way of each part of a model: ``linear``, ``moe``, ``head``.
        targets: Names of modules, and their way, which takes precedence in this order.
        ignore: Names of modules that stay floats.
    """

    methods: Mapping[str, str | None] = MappingProxyType({})
    targets: tuple[tuple[str, str | None], ...] = ()
    ignore: tuple[str, ...] = ()

    def method(self, module: str, part: str | None) -> str | None:
        """Return the way of a module; one that is no part stays unless it is a target."""
        if any(is_module(name, module) for name in self.ignore):
            return None
        found = (method for name, method in self.targets if is_module(name, module))
        return next(found, self.methods.get(part) if part is not None else None)


def rules_of(settings: QuantizationSettings, quantization: str | None, directory: Path) -> Rules | None:
    """Return how the weights of a checkpoint are quantized while they are loaded; None: not.

    Args:
        settings: The checked ``quantization_config``.
        quantization: As in ``EngineConfig``.
        directory: The checkpoint.

    Raises:
        ConfigError: Settings contradict each other or the checkpoint.
    """
    given = [*settings.methods, *(key for key in ("targets", "ignore") if getattr(settings, key))]
    if given and (is_gguf(directory) or read_settings(directory) is not None):
        raise ConfigError(
            f"{NAME}.{given[0]} says how float weights are quantized while they are loaded, but those in {directory} "
            f"are quantized already; leave out {', '.join(given)}"
        )
    base = on_load_method(quantization, directory)
    methods = {"linear": base, "moe": base, "head": None, **settings.methods}
    if not any((*methods.values(), *(method for _, method in settings.targets))):
        if given:
            raise ConfigError(f"{NAME}.{given[0]}: nothing is quantized; name a method too, as quantization='int8'")
        return None
    return Rules(methods, settings.targets, settings.ignore)


def quantized_parts(model: AbstractModel, rules: Rules) -> tuple[dict[str, Records], dict[str, str]]:
    """Return what matrices are quantized to, and in which way, by their names in the model's recipes.

    Raises:
        ConfigError: A name in the rules is of no matrix, or a matmul has matrices that differ in their way.
    """
    records: dict[str, Records] = {}
    methods: dict[str, str] = {}
    modules: set[str] = set()
    head = "head." if any(path.startswith("head.") for path in model.logical) else "embed."
    for path, param in model.logical.items():
        if not _can_be(path, param):
            continue
        names = {_module(name): name for name, _ in param.recipe.sources}
        modules |= names.keys()
        part = "head" if path.startswith(head) else None
        if path.startswith("layers."):
            part = "linear" if param.stored is None or param.stored.experts is None else "moe"
        method = _common(rules, names, part)
        if method is None:
            continue
        for piece in param.recipe.pieces:
            own = METHODS[method].records(param.recipe.shape[1])
            records[piece.source], methods[piece.source] = own._replace(is_transposed=piece.is_transposed), method
    _check_names(rules, modules)
    return records, methods


def _can_be(path: str, param: LogicalParam) -> bool:
    """Whether a matrix can be quantized; routers and gates of shared experts stay."""
    return param.stored is not None and _IS_ROUTER.search(path) is None and param.recipe.shape[1] % SPANS[-1] == 0


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _common(rules: Rules, modules: Iterable[str], part: str | None) -> str | None:
    """Return the way of modules that one matmul has."""
    found = {module: rules.method(module, part) for module in modules}
    first, method = next(iter(found.items()))
    for module, other in found.items():
        if other != method:
            raise ConfigError(
                f"{NAME}: {first} and {module} are computed by one matmul, so that both must be quantized alike, but "
                f"targets and ignore have {method or 'floats'} for the one and {other or 'floats'} for the other"
            )
    return method


def _check_names(rules: Rules, modules: set[str]) -> None:
    """Refuse names in the rules that are of no matrix."""
    for key, names in (("targets", [name for name, _ in rules.targets]), ("ignore", rules.ignore)):
        for name in names:
            if not any(is_module(name, module) for module in modules):
                some = ", ".join(sorted(modules)[:_MOST_NAMED])
                raise ConfigError(f"{NAME}.{key}: {name!r} is no matrix that can be quantized; there are {some}, …")
