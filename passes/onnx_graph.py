"""What the ONNX passes share: counting operators, naming, sorting, saving by ONNX Runtime, and leaving a model as it was."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import re
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.digest import files_under
from autotune.errors import PassError, nearest
from autotune.model import LARGE_BYTES, ONNXModelHandler, message_bytes, save_onnx
from autotune.session import SessionSettings, session_options

if TYPE_CHECKING:
    import onnx
    from numpy.typing import NDArray

DEFAULT_DOMAINS = ("", "ai.onnx")
QUANTIZED_OPERATORS = frozenset({
    "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "QGemm", "MatMulInteger",
    "ConvInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "QAttention", "QEmbedLayerNormalization",
    "MatMulNBits", "MatMulBnb4",
})  # fmt: skip


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep libraries from printing to standard output, logging and warning while the block runs."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def library_errors(who: str, must: str, do: str = "") -> Iterator[None]:
    """Turn any exception of a library into a `PassError` that carries the first lines of its message."""
    try:
        yield
    except PassError:
        raise
    except Exception as error:  # what a library raises on a model it can't take has no common base
        raise PassError(who, must, short_message(error), do) from error


def short_message(error: BaseException, limit: int = 300) -> str:
    """One line for an exception: its type and the beginning of its message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:limit]}" if text else type(error).__name__


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and every graph in its nodes (branches of If, bodies of Loop and Scan), outer ones first."""
    yield graph
    for node in graph.node:
        for body in bodies_of(node):
            yield from graphs_of(body)


def bodies_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs that a node holds: branches of an If, the body of a Loop or Scan."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def operator_counts(proto: onnx.ModelProto) -> dict[str, int]:
    """Count nodes by operator, branches, bodies and the model's own functions included; sorted by name.

    Operators of other domains than ONNX's own carry theirs: `com.microsoft.QGemm`.
    """
    found: Counter[str] = Counter()
    for graph in graphs_of(proto.graph):
        found.update(_qualified(node) for node in graph.node)
    for function in proto.functions:
        found.update(_qualified(node) for node in function.node)
    return dict(sorted(found.items()))


def _qualified(node: onnx.NodeProto) -> str:
    return node.op_type if node.domain in DEFAULT_DOMAINS else f"{node.domain}.{node.op_type}"


def weight_bytes(proto: onnx.ModelProto) -> int:
    """Bytes of all initializers, those of branches and bodies included."""
    return sum(t.ByteSize() for graph in graphs_of(proto.graph) for t in graph.initializer)


def same_work(before: onnx.ModelProto, after: onnx.ModelProto) -> bool:
    """Say whether two models have the same operators in the same number and weights of the same types and shapes.

    That is how a pass knows that it changed names and annotations only.
    """

    def weights(proto: onnx.ModelProto) -> Counter[tuple[int, tuple[int, ...]]]:
        return Counter((t.data_type, tuple(t.dims)) for graph in graphs_of(proto.graph) for t in graph.initializer)

    return operator_counts(before) == operator_counts(after) and weights(before) == weights(after)


def is_quantized(proto: onnx.ModelProto) -> bool:
    """Say whether any node works on quantized values already."""
    return any(name.rpartition(".")[2] in QUANTIZED_OPERATORS for name in operator_counts(proto))


def default_opset(proto: onnx.ModelProto) -> int:
    """Version of ONNX's own operator set, 0 when the model imports none."""
    return next((o.version for o in proto.opset_import if o.domain in DEFAULT_DOMAINS), 0)


def name_every_node(proto: onnx.ModelProto) -> None:
    """Give unnamed nodes a name and repeated names a number, in every graph. Names that are unique stay."""
    taken = {node.name for graph in graphs_of(proto.graph) for node in graph.node if node.name}
    seen: set[str] = set()
    for graph in graphs_of(proto.graph):
        for node in graph.node:
            if node.name and node.name not in seen:
                seen.add(node.name)
                continue
            node.name = fresh_name(node.name or f"{node.op_type}_{len(seen)}", taken)
            taken.add(node.name)
            seen.add(node.name)


def name_values_apart(proto: onnx.ModelProto) -> None:
    """Rename values, in place, that one body defines under a name that another graph defines too.

    Branches of an If may each have a `t`. Where names are the whole model's, a name alone tells which value is meant.
    """
    defined: set[str] = set()
    taken = value_names(proto)

    def rename(graph: onnx.GraphProto, outer: Mapping[str, str]) -> None:
        names = dict(outer)
        own = [*(v.name for v in graph.input), *(t.name for t in graph.initializer), *(name for node in graph.node for name in node.output)]
        for name in dict.fromkeys(own):
            names.pop(name, None)
            if name and name in defined:
                names[name] = fresh_name(name, taken)
                taken.add(names[name])
            defined.add(names.get(name, name))
        for held in (graph.initializer, graph.value_info, graph.input, graph.output):
            for value in held:
                value.name = names.get(value.name, value.name)
        for node in graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]
            for body in bodies_of(node):
                rename(body, names)

    rename(proto.graph, {})


