"""What `torture.concurrency` objects to in a store."""

from __future__ import annotations

import uuid

import pytest

import pyckpt
from torture.stepped import state_at
from torture.stores import judge_address


@pytest.fixture(scope="module")
def url() -> str:
    """Where step 2 is."""
    pytest.importorskip("obstore")
    made = f"memory:///{uuid.uuid4().hex}/step-1"
    pyckpt.save(state_at(2), made)
    return made


def told(url: str, words: str) -> list[str]:
    return [f"store-{word} {url} {step}" for word, step in map(str.split, words.split(", "))]


@pytest.mark.parametrize(
    "words",
    [
        "begin 2, saved 2",
        "begin 1, begin 2, saved 1, saved 2",
        "begin 1, begin 2, saved 2, saved 1",  # which of them was first is not known
        "begin 1, saved 1, begin 2, failed 2",  # the answer was lost
        "begin 1, saved 1, begin 2",  # killed
        "begin 1, failed 1",  # nothing is known
    ],
)
def test_what_may_be(url: str, words: str) -> None:
    assert judge_address(url, told(url, words)) == []


@pytest.mark.parametrize(
    "words", ["begin 2, saved 2, begin 3, saved 3", "begin 1, saved 1"], ids=["older", "other"]
)
def test_what_may_not_be(url: str, words: str) -> None:
    assert len(judge_address(url, told(url, words))) == 1


def test_what_is_lost() -> None:
    pytest.importorskip("obstore")
    url = f"memory:///{uuid.uuid4().hex}/step-1"
    assert "FileNotFoundError" in judge_address(url, told(url, "begin 1, saved 1"))[0]
