"""How copies, fills and element-wise instructions are drawn."""

from __future__ import annotations

from tests.oracle.draw import ANY, FLOATS, INTEGERS, Draw
from tests.oracle.formats import FORMATS
from tests.oracle.streams.common import (
    BINARY,
    BITVEC,
    PACKED,
    Arguments,
    binary_operator,
    destination,
    draws,
    number_or_column,
    same_size,
    unary_operator,
)


@draws
def memset(d: Draw) -> Arguments:
    p, f = d.size()
    dtype = d.pick(PACKED) if d.generation >= 4 and d.chance(0.05) else d.dtype((*ANY, "bool_"))
    engine = d.pick(("unknown", "vector", "gpsimd"))
    dst = d.result(p, f, dtype, "sbuf" if engine == "gpsimd" else d.buffer())
    format_ = dst.oracle.format
    if dtype in PACKED:
        return {"dst": dst, "value": 0, "engine": engine}
    if format_.is_integer:
        low, high = (0, 1) if dtype == "bool_" else format_.limits
        return {"dst": dst, "value": int(d.random.integers(low, high, endpoint=True)), "engine": engine}
    return {"dst": dst, "value": d.number(), "engine": engine}


@draws
def tensor_copy(d: Draw) -> Arguments:
    p, f = d.size()
    if d.generation >= 4 and d.chance(0.05):
        packed = d.tile(p, f, d.pick(PACKED))
        return {"dst": d.result(p, f, packed.dtype, apart_from=(packed,)), "src": packed}
    engines = ["unknown", "vector", "gpsimd"] + (["scalar"] if d.generation >= 3 else [])
    engine = d.pick(engines)
    inside = "sbuf" if engine == "gpsimd" else None
    src = d.source(p, f, d.dtype((*ANY, "bool_")), inside or d.buffer())
    dtype = src.dtype if d.chance(0.4) else d.dtype((*ANY, "bool_"))
    dst = destination(
        d, p, f, (src,), dtype, buffer=inside, buffers=("sbuf",) if inside else ("sbuf", "psum")
    )
    return {"dst": dst, "src": src, "engine": engine}


@draws
def tensor_tensor(d: Draw) -> Arguments:
    p, f = d.size()
    choice = d.random.random()
    if choice < 0.2:
        dtype = d.dtype(INTEGERS)
        first, second = d.source(p, f, dtype), d.source(p, f, same_size(d, dtype), d.buffer())
        dst = destination(d, p, f, (first, second), same_size(d, dtype))
        return {"dst": dst, "data1": first, "data2": second, "op": d.pick(BITVEC)}
    if choice < 0.35:
        words = ("int32", "uint32")
        first, second = (d.source(p, f, d.pick(words)) for _ in range(2))
        dst = destination(d, p, f, (first, second), d.pick(words), buffer="sbuf", buffers=("sbuf",))
        engine = d.pick(("unknown", "gpsimd", "vector"))
        return {"dst": dst, "data1": first, "data2": second, "op": d.pick(BINARY[:3]), "engine": engine}
    if choice < 0.4:
        first, second = (d.source(p, f, d.dtype()) for _ in range(2))
        dst = d.result(p, f, d.dtype(FLOATS), apart_from=(first, second))
        return {"dst": dst, "data1": first, "data2": second, "op": "power"}
    first, second = d.source(p, f, d.dtype()), d.source(p, f, d.dtype(), d.buffer())
    dst = destination(d, p, f, (first, second))
    return {"dst": dst, "data1": first, "data2": second, "op": binary_operator(d)}


