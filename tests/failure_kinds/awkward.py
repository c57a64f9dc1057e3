"""Small models, each with a trait that breaks tools, and rows to run them on. Written to a folder by `write_models`.

A trait is a valid one unless its text says otherwise: every pass is to end on it in a correct model, or to say why not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Arrays = dict[str, NDArray[Any]]
ROWS = 12
FLOAT, INT64, BOOL = int(TensorProto.FLOAT), int(TensorProto.INT64), int(TensorProto.BOOL)


@dataclass(frozen=True)
class Awkward:
    """A model and its rows (one array an input, one row an example).

    `runs` is False where ONNX Runtime can't load or run it. `delicate` says that what it computes hangs on more digits than few
    bits have, so that a large error of a pass that takes digits away is no fault of the pass. `beside` keeps its weights in a file of their own.
    """

    trait: str
    proto: onnx.ModelProto
    rows: Arrays
    runs: bool = True
    delicate: bool = False
    beside: bool = False


MODELS: dict[str, Callable[[], Awkward]] = {}


def awkward(trait: str, **facts: bool) -> Callable[[Callable[[], tuple[onnx.ModelProto, Arrays]]], Callable[[], Awkward]]:
    """Enter a function that gives a model and its rows into the list, under its name."""

    def enter(make: Callable[[], tuple[onnx.ModelProto, Arrays]]) -> Callable[[], Awkward]:
        def made() -> Awkward:
            return Awkward(trait, *make(), **facts)

        MODELS[make.__name__] = made
        return made

    return enter


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], name: str = "", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, list(inputs), list(outputs), name, **attributes)


def tensor(name: str, values: Any, dtype: Any = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(values, dtype), name)


def spread(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Weights whose products stay near 1."""
    return (np.random.default_rng(seed).standard_normal(shape) / np.sqrt(shape[-1] if len(shape) < 4 else np.prod(shape[1:]))).astype(np.float32)


def weight(name: str, *shape: int, seed: int = 0) -> onnx.TensorProto:
    return tensor(name, spread(*shape, seed=seed))


def value(name: str, dtype: int, shape: Sequence[int | str | None] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, None if shape is None else list(shape))


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Sequence[onnx.TensorProto] = (),
    *,
    opset: int = 17,
    ir_version: int = 9,
    domains: Sequence[str] = (),
    **more: Any,
) -> onnx.ModelProto:
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 3 if d == "ai.onnx.ml" else 1) for d in domains)]
    graph = helper.make_graph(list(nodes), "awkward", list(inputs), list(outputs), list(weights))
    return helper.make_model(graph, opset_imports=imports, ir_version=ir_version, **more)


def normal(*shape: int, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X = value("x", FLOAT, ["n", 16])
Y = value("y", FLOAT, ["n", 16])
IMAGE = value("x", FLOAT, ["n", 4, 8, 8])


def flat() -> Arrays:
    return {"x": normal(ROWS, 16)}


def images() -> Arrays:
    return {"x": normal(ROWS, 4, 8, 8)}


def two_layers(**more: Any) -> onnx.ModelProto:
    nodes = [node("MatMul", ["x", "w"], ["a"], "first"), node("Relu", ["a"], ["r"], "relu"), node("MatMul", ["r", "v"], ["y"], "second")]
    return model(nodes, [X], [Y], [weight("w", 16, 16), weight("v", 16, 16, seed=1)], **more)


# ---- inputs and outputs ---------------------------------------------------------------------------------------------------------


@awkward("every axis of input and output has a name and no size")
def all_axes_dynamic() -> tuple[onnx.ModelProto, Arrays]:
    proto = model(
        [node("MatMul", ["x", "w"], ["a"], "product"), node("Tanh", ["a"], ["y"], "tanh")],
        [value("x", FLOAT, ["n", "t", "f"])],
        [value("y", FLOAT, ["n", "t", "g"])],
        [weight("w", 16, 16)],
    )
    return proto, {"x": normal(ROWS, 5, 16)}


@awkward("an axis of -1, as some exporters write any size")
def axis_minus_one() -> tuple[onnx.ModelProto, Arrays]:
    return model(
        [node("Gemm", ["x", "w", "b"], ["y"], "gemm")],
        [value("x", FLOAT, [-1, 16])],
        [value("y", FLOAT, [-1, 16])],
        [weight("w", 16, 16), weight("b", 16)],
    ), flat()


@awkward("a batch that is fixed to one")
def batch_of_one() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [node("Conv", ["x", "k"], ["c"], "conv", pads=[1, 1, 1, 1]), node("Relu", ["c"], ["y"], "relu")]
    return model(nodes, [value("x", FLOAT, [1, 4, 8, 8])], [value("y", FLOAT, [1, 4, 8, 8])], [weight("k", 4, 4, 3, 3)]), images()


@awkward("a scalar goes in and a scalar comes out")
def scalars() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [node("Mul", ["x", "w"], ["m"], "mul"), node("MatMul", ["m", "v"], ["p"], "product"), node("ReduceSum", ["p"], ["y"], "sum", keepdims=0)]
    return model(nodes, [value("x", FLOAT, [])], [value("y", FLOAT, [])], [weight("w", 1, 8), weight("v", 8, 8)]), {"x": normal(ROWS)}


@awkward("several inputs and outputs of several types")
def many_inputs_and_outputs() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("Gather", ["table", "ids"], ["rows"], "look_up"),
        node("Add", ["x", "rows"], ["sum"], "add"),
        node("Where", ["keep", "sum", "x"], ["kept"], "choose"),
        node("MatMul", ["kept", "w"], ["y"], "product"),
        node("ArgMax", ["y"], ["best"], "best", axis=1, keepdims=0),
        node("Greater", ["y", "zero"], ["positive"], "positive"),
    ]
    inputs = [X, value("ids", INT64, ["n"]), value("keep", BOOL, ["n", 16])]
    outputs = [Y, value("best", INT64, ["n"]), value("positive", BOOL, ["n", 16])]
    rng = np.random.default_rng(2)
    rows = {**flat(), "ids": rng.integers(0, 8, ROWS), "keep": rng.random((ROWS, 16)) < 0.5}
    return model(nodes, inputs, outputs, [weight("table", 8, 16), weight("w", 16, 16), tensor("zero", 0.0)]), rows


