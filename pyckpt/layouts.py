"""The names, and the order of rows, that other programs expect of a model's tensors.

``Checkpointer.export(rename=...)`` takes a layout if new names alone are not enough. The layouts
here are for models with Llama's blocks (Llama 2 and 3, Mistral, and models built like them).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

import torch

__all__ = ["Layout", "MetaLlama", "TorchtuneLlama"]


class Layout(ABC):
    """Converts the tensors of a model to the names and values that another program expects."""

    @abstractmethod
    def name(self, name: str) -> str | None:
        """The new name of a tensor; None leaves it out."""

    def converts(self, name: str) -> bool:
        """Whether the values of a tensor also change. It is then held in memory as a whole."""
        return False

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The new values of a tensor that ``converts``, of the same shape and dtype."""
        return tensor


class _Llama(Layout):
    """Converts to ``LlamaForCausalLM`` of transformers. Subclasses have the names to convert from.

    Args:
        heads: number of attention heads.
        kv_heads: number of heads of keys and values; by default ``heads``.

    Raises:
        ValueError: a number is not positive, or ``heads`` not a multiple of ``kv_heads``.
    """

    _LAYER = re.compile(r"layers\.(\d+)\.(.+)")
    _names: dict[str, str]
    """New names of tensors outside of layers, by their old names."""
    _in_layers: dict[str, str]
    """New names of tensors inside a layer, by their old names."""
    _left_out: frozenset[str] = frozenset()
    _queries: str
    _keys: str

    def __init__(self, *, heads: int, kv_heads: int | None = None) -> None:
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"{heads = } must be a positive multiple of {kv_heads = }.")
        self.heads = heads
        self.kv_heads = kv_heads

    def name(self, name: str) -> str | None:
        """The name in transformers; None for tables that transformers computes itself.

        Raises:
            ValueError: a Llama has no such tensor.
        """
        if name in self._left_out:
            return None
        match = self._LAYER.fullmatch(name)
        if match is not None and match[2] in self._in_layers:
            return f"model.layers.{match[1]}.{self._in_layers[match[2]]}"
        if name in self._names:
            return self._names[name]
        raise ValueError(f"{name!r} is no part of a Llama as {type(self).__name__} knows it")

    def converts(self, name: str) -> bool:
        """Queries and keys: see ``convert``."""
        match = self._LAYER.fullmatch(name)
        return match is not None and match[2] in (self._queries, self._keys)

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Reorder the rows of each head, as
        ``transformers/models/llama/convert_llama_weights_to_hf.py`` does. The rotary embedding
        rotates pairs of neighbouring rows here. In transformers, a pair is a row of the first half
        of a head and the corresponding row of the second half.

        Raises:
            ValueError: the number of rows does not fit the number of heads.
        """
        match = self._LAYER.fullmatch(name)
        assert match is not None
        heads = self.heads if match[2] == self._queries else self.kv_heads
        rows = tensor.shape[0]
        if rows % (2 * heads):
            raise ValueError(f"{name}: {rows} rows cannot be those of {heads} heads")
        pairs = tensor.reshape(heads, rows // heads // 2, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)


class MetaLlama(_Llama):
    """Converts Meta's names, which torchtitan also uses, to those of ``LlamaForCausalLM``."""

    _names = {  # noqa: RUF012
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    _in_layers = {  # noqa: RUF012
        "attention.wq.weight": "self_attn.q_proj.weight",
        "attention.wk.weight": "self_attn.k_proj.weight",
        "attention.wv.weight": "self_attn.v_proj.weight",
        "attention.wo.weight": "self_attn.o_proj.weight",
        "feed_forward.w1.weight": "mlp.gate_proj.weight",
        "feed_forward.w2.weight": "mlp.down_proj.weight",
        "feed_forward.w3.weight": "mlp.up_proj.weight",
        "attention_norm.weight": "input_layernorm.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
    }
    _left_out = frozenset({"freqs_cis", "rope.freqs"})
    _queries = "attention.wq.weight"
    _keys = "attention.wk.weight"


class TorchtuneLlama(_Llama):
    """Converts torchtune's names to those of ``LlamaForCausalLM``."""

    _names = {  # noqa: RUF012
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "norm.scale": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    _in_layers = {  # noqa: RUF012
        "attn.q_proj.weight": "self_attn.q_proj.weight",
        "attn.k_proj.weight": "self_attn.k_proj.weight",
        "attn.v_proj.weight": "self_attn.v_proj.weight",
        "attn.output_proj.weight": "self_attn.o_proj.weight",
        "mlp.w1.weight": "mlp.gate_proj.weight",
        "mlp.w2.weight": "mlp.down_proj.weight",
        "mlp.w3.weight": "mlp.up_proj.weight",
        "sa_norm.scale": "input_layernorm.weight",
        "mlp_norm.scale": "post_attention_layernorm.weight",
    }
    _queries = "attn.q_proj.weight"
    _keys = "attn.k_proj.weight"