def fresh_name(stem: str, taken: set[str] | Mapping[str, Any]) -> str:
    """Return `stem`, or `stem_1`, `stem_2` ...: the first that is free."""
    if stem not in taken:
        return stem
    number = 1
    while f"{stem}_{number}" in taken:
        number += 1
    return f"{stem}_{number}"


def value_names(proto: onnx.ModelProto) -> set[str]:
    """Every name that stands for a value anywhere in the model."""
    names: set[str] = set()
    for graph in graphs_of(proto.graph):
        names.update(t.name for t in graph.initializer)
        names.update(v.name for v in (*graph.input, *graph.output))
        for node in graph.node:
            names.update(node.input)
            names.update(node.output)
    return names


def initializer_names(proto: onnx.ModelProto) -> set[str]:
    """Names of all initializers, those of branches and bodies included."""
    return {t.name for graph in graphs_of(proto.graph) for t in graph.initializer}


def rename_new_initializers(proto: onnx.ModelProto, known: set[str]) -> None:
    """Give initializers that are not in `known` names of our own.

    A graph that ONNX Runtime saved can fail to load again at its higher levels ("Attempt to replace the existing tensor",
    seen with 1.32): the same fusion runs once more and makes an initializer of the same name.
    """
    taken = value_names(proto)
    number = 0

    def rename(graph: onnx.GraphProto, outer: dict[str, str]) -> None:
        nonlocal number
        kept = known | {v.name for v in (*graph.input, *graph.output)}
        names = dict(outer)
        for tensor in graph.initializer:
            if tensor.name in kept:
                names.pop(tensor.name, None)
                continue
            while f"folded_{number}" in taken:
                number += 1
            names[tensor.name] = f"folded_{number}"
            taken.add(names[tensor.name])
            tensor.name = names[tensor.name]
        for value in graph.value_info:
            value.name = names.get(value.name, value.name)
        for node in graph.node:
            for index, name in enumerate(node.input):
                if name in names:
                    node.input[index] = names[name]
            for body in bodies_of(node):
                rename(body, names)

    rename(proto.graph, {})


def load_fixed(model: ONNXModelHandler) -> onnx.ModelProto:
    """Read a model whose weights are no inputs and whose nodes stand in order.

    Old exporters list every weight as an input that may be fed. Tools fold such weights and leave the input behind, which must then be
    fed. Nobody can see these inputs in a model's contract (`ONNXModelHandler.io` leaves them out), so nobody loses anything.
    ONNX Runtime runs nodes of the main graph in whatever order they are written, which the format forbids and other tools trip over.
    """
    proto = model.load()
    weights = {t.name for t in proto.graph.initializer} | {t.values.name for t in proto.graph.sparse_initializer}
    kept = [v for v in proto.graph.input if v.name not in weights]
    if len(kept) < len(proto.graph.input):
        del proto.graph.input[:]
        proto.graph.input.extend(kept)
        proto.ir_version = max(proto.ir_version, 4)  # before, each initializer had to be an input
    with contextlib.suppress(ValueError):  # a cycle: whoever runs the model says so
        sort_nodes(proto.graph)
    return proto


def lift_constants(proto: onnx.ModelProto, *, least_bytes: int = 0) -> int:
    """Turn Constant nodes that hold a tensor (of at least so many bytes) into initializers of the same name; returns how many.

    Shapes and types stay. Tools that look for weights look at initializers only. A constant that is a graph's output stays a node.
    """
    lifted = 0
    for graph in graphs_of(proto.graph):
        outputs = {v.name for v in graph.output}
        for index in range(len(graph.node) - 1, -1, -1):
            node = graph.node[index]
            if node.op_type != "Constant" or node.domain not in DEFAULT_DOMAINS or node.output[0] in outputs:
                continue
            tensor = next((a.t for a in node.attribute if a.name == "value"), None)
            if tensor is None or tensor.ByteSize() < least_bytes:
                continue
            added = graph.initializer.add()
            added.CopyFrom(tensor)
            added.name = node.output[0]
            del graph.node[index]
            lifted += 1
    return lifted


ASIDE_ELEMENTS = 1024