@awkward("whole numbers in: tokens and their mask")
def tokens() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("Gather", ["table", "ids"], ["e"], "embed"),
        node("Cast", ["mask"], ["m"], "cast", to=FLOAT),
        node("Unsqueeze", ["m", "last"], ["wide"], "widen"),
        node("Mul", ["e", "wide"], ["kept"], "keep"),
        node("ReduceMean", ["kept"], ["mean"], "mean", axes=[1], keepdims=0),
        node("Gemm", ["mean", "w", "b"], ["y"], "gemm", transB=1),
    ]
    ids = value("ids", INT64, ["n", "t"])
    rng = np.random.default_rng(3)
    rows = {"ids": rng.integers(0, 50, (ROWS, 9)), "mask": np.ones((ROWS, 9), np.int64)}
    return model(
        nodes,
        [ids, value("mask", INT64, ["n", "t"])],
        [value("y", FLOAT, ["n", 4])],
        [weight("table", 50, 16), weight("w", 4, 16), weight("b", 4), tensor("last", [2], np.int64)],
    ), rows


@awkward("text goes in")
def text() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("LabelEncoder", ["x"], ["f"], "encode", domain="ai.onnx.ml", keys_strings=["a", "b"], values_floats=[1.0, 2.0], default_float=0.5),
        node("MatMul", ["f", "w"], ["y"], "product"),
    ]
    words = np.random.default_rng(4).choice(["a", "b", "c"], (ROWS, 16))
    return model(nodes, [value("x", int(TensorProto.STRING), ["n", 16])], [Y], [weight("w", 16, 16)], domains=["ai.onnx.ml"]), {"x": words}


@awkward("a classifier gives labels and a list of maps")
def list_of_maps() -> tuple[onnx.ModelProto, Arrays]:
    coefficients = [float(v) for v in spread(3, 16).reshape(-1)]
    nodes = [
        node(
            "LinearClassifier",
            ["x"],
            ["label", "scores"],
            "classify",
            domain="ai.onnx.ml",
            classlabels_ints=[0, 1, 2],
            coefficients=coefficients,
            intercepts=[0.0, 0.1, 0.2],
            post_transform="SOFTMAX",
            multi_class=1,
        ),
        node("ZipMap", ["scores"], ["maps"], "zip", domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2]),
    ]
    maps = helper.make_value_info(
        "maps", helper.make_sequence_type_proto(helper.make_map_type_proto(INT64, helper.make_tensor_type_proto(FLOAT, [])))
    )
    return model(nodes, [X], [value("label", INT64, ["n"]), maps], domains=["ai.onnx.ml"]), flat()


@awkward("an input that nobody takes")
def unused_input() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [node("Identity", ["x"], ["i"], "same"), node("MatMul", ["i", "w"], ["a"], "product"), node("Dropout", ["a"], ["y"], "dropout")]
    return model(nodes, [X, value("unused", FLOAT, ["n", 4])], [Y], [weight("w", 16, 16)]), {**flat(), "unused": normal(ROWS, 4)}


@awkward("an inner value is an output too")
def inner_output() -> tuple[onnx.ModelProto, Arrays]:
    proto = two_layers()
    proto.graph.output.append(value("r", FLOAT, ["n", 16]))
    return proto, flat()


@awkward("the input goes straight through")
def identity_only() -> tuple[onnx.ModelProto, Arrays]:
    return model([node("Identity", ["x"], ["y"], "same")], [X], [Y]), flat()


@awkward("whole numbers only")
def whole_numbers() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [node("MatMul", ["x", "w"], ["m"], "product"), node("Add", ["m", "b"], ["y"], "add")]
    rng = np.random.default_rng(5)
    numbers = [tensor("w", rng.integers(-3, 4, (16, 16)), np.int64), tensor("b", rng.integers(-3, 4, 16), np.int64)]
    return model(nodes, [value("x", INT64, ["n", 16])], [value("y", INT64, ["n", 16])], numbers), {"x": rng.integers(-9, 9, (ROWS, 16))}


@awkward("random numbers are added to the output")
def random_output() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "product"),
        node("RandomNormalLike", ["a"], ["noise"], "noise", scale=0.1),
        node("Add", ["a", "noise"], ["y"], "add"),
    ]
    return model(nodes, [X], [Y], [weight("w", 16, 16)]), flat()


