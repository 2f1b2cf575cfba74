"""Under which names, and in which order of rows, other programs want the tensors of a model.

``Checkpointer.export(rename=...)`` takes a layout where names alone are not enough. One is here for
the models most trained outside of Hugging Face's own classes: those with Llama's blocks (Llama 2
and 3, Mistral, and what is built like them).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

import torch

__all__ = ["Layout", "MetaLlama", "TorchtuneLlama"]


class Layout(ABC):
    """Brings the tensors of a model to the names and values that another program wants."""

    @abstractmethod
    def name(self, name: str) -> str | None:
        """The new name of a tensor; None leaves it out."""

    def converts(self, name: str) -> bool:
        """Whether the values of a tensor change, too. It is then held in memory as a whole."""
        return False

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The new values of a tensor that ``converts``, of the same shape and dtype."""
        return tensor


class _Llama(Layout):
    """To ``LlamaForCausalLM`` of transformers, from one of the other ways to name its parts.

    Args:
        heads: attention heads.
        kv_heads: heads of keys and values; by default as many.

    Raises:
        ValueError: a number is not positive, or ``heads`` not a multiple of ``kv_heads``.
    """

    _LAYER = re.compile(r"layers\.(\d+)\.(.+)")
    _names: dict[str, str]
    """New names of what is in no layer; below, of what is in one."""
    _in_layers: dict[str, str]
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
        """The name in transformers; None for tables that it computes itself.

        Raises:
            ValueError: no Llama has such a tensor.
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
        """Reorder the rows of a head: its rotary embedding turns pairs of neighbours here, and in
        transformers the first half of a head against the second
        (``transformers/models/llama/convert_llama_weights_to_hf.py``)."""
        match = self._LAYER.fullmatch(name)
        assert match is not None
        heads = self.heads if match[2] == self._queries else self.kv_heads
        rows = tensor.shape[0]
        if rows % (2 * heads):
            raise ValueError(f"{name}: {rows} rows cannot be those of {heads} heads")
        pairs = tensor.reshape(heads, rows // heads // 2, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)


class MetaLlama(_Llama):
    """From Meta's names, which torchtitan's models have, too, to ``LlamaForCausalLM``."""

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
    """From torchtune's names to ``LlamaForCausalLM``."""

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
