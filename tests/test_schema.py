"""The published JSON Schema of sweep files, the examples that it must take, and the page that tells of every key."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from autotune.benchmarks.metrics import ALIASES as METRIC_ALIASES
from autotune.benchmarks.metrics import BUILT_IN as METRICS
from autotune.config import load_sweep, parse_sweep, sections
from autotune.demo import demo_sweep
from autotune.errors import ConfigError
from autotune.passes.base import AcceleratorSpec
from autotune.passes.registry import ALIASES, BUILT_IN, get_pass
from autotune.schema import sweep_schema
from autotune.sweep_text import read_text, read_yaml
from autotune.target import ACCELERATOR_OF, SHORT_PROVIDER_NAMES

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
PAGE = ROOT / "docs" / "sweep-file.md"
GOOD: dict[str, Any] = {"model": {"path": "m.onnx"}, "data": {"eval": "e.npz"}, "metric": "accuracy", "chain": [{"pass": "OnnxQuantization"}]}


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return sweep_schema()


@pytest.fixture(scope="module")
def validator(schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema)


def taken_by_the_loader(data: dict[str, Any]) -> bool:
    try:
        parse_sweep(data)
    except ConfigError:
        return False
    return True


def test_the_schema_is_one_of_draft_2020_12(schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)

    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_every_example_is_taken_as_it_stands_and_with_its_defaults(path: Path, validator: jsonschema.Draft202012Validator) -> None:
    data, _ = read_yaml(read_text(path), path.name)

    config = load_sweep(path).config

    assert list(validator.iter_errors(data)) == []
    assert list(validator.iter_errors(config.to_json())) == []


def test_there_are_examples_of_the_usual_sweeps() -> None:
    assert {p.stem for p in EXAMPLES} >= {"quick_start_int8", "torch_pruning", "transformer_fusion", "no_search"}


@pytest.mark.parametrize("name", ["quick_start_int8", "torch_pruning", "no_search"])
def test_an_example_is_ready_to_run_where_its_files_are(name: str, digits: Path, tmp_path: Path) -> None:
    from autotune.sweep.prepare import prepare

    for file in digits.iterdir():
        if file.is_file():
            shutil.copyfile(file, tmp_path / file.name)
    shutil.copyfile(ROOT / "examples" / f"{name}.yaml", tmp_path / "sweep.yaml")

    prepared = prepare(load_sweep(tmp_path / "sweep.yaml"))

    assert prepared.pipeline.space.valid >= 1


def test_the_sweep_of_the_demonstration_is_taken(validator: jsonschema.Draft202012Validator) -> None:
    assert list(validator.iter_errors(demo_sweep())) == []
    assert list(validator.iter_errors(parse_sweep(demo_sweep()).to_json())) == []


def test_every_pass_brings_a_schema_of_its_parameters(schema: dict[str, Any], validator: jsonschema.Draft202012Validator) -> None:
    for name in [*BUILT_IN, *ALIASES]:  # other tests register passes of their own
        table = get_pass(name).default_config(AcceleratorSpec())
        required = {n: SAMPLES.get(row.type_, "x") for n, row in table.items() if row.required}

        for slot in ({"pass": name, "params": required}, {"slot": "s", "any_of": [{"pass": name, "params": required}]}):
            assert list(validator.iter_errors({**GOOD, "chain": [slot]})) == []
        for wrong in ({"pass": name, "params": {**required, "no_such": 1}}, {"slot": "s", "any_of": [{"pass": name, "params": {"no_such": 1}}]}):
            assert not validator.is_valid({**GOOD, "chain": [wrong]})
        assert set(schema["$defs"][f"params of {name}"]["properties"]) == set(table)
        assert all(row["description"] for row in schema["$defs"][f"params of {name}"]["properties"].values())


SAMPLES: dict[Any, Any] = {int: 1, float: 0.5, bool: True, str: "x"}


def test_a_pass_of_the_users_own_is_taken_where_there_is_a_script(validator: jsonschema.Draft202012Validator) -> None:
    own = {**GOOD, "chain": [{"pass": "MyPass", "params": {"x": 1}}]}

    assert not validator.is_valid(own)
    assert validator.is_valid({**own, "script": "mine.py"})


@pytest.mark.parametrize(
    ("params", "good"),
    [
        ({"quant_mode": "static"}, True), ({"quant_mode": ["static", "dynamic"]}, True), ({"quant_mode": "SEARCH"}, True),
        ({"quant_mode": {"type": "Categorical", "values": ["static"]}}, True), ({"quant_mode": "statik"}, False),
        ({"quant_mode": ["statik"]}, False), ({"quant_mode": []}, False), ({"quant_mode": {"values": ["static"]}}, False),
        ({"per_channel": True}, True), ({"per_channel": 1}, False), ({"per_channel": [True, False]}, True),
    ],
)  # fmt: skip
def test_a_parameter_is_a_value_a_list_a_condition_or_search(validator: jsonschema.Draft202012Validator, params: dict[str, Any], good: bool) -> None:
    assert validator.is_valid({**GOOD, "chain": [{"pass": "OnnxQuantization", "params": params}]}) is good


WORDS = [
    *({"target": {"ep": ep}} for name in (*SHORT_PROVIDER_NAMES, *ACCELERATOR_OF) for ep in (name, name.upper(), f"{name}x")),
    *({"budget": {"time": t}} for t in ("45m", " 1.5 h ", "30", "-3s", "5 minutes", "s", "")),
    *({"budget": {"memory": t}} for t in ("8GB", "1.5 GiB", "8", "8gb", "-8GB")),
    *({"seed": s} for s in (0, -1, True, "0", None, 2**63)),
    *({"pick": p} for p in ("knee", "Knee", None, 1)),
    *({"search": s} for s in ({"sampler": "random"}, {"sampler": "random", "options": {}}, {"options": {"n_ei_candidates": 0}}, {"options": None})),
    *({"chain": [s]} for s in ({"pass": "OnnxQuantization", "any_of": []}, {"any_of": []}, {}, {"pass": None}, {"pass": "X", "slot": "1"})),
    *({"model": m} for m in ({}, {"path": "a", "script": "b"}, {"path": None, "script": "b"}, {"path": ""})),
    *({"constraints": c} for c in ([], ["x"], "x", [1], [""])),
    {"schema": 1}, {"schema": 2}, {"schema": "1"}, {"schema": True}, {"strict": "yes"}, {"strict": True}, {"objectives": []}, {"nothing": 1},
]  # fmt: skip


@pytest.mark.parametrize("part", WORDS, ids=json.dumps)
def test_the_schema_takes_a_part_just_when_the_loader_does(part: dict[str, Any], validator: jsonschema.Draft202012Validator) -> None:
    assert validator.is_valid({**GOOD, **part}) is taken_by_the_loader({**GOOD, **part})


@pytest.mark.parametrize("name", [*METRICS, *METRIC_ALIASES, "Top-5", "ROC_AUC", "mine.py:score"])
def test_metrics_are_taken_in_every_spelling(name: str, validator: jsonschema.Draft202012Validator) -> None:
    assert validator.is_valid({**GOOD, "metric": name})
    assert not validator.is_valid({**GOOD, "metric": f"{name} x".replace(":", "")})


def test_the_command_prints_or_writes_the_schema_without_slow_libraries(tmp_path: Path) -> None:
    code = (
        "import sys, runpy; sys.argv = ['autotune', 'schema', *sys.argv[1:]]\n"
        "try: runpy.run_module('autotune', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print([m for m in ('ray', 'torch', 'onnxruntime', 'onnx', 'optuna', 'pandas', 'sklearn') if m in sys.modules], file=sys.stderr)"
    )

    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    written = subprocess.run([sys.executable, "-c", code, "--out", "s.json"], capture_output=True, text=True, check=True, cwd=tmp_path)

    # not compared with this process's own: other tests register passes in it
    schema = json.loads(printed.stdout)
    assert schema == json.loads((tmp_path / "s.json").read_text())
    assert schema["properties"].keys() == sweep_schema()["properties"].keys()
    jsonschema.Draft202012Validator(schema).validate(GOOD)
    assert printed.stderr == "[]\n"
    assert (written.stdout, written.stderr) == ("", "wrote s.json\n[]\n")


# ---------------------------------------------------------------------------------------------------------------- the page


def rows_of(section: type[BaseModel]) -> list[str]:
    """The page's table of a section, made from its model."""
    return [f"| `{row.alias or name}` | {default_of(row)} | {meaning_of(row)} |" for name, row in section.model_fields.items()]


