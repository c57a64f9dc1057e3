"""What static quantization puts together first, or keeps in float, for speed and precision: composites, means over images, the model's ends.

A session fuses patterns in which one value is taken twice, as in x * sigmoid(x). Once that value is quantized, each taker has a DequantizeLinear
of its own, the pattern is no more to be found, and what was one kernel runs as five: seen with ONNX Runtime 1.32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from autotune.passes.onnx_graph import (
    drop_unused_initializers,
    fresh_name,
    graphs_of,
    operator_counts,
    optimize_by_session,
    short_message,
    value_names,
)
from autotune.passes.quantization_groups import CUTS

if TYPE_CHECKING:
    import onnx

# Operators that a session makes of patterns with one value taken twice. The CPU has kernels for all of these.
COMPOSITES = frozenset({"FastGelu", "Gelu", "LayerNormalization", "QuickGelu", "SimplifiedLayerNormalization"})
# Everything else of the level at which it makes them: what these make, the quantizers don't know. One that a later runtime adds is found by what
# it makes, and nothing is fused then.
NOT_HERE = (
    "AttentionFusion", "BiasDropoutFusion", "BiasGeluFusion", "BiasSkipLayerNormFusion", "BiasSoftmaxFusion", "ConvActivationFusion",
    "ConvAddActivationFusion", "DQMatMulNBitsFusion", "DynamicQuantizeMatMulFusion", "EmbedLayerNormFusion", "GatherSliceToSplitFusion",
    "GatherToSliceFusion", "GemmActivationFusion", "GroupQueryAttentionFusion", "GroupQueryAttentionPreNormFusion", "MatMulActivationFusion",
    "MatMulIntegerToFloatFusion", "MatMulNBitsFusion", "MatMulNBitsMlpFusion", "MatMulNBitsQLoRAFusion", "MatMulNBitsQkvFusion",
    "MatMulScaleFusion", "MatmulTransposeFusion", "QDQSelectorActionTransformer", "SkipLayerNormFusion", "SliceConcatToSpaceToDepthFusion",
    "SwiGluFusion", "TransposeOptimizer",
)  # fmt: skip
PATTERNS = frozenset({"Erf", "Tanh", "Sigmoid", "ReduceMean"})  # no composite is without one of these
# What gives floats of whole numbers as fast as whole numbers, so that an output of the model need not be rounded.
PRECISE = frozenset({"Add", "Gemm", "MatMul"})
VIEWS = frozenset({"Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})  # of the same values
SHARES = frozenset({"Sigmoid", "Softmax"})  # what gives numbers from 0 to 1 that add up, or stand for themselves
REQUANTIZED = frozenset({"Conv", "ConvTranspose", "Gemm"})  # by a session, where they are float between quantized values


def fuse_composites(proto: onnx.ModelProto, keep: Collection[str], notes: dict[str, Any]) -> onnx.ModelProto:
    """A model with one node for each pattern that the runtime would fuse if it stayed float; the given one where there is none.

    Nothing is fused where a node that is named in `keep` would go. The notes say what was fused, or why nothing was.
    """
    if not any(node.op_type in PATTERNS for node in proto.graph.node):
        return proto
    try:
        fused = optimize_by_session(proto, "extended", disabled=NOT_HERE)
    except Exception as error:  # the quantizer may still take what a session would not
        notes["composites"] = f"not fused: {short_message(error)}"
        return proto
    before, after = _bare(proto), _bare(fused)
    made = after - before
    gone = set(keep) & {n.name for g in graphs_of(proto.graph) for n in g.node} - {n.name for g in graphs_of(fused.graph) for n in g.node}
    if not made:
        return proto
    if not set(made) <= COMPOSITES:
        notes["composites"] = f"not fused: the runtime makes {', '.join(sorted(set(made) - COMPOSITES))} too"
        return proto
    if gone:
        notes["composites"] = f"not fused: nodes that are named would be hidden ({', '.join(sorted(gone)[:3])})"
        return proto
    notes["composites"] = dict(sorted(made.items()))
    return fused


def _bare(proto: onnx.ModelProto) -> Counter[str]:
    """Nodes by operator, whatever the domain."""
    found: Counter[str] = Counter()
    for name, count in operator_counts(proto).items():
        found[name.rpartition(".")[2]] += count
    return found


def pool_means(proto: onnx.ModelProto) -> int:
    """Write each mean over all axes behind the channels as a GlobalAveragePool, in place; return how many there were.

    The runtime has an 8-bit kernel of it that takes channels last, as its 8-bit convolutions give them; a ReduceMean gets a float copy of the
    whole value, turned around. Ranks are those of `value_info`; the axes must be constant.
    """
    from onnx import TensorProto, numpy_helper

    constants = {t.name: t for t in proto.graph.initializer}
    shapes = {v.name: v.type.tensor_type for v in (*proto.graph.value_info, *proto.graph.input)}
    found = 0
    for node in proto.graph.node:
        if node.op_type != "ReduceMean" or node.domain not in ("", "ai.onnx") or node.input[0] not in shapes:
            continue
        given = shapes[node.input[0]]
        rank = len(given.shape.dim) if given.elem_type == TensorProto.FLOAT and given.HasField("shape") else 0
        facts = {a.name: a for a in node.attribute}
        axes = list(facts["axes"].ints) if "axes" in facts else []
        if len(node.input) > 1 and node.input[1] in constants:
            axes = numpy_helper.to_array(constants[node.input[1]]).reshape(-1).tolist()
        kept = facts["keepdims"].i if "keepdims" in facts else 1
        if rank < 3 or not kept or sorted(axis % rank for axis in axes) != list(range(2, rank)):
            continue
        node.op_type = "GlobalAveragePool"
        del node.attribute[:], node.input[1:]
        found += 1
    if found:
        drop_unused_initializers(proto)
    return found


def last_shares(proto: onnx.ModelProto) -> dict[str, str]:
    """Name each Softmax and Sigmoid that gives an output of the model, through no more than views of it; to the output's name.

    In 8 bits it gives no more than 256 levels: most of a thousand classes have the same share, 0. Over many classes it is slower than in float.
    """
    makers = {name: node for node in proto.graph.node for name in node.output}
    uses = Counter(name for node in proto.graph.node for name in node.input)
    found = {}
    for output in proto.graph.output:
        node = makers.get(output.name)
        while node is not None and node.op_type in VIEWS and uses[node.input[0]] == 1:
            node = makers.get(node.input[0])
        if node is not None and node.op_type in SHARES:
            found[node.name] = output.name
    return found


def free_outputs(proto: onnx.ModelProto) -> int:
    """Take out, in place, what rounds a product's or a sum's result that is an output of a QDQ model, or goes into its last Softmax or Sigmoid.

    Nodes between that give values another shape lose their pairs too. What anyone else takes stays. Returns how many pairs there were.
    """
    makers = {name: node for node in proto.graph.node for name in node.output}
    uses = Counter(name for node in proto.graph.node for name in node.input)
    outputs = {value.name for value in proto.graph.output}
    rounding = ("DequantizeLinear", "QuantizeLinear")

    def way_back(name: str) -> list[onnx.NodeProto]:
        """The nodes that give this value and no other, the last one first, down to a product or sum; none where it comes from elsewhere."""
        way: list[onnx.NodeProto] = []
        while name in makers and uses[name] == (name not in outputs):
            way.append(makers[name])
            if way[-1].op_type in PRECISE:
                return way
            if way[-1].op_type not in VIEWS.union(rounding):
                break
            name = way[-1].input[0]
        return []

    gone: list[onnx.NodeProto] = []
    for output in proto.graph.output:
        end = makers.get(output.name)
        while end is not None and end.op_type in VIEWS:
            end = makers.get(end.input[0])
        taker = end if end is not None and end.op_type in SHARES else None
        way = way_back(taker.input[0] if taker is not None else output.name)
        kept = [node for node in way if node.op_type not in rounding]
        if len(kept) == len(way):
            continue
        for later, earlier in pairwise(kept):
            later.input[0] = earlier.output[0]
        if taker is not None:
            taker.input[0] = kept[0].output[0]
        else:
            kept[0].output[0] = output.name
        gone += [node for node in way if node.op_type in rounding]
    for node in gone:
        proto.graph.node.remove(node)
    if gone:
        drop_unused_initializers(proto)
    return sum(node.op_type == "QuantizeLinear" for node in gone)


def hold_apart(proto: onnx.ModelProto) -> int:
    """Keep the runtime, in place, from quantizing what was left in float; return how many nodes needed that.

    A session gives the float weights of a Conv, ConvTranspose or Gemm between a DequantizeLinear and a QuantizeLinear 8 bits and one scale, whatever
    they lose by it: in a network of depthwise convolutions, that made the outputs' error nine times as large as quantizing them per channel. It does
    so where nothing but Relu and Clip is between; so a LeakyRelu of slope 1, which changes nothing, is put between. Float convolutions and products
    take it in as they take in an activation.
    """
    from onnx import TensorProto, helper

    floats = {t.name for t in proto.graph.initializer if t.data_type == TensorProto.FLOAT}
    makers = {name: node for node in proto.graph.node for name in node.output}
    takers: dict[str, list[onnx.NodeProto]] = {}
    for node in proto.graph.node:
        for name in node.input:
            takers.setdefault(name, []).append(node)
    names = value_names(proto) | {node.name for node in proto.graph.node}
    outputs = {value.name for value in proto.graph.output}

    def is_rounded(name: str) -> bool:
        while name not in outputs and len(takers.get(name, ())) == 1:
            taker = takers[name][0]
            if taker.op_type not in CUTS:
                return taker.op_type == "QuantizeLinear"
            name = taker.output[0]
        return False

    found = []
    for node in proto.graph.node:
        fed = makers.get(node.input[0]) if node.op_type in REQUANTIZED and node.input[1] in floats else None
        if fed is not None and fed.op_type == "DequantizeLinear" and is_rounded(node.output[0]):
            found.append(node)
    for node in found:
        given = node.output[0]
        node.output[0] = fresh_name(f"{given}_apart", names)
        names.add(node.output[0])
        held = helper.make_node("LeakyRelu", [node.output[0]], [given], fresh_name(f"{node.name}_apart", names), alpha=1.0)
        names.add(held.name)
        proto.graph.node.append(held)
    return len(found)