@awkward("the number of rows that come out depends on the values", delicate=True)
def shape_from_data() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "product"),
        node("Greater", ["x", "zero"], ["over"], "over"),
        node("NonZero", ["over"], ["where"], "where"),
        node("Transpose", ["where"], ["places"], "turn", perm=[1, 0]),
        node("GatherND", ["a", "places"], ["y"], "pick"),
    ]
    return model(nodes, [X], [value("y", FLOAT, ["k"])], [weight("w", 16, 16), tensor("zero", 0.0)]), flat()


@awkward("a tensor that is empty in every run")
def empty_boxes() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("Greater", ["x", "limit"], ["over"], "over"),
        node("NonZero", ["over"], ["where"], "where"),
        node("Transpose", ["where"], ["places"], "turn", perm=[1, 0]),
        node("Cast", ["places"], ["boxes"], "cast", to=FLOAT),
        node("MatMul", ["boxes", "small"], ["scored"], "score"),
        node("ReduceSum", ["scored"], ["sum"], "sum", keepdims=0),
        node("MatMul", ["x", "w"], ["product"], "product"),
        node("Add", ["product", "sum"], ["y"], "add"),
    ]
    return model(nodes, [X], [Y], [weight("small", 2, 4), weight("w", 16, 16), tensor("limit", 100.0)]), flat()


# ---- control flow ---------------------------------------------------------------------------------------------------------------


def branch(name: str, weights: Sequence[onnx.TensorProto], nodes: Sequence[onnx.NodeProto], output: str) -> onnx.GraphProto:
    return helper.make_graph(list(nodes), name, [], [value(output, FLOAT, ["n", 16])], list(weights))


def positive_sum() -> list[onnx.NodeProto]:
    return [node("ReduceSum", ["x"], ["total"], "total", keepdims=0), node("Greater", ["total", "zero"], ["positive"], "positive")]


@awkward("an If whose branches hold weights and take one from outside")
def if_with_weights() -> tuple[onnx.ModelProto, Arrays]:
    then = branch("then", [weight("own", 16, 16, seed=2)], [node("MatMul", ["a", "own"], ["t"], "inside")], "t")
    other = branch("else", [], [node("MatMul", ["a", "w"], ["e"], "outer_weight")], "e")
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "product"),
        *positive_sum(),
        node("If", ["positive"], ["y"], "if", then_branch=then, else_branch=other),
    ]
    return model(nodes, [X], [Y], [weight("w", 16, 16), tensor("zero", 0.0)]), flat()


@awkward("an If inside of an If")
def if_in_if() -> tuple[onnx.ModelProto, Arrays]:
    deep = branch("deep", [weight("own", 16, 16, seed=3)], [node("MatMul", ["a", "own"], ["d"], "deep")], "d")
    flat_one = branch("flat", [], [node("Neg", ["a"], ["f"], "neg")], "f")
    then = branch("then", [], [node("If", ["positive"], ["t"], "inner", then_branch=deep, else_branch=flat_one)], "t")
    other = branch("else", [], [node("Abs", ["a"], ["e"], "abs")], "e")
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "product"),
        *positive_sum(),
        node("If", ["positive"], ["y"], "outer", then_branch=then, else_branch=other),
    ]
    return model(nodes, [X], [Y], [weight("w", 16, 16), tensor("zero", 0.0)]), flat()


def loop_body(nodes: Sequence[onnx.NodeProto], weights: Sequence[onnx.TensorProto] = (), more: Sequence[onnx.ValueInfoProto] = ()) -> onnx.GraphProto:
    given = [value("i", INT64, []), value("go", BOOL, []), value("h", FLOAT, ["n", 16])]
    given_back = [value("go_on", BOOL, []), value("next", FLOAT, ["n", 16]), *more]
    return helper.make_graph([*nodes, node("Identity", ["go"], ["go_on"])], "body", given, given_back, list(weights))


@awkward("a Loop that takes its weight from outside")
def loop_with_outer_weight() -> tuple[onnx.ModelProto, Arrays]:
    body = loop_body([node("MatMul", ["h", "w"], ["m"], "step"), node("Tanh", ["m"], ["next"], "tanh")])
    nodes = [node("Loop", ["three", "", "x"], ["last"], "loop", body=body), node("MatMul", ["last", "v"], ["y"], "product")]
    return model(nodes, [X], [Y], [weight("w", 16, 16), weight("v", 16, 16, seed=1), tensor("three", 3, np.int64)]), flat()


@awkward("a Scan with weights of its own")
def scan_with_weights() -> tuple[onnx.ModelProto, Arrays]:
    body = helper.make_graph(
        [node("Add", ["h", "e"], ["s"], "add"), node("MatMul", ["s", "own"], ["next"], "step"), node("Identity", ["next"], ["each"], "each")],
        "body",
        [value("h", FLOAT, [1, 16]), value("e", FLOAT, [1, 16])],
        [value("next", FLOAT, [1, 16]), value("each", FLOAT, [1, 16])],
        [weight("own", 16, 16)],
    )
    nodes = [
        node("Unsqueeze", ["x", "one"], ["steps"], "steps"),
        node("Scan", ["start", "steps"], ["last", "all"], "scan", body=body, num_scan_inputs=1),
        node("Squeeze", ["all", "one"], ["y"], "rows"),
    ]
    return model(nodes, [X], [Y], [tensor("start", np.zeros((1, 16))), tensor("one", [1], np.int64)]), flat()


