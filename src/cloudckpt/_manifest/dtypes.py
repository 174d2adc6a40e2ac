"""Element types by the names the manifest uses (torch's own), with their sizes and safetensors tags."""

from __future__ import annotations

ITEMSIZE_BYTES: dict[str, int] = {
    **dict.fromkeys(("complex128",), 16),
    **dict.fromkeys(("complex64", "float64", "int64", "uint64"), 8),
    **dict.fromkeys(("bcomplex32", "complex32", "float32", "int32", "uint32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16", "bits16"), 2),
    **dict.fromkeys(
        (
            "bool", "int8", "uint8", "bits8", "bits1x8", "bits2x4", "bits4x2",
            "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
            "float4_e2m1fn_x2",
            "int1", "int2", "int3", "int4", "int5", "int6", "int7",
            "uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7",
        ),
        1,
    ),
}  # fmt: skip
"""Bytes of one element of each dtype that a checkpoint can hold."""

# https://github.com/huggingface/safetensors#format. Only tags that every published reader knows: the newer ones
# (complex, float8_e8m0, float4, …) would make an object unreadable for older libraries, so those dtypes go as bytes.
SAFETENSORS_TAG: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Tag of each dtype in a safetensors header; a dtype that is missing here is stored as ``U8``."""
