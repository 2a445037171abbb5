"""Sharding layouts: which mesh axis each logical axis of an array is split over."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from sharding.axes import DISPATCHES, LOGICAL_AXES, LOGITS, MESH_AXES, RESIDUALS

_SPLIT_WITH_ROWS = ("batch", "pages", "experts")


class LayoutError(ValueError):
    """A layout names an unknown axis, maps two dimensions of an array to one mesh axis, or contradicts itself."""


@dataclasses.dataclass(frozen=True)
class ShardingLayout:
    """A frozen map from logical axes to mesh axes.

    Attributes:
        name: Name of the layout in ``sharding.registry``.
        rules: Mesh axis of each split logical axis; logical axes that are not listed are replicated. Rows (``batch``)
            and the pages of their keys and values (``pages``) are split together.
        dispatch: How rows reach their experts. ``all_reduce``: every device has the rows and adds what its experts
            compute. ``gather`` and ``all_to_all``: the axis of the experts also splits the rows, which all experts'
            devices gather, or which are sent to the devices that need them.
        residual: The hidden states between blocks. ``replicated``: every device has those of all its rows.
            ``tokens``: the devices that split heads and features have some rows each; they gather the rows before a
            block and scatter its sum (arXiv:2205.05198).
        logits: ``gathered``: every device has the logits of the whole vocabulary. ``split``: each keeps those of its
            part of the vocabulary, and they sample together.

    The logical axis ``tokens`` is that of the positions whose keys and values a page holds: devices that split it keep
    every n-th token of every key/value head.
    """

    name: str
    rules: Mapping[str, str]
    dispatch: str = "all_reduce"
    residual: str = "replicated"
    logits: str = "gathered"

    def __post_init__(self):
        for logical, axis in self.rules.items():
            if logical not in LOGICAL_AXES:
                raise LayoutError(f"layout {self.name!r}: unknown logical axis {logical!r}; known: {LOGICAL_AXES}")
            if axis not in MESH_AXES:
                raise LayoutError(f"layout {self.name!r}: unknown mesh axis {axis!r}; known: {MESH_AXES}")
        object.__setattr__(self, "rules", MappingProxyType(dict(self.rules)))
        self._check_rows()
        self._check_choices()

    def _check_choices(self) -> None:
        """Raise LayoutError if the residual, the logits or the tokens of pages are split in an impossible way."""
        rules, name = self.rules, self.name
        for field, value, known in (("residual", self.residual, RESIDUALS), ("logits", self.logits, LOGITS)):
            if value not in known:
                raise LayoutError(f"layout {name!r}: unknown {field} {value!r}; known: {known}")
        if self.residual == "tokens" and self.block_axis is None:
            raise LayoutError(
                f"layout {name!r}: residual 'tokens' needs q_heads and ffn over one mesh axis, got "
                f"{rules.get('q_heads')} and {rules.get('ffn')}"
            )
        if self.logits == "split" and "vocab" not in rules:
            raise LayoutError(f"layout {name!r}: logits 'split' needs a mesh axis for vocab")
        tokens = rules.get("tokens")
        if tokens is not None and (tokens != rules.get("q_heads") or "kv_heads" in rules):
            raise LayoutError(
                f"layout {name!r} splits tokens over {tokens}; then q_heads must be over {tokens} too and kv_heads "
                f"over none, got {rules.get('q_heads')} and {rules.get('kv_heads')}"
            )

    def _check_rows(self) -> None:
        """Raise LayoutError if rows are split in a way that the dispatch of experts or another rule contradicts."""
        rules, rows = self.rules, self.rows_axis
        if self.dispatch not in DISPATCHES:
            raise LayoutError(f"layout {self.name!r}: unknown dispatch {self.dispatch!r}; known: {DISPATCHES}")
        if rules.get("pages") != rows:
            raise LayoutError(
                f"layout {self.name!r} splits batch over {rows} and pages over {rules.get('pages')}; a sequence's rows "
                "and pages are on the same devices, so both must name one mesh axis"
            )
        others = [logical for logical, axis in rules.items() if axis == rows and logical not in _SPLIT_WITH_ROWS]
        if others:
            raise LayoutError(
                f"layout {self.name!r} splits batch and {', '.join(others)} over {rows}; an axis that splits rows can "
                "split only experts besides"
            )
        shares = rows is not None and rules.get("experts") == rows
        if shares != (self.dispatch != "all_reduce") or shares != (rows is not None):
            raise LayoutError(
                f"layout {self.name!r}: dispatch {self.dispatch!r} with batch over {rows} and experts over "
                f"{rules.get('experts')}; gather and all_to_all need both over one mesh axis, "
                "all_reduce needs all rows on every device"
            )

    @property
    def rows_axis(self) -> str | None:
        """The mesh axis that rows, their sequences' state and their pages are split over; None: every device has all
        rows."""
        return self.rules.get("batch")

    @property
    def block_axis(self) -> str | None:
        """The mesh axis that both attention heads and MLP features are split over; None if there is no such axis."""
        heads = self.rules.get("q_heads")
        return heads if heads == self.rules.get("ffn") else None

    @property
    def residual_axis(self) -> str | None:
        """The mesh axis of the devices that share the hidden states between blocks; None: every device has those of all
        its rows."""
        return self.block_axis if self.residual == "tokens" else None

    def mesh_axis(self, logical: str) -> str | None:
        """Return the mesh axis that a logical axis is split over, or None."""
        if logical not in LOGICAL_AXES:
            raise LayoutError(f"layout {self.name!r}: unknown logical axis {logical!r}; known: {LOGICAL_AXES}")
        return self.rules.get(logical)

    def spec(self, *axes: str | tuple[str, ...] | None) -> PartitionSpec:
        """Return the partition of an array from its logical axes, one per dimension (None: replicated).

        A dimension may have several logical axes, the first of them split first.

        Raises:
            LayoutError: Two logical axes map to the same mesh axis.
        """
        names = [(axis,) if isinstance(axis, str) else axis or () for axis in axes]
        entries = [tuple(filter(None, map(self.mesh_axis, each))) for each in names]
        used = [axis for entry in entries for axis in entry]
        if len(used) != len(set(used)):
            found = [entry[0] if len(entry) == 1 else entry or None for entry in entries]
            raise LayoutError(f"layout {self.name!r} maps two dimensions of {axes} to one mesh axis: {found}")
        while entries and not entries[-1]:
            entries.pop()
        return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))

    def sharding(self, mesh: Mesh, *axes: str | tuple[str, ...] | None) -> NamedSharding:
        """Return ``spec`` bound to a mesh."""
        return NamedSharding(mesh, self.spec(*axes))

    def on(self, mesh: Mesh) -> "ShardingLayout":
        """Return this layout without rules for mesh axes of one device, whose collectives would do nothing."""
        sizes = dict(mesh.shape)
        kept = {logical: axis for logical, axis in self.rules.items() if sizes[axis] > 1}
        if kept == dict(self.rules):
            return self
        return dataclasses.replace(
            self,
            rules=kept,
            dispatch=self.dispatch if "batch" in kept else "all_reduce",
            residual=self.residual if self.block_axis in kept.values() else "replicated",
            logits=self.logits if "vocab" in kept else "gathered",
        )


def stacked(sharding: Sharding) -> Sharding:
    """Return the sharding of arrays with a new leading dimension that is not split."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


def whole_and_split(mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """Return two shardings over all devices of a mesh: of arrays that each device has whole, and of arrays whose first
    dimension is split."""
    return NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(mesh.axis_names))
