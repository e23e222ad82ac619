"""Dtypes by name, and the bytes of an element of each. No torch."""

from __future__ import annotations

from torchrelay.errors import ManifestError

ITEM_SIZES = {
    **dict.fromkeys(
        (
            *("bool", "uint8", "int8", "qint8", "quint8", "quint4x2", "quint2x4"),
            *("bits8", "bits1x8", "bits2x4", "bits4x2", "float4_e2m1fn_x2", "float8_e4m3fn"),
            *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
            *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
        ),
        1,
    ),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32", "qint32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}


def itemsize(dtype: str) -> int:
    """Bytes of an element of the named dtype; `ManifestError` for an unknown name."""
    size = ITEM_SIZES.get(dtype)
    if size is None:
        raise ManifestError(f"dtype {dtype[:40]!r}")
    return size