@awkward("a valid Loop that crashes ONNX Runtime 1.32 when it runs: its state output has no name", runs=False)
def loop_that_crashes() -> tuple[onnx.ModelProto, Arrays]:
    body = loop_body([node("Tanh", ["h"], ["next"]), node("Identity", ["next"], ["each"])], more=[value("each", FLOAT, ["n", 16])])
    nodes = [node("Loop", ["one", "", "x"], ["", "steps"], "loop", body=body), node("Squeeze", ["steps", "zero"], ["y"], "only")]
    return model(nodes, [X], [Y], [tensor("one", 1, np.int64), tensor("zero", [0], np.int64)]), flat()


def recurrent(operator: str, gates: int) -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("Transpose", ["x"], ["steps"], "steps", perm=[1, 0, 2]),
        node(operator, ["steps", "w", "r", "b"], ["", "last"], "recurrent", hidden_size=8),
        node("Squeeze", ["last", "zero"], ["h"], "squeeze"),
        node("MatMul", ["h", "v"], ["y"], "product"),
    ]
    weights = [
        weight("w", 1, gates * 8, 16),
        weight("r", 1, gates * 8, 8),
        weight("b", 1, gates * 16),
        weight("v", 8, 4),
        tensor("zero", [0], np.int64),
    ]
    return model(nodes, [value("x", FLOAT, ["n", "t", 16])], [value("y", FLOAT, ["n", 4])], weights), {"x": normal(ROWS, 6, 16)}


@awkward("an LSTM")
def lstm() -> tuple[onnx.ModelProto, Arrays]:
    return recurrent("LSTM", 4)


@awkward("a GRU")
def gru() -> tuple[onnx.ModelProto, Arrays]:
    return recurrent("GRU", 3)


# ---- types ----------------------------------------------------------------------------------------------------------------------


def of_type(proto: onnx.ModelProto, dtype: int) -> onnx.ModelProto:
    """Change every weight, input and output to a type."""
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    for held in proto.graph.initializer:
        held.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(held).astype(kind), held.name))
    for shown in (*proto.graph.input, *proto.graph.output):
        shown.type.tensor_type.elem_type = dtype
    return proto


@awkward("float16 throughout")
def float16_throughout() -> tuple[onnx.ModelProto, Arrays]:
    return of_type(two_layers(), int(TensorProto.FLOAT16)), {"x": normal(ROWS, 16).astype(np.float16)}


@awkward("float64 throughout")
def float64_throughout() -> tuple[onnx.ModelProto, Arrays]:
    return of_type(two_layers(), int(TensorProto.DOUBLE)), {"x": normal(ROWS, 16).astype(np.float64)}


@awkward("float32 outside and float16 inside")
def float16_inside() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("Cast", ["x"], ["h"], "down", to=int(TensorProto.FLOAT16)),
        node("MatMul", ["h", "w"], ["m"], "product"),
        node("Cast", ["m"], ["y"], "up", to=FLOAT),
    ]
    return model(nodes, [X], [Y], [tensor("w", spread(16, 16), np.float16)]), flat()


@awkward("bfloat16 weights behind casts")
def bfloat16_weights() -> tuple[onnx.ModelProto, Arrays]:
    kind = helper.tensor_dtype_to_np_dtype(int(TensorProto.BFLOAT16))
    nodes = [node("Cast", ["w"], ["wide"], "up", to=FLOAT), node("MatMul", ["x", "wide"], ["y"], "product")]
    return model(nodes, [X], [Y], [tensor("w", spread(16, 16), kind)]), flat()


@awkward("quantized already")
def quantized_already() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("QuantizeLinear", ["x", "sx", "zx"], ["q"], "quantize"),
        node("DequantizeLinear", ["q", "sx", "zx"], ["d"], "back"),
        node("DequantizeLinear", ["w", "sw", "zw"], ["dw"], "weight"),
        node("MatMul", ["d", "dw"], ["y"], "product"),
    ]
    numbers = [
        tensor("sx", 0.03),
        tensor("zx", 128, np.uint8),
        tensor("sw", 0.01),
        tensor("zw", 0, np.int8),
        tensor("w", np.random.default_rng(6).integers(-100, 100, (16, 16)), np.int8),
    ]
    return model(nodes, [X], [Y], numbers), flat()


# ---- opsets, domains, form ------------------------------------------------------------------------------------------------------


