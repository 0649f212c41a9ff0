"""Packed weights: modules that are fast for a few tokens.

Most of a pass over one token is spent reading the weights, so verifying a few drafted tokens should
cost no more. However, for 2 to 16 rows (tokens) nn.Linear on a CPU takes two to three times as long
as for one. oneDNN (in PyTorch: mkldnn) can store a weight in blocks, in the order in which its
kernel reads them. With such a weight up to six rows cost no more than one (measured on an AMD
EPYC), and more rows cost less than with nn.Linear. One wide product is also faster than several
narrow ones of the same input, even on a GPU.

For these reasons `pack` replaces the modules of a finished model by the packed modules below. A
packed model cannot be trained, saved or moved. On a CPU it is also exact, if the CPU's kernels
allow it: see app/exact.py.
"""
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.exact import ExactLlama, RefinedHead
from app.vocabulary import LimitedDrafter
from llama import MLP, Attention, Llama, RMSNorm, rotate
from moa import Drafter
from plumbing.kernels import AttentionLimits, probe_attention, probe_rows
from plumbing.onednn import can_multiply, has_fast_bfloat16, packed_product, reorder_weight

# --- Packing models ---


def pack_models(target: Llama, drafters: list[Drafter]) -> Llama:
    """Pack a target and its drafters. Return the target to use from now on."""
    packed = pack(target)
    for drafter in drafters:
        pack_drafter(drafter, packed)
    return packed


def pack(target: Llama) -> Llama:
    """Return a packed target. The one that is given is used up: if it is not itself returned, its
    next pass raises AttributeError.

    Where `can_pack` is False, the target is returned as it is.
    """
    if not can_pack(target.embed_tokens.weight):
        return target
    head_weight = target.lm_head.weight
    for name, part in target.named_children():
        setattr(target, name, packed(part))
    if target.device.type == "cpu" and target.dtype == torch.bfloat16:
        target.lm_head = RefinedHead(target.lm_head, head_weight)
    limits = find_limits(target) if target.device.type == "cpu" else None
    if limits is None:
        return target
    exact = ExactLlama(target, limits)
    del target.layers  # the layers are exact's now, and need its padding
    return exact


def pack_drafter(drafter: Drafter, target: Llama) -> None:
    """Pack a drafter in place. target: its target, which is packed already."""
    drafter.target = target
    if not isinstance(drafter, LimitedDrafter):
        head = target.lm_head  # drafts need not be exact, and do without the refinement
        drafter.lm_head = head.head if isinstance(head, RefinedHead) else head
    for name, part in drafter.named_children():
        if name != "target":
            setattr(drafter, name, packed(part))


def packed(module: nn.Module) -> nn.Module:
    """Return what takes the place of a module: a packed module or, if none below fits, the module
    itself with its parts replaced."""
    weight = next(module.parameters(), None)
    if weight is None or not can_pack(weight):
        return module
    if isinstance(module, Attention):
        return PackedAttention(module)
    if isinstance(module, MLP):
        return PackedMLP(module)
    if weight.device.type == "cpu" and isinstance(module, RMSNorm):
        return PackedRMSNorm(module)
    if weight.device.type == "cpu" and isinstance(module, nn.Embedding):
        return WideEmbedding.from_pretrained(module.weight)
    if weight.device.type == "cpu" and isinstance(module, nn.Linear) and module.bias is None:
        return PackedLinear(module)
    for name, part in module.named_children():
        setattr(module, name, packed(part))
    return module


def can_pack(weight: Tensor) -> bool:
    """Return whether packing helps: on NVIDIA's GPUs, and on a CPU if oneDNN can multiply weights
    of this dtype."""
    if weight.device.type == "cuda":
        return True
    return weight.device.type == "cpu" and can_multiply(weight.dtype)


def find_limits(target: Llama) -> AttentionLimits | None:
    """Find out what exact passes need on this CPU: the limits of attention, which are returned, and
    the `min_rows` of each `PackedLinear`, which are set. Return None if no pass can be exact."""
    config = target.config
    group = config.num_attention_heads // config.num_key_value_heads
    limits = probe_attention(config.head_dim, group, target.dtype)
    for part in target.modules():
        if isinstance(part, PackedLinear):
            min_rows = probe_rows(*part.weight.shape, part.weight.dtype)
            if min_rows is None:
                return None
            part.min_rows = min_rows
    return limits


def to_bfloat16(drafter: Drafter) -> Drafter:
    """Convert a drafter's float32 weights to bfloat16 on a CPU that has instructions for it. Return
    the same drafter.

    Drafts need not be exact: a worse draft costs time, but never changes the text.
    """
    if drafter.device.type == "cpu" and drafter.dtype == torch.float32 and has_fast_bfloat16():
        # (Not drafter.bfloat16(), which would also round the angles of the rotary tables.)
        for parameter in drafter.trained_parameters().values():
            parameter.data = parameter.data.bfloat16()
        if isinstance(drafter, LimitedDrafter):  # else the LM head is the target's own
            drafter.lm_head.bfloat16()
    return drafter


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


class WideEmbedding(nn.Embedding):
    """Embeddings in float32, whatever the dtype of the weight. Every layer adds to them, so that the
    sum over the layers is then in float32 as well. In bfloat16 each of the 60 additions would round
    it to eight significant bits."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).float()


class PackedRMSNorm(Packed):
    """RMSNorm in four operations. On a CPU F.rms_norm consists of more.

    x / sqrt(mean(x^2) + eps) = sqrt(size) x / sqrt(|x|^2 + size eps), and hypot(a, b) is
    sqrt(a^2 + b^2) in one operation. All four operations are in float32, with a cast before the
    first and after the last.
    """

    def __init__(self, norm: RMSNorm):
        super().__init__()
        size = len(norm.weight)
        self.dtype = norm.weight.dtype  # of the output; the input may be wider
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
        self.o_proj = packed(attention.o_proj)

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
        # With a mask enable_gqa copies keys and values for every query head. Instead, stack the
        # queries of the heads that share a kv head: with 4 heads, 2 kv heads and T tokens, 2 T rows
        # attend to the first kv head, and 2 T rows to the second.
        k, v = kv.chunk(2, dim=-1)
        group = self.heads // self.kv_heads
        tokens = q.shape[2]
        rows = q.reshape(len(q), self.kv_heads, group * tokens, self.head_dim)
        if mask is not None and mask.dtype == torch.bool:  # one row for each token
            mask = torch.cat([mask] * group, dim=-2)  # (group T, S)
        elif mask is not None:
            # A mask of numbers comes from `ExactLlama`. It has one row for each of `rows`, followed
            # by rows for padding.
            padding = mask.shape[-2] - group * tokens
            rows = F.pad(rows, (0, 0, 0, padding))
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask)
        out = out[:, :, :group * tokens].reshape(q.shape)  # (B, H, T, D), without the padding
        return self.o_proj(out.transpose(1, 2).flatten(2))


class PackedMLP(nn.Module):
    """An MLP that computes the gate and up projections as one product."""

    def __init__(self, mlp: MLP):
        super().__init__()
        self.gate_up_proj = PackedLinear(mlp.gate_proj, mlp.up_proj)
        self.down_proj = packed(mlp.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)
