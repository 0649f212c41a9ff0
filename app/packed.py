"""Packed models: fast for a few tokens.

Most of a pass over one token is spent reading the weights, so verifying a few drafted tokens should
cost no more. However, for 2 to 16 rows (tokens) nn.Linear on a CPU takes two to three times as long
as for one. oneDNN (in PyTorch: mkldnn) can store a weight in blocks, in the order in which its
kernel reads them. With such a weight up to six rows cost no more than one (measured with two
threads of an AMD EPYC; with one thread they do), and more rows cost less than with nn.Linear. One
wide product is also faster than several narrow ones of the same input, even on a GPU.

For these reasons `pack` replaces the modules of a finished model by those below. A packed model
cannot be trained, saved or moved. On a CPU two more things are done to it:

    exactness    where the CPU's kernels allow it, passes are bit-identical (app/exact.py)
    rounding     in bfloat16, the sum over the layers and the largest logits are kept in float32
"""
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.exact import ExactLlama
from app.vocabulary import LimitedDrafter
from llama import MLP, Attention, Llama, RMSNorm, rotate
from moa import Drafter
from plumbing.kernels import AttentionLimits, probe_attention, probe_rows
from plumbing.onednn import can_multiply, packed_product, reorder_weight

# --- Packing models ---


def pack_models(target: Llama, drafters: list[Drafter]) -> Llama:
    """Pack a target, and drafters of it in place. Return the target to use from now on."""
    packed = pack(target)
    for drafter in drafters:
        drafter.target = packed
        if not isinstance(drafter, LimitedDrafter):
            head = packed.lm_head
            # Drafts need not be exact, and do without the refinement.
            drafter.lm_head = head.head if isinstance(head, RefinedHead) else head
        for name, part in drafter.named_children():
            if name != "target":
                setattr(drafter, name, replacement(part))
    return packed


def pack(target: Llama) -> Llama:
    """Return a packed target. The one that is given is used up: if it is not itself returned, its
    next pass raises AttributeError. Where `can_pack` is False, it is returned as it is."""
    if not can_pack(target.embed_tokens.weight):
        return target
    on_cpu = target.device.type == "cpu"
    head_weight = target.lm_head.weight
    for name, part in target.named_children():
        setattr(target, name, replacement(part))
    if on_cpu and target.dtype == torch.bfloat16:
        target.lm_head = RefinedHead(target.lm_head, head_weight)
    limits = find_limits(target) if on_cpu else None
    if limits is None:
        return target
    with torch.device("meta"):  # the parts come from the target
        exact = ExactLlama(target.config, limits)
    for name, part in target.named_children():
        setattr(exact, name, part)
    del target.layers  # they now need the padding of `exact`
    return exact


def replacement(module: nn.Module) -> nn.Module:
    """Return a packed module in place of a module or, if none below fits, the module itself with
    its parts replaced."""
    weight = next(module.parameters(), None)
    if weight is None or not can_pack(weight):
        return module
    if isinstance(module, Attention):
        return PackedAttention(module)
    if isinstance(module, MLP):
        return PackedMLP(module)
    if weight.device.type == "cpu":
        if isinstance(module, nn.Embedding):
            return WideEmbedding.from_pretrained(module.weight)
        if isinstance(module, RMSNorm):
            return PackedRMSNorm(module)
        if isinstance(module, nn.Linear) and module.bias is None:
            return PackedLinear(module)
    for name, part in module.named_children():
        setattr(module, name, replacement(part))
    return module


def can_pack(weight: Tensor) -> bool:
    """Return whether packing helps: on NVIDIA's GPUs, and on a CPU if oneDNN can multiply weights
    of this dtype."""
    if weight.device.type == "cuda":
        return True
    return weight.device.type == "cpu" and can_multiply(weight.dtype)


def find_limits(target: Llama) -> AttentionLimits | None:
    """Find out what exact passes need on this CPU: the limits of attention, which are returned, and
    the `min_rows` of each `PackedLinear`, which are set. If no pass can be exact, return None, and
    set nothing."""
    config = target.config
    group = config.num_attention_heads // config.num_key_value_heads
    limits = probe_attention(config.head_dim, group, target.dtype)
    if limits is None:
        return None
    packed = [part for part in target.modules() if isinstance(part, PackedLinear)]
    rows = [probe_rows(*part.weight.shape, part.weight.dtype) for part in packed]
    if None in rows:
        return None
    for part, min_rows in zip(packed, rows):
        part.min_rows = min_rows
    return limits


# --- Packed modules ---


class Packed(nn.Module):
    """A module whose weights are no parameters, but packed tensors. PyTorch would save none of
    them, and leave them behind on their device."""

    def _save_to_state_dict(self, *_) -> None:
        raise RuntimeError("packed weights cannot be saved: save the model before it is packed")

    def _apply(self, *_, **__) -> None:
        raise RuntimeError("packed weights cannot be moved or converted: do so before packing")