@awkward("opset 7 and IR 3: every weight is listed as an input")
def opset_7() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("Conv", ["x", "k", "kb"], ["c"], "conv", pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["c", "s", "b", "m", "v"], ["n"], "norm"),
        node("Relu", ["n"], ["r"], "relu"),
        node("GlobalAveragePool", ["r"], ["p"], "pool"),
        node("Flatten", ["p"], ["f"], "flatten"),
        node("Dropout", ["f"], ["d"], "dropout"),
        node("Gemm", ["d", "w", "g"], ["l"], "gemm", transB=1),
        node("Softmax", ["l"], ["y"], "softmax"),
    ]
    weights = [
        weight("k", 8, 4, 3, 3),
        weight("kb", 8),
        tensor("s", np.full(8, 1.5)),
        weight("b", 8),
        weight("m", 8),
        tensor("v", np.full(8, 2.0)),
        weight("w", 4, 8),
        weight("g", 4),
    ]
    listed = [value(t.name, FLOAT, list(t.dims)) for t in weights]
    return model(nodes, [IMAGE, *listed], [value("y", FLOAT, ["n", 4])], weights, opset=7, ir_version=3), images()


@awkward("opset 9 with Upsample")
def opset_9_upsample() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [node("Upsample", ["x", "scales"], ["u"], "up", mode="nearest"), node("Conv", ["u", "k"], ["y"], "conv", pads=[1, 1, 1, 1])]
    return model(
        nodes, [IMAGE], [value("y", FLOAT, ["n", 4, 16, 16])], [tensor("scales", [1, 1, 2, 2]), weight("k", 4, 4, 3, 3)], opset=9, ir_version=4
    ), images()


@awkward("opset 23")
def opset_23() -> tuple[onnx.ModelProto, Arrays]:
    return two_layers(opset=23, ir_version=11), flat()


@awkward("Resize with scales, which must stay float32")
def resize() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("Conv", ["x", "k"], ["c"], "conv", pads=[1, 1, 1, 1]),
        node("Resize", ["c", "", "scales"], ["y"], "resize", mode="linear", coordinate_transformation_mode="half_pixel"),
    ]
    return model(nodes, [IMAGE], [value("y", FLOAT, ["n", 4, 16, 16])], [weight("k", 4, 4, 3, 3), tensor("scales", [1, 1, 2, 2])]), images()


@awkward("operators of ONNX Runtime's own")
def runtime_operators() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("FusedMatMul", ["x", "w"], ["m"], "fused", domain="com.microsoft", alpha=0.5, transB=1),
        node("BiasGelu", ["m", "b"], ["g"], "gelu", domain="com.microsoft"),
        node("MatMul", ["g", "v"], ["y"], "product"),
    ]
    return model(nodes, [X], [Y], [weight("w", 16, 16), weight("b", 16), weight("v", 16, 16, seed=1)], domains=["com.microsoft"]), flat()


@awkward("an operator that nobody knows: valid, but not to be run without its library", runs=False)
def unknown_operator() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [node("Twirl", ["x"], ["t"], "twirl", domain="some.body"), node("MatMul", ["t", "w"], ["y"], "product")]
    return model(nodes, [X], [Y], [weight("w", 16, 16)], domains=["some.body"]), flat()


@awkward("a function of the model's own, with a product inside")
def local_function() -> tuple[onnx.ModelProto, Arrays]:
    body = [node("MatMul", ["a", "m"], ["p"], "inside"), node("Tanh", ["p"], ["out"], "tanh")]
    function = helper.make_function("own", "Layer", ["a", "m"], ["out"], body, [helper.make_opsetid("", 17)])
    nodes = [node("Layer", ["x", "w"], ["l"], "layer", domain="own"), node("MatMul", ["l", "v"], ["y"], "product")]
    return model(nodes, [X], [Y], [weight("w", 16, 16), weight("v", 16, 16, seed=1)], domains=["own"], functions=[function]), flat()


@awkward("nodes that stand before those whose outputs they take; the format forbids it, ONNX Runtime takes it")
def out_of_order() -> tuple[onnx.ModelProto, Arrays]:
    proto = two_layers()
    nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for n in reversed(proto.graph.node)]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return proto, flat()


@awkward("two nodes give one name: the format forbids it, nothing can run it", runs=False)
def one_name_twice() -> tuple[onnx.ModelProto, Arrays]:
    proto = two_layers()
    proto.graph.node.append(node("MatMul", ["x", "w"], ["y"], "again"))
    return proto, flat()


@awkward("names with spaces, slashes, brackets and other alphabets")
def odd_names() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("MatMul", ["in put:0", "Gewicht/ä[0]"], ["/model/layers.0/out put"], "/model/layers.0/MatMul [1]"),
        node("Relu", ["/model/layers.0/out put"], ["层*?"], "Relu*"),
        node("MatMul", ["层*?", "w::v"], ["out:0"], "второй"),
    ]
    proto = model(
        nodes, [value("in put:0", FLOAT, ["n", 16])], [value("out:0", FLOAT, ["n", 16])], [weight("Gewicht/ä[0]", 16, 16), weight("w::v", 16, 16)]
    )
    return proto, {"in put:0": normal(ROWS, 16)}


@awkward("names that quantizers give themselves")
def names_of_quantizers() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("MatMul", ["x", "w"], ["x_QuantizeLinear_Output"], "x_QuantizeLinear"),
        node("Relu", ["x_QuantizeLinear_Output"], ["w_quantized"], "w_DequantizeLinear"),
        node("MatMul", ["w_quantized", "w_scale"], ["y"], "x_QuantizeLinear_Output_MatMul"),
    ]
    return model(nodes, [X], [Y], [weight("w", 16, 16), weight("w_scale", 16, 16, seed=1)]), flat()


