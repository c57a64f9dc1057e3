"""The capability tables: all there, all sourced, and read strictly."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.capabilities import FOLDER, Answer, capabilities_of, load_capabilities
from autotune.errors import ConfigError
from autotune.target import ACCELERATOR_OF

GOOD = """
provider = "CUDAExecutionProvider"
retired = { note = "gone since 9.9", source = "a document" }

[types]
int8 = { answer = "slow", source = "a document", note = "few kernels" }
int4 = { answer = "unknown" }

[formats]
qdq = { answer = "no", source = "a thread" }

[methods]
awq = { answer = "yes", source = "a thread" }

[demands]
power_of_two = { answer = "yes", source = "a document" }

[[slow_pairs]]
activation_type = "int8"
weight_type = "int8"
formats = ["qdq"]
machine = "x86_64"
note = "slow"
source = "measured"

[[notes]]
note = "mind the gap"
source = "a document"
"""


@pytest.mark.parametrize("provider", ACCELERATOR_OF)
def test_every_known_provider_has_a_table_of_its_own(provider: str) -> None:
    files = [path for path in FOLDER.glob("*.toml") if load_capabilities(path).provider == provider]

    assert len(files) == 1
    assert capabilities_of(provider) == load_capabilities(files[0])


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda p: p.name)
def test_every_answer_but_unknown_names_its_source(path: Path) -> None:
    table = load_capabilities(path)

    facts = [f for section in (table.types, table.formats, table.methods, table.demands) for f in section.values()]

    assert facts
    assert all(f.source for f in facts if f.answer is not Answer.UNKNOWN)
    assert all(pair.source and pair.note for pair in table.slow_pairs)


def test_a_table_is_read_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "good.toml"
    path.write_text(GOOD)

    table = load_capabilities(path)

    assert (table.type_("int8").answer, table.type_("int8").note) == (Answer.SLOW, "few kernels")
    assert table.type_("int4").answer is table.type_("float8").answer is Answer.UNKNOWN
    assert table.format_("qdq").answer is Answer.NO
    assert table.method("awq").answer is Answer.YES
    assert table.demands_("power_of_two")
    assert not table.demands_("symmetric_weights")
    assert table.slow_pairs[0].formats == ("qdq",)
    assert table.retired.note == "gone since 9.9"
    assert table.notes[0].note == "mind the gap"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('provider = "CUDAExecutionProvider"', "", "provider must be a known execution provider; got None"),
        ("CUDAExecutionProvider", "CUDAExecutionProvidr", "Did you mean 'CUDAExecutionProvider'?"),
        ("[types]", "[typs]", "sections must be known; got 'typs'. Did you mean 'types'?"),
        ("int8 = { answer", "int9 = { answer", "entries of types must be known; got 'int9'. Did you mean"),
        ("qdq = {", "qqd = {", "entries of formats must be known; got 'qqd'. Did you mean 'qdq'?"),
        ("awq = {", "awk = {", "entries of methods must be known; got 'awk'. Did you mean 'awq'?"),
        ("power_of_two = {", "power_of_ten = {", "entries of demands must be known; got 'power_of_ten'. Did you mean 'power_of_two'?"),
        ('answer = "slow"', 'answer = "slowly"', "answer must be one of yes, slow, no, unknown; got 'slowly'. Did you mean 'slow'?"),
        ('power_of_two = { answer = "yes"', 'power_of_two = { answer = "slow"', "answer must be one of yes, no, unknown; got 'slow'"),
        ('{ answer = "no", source = "a thread" }', '{ answer = "no" }', "every answer but unknown must name its source"),
        ('{ answer = "no", source = "a thread" }', '{ source = "a thread" }', "answer must be given; got nothing"),
        ('{ answer = "no", source = "a thread" }', '{ answer = "no", source = 3 }', "source must be text; got 3"),
        (
            '{ answer = "no", source = "a thread" }',
            '{ answer = "no", sauce = "a thread" }',
            "keys must be known; got 'sauce'. Did you mean 'source'?",
        ),
        ('{ answer = "no", source = "a thread" }', '"no"', "an entry must be a table with answer; got 'no'"),
        ('weight_type = "int8"', 'weight_type = "int9"', "types must be known; got 'int9'"),
        ('weight_type = "int8"', "", "weight_type must be given; got nothing"),
        ('formats = ["qdq"]', 'formats = ["qqd"]', "formats must be known; got 'qqd'. Did you mean 'qdq'?"),
        ('formats = ["qdq"]', 'formats = "qdq"', "formats must be a list; got 'qdq'"),
        ('machine = "x86_64"', 'machine = "x86"', "machines must be known; got 'x86'. Did you mean 'x86_64'?"),
        ('source = "measured"', 'source = ""', "source must be given; got nothing"),
        ("[[slow_pairs]]", "[slow_pairs]", "slow_pairs must be a list of tables"),
        ('note = "mind the gap"', "", "note must be given; got nothing"),
        ('note = "gone since 9.9", ', "", "note must be given; got nothing"),
        ("[formats]\nqdq = ", "formats = ", "must be"),
        ("[types]", "[types", "a capability table must be readable TOML"),
    ],
)
def test_each_kind_of_broken_entry_is_refused_by_name(before: str, after: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    assert before in GOOD
    path.write_text(GOOD.replace(before, after, 1))

    with pytest.raises(ConfigError) as caught:
        load_capabilities(path)

    assert message in str(caught.value)
    assert "broken.toml" in str(caught.value)


def test_a_provider_without_a_table_is_unknown_throughout() -> None:
    table = capabilities_of("SomeOtherExecutionProvider")

    assert table.type_("int8").answer is Answer.UNKNOWN
    assert not table.demands_("power_of_two")