def default_of(row: FieldInfo) -> str:
    if row.is_required():
        return "required"
    value = row.get_default(call_default_factory=True)  # type: ignore[call-arg] # no factory of ours looks at other fields
    if isinstance(value, BaseModel):
        return "as below"
    return "not given" if value is None else f"`{json.dumps(value)}`"


def meaning_of(row: FieldInfo) -> str:
    if row.description:
        return row.description
    assert isinstance(row.annotation, type)
    return (row.annotation.__doc__ or "").split("\n")[0]


def test_the_page_tells_of_every_key_as_the_models_do() -> None:
    """Prints the tables as they should be when they are not."""
    tables = {".".join(path): rows_of(section) for path, section in sections().items()}
    page = PAGE.read_text()
    found = {title.strip("`"): re.findall(r"^\| `.*$", text, re.M) for title, text in re.findall(r"^##+ (.*)\n((?:(?!##).*\n?)*)", page, re.M)}
    told = {path: found.get(path or "The file") for path in tables}

    assert told == tables, "\n\n".join(f"{path}\n" + "\n".join(rows) for path, rows in tables.items())


def test_the_page_has_no_table_of_a_section_that_is_not() -> None:
    titles = {t.strip("`") for t in re.findall(r"^##+ (.*)$", PAGE.read_text(), re.M)}

    assert {t for t in titles if re.fullmatch(r"[a-z_.]+", t)} == {".".join(path) for path in sections() if path}


def test_the_example_on_the_page_is_taken() -> None:
    text = re.search(r"```yaml\n(.*?)```", PAGE.read_text(), re.S)
    assert text is not None
    data, _ = read_yaml(text[1], "page")

    assert parse_sweep(data).chain[0].name == "quantize"