def half_named(first: str, second: str) -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("MatMul", ["x", "w"], ["a"], first),
        node("Relu", ["a"], ["r"]),
        node("MatMul", ["r", "v"], ["m"]),
        node("Add", ["m", "b"], ["y"], second),
    ]
    return model(nodes, [X], [Y], [weight("w", 16, 16), weight("v", 16, 16, seed=1), weight("b", 16)]), flat()


@awkward("nodes without a name")
def names_missing() -> tuple[onnx.ModelProto, Arrays]:
    return half_named("first", "")


@awkward("two nodes of one name: valid, but ONNX Runtime takes unique names only", runs=False)
def names_repeated() -> tuple[onnx.ModelProto, Arrays]:
    return half_named("twice", "twice")


@awkward("nodes, weights and outputs that nobody takes")
def dead_parts() -> tuple[onnx.ModelProto, Arrays]:
    proto = two_layers()
    proto.graph.node.insert(2, node("Split", ["r"], ["left", "right"], "split", axis=1))
    proto.graph.node.append(node("MatMul", ["left", "nobody"], ["nothing"], "dead"))
    proto.graph.initializer.extend([weight("nobody", 8, 4), weight("unused", 4)])
    return proto, flat()


# ---- weights --------------------------------------------------------------------------------------------------------------------


@awkward("weights in Constant nodes")
def weights_in_constants() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("Constant", [], ["w"], "w", value=weight("w", 16, 16)),
        node("MatMul", ["x", "w"], ["a"], "first"),
        node("Constant", [], ["b"], "b", value=weight("b", 16)),
        node("Add", ["a", "b"], ["y"], "add"),
    ]
    return model(nodes, [X], [Y]), flat()


@awkward("weights behind Identity, Transpose, Cast and a product of two constants")
def weights_computed() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("Identity", ["w1"], ["i"], "identity"),
        node("MatMul", ["x", "i"], ["a"], "one"),
        node("Transpose", ["w2"], ["t"], "turn", perm=[1, 0]),
        node("MatMul", ["a", "t"], ["b"], "two"),
        node("Cast", ["w3"], ["c"], "cast", to=FLOAT),
        node("MatMul", ["b", "c"], ["d"], "three"),
        node("Mul", ["w1", "half"], ["h"], "scale"),
        node("MatMul", ["d", "h"], ["y"], "four"),
    ]
    weights = [weight("w1", 16, 16), weight("w2", 16, 16, seed=1), tensor("w3", spread(16, 16, seed=2), np.float16), tensor("half", 0.5)]
    return model(nodes, [X], [Y], weights), flat()


@awkward("one weight for two products and, turned over, for an embedding")
def tied_weight() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("Gather", ["w", "ids"], ["e"], "embed"),
        node("MatMul", ["e", "v"], ["a"], "one"),
        node("Relu", ["a"], ["r"], "relu"),
        node("MatMul", ["r", "v"], ["h"], "again"),
        node("Gemm", ["h", "w"], ["y"], "head", transB=1),
    ]
    rows = {"ids": np.random.default_rng(7).integers(0, 24, ROWS)}
    return model(nodes, [value("ids", INT64, ["n"])], [value("y", FLOAT, ["n", 24])], [weight("w", 24, 16), weight("v", 16, 16, seed=1)]), rows


@awkward("one bias for two convolutions of different scales")
def shared_bias() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("Conv", ["x", "k", "b"], ["c"], "one", pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"], "relu"),
        node("Conv", ["r", "l", "b"], ["y"], "two", pads=[1, 1, 1, 1]),
    ]
    weights = [weight("k", 4, 4, 3, 3), tensor("l", 10 * spread(4, 4, 3, 3, seed=1)), weight("b", 4)]
    return model(nodes, [IMAGE], [value("y", FLOAT, ["n", 4, 8, 8])], weights), images()


@awkward("weights that are listed as inputs and may be fed")
def weights_as_inputs() -> tuple[onnx.ModelProto, Arrays]:
    proto = two_layers()
    proto.graph.input.extend(value(t.name, FLOAT, list(t.dims)) for t in proto.graph.initializer)
    return proto, flat()


@awkward("a sparse weight")
def sparse_weight() -> tuple[onnx.ModelProto, Arrays]:
    values = tensor("w", [0.5, -1.0, 2.0])
    sparse = helper.make_sparse_tensor(values, tensor("places", [3, 40, 200], np.int64), [16, 16])
    proto = model([node("MatMul", ["x", "w"], ["a"], "sparse"), node("MatMul", ["a", "v"], ["y"], "product")], [X], [Y], [weight("v", 16, 16)])
    proto.graph.sparse_initializer.append(sparse)
    return proto, flat()


@awkward("weights in a file beside the model", beside=True)
def data_beside() -> tuple[onnx.ModelProto, Arrays]:
    return two_layers(), flat()


@awkward("a weight of rank 3, and one on the left of a product")
def weight_of_rank_3() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [node("MatMul", ["x", "w"], ["a"], "batched"), node("MatMul", ["u", "a"], ["y"], "left")]
    weights = [weight("w", 3, 16, 16), tensor("u", spread(4, 4) * np.linspace(0.05, 2, 4)[:, None])]
    return model(nodes, [value("x", FLOAT, ["n", 3, 4, 16])], [value("y", FLOAT, ["n", 3, 4, 16])], weights), {"x": normal(ROWS, 3, 4, 16)}


