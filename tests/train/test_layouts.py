"""Exports under other names: transformers loads them, and computes what the model computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from test_export import FORMATS, model, save

import pyckpt
from pyckpt.layouts import Layout, MetaLlama, TorchtuneLlama

DIM, HIDDEN, HEADS, KV_HEADS, LAYERS, VOCABULARY = 32, 48, 4, 2, 2, 50
HEAD = DIM // HEADS


def meta_llama() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def weights(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    state = {
        "tok_embeddings.weight": weights(VOCABULARY, DIM),
        "norm.weight": 1 + weights(DIM) / 10,
        "output.weight": weights(VOCABULARY, DIM),
        "freqs_cis": torch.ones(3),
    }
    for i in range(LAYERS):
        state |= {
            f"layers.{i}.attention.wq.weight": weights(HEADS * HEAD, DIM),
            f"layers.{i}.attention.wk.weight": weights(KV_HEADS * HEAD, DIM),
            f"layers.{i}.attention.wv.weight": weights(KV_HEADS * HEAD, DIM),
            f"layers.{i}.attention.wo.weight": weights(DIM, HEADS * HEAD),
            f"layers.{i}.feed_forward.w1.weight": weights(HIDDEN, DIM),
            f"layers.{i}.feed_forward.w2.weight": weights(DIM, HIDDEN),
            f"layers.{i}.feed_forward.w3.weight": weights(HIDDEN, DIM),
            f"layers.{i}.attention_norm.weight": 1 + weights(DIM) / 10,
            f"layers.{i}.ffn_norm.weight": 1 + weights(DIM) / 10,
        }
    return state


def meta_logits(state: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """A Llama as Meta wrote it: its rotary embedding turns pairs of neighbours."""
    length = len(tokens)
    frequencies = 10_000.0 ** -(torch.arange(0, HEAD, 2).float() / HEAD)
    turns = torch.polar(torch.ones(()), torch.arange(length)[:, None] * frequencies)[:, None]

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

    def rotated(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.reshape(length, -1, HEAD // 2, 2))
        return torch.view_as_real(pairs * turns).reshape(x.shape)

    x = state["tok_embeddings.weight"][tokens]
    for i in range(LAYERS):
        layer = {
            key.removeprefix(f"layers.{i}.").removesuffix(".weight"): value
            for key, value in state.items()
            if key.startswith(f"layers.{i}.")
        }
        h = norm(x, layer["attention_norm"])
        q = rotated((h @ layer["attention.wq"].T).view(length, HEADS, HEAD))
        k = rotated((h @ layer["attention.wk"].T).view(length, KV_HEADS, HEAD))
        v = (h @ layer["attention.wv"].T).view(length, KV_HEADS, HEAD)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(0, 1).reshape(length, -1) @ layer["attention.wo"].T
        h = norm(x, layer["ffn_norm"])
        gate = F.silu(h @ layer["feed_forward.w1"].T) * (h @ layer["feed_forward.w3"].T)
        x = x + gate @ layer["feed_forward.w2"].T
    return norm(x, state["norm.weight"]) @ state["output.weight"].T


def torchtune_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    new = {
        "attention.wq.weight": "attn.q_proj.weight",
        "attention.wk.weight": "attn.k_proj.weight",
        "attention.wv.weight": "attn.v_proj.weight",
        "attention.wo.weight": "attn.output_proj.weight",
        "feed_forward.": "mlp.",
        "attention_norm.weight": "sa_norm.scale",
        "ffn_norm.weight": "mlp_norm.scale",
    }
    renamed = {}
    for name, tensor in state.items():
        changed = "norm.scale" if name == "norm.weight" else name
        for old, other in new.items():
            changed = changed.replace(old, other)
        renamed[changed] = tensor
    renamed.pop("freqs_cis")
    return renamed


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("whose", ["Meta", "torchtune"])
def test_transformers_computes_what_the_llama_computed(
    whose: str, format: Any, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    state = meta_llama()
    tokens = torch.randint(VOCABULARY, (11,), generator=torch.Generator().manual_seed(5))
    expected = meta_logits(state, tokens)
    saved = state if whose == "Meta" else torchtune_names(state)
    layout = (MetaLlama if whose == "Meta" else TorchtuneLlama)(heads=HEADS, kv_heads=KV_HEADS)
    config = transformers.LlamaConfig(
        hidden_size=DIM,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=VOCABULARY,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    checkpoint = save(tmp_path / "c", {"model": saved, "other": torch.ones(3)})
    files = pyckpt.export(
        checkpoint,
        tmp_path / "out",
        format=format,
        rename=layout,
        config=config,
        max_shard_size="20KB",
    )
    assert "config.json" in {file.name for file in files}
    assert len(files) > 3
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        logits = found(tokens[None]).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_a_layout_names_what_it_does_not_know(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "c", {"model": meta_llama() | {"adapter": torch.ones(2)}})
    with pytest.raises(ValueError, match="'adapter' is no part of a Llama as MetaLlama knows it"):
        pyckpt.export(checkpoint, tmp_path / "out", rename=MetaLlama(heads=HEADS))
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize(("heads", "kv_heads"), [(0, None), (4, 3), (4, 0)])
def test_heads_that_cannot_be(heads: int, kv_heads: int | None) -> None:
    with pytest.raises(ValueError, match="multiple of"):
        MetaLlama(heads=heads, kv_heads=kv_heads)


def test_rows_that_are_not_those_of_the_heads(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "c", {"model": meta_llama()})
    with pytest.raises(ValueError, match="cannot be those of 5 heads"):
        pyckpt.export(checkpoint, tmp_path / "out", rename=MetaLlama(heads=5))


def test_a_conversion_keeps_shape_and_dtype(tmp_path: Path) -> None:
    class Doubled(Layout):
        def name(self, name: str) -> str:
            return name

        def converts(self, name: str) -> bool:
            return True

        def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.double()

    checkpoint = save(tmp_path / "c", {"model": {"w": torch.ones(3)}})
    with pytest.raises(ValueError, match=r"torch\.float64 of shape \(3,\) of torch\.float32"):
        pyckpt.export(checkpoint, tmp_path / "out", rename=Doubled())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("how", ["mapping", "function"])
def test_renamed_and_left_out(how: str, format: Any, tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "c", {"model": model()})
    rename: Any = {"half": "a.b", "double": "half"}
    if how == "function":
        rename = lambda name: None if name == "empty" else f"m.{name}"  # noqa: E731
    [file] = pyckpt.export(checkpoint, tmp_path / "out", format=format, rename=rename)
    found = load_file(file) if format == "safetensors" else torch.load(file, weights_only=True)
    expected = {
        (rename(name) if how == "function" else rename.get(name, name)): tensor
        for name, tensor in model().items()
    }
    expected.pop(None, None)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_two_tensors_of_one_new_name(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "c", {"model": model()})
    with pytest.raises(ValueError, match=r"rename makes 'x' of 'model\.\w+' and of 'model\.\w+'"):
        pyckpt.export(checkpoint, tmp_path / "out", rename={"half": "x", "double": "x"})
    with pytest.raises(ValueError, match="leaves out every tensor"):
        pyckpt.export(checkpoint, tmp_path / "out", rename=lambda name: None)


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
def test_a_checkpoint_that_is_flat(stock: bool, tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "c", model(), stock=stock)
    with pytest.raises(ValueError, match=r"no tensors under 'model'.*key=None exports all"):
        pyckpt.export(checkpoint, tmp_path / "out")
    [file] = pyckpt.export(checkpoint, tmp_path / "out", key=None)
    found = load_file(file)
    assert found.keys() == model().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model().items())


def test_config_comes_with_the_weights(tmp_path: Path) -> None:
    with pyckpt.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": model()}, final=True)
        out = tmp_path / "out"
        files = checkpointer.export(out, config={"model_type": "x"})
        assert [file.name for file in files] == ["config.json", "model.safetensors"]
        assert json.loads((out / "config.json").read_text()) == {"model_type": "x"}
        (tmp_path / "c.json").write_text('{"model_type": "y"}')
        checkpointer.export(out, config=tmp_path / "c.json")
        assert json.loads((out / "config.json").read_text()) == {"model_type": "y"}
        with pytest.raises(TypeError, match="config must be a mapping"):
            checkpointer.export(out, config=3)  # type: ignore[arg-type]
        with pytest.raises(FileNotFoundError):
            checkpointer.export(out, config=tmp_path / "none.json")
    assert json.loads((out / "config.json").read_text()) == {"model_type": "y"}
