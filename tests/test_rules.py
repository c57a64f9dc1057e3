"""Every rule: what breaks it is refused by its id before any trial, the nearest legal chain passes; and no rule refuses more than that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.capabilities import Answer, Capabilities, Fact, capabilities_of
from autotune.chain_rules import opset_of
from autotune.config import LoadedSweep, parse_sweep
from autotune.errors import ConfigError, EnvironmentFault, PassConfigError, SpaceError
from autotune.foresight import Place
from autotune.model import ONNX, PYTORCH
from autotune.pass_rules import Context
from autotune.passes import registry
from autotune.passes.base import ModelTraits, Pass, PassConfigParam, PassContract
from autotune.pipeline import InputFacts, Pipeline
from autotune.records import Status
from autotune.rules import RULES, Finding, Judge
from autotune.search_spaces.parameters import INACTIVE, INVALID, Categorical, Conditional
from autotune.search_spaces.space import Alternative, Slot, compile_space, enumerate_points, point_key
from autotune.sweep.prepare import prepare, probe_provider
from autotune.sweep.result import SweepResult
from autotune.target import ACCELERATOR_OF, AcceleratorSpec, Target
from autotune.trial import TrialPlan, TrialRunner

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "rules.md"
GOOD_FOR_QNN = ModelTraits(
    quantized=True, format="qdq", weight_type="int8", activation_type="uint8", symmetric_weights=True, symmetric_activations=True, power_of_two=True
)
SYMMETRIC = ModelTraits(
    quantized=True, format="qdq", weight_type="int8", activation_type="int8", symmetric_weights=True, symmetric_activations=True, per_channel=True
)


def qdq(weights: str, activations: str = "float32", **more: Any) -> ModelTraits:
    return ModelTraits(quantized=True, format="qdq", weight_type=weights, activation_type=activations, **more)


def a_pass(
    name: str,
    traits: ModelTraits | Callable[[Mapping[str, Any]], ModelTraits] = ModelTraits(),  # noqa: B008 # frozen
    *,
    table: Mapping[str, PassConfigParam] | None = None,
    contract: PassContract = PassContract(),  # noqa: B008 # frozen
    validate: Callable[[Mapping[str, Any]], None] | None = None,
) -> type[Pass]:
    """A pass that makes what it says, and never runs."""

    def validate_config(cls: type[Pass], config: Mapping[str, Any], accelerator_spec: AcceleratorSpec) -> None:
        if validate is not None:
            validate(config)

    return type(
        name,
        (Pass,),
        {
            "contract": contract,
            "_default_config": classmethod(lambda cls, spec: dict(table or {})),
            "_run_for_config": lambda self, model, config, out: model,
            "traits": classmethod(lambda cls, config: traits(config) if callable(traits) else traits),
            "validate_config": classmethod(validate_config),
        },
    )


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[Pass]], str]:
    """A function that makes a pass known by its name for one test."""

    def register(pass_class: type[Pass]) -> str:
        monkeypatch.setitem(registry._registered, pass_class.__name__, pass_class)
        return pass_class.__name__

    return register


@pytest.fixture
def pipeline_of(tmp_path: Path) -> Callable[..., Pipeline]:
    np.savez(tmp_path / "calib.npz", x=np.zeros((4, 1, 8, 8), np.float32))

    def pipeline(chain: Sequence[Any], *, ep: str = "cpu", opset: int = 17, format_: str = ONNX, calibrated: bool = True, **more: Any) -> Pipeline:
        slots = [{"slot": f"slot{i}", "pass": step} if isinstance(step, str) else step for i, step in enumerate(chain)]
        data = {"eval": "eval.npz", **({"calibration": "calib.npz"} if calibrated else {})}
        model = {"path": "model.onnx"} if format_ == ONNX else {"script": "net.py"}
        config = parse_sweep({"model": model, "data": data, "metric": "accuracy", "chain": slots, "target": {"ep": ep}, **more})
        return Pipeline(LoadedSweep(config, tmp_path), InputFacts(format_, opset if format_ == ONNX else 0, {"Conv": 1}))

    return pipeline


def refused_by(pipeline_of: Callable[..., Pipeline], chain: Sequence[Any], **more: Any) -> str:
    """The message of the error that a chain ends in."""
    with pytest.raises(SpaceError) as caught:
        pipeline_of(chain, **more)
    return str(caught.value)


AWQ = ModelTraits(methods=frozenset({"awq"}))
GPTQ = ModelTraits(methods=frozenset({"gptq"}))
QAT = ModelTraits(quantized=True, methods=frozenset({"qat"}))
TO_ONNX = PassContract(accepts=PYTORCH, returns=ONNX)
TORCH = PassContract(accepts=PYTORCH, returns=PYTORCH)
FLOAT_ONLY = PassContract(refuses_quantized_input=True)


@pytest.mark.parametrize(
    ("rule", "broken", "legal"),
    [
        ("provider-mismatch", ({"contract": PassContract(execution_providers=("OpenVINOExecutionProvider",))}, "cpu", 17),
         ({"contract": PassContract(execution_providers=("OpenVINOExecutionProvider",))}, "openvino", 17)),
        ("provider-mismatch", ({"contract": PassContract(accelerators=("npu",))}, "cuda", 17),
         ({"contract": PassContract(accelerators=("npu",))}, "qnn", 17)),
        ("missing-engine", ({"contract": PassContract(packages={"no_such_package_anywhere": "passtune[none]"})}, "cpu", 17),
         ({"contract": PassContract(packages={"numpy": "numpy"})}, "cpu", 17)),
        ("opset-floor", ({"contract": PassContract(min_opset=18)}, "cpu", 17), ({"contract": PassContract(min_opset=17)}, "cpu", 17)),
        ("opset-floor", ({"traits": qdq("float8", "float8")}, "tensorrt", 18), ({"traits": qdq("float8", "float8")}, "tensorrt", 19)),
        ("opset-floor", ({"traits": qdq("int4")}, "tensorrt", 20), ({"traits": qdq("int4")}, "tensorrt", 21)),
        ("opset-floor", ({"traits": qdq("int8", "uint16")}, "qnn", 20), ({"traits": qdq("int8", "uint16")}, "qnn", 21)),
        ("opset-floor", ({"traits": qdq("int8", "uint8", per_channel=True)}, "cpu", 12),
         ({"traits": qdq("int8", "uint8", per_channel=True)}, "cpu", 13)),
        ("opset-floor", ({"traits": qdq("int8", "uint8")}, "cpu", 9), ({"traits": qdq("int8", "uint8")}, "cpu", 10)),
        ("gpu-only-method", ({"traits": AWQ}, "cpu", 17), ({"traits": AWQ}, "cuda", 17)),
        ("gpu-only-method", ({"traits": GPTQ}, "openvino", 17), ({"traits": GPTQ}, "tensorrt", 17)),
        ("gpu-only-method", ({"traits": GPTQ}, "dml", 17), ({"traits": AWQ}, "dml", 17)),
        ("gpu-only-method", ({"traits": AWQ}, "qnn", 17), ({"traits": AWQ}, "rocm", 17)),
        ("gpu-only-method", ({"contract": PassContract(needs_gpu=True)}, "cpu", 17), ({"contract": PassContract(needs_gpu=True)}, "cuda", 17)),
        ("qat-unsupported", ({"traits": QAT}, "qnn", 17), ({"traits": QAT}, "cpu", 17)),
        ("qnn-limits", ({"traits": ModelTraits(quantized=True, format="qoperator", weight_type="int8")}, "qnn", 17),
         ({"traits": qdq("int8", "uint8", symmetric_weights=False, symmetric_activations=False, power_of_two=False)}, "qnn", 17)),
        ("qnn-limits", ({"traits": ModelTraits(quantized=True, format="dynamic", weight_type="int8")}, "qnn", 17),
         ({"traits": ModelTraits(quantized=True, format="weight_only", weight_type="int4")}, "qnn", 17)),
        ("ep-limits", ({"traits": qdq("int8", "int8", symmetric_weights=True, symmetric_activations=False)}, "tensorrt", 17),
         ({"traits": SYMMETRIC}, "tensorrt", 17)),
        ("ep-limits", ({"traits": qdq("int8", "uint8", symmetric_weights=True, symmetric_activations=True)}, "tensorrt", 17),
         ({"traits": SYMMETRIC}, "tensorrt", 17)),
        ("ep-limits", ({"traits": ModelTraits(quantized=True, format="dynamic", weight_type="int8")}, "openvino", 17),
         ({"traits": qdq("int8", "uint8")}, "openvino", 17)),
        ("ep-limits", ({"traits": ModelTraits(quantized=True, format="qoperator", weight_type="int8")}, "cuda", 17),
         ({"traits": SYMMETRIC}, "cuda", 17)),
        ("ep-limits", ({"traits": ModelTraits(weight_type="bfloat16")}, "cpu", 17), ({"traits": ModelTraits(weight_type="float16")}, "cpu", 17)),
    ],
)  # fmt: skip
def test_a_pass_that_breaks_a_rule_is_refused_by_its_id_and_the_nearest_legal_one_passes(
    rule: str,
    broken: tuple[dict[str, Any], str, int],
    legal: tuple[dict[str, Any], str, int],
    known: Callable[[type[Pass]], str],
    pipeline_of: Callable[..., Pipeline],
) -> None:
    bad, good = (known(a_pass(name, **case[0])) for name, case in (("Bad", broken), ("Good", legal)))

    message = refused_by(pipeline_of, [bad], ep=broken[1], opset=broken[2])
    nothing = known(a_pass("Nothing"))
    optional = pipeline_of([{"slot": "bad", "pass": bad, "optional": True}, nothing], ep=broken[1], opset=broken[2])
    fine = pipeline_of([good], ep=legal[1], opset=legal[2])

    assert rule in message
    assert "Bad: " in message
    assert {k: n for k, n in optional.space.invalid.items() if n} == {rule: 1}
    assert [f.rule for f in fine.findings if f.severity == "error"] == []
    assert fine.space.valid == 1


def test_awq_made_on_a_torch_model_is_not_for_directml(known: Callable[[type[Pass]], str], pipeline_of: Callable[..., Pipeline]) -> None:
    torch_awq = known(a_pass("TorchAwq", AWQ, contract=TO_ONNX))

    assert "gpu-only-method" in refused_by(pipeline_of, [torch_awq], ep="dml", format_=PYTORCH)
    assert pipeline_of([torch_awq], ep="cuda", format_=PYTORCH).space.valid == 1


def test_the_order_of_passes_is_refused_by_its_id_and_the_right_one_passes(
    known: Callable[[type[Pass]], str], pipeline_of: Callable[..., Pipeline]
) -> None:
    trained, convert, quantize = (
        known(a_pass("Trained", contract=TORCH)),
        known(a_pass("Convert", contract=TO_ONNX)),
        known(a_pass("Quantize", qdq("int8", "uint8"), contract=FLOAT_ONLY)),
    )

    assert pipeline_of([trained, convert, quantize], format_=PYTORCH).space.valid == 1
    for wrong in ([convert, trained], [quantize, convert], [trained], [convert, quantize, {"slot": "again", "pass": quantize}], [convert, convert]):
        chain = [s if isinstance(s, dict) else {"slot": f"s{i}", "pass": s} for i, s in enumerate(wrong)]
        assert "order" in refused_by(pipeline_of, chain, format_=PYTORCH)


def test_whether_a_model_is_quantized_may_hang_on_a_pass_s_config(known: Callable[[type[Pass]], str], pipeline_of: Callable[..., Pipeline]) -> None:
    table = {"bits": PassConfigParam(type_=int, default_value=8, search_defaults=Categorical([8, 32]))}
    perhaps = known(a_pass("Perhaps", lambda c: ModelTraits(quantized=c["bits"] == 8), table=table))
    quantize = known(a_pass("Quantize", qdq("int8", "uint8"), contract=FLOAT_ONLY))

    space = pipeline_of([{"slot": "perhaps", "pass": perhaps}, quantize]).space

    assert [p["perhaps.bits"] for p in enumerate_points(space)] == [32]
    assert space.invalid["order"] == 1


def test_awq_and_pruning_are_not_in_one_chain_unless_the_rule_is_waived(
    known: Callable[[type[Pass]], str], pipeline_of: Callable[..., Pipeline]
) -> None:
    known(a_pass("Awq", AWQ))
    pruning = {"slot": "prune", "pass": "TorchPruning", "params": {"keep_ratio": [1.0, 0.5], "fine_tune_epochs": 0}}
    chain = [pruning, {"slot": "convert", "pass": "OnnxConversion"}, {"slot": "awq", "pass": "Awq", "optional": True}]

    space = pipeline_of(chain, ep="cuda", format_=PYTORCH).space
    waived = pipeline_of(chain, ep="cuda", format_=PYTORCH, validation={"waive": ["method-exclusion"]})

    assert {(p["prune.keep_ratio"], p["awq"]) for p in enumerate_points(space)} == {(1.0, "Awq"), (1.0, None), (0.5, None)}
    assert space.invalid["method-exclusion"] == 1
    assert waived.space.valid == 4
    assert [f.waived for f in waived.findings if f.rule == "method-exclusion"] == [True]


def test_calibration_data_are_needed_or_random_ones_asked_for_by_name(pipeline_of: Callable[..., Pipeline]) -> None:
    static = {"slot": "q", "pass": "OnnxQuantization", "params": {"quant_mode": "static"}}

    message = refused_by(pipeline_of, [static], calibrated=False)
    with_random = pipeline_of([static], data={"eval": "eval.npz", "calibration": "random"})

    assert "data-needed" in message
    assert "data: {calibration: random}" in message
    assert with_random.steps(with_random.default_point())[0].config["calibration_data_dir"] == "random"
    assert "random-calibration" in {f.rule for f in with_random.findings if f.severity == "warning"}
    assert "random-calibration" not in {f.rule for f in pipeline_of([static]).findings}


def test_random_data_asked_for_by_a_pass_s_own_parameter_are_told_too(pipeline_of: Callable[..., Pipeline]) -> None:
    params = {"quant_mode": "static", "calibration_data_dir": "random"}
    pipeline = pipeline_of([{"slot": "q", "pass": "OnnxQuantization", "params": params}], calibrated=False)

    assert "random-calibration" in {f.rule for f in pipeline.findings}


def test_random_calibration_is_no_path_and_is_noted_before_the_first_trial(
    digits: Path, sweep_of: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    sweep = LoadedSweep(parse_sweep(sweep_of(digits, data={"eval": str(digits / "eval.npz"), "calibration": "random"})), tmp_path)

    prepared = prepare(sweep)

    assert sweep.absolute().data.calibration == "random"
    assert [note for note in prepared.notes if note.startswith("calibration data is random")]


def test_values_that_a_pass_refuses_are_pruned_with_its_own_words(pipeline_of: Callable[..., Pipeline]) -> None:
    params = {"quant_mode": "static", "activation_type": "int8", "weight_type": ["int8", "uint8"]}
    pipeline = pipeline_of([{"slot": "q", "pass": "OnnxQuantization", "params": params}])

    assert {p["q.weight_type"] for p in enumerate_points(pipeline.space)} == {"int8"}
    assert next(f.message for f in pipeline.findings if f.rule == "pass-config").startswith("OnnxQuantization: int8 activations need int8 weights")


def test_the_opset_floor_follows_what_the_conversion_writes(known: Callable[[type[Pass]], str], pipeline_of: Callable[..., Pipeline]) -> None:
    known(a_pass("Int4", qdq("int4")))
    convert = {"slot": "convert", "pass": "OnnxConversion", "params": {"target_opset": [17, 20, 21], "exporter": "torchscript"}}

    pipeline = pipeline_of([convert, {"slot": "q", "pass": "Int4", "optional": True}], format_=PYTORCH)

    points = {(p["convert.target_opset"], p["q"]) for p in enumerate_points(pipeline.space)}
    assert points == {(17, None), (20, None), (21, None), (21, "Int4")}
    assert pipeline.space.invalid["opset-floor"] == 2
    assert "opset-floor" in {f.rule for f in pipeline.findings}


def test_a_pass_that_raises_the_opset_itself_is_no_breach(known: Callable[[type[Pass]], str], pipeline_of: Callable[..., Pipeline]) -> None:
    raising = known(a_pass("Raising", qdq("int4", opset=21)))

    assert pipeline_of([raising], opset=17).space.valid == 1


@pytest.mark.parametrize(
    ("traits", "floor"),
    [
        (ModelTraits(), 0), (ModelTraits(weight_type="float16"), 0), (qdq("int8", "uint8"), 10), (qdq("int8", "uint8", per_channel=True), 13),
        (qdq("float8", "float8"), 19), (qdq("int4"), 21), (qdq("int8", "int16"), 21),
        (ModelTraits(quantized=True, format="weight_only", weight_type="int4"), 0),
    ],
)  # fmt: skip
def test_types_and_formats_have_the_opset_that_they_came_with(traits: ModelTraits, floor: int) -> None:
    assert opset_of(traits) == floor


# ------------------------------------------------------------------ waivers and warnings


def test_a_waived_rule_is_not_applied_and_is_told_as_waived(known: Callable[[type[Pass]], str], pipeline_of: Callable[..., Pipeline]) -> None:
    awq = known(a_pass("Awq", AWQ))

    pipeline = pipeline_of([awq], ep="cpu", validation={"waive": ["gpu-only-method"]})

    assert pipeline.space.valid == 1
    assert pipeline.space.invalid.get("gpu-only-method", 0) == 0
    assert pipeline.refusal(pipeline.default_point()) is None
    assert [(f.rule, f.waived) for f in pipeline.findings] == [("gpu-only-method", True)]
    assert "it has kernels for the result" in pipeline.findings[0].message


def test_an_unknown_rule_to_waive_gets_the_nearest_one(pipeline_of: Callable[..., Pipeline]) -> None:
    with pytest.raises(ConfigError, match=r"rules to waive must be known; got 'gpu-only-metod'. Did you mean 'gpu-only-method'\?"):
        pipeline_of(["OrtPerfTuning"], validation={"waive": ["gpu-only-metod"]})


@pytest.mark.parametrize("rule", [r.id for r in RULES.values() if not r.waivable])
def test_a_critical_rule_cannot_be_waived_and_says_why(rule: str, pipeline_of: Callable[..., Pipeline]) -> None:
    with pytest.raises(ConfigError) as caught:
        pipeline_of(["OrtPerfTuning"], validation={"waive": [rule]})

    assert "a critical rule can't be waived" in str(caught.value)
    assert RULES[rule].critical in str(caught.value)


def test_warnings_refuse_nothing(pipeline_of: Callable[..., Pipeline]) -> None:
    params = {"quant_mode": "static", "activation_type": ["int8", "uint8"]}
    half = {"slot": "half", "pass": "OnnxFloatToFloat16", "optional": True}
    pipeline = pipeline_of([half, {"slot": "q", "pass": "OnnxQuantization", "params": params}])

    slow = [f for f in pipeline.findings if f.rule == "slow-type"]

    assert {p["q.activation_type"] for p in enumerate_points(pipeline.space)} == {"int8", "uint8"}
    assert "OnnxFloatToFloat16" in {f.pass_name for f in slow}
    assert pipeline.space.invalid.get("slow-type", 0) == 0


def judged(
    pass_class: type[Pass], *, ep: str = "CPUExecutionProvider", machine: str = "", flags: Sequence[str] = (), known: Capabilities | None = None
) -> list[Finding]:
    """What is found about a chain of one pass on a machine of our choice."""
    target = Target(execution_provider=ep, accelerator_type=ACCELERATOR_OF[ep])
    context = Context(target, known or capabilities_of(ep), ONNX, 17, machine=machine, cpu_flags=frozenset(flags))
    place = Place("s", pass_class, {}, {})
    slots = (Slot("s", (Alternative(pass_class.__name__, {}),)),)
    judge = Judge(slots, {("s", pass_class.__name__): place}, context, frozenset())
    space = compile_space(slots, rules=judge.rules)
    return list(judge.findings(space.invalid, space.unreachable))


def test_int8_activations_are_told_to_be_slow_on_x86_only() -> None:
    quantize = a_pass("Both8", qdq("int8", "int8"))

    slow = judged(quantize, machine="x86_64", flags=["avx512_vnni"])

    assert [f.rule for f in slow] == ["slow-type"]
    assert "2 to 3 times as long" in slow[0].message
    assert judged(quantize, machine="aarch64", flags=["asimddp"]) == []
    assert judged(a_pass("Mixed", qdq("int8", "uint8")), machine="x86_64", flags=["avx512_vnni"]) == []


def test_a_cpu_without_8_bit_dot_products_is_told_of() -> None:
    quantize = a_pass("Mixed", qdq("int8", "uint8"))

    assert [f.rule for f in judged(quantize, machine="x86_64", flags=["avx2"])] == ["no-int8-dot"]
    assert [f.rule for f in judged(quantize, machine="aarch64")] == ["no-int8-dot"]
    assert judged(quantize, ep="OpenVINOExecutionProvider") == []
    assert judged(a_pass("Float"), machine="x86_64", flags=["avx2"]) == []


@pytest.mark.parametrize(
    ("traits", "told"),
    [
        (qdq("int8", "uint8", symmetric_weights=True, symmetric_activations=True, power_of_two=True), ""),
        (qdq("uint8", "uint8", symmetric_weights=False, symmetric_activations=False, power_of_two=False),
         "asymmetric weights, asymmetric activations, scales that are no powers of two"),
        (qdq("int8", "uint8", symmetric_activations=True, power_of_two=True, per_channel=True), "MatMul weights with a scale for each channel"),
        (ModelTraits(quantized=True, format="weight_only", weight_type="int4", symmetric_weights=False), ""),
    ],
)  # fmt: skip
def test_what_not_every_qnn_device_takes_is_told_and_not_refused(traits: ModelTraits, told: str) -> None:
    found = [f for f in judged(a_pass("P", traits), ep="QNNExecutionProvider") if f.rule == "qnn-doubtful"]
    elsewhere = judged(a_pass("P", traits))

    assert [f.severity for f in found] == ["warning"] * bool(told)
    assert all(f"not every QNN device takes {told}." in f.message for f in found)
    assert "qnn-doubtful" not in {f.rule for f in elsewhere}


def test_the_quantizer_s_default_is_searched_for_qnn(pipeline_of: Callable[..., Pipeline]) -> None:
    pipeline = pipeline_of([{"slot": "q", "pass": "OnnxQuantization"}], ep="qnn")

    kept = {(p["q.quant_mode"], p["q.quant_format"]) for p in enumerate_points(pipeline.space)}

    assert kept == {("static", "QDQ")}
    assert pipeline.space.invalid["qnn-limits"] > 0
    assert "qnn-doubtful" in {f.rule for f in pipeline.findings}


def test_onnx_runtime_s_own_helper_for_qnn_makes_what_the_rule_only_warns_of(tmp_path: Path) -> None:
    import onnx
    from onnx import helper, numpy_helper
    from onnxruntime.quantization import CalibrationDataReader, quantize
    from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config

    class Rows(CalibrationDataReader):  # type: ignore[misc] # onnxruntime has no types
        def __init__(self) -> None:
            self.rows = iter(np.random.default_rng(0).random((8, 1, 6), np.float32))  # from 0 on: no symmetric range

        def get_next(self) -> dict[str, np.ndarray] | None:
            row = next(self.rows, None)
            return None if row is None else {"x": row}

    weight = helper.make_tensor("w", 1, [6, 3], np.linspace(-0.3, 1.0, 18, dtype=np.float32).tobytes(), raw=True)
    ends = [helper.make_tensor_value_info(n, 1, [1, width]) for n, width in (("x", 6), ("y", 3))]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"], "product")], "g", ends[:1], ends[1:], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(tmp_path / "m.onnx"))

    quantize(str(tmp_path / "m.onnx"), str(tmp_path / "q.onnx"), get_qnn_qdq_config(str(tmp_path / "m.onnx"), Rows()))

    made = onnx.load(str(tmp_path / "q.onnx"))
    held = {t.name: numpy_helper.to_array(t) for t in made.graph.initializer}
    zero_points = {name: int(value) for name, value in held.items() if name.endswith("zero_point")}
    steps = [float(np.log2(value)) for name, value in held.items() if name.endswith("scale")]
    assert {n.op_type for n in made.graph.node} == {"QuantizeLinear", "DequantizeLinear", "MatMul"}
    assert zero_points["x_zero_point"] == 0  # of uint8: as far from the middle as can be
    assert zero_points["w_zero_point"] not in (0, 128)
    assert any(abs(step - round(step)) > 0.01 for step in steps)


def test_a_provider_that_was_dropped_is_told_of() -> None:
    found = judged(a_pass("Nothing"), ep="ROCMExecutionProvider")

    assert [f.rule for f in found] == ["ep-retired"]
    assert "MIGraphXExecutionProvider" in found[0].message


def test_rows_that_cannot_occur_are_told_of(known: Callable[[type[Pass]], str], pipeline_of: Callable[..., Pipeline]) -> None:
    mode = PassConfigParam(type_=str, default_value="a", search_defaults=Categorical(["a", "b"]))
    depth = Conditional("leads.mode", {"a": Categorical([1, 2]), "b": Categorical([3])}, default=INACTIVE)
    leads = known(a_pass("Leads", table={"mode": mode}))
    follows = known(a_pass("Follows", table={"depth": PassConfigParam(type_=int, default_value=1, search_defaults=depth)}))

    chain = [{"slot": "leads", "pass": leads, "params": {"mode": "a"}}, {"slot": "follows", "pass": follows}]
    pipeline = pipeline_of(chain)

    assert [(f.rule, f.severity) for f in pipeline.findings] == [("unreachable-row", "warning")]
    assert "leads.mode='b'" in pipeline.findings[0].message
    assert {p["follows.depth"] for p in enumerate_points(pipeline.space)} == {1, 2}
    assert [pipeline.steps(p)[1].config["depth"] for p in enumerate_points(pipeline.space)] == [1, 2]


def test_what_is_not_known_of_a_provider_refuses_nothing(known: Callable[[type[Pass]], str], pipeline_of: Callable[..., Pipeline]) -> None:
    everything = known(a_pass("Everything", qdq("int4", "uint16", symmetric_weights=False, symmetric_activations=False, power_of_two=False)))

    assert pipeline_of([everything], ep="vitisai", opset=21).space.valid == 1
    unknown = Capabilities("CPUExecutionProvider", types={"int4": Fact(Answer.UNKNOWN)}, formats={"qdq": Fact(Answer.UNKNOWN)})
    assert judged(a_pass("Four", qdq("int4", opset=21)), known=unknown) == []


def test_a_provider_that_is_not_here_is_a_finding_for_plan_and_an_error_for_run(
    digits: Path, sweep_of: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    sweep = LoadedSweep(parse_sweep(sweep_of(digits, target={"ep": "qnn"}, validation={"waive": ["qnn-limits"]})), tmp_path)

    found = [f for f in prepare(sweep).pipeline.findings if f.rule == "ep-unavailable"]

    assert len(found) == 1
    assert "QNNExecutionProvider" in found[0].message
    with pytest.raises(EnvironmentFault, match="ep-unavailable"):
        probe_provider(AcceleratorSpec("npu", "QNNExecutionProvider"), tmp_path / "probe")


# ------------------------------------------------------------------ how much a rule may look at


def wide_table(count: int, values: int) -> dict[str, PassConfigParam]:
    return {f"p{i}": PassConfigParam(type_=int, default_value=0, search_defaults=Categorical(list(range(values)))) for i in range(count)}


def test_a_rule_looks_only_at_what_the_pass_reads(known: Callable[[type[Pass]], str], pipeline_of: Callable[..., Pipeline]) -> None:
    def validate(config: Mapping[str, Any]) -> None:
        if config["p3"] == 1 and config["p17"] in (2, 3):
            raise PassConfigError("Wide", "p3 of 1 needs a small p17", str(config["p17"]))

    wide = known(a_pass("Wide", table=wide_table(20, 4), validate=validate))

    started = time.monotonic()
    pipeline = pipeline_of([{"slot": "w", "pass": wide}])
    took = time.monotonic() - started

    assert pipeline.space.valid == 4**20 - 2 * 4**18
    assert pipeline.space.invalid["pass-config"] == 2 * 4**18
    assert {r.names for r in pipeline.space.rules if r.id == "pass-config"} == {("w", "w.p3", "w.p17")}
    assert took < 10  # some 0.02 s on an idle machine


def test_checks_that_hang_on_a_mode_are_rules_of_their_own(known: Callable[[type[Pass]], str], pipeline_of: Callable[..., Pipeline]) -> None:
    def validate(config: Mapping[str, Any]) -> None:
        chosen = [config[f"p{2 * config['p0'] + i}"] for i in (1, 2)]
        if sum(chosen) > 5:
            raise PassConfigError("Modes", "the two must sum to 5 at most", str(sum(chosen)))

    modes = known(a_pass("Modes", table=wide_table(12, 4), validate=validate))

    space = pipeline_of([{"slot": "w", "pass": modes}]).space

    assert space.valid == 4 * 15 * 4**9  # of 16 pairs one sums to more than 5
    assert {len(r.names) for r in space.rules if r.id == "pass-config"} == {4}


def test_a_pass_that_reads_too_much_is_judged_when_a_trial_has_its_point(
    known: Callable[[type[Pass]], str], pipeline_of: Callable[..., Pipeline]
) -> None:
    def validate(config: Mapping[str, Any]) -> None:
        if sum(config.values()) % 2:
            raise PassConfigError("Greedy", "the sum must be even", str(sum(config.values())))

    greedy = known(a_pass("Greedy", lambda c: ModelTraits(quantized=sum(c.values()) > 50), table=wide_table(20, 4), validate=validate))

    started = time.monotonic()
    pipeline = pipeline_of([{"slot": "g", "pass": greedy}, {"slot": "q", "pass": "OnnxQuantization", "optional": True}])
    took = time.monotonic() - started
    even, odd = pipeline.default_point(), {**pipeline.default_point(), "g.p0": 1}
    full = {**even, **{f"g.p{i}": 3 for i in range(20)}, "q": "OnnxQuantization"}

    assert took < 30  # some 0.5 s on an idle machine
    assert [f.pass_name for f in pipeline.findings if f.rule == "checked-late"] == ["Greedy"]
    assert pipeline.refusal(even) is None
    refused = pipeline.refusal(odd)
    assert refused is not None
    assert (refused.rule, refused.slot) == ("pass-config", "g")
    assert "the sum must be even" in refused.message
    late = pipeline.refusal(full)
    assert late is not None
    assert late.rule == "order"


def test_a_hook_that_fails_is_left_to_the_trial(known: Callable[[type[Pass]], str], pipeline_of: Callable[..., Pipeline]) -> None:
    def validate(config: Mapping[str, Any]) -> None:
        if config["p0"] == 1:
            raise ZeroDivisionError("somebody else's mistake")

    faulty = known(a_pass("Faulty", table=wide_table(1, 3), validate=validate))

    pipeline = pipeline_of([{"slot": "f", "pass": faulty}])

    assert pipeline.space.valid == 3
    assert [f.rule for f in pipeline.findings] == ["checked-late"]
    refused = pipeline.refusal({"f": "Faulty", "f.p0": 1})
    assert refused is not None
    assert "somebody else's mistake" in refused.message


def test_a_point_refused_late_ends_pruned_without_running_anything(
    known: Callable[[type[Pass]], str], digits: Path, finished: SweepResult, sweep_of: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    def validate(config: Mapping[str, Any]) -> None:
        if sum(config.values()) % 2:
            raise PassConfigError("Greedy", "the sum must be even", str(sum(config.values())))

    known(a_pass("Greedy", table=wide_table(16, 4), validate=validate))
    sweep = LoadedSweep(parse_sweep(sweep_of(digits, chain=[{"slot": "g", "pass": "Greedy"}])), tmp_path)
    pipeline = Pipeline(sweep, InputFacts(ONNX, 17, {"Conv": 1}))
    odd = {**pipeline.default_point(), "g.p0": 1}

    with TrialRunner(tmp_path / "run", sweep) as runner:
        record = runner.run(TrialPlan.load(finished.run), pipeline, 0, odd, "start")

    assert pipeline.space.contains(odd)
    assert (record.status, record.stage, record.stages) == (Status.PRUNED, "rules", ())
    assert record.message.startswith("pass-config: Greedy: the sum must be even")


# ------------------------------------------------------------------ a law: pruned is exactly what a judge of whole points refuses


@st.composite
def tables(draw: st.DrawFn) -> tuple[dict[str, PassConfigParam], list[dict[str, int]], list[dict[str, int]]]:
    """A table of small parameters, some on conditions, and combinations that are refused and that quantize."""
    table: dict[str, PassConfigParam] = {}
    for i in range(draw(st.integers(2, 5))):
        choices: Any = Categorical(list(range(draw(st.integers(1, 3)))))
        if i and draw(st.booleans()):
            parent = f"p{draw(st.integers(0, i - 1))}"
            other = draw(st.sampled_from([INACTIVE, INVALID, Categorical([7])]))
            choices = Conditional(parent, {0: choices}, default=other)
        table[f"p{i}"] = PassConfigParam(type_=int, search_defaults=choices)
    combination = st.dictionaries(st.sampled_from(sorted(table)), st.sampled_from([0, 1, 7]), min_size=1, max_size=3)
    return table, draw(st.lists(combination, max_size=3)), draw(st.lists(combination, max_size=2))


@given(tables(), st.sampled_from([12, 13, 17]))
@settings(max_examples=200)
def test_rules_prune_exactly_what_is_refused_point_by_point(
    drawn: tuple[dict[str, PassConfigParam], list[dict[str, int]], list[dict[str, int]]], opset: int
) -> None:
    table, refused, quantizing = drawn

    def matches(config: Mapping[str, Any], combinations: list[dict[str, int]]) -> bool:
        return any(all(config.get(n) == v for n, v in c.items()) for c in combinations)

    def validate(config: Mapping[str, Any]) -> None:
        if matches(config, refused):
            raise PassConfigError("P", "another combination", "this")

    def traits(config: Mapping[str, Any]) -> ModelTraits:
        return qdq("int8", "uint8", per_channel=True) if matches(config, quantizing) else ModelTraits()

    first = a_pass("P", traits, table=table, validate=validate)
    last = a_pass("Q", qdq("int8", "uint8"), contract=FLOAT_ONLY)
    target = Target()
    try:
        parameters = first.search_space(target.accelerator, {})
    except PassConfigError:
        return  # nothing valid in the table itself
    slots = (Slot("a", (Alternative("P", parameters),)), Slot("b", (Alternative("Q", {}),), optional=True))
    places = {("a", "P"): Place("a", first, parameters, {}), ("b", "Q"): Place("b", last, {}, {})}
    judge = Judge(slots, places, Context(target, capabilities_of(target.execution_provider), ONNX, opset), frozenset())

    def allowed() -> Iterator[str]:
        try:
            whole = compile_space(slots)
        except SpaceError:
            return
        for point in enumerate_points(whole):
            given_values = {n.partition(".")[2]: v for n, v in point.items() if n.startswith("a.")}
            steps = [("a", "P", given_values), *([("b", "Q", {})] if point["b"] else [])]
            if judge.refusal(steps) is None:
                yield point_key(point)

    expected = set(allowed())
    if not expected:
        with pytest.raises(SpaceError):
            compile_space(slots, rules=judge.rules)
        return
    assert {point_key(p) for p in enumerate_points(compile_space(slots, rules=judge.rules))} == expected


# ------------------------------------------------------------------ the table for people


def test_the_document_lists_every_rule_as_it_is() -> None:
    expected = [f"| `{r.id}` | {r.severity} | {'no: ' + r.critical if r.critical else 'yes'} | {r.refuses} | {r.mend} |" for r in RULES.values()]

    written = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]

    assert written == expected, "docs/rules.md must hold these lines:\n" + "\n".join(expected)