@awkward("a Gemm with factors, both sides turned, a bias of rank 2")
def gemm_with_factors() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("Gemm", ["x", "w", "b"], ["a"], "factors", alpha=0.5, beta=3.0, transB=1),
        node("Transpose", ["a"], ["t"], "turn", perm=[1, 0]),
        node("Gemm", ["t", "v"], ["y"], "turned", transA=1),
    ]
    return model(nodes, [X], [Y], [weight("w", 16, 16), weight("b", 1, 16), weight("v", 16, 16, seed=1)]), flat()


@awkward("ConvTranspose, whole and in groups, with uneven channels")
def convtranspose() -> tuple[onnx.ModelProto, Arrays]:
    uneven = spread(4, 4, 3, 3) * np.linspace(0.05, 2, 4)[None, :, None, None]
    nodes = [
        node("ConvTranspose", ["x", "k", "b"], ["u"], "whole"),
        node("Relu", ["u"], ["r"], "relu"),
        node("ConvTranspose", ["r", "g", "b"], ["y"], "groups", group=2),
    ]
    return model(
        nodes, [IMAGE], [value("y", FLOAT, ["n", 4, 12, 12])], [tensor("k", uneven), weight("g", 4, 2, 3, 3, seed=1), weight("b", 4)]
    ), images()


@awkward("a block of a mobile network: depthwise convolution, batch normalization, Clip, a residual")
def mobile_block() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("Conv", ["x", "k"], ["e"], "expand"),
        node("BatchNormalization", ["e", "s", "o", "m", "v"], ["n"], "norm"),
        node("Clip", ["n", "zero", "six"], ["c"], "clip"),
        node("Conv", ["c", "d"], ["w"], "depthwise", group=16, pads=[1, 1, 1, 1]),
        node("Clip", ["w", "zero", "six"], ["r"], "clip2"),
        node("Conv", ["r", "p"], ["q"], "project"),
        node("Add", ["q", "x"], ["y"], "residual"),
    ]
    weights = [
        weight("k", 16, 4, 1, 1),
        tensor("s", np.linspace(0.2, 3, 16)),
        weight("o", 16),
        weight("m", 16),
        tensor("v", np.linspace(0.5, 2, 16)),
        weight("d", 16, 1, 3, 3),
        weight("p", 4, 16, 1, 1),
        tensor("zero", 0.0),
        tensor("six", 6.0),
    ]
    return model(nodes, [IMAGE], [value("y", FLOAT, ["n", 4, 8, 8])], weights), images()


@awkward("a block of a transformer: norm, two heads, GELU by Erf, residuals")
def transformer_block() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [node("LayerNormalization", ["x", "g", "o"], ["n"], "norm", axis=-1)]
    for part in "qkv":
        nodes += [
            node("MatMul", ["n", f"w{part}"], [f"{part}0"], f"{part}_product"),
            node("Add", [f"{part}0", "o"], [f"{part}1"], f"{part}_bias"),
            node("Reshape", [f"{part}1", "heads"], [f"{part}2"], f"{part}_split"),
            node("Transpose", [f"{part}2"], [f"{part}3"], f"{part}_turn", perm=[0, 2, 3, 1] if part == "k" else [0, 2, 1, 3]),
        ]
    nodes += [
        node("MatMul", ["q3", "k3"], ["scores"], "scores"),
        node("Mul", ["scores", "scale"], ["scaled"], "scale"),
        node("Softmax", ["scaled"], ["shares"], "softmax", axis=-1),
        node("MatMul", ["shares", "v3"], ["mixed"], "mix"),
        node("Transpose", ["mixed"], ["back"], "back", perm=[0, 2, 1, 3]),
        node("Reshape", ["back", "whole"], ["joined"], "join"),
        node("MatMul", ["joined", "wo"], ["out"], "out"),
        node("Add", ["out", "x"], ["res"], "residual"),
        node("MatMul", ["res", "w1"], ["wide"], "up"),
        node("Mul", ["wide", "root"], ["z"], "root"),
        node("Erf", ["z"], ["erf"], "erf"),
        node("Add", ["erf", "one"], ["plus"], "plus"),
        node("Mul", ["wide", "plus"], ["gate"], "gate"),
        node("Mul", ["gate", "half"], ["act"], "half"),
        node("MatMul", ["act", "w2"], ["down"], "down"),
        node("Add", ["down", "res"], ["y"], "residual2"),
    ]
    weights = [weight(f"w{part}", 16, 16, seed=i) for i, part in enumerate("qkvo")]
    weights += [weight("w1", 16, 32, seed=5), weight("w2", 32, 16, seed=6), tensor("g", np.linspace(0.5, 2, 16)), weight("o", 16, seed=7)]
    weights += [tensor("heads", [0, 0, 2, 8], np.int64), tensor("whole", [0, 0, 16], np.int64)]
    weights += [tensor(n, v) for n, v in (("scale", 8**-0.5), ("root", 2**-0.5), ("one", 1.0), ("half", 0.5))]
    shape = ["n", "t", 16]
    return model(nodes, [value("x", FLOAT, shape)], [value("y", FLOAT, shape)], weights), {"x": normal(ROWS, 6, 16)}


