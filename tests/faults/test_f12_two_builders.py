"""F12: two builders make the same key at once. One entry, both get a whole model, no place and no lock is left."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from autotune.store import Store

ROUNDS = 15
BUILDERS = 3
PROGRAM = """
import json
import sys
from pathlib import Path

from autotune.model import ingest_onnx
from autotune.store import FILES, Store

store = Store(Path(sys.argv[1]))
for number in map(int, iter(sys.stdin.readline, "")):
    key = store.key({"round": number})
    place = store.place()
    handler = ingest_onnx(Path(sys.argv[2]), place / FILES)
    print("ready", flush=True)
    sys.stdin.readline()
    got = store.publish(key, place, handler, facts={})
    print(json.dumps({"digest": got.digest, "again": got.handler.digest, "key": got.key}), flush=True)
"""


def test_builders_of_one_key_at_once_make_one_entry_and_all_get_it(tmp_path: Path, digits: Path, injected: Callable[[str], None]) -> None:
    folder = tmp_path / "store"
    builders = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), str(digits / "model.onnx")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(BUILDERS)
    ]

    def tell(line: str) -> None:
        for builder in builders:
            assert builder.stdin is not None
            builder.stdin.write(f"{line}\n")
            builder.stdin.flush()

    def hear() -> list[str]:
        return [b.stdout.readline().strip() for b in builders if b.stdout is not None]

    got = []
    try:
        for number in range(ROUNDS):
            tell(str(number))
            assert hear() == ["ready"] * BUILDERS
            tell("go")
            injected("F12")
            got.append([json.loads(line) for line in hear()])
    finally:
        for builder in builders:
            builder.communicate()

    store = Store(folder)
    assert [b.returncode for b in builders] == [0] * BUILDERS
    assert all(g["digest"] == g["again"] == got[0][0]["digest"] for round_ in got for g in round_)
    assert store.all_keys() == sorted(store.key({"round": n}) for n in range(ROUNDS))
    assert all(store.find(key) is not None for key in store.all_keys())
    assert list((folder / "building").iterdir()) == []
    assert store.quarantined() == []
    with store.alone() as nobody_else:
        assert nobody_else
