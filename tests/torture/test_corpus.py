"""What fuzzing has found stays found: the inputs of the corpus, sound ones, and some new ones."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from _sampling import slow

from torture.fuzz.__main__ import CORPUS
from torture.fuzz.parsers import PARSERS, Parser, Wrong

_CORPUS_BYTES = 1 << 20
_NEW = 5

_QUICK = {"note", "nsys", "object", "safetensors", "torch_file", "trace"}
"""Others save checkpoints, which takes a disk its time."""

KEPT = sorted(path for path in CORPUS.glob("*/*") if path.is_file() and path.parent.name in PARSERS)


def test_the_corpus_is_small() -> None:
    assert KEPT
    assert sum(path.stat().st_size for path in CORPUS.rglob("*")) < _CORPUS_BYTES


@pytest.mark.parametrize(
    "path",
    [path if path.parent.name in _QUICK else slow(path) for path in KEPT],
    ids=[f"{path.parent.name}-{path.name}" for path in KEPT],
)
def test_what_was_found(path: Path, tmp_path: Path) -> None:
    PARSERS[path.parent.name](tmp_path).run(path.read_bytes())


@pytest.mark.parametrize("name", [name if name in _QUICK else slow(name) for name in PARSERS])
def test_sound_and_new_inputs(name: str, tmp_path: Path) -> None:
    parser = PARSERS[name](tmp_path)
    seeds = parser.seeds()
    for seed in seeds:
        parser.run(seed)
    random = Random(name)
    for _ in range(_NEW):
        parser.run(parser.change(random, random.choice(seeds), seeds))


@pytest.mark.slow
def test_what_is_wrong_is_told(tmp_path: Path) -> None:
    """The parsers' demands are demands: values that were damaged on the way are found."""

    class Blind(Parser):
        def attempt(self, data: bytes) -> None:
            raise KeyError(data)

    with pytest.raises(KeyError):
        Blind(tmp_path).run(b"")
    checkpoint = PARSERS["checkpoint"](tmp_path)
    (data, *_) = checkpoint.seeds()
    checkpoint.saved["w"] = checkpoint.saved["w"] + 1  # type: ignore[attr-defined]
    with pytest.raises(Wrong, match="other values"):
        checkpoint.run(data)