# ---- ranges ---------------------------------------------------------------------------------------------------------------------


@awkward("a bias that 32 bits can't hold at the scale of input and weight")
def tiny_scale_large_bias() -> tuple[onnx.ModelProto, Arrays]:
    weights = [tensor("w", 1e-7 * spread(16, 16)), tensor("b", np.linspace(-2, 2, 16))]
    return model([node("Gemm", ["x", "w", "b"], ["y"], "gemm")], [X], [Y], weights), {"x": 1e-3 * normal(ROWS, 16)}


@awkward("activations and weights that are all zero or all equal")
def dead_ranges() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("Mul", ["x", "zeros"], ["dead"], "kill"),
        node("MatMul", ["dead", "w"], ["m"], "of_nothing"),
        node("MatMul", ["x", "nothing"], ["n"], "by_nothing"),
        node("MatMul", ["x", "same"], ["s"], "by_the_same"),
        node("Sum", ["m", "n", "s"], ["y"], "sum"),
    ]
    weights = [tensor("zeros", np.zeros(16)), weight("w", 16, 16), tensor("nothing", np.zeros((16, 16))), tensor("same", np.full((16, 16), 0.25))]
    return model(nodes, [X], [Y], weights), flat()


@awkward("a mask that reaches the lowest float is added before a Softmax")
def lowest_float_mask() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("MatMul", ["x", "v"], ["scores"], "scores"),
        node("Greater", ["x", "one"], ["hidden"], "hidden"),
        node("Where", ["hidden", "low", "zero"], ["mask"], "mask"),
        node("Add", ["scores", "mask"], ["masked"], "add"),
        node("Softmax", ["masked"], ["shares"], "softmax"),
        node("MatMul", ["shares", "w"], ["y"], "values"),
    ]
    numbers = [tensor("one", 1.0), tensor("low", np.finfo(np.float32).min), tensor("zero", 0.0)]
    return model(nodes, [X], [Y], [weight("v", 16, 16), weight("w", 16, 16, seed=1), *numbers]), flat()


@awkward("weights from 1e-20 to 1e6", delicate=True)
def wild_weights() -> tuple[onnx.ModelProto, Arrays]:
    wild = spread(16, 16) * np.logspace(-20, 6, 16)[None, :]
    nodes = [node("MatMul", ["x", "w"], ["a"], "wild"), node("Tanh", ["a"], ["t"], "tanh"), node("MatMul", ["t", "v"], ["y"], "tame")]
    return model(nodes, [X], [Y], [tensor("w", wild), weight("v", 16, 16, seed=1)]), flat()


@awkward("weights too small for a normal float, which make CPUs slow")
def denormal_weights() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [node("MatMul", ["x", "w"], ["a"], "tiny"), node("MatMul", ["x", "v"], ["b"], "usual"), node("Add", ["a", "b"], ["y"], "add")]
    return model(nodes, [X], [Y], [tensor("w", 1e-40 * spread(16, 16)), weight("v", 16, 16, seed=1)]), flat()


def detector(rows: int = ROWS) -> tuple[onnx.ModelProto, Arrays]:
    """Boxes in pixels beside scores from 0 to 1."""
    nodes = [
        node("MatMul", ["x", "wb"], ["b0"], "boxes"),
        node("Sigmoid", ["b0"], ["b1"], "unit"),
        node("Mul", ["b1", "size"], ["b2"], "pixels"),
        node("MatMul", ["x", "ws"], ["s0"], "scores"),
        node("Sigmoid", ["s0"], ["s1"], "sigmoid"),
        node("Concat", ["b2", "s1"], ["y"], "tail", axis=1),
    ]
    weights = [weight("wb", 16, 4), weight("ws", 16, 4, seed=1), tensor("size", 640.0)]
    return model(nodes, [X], [value("y", FLOAT, ["n", 8])], weights), {"x": normal(rows, 16)}


@awkward("boxes in pixels beside scores from 0 to 1", delicate=True)
def detector_tail() -> tuple[onnx.ModelProto, Arrays]:
    return detector()


@awkward("activations beyond what float16 holds", delicate=True)
def beyond_float16() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "large"),
        node("Mul", ["a", "million"], ["m"], "grow"),
        node("Mul", ["m", "millionth"], ["s"], "shrink"),
        node("MatMul", ["s", "v"], ["y"], "usual"),
    ]
    return model(nodes, [X], [Y], [weight("w", 16, 16), weight("v", 16, 16, seed=1), tensor("million", 1e6), tensor("millionth", 1e-6)]), flat()


def write_models(folder: Path, names: Sequence[str] | None = None) -> Mapping[str, Awkward]:
    """Write each model as `NAME.onnx` and its rows as `NAME.npz`; gives back what they are."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {name: MODELS[name]() for name in names or MODELS}
    for name, one in made.items():
        path = str(folder / f"{name}.onnx")
        if one.beside:
            copied = onnx.ModelProto()
            copied.CopyFrom(one.proto)
            onnx.save(copied, path, save_as_external_data=True, location=f"{name}.weights", size_threshold=256)
        else:
            onnx.save(one.proto, path)
        np.savez(folder / f"{name}.npz", **one.rows)
    return made