def weights_aside(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, onnx.TensorProto]]:
    """A copy in which large weights of the main graph are inputs, and those weights by name.

    For libraries in C++ that take a model as one message: such end at 2 GiB, need the values of small weights only, and copy all.
    """
    from onnx import helper

    large = {t.name: t for t in proto.graph.initializer if t.data_type and _elements(t) >= ASIDE_ELEMENTS}
    copied = type(proto)()
    for whole, part, left_out in ((proto, copied, "graph"), (proto.graph, copied.graph, "initializer")):
        for field, value in whole.ListFields():
            if field.name == left_out:
                continue
            if isinstance(value, str | int):
                setattr(part, field.name, value)
            else:
                getattr(part, field.name).extend(value)
    copied.graph.initializer.extend(t for t in proto.graph.initializer if t.name not in large)
    copied.ir_version = max(copied.ir_version, 4)  # before, each initializer had to be an input
    copied.graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in large.values())
    return copied, large


def weights_back(proto: onnx.ModelProto, large: Mapping[str, onnx.TensorProto], order: Sequence[str]) -> None:
    """Undo `weights_aside` on what a library made: weights in the given order of names, then those that it added."""
    made = {t.name: type(t).FromString(t.SerializeToString()) for t in proto.graph.initializer}
    inputs = [v for v in proto.graph.input if v.name not in large]
    del proto.graph.initializer[:], proto.graph.input[:]
    proto.graph.input.extend(inputs)
    proto.graph.initializer.extend(large[n] if n in large else made.pop(n) for n in order if n in large or n in made)
    proto.graph.initializer.extend(made.values())


def _elements(tensor: onnx.TensorProto) -> int:
    return math.prod(tensor.dims)


def sort_nodes(graph: onnx.GraphProto) -> None:
    """Put nodes after those whose outputs they take, branches and bodies included; the order is kept where it can be.

    Raises `ValueError` for a cycle.
    """
    for inner in list(graphs_of(graph))[1:]:
        _sort_one(inner)
    _sort_one(graph)


def _sort_one(graph: onnx.GraphProto) -> None:
    producer = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    needs = [sorted({producer[n] for n in _names_taken(node) if n in producer} - {i}) for i, node in enumerate(graph.node)]
    order: list[int] = []
    state = [0] * len(needs)  # 0 untouched, 1 waiting for its inputs, 2 placed
    for root in range(len(needs)):
        stack = [root]
        while stack:
            index = stack[-1]
            if state[index] == 2:
                stack.pop()
                continue
            waiting = [n for n in needs[index] if state[n] != 2]
            if waiting and state[index] == 1 and any(state[n] == 1 for n in waiting):
                raise ValueError("the graph has a cycle")
            if waiting:
                state[index] = 1
                stack.extend(reversed(waiting))
                continue
            state[index] = 2
            order.append(index)
            stack.pop()
    if order != list(range(len(order))):
        nodes = [type(graph.node[0]).FromString(graph.node[i].SerializeToString()) for i in order]
        del graph.node[:]
        graph.node.extend(nodes)


def _names_taken(node: onnx.NodeProto) -> set[str]:
    """Names a node reads, those that its branches and bodies take from outside included."""
    names = set(node.input)
    for body in bodies_of(node):
        for inner in graphs_of(body):
            for part in inner.node:
                names.update(part.input)
    return names


def fit_domains(proto: onnx.ModelProto) -> None:
    """Import the operator sets that are used and no others: ONNX Runtime adds a dozen when it saves, its fusions forget their own."""
    used = {node.domain for graph in graphs_of(proto.graph) for node in graph.node}
    used |= {node.domain for function in proto.functions for node in function.node} | {f.domain for f in proto.functions}
    for index in range(len(proto.opset_import) - 1, -1, -1):
        domain = proto.opset_import[index].domain
        if domain not in DEFAULT_DOMAINS and domain not in used:
            del proto.opset_import[index]
    if "com.microsoft" in used - {o.domain for o in proto.opset_import}:
        proto.opset_import.add(domain="com.microsoft", version=1)


def optimize_by_session(
    proto: onnx.ModelProto, level: str, *, execution_provider: str = "CPUExecutionProvider", disabled: Sequence[str] = ()
) -> onnx.ModelProto:
    """Let ONNX Runtime optimize at a level (`basic`, `extended`, `all`) and give back the graph it saves, which loads again.

    The input is not changed. Raises what ONNX Runtime raises for a model it can't load.
    """
    import onnx
    import onnxruntime as ort

    known = initializer_names(proto)
    with tempfile.TemporaryDirectory(prefix="autotune-optimize-") as name:
        folder = Path(name)
        save_onnx(_copy(proto), folder / "given.onnx")
        options = session_options(SessionSettings(graph_optimization_level=level, intra_op_num_threads=1))
        options.optimized_model_filepath = str(folder / "saved.onnx")
        if message_bytes(proto) >= LARGE_BYTES:
            options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "saved.onnx.data")
        options.log_severity_level = 4  # "this graph is hardware specific" is said in the notes of the passes it concerns
        providers = [execution_provider] if execution_provider == "CPUExecutionProvider" else [execution_provider, "CPUExecutionProvider"]
        with quiet():
            ort.InferenceSession(str(folder / "given.onnx"), options, providers=providers, disabled_optimizers=list(disabled) or None)
        saved = onnx.load(str(folder / "saved.onnx"))
    rename_new_initializers(saved, known)
    fit_domains(saved)
    return saved


