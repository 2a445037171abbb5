"""Quantized matrices as rows of records: the form in which checkpoints are read, and which kernels pack and unpack.

An element is ``(value - zero) * scale + bias``, computed in float32 in this order; its value is its code, or what a
table or an 8-bit float type has for the code. A row is a sequence of *records*, one for ``span`` features:

    codes | scale | zero | bias | factor of the scale | factor of the bias

Codes take a byte each or half of one, the lower half first; int6 are bytes from -32 to 31, of which native kernels keep
six bits. Of the others a record has those that the form has. So a
matrix is uint8 [outer, records * bytes of a record], which can be cut between any two records, whatever the size of the
groups that share a scale: records of one group repeat it.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer, UInt8

FLOATS = ("float8_e4m3fn", "float8_e5m2")
VALUES = ("uint4", "int6", "int8", "uint8", *FLOATS)
ROUNDED = ("row", "group")  # activations that are 8-bit integers


class Form(NamedTuple):
    """What a quantized matrix holds.

    Attributes:
        values: Type of the codes: one of ``VALUES``.
        span: Features of a record; even.
        group: Features that share scale, zero and bias, a multiple of ``span``; 0: all of a row.
        scales: Type of scales: a float type, int8 or uint8 where they have factors, or float8_e8m0fnu.
        zero: Subtracted from every code.
        zeros: Type of the zeros of groups; None: they have none.
        biases: Type of biases, as for scales; None: there are none.
        factors: Type of the factors that scales, and biases if there are any, are multiplied by; None: there are none.
        factor_group: Features that share factors, a multiple of ``group``; 0: all of a row.
        table: Value of each of the 16 codes of uint4; None: the codes are the values.
        activations: How rows of activations are rounded: to 8 bits, "row" with a scale for each row, "group" with one
            for each group of it; "bfloat16" where the processor multiplies that (AMX), else not; None: they are not.
        divides: Whether scales are divided by their factors, in place of multiplied; there are no biases then.
    """

    values: str
    span: int
    group: int = 0
    scales: str = "float32"
    zero: int = 0
    zeros: str | None = None
    biases: str | None = None
    factors: str | None = None
    factor_group: int = 0
    table: tuple[float, ...] | None = None
    activations: str | None = None
    divides: bool = False

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a record."""
        return self.span // 2 if self.values == "uint4" else self.span

    @property
    def fields(self) -> dict[str, np.dtype]:
        """Type of each number after the codes of a record, in order."""
        types = {
            "scale": self.scales,
            "zero": self.zeros,
            "bias": self.biases,
            "scale_factor": self.factors,
            "bias_factor": self.factors if self.biases else None,
        }
        return {name: np.dtype(getattr(ml_dtypes, kind, kind)) for name, kind in types.items() if kind is not None}

    @property
    def record_bytes(self) -> int:
        """Bytes of a record."""
        return self.code_bytes + sum(dtype.itemsize for dtype in self.fields.values())

    def row_bytes(self, inner: int) -> int:
        """Bytes of a row of ``inner`` features.

        Raises:
            ValueError: Records do not divide it.
        """
        if inner % self.span:
            raise ValueError(f"{inner} features cannot be divided into records of {self.span}")
        return inner // self.span * self.record_bytes

    def inner(self, row_bytes: int) -> int:
        """Features of a row of ``row_bytes`` bytes."""
        assert row_bytes % self.record_bytes == 0, (row_bytes, self)
        return row_bytes // self.record_bytes * self.span

    def shared(self, inner: int) -> int:
        """Features that share a scale in a part of ``inner`` features, which begins anywhere between two records."""
        return math.gcd(self.group or inner, inner)

    def shared_factors(self, inner: int) -> int:
        """Features that share factors in such a part."""
        return math.gcd(self.factor_group or inner, inner)


def parts_of(records: UInt8[np.ndarray, "outer bytes"], form: Form) -> dict[str, np.ndarray]:
    """Return the parts of rows of records.

    Returns:
        ``codes``, uint8 [outer, records, bytes of the codes], and each field of the form, [outer, records].
    """
    rows = records.reshape(len(records), -1, form.record_bytes)
    parts, at = {"codes": rows[..., : form.code_bytes]}, form.code_bytes
    for name, dtype in form.fields.items():
        parts[name] = np.ascontiguousarray(rows[..., at : at + dtype.itemsize]).view(dtype)[..., 0]
        at += dtype.itemsize
    return parts