@draws
def tensor_scalar(d: Draw) -> Arguments:
    p, f = d.size()
    if d.chance(0.25):
        dtype = d.dtype(INTEGERS)
        data = d.source(p, f, dtype, d.buffer())
        arguments: Arguments = {"dst": None, "data": data}
        for i in range(2 if d.chance(0.5) else 1):
            op = d.pick([*BITVEC, "invert"])
            low, high = FORMATS[dtype].limits
            shifts = op.endswith("shift")
            number = d.upto(8 * FORMATS[dtype].bytes) if shifts else int(d.random.integers(low, high))
            operand = number if d.chance(0.6) else d.column(p, dtype)
            arguments |= {f"op{i}": op, f"operand{i}": None if op == "invert" else operand}
            arguments[f"reverse{i}"] = d.chance(0.2) if op != "invert" else False
        arguments["dst"] = destination(d, p, f, tuple(arguments.values()), same_size(d, dtype))
        return arguments
    data = d.source(p, f, d.dtype(), d.buffer())
    if d.generation >= 3 and d.chance(0.15):
        arguments = {"data": data, "op0": "multiply", "operand0": number_or_column(d, p), "engine": "scalar"}
        if d.chance(0.5):
            arguments |= {"op1": "add", "operand1": number_or_column(d, p)}
        return {"dst": destination(d, p, f, tuple(arguments.values())), **arguments}
    if d.chance(0.1):
        data = d.source(p, f, d.dtype())
        power = d.chance(0.5)
        arguments = {"data": data, "op0": "power" if power else "rsqrt"}
        arguments["operand0"] = number_or_column(d, p, buffer="sbuf") if power else None
        dst = destination(d, p, f, tuple(arguments.values()), buffer="sbuf", buffers=("sbuf",))
        return {"dst": dst, **arguments}
    arguments = {"data": data}
    for i in range(2 if d.chance(0.5) else 1):
        unary = d.chance(0.15)
        arguments[f"op{i}"] = unary_operator(d) if unary else binary_operator(d)
        column = d.pick(("float32", "float32", "bfloat16", "float16"))
        arguments[f"operand{i}"] = None if unary else number_or_column(d, p, column)
        arguments[f"reverse{i}"] = False if unary else d.chance(0.3)
    return {"dst": destination(d, p, f, tuple(arguments.values())), **arguments}


@draws
def scalar_tensor_tensor(d: Draw) -> Arguments:
    p, f = d.size()
    arguments = {
        "data": d.source(p, f, d.dtype()),
        "op0": binary_operator(d),
        "operand0": number_or_column(d, p),
        "op1": binary_operator(d),
        "operand1": d.source(p, f, d.dtype(), d.buffer()),
        "reverse0": d.chance(0.3),
        "reverse1": d.chance(0.3),
    }
    return {"dst": destination(d, p, f, tuple(arguments.values())), **arguments}


@draws
def reciprocal(d: Draw) -> Arguments:
    p, f = d.size()
    data = d.source(p, f, d.dtype(), d.buffer())
    return {"dst": destination(d, p, f, (data,)), "data": data}


@draws
def tensor_copy_predicated(d: Draw) -> Arguments:
    p, f = d.size()
    predicate = d.tile(p, f, d.pick(("uint8", "uint16", "uint32")), d.buffer())
    dtype = d.dtype()
    src = d.number() if FORMATS[dtype].is_float and d.chance(0.4) else d.source(p, f, dtype)
    dst = d.tile(p, f, dtype, d.buffer(), apart_from=(predicate, src), filled=d.chance(0.7))
    return {"dst": dst, "src": src, "predicate": predicate, "reverse_pred": d.chance(0.5)}


@draws
def nc_stream_shuffle(d: Draw) -> Arguments:
    p, f = d.pick((32, 64, 96, 128)), d.upto(12)
    dtype = d.dtype()
    one = p == 32 and d.chance(0.5)
    start = None if p in (32, 64) else 0
    src = d.tile(1 if one else p, f, dtype, d.buffer(), start=start)
    dst = d.tile(p, f, dtype, d.buffer(), apart_from=(src,), start=start, filled=d.chance(0.6))
    mask = [255 if d.chance(0.1) else 0 if one else int(d.random.integers(32)) for _ in range(32)]
    return {"dst": dst, "src": src, "shuffle_mask": mask}
