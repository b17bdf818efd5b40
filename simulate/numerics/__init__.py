"""Dtypes and rounding, ALU operators, activation functions: the arithmetic of the engines."""

from __future__ import annotations

from simulate.numerics.activations import ACTIVATION_FUNCTIONS, ActivationFunction, activation_function
from simulate.numerics.cast import cast, from_float32, to_float32
from simulate.numerics.dtypes import (
    DTYPES,
    DType,
    as_dtype,
    bfloat16,
    bool_,
    float4_e2m1fn_x4,
    float8_e4m3,
    float8_e4m3fn,
    float8_e4m3fn_x4,
    float8_e5m2,
    float8_e5m2_x4,
    float8_e8m0fnu,
    float16,
    float32,
    int8,
    int16,
    int32,
    tfloat32,
    uint8,
    uint16,
    uint32,
)
from simulate.numerics.operators import ALU_OPERATORS, AluOperator, OperatorFamily, alu_operator

__all__ = [
    "ACTIVATION_FUNCTIONS",
    "ALU_OPERATORS",
    "DTYPES",
    "ActivationFunction",
    "AluOperator",
    "DType",
    "OperatorFamily",
    "activation_function",
    "alu_operator",
    "as_dtype",
    "bfloat16",
    "bool_",
    "cast",
    "float4_e2m1fn_x4",
    "float8_e4m3",
    "float8_e4m3fn",
    "float8_e4m3fn_x4",
    "float8_e5m2",
    "float8_e5m2_x4",
    "float8_e8m0fnu",
    "float16",
    "float32",
    "from_float32",
    "int8",
    "int16",
    "int32",
    "tfloat32",
    "to_float32",
    "uint8",
    "uint16",
    "uint32",
]