class PackedLinear(Packed):
    """Linear layers of the same input as one product, with their outputs side by side."""

    def __init__(self, *layers: nn.Linear):
        super().__init__()
        self.weight = torch.cat([layer.weight for layer in layers]).detach()  # (out, in)
        self.min_rows = 1  # inputs with fewer rows are padded; `find_limits` raises it
        if self.weight.device.type == "cpu":
            self.weight = reorder_weight(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        if not self.weight.is_mkldnn:
            return F.linear(x, self.weight)
        return packed_product(x, self.weight, self.min_rows)


class PackedRMSNorm(Packed):
    """RMSNorm in four operations. On a CPU F.rms_norm consists of more.

    x / sqrt(mean(x^2) + eps) = sqrt(size) x / sqrt(|x|^2 + size eps), and hypot(a, b) is
    sqrt(a^2 + b^2) in one operation. All four are in float32, and the result is in the weight's
    dtype.
    """

    def __init__(self, norm: RMSNorm):
        super().__init__()
        size = len(norm.weight)
        self.dtype = norm.weight.dtype
        self.scale = norm.weight.detach().float() * math.sqrt(size)
        self.floor = torch.tensor(math.sqrt(size * norm.eps))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return (wide * self.scale / torch.hypot(length, self.floor)).to(self.dtype)


class PackedAttention(Attention):
    """Attention that computes queries, keys and values as one product."""

    def __init__(self, attention: Attention):
        nn.Module.__init__(self)  # Attention's own would create projections that are not packed
        self.heads = attention.heads
        self.kv_heads = attention.kv_heads
        self.head_dim = attention.head_dim
        self.qkv_proj = PackedLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o_proj = replacement(attention.o_proj)

    def queries_keys_values(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.split_heads(self.qkv_proj(x))  # (B, H + 2 Hkv, T, D)
        qk, v = heads.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        q, k = rotate(qk, rope).split([self.heads, self.kv_heads], dim=1)
        return q, torch.cat([k, v], dim=-1)

    def queries(self, x: Tensor, rope: Tensor) -> Tensor:
        # Only CA asks for queries alone. The keys and values computed with them are thrown away.
        # For a single layer this costs less than holding q_proj a second time.
        q, _ = self.queries_keys_values(x, rope)
        return q

    def keys_values(self, x: Tensor, rope: Tensor) -> Tensor:
        _, kv = self.queries_keys_values(x, rope)
        return kv

    def forward(self, q: Tensor, kv: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend as `Attention` does.

        With a mask, PyTorch's enable_gqa copies keys and values for every query head. Here the
        queries of the `group` heads that share a kv head are stacked instead: group * T rows attend
        to it. A mask of bools has a row for each token. A mask of numbers has one for each of the
        stacked rows already, and perhaps more for padding: it comes from `ExactLlama`, which makes
        it once for all layers.
        """
        k, v = kv.chunk(2, dim=-1)
        group = self.heads // self.kv_heads
        stacked = group * q.shape[2]
        rows = q.reshape(len(q), self.kv_heads, stacked, self.head_dim)
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.cat([mask] * group, dim=-2)  # (group T, S)
        elif mask is not None:
            rows = F.pad(rows, (0, 0, 0, mask.shape[-2] - stacked))
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask)
        out = out[:, :, :stacked].reshape(q.shape)  # (B, H, T, D), without the padding
        return self.o_proj(out.transpose(1, 2).flatten(2))


class PackedMLP(nn.Module):
    """An MLP that computes the gate and up projections as one product."""

    def __init__(self, mlp: MLP):
        super().__init__()
        self.gate_up_proj = PackedLinear(mlp.gate_proj, mlp.up_proj)
        self.down_proj = replacement(mlp.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


# --- Where bfloat16 rounds too much ---
#
# A bfloat16 number has eight significant bits: 28.1 and 28.15 are both rounded to 28.125. Two
# places of a model are kept in float32 at little or no cost. Products, weights and caches stay as
# they are.


class WideEmbedding(nn.Embedding):
    """Embeddings in float32, whatever the dtype of the weight. All layers add their outputs to
    them, so that this sum is then kept in float32, too. (Of 825 greedy choices of SmolLM2 14
    differed from those in float32 before, and 8 since.)"""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).float()


REFINED_TOKENS = 16


class RefinedHead(nn.Module):
    """A bfloat16 LM head whose largest logits are computed again in float32.

    Without this, the two likeliest tokens of SmolLM2 were exactly tied at one of 22 places in
    greedy text, and their order in the vocabulary decided. Rows have the same bits alone and
    together: each has its own sums.
    """

    def __init__(self, head: nn.Module, weight: Tensor):
        """head: packed. weight: the same weight, not packed, (V, E)."""
        super().__init__()
        self.head = head
        self.rows = weight.detach()

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits in float32: hidden (..., E) -> (..., V)."""
        logits = self.head(hidden).float()
        count = min(REFINED_TOKENS, logits.shape[-1])
        likeliest = logits.topk(count).indices  # (..., 16)
        rows = self.rows[likeliest].float()  # (..., 16, E)
        refined = (rows * hidden.float().unsqueeze(-2)).sum(-1)  # (..., 16)
        return logits.scatter_(-1, likeliest, refined)