def _copy(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy where saving would change the object: `onnx.save` with external data empties the tensors it moves."""
    if message_bytes(proto) < LARGE_BYTES:
        return proto
    copied = type(proto)()
    copied.CopyFrom(proto)
    return copied


def keep_io(result: onnx.ModelProto, given: onnx.ModelProto) -> None:
    """Give a model, in place, the inputs and outputs of the one that it was made of, names, types and shapes as they were written there.

    Libraries drop an input that nobody takes, and put what they inferred in the place of an axis's name.
    """
    for field in ("input", "output"):
        wanted = list(getattr(given.graph, field))
        result.graph.ClearField(field)
        getattr(result.graph, field).extend(wanted)


def check_types(proto: onnx.ModelProto) -> None:
    """Run the ONNX checker and strict type inference; raises what they raise. Needs the model to fit into one message or on disk."""
    import onnx

    if message_bytes(proto) < LARGE_BYTES:
        onnx.checker.check_model(proto)
        onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True)
        return
    with tempfile.TemporaryDirectory(prefix="autotune-check-") as name:
        path = Path(name, "model.onnx")
        save_onnx(_copy(proto), path)
        onnx.checker.check_model(str(path))
        onnx.shape_inference.infer_shapes_path(str(path), str(path.with_name("inferred.onnx")), check_type=True, strict_mode=True)


def loads_at_every_level(proto: onnx.ModelProto, feed: Mapping[str, NDArray[Any]] | None = None) -> None:
    """Create CPU sessions at the lowest and the highest optimization level, and run each on a feed, if any; raises what ONNX Runtime raises.

    Some models load and do not run, as with zero points of a wrong shape.
    """
    import onnxruntime as ort

    with tempfile.TemporaryDirectory(prefix="autotune-load-") as name:
        path = Path(name, "model.onnx")
        save_onnx(_copy(proto), path)
        for level in ("disable", "all"):
            options = session_options(SessionSettings(graph_optimization_level=level, intra_op_num_threads=1))
            options.log_severity_level = 4
            with quiet():
                session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
                if feed is not None:
                    session.run(None, dict(feed))


def unchanged(model: ONNXModelHandler, folder: Path, reason: str, *, notes: Mapping[str, Any] | None = None) -> ONNXModelHandler:
    """Copy the input's files byte for byte and say in the notes why nothing was changed."""
    for name in files_under(model.folder):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(model.folder / name, target)
    return model.written(folder, notes={**(notes or {}), "changed": False, "reason": reason})


def matching_nodes(proto: onnx.ModelProto, patterns: Iterable[str], *, who: str, parameter: str, bodies: bool = True) -> list[str]:
    """Names of nodes that names or patterns mean, in branches and bodies too unless `bodies` is False.

    Raises `PassError` for one that matches nothing, with the nearest name.
    """
    names = [node.name for graph in (graphs_of(proto.graph) if bodies else [proto.graph]) for node in graph.node]
    found: dict[str, None] = {}
    for pattern in patterns:
        matches = [name for name in names if glob_like(pattern).fullmatch(name)]
        if not matches:
            hint = nearest(pattern, names)
            raise PassError(who, f"each entry of {parameter} must match a node of the model", repr(pattern), hint if hint.startswith("Did") else "")
        found.update(dict.fromkeys(matches))
    return list(found)


def drop_unused_initializers(proto: onnx.ModelProto) -> None:
    """Remove initializers that no node takes and that are no output, in every graph."""
    used = {name for graph in graphs_of(proto.graph) for node in graph.node for name in node.input}
    used |= {v.name for graph in graphs_of(proto.graph) for v in graph.output}
    for graph in graphs_of(proto.graph):
        kept = [t for t in graph.initializer if t.name in used]
        if len(kept) < len(graph.initializer):
            del graph.initializer[:]
            graph.initializer.extend(kept)


def glob_like(pattern: str) -> re.Pattern[str]:
    """Compile a name or a pattern with `*` and `?`. Brackets stand for themselves: exporters write them into node names."""
    return re.compile("".join(".*" if c == "*" else "." if c == "?" else re.escape(c) for c in pattern), re.DOTALL)