def records_of(parts: dict[str, np.ndarray], form: Form) -> UInt8[np.ndarray, "outer bytes"]:
    """Return rows of records; the inverse of ``parts_of``."""
    codes = parts["codes"]
    rows = np.empty((*codes.shape[:2], form.record_bytes), np.uint8)
    rows[..., : form.code_bytes] = codes
    at = form.code_bytes
    for name, dtype in form.fields.items():
        rows[..., at : at + dtype.itemsize] = np.ascontiguousarray(
            parts[name].astype(dtype, copy=False)[..., None]
        ).view(np.uint8)
        at += dtype.itemsize
    return rows.reshape(len(rows), -1)


def with_span(records: UInt8[np.ndarray, "outer bytes"], form: Form, span: int) -> UInt8[np.ndarray, "outer others"]:
    """Return the same rows with records of another number of features; one of both is a multiple of the other."""
    parts, other = parts_of(records, form), form._replace(span=span)
    codes = parts.pop("codes")
    if span < form.span:
        fields = {name: np.repeat(field, form.span // span, axis=1) for name, field in parts.items()}
    else:
        fields = {name: field[:, :: span // form.span] for name, field in parts.items()}
    return records_of({"codes": codes.reshape(len(codes), -1, other.code_bytes), **fields}, other)


def with_columns(
    records: UInt8[np.ndarray, "outer bytes"], form: Form, span: int, columns: Integer[np.ndarray, " others"]
) -> UInt8[np.ndarray, "outer other_bytes"]:
    """Return rows with some of their features in another order.

    Args:
        records: The rows.
        form: Their form.
        span: Features of the records that are returned.
        columns: The feature that each of theirs is; the complement of one, ``~feature``, for one that is filled up,
            whose code is 0. A record has the numbers of its first one.
    """
    parts, other = parts_of(records, form), form._replace(span=span)
    codes = parts.pop("codes").reshape(len(records), -1)
    if form.values == "uint4":
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    places = np.maximum(columns, ~columns)
    codes = codes[:, places]
    codes[:, columns < 0] = 0
    codes = codes[:, ::2] | codes[:, 1::2] << np.uint8(4) if form.values == "uint4" else codes
    fields = {name: field[:, places[::span] // form.span] for name, field in parts.items()}
    return records_of({"codes": codes.reshape(len(codes), -1, other.code_bytes), **fields}, other)


def decode(records: UInt8[Array | np.ndarray, "... bytes"], form: Form) -> Float[Array, "... inner"]:
    """Return the elements of rows of records in float32; can be traced."""
    rows = jnp.asarray(records).reshape(*records.shape[:-1], -1, form.record_bytes)
    codes, at = rows[..., : form.code_bytes], form.code_bytes
    fields: dict[str, Array] = {}
    for name, dtype in form.fields.items():
        data = rows[..., at : at + dtype.itemsize]
        at += dtype.itemsize
        fields[name] = _numbers(data, dtype)[..., None]
    values = _values(codes, form)
    if form.zero:
        values -= form.zero
    if "zero" in fields:
        values -= fields["zero"]
    scale = fields["scale"]
    if form.factors is not None:
        factor = fields["scale_factor"]
        scale = scale / factor if form.divides else scale * factor
    values *= scale
    if "bias" in fields:
        values += fields["bias"] if form.factors is None else fields["bias"] * fields["bias_factor"]
    return values.reshape(*records.shape[:-1], -1)


def _values(codes: UInt8[Array, "... bytes"], form: Form) -> Float[Array, "... span"]:
    """Return the values of the codes of records."""
    if form.values == "uint4":
        pairs = jnp.stack([codes & 15, codes >> 4], axis=-1)
        numbers = pairs.reshape(*codes.shape[:-1], form.span)
        if form.table is None:
            return numbers.astype(jnp.float32)
        return jnp.asarray(form.table, jnp.float32)[numbers]
    kind = "int8" if form.values == "int6" else form.values
    return lax.bitcast_convert_type(codes, jnp.dtype(kind)).astype(jnp.float32)


def _numbers(data: UInt8[Array, "... bytes"], dtype: np.dtype) -> Float[Array, "..."]:
    """Return the numbers that bytes hold, in float32."""
    if dtype.name == "float8_e8m0fnu":
        return power_of_two(data[..., 0])
    if dtype.itemsize == 1:
        return lax.bitcast_convert_type(data[..., 0], dtype).astype(jnp.float32)
    return lax.bitcast_convert_type(data, dtype).astype(jnp.float32)


def power_of_two(exponents: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Return 2^(e - 127), of the type float8_e8m0fnu."""
    bits = jnp.where(exponents == 0, jnp.uint32(1 << 22), exponents.astype(jnp.uint32) << 23)
    return lax.bitcast_convert_type(bits, jnp.float32)


def rounded_rows(x: Float[Array, "T inner"], group: int) -> Float[Array, "T inner"]:
    """Return rows as 8 bits hold them: each group of features in whole multiples, at most 127, of the group's scale,
    which is the largest magnitude in it divided by 127.

    Args:
        x: The rows, in float32.
        group: Features that share a scale; they divide ``inner``.
    """
    groups = x.reshape(x.shape[0], -1, group)
    # XLA makes products with reciprocals of divisions, with other bits: products are the same everywhere.
    scale = jnp.max(jnp.abs(groups), axis=-1, keepdims=True) * np.float32(1 / 127)
    scale = jnp.where(scale == 0, 1.0, scale)
    return (jnp.clip(jnp.round(groups * (1 / scale)), -127, 127) * scale).reshape(x.shape)


def random_records(form: Form, outer: int, inner: int, key: jax.Array) -> UInt8[Array, "outer bytes"]:
    """Return random rows of records, whose elements are about as large as those of a layer's weight."""
    first, *keys = jax.random.split(key, 1 + len(form.fields))
    shape = (outer, inner // form.span, form.code_bytes)
    if form.values in FLOATS:
        codes = _bytes_of(jax.random.normal(first, shape), np.dtype(getattr(ml_dtypes, form.values)))
    else:
        codes = jax.random.bits(first, (*shape, 1), jnp.uint8)
        codes = (codes & 63) - jnp.uint8(32) if form.values == "int6" else codes
    parts = [codes.reshape(shape)]
    for each, (name, dtype) in zip(keys, form.fields.items(), strict=True):
        group = form.shared_factors(inner) if name.endswith("factor") else form.shared(inner)
        found = jax.random.uniform(each, (outer, inner // group), jnp.float32, 0.5, 1.5)
        numbers = _random_numbers(name, found, inner, form, dtype)
        parts.append(_bytes_of(jnp.repeat(numbers, group // form.span, axis=1), dtype))
    return jnp.concatenate(parts, axis=-1).reshape(outer, -1)


def _random_numbers(
    field: str, uniform: Float[Array, "outer groups"], inner: int, form: Form, dtype: np.dtype
) -> Float[Array, "outer groups"]:
    """Return numbers of a field of records from others between 0.5 and 1.5."""
    if field == "zero":
        return jnp.round(10 * uniform)
    scale = inner**-0.5 / {"uint4": 8, "int6": 32, "int8": 128, "uint8": 128}.get(form.values, 1)
    size = scale if field.startswith("scale") else inner**-0.5
    if form.divides and field.endswith("factor"):
        return 20 / size * uniform
    if form.factors is not None:
        size = size / 20 if field.endswith("factor") else 20.0 if dtype.kind in "iu" else 1.0
    return jnp.round(size * uniform) if dtype.kind in "iu" else size * uniform


def _bytes_of(numbers: Float[Array, "..."], dtype: np.dtype) -> UInt8[Array, "... bytes"]:
    """Return numbers in a type, as bytes."""
    if dtype.name == "float8_e8m0fnu":
        return (127 + jnp.round(jnp.log2(numbers))).astype(jnp.uint8)[..., None]
    data = lax.bitcast_convert_type(numbers.astype(dtype), jnp.uint8)
    return data[..., None] if dtype.itemsize == 1 else data
