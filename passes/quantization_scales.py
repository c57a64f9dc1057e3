"""What is mended of the scales that ONNX Runtime's quantizers choose: ranges without bounds, biases beyond 32 bits, powers of two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import onnx
    from onnxruntime.quantization.calibrate import TensorsData

LARGEST_RANGE = 1e30  # masks reach the lowest float: a scale that holds it turns every other value into 0
SUFFIX = "_quantized"  # of what ONNX Runtime's quantizers make of an initializer or a node's output
INT32_END = 2**31 - 1


def drop_unbounded(ranges: TensorsData) -> set[str]:
    """Take out ranges that no scale can hold (not finite, never seen, or beyond `LARGEST_RANGE`) and return their tensors' names."""
    wild = set()
    for name, data in list(ranges.items()):
        ends = np.abs(np.concatenate([np.asarray(v, np.float64).reshape(-1) for v in data.range_value]))
        if not ends.size or not np.isfinite(ends).all() or ends.max() > LARGEST_RANGE:
            wild.add(name)
            del ranges.data[name]
    return wild


def nodes_at(proto: onnx.ModelProto, operators: Iterable[str], tensors: set[str]) -> set[str]:
    """Names of nodes of these types that take or give one of the tensors."""
    chosen = set(operators)
    return {n.name for n in proto.graph.node if n.op_type in chosen and tensors.intersection((*n.input, *n.output))}


def saturated(proto: onnx.ModelProto) -> set[str]:
    """Names, as they were before quantization, of nodes whose bias does not fit into 32 bits at the scale that their input and weight give it.

    Such a bias is cut off, and the output is wrong by as much.
    """
    from onnx import TensorProto, numpy_helper

    cut = {
        t.name for t in proto.graph.initializer
        if t.data_type == TensorProto.INT32 and t.name.endswith(SUFFIX) and (np.abs(numpy_helper.to_array(t).astype(np.int64)) >= INT32_END).any()
    }  # fmt: skip
    if not cut:
        return set()
    cut |= {name for n in proto.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in cut for name in n.output}
    holders = [n for n in proto.graph.node if n.op_type != "DequantizeLinear" and cut.intersection(n.input)]
    return {n.name.removesuffix("_quant") if n.op_type.startswith("Q") else n.name for n in holders}


def to_powers_of_two(proto: onnx.ModelProto, floats: Mapping[str, NDArray[Any]]) -> None:
    """Raise every scale of a symmetric QDQ model, in place, to the next power of two, and quantize weights and biases anew.

    `floats` are the initializers before quantization, by name. No range gets smaller, so nothing is cut off; a value's error at most
    doubles. A bias keeps the scale that its input and weight give it, which is a power of two again.
    """
    from onnx import TensorProto, helper, numpy_helper

    tensors = {t.name: t for t in proto.graph.initializer}
    linear = [n for n in proto.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    dequantized = {n.output[0]: n for n in linear if n.op_type == "DequantizeLinear"}
    biases = {n.output[0]: n for n in dequantized.values() if n.input[0] in tensors and tensors[n.input[0]].data_type == TensorProto.INT32}
    old = {n.input[1]: numpy_helper.to_array(tensors[n.input[1]]) for n in linear}
    of_biases = {n.input[1] for n in biases.values()}

    def put(name: str, values: NDArray[Any]) -> None:
        kind = helper.tensor_dtype_to_np_dtype(tensors[name].data_type)
        tensors[name].CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values).astype(kind), name))

    for name, scale in old.items():
        if name not in of_biases:
            put(name, np.exp2(np.ceil(np.log2(scale.astype(np.float64)))))
    for node in proto.graph.node:
        bias = biases.get(node.input[2]) if len(node.input) > 2 else None
        if bias is not None:
            of_input, of_weight = (numpy_helper.to_array(tensors[dequantized[node.input[i]].input[1]]) for i in (0, 1))
            put(bias.input[1], np.broadcast_to(of_input * of_weight, old[bias.input[1]].shape))
    for node in dequantized.values():
        held = tensors.get(node.input[0])
        if held is None:
            continue
        scale, zero = (numpy_helper.to_array(tensors[n]).astype(np.float64) for n in node.input[1:3])
        axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
        integers = numpy_helper.to_array(held).astype(np.float64)
        if scale.size > 1:
            shape = [-1 if i == axis % max(integers.ndim, 1) else 1 for i in range(integers.ndim)]
            scale, zero = scale.reshape(shape), zero.reshape(shape)
            before = old[node.input[1]].astype(np.float64).reshape(shape)
        else:
            scale, zero, before = scale.reshape(()), zero.reshape(()), old[node.input[1]].astype(np.float64).reshape(())
        original = floats.get(held.name.removesuffix(SUFFIX))
        values = original.astype(np.float64).reshape(integers.shape) if original is not None else (integers - zero) * before
        low, high = _limits(held.data_type)
        put(held.name, np.clip(np.round(values / scale) + zero, low, high))


def _limits(data_type: int) -> tuple[int, int]:
    """Lowest and highest value of an ONNX integer type."""
    from onnx import TensorProto

    name = TensorProto.DataType.Name(data_type)
    bits = int(name.lstrip("UINT"))
    return (0, 2**bits - 1) if name.startswith("U") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
