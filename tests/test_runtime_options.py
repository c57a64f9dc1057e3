"""The tables of ONNX Runtime's options: whole, chosen by version, and right about the runtime that is installed."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import ConfigError
from autotune.runtime_options import DEAD, ENTRY, FOLDER, LIVE, RUN_ENTRY, installed_runtime, load_options, options_of

PROGRAM = Path(__file__).resolve().parents[1] / "benchmarks" / "comparisons" / "session_options.py"
LOOKS = pytest.mark.skipif(
    sys.platform != "linux" or not {0, 1} <= os.sched_getaffinity(0), reason="looks at threads by /proc, and pins them to the first two CPUs"
)
SEEN_HERE = {
    "threads": "session.intra_op_thread_affinities", "graph": "session.disable_quant_qdq", "profile": "session.dynamic_block_base",
    "effect": "memory.enable_memory_arena_shrinkage",
}  # fmt: skip


def looked_at(tmp_path: Path, *only: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit status of the program and what it wrote, by option."""
    file = tmp_path / "seen.json"
    command = [sys.executable, str(PROGRAM), "--json", str(file), *(["--only", *only] if only else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert file.is_file(), done.stderr
    return done.returncode, {row["option"]: row for row in json.loads(file.read_text())["options"]}


@LOOKS
def test_each_kind_of_proof_is_seen_and_a_dead_or_misspelt_name_is_not(tmp_path: Path) -> None:
    graphs = [o.name for o in options_of().options.values() if (o.kind, o.status, o.proof) == (ENTRY, LIVE, "graph")]
    others = ["session.intra_op_num_threads", "intra_op_num_threads", "session.intra_op.allow_spinning", "session.set_denormal_as_zero"]

    status, found = looked_at(tmp_path, *SEEN_HERE.values(), *graphs, *others)

    assert status == 0, {name: row for name, row in found.items() if row["seen"] != (row["status"] == LIVE)}
    assert set(graphs) <= set(found)
    for proof, name in SEEN_HERE.items():
        row = found[name]
        assert (row["proof"], row["status"], row["seen"]) == (proof, LIVE, True)
    pinned = found[SEEN_HERE["threads"]]
    assert pinned["with_it"] == ["0", "1"]
    assert pinned["misspelt"] == pinned["without"]
    assert "QLinearMatMul" in found[SEEN_HERE["graph"]]["without"]
    assert "QLinearMatMul" not in found[SEEN_HERE["graph"]]["with_it"]
    dead = found["session.intra_op_num_threads"]
    assert (dead["status"], dead["seen"], dead["without"], dead["with_it"]) == (DEAD, False, 0, 0)
    assert found["intra_op_num_threads"]["with_it"] == 2


@pytest.mark.long
@LOOKS
def test_the_table_of_the_installed_runtime_is_right_about_every_option(tmp_path: Path) -> None:
    status, found = looked_at(tmp_path)

    assert not {name: row for name, row in found.items() if row["seen"] != (row["status"] == LIVE)}
    assert status == 0


def test_every_table_reads_and_every_taken_entry_says_its_values() -> None:
    for path in FOLDER.glob("*.toml"):
        assert load_options(path), path.name

    assert options_of("1.32").runtime == "1.32"


def test_the_page_names_every_option_that_is_taken() -> None:
    page = (PROGRAM.parents[2] / "docs" / "session-options.md").read_text()

    assert [o.name for o in options_of("1.32").options.values() if o.status in (LIVE, "unproven") and f"| `{o.name}` |" not in page] == []


@pytest.mark.parametrize(
    ("version", "table", "spins", "words"),
    [
        ("1.24.4", "1.24", False, ""),
        ("1.27.0", "1.26", True, ""),
        ("1.32.0", "1.32", True, ""),
        ("1.99.1", "1.32", True, "1.99.1 is newer than the newest table of its options (1.32)"),
        ("1.20.0", "1.24", False, "1.20.0 is older than the oldest table of its options (1.24)"),
    ],
)
def test_the_newest_table_that_is_not_newer_than_the_runtime_is_used(version: str, table: str, spins: bool, words: str) -> None:
    found = options_of(version)

    assert found.runtime == table
    assert (found.get(ENTRY, "session.intra_op.spin_duration_us") is not None) is spins
    assert words in found.note
    assert bool(found.note) is bool(words)


def test_a_row_of_a_later_table_takes_the_place_of_an_earlier_one_and_keeps_its_age() -> None:
    before, after = (options_of(v).get(ENTRY, "session.x64quantprecision") for v in ("1.24", "1.26"))

    assert before is not None
    assert after is not None
    assert (before.status, after.status, after.since) == ("unproven", LIVE, "1.24")


def test_the_version_is_found_without_loading_the_runtime() -> None:
    code = "import sys; from autotune.runtime_options import installed_runtime as v; print(v(), 'onnxruntime' in sys.modules)"

    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()

    assert told == [installed_runtime(), "False"]


@pytest.mark.parametrize(
    ("kind", "name", "value", "words"),
    [
        (ENTRY, "session.intra_op.allow_spining", "0", "Did you mean 'session.intra_op.allow_spinning'?"),
        (ENTRY, "session.intra_op_num_threads", "3", "as an entry it is kept and changes nothing. Did you mean 'intra_op_num_threads'?"),
        (ENTRY, "session.enable_quant_qdq", "1", "Did you mean 'session.disable_quant_qdq'?"),
        (ENTRY, "session.use_env_allocators", "1", "no allocator is registered with the process"),
        (ENTRY, "session.save_model_format", "ORT", "about a model that is saved"),
        (ENTRY, "session.moe.offload.mode", "cpu", "moves experts between a GPU and files"),
        (ENTRY, "session.disable_cpu_ep_fallback", "1", "for other execution providers than CPUExecutionProvider"),
        (ENTRY, "mlas.disable_kleidiai", "1", "for aarch64 or arm64, not for x86_64"),
        (ENTRY, "session.kernel_dispatch_policy", "auto", "for CUDAExecutionProvider, not for CPUExecutionProvider"),
        (ENTRY, "session.graph_optimizations_loop_level", "7", "must match 0|1|2; got '7'"),
        (ENTRY, "session.qdq_matmulnbits_accuracy_level", "9", "must match [0-4]; got '9'"),
        (ENTRY, "session.intra_op.spin_duration_us", "banana", "must match"),
        (ENTRY, "session.intra_op.spin_duration_us", "20000", "must match"),  # the runtime itself warns beyond 10 ms
        (ENTRY, "optimization.constant_folding_max_output_size_in_bytes", "x", "must match"),
        (ENTRY, "memory.enable_memory_arena_shrinkage", "cpu:0", "config_entries must be keys that this ONNX Runtime honours"),
        (RUN_ENTRY, "session.disable_prepacking", "1", "run_config_entries must be keys that this ONNX Runtime honours"),
        (RUN_ENTRY, "disable_synchronize_execution_providers", "1", "its time would be no measurement"),
        (RUN_ENTRY, "memory.enable_memory_arena_shrinkage", "cpu", "must match"),
    ],
)
def test_what_would_do_nothing_is_refused_with_the_reason(kind: str, name: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options_of("1.32").check(kind, name, value, machine="x86_64")

    assert name in str(caught.value)
    assert words in str(caught.value)


def test_an_option_for_another_machine_or_provider_is_taken_there() -> None:
    table = options_of("1.32")

    assert table.check(ENTRY, "mlas.disable_kleidiai", "1", machine="aarch64").status == "unproven"
    assert table.check(ENTRY, "session.disable_cpu_ep_fallback", "1", provider="CUDAExecutionProvider").status == LIVE


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('name = "a.b"\nkind = "entry"\nstatus = "live"\nvalues = ["1"]', "must say how that was shown"),
        ('name = "a.b"\nkind = "entry"\nstatus = "dead"', "must say why, in reason"),
        ('name = "a.b"\nkind = "entri"\nstatus = "dead"\nreason = "x"', "Did you mean 'entry'?"),
        ('name = "a.b"\nkind = "entry"\nstatus = "unproven"\nreason = "x"', "must say its values"),
        ('name = "a.b"\nkind = "entry"\nstatus = "dead"\nraeson = "x"', "Did you mean 'reason'?"),
        ('name = "a.b"\nkind = "entry"', "status must be given"),
        ('name = "a.b"\nvalues = "1"', "must be a list of texts"),
    ],
)
def test_a_row_that_is_not_whole_is_refused(tmp_path: Path, row: str, words: str) -> None:
    path = tmp_path / "1.40.toml"
    path.write_text(f"[[option]]\n{row}\n")

    with pytest.raises(ConfigError, match=words.replace("?", r"\?")) as caught:
        load_options(path)

    assert "1.40.toml: a.b" in str(caught.value)


def test_tables_travel_to_workers() -> None:
    assert pickle.loads(pickle.dumps(options_of("1.32"))) == options_of("1.32")
