"""
The models of three papers. Every variant is a flag; the `if` that reads it stands beside the equation it selects.

    GPT     decoder-only transformer; attn_out = dense | hadamard [1] | ours: head_hadamard, identity (a control), none
                                      attn     = mha | dva, dva_outer [2] | ours, as a control: dva_gate
    SHAQ    one attention head over LSTMs or quasi-recurrent nets with a memory; SHAQ_PRESETS holds every ablation   [3]

Between them: what computes attention, dropout and the loss in less time or memory than their definitions take, and sampling. Below them: LAMB,
[3]'s optimiser, and what the training scripts share, from the choice of a device to loading a checkpoint.
Importing this file needs only torch and kernels.py; running it also needs prepare_data.py.
    python model.py --ckpt=out/gpt/ckpt.pt --prompt="def "        samples from a trained model

[1] Aggarwal and Kumar, Rethinking Attention Output Projection, arXiv:2603.08343v2 (and v1)
[2] Wang, Transformer Reconstructed with Dynamic Value Attention, arXiv:2512.22212; model sizes after Raschka's Build a Large Language
    Model (From Scratch)
[3] Bharwani et al., SHAQ: Single Headed Attention with Quasi-Recurrence, arXiv:2108.08207, and Merity's SHA-RNN, arXiv:1911.11423, which
    it takes apart
"""
import contextlib
import copy
import ctypes
import gc
import math
import os
import platform
import re
import sys
import textwrap
import time
import zipfile
from collections import namedtuple
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import (_check_devices, _check_order, _once, _operator, _reverse_mode_only, _split_order, hadamard_affine, hadamard_affine_norm,
                     hadamard_matrix, hadamard_norm_is_fused, one_query_attention, qrnn_pool, rope_backward, triton)

# -----------------------------------------------------------------------------
# GPT: settings


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304       # GPT-2's 50257, padded to a multiple of 64
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    attn: str = "mha"             # mha | dva | dva_outer [2] | dva_gate (ours, without K_R); no dva form has an output projection
    attn_out: str = "dense"       # dense | hadamard | head_hadamard | identity | none: W_O or its substitute, for mha
    mlp: str = "swiglu"           # swiglu | gelu | none
    pos: str = "rope"             # rope | learned
    norm: str = "layernorm"       # layernorm | rmsnorm
    bias: bool = True             # in LayerNorm and in linear layers, but for the head; beta is always there
    qkv_bias: bool = True         # in W_Q, W_K, W_V, if bias; dva's matrices have none
    dropout: float = 0.0          # on the embedding sum, the attention weights and each branch's output
    tie_weights: bool = True      # the head is the token embedding
    init: str = "gpt2"            # gpt2 | torch: PyTorch's own defaults, embeddings N(0, 1), as in the book that [2] follows


# To add a choice, add its name here and a branch next to the existing ones. For attn_out it goes into Attention.forward, above the error;
# alpha and beta are there already, in fp32 even under autocast (identity casts them). Other parameters: create them in Attention.__init__ and
# initialise them in GPT.init_weights (flops_per_token counts no vectors). A fixed tensor: a buffer, with persistent=False unless it is random,
# drawn from a generator of its own, or the other weights change. For attn it goes into Attention.attend; search also for "mha" and
# "dva_gate", as any other name gets dva's matrices, cache and FLOPs, and no W_O. train_gpt.py and bench.py's compare and scaling take any
# choice; bench.py's prefill, decode and train only those in its OUTS.
CHOICES = dict(attn=["mha", "dva", "dva_outer", "dva_gate"], attn_out=["dense", "hadamard", "head_hadamard", "identity", "none"],
               mlp=["swiglu", "gelu", "none"], pos=["rope", "learned"], norm=["layernorm", "rmsnorm"],
               init=["gpt2", "torch"])

SIZES = {  # [1, table 2 and v1's sizes]: these reproduce every published parameter count. Their recipes: train_gpt.py's RECIPES, or large's
    "nano": dict(n_layer=4, n_head=4, n_embd=160, block_size=256),  # ours: for a CPU and a few minutes
    "tiny": dict(n_layer=12, n_head=12, n_embd=768),
    "small": dict(n_layer=24, n_head=16, n_embd=1024),
    "base": dict(n_layer=24, n_head=16, n_embd=1536),
    "large": dict(n_layer=24, n_head=16, n_embd=2048),
    "medium_v1": dict(n_layer=32, n_head=16, n_embd=2048),
    "large_v1": dict(n_layer=32, n_head=20, n_embd=2560),
    "xl_v1": dict(n_layer=48, n_head=20, n_embd=2560),
    "xxl_v1": dict(n_layer=48, n_head=24, n_embd=3072),
    # [2]'s two models: 162,419,712 and 112,800,768 parameters
    "gpt2_book": dict(n_layer=12, n_head=12, n_embd=768, block_size=256, vocab_size=50257, mlp="gelu", pos="learned", qkv_bias=False,
                      dropout=0.1, tie_weights=False, init="torch"),
    "dva_book": dict(n_layer=12, n_head=1, n_embd=768, block_size=256, vocab_size=50257, attn="dva", mlp="none", pos="learned",
                     dropout=0.1, tie_weights=False, init="torch"),
}


def hadamard_heads(config):
    """h in the layer's H = H_h (x) H_(d/h), (x) the Kronecker product: n_head if both factors exist, so that fold_hadamard() can multiply
    the inner one into W_V; otherwise 1, the plain H_d. [1] leaves the choice open. In SIZES the two differ only for nano, H_4 (x) H_40
    instead of H_20 (x) H_8, and base, H_16 (x) H_96 instead of H_12 (x) H_128."""
    d, h = config.n_embd, config.n_head
    if _split_order(h) and _split_order(d // h):
        return h
    _check_order(d)  # raises, naming the nearest widths, where there is no H_d either
    return 1


def check_config(c):
    "ValueError, in one line, on a configuration that makes no model"
    for name, known in CHOICES.items():
        if getattr(c, name) not in known:
            raise ValueError(f"{name}={getattr(c, name)!r}: expected one of {', '.join(known)}")
    if min(c.n_layer, c.n_head, c.n_embd, c.block_size, c.vocab_size) < 1:
        raise ValueError("expected n_layer, n_head, n_embd, block_size and vocab_size of 1 or more")
    if not 0 <= c.dropout < 1:
        raise ValueError(f"dropout={c.dropout}: expected 0 to below 1")
    step = c.n_head * (2 if c.pos == "rope" else 1)  # rope turns pairs of channels
    fits = lambda n: n % step == 0 and (c.attn_out != "hadamard" or _split_order(n)
                                        or _split_order(c.n_head) and _split_order(n // c.n_head))
    if not fits(c.n_embd):
        near = [next(filter(fits, ns), None) for ns in (
            range(c.n_embd // step * step, 0, -step), range(-(-c.n_embd // step) * step, 64 * (c.n_embd + step), step))]
        raise ValueError(f"n_embd={c.n_embd} must be a multiple of n_head={c.n_head}, by an even number where pos is rope"
                         + ", and m * 2^k with m = 1, 12, 20, 28, 36, 44, 60, .. for attn_out=hadamard" * (c.attn_out == "hadamard")
                         + f": take {' or '.join(str(n) for n in near if n) or 'another n_head'}")
    if c.attn_out == "head_hadamard":
        _check_order(c.n_head, "n_head")
    if c.attn != "mha" and c.attn_out not in ("dense", "none"):  # "dense" may be the default, untyped; "none" is the truth
        raise ValueError(f"attn={c.attn} has no output projection for attn_out={c.attn_out} to replace: drop one of the two")
    if c.init == "torch" and c.attn_out not in ("dense", "none"):
        raise ValueError(f"init=torch says nothing of attn_out={c.attn_out}'s alpha: take init=gpt2")


# -----------------------------------------------------------------------------
# GPT: parts


def make_norm(config):
    return nn.RMSNorm(config.n_embd, eps=1e-5) if config.norm == "rmsnorm" else nn.LayerNorm(config.n_embd, eps=1e-5, bias=config.bias)


def rope_table(block_size, width, device=None, dtype=torch.float32):
    """cos and sin of position * 10000^(-2i/width), (block_size, 1, width / 2) each, in fp32 or wider (RoFormer, arXiv:2104.09864). Computed in
    fp64, as fp32 angles would put them off by 5e-5 at position 1,000, by 5e-3 at 100,000; this on the CPU, as Apple's GPUs have no fp64."""
    frequency = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)
    angle = torch.arange(block_size, device="cpu")[:, None, None] * frequency
    device = torch.get_default_device() if device is None else device  # 0 is a device, too
    return [t.to(device, torch.promote_types(dtype, torch.float32)) for t in (angle.cos(), angle.sin())]


def rope(x, cos, sin):
    """Rotate each pair (x_2i, x_2i+1) of x (B, T, heads, width) by its position's angle, in fp32 or wider. cos, sin (T, 1, width / 2), of
    rope_table(); ValueError if in 16 bits. Hugging Face's Llama pairs x_i with x_(i + width/2): the same model, once the rows of each head in
    W_Q and W_K are reordered to match. The result's gradient, in fp32 or fp64, must begin at an even place of its storage; compiled on a CPU, x
    too"""
    if cos.element_size() < 4:
        raise ValueError(f"rope: cos and sin are in {cos.dtype}, expected fp32; FSDP needs MixedPrecisionPolicy(cast_forward_inputs=False)")
    y = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))  # (B, T, heads, width / 2, 2)
    if x.device.type == "cpu" or x.is_cuda and not torch.compiler.is_compiling():
        # (x_2i + i x_2i+1) (cos + i sin), in one pass: on a CPU 5 times as fast as four passes over real numbers
        odd = not torch.compiler.is_compiling() and y.storage_offset() % 2  # which torch.compile cannot ask
        if odd or y.stride(-1) != 1 or any(n % 2 for n in y.stride()[:-1]):  # a pair is no complex number where it lies
            y = y.clone(memory_format=torch.contiguous_format)
        y = torch.view_as_real(torch.view_as_complex(y) * torch.complex(cos, sin))
    else:  # torch.compile makes one pass each of this and its gradient, but cannot with complex numbers or with x_2i and x_2i+1 split apart
        y = y * cos[..., None] + y.flip(-1) * torch.stack((-sin, sin), -1)
    return y.flatten(-2).to(x.dtype)


class Dropout(nn.Dropout):
    "nn.Dropout, on a CPU 3.5 to 4 times as fast (fp16: 3), as PyTorch's draws for each number by itself"
    def forward(self, x):
        if not self.training or self.inplace or not 0 < self.p < 1 or x.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(x)
        return x * keep_mask(x, self.p).mul_(1 / (1 - self.p))


def heads(qkv, table, n_head, d):
    """qkv (B, T, n d), n = 3 in mha, 4 in dva_gate, 5 in dva and dva_outer -> q, k (B, h, T, d_h), turned by rope() if table is given; v, as
    wide as k, or [V, K_R], twice as wide; q_r, as wide as q, or None. TurnedHeads has this function's gradient, written out, for a GPU: if you
    change more than the angles, let turns() return False."""
    # Split before cutting into heads: the other way round torch.compile (2.11 to 2.13) failed for a GPU, on the gradient of heads above 256
    qk, rest = qkv.split((2 * d, qkv.size(2) - 2 * d), 2)                                # Q and K; V, or V (K_R) Q_R
    qk = qk.unflatten(2, (2 * n_head, -1))                                               # (B, T, 2h, d_h)
    qk = qk if table is None else rope(qk, *table)
    q, k = qk.transpose(1, 2).split(n_head, 1)                                           # (B, h, T, d_h) each
    rest = rest.unflatten(2, (-1, n_head, d // n_head)).permute(0, 3, 1, 2, 4)           # (B, h, T, 1 to 3, d_h)
    if rest.size(3) == 1:
        return q, k, rest.flatten(3), None
    v, q_r = rest.split((rest.size(3) - 1, 1), 3)
    return q, k, v.flatten(3), q_r.squeeze(3)                                            # V or [V, K_R], a view for one head


class TurnedHeads(torch.autograd.Function):
    "heads(), for a GPU with Triton: the same forward, and all of qkv's gradient by one operator of kernels.py"
    @staticmethod
    def forward(ctx, qkv, cos, sin, n_head):
        ctx.save_for_backward(cos, sin)
        return heads(qkv, (cos, sin), n_head, n_head * 2 * cos.size(-1))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dq, dk, dv, dq_r):
        parts = [dq, dk, *dv.split(dq.size(-1), -1), *[dq_r] * (dq_r is not None)]       # (B, h, T, d_h) each
        return rope_backward(parts, *ctx.saved_tensors), None, None, None                # (B, T, 3d to 5d)


def turns(qkv, table):
    """Whether TurnedHeads takes heads()'s place: on a GPU with Triton, where gradients are wanted, but not under torch.func, which refuses it
    (compiled code cannot ask, and takes it)"""
    return (table is not None and qkv.is_cuda and triton is not None and torch.is_grad_enabled()
            and (torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None))


def extend(seen, new, at):
    "Write new, a layer's keys or values, into its cache seen (B, h, length, any) -> what attention reads of it. at: see Attention.attend"
    if isinstance(at, torch.Tensor):  # a step of generate(), whose shapes are fixed for CUDA graphs: a mask hides the rest
        seen[:, :, at] = new.to(seen.dtype)
        return seen
    if at[1] > seen.size(2):  # past its end a slice is empty, and takes a single token without a word
        raise ValueError(f"{at[1]} tokens, but the cache has room for {seen.size(2)}: make a longer one")
    seen[:, :, slice(*at)] = new  # which casts, too
    return seen[:, :, :at[1]]


def up_to(pos, length, dtype):
    "attention()'s mask (1, length) for a query at pos, an int64 tensor (1,): later positions do not count"
    return torch.where(torch.arange(length, device=pos.device) <= pos, 0.0, -math.inf).to(dtype)[None]


def plain_attention(q, k, v, q_r=None, k_r=None, dropout=0.0, mask=None):
    """softmax(q k^T / sqrt(w)) v, causal, or given q_r, k_r the outer form of [2], (softmax(..) * (q_r v^T)) k_r: the definition. attention(),
    below class GPT, computes the same in less time or memory. q (B, h, T, w); k (B, h, S, w); v (B, h, S, any); q_r like q, k_r like k."""
    T, S = q.size(2), k.size(2)                                                          # the queries are the last T of S positions
    scores = q @ k.mT * q.size(-1) ** -0.5                                               # (B, h, T, S)
    if T > 1:                                                                            # a single query sees every key
        scores = scores.masked_fill(q.new_ones(T, S, dtype=torch.bool).triu(S - T + 1), -math.inf)
    scores = scores if mask is None else scores + mask
    P = F.dropout(scores.softmax(-1, dtype=scores.dtype), dropout)
    return P @ v if q_r is None else (P * (q_r @ v.mT)) @ k_r                            # (B, h, T, width of v or k_r)


class Attention(nn.Module):
    """Causal attention. config.attn chooses how: multi-head attention, or Dynamic Value Attention [2] in its two forms or one of ours.
    config.attn_out chooses what stands in the place of the output projection W_O, see forward(); [2] has none. Vectors are rows. B is the
    query's position, A the key's (in shapes B is the batch), S = softmax(Q K^T / sqrt(d_h)). Query B gets the sum over A of S(B, A) v_R(B, A):

        mha        v_R(B, A) = v(A), the same for every query: the sum is S V
        dva        v_R(B, A) = v(A) + r(B, A), r(B, A) = q_R(B) * k_R(A), elementwise [2, eq. 6-8]. q_R(B) does not depend on A:
                   sum_A S(B, A) (v(A) + q_R(B) * k_R(A)) = S V + Q_R * (S K_R)                one attention with values [V, K_R]
        dva_outer  v_R(B, A) = v(A) r(B, A), r(B, A) = q_R(B)^T k_R(A), a matrix of rank one [2, eq. 3-5], so that
                   v(A) r(B, A) = (v(A) . q_R(B)) k_R(A), and the sum is (S * (Q_R V^T)) K_R   no d x d matrix for any pair
        dva_gate   dva with k_R(A) = v(A), a control that [2] lacks: the sum is S V + Q_R * (S V), an elementwise gate (1 + Q_R) on S V

    Rotary positions turn Q and K only; [2] has learned positions.
    """

    def __init__(self, config):
        super().__init__()
        d, self.n_head = config.n_embd, config.n_head
        self.kind = config.attn
        self.attn_out = config.attn_out if self.kind == "mha" else "none"                # [2] has no output projection
        if self.kind == "mha":
            self.c_attn = nn.Linear(d, 3 * d, bias=config.bias and config.qkv_bias)  # W_Q, W_K, W_V
        else:
            self.c_attn = nn.Linear(d, (4 if self.kind == "dva_gate" else 5) * d, bias=False)  # W_Q, W_K, W_V, (W_KR,) W_QR
        if self.attn_out == "dense":
            self.c_proj = nn.Linear(d, d, bias=config.bias)  # W_O
        elif self.attn_out != "none":
            self.alpha = nn.Parameter(torch.ones(d))         # GPT.init_weights starts it lower
            self.beta = nn.Parameter(torch.zeros(d))
        self.one_pass = False                                # whether one kernel of a GPU also adds the residual and takes the next norm
        if self.attn_out in ("hadamard", "head_hadamard"):
            heads_only = self.attn_out == "head_hadamard"
            self.order = config.n_head if heads_only else hadamard_heads(config)         # h of H_d = H_h (x) H_(d / h)
            self.one_pass = hadamard_norm_is_fused(d, self.order, heads_only)
        self.resid_dropout = Dropout(config.dropout)

    def attend(self, x, table=None, cache=None, at=None, mask=None):
        """x (B, T, d) -> Y = Concat(heads), (B, T, d), which W_O or its substitute takes. table: rope's cos and sin. cache: k
        (B, h, length, d_h) and v, as wide, or [V, K_R]. at: x's positions in it, a pair (start, stop) or, for one token with a mask
        (1, length), an int64 tensor (1,)."""
        B, T, d = x.shape
        qkv = self.c_attn(x)                                                             # (B, T, 3d to 5d)
        q, k, v, q_r = TurnedHeads.apply(qkv, *table, self.n_head) if turns(qkv, table) else heads(qkv, table, self.n_head, d)
        if cache is not None:  # keys and values of all tokens so far
            k, v = (extend(seen, new, at).to(q.dtype) for seen, new in zip(cache, (k, v)))
        p = self.resid_dropout.p if self.resid_dropout.training else 0.0
        if self.kind == "dva_outer":
            v, k_r = v.chunk(2, -1)
            y = attention(q, k, v, q_r, k_r, p, mask)                                    # (S * (Q_R V^T)) K_R
        else:
            y = attention(q, k, v, dropout=p, mask=mask)                                 # S V, or S [V, K_R]
        if self.kind == "dva":
            y, y_r = y.chunk(2, -1)
            y = torch.addcmul(y, q_r, y_r)                                               # S V + Q_R * (S K_R)
        elif self.kind == "dva_gate":
            y = torch.addcmul(y, q_r, y)                                                 # S V + Q_R * (S V)
        elif self.kind not in ("mha", "dva_outer"):
            raise NotImplementedError(f"nothing computes attn={self.kind}")
        return y.transpose(1, 2).reshape(B, T, d)                                        # Concat(heads)

    def forward(self, x, table=None, cache=None, at=None, mask=None):
        "x (B, T, d) -> (B, T, d); the rest as in attend(). What is done to y here, dropout apart, must be done in forward_and_norm(), too"
        y = self.attend(x, table, cache, at, mask)
        if self.attn_out == "dense":
            y = self.c_proj(y)                                                           # Y W_O
        elif self.attn_out == "hadamard":
            y = hadamard_affine(y, self.alpha, self.beta, self.order)                    # alpha * (Y H / sqrt(d)) + beta, [1, eq. 1]
        elif self.attn_out == "head_hadamard":
            y = hadamard_affine(y, self.alpha, self.beta, self.order, heads_only=True)   # alpha * (Y (H_h (x) I) / sqrt(h)) + beta
        elif self.attn_out == "identity":
            # alpha * Y + beta, the control without a mix: under autocast in 16 bits like any layer, while hadamard keeps alpha in fp32
            y = torch.addcmul(self.beta.to(y.dtype), y, self.alpha.to(y.dtype))
        elif self.attn_out != "none":
            raise NotImplementedError(f"nothing computes attn_out={self.attn_out}")
        return self.resid_dropout(y)

    def forward_and_norm(self, x, residual, norm, *where):
        "residual + forward(x, *where) and norm of that, by one kernel of a GPU: Block takes it for hadamard and head_hadamard if one_pass"
        y = self.attend(x, *where)
        return hadamard_affine_norm(y, self.alpha, self.beta, residual, norm.weight, getattr(norm, "bias", None), norm.eps,
                                    isinstance(norm, nn.RMSNorm), self.order, self.attn_out == "head_hadamard")


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        d, self.kind = config.n_embd, config.mlp
        hidden = 16 * math.ceil(8 * d / 3 / 16) if self.kind == "swiglu" else 4 * d  # [1] does not say: this gives its counts
        self.c_fc = nn.Linear(d, 2 * hidden if self.kind == "swiglu" else hidden, bias=config.bias)
        self.c_proj = nn.Linear(hidden, d, bias=config.bias)
        self.dropout = Dropout(config.dropout)

    def forward(self, x):
        "(B, T, d) -> (B, T, d)"
        x = self.c_fc(x)
        if self.kind == "swiglu":
            gate, up = x.chunk(2, -1)
            x = F.silu(gate) * up              # SwiGLU, arXiv:2002.05202
        elif self.kind == "gelu":
            x = F.gelu(x, approximate="tanh")  # as GPT-2 and the book; nanoGPT takes the exact one
        else:
            raise NotImplementedError(f"nothing computes mlp={self.kind}")
        return self.dropout(self.c_proj(x))


def untouched(module, *kinds):
    "Whether module is of one of kinds, without hooks of its own or another forward: only then may its formula stand in for its call"
    return type(module) in kinds and "forward" not in module.__dict__ and not (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = Attention(config)
        self.ln_2 = make_norm(config) if config.mlp != "none" else None
        self.mlp = MLP(config) if config.mlp != "none" else None

    def in_one_pass(self, x):
        "Whether one kernel of a GPU may take attn's end, the residual and ln_2: only if these are what it computes, and nothing is dropped"
        attn, norm = self.attn, self.ln_2
        return (x.is_cuda and untouched(attn, Attention) and attn.one_pass and untouched(attn.resid_dropout, Dropout)
                and not (attn.resid_dropout.training and attn.resid_dropout.p)
                and untouched(norm, nn.LayerNorm, nn.RMSNorm) and norm.weight is not None and norm.eps is not None)

    def forward(self, x, table=None, cache=None, at=None, mask=None):
        "x (B, T, d) -> (B, T, d); the rest as in Attention.attend"
        if self.mlp is None:
            return x + self.attn(self.ln_1(x), table, cache, at, mask)
        if self.in_one_pass(x):
            x, n = self.attn.forward_and_norm(self.ln_1(x), x, self.ln_2, table, cache, at, mask)
        else:
            x = x + self.attn(self.ln_1(x), table, cache, at, mask)
            n = self.ln_2(x)
        return x + self.mlp(n)


# -----------------------------------------------------------------------------
# GPT


class GPT(nn.Module):
    "Decoder-only transformer. ValueError on a configuration that makes no model: see check_config"

    def __init__(self, config):
        super().__init__()
        check_config(config)
        c = self.config = config
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.wpe = nn.Embedding(c.block_size, c.n_embd) if c.pos == "learned" else None
        self.drop = Dropout(c.dropout)
        self.h = nn.ModuleList([Block(c) for _ in range(c.n_layer)])
        self.ln_f = make_norm(c)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        if c.tie_weights:
            self.lm_head.weight = self.wte.weight
        if c.pos == "rope":
            for name, table in zip(("cos", "sin"), self.angles()):
                self.register_buffer(name, table, persistent=False)
        if c.init != "torch":  # else every module has initialised itself
            self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        "GPT-2's initialisation, all in one place. A parameter that no line below names is an error."
        # The 2L branches (without mlp L; the same factor) add up in the residual stream, so each starts smaller by this factor, but for
        # attention's where that ends in neither W_O nor alpha (dva, none)
        branch = (2 * self.config.n_layer) ** -0.5
        for name, p in self.named_parameters():
            if name.endswith(("beta", ".bias")):
                p.zero_()
            elif name.endswith("c_proj.weight"):
                p.normal_(0.0, 0.02 * branch)
            elif name.endswith("attn.alpha"):
                # The papers do not say. H keeps a vector's norm, and c_proj scales it by 0.02 sqrt(d) branch: with that as alpha the residual
                # stream starts as with dense. Tried instead: branch, whose loss ends 0.05 nats per byte above dense's, and 1, 0.1 (README)
                p.fill_(0.02 * len(p) ** 0.5 * branch)
            elif name.startswith(("wte", "wpe", "lm_head")) or name.endswith(("c_attn.weight", "c_fc.weight")):
                p.normal_(0.0, 0.02)
            elif ".ln_" in name or name.startswith("ln_f"):
                p.fill_(1.0)
            else:
                raise RuntimeError(f"nothing initialises {name}: add it to GPT.init_weights")

    def hidden(self, idx, cache=None, pos=0):
        """Tokens idx (B, T), the first at position pos -> final normalised states (B, T, d). pos: a number or, for one token with a cache,
        an int64 tensor (1,), so that all steps of generation run the same operations."""
        if idx.dim() != 2 or idx.size(1) == 0:
            raise ValueError(f"idx has shape {tuple(idx.shape)}: expected (B, T) with T of at least 1")
        T, x = idx.size(1), self.wte(idx)                                                # (B, T, d)
        if isinstance(pos, torch.Tensor):
            rows, at, mask = pos, pos, up_to(pos, cache[0][0].size(2), product_dtype(x))  # mask (1, positions)
        else:
            rows, at, mask = slice(pos, pos + T), (pos, pos + T), None  # at is a pair: given slices, torch 2.11 would compile blocks anew
            if pos < 0:
                raise ValueError(f"pos={pos}: expected 0 or more")
            if pos + T > self.config.block_size:
                raise ValueError(f"{pos + T} tokens, but block_size is {self.config.block_size}: crop idx, as generate() does")
        if self.wpe is not None:
            x = x + self.wpe.weight[rows]
        table = (self.cos[rows], self.sin[rows]) if self.config.pos == "rope" else None
        x = self.drop(x)
        for i, block in enumerate(self.h):
            x = block(x, table, cache[i] if cache is not None else None, at, mask)
        return self.ln_f(x)

    def forward(self, idx, targets=None, cache=None, pos=0):
        """idx (B, T) int64 -> logits (B, T, vocab_size) or, given targets (B, T), mean cross entropy in nats, fp32 or wider, over targets
        other than -100. cache (from new_cache) holds what attention needs of earlier tokens; idx then starts at position pos."""
        if targets is not None and targets.shape != idx.shape:
            raise ValueError(f"targets have shape {tuple(targets.shape)}: expected that of idx, {tuple(idx.shape)}")
        x = self.hidden(idx, cache, pos)
        if targets is None:
            return self.lm_head(x)
        # Put a training loss of your own under `if self.training`, as evaluate() reports what this returns. Change logits in lm_head, which
        # generate() calls, too
        plain = untouched(self.lm_head, nn.Linear) and self.lm_head.bias is None
        # an export would lose HeadLoss's backward pass; fp16's gradients need the loss scale, known only in backward
        if plain and not torch.compiler.is_exporting() and product_dtype(x) != torch.float16:
            return HeadLoss.apply(x.flatten(0, 1), self.lm_head.weight, targets.flatten(), torch.is_grad_enabled())
        return cross_entropy(self.lm_head(x), targets)

    def new_cache(self, batch, length=None):
        "Empty KV cache, for each layer: k (B, h, length, d_h) and v, as wide, or for dva and dva_outer [V, K_R], twice as wide"
        c, w = self.config, next(self.parameters())
        shape, d_h = (batch, c.n_head, length or c.block_size), c.n_embd // c.n_head
        return [tuple(torch.zeros(*shape, n, device=w.device, dtype=w.dtype) for n in (d_h, d_h if c.attn in ("mha", "dva_gate") else 2 * d_h))
                for _ in range(c.n_layer)]

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None, use_cache=True, report=None):
        """Append max_new_tokens sampled tokens to idx (B, T): (B, T + max_new_tokens). temperature 0 takes the likeliest token. Without a
        generator draws follow torch.manual_seed(), and each call repeats them: for other samples pass torch.Generator().manual_seed(n).
        When the window outgrows block_size tokens, only its last half is kept and read again: one pass over half a block for each half block of
        new tokens. use_cache=False recomputes the window for each token: the same but for rounding, slowly. On a GPU, model and draw are one
        CUDA graph, replayed for each token; one thread at a time. On a CPU it is faster under torch.inference_mode(). report(i), if given, is
        called before the i-th token, counted from 0."""
        size = self.config.block_size
        uniform = draws(max_new_tokens, temperature, idx, generator)
        start = done = max(0, idx.size(1) - size)  # the window is idx[:, start:], the first token at place 0; the cache holds it up to done
        cache = self.new_cache(len(idx), min(size, idx.size(1) + max_new_tokens)) if use_cache else None
        # a CUDA graph reads and writes fixed places: the last token, which the next one overwrites, its position, the draw
        new, at, u = idx[:, -1:].clone(), idx.new_empty(1), uniform.new_empty(len(idx), 1)
        stride = 256 if idx.is_cuda else 16  # a graph for every 256 positions: all but an UNTRIED kernel read even those that are masked

        @lru_cache(None)
        def step(length):  # -> a function: one token, against the cache's first length positions
            seen = [(k[:, :, :length], v[:, :, :length]) for k, v in cache]

            def work():
                x = self.hidden(new, seen, at)
                new.copy_(sample(self.lm_head(x[:, -1]), temperature, top_k, u))
            return captured(work, idx.device, [new])

        with evaluating(self):
            for i in range(max_new_tokens):
                if report:
                    report(i)
                if idx.size(1) - start > size:
                    start = done = idx.size(1) - max(1, size // 2)
                u.copy_(uniform[i])
                if use_cache and idx.size(1) - done == 1:
                    at.fill_(done - start)  # its place
                    step((done - start) // stride * stride + stride)()  # the next multiple of stride above that: few lengths, few graphs
                else:
                    x = self.hidden(idx[:, done:], cache, done - start)
                    new.copy_(sample(self.lm_head(x[:, -1]), temperature, top_k, u))
                done = idx.size(1) if use_cache else start
                idx = torch.cat((idx, new), 1)
        return idx

    def param_breakdown(self):
        "{part: parameters}; the parts sum to the total, a tied head is the token embedding's"
        return breakdown(self, {"wte.": "token embedding", "wpe.": "position embedding", ".c_attn.": "attention in",
                                ".attn.": "attention out", ".mlp.": "feed-forward", "ln_": "norms", "lm_head.": "head"})

    def num_params(self):
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, T=None):
        """Floating-point operations per token, forward and backward: 6 for each weight of a matrix product (the head counts; wte, wpe,
        vectors and the Hadamard transform's additions do not) and 6 T d for each of attention's T x T products (two; with K_R three), as if
        there were no causal mask, as is customary. A fixed matrix that is no Parameter is not counted: add 4 for each of its entries.
        PyTorch's FlopCounterMode finds less: it does not see the T x T products of blocked_attention."""
        c, T = self.config, T or self.config.block_size
        every = self.named_parameters(remove_duplicate=False)  # a tied head, and blocks that share weights
        weights = sum(p.numel() for n, p in every if p.dim() > 1 and not n.startswith(("wte", "wpe")))
        return 6 * weights + 6 * T * c.n_embd * (2 if c.attn in ("mha", "dva_gate") else 3) * c.n_layer

    def angles(self, device=None, dtype=None):
        return rope_table(self.config.block_size, self.config.n_embd // self.config.n_head, device, dtype or torch.get_default_dtype())

    def _apply(self, fn, recurse=True):
        """Called by .to(), .cuda() and the like. Afterwards the angles are made anew, as casts round them, and tied weights are tied again, as
        leaving the meta device makes each weight by itself. A head or an embedding that is not ours stays as it is."""
        cos, (head, embedding) = getattr(self, "cos", None), (getattr(m, "_parameters", {}) for m in (self.lm_head, self.wte))
        tied = embedding.get("weight") is not None and head.get("weight") is embedding["weight"]
        super()._apply(fn, recurse)
        if tied:
            head["weight"] = embedding["weight"]
        if cos is not None and self.cos is not cos:
            self.cos, self.sin = self.angles(self.cos.device, self.cos.dtype)
        return self


@torch.no_grad()
def fold_hadamard(model):
    """A trained `hadamard` model -> an equal `head_hadamard` model (a new GPT on the same device). ValueError for any other, or
    where c_attn is more than a weight and a bias.

    H_d = (H_h (x) I)(I (x) H_(d_h)), and the second factor acts inside each head. Head i's attention weights A_i mix over time
    only, so A_i (X W_V,i) H_(d_h) = A_i (X (W_V,i H_(d_h))): multiplied into W_V and its bias once, it costs nothing any more."""
    c = model.config
    if c.attn_out != "hadamard" or hadamard_heads(c) != c.n_head:
        raise ValueError(f"fold_hadamard takes attn_out='hadamard' with a head count and head width that are Hadamard orders; got "
                         f"attn_out={c.attn_out!r}, {c.n_head} heads of {c.n_embd // c.n_head}")
    folded = copy.deepcopy(getattr(model, "_orig_mod", model))  # within torch.compile()'s wrapper
    folded.config = replace(c, attn_out="head_hadamard")
    d_h = c.n_embd // c.n_head
    H = hadamard_matrix(d_h, torch.float64, "cpu") * d_h ** -0.5  # on the CPU, as Apple's GPUs have no fp64
    for attn in (block.attn for block in folded.h):
        attn.attn_out, attn.one_pass = "head_hadamard", hadamard_norm_is_fused(c.n_embd, c.n_head, True)
        names = set(dict(attn.c_attn.named_parameters()))
        if not {"weight"} <= names <= {"weight", "bias"}:  # weight_norm, LoRA, int8: another W_V than it seems
            raise ValueError(f"fold_hadamard multiplies c_attn's weight and bias, and one has {sorted(names)}: turn it into an nn.Linear first")
    for p in {p for block in folded.h for p in block.attn.c_attn.parameters()}:  # a set, as blocks may share them
        v = p[2 * c.n_embd:]  # of weight (3d, d) and bias (3d,) the last d rows are V's
        # rows of a Linear's weight are its outputs: it holds W_V^T, and (W_V H)^T = H W_V^T, as H is symmetric
        v.copy_((H @ v.cpu().double().view(c.n_head, d_h, -1)).view_as(v))
    return folded


# -----------------------------------------------------------------------------
# What computes attention and dropout, in less time or memory than their definitions take


def product_dtype(x):
    "The dtype that a matrix product of x is computed in: autocast's, where that is on"
    device = x.device.type
    on = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on and x.dtype != torch.float64 else x.dtype


def keep_mask(x, p, generator=None):
    "1 where dropout keeps x, with probability 1 - p, else 0: of x's shape, dtype and device"
    if x.device.type != "cpu" or not 0.01 < p < 0.99:  # 16 bits, below, hardly tell other p apart
        return x.new_empty(x.shape).bernoulli_(1 - p, generator=generator)
    bits = torch.empty(x.numel() // 4 + 1, dtype=torch.int64, device="cpu").random_(-2**63, None, generator=generator)  # 64 bits make 4 x 16
    keep = bits.view(torch.int16)[:x.numel()].ge_(round(p * 2**16) - 2**15)  # from [-2^15, 2^15) to 0 or 1, in place: 7 times as fast as to bool
    return keep.view(x.shape).to(x.dtype)


# Query rows of a block in blocked_attention. A GPU takes four times as many: fewer launches, and fewer additions to the gradients of k and v.
# A CPU in 16 bits, where each product copies k or v to a new layout, takes twice as many for wide heads: 0.6 to 0.8 of the time with matrix
# units, 0.94 to 1.07 without
BLOCK_ROWS = 128


def query_blocks(q, k):
    "[(first row, end)] of each block. All but the last end at a multiple of 8 keys: a GPU's fast 16-bit products want 16-byte multiples"
    T = q.size(1)
    step = BLOCK_ROWS * (4 if q.device.type != "cpu" else 2 if q.element_size() == 2 and q.size(-1) > 64 else 1)
    cuts = [0, *range(step - (k.size(1) - T) % 8, T, step), T]
    return list(zip(cuts, cuts[1:]))


def causal_weights(q, k, dropout, seed, i):
    """P = softmax(q k^T / sqrt(w)), causal, (N, t, n), of a block q (N, t, w) of query rows, from row i on, which are the last t of the n
    positions of k (N, n, w). Weights that dropout drops are stored negated: P.relu() has those that stay, P.abs() all."""
    t, n = q.size(1), k.size(1)
    scores = torch.bmm(q * q.size(-1) ** -0.5, k.mT)                                     # (N, t, n)
    later = q.new_full((t, t), -math.inf).triu_(1)
    scores[:, :, n - t:].tril_().add_(later)  # a later key's score, even a NaN: 0, then -inf; twice as fast as masked_fill_ on a CPU
    P = scores.softmax(-1, dtype=scores.dtype)  # named, or autocast on a GPU would write it in fp32
    if dropout:  # the same draws again, should backward compute P anew
        generator = None if seed is None else torch.Generator(q.device).manual_seed(seed.item() + i)
        P.copysign_(keep_mask(P, dropout, generator).sub_(0.5))  # one tensor holds both weights and mask
    return P


def empty_attention(q, k, q_r, v, k_r, all_k, all_v, seed, dropout, keep):
    "_operator's fake of blocked_attention"
    k = k if all_k is None else all_k
    Ps = [q.new_empty(q.size(0), e - i, e + k.size(1) - q.size(1)) for i, e in query_blocks(q, k)] if keep else []
    return q.new_empty(*q.shape[:2], (v if k_r is None else k_r).size(-1)), Ps


def empty_gradients(g, q, k, q_r, v, k_r, all_k, all_v, seed, dropout, Ps):
    dk, dv = (torch.empty_like(t) if all_k is None else t.new_empty(t.shape) for t in (k, v))
    return [torch.empty_like(q), dk, dv] + ([] if q_r is None else [torch.empty_like(q_r), torch.empty_like(k_r)])


@_operator("blocked_attention", empty_attention)
def blocked_attention(q: torch.Tensor, k: torch.Tensor, q_r: torch.Tensor | None, v: torch.Tensor, k_r: torch.Tensor | None,
                      all_k: torch.Tensor | None, all_v: torch.Tensor | None, seed: torch.Tensor | None, dropout: float,
                      keep: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Causal attention by blocks of query rows, each against the keys up to its own last: half the products of a full T x T. With
    P = softmax(q k^T / sqrt(w)), causal, and its dropout:
        q_r is None    out = P v                         v of any width
        else           out = (P * (q_r v^T)) k_r         the outer form of [2]: one more T x T product, and nothing larger
    N = batch * heads. q (N, T, w), the last T of S positions; k (N, S, w); v (N, S, any); q_r, k_r: None, or like q and k, with v like k. Where
    the first rows are a memory that gets no gradient, all_k and all_v (else None; not with q_r) hold all S rows, and k, v their last ones, which
    get one. seed: dropout's, () int64 on the CPU, drawn by the caller so that a repeated forward pass gets the same one; None: no dropout, or
    the GPU's generator. keep: return each block's P as the second output, for the backward pass; otherwise that recomputes it, and memory is
    linear in T. In 16 bits scores are rounded, where PyTorch's fused operator keeps fp32: errors are 2 times as large if scores have standard
    deviation 1, 7 if 9."""
    k, v = (k, v) if all_k is None else (all_k, all_v)                                   # all rows
    out, Ps = q.new_empty(*q.shape[:2], (v if k_r is None else k_r).size(-1)), []
    for i, e in query_blocks(q, k):
        n = e + k.size(1) - q.size(1)                                                    # keys up to row e - 1's own
        P = causal_weights(q[:, i:e], k[:, :n], dropout, seed, i)                        # (N, e - i, n)
        Ps += [P] if keep else []
        W = P.relu() if dropout else P                                                   # its scale, 1 / (1 - p), comes last
        W = W if q_r is None else torch.bmm(q_r[:, i:e], v[:, :n].mT).mul_(W)
        torch.mul(torch.bmm(W, (v if q_r is None else k_r)[:, :n]), 1 / (1 - dropout), out=out[:, i:e])
    return out, Ps


@_operator("blocked_attention_backward", empty_gradients)
def blocked_attention_backward(g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, q_r: torch.Tensor | None, v: torch.Tensor,
                               k_r: torch.Tensor | None, all_k: torch.Tensor | None, all_v: torch.Tensor | None, seed: torch.Tensor | None,
                               dropout: float, Ps: list[torch.Tensor]) -> list[torch.Tensor]:
    "g (N, T, width of out), out's gradient -> those of q, k, v, and of q_r, k_r if given"
    empty = torch.empty_like if q.device.type != "mps" else torch.zeros_like  # MPS keeps NaN if beta=0 (pytorch/pytorch, issue 194442)
    own = k.size(1)
    k, v = (k, v) if all_k is None else (all_k, all_v)
    past = (k.size(1) - own) // 8 * 8  # earlier rows get no gradient; up to 7 get one in vain: products want multiples of 8, see query_blocks
    dq, dk, dv = map(empty, (q, k[:, past:], v[:, past:]))
    if q_r is not None:
        dq_r, dk_r = empty(q_r), empty(k_r)
    scale, blocks = 1 / (1 - dropout), query_blocks(q, k)  # all gradients are linear in g: its scale, dropout's, is left to the last products
    for (i, e), P in reversed(list(zip(blocks, Ps or [None] * len(blocks)))):
        beta = int(e < q.size(1))  # 0: overwrite, 1: add. The last block, which sees all keys, comes first and overwrites
        n = e + k.size(1) - q.size(1)
        P = causal_weights(q[:, i:e], k[:, :n], dropout, seed, i) if P is None else P
        W = P.relu() if dropout else P                                                   # (N, e - i, n), as are G, dWG, dG, dP
        if q_r is None:
            dv[:, :n - past].baddbmm_(W[:, :, past:].mT, g[:, i:e], beta=beta, alpha=scale)
            dP = torch.bmm(g[:, i:e], v[:, :n].mT)
        else:
            G = torch.bmm(q_r[:, i:e], v[:, :n].mT)                                      # Q_R V^T: the output is (W * G) K_R
            dWG = torch.bmm(g[:, i:e], k_r[:, :n].mT)
            dk_r[:, :n].baddbmm_((W * G).mT, g[:, i:e], beta=beta, alpha=scale)
            dG = dWG * W
            dq_r[:, i:e].baddbmm_(dG, v[:, :n], beta=0, alpha=scale)
            dv[:, :n].baddbmm_(dG.mT, q_r[:, i:e], beta=beta, alpha=scale)
            dP = dWG.mul_(G)
        if dropout:
            dP, P = torch.ops.aten.threshold_backward(dP, P, 0), P.abs()                 # 0 where P is negative
        dscores = torch._softmax_backward_data(dP, P, -1, P.dtype)  # P * (dP - sum over keys of P * dP), in one pass
        dq[:, i:e].baddbmm_(dscores, k[:, :n], beta=0, alpha=scale * q.size(-1) ** -0.5)
        dk[:, :n - past].baddbmm_(dscores[:, :, past:].mT, q[:, i:e], beta=beta, alpha=scale * q.size(-1) ** -0.5)
    if all_k is not None:
        dk, dv = (t[:, t.size(1) - own:].contiguous() for t in (dk, dv))
    return [dq, dk, dv] + ([] if q_r is None else [dq_r, dk_r])


def save_attention(ctx, inputs, output):
    *tensors, ctx.dropout, _ = inputs
    ctx.set_materialize_grads(False)  # no zeros for Ps, which nothing differentiates
    ctx.save_for_backward(*tensors, *output[1])


def attention_gradients(ctx, g, _):
    if g is None:
        return (None,) * 10
    q, k, q_r, v, k_r, all_k, all_v, seed, *Ps = ctx.saved_tensors
    with torch._C._DisableAutocast():  # may be on though it was off in forward, and would cast some products
        dq, dk, dv, *more = blocked_attention_backward(g, q, k, q_r, v, k_r, all_k, all_v, seed, ctx.dropout, Ps)
    dq_r, dk_r = more or (None, None)
    return dq, dk, dq_r, dv, dk_r, None, None, None, None, None


blocked_attention.register_autograd(attention_gradients, setup_context=save_attention)
blocked_attention_backward.register_autograd(_once("attention"))


def fused_fits(width, values, outer):
    "Whether PyTorch's fused operator has fast kernels for queries of this width and values of that, with gradients too; not for the outer form"
    return not outer and max(width, values) <= 256


def check_attention(q, k, v, q_r, k_r, dropout, mask, new):
    "ValueError unless these are what attention() takes"
    if not 0 <= dropout < 1:
        raise ValueError(f"attention: dropout={dropout}: expected 0 to below 1")
    fits = (q.dim() == k.dim() == v.dim() == 4 and q.shape[:2] == k.shape[:2] == v.shape[:2] and q.size(3) == k.size(3)
            and q.size(2) <= k.size(2) == v.size(2)
            and (mask is None or mask.is_floating_point() and (q.size(2), *mask.shape) == (1, 1, k.size(2)))
            and (q_r is None) == (k_r is None) and (q_r is None or (q_r.shape, k_r.shape, v.shape) == (q.shape, k.shape, k.shape))
            and (new is None or q_r is mask is None and q.size(2) <= new[0].size(2) == new[1].size(2) <= k.size(2)
                 and all((*a.shape[:2], *a.shape[3:]) == (*b.shape[:2], *b.shape[3:]) for a, b in zip(new, (k, v)))))
    if not fits:
        given = dict(q=q, k=k, v=v, q_r=q_r, k_r=k_r, mask=mask) | dict(zip(("k'", "v'"), new or ()))
        raise ValueError("attention: expected q (B, h, T, w), k (B, h, S, w), v (B, h, S, any), S >= T; with q_r and k_r those like q and "
                         "k, v like k; a mask goes with one query, (1, S) of floats; new without these, as k and v but for S; got "
                         + ", ".join(f"{n} {tuple(t.shape)}" for n, t in given.items() if t is not None))
    _check_devices("attention", *(t for t in (q, k, v, q_r, k_r, *(new or ())) if t is not None))


def attention(q, k, v, q_r=None, k_r=None, dropout=0.0, mask=None, new=None):
    """softmax(q k^T / sqrt(w)) v, always causal, or given q_r and k_r the outer form (softmax(..) * (q_r v^T)) k_r. All are (B, h, T, w); v may
    have any width without q_r; k, v, k_r may hold S >= T positions, the last T being the queries' own. Returns (B, h, T, width of v or k_r), in
    autocast's dtype if that is on. A single query (T = 1) may have a mask (1, S) in q's dtype: 0 where it may look, -inf elsewhere.
    new = (k', v'), for a memory that needs no gradient, repeats the last rows of k and v, which alone get one; not with q_r or mask.
    dropout is always applied: pass 0 in evaluation. ValueError for other shapes. Way 1 below is differentiable once, in reverse mode."""
    check_attention(q, k, v, q_r, k_r, dropout, mask, new)
    T, S = q.size(2), k.size(2)
    # new matters to gradients alone. But with dropout checkpointing's pass without them must go the same way, or it would draw other masks
    new = new if torch.is_grad_enabled() or dropout else None
    # Three ways to the same result. Way 3 is the definition; the other two take less time or memory:
    # 1. Blocks of query rows. Given new, and for T > 1: over a memory (T < S); on a CPU wherever way 2 is not taken; on a GPU where way 2 does
    #    not fit (heads or values above 256, the outer form) and q k^T is larger than v. On an H200, forward and backward in bf16, B 16, T 1024,
    #    one head of 768 with values of 1,536, blocks take 0.96 ms, way 3 the same, PyTorch's operator 8.7.
    # 2. PyTorch's fused operator (`fused` below), not for the outer form. On a CPU, for T > 1: any width, if v is as wide as q and there are no
    #    gradients and no dropout (forward takes 0.8 to 1.0 of blocks' time in fp32, 0.3 to 0.6 in bf16; with backward it would take, in bf16,
    #    1.4 to 1.7 at T = 256, 0.9 at 1024). Elsewhere: heads and values up to 256. On a GPU one query without gradients or dropout asks
    #    kernels.py's one_query_attention, which takes the same operator unless kernels.UNTRIED.
    # 3. q k^T whole, in plain operations, for the rest: torch.compile makes 3 launches forward and 5 backward of it, but 13 and 18 of each block
    #    with dropout. For T = 1 and heads too wide for way 2 a fused kernel would have one multiprocessor read all of k and v.
    on_cpu = q.device.type == "cpu"
    if on_cpu and T > 1:
        fused = q_r is None and q.size(-1) == v.size(-1) and not dropout and not torch.is_grad_enabled()
    else:
        # on mps, up to torch 2.11, the operator gives rows as wide as q's (pytorch/pytorch, issue 176767)
        fused = fused_fits(q.size(-1), v.size(-1), q_r is not None) and (q.device.type != "mps" or q.size(-1) == v.size(-1))
    if new is not None or T > 1 and (T < S or not fused and (on_cpu or T > v.size(-1))):  # way 1
        _reverse_mode_only("attention")
        own_k, own_v = new or (k, v)                                                     # the rows that get a gradient
        all_k, all_v = (None, None) if new is None else (k.detach(), v.detach())         # memory and window, without one
        # autocast's dtype, as PyTorch's operator does
        flat = [None if t is None else t.flatten(0, 1).to(product_dtype(t)) for t in (q, own_k, q_r, own_v, k_r, all_k, all_v)]
        # Keep P if q k^T is at most twice as large as q, k, v and the output together, counting T = S queries (P, causal, is half of it): on a
        # CPU 1.1 to 1.3 times as fast, both passes. Not when compiled: the list of blocks would fix T in the code. Always in a CUDA graph, as
        # only the GPU's generator draws anew at each replay, and so over a memory on a GPU, where steps must draw the same with and without it
        keep = not torch.compiler.is_compiling() and (
            S <= 4 * (q.size(-1) + v.size(-1)) or q.is_cuda and (T < S or torch.cuda.is_current_stream_capturing()))
        # with and without gradients alike: reentrant checkpointing runs forward once in each way
        seed = torch.randint(2**40, (), device="cpu") if dropout and not (keep and q.is_cuda) else None
        return blocked_attention(*flat, seed, dropout, keep and torch.is_grad_enabled())[0].unflatten(0, q.shape[:2])
    if fused and T == 1 and q.is_cuda and not dropout and not torch.is_grad_enabled():  # way 2
        return one_query_attention(*(t.to(product_dtype(t)) for t in (q, k, v)), mask)
    if fused:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=True if T > 1 else False)  # T > 1 is no bool under torch.compile
    return plain_attention(q, k, v, q_r, k_r, dropout, mask)  # way 3


# -----------------------------------------------------------------------------
# The loss: GPT's by slices; and what GPT and SHAQ share: counts, evaluation, sampling, CUDA graphs


HEAD_LOGITS = 2**26  # that HeadLoss holds at a time, on a GPU four times as many; a global, as torch.compile reads no Function's attribute


class HeadLoss(torch.autograd.Function):
    """Mean cross entropy, in nats, of softmax(x W^T): x (N, d), weight (V, d), targets (N,) int64 -> scalar, fp32 or wider. Targets of -100
    do not count, as in F.cross_entropy. may_backward: whether backward may follow, which forward itself cannot see. Not for fp16 with gradients.

    Takes x in slices of rows and computes each slice's gradients along with its logits: at most HEAD_LOGITS (see above) of the N x V logits
    exist at a time. The plain way keeps all, twice in 16 bits and twice in fp32: 40 GB for 65,536 tokens of GPT-2's vocabulary."""
    @staticmethod
    def forward(ctx, x, weight, targets, may_backward):
        if x.dim() != 2 or weight.shape[1:] != x.shape[1:] or targets.shape != x.shape[:1]:  # one target would count for all rows
            raise ValueError(f"HeadLoss: x {tuple(x.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}: expected (N, d), "
                             "(V, d), (N,)")
        dtype = product_dtype(x)
        n = max(1, HEAD_LOGITS * (1 if x.device.type == "cpu" else 4) // len(weight))    # rows of a slice
        x_, w_, valid = x.to(dtype), weight.to(dtype), targets != -100
        targets, count = targets.masked_fill(~valid, 0), valid.sum()
        at_least_1 = count.clamp(min=1)  # where no target counts the loss is nan and the gradients are 0
        of_x, of_w = (may_backward and needed for needed in ctx.needs_input_grad[:2])
        grads = of_x or of_w
        if grads and dtype == torch.float16:  # made before the loss is scaled: of 32,768 rows, V 2,000, they were 15% off
            raise TypeError("HeadLoss: its gradients do not fit fp16: take F.cross_entropy((x @ W.T).float(), ..), or bfloat16")
        dx = torch.empty_like(x_) if of_x else None
        loss, dw = 0.0, None
        for i in range(0, max(1, len(x)), n):  # once for no rows, too, which have a dw of zeros
            rows = x_[i:i + n]                                                           # (n, d)
            logits = rows @ w_.T                                                         # (n, V)
            logits = logits if dtype == torch.float64 else logits.float()
            target, counts = targets[i:i + n, None], valid[i:i + n, None]                # (n, 1)
            top = logits.amax(-1, keepdim=True)
            own = logits.gather(1, target) - top                                         # the target's, at most 0
            share = counts.to(logits.dtype) / at_least_1                                 # 1 / count, or 0
            # loss = lse - own, lse = logsumexp(logits - top); dlogits = (softmax(logits) - one-hot(target)) * share.
            # Were top added back to both, rounding would put a loss of 1e-3 off by 0.1% at logits of 20.
            if torch.compiler.is_compiling():  # one kernel each, that reads logits; a scatter would write and read all dlogits in fp32
                lse = (logits - top).exp_().sum(-1, keepdim=True).log_()
                own_column = target.int() == torch.arange(len(weight), dtype=torch.int32, device=x.device)  # int64 would take twice as long
                dlogits = ((logits - top - lse).exp() - own_column.to(logits.dtype)) * share
            else:  # in place: no second n x V numbers, and each e^x once
                dlogits = logits.sub_(top).exp_()
                total = dlogits.sum(-1, keepdim=True)
                lse = total.log()
                dlogits = dlogits.mul_(share / total).scatter_add_(1, target, -share) if grads else None
            loss = loss + (lse - own).masked_fill(~counts, 0).sum()
            if grads:
                dlogits = dlogits.to(dtype)
            if of_x:
                torch.mm(dlogits, w_, out=dx[i:i + n])
            if of_w:
                part = (dlogits.T @ rows).to(logits.dtype)                               # of several slices summed in fp32
                dw = part if dw is None else dw.add_(part)
            del logits, dlogits  # or they would live beside the next slice's
        if grads:
            ctx.save_for_backward(dx, dw)
            ctx.dtypes, ctx.leaf = (x.dtype, weight.dtype), not torch.compiler.is_compiling() and weight.is_leaf
        return loss / count

    @staticmethod
    def backward(ctx, g):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # once_differentiable would let a gradient pass for a constant
            raise NotImplementedError("HeadLoss is differentiable once, and create_graph=True asks for more: take F.cross_entropy(x @ W.T, ..)")
        if not (saved := ctx.saved_tensors):  # read once, as checkpointing wants
            raise RuntimeError("HeadLoss: may_backward=False promised that no backward pass would follow: pass torch.is_grad_enabled()")
        one = False
        if g.device.type == "cpu" and not torch.compiler.is_compiling():
            with contextlib.suppress(RuntimeError):  # a fake tensor's, or under vmap
                one = g.item() == 1  # as is usual; it spares a pass over all of dw
        # but for a leaf's, never the saved tensor: autograd could make it the .grad of the leaf that x or weight is a view of, and write to it
        keep = saved[1] if one and ctx.leaf else None
        dx, dw = (t if t is None or t is keep else t.to(torch.promote_types(t.dtype, torch.float32)) * g for t in saved)
        return *(t if t is None else t.to(dtype) for t, dtype in zip((dx, dw), ctx.dtypes)), None, None


def cross_entropy(logits, targets):
    "Mean over targets (B, T) that are not -100, in nats, of logits (B, T, V); in fp32 or wider"
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1), targets.flatten().long())


def breakdown(model, parts):
    "{part: parameters}. parts: {word: part}; a parameter belongs to the first whose word is in its name, else to the part 'other'"
    counts = dict.fromkeys([*parts.values(), "other"], 0)
    for name, p in model.named_parameters():
        counts[next((part for word, part in parts.items() if word in name), "other")] += p.numel()
    return {part: n for part, n in counts.items() if n}


@contextlib.contextmanager
def evaluating(model):
    "Neither dropout nor gradients inside; each part's mode comes back, also after an error"
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


def sample(logits, temperature, top_k, u):
    """Draw one token per row of logits (B, V), finite or -inf, with u (B, 1), uniform in [0, 1) -> (B, 1). top_k: only from the k likeliest and
    ties with the last of them. In fp64, so that the draw does not depend on a sum's last bits; on the CPU for Apple's GPUs, which have none.
    ValueError for a temperature that is negative or not finite, or a negative top_k."""
    if not 0 <= temperature < math.inf or (top_k or 0) < 0:
        raise ValueError(f"temperature={temperature}, top_k={top_k}: expected a finite temperature >= 0 and top_k >= 0")
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    device, logits = logits.device, logits.to(u.device).double()
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # the likeliest stays at 0, however small the temperature
    if top_k:
        least = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    cdf = logits.softmax(-1).cumsum(-1)
    return torch.searchsorted(cdf, u * cdf[:, -1:], right=True).clamp_(max=logits.size(-1) - 1).to(device)


def draws(n, temperature, idx, generator):
    """sample()'s u for n tokens, (n, B, 1), drawn at once: drawing each when needed would make a GPU wait for the CPU at every token.
    Zeros, not drawn, at temperature 0. Without a generator it makes one, as sampling must not change a training run: a copy of the
    global one as torch.manual_seed() left it."""
    generator = generator or torch.Generator().manual_seed(torch.initial_seed())
    if n < 0 or idx.dim() != 2 or not idx.size(1):
        raise ValueError(f"{n} tokens after a prompt of shape {tuple(idx.shape)}: expected 0 or more after 1 or more, (B, T)")
    u = torch.zeros(n, len(idx), 1, dtype=torch.float64, device=generator.device)
    return (u.uniform_(generator=generator) if temperature else u).to(idx.device if idx.is_cuda else "cpu")


@lru_cache(None)
def side_stream(device, step):
    """The stream to record graphs on. Training steps have their own: from torch 2.12 on, a graph that is freed takes its stream's cuBLAS
    workspace with it, though other graphs recorded there still use it (pytorch/pytorch, issue 193402)"""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def beside(device, step=True):
    """On a GPU, run the body on the stream where captured() records, of training steps unless step=False: autograd has to add to a gradient
    on the stream where it first did"""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        now, side = torch.cuda.current_stream(), side_stream(torch.cuda.current_device(), step)
        side.wait_stream(now)
        try:
            with torch.cuda.stream(side):
                yield side
        finally:  # after an error, too: captured() then restores tensors that side's kernels may still be writing
            now.wait_stream(side)


def captured(work, device, keep=(), pool=None):
    """Record work() as one CUDA graph -> a function that replays it; on other devices, work itself. work takes no arguments and leaves its
    results in tensors that stay where they are. It must run once before it is recorded: the tensors in keep are restored afterwards.
    pool: the memory that all graphs of training steps share (torch.cuda.graph_pool_handle())."""
    if device.type != "cuda":
        return work
    with torch.cuda.device(device):
        # detached: else autograd might take this for a parameter's first use and from then on add up its gradient on this stream, not on side
        before, graph, collects = [t.detach().clone() for t in keep], torch.cuda.CUDAGraph(), gc.isenabled()
        handled, now = sys.exc_info()[1], torch.cuda.current_stream()
        try:
            with beside(device, pool is not None) as side:
                work()
            gc.collect()  # collecting a graph or a Triton kernel while this records would end the recording (pytorch/pytorch, issue 161037)
            gc.disable()
            # records, runs nothing; another thread, such as one that pins a DataLoader's batches, may go on with what it does
            with torch.cuda.graph(graph, pool, side, capture_error_mode="thread_local"):
                work()
        except RuntimeError as e:
            if isinstance(e.__context__, torch.OutOfMemoryError) and e.__context__ is not handled:  # then ending the graph failed, too
                raise e.__context__
            raise
        finally:
            torch.cuda.set_stream(now)  # a recording whose end fails leaves its own
            if collects:
                gc.enable()
            for t, b in zip(keep, before):
                t.detach().copy_(b)
    return graph.replay


# -----------------------------------------------------------------------------
# SHA-RNN (Merity, arXiv:1911.11423), its ablations, and SHAQ (Bharwani et al.). Bytes -> embedding -> blocks of
# recurrence [-> attention over memory] [-> Boom] -> decoder tied to the embedding. Equations are the SHAQ paper's.
#
# The state of a stream (recurrent state and memory of each block) is a plain value that goes in and comes out:
#     loss, state = model(x, y, detach_state(state))
# Attention has no projection for keys and values, and no positional signal: order comes from the recurrence. Its memory holds the recurrence's
# outputs, as in the published code of SHA-RNN; section 4.2 speaks of cell states.


@dataclass
class SHAQConfig:
    """The defaults are SHA-RNN at full size; SHAQ_PRESETS holds what each experiment of the paper changes. A smaller model is the same preset
    with a smaller width: SHAQConfig(**SHAQ_PRESETS["shaq"], n_embd=192)."""
    vocab_size: int = 205           # distinct byte values of enwik8; train_shaq.py takes all 256, 51 rows of the embedding more
    n_layer: int = 4
    n_head: int = 1
    n_embd: int = 1024
    rnn: str = "lstm"               # lstm | qrnn
    qrnn_window: int = 2            # width of the QRNN's causal convolution
    rnn_residual: bool = False      # h + rnn(h) in SHAQ, rnn(h) in SHA-RNN as published
    attn_layers: tuple = (3,)       # blocks that attend, counted from 1 as in Table 2; () for none
    gates: bool = True              # Q_s, K_s, V_s of section 4.2 (and the overparametrised V_s of the published code)
    memory: str = "full"            # full | mean (eq. 1-4) | none
    mem_len: int = 5000             # positions of the past that a block may hold
    mean_window: int = 1024         # p of eq. 1-3: length of memory=mean's windows, and of the pieces in which any model reads prompts
    ff: str = "boom"                # boom | ffn | none
    dropout: float = 0.1

    def __post_init__(self):
        layers = self.attn_layers
        self.attn_layers = tuple(sorted({layers} if isinstance(layers, int) else set(layers)))
        for ok, message in (
            (self.rnn in ("lstm", "qrnn"), f"rnn={self.rnn}: expected lstm or qrnn"),
            (self.memory in ("full", "mean", "none"), f"memory={self.memory}: expected full, mean or none"),
            (self.ff in ("boom", "ffn", "none"), f"ff={self.ff}: expected boom, ffn or none"),
            (min(self.vocab_size, self.n_layer, self.n_embd, self.qrnn_window, self.mean_window) >= 1,
             "vocab_size, n_layer, n_embd, qrnn_window and mean_window: expected at least 1 each"),
            (self.n_head >= 1 and self.n_embd % self.n_head == 0,
             f"n_embd={self.n_embd} does not divide into n_head={self.n_head} heads"),
            (all(isinstance(i, int) and 1 <= i <= self.n_layer for i in self.attn_layers),
             f"attn_layers={self.attn_layers}: expected block numbers from 1 to n_layer={self.n_layer}, such as "
             f"--attn_layers={self.n_layer}, or () (--attn_layers=none)"),
            (self.mem_len >= 0, f"mem_len={self.mem_len}: expected 0 or more positions"),
            (self.memory != "mean" or self.mem_len > self.mean_window,
             f"memory=mean: expected mem_len={self.mem_len} above mean_window={self.mean_window}, which is --bptt in train_shaq.py"),
            (0 <= self.dropout < 1, f"dropout={self.dropout}: expected a value in [0, 1)"),
        ):
            if not ok:
                raise ValueError(message)


# To add a variant: a field of SHAQConfig, off by default; a branch in SHAQBlock; a flag in train_shaq.py's parse(). bench.py compare takes it as
# --variant preset=shaq,name=value. The presets below are the paper's
SHAQ_PRESETS = {                                                        # parameters at d = 1024, V = 205    paper
    "sharnn": dict(),                                                   # 53,773,517                         54M
    "no_boom": dict(ff="none"),                                         # 36,963,533                         37M
    "ffn": dict(ff="ffn"),                                              # 70,554,829                         71M
    "qrnn": dict(rnn="qrnn"),                                           # 45,364,429                         45M
    "mean_mem": dict(memory="mean"),                                    # 53,773,517                         53M (*)
    "no_gates": dict(gates=False),                                      # 51,671,245                         51M (*)
    "attn1": dict(attn_layers=(1,)),                                    # 53,773,517                         54M
    "attn2": dict(attn_layers=(2,)),                                    # 53,773,517                         54M
    "attn3": dict(attn_layers=(3,)),                                    # 53,773,517                         54M
    "attn4": dict(attn_layers=(4,)),                                    # 53,773,517                         54M
    "layers3_heads2": dict(n_layer=3, n_head=2, attn_layers=(3,)),      # 41,172,173                         41M
    "layers2_heads2": dict(n_layer=2, n_head=2, attn_layers=(2,)),      # 28,570,829                         29M
    "layers2": dict(n_layer=2, attn_layers=(2,)),                       # 28,570,829                         29M
    "shaq": dict(rnn="qrnn", rnn_residual=True, gates=False, ff="none"),  # 26,452,173                       26M
}
# SHA-RNN's published code has 24,576 more, never read (qkvs, r_gate, and lnout, lnmid and lnmem of blocks that do not use these norms).
# (*) Truncated, not rounded, as in section 5, where SHA-RNN is "53M"; dropping W_q would fit too, but then SHAQ would not reach 26M.
# A second head costs no parameters: it is a slice of the channels. Table 2 has it in block 3 of 3; the text, which still counts the removed
# block, in the fourth layer.
[SHAQConfig(**preset) for preset in SHAQ_PRESETS.values()]  # a TypeError names a setting that there is not


def last(x, n):
    """The last n positions of x (B, T, d), none for n <= 0. x[:, -n:] would be all of them at n = 0, a bug of the published code."""
    return x[:, max(0, x.size(1) - n):]


def each(state, f):
    "A state with f(t) in the place of every tensor t"
    if isinstance(state, torch.Tensor):
        return f(state)
    make = getattr(state, "_make", type(state))  # a Ring is a named tuple
    return make(each(s, f) for s in state) if isinstance(state, (list, tuple)) else state


def detach_state(state):
    """The same state cut from autograd's graph: gradients end at the window's start. Views of more rows are copied, or memory and torch.save
    would hold on to what the state has dropped; so are tensors from inference mode, which no training step could take."""
    return each(state, lambda t: t.detach() if t.untyped_storage().nbytes() == t.nbytes and not t.is_inference() else t.detach().clone())


def tensors(state):
    "All tensors of a state, in order"
    return [state] if isinstance(state, torch.Tensor) else [t for s in state or () for t in tensors(s)]


class QRNN(nn.Module):
    """Quasi-recurrent layer, eq. 5-9 (Bradbury et al., arXiv:1611.01576): causal convolution, then fo-pooling,

        Z = tanh(W_z * X)    F = sigmoid(W_f * X)    O = sigmoid(W_o * X)    c_t = f_t c_(t-1) + (1 - f_t) z_t    h_t = o_t c_t

    W * X is the convolution, over x_(t-window+1) .. x_t. qrnn_pool computes all that follows it; to try another recurrence, put a loop over t,
    such as plain_fo_pool's in fp32, in its place (autograd differentiates it) and train with --compile=0. The authors' pytorch-qrnn has f for
    1 - f, and x_t before x_(t-1): to load its weights, negate W_f and b_f, and swap the two halves of W's columns."""

    def __init__(self, config):
        super().__init__()
        self.window = config.qrnn_window
        self.conv = nn.Linear(self.window * config.n_embd, 3 * config.n_embd)   # W_z, W_f, W_o

    def forward(self, x, state=None):
        """x (B, T, d) -> h (B, T, d), state; state = the last window - 1 inputs (B, window - 1, d), c (B, d) fp32 or wider."""
        past, c = state if state is not None else (x.new_zeros(x.size(0), self.window - 1, x.size(2)), None)
        T, x = x.size(1), x.to(product_dtype(x))                        # the product would cast it anyway, after it is copied twice
        x = torch.cat([last(past, self.window - 1).to(x.dtype), x], dim=1)     # (B, window - 1 + T, d)
        end = last(x, self.window - 1).clone()                          # a view would hold on to all of x
        # One wide product beats one narrow product per tap: 1.1 to 1.5 times faster on a CPU at d = 192 to 1024.
        taps = torch.cat([x[:, i:i + T] for i in range(self.window)], dim=-1)   # (B, T, window * d), x_t last
        h, c = qrnn_pool(self.conv(taps), c)                            # eq. 5-9, activations included
        return h, (end, c)


# On a CPU oneDNN runs the LSTM. Without AVX-512 it raises for 16 bits, so there the LSTM stays in fp32
BF16_LSTM = not torch.backends.mkldnn.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()


class LSTM(nn.LSTM):
    "nn.LSTM of one layer with QRNN's interface: its h and c are (1, B, d); here they are (B, d), so that streams are dimension 0 of all state"

    def __init__(self, d):
        super().__init__(d, d, batch_first=True)

    def forward(self, x, state=None):
        "x (B, T, d) -> h (B, T, d), state; state = h, c (B, d) each. compile() leaves it eager."
        dtype = self.weight_hh_l0.dtype
        if state and x.size(1) == 1 and not self.training:
            # cuDNN, where it cannot keep 16-bit weights packed, would copy them each time
            with torch.autocast("cuda" if x.is_cuda else "cpu", enabled=False):
                state = torch.lstm_cell(x[:, 0].to(dtype), [s.to(dtype) for s in state], *self.all_weights[0])
            return state[0][:, None], state
        state = state and tuple(s[None].to(dtype) for s in state)
        # Under autocast of any dtype cuDNN's LSTM runs in fp16 and loses small gradients. So it gets fp32, with products in TF32, though
        # cuDNN's fastest algorithm (persistent, with the weights on the chip) takes only fp16
        wide = x.is_cuda or x.device.type == "cpu" and (not BF16_LSTM or product_dtype(x) == torch.float16)  # oneDNN trains none in fp16
        with torch.autocast(x.device.type, enabled=False) if wide else contextlib.nullcontext():
            h, state = super().forward(x.to(dtype) if wide else x, state)
        # h is laid out as (T, B, d). Both norms that follow would copy it, and torch 2.13's compiled dropout may draw its numbers in another
        # order than it reads h (pytorch/pytorch, issue 198333)
        return h.contiguous(), tuple(s[0] for s in state)


Ring = namedtuple("Ring", "rows n")  # a memory as MemoryAttention.ring()'s ring buffer: (B, length, d), rows so far, int64 (1,)


class MemoryAttention(nn.Module):
    """Attention of section 4.2: keys and values are the same rows M, the memory's and the window's so far. Only queries have a projection:

        x = softmax(q M^T / sqrt(d_h)) M,    q = LayerNorm(h W_q + b_q),    each times its gate if config.gates: see forward()"""

    def __init__(self, config):
        super().__init__()
        d = config.n_embd
        self.config = config
        self.mem_len = config.mem_len if config.memory == "full" else 0  # mean: over_mean() keeps its own; none: no rows
        self.W_q = nn.Linear(d, d)
        self.ln_q = nn.LayerNorm(d, eps=1e-12)
        if config.gates:
            self.qs, self.ks, self.vs = (nn.Parameter(torch.zeros(d)) for _ in range(3))
            self.overparam = nn.Linear(d, 2 * d)                        # at d = 1024 2,099,200 parameters, which make one vector
        self.drop = Dropout(config.dropout)

    def value_gate(self):
        """(d,): sigmoid(f) * tanh(c), [c, f] = W sigmoid(vs) + b. It depends on no input, so it can be precomputed."""
        if self.overparam is None:                                      # after collapse()
            return self.vs
        c, f = self.overparam(torch.sigmoid(self.vs)).chunk(2)
        return torch.sigmoid(f) * torch.tanh(c)

    def attend(self, q, rows, mask=None, new=None):
        """q (B, T, d) over rows (B, S, d), the last T of which are the queries' own positions -> (B, T, d). A query sees all rows up to its
        own. new (B, T, d), if given, is those last T rows again, and the only ones that get a gradient. One query may have a mask (1, S)"""
        split = lambda t: t.unflatten(-1, (self.config.n_head, -1)).transpose(1, 2)     # (B, h, T or S, d_h)
        q, k, p = split(q), split(rows), self.drop.p if self.drop.training else 0.0
        if new is None:
            y = attention(q, k, self.drop(k), dropout=p, mask=mask)
        else:
            k_new = split(new)
            v, v_new = k, self.drop(k_new)
            if p:  # of all rows: PyTorch's dropout of a part would read and write one number at a time on a GPU
                v = self.drop(k.detach())
                v[:, :, k.size(2) - q.size(2):] = v_new.detach()  # the window's as drawn above
            y = attention(q, k, v, dropout=p, new=(k_new, v_new))
        return y.transpose(1, 2).flatten(2)

    def forward(self, h, m, memory=None):
        """h (B, T, d) for the queries, m (B, T, d) the rows that the window adds to memory -> (B, T, d), memory: None at the start of a stream,
        then (B, <= mem_len, d); for memory=mean see over_mean(), in generate() see ring()."""
        q = self.ln_q(self.W_q(h))                                      # (B, T, d)
        m = m.to(product_dtype(m))                                      # under autocast memory is held in 16 bits (SHAQBlock has cast already)
        # Keys and values are the same rows of memory: k = m * k_gate, v = m * v_gate. A gate is one number a channel,
        # so it can move to the other factor of each product, which has T rows where the memory has thousands:
        #     q . (m * k_gate) = (q * k_gate) . m            weights @ (m * v_gate) = (weights @ m) * v_gate
        # This is exact in training too, since dropout also only scales the elements of v.
        if self.config.gates:
            q = self.drop(q * torch.sigmoid(self.qs)) * torch.sigmoid(self.ks)
        else:
            q = self.drop(q)
        x, memory = self.look(q.to(m.dtype), m, memory)
        return (x * self.value_gate() if self.config.gates else x), memory

    def look(self, q, m, memory):
        "The part of forward() between its gates; compile() leaves it eager. q and m (B, T, d), memory -> (B, T, d), memory"
        if isinstance(memory, Ring):
            rows, n = memory
            rows.index_copy_(1, n % rows.size(1), m.to(rows.dtype))
            x = self.attend(q, rows.to(q.dtype), up_to(n, rows.size(1), q.dtype))
            memory = Ring(rows, n + 1)
        elif self.config.memory == "mean":
            x, memory = self.over_mean(q, m, memory)
        else:
            # As published, memory and window together hold at most mem_len rows (a longer window: itself). A full memory drops its oldest rows
            # before the window's first query looks, so that early queries see fewer
            past = m[:, :0] if memory is None else last(memory, self.mem_len - m.size(1)).to(m.dtype)
            n, rows, new = past.size(1), m, None
            if n:
                # A detached memory needs no gradient: on a CPU attention's backward pass then takes 0.63 to 0.82 of the time
                new = None if memory.requires_grad else m
                rows = m.new_empty(m.size(0), n + m.size(1), m.size(2))                         # (B, n + T, d)
                rows[:, :n], rows[:, n:] = past, m  # torch.cat would copy a view number by number on a GPU
            x, memory = self.attend(q, rows, new=new), last(rows, self.mem_len)
        return x, memory

    def over_mean(self, q, m, memory):
        """Attention with memory condensed to its mean: keys and values are Z = [W, H_i .. H_(i+p)] (eq. 1-4). The first window has nothing to
        average and no W. State: C, the rows of closed windows (B, <= mem_len - p, d); W, their mean (B, 0 or 1, d); H, the open window's rows
        so far (B, < p, d). A new window starts every mean_window = p positions of the stream, however it is cut into calls, so that the cuts
        do not change the output (the paper's indices move by one position each; the windows of SHA-RNN's training do not overlap)."""
        p = self.config.mean_window
        C, W, H = (s.to(m.dtype) for s in memory) if memory is not None else (m[:, :0],) * 3
        if H.size(1) >= p:
            raise ValueError(f"this state's window holds {H.size(1)} positions, expected fewer than mean_window={p}: another model's?")
        out = []
        while m.size(1):
            n = min(p - H.size(1), m.size(1))
            H = torch.cat([H, m[:, :n]], dim=1)
            out.append(self.attend(q[:, :n], torch.cat([W, H], dim=1)))             # eq. 3, 4
            if H.size(1) == p:
                C = last(torch.cat([C, H], dim=1), self.config.mem_len - p)         # eq. 1, at most mem_len - p rows
                W = C.mean(dim=1, keepdim=True, dtype=torch.promote_types(C.dtype, torch.float32)).to(C.dtype)  # eq. 2
                H = H[:, :0]
            q, m = q[:, n:], m[:, n:]
        return torch.cat(out, dim=1), (C, W, H)

    def ring(self, memory, steps):
        """-> Ring, the form of memory in which forward() takes the next `steps` positions one at a time: memory's rows, with room for as many
        more as the cap (mem_len) allows, and their number. Once it is full, a new row overwrites the oldest: attention ignores the order of
        keys, and no shape changes. For memory=mean the rows are W, if any, and the open window, and the ring serves until that closes."""
        most = self.mem_len
        if self.config.memory == "mean":
            memory, most = torch.cat(memory[1:], dim=1), 1 + self.config.mean_window
        B, n, d = memory.shape
        rows = memory.new_zeros(B, max(1, min(most, n + steps)), d)
        rows[:, :n] = memory
        return Ring(rows, torch.full((1,), n, device=rows.device))

    def unring(self, before, rows, n):
        "Undo ring(): the memory `before`, as the ring has changed it"
        n, length = int(n), rows.size(1)
        rows = rows[:, :n] if n <= length else rows.roll(-(n % length), 1)                         # the oldest first
        if self.config.memory == "mean":
            C, W, _ = before
            return C, W, rows[:, W.size(1):]
        return last(rows, self.mem_len)


class Boom(nn.Module):
    """GELU(W1 x + b), d -> 4d, with its 4 chunks summed: a feed-forward layer without the second matrix (section 2.1, which says d -> 2d, but
    only the published code's 4d gives the paper's 54M with Boom and 37M without). ff=ffn has the second matrix: the fully connected layer
    of section 4.1."""

    def __init__(self, config):
        super().__init__()
        self.W1 = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.W2 = nn.Linear(4 * config.n_embd, config.n_embd) if config.ff == "ffn" else None
        self.drop = Dropout(config.dropout)

    def forward(self, x):
        """x (B, T, d) -> (B, T, d)."""
        x = self.W1(x)                                                  # (B, T, 4d)
        x = self.drop(x * torch.sigmoid(1.702 * x))                     # the published approximation of GELU
        return self.W2(x) if self.W2 is not None else x.unflatten(-1, (4, -1)).sum(dim=-2)


class SHAQBlock(nn.Module):
    """Figure 2 (SHA-RNN) and figure 9 (SHAQ): the recurrence, attention and Boom, each of the latter two only where the block has it. As
    published, a residual adds to the normalised stream, n + f(n), not to the stream itself, h + f(n)."""

    def __init__(self, config, attends):
        super().__init__()
        d = config.n_embd
        self.residual = config.rnn_residual
        self.ln_start = nn.LayerNorm(d, eps=1e-12)
        self.rnn = QRNN(config) if config.rnn == "qrnn" else LSTM(d)
        self.attn = self.ff = None
        if attends:
            self.ln_mem, self.ln_mid = nn.LayerNorm(d, eps=1e-12), nn.LayerNorm(d, eps=1e-12)
            self.attn = MemoryAttention(config)
        if config.ff != "none":
            self.ln_ff, self.ln_xff = nn.LayerNorm(d, eps=1e-12), nn.LayerNorm(d, eps=1e-12)
            self.ff = Boom(config)
        self.drop = Dropout(config.dropout)

    def forward(self, h, state=None):
        """h (B, T, d), state (recurrent state, memory) or None -> h (B, T, d), state."""
        rnn_state, memory = state if state is not None else (None, None)
        h = self.ln_start(h)
        x, rnn_state = self.rnn(h, rnn_state)
        h = h + self.drop(x) if self.residual else self.drop(x).to(h.dtype)     # under autocast, too, the stream is fp32
        if self.attn is not None:
            m, h = self.ln_mem(h), self.ln_mid(h)                       # m is looked at and remembered, h looks
            # cast to what attention computes in, once and here: torch.compile then lets the two norms write that dtype themselves
            x, memory = self.attn(h.to(product_dtype(h)), m.to(product_dtype(m)), memory)
            h = h + self.drop(x)
        if self.ff is not None:
            h, x = self.ln_ff(h), self.ln_xff(h)                        # Boom reads another norm of the stream than it is added to
            h = h + self.drop(self.ff(x))
        return h, (rnn_state, memory)


class SHAQ(nn.Module):
    """SHA-RNN, every ablation of the paper, and SHAQ, by the flags of SHAQConfig."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)       # also the decoder's weight
        self.blocks = nn.ModuleList(SHAQBlock(config, i in config.attn_layers) for i in range(1, config.n_layer + 1))
        self.decoder_bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.drop = Dropout(config.dropout)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """The published initialisation, in one place. A parameter that no line below names is an error. LayerNorm gains stay at 1: the
        published code tries to draw them too, but tests for the wrong class. Drawn gains would start hidden states at 0.003, and gradients a
        million times too small."""
        d = self.config.n_embd
        for name, p in self.named_parameters():
            if ".rnn." in name and self.config.rnn == "lstm":
                p.uniform_(-1 / math.sqrt(d), 1 / math.sqrt(d))         # PyTorch's default
            elif ".ln_" in name and name.endswith(".weight"):
                p.fill_(1.0)
            elif name.endswith(("bias", ".qs", ".ks", ".vs")):
                p.zero_()   # sigmoid(0): gates start half open, but the value's, made by overparam, at about N(0, 0.025^2)
            elif name.endswith(("wte.weight", ".conv.weight", ".W_q.weight", ".overparam.weight", ".W1.weight", ".W2.weight")):
                p.normal_(0.0, 0.1 * d ** -0.5)
            else:
                raise RuntimeError(f"nothing initialises {name}: add it to SHAQ.init_weights")

    def forward(self, idx, targets=None, state=None):
        """idx (B, T) int64 -> logits (B, T, V), state; with targets (B, T): their mean cross entropy in nats, state. state=None starts a
        stream. The returned one (a list with a tuple for each block, tensors inside) continues it, and torch.save and
        torch.load(weights_only=True) take it as it is. Between training windows pass it through detach_state(). How a stream is cut into
        calls changes nothing with memory=mean, and with memory=full while it has room (once full, a longer call's early positions see less);
        with memory=none attention sees its own call alone."""
        if idx.dim() != 2 or idx.size(1) == 0:
            raise ValueError(f"idx has shape {tuple(idx.shape)}: expected (B, T) with T of at least 1")
        if targets is not None and targets.shape != idx.shape:
            raise ValueError(f"targets have shape {tuple(targets.shape)}: expected that of idx, {tuple(idx.shape)}")
        h = self.drop(self.wte(idx))                                    # (B, T, d)
        new_state = []
        for block, s in zip(self.blocks, [None] * len(self.blocks) if state is None else state, strict=True):
            h, s = (block if self.training else block._call_impl)(h, s)     # _call_impl goes past compile()'s code, which is for training
            new_state.append(s)
        logits = F.linear(self.drop(h), self.wte.weight, self.decoder_bias)     # (B, T, V)
        if targets is None:
            return logits, new_state
        return cross_entropy(logits, targets), new_state

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, state=None, generator=None, report=None):
        """Continue idx (B, T) int64 by max_new_tokens, one step each -> idx (B, T + max_new_tokens), state.

        The state has read all but the last token: generate(idx[:, -1:], ..., state=state) goes on from there. temperature, top_k, generator
        and report as for GPT. On a GPU, model, state and draw are one CUDA graph, replayed for each byte; memory=mean records a new one for
        each window. With memory=none each generated byte is its own window, and attention sees only that."""
        uniform = draws(max_new_tokens, temperature, idx, generator)
        new, u = idx[:, -1:].clone(), uniform.new_empty(len(idx), 1)    # as in GPT.generate
        out = [idx]
        with evaluating(self):
            prompt = idx if max_new_tokens else idx[:, :-1]
            p = self.config.mean_window                                 # --bptt in train_shaq.py: a prompt is read as training reads
            for i in range(0, prompt.size(1), p):
                logits, state = self(prompt[:, i:i + p], state=state)
            while len(out) <= max_new_tokens:
                if report:
                    report(len(out) - 1)
                u.copy_(uniform[len(out) - 1])
                new.copy_(sample(logits[:, -1], temperature, top_k, u))                 # (B, 1)
                out.append(new.clone())
                n = max_new_tokens + 1 - len(out)                       # this many one by one, with rings for memories
                if self.config.memory == "mean":                        # the byte that closes a window is read as a prompt is
                    n = min([n] + [p - 1 - m[2].size(1) for _, m in state if m is not None])          # m = C, W, H
                if n:
                    rings = self.rings(state, n)

                    def step():  # reads and updates the rings
                        new.copy_(sample(self.advance(new, rings), temperature, top_k, u))

                    replay = None  # free the last window's graph first: with it goes its stream's cuBLAS workspace (torch 2.12 on)
                    replay = captured(step, idx.device, [new, *tensors(rings)])
                    for _ in range(n):
                        if report:
                            report(len(out) - 1)
                        u.copy_(uniform[len(out) - 1])
                        replay()
                        out.append(new.clone())
                    state = self.unrings(state, rings)
                if len(out) <= max_new_tokens:
                    logits, state = self(new, state=state)
        return torch.cat(out, dim=1), detach_state(state)

    def rings(self, state, n):
        "state for n positions, one at a time: each memory as a ring"
        return [(s, m if block.attn is None else block.attn.ring(m, n)) for block, (s, m) in zip(self.blocks, state)]

    def advance(self, token, state):
        "token (B, 1) -> logits of the next (B, V); state, of rings(), is written over: its tensors stay where they are"
        logits, after = self(token, state=state)
        for old, new in zip(tensors(state), tensors(after)):
            old.copy_(new)
        return logits[:, -1]

    def unrings(self, state, rings):
        "Undo rings(): state as they have changed it"
        return [(s, m if block.attn is None else block.attn.unring(before, *m))
                for block, (_, before), (s, m) in zip(self.blocks, state, rings)]

    def compile(self, **kw):
        """torch.compile for training, with its kw: all blocks share their code, for windows of any length. The LSTM and attention,
        which loop over the window, stay eager. That and the compiler settings below hold for the whole process."""
        import torch._dynamo

        # with state or without, with attention or without, in either dtype: 8 can be too few
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        torch._dynamo.config.allow_rnn = True  # or a block that calls an nn.LSTM, even one that stays eager, would stay eager whole, unseen
        torch._dynamo.config.optimize_ddp = False  # or DDP cuts each block's code in two, though a block is about one of its buckets
        torch.fx.experimental._config.use_duck_shape = False  # or a window as long as a block is wide has its length fixed in the code
        for part, method in ((MemoryAttention, "look"), (LSTM, "forward")):
            if not getattr(getattr(part, method), "_torchdynamo_disable", False):
                setattr(part, method, torch.compiler.disable(getattr(part, method)))
        for block in self.blocks:
            block.compile(**dict(dynamic=True) | kw)

    @torch.no_grad()
    def collapse(self):
        """Replace the 2,099,200 parameters (at d = 1024) that compute each value gate by the gate itself. For inference only: a new model
        cannot load the state_dict. Returns self."""
        for block in self.blocks:
            if block.attn is not None and block.attn.config.gates:
                block.attn.vs, block.attn.overparam = nn.Parameter(block.attn.value_gate(), requires_grad=False), None
        return self

    def param_breakdown(self):
        """{part: parameters}, each parameter in exactly one part; the sum is the total."""
        return breakdown(self, {"wte.": "embedding, tied", "decoder_bias": "decoder bias", "ln_": "LayerNorms", ".rnn.": "recurrence",
                                ".ff.": "feed-forward", ".W_q.": "attention W_q", ".overparam.": "overparam", ".attn.": "gates"})

    def flops_per_token(self, T):
        """Matrix-product operations per token, forward and backward, for windows of T and a full memory whose rows get no gradient."""
        cfg = self.config
        every = self.named_parameters(remove_duplicate=False)  # blocks may share weights
        weights = sum(p.numel() for name, p in every if p.dim() > 1 and "overparam" not in name)
        keys = {"full": max(cfg.mem_len, T), "mean": 1 + cfg.mean_window, "none": T}[cfg.memory]
        new = T if cfg.memory == "full" else keys  # attention: 4 keys forward, 4 keys for dq and dP, 4 new for dk and dv
        return 6 * weights + (8 * keys + 4 * new) * cfg.n_embd * len(cfg.attn_layers)


# -----------------------------------------------------------------------------
# LAMB, the optimiser of [3]


def norms(ts):
    """2-norms, one a tensor. On a CPU row by row: PyTorch's norm of 38 million numbers in fp32 is 0.3% too small there, and half as fast"""
    if ts[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(ts))
    return torch.stack([torch.linalg.vector_norm(torch.linalg.vector_norm(t, dim=-1)) for t in ts])


class LAMB(torch.optim.Optimizer):
    """LAMB (You et al., arXiv:1904.00962) as SHA-RNN uses it: no bias correction, each tensor's step scaled by a trust ratio
    max(min(|w|, max_norm) / |step|, min_trust), or 1 if either norm is 0. For parameters in fp32 or fp64; step includes weight decay.
    Few launches (foreach, except one per tensor for its ratio), and the ratios stay on the device, so nothing waits for it."""

    def __init__(self, params, lr=2e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, max_norm=10.0, min_trust=0.25):
        if not (lr >= 0 and eps > 0 and weight_decay >= 0 and max_norm > 0 and min_trust >= 0 and all(0 <= b < 1 for b in betas)):
            raise ValueError(f"LAMB: lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}, max_norm={max_norm}, "
                             f"min_trust={min_trust}: expected lr, weight_decay, min_trust >= 0, betas in [0, 1), eps, max_norm > 0")
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_norm=max_norm, min_trust=min_trust))

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every parameter that has a gradient. Returns closure()'s loss, or None."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if p.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"LAMB: got a parameter in {p.dtype}, expected fp32 or fp64; use autocast for 16 bits")
        for group in self.param_groups:
            w = [p for p in group["params"] if p.grad is not None]
            if not w:
                continue
            for p in w:
                if not self.state[p]:
                    self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            g = [p.grad for p in w]
            m = [self.state[p]["exp_avg"] for p in w]
            v = [self.state[p]["exp_avg_sq"] for p in w]
            beta1, beta2 = group["betas"]
            torch._foreach_lerp_(m, g, 1 - beta1)                       # m = beta1 m + (1 - beta1) g
            torch._foreach_mul_(v, beta2)                               # v = beta2 v + (1 - beta2) g^2
            torch._foreach_addcmul_(v, g, g, value=1 - beta2)
            denominator = torch._foreach_sqrt(v)
            torch._foreach_add_(denominator, group["eps"])
            step = torch._foreach_div(m, denominator)                   # m / (sqrt(v) + eps) + weight_decay w
            torch._foreach_add_(step, w, alpha=group["weight_decay"])
            w_norm, step_norm = norms(w).clamp(max=group["max_norm"]), norms(step)
            trust = torch.where((w_norm > 0) & (step_norm > 0), (w_norm / step_norm).clamp(min=group["min_trust"]), 1.0)
            torch._foreach_mul_(step, (-group["lr"] * trust).unbind())  # lr may be a tensor, which alpha=lr would wait for
            torch._foreach_add_(w, step)                                # w = w - lr trust step
        return loss


# -----------------------------------------------------------------------------
# What the scripts share: the device, its precision and speed, steps as CUDA graphs, learning rate, checkpoints; and samples from these


@dataclass
class Machine:
    device: torch.device
    dtype: torch.dtype   # of autocast; parameters are fp32
    rank: int            # this process's number, of torchrun's world processes
    world: int
    note: str            # what was chosen and why
    net: object = None   # what parallel() made

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def mean(self, x):
        "Mean over all processes of a tensor, in place; a no-op for one process"
        if self.world > 1:
            torch.distributed.all_reduce(x)
            x /= self.world
        return x

    def gather(self, x):
        "The tensors x of all processes, of one shape, joined along dimension 0"
        if self.world == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.world)]
        torch.distributed.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    def all(self, done):
        "Whether done is true on every process. Each waits here for the slowest."
        return self.mean(torch.tensor(float(done), device=self.device)).item() > 1 - 0.5 / self.world

    def same(self, what):
        "Whether what is the same on every process. Each waits here for the slowest."
        found = [what] * self.world
        if self.world > 1:
            torch.distributed.all_gather_object(found, what)
        return all(theirs == what for theirs in found)

    def parallel(self, model):
        "From here on self.net is model, with its gradients averaged over all processes"
        self.net = model
        if self.world > 1:
            self.net = nn.parallel.DistributedDataParallel(model, [self.device.index] if self.device.type == "cuda" else None,
                                                           gradient_as_bucket_view=True)
            self.net.broadcast_buffers = False  # they are constants; the argument of this name is deprecated from torch 2.13 on

    def leave(self):
        """End the process group, all processes together: one that leaves while another still needs it can abort that one. A barrier waits
        without a Python tensor: gloo's thread might still hold one while Python shuts down, fail to release it, and abort."""
        self.net = None  # DDP holds the group: destroyed at Python's exit, under the GIL, it would wait for a thread that may want the GIL
        if self.world > 1:
            torch.distributed.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)
            torch.distributed.destroy_process_group()


def keep_freed_memory():
    """glibc returns every freed block above 32 MiB to the kernel, which must zero it again at the next step. Keeping them makes a
    training step 1.1 times faster on two cores, several times on a small virtual machine."""
    if sys.platform == "linux":
        with contextlib.suppress(Exception):  # another libc
            mallopt = ctypes.CDLL(None).mallopt
            if mallopt(-3, 1 << 30) or mallopt(-3, 1 << 25):  # M_MMAP_THRESHOLD; an older glibc refuses more than 32 MiB
                mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD; set alone, it leaves the other at 128 KiB: 2.5 times slower than neither


def processor():
    "The CPU's name, for logs and tables"
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as f:  # Linux; not for every CPU
        for line in f:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine(device="auto", dtype="auto"):
    "Choose device (auto | cpu | cuda | mps) and dtype (auto | float32 | bfloat16), join torchrun's processes. ValueError: no such device."
    env = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    given = env["RANK"] or "0", env["WORLD_SIZE"] or "1", env["LOCAL_RANK"] or "0"
    rank, world, local = (int(n) if n.isdecimal() else -1 for n in given)
    if not 0 <= rank < world or local < 0 or world > 1 and not (env["RANK"] and env["MASTER_ADDR"]):  # left over from a cluster's script
        raise ValueError(f"the environment says {', '.join(map('='.join, env.items()))}: start with torchrun, which sets all, or unset them "
                         "for one process")
    keep_freed_memory()
    there = dict(cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available(), cpu=True)
    note = f"{device}, as asked" if device != "auto" else f"no GPU that this PyTorch ({torch.__version__}) can use"
    if device == "auto" and there["mps"]:
        note = "the CPU, as nobody has tried these scripts on Apple's GPUs; --device=mps takes yours"
    device = torch.device(device if device != "auto" else "cuda" if there["cuda"] else "cpu")
    if not there.get(device.type):
        raise ValueError(f"--device={device}: this PyTorch ({torch.__version__}) sees no such device; take --device=cpu")
    if device.type == "cuda":
        device = torch.device("cuda", local)
        if device.index >= torch.cuda.device_count():
            raise ValueError(f"process {local} of this machine wants {device}, but there are {torch.cuda.device_count()} GPUs: "
                             "lower --nproc_per_node")
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
        note = torch.cuda.get_device_name(device) + ("" if triton else ", without Triton")
    elif device.type == "cpu":
        note += f"; {processor()}, threads: {torch.get_num_threads()}"
    m = Machine(device, torch.float32, rank, world, note)
    if world > 1:
        # before there is a group: DDP imports this, and default arguments there would keep the group alive after leave()
        from torch.distributed.nn import functional  # noqa: F401
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(hours=1))  # all wait for a save
    choose_dtype(m, dtype)
    if world > 1:
        m.note += f"; {world} processes"
    return m


def choose_dtype(m, dtype):
    "Set m.dtype to dtype (auto: to what is faster here), and say why in m.note"
    device = m.device
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        known = torch.cpu.get_capabilities()
        has_bf16 = device.type == "cpu" and any(known.get(k) for k in ("avx512_bf16", "amx_bf16", "bf16"))
    if dtype != "auto":
        m.dtype = getattr(torch, dtype)
        m.all(True)  # joins the vote below: others may hold it, if --dtype or --resume was typed here alone; same() reports that later
        tf32 = dtype == "float32" and device.type == "cuda" and has_bf16
        slow = dtype == "bfloat16" and device.type != "mps" and not has_bf16
        m.note += f"; {dtype}, as set" + ", its products in TF32" * tf32 + ", but slow, as there are no instructions for it" * slow
        return
    faster, why = has_bf16, "" if has_bf16 or device.type == "mps" else ", as there are no bfloat16 instructions"
    if has_bf16 and device.type == "cpu":  # where a virtual machine hides the matrix units, a product in bf16 takes twice fp32's time
        rates = [[product_rate(device, t, 512) for t in (torch.bfloat16, torch.float32)] for _ in range(3)]
        low, high = map(max, zip(*rates))  # measured in turns, as other work may come between
        faster = low > 1.2 * high          # casts are not free
        why = f", as products in bfloat16 are {low / high:.1f} times as fast"
    m.dtype = torch.bfloat16 if m.all(faster) else torch.float32  # all processes choose alike
    if faster and m.dtype == torch.float32:
        why = ", as another process is no faster in bfloat16"
    m.note += ("; bfloat16 autocast" if m.dtype == torch.bfloat16 else "; float32") + why


def product_rate(device, dtype, n, times=1):
    "FLOP/s of n x n matrix products, `times` of them in a row: the best of 6 runs, or of those in a second, measured now"
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    taken, cold = [], int(device.type == "cuda")  # runs that do not count: the first there may wait for cuBLAS to load
    while len(taken) < 6 and sum(taken[cold:]) < 1:  # one in emulated bf16 takes seconds
        t0 = time.perf_counter()
        for _ in range(times):
            c = a @ b
        c[0, 0].item()
        taken.append(time.perf_counter() - t0)
    return 2 * n ** 3 * times / min(taken)


PEAK = {  # dense bf16 FLOP/s with fp32 accumulation, from the makers' data sheets; the first whose words stand in the device's name counts
    "B200": 2250e12, "H200 NVL": 836e12, "H200": 989e12, "H100 NVL": 836e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12,
    "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A10G": 70e12, "A6000": 155e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "MI300X": 1307e12,
}


def peak_flops(m):
    "-> (FLOP/s, where the figure is from): the data sheet's for a known GPU in bf16, else a matrix product measured here and now"
    if m.device.type == "cuda" and m.dtype == torch.bfloat16:
        words = f" {torch.cuda.get_device_name(m.device)} ".replace("-", " ")
        for name, peak in PEAK.items():
            if f" {name} " in words and not re.search(" (MIG|Laptop|Ti|D) ", words):  # a slice of that GPU, or another that has its name
                return peak, f"{name} data sheet"
    n, times = (1024, 1) if m.device.type == "cpu" else (4096, 20)  # a GPU does one in less time than it takes to ask for the result
    return product_rate(m.device, m.dtype, n, times), f"a {n}^3 product measured at the start"


def inputs_and_targets(rows, device):
    "rows, an int64 array (n, T + 1) -> inputs and targets (n, T) on device: one copy there and two views of it"
    rows = torch.from_numpy(rows)
    if device.type == "cuda":  # where alone PyTorch keeps the pinned copy until it has been read
        rows = rows.pin_memory().to(device, non_blocking=True)
    rows = rows.to(device)
    return rows[:, :-1], rows[:, 1:]


class Replayed:
    """update(batch, state) -> (figures, state), a training step from the batch to the new weights, as one CUDA graph. Launched one by one, the
    kernels of shaq's step took an H200 23 ms for 11 of work. The first step of new shapes runs as it is, which compiles what needs compiling;
    the second is recorded, and it and later ones are replayed. Each step sets lr, the same for all groups.

    batch, state   tensors, lists or tuples of them, nested in any way, or None. The state's must not change places
    figures        two numbers, or one, which fills both. The next step overwrites figures and state
    on=False       no graphs
    whole=False    update is a part of a step and adds to the gradients of optimizer's parameters: set these to zero, never to None

    Python in update runs only until it is recorded: what is to vary, other than lr, must be a tensor that is changed in place. A step that
    changes the shapes of its state is never recorded. Dropout draws what it would without a graph,
    unless attention by blocks, without a memory and over more than 4 x (q's + v's width) positions, would take a seed from the CPU."""

    def __init__(self, update, optimizer, on, whole=True):
        self.update, self.optimizer, self.on, self.whole = update, optimizer, on, whole
        if whole and len({float(group["lr"]) for group in optimizer.param_groups}) > 1:
            raise ValueError("the groups' learning rates differ, and each step sets one for all: let __call__ multiply it by each group's own")
        self.warm, self.graphs = set(), {}  # the shapes of steps that ran once, and of those that are recorded
        self.states, self.pool = {}, None  # where each kind of state lies, for windows of any length; the memory of all graphs

    def __call__(self, batch, state, lr=None):
        for group in self.optimizer.param_groups if self.whole else ():
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        if not self.on:
            return self.update(batch, state)
        device, kinds = tensors(batch)[0].device, [[(t.shape, t.dtype) for t in tensors(x)] for x in (batch, state)]
        key = str(kinds)
        if key not in self.warm:
            with beside(device):
                figures, after = self.update(batch, state)
            if kinds[1] == [(t.shape, t.dtype) for t in tensors(after)]:
                self.warm.add(key)
            return figures, after
        if key not in self.graphs:
            try:
                self.graphs[key] = self.record(batch, state, str(kinds[1]))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as e:  # no fallback: the GPU's random generator would no longer draw outside a graph
                raise RuntimeError(f"a step could not be recorded as a CUDA graph: --compile=0 goes without one. {e}") from e
        replay, batch_here, state_here, figures = self.graphs[key]
        for here, new in zip(tensors((batch_here, state_here)), tensors((batch, state))):
            here.copy_(new)  # nothing, where they are one
        replay()
        return figures, state_here

    def record(self, batch, state, kind_of_state):
        device = tensors(batch)[0].device
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        for group in self.optimizer.param_groups if self.whole else ():  # numbers would be recorded as they are now
            if not isinstance(group["lr"], torch.Tensor):
                group["lr"] = torch.tensor(group["lr"], device=device)
                if "capturable" in group:
                    group["capturable"] = True
        # with the same strides, or torch.compile would compile anew
        batch = each(batch, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t))
        if kind_of_state not in self.states:  # all windows' lengths share one
            self.states[kind_of_state] = each(state, torch.clone)
        state = self.states[kind_of_state]
        figures = torch.empty(2, device=device)

        def work():
            found, after = self.update(batch, state)
            figures.copy_(found)
            for old, new in zip(tensors(state), tensors(after)):
                old.copy_(new)

        if self.whole:
            keep = params + [t for p in params for t in self.optimizer.state[p].values() if isinstance(t, torch.Tensor)]
        else:
            keep = [p.grad for p in params if p.grad is not None]
        drawn = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        if self.pool is None and device.type == "cuda":
            self.pool = torch.cuda.graph_pool_handle()
        numbers = lambda: [(k, v) for held in (*self.optimizer.param_groups, *self.optimizer.state.values())
                           for k, v in held.items() if isinstance(v, (int, float))]  # what the optimizer holds beside tensors
        before = numbers()
        replay = captured(work, device, keep + tensors(state), self.pool)
        if numbers() != before:
            raise RuntimeError(f"{type(self.optimizer).__name__} counts in Python, which no graph does")
        if drawn is not None:
            torch.cuda.set_rng_state(drawn, device)
        return replay, batch, state, figures


def clip_(model, most):
    "-> the norm of all gradients, which are scaled down to norm most if it is larger (most=0: never). AssertionError if one is missing"
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing, f"no gradient reaches {missing}"
    norm = torch.linalg.vector_norm(norms([p.grad for p in model.parameters() if p.grad is not None]))
    if most:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), most, norm)
    return norm


def lr_at(step, lr, min_lr, warmup_steps, max_steps, schedule="cosine"):
    "Linear warm-up, then a cosine down to min_lr at the last step, max_steps - 1, or constant"
    if schedule not in ("cosine", "constant"):
        raise NotImplementedError(f"nothing computes schedule={schedule}")
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    t = (step - warmup_steps) / max(1, max_steps - 1 - warmup_steps)
    return min_lr + 0.5 * (1 + math.cos(math.pi * min(1.0, t))) * (lr - min_lr)


def schedule_notes(s, typed, first, before, say):
    "What may surprise in these settings, said at the start. before: the checkpoint's max_steps, None for a new run"
    if s["schedule"] == "constant" and "min_lr" in typed:
        say("note: --min_lr does nothing, as the learning rate is constant: with --schedule=cosine it would fall to that")
    warmup, steps = s["warmup_steps"], s["max_steps"]
    if before is not None and first >= steps:
        say(f"note: all {steps} steps are done; --max_steps=N goes on to step N")
    if first < min(warmup, steps) and 2 * warmup > steps:
        say(f"note: {min(warmup, steps)} of {steps} steps are warm-up: " + "lower --warmup_steps, or " * (before is None) + "take more steps")
    if s["schedule"] == "cosine" and before not in (None, steps):
        was, now = (lr_at(first, s["lr"], s["min_lr"], warmup, n) for n in (before, steps))
        if was != now:
            say(f"note: the cosine now ends at step {steps}, not {before}: the learning rate goes on at {now:.2e}, not {was:.2e}")
    if before is not None and before < steps and "eval_interval" not in typed and steps > 40 * s["eval_interval"]:
        say(f"note: as before, an evaluation every {s['eval_interval']} step{'s' * (s['eval_interval'] > 1)}, to step {steps} now: "
            "--eval_interval=N changes that")


def param_groups(model, weight_decay, decay="matrices"):
    "Every parameter in exactly one group: matrices decay, vectors (biases, norms, alpha, beta) do not; decay='all': they do too"
    decays = lambda p: p.dim() >= 2 or decay == "all"
    return [dict(params=[p for p in model.parameters() if decays(p)], weight_decay=weight_decay),
            dict(params=[p for p in model.parameters() if not decays(p)], weight_decay=0.0)]


KINDS = dict(GPT=(GPT, GPTConfig), SHAQ=(SHAQ, SHAQConfig))  # of checkpoints


def load_checkpoint(path, kind=None):
    "-> the checkpoint's dict, plus 'written', its time. One-line ValueError if it is not ours, or of another version or kind (GPT | SHAQ)."
    try:
        written = os.stat(path).st_mtime_ns
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        Model, Config = KINDS[ckpt.get("kind")]
        needed = {"config", "model", "data"}
        if kind == ckpt["kind"]:  # to train on; sampling does without
            needed |= {"settings", "optimizer", "step", "evaluated"}
            needed |= {"at", "epoch", "best", "minutes", "state"} if kind == "SHAQ" else set()
        if not (needed <= set(ckpt) and {"name", "tokenizer"} <= set(ckpt["data"])):
            raise KeyError
        with zipfile.ZipFile(path) as z:  # torch.load leaves the checksums unread
            if z.testzip():
                raise ValueError
    except FileNotFoundError:
        kept = (f"; {path}.old, of the run before, is there: to go on with that, take the .old from its name, log.jsonl's and best.pt's"
                * os.path.exists(f"{path}.old"))
        raise ValueError(f"{path or '(no name)'} does not exist: train a model first, or say where its checkpoint lies (--ckpt, --init_from, "
                         f"--stage2, or for --resume --out_dir){kept}") from None
    except Exception as e:  # a damaged file can raise anything
        if os.path.isdir(path):
            raise ValueError(f"{path} is a folder: name the file, such as {os.path.join(path, 'ckpt.pt')}") from None
        if isinstance(e, (MemoryError, PermissionError, NotADirectoryError)) or re.search(
                "out of memory|(can't allocate|not enough) memory", str(e)):
            raise  # it may be a good file
        raise ValueError(f"{path} is no checkpoint of these scripts, or a damaged one ({type(e).__name__}): "
                         "name another, or train anew") from None
    if kind not in (None, ckpt["kind"]):
        raise ValueError(f"{path} is a checkpoint of {'train_shaq.py' if kind == 'GPT' else 'train_gpt.py'}: "
                         "go on with it there, or name another")
    try:
        with torch.device("meta"):
            Model(Config(**ckpt["config"])).load_state_dict(dict(ckpt["model"]), assign=True)  # dict: assign would stay in its metadata
    except (TypeError, ValueError, RuntimeError) as e:  # an unknown setting, one that is refused, other parameters
        commit = (ckpt.get("versions") or {}).get("git") or "not recorded"
        raise ValueError(f"{path} was written by another version (commit: {commit}): take that one, or train anew "
                         f"({textwrap.shorten(str(e), 300)})") from None
    return ckpt | dict(written=written)


def model_of(ckpt):
    "The model of a checkpoint, on the CPU, without dropout: .train() turns that on. With RoPE ckpt['config']['block_size'] may be raised before"
    Model, Config = KINDS[ckpt["kind"]]
    model = Model(Config(**ckpt["config"]))
    model.load_state_dict(ckpt["model"])
    return model.eval()


def sample_text(model, tokenizer, prompt, n, temperature=0.8, top_k=50, seed=0):
    "prompt and n tokens more, as text; those of a GPT's padded vocabulary that stand for nothing are left out"
    from prepare_data import VOCAB_SIZE, decode, encode, end_progress, progress

    began = time.perf_counter()
    idx = torch.tensor([encode(tokenizer, prompt)], device=next(model.parameters()).device)
    with torch.inference_mode():
        out = model.generate(idx, n, temperature, top_k, generator=torch.Generator().manual_seed(seed),
                             report=lambda i: progress(i, n, began, "sample", unit="tokens", scale=1, after=3))
    end_progress()
    out = out[0] if isinstance(out, tuple) else out  # SHAQ also returns its state
    text = decode(tokenizer, [i for i in out[0].tolist() if i < VOCAB_SIZE[tokenizer]])
    # a model that has learnt little also draws characters that ring and clear a terminal
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text) if sys.stdout.isatty() else text


def main():
    from prepare_data import Parser, die, number, one_line

    parser = Parser(prog="model.py", description="Sample from a checkpoint of train_gpt.py or train_shaq.py.")
    add = parser.add_argument
    add("--ckpt", default="out/gpt/ckpt.pt", help="checkpoint file")
    add("--prompt", default="\n", help="text to continue (default a line break); one that begins with a dash: --prompt=-x")
    add("--tokens", type=number(int, 0, 2**32), default=500, help="how many tokens to add")
    add("--temperature", type=number(float, 0), default=0.8, help="0 takes the likeliest token each time")
    add("--top_k", type=number(int, 0), default=50, help="draw from the k likeliest tokens only; 0: from all")
    add("--seed", type=number(int, 0, 2**63 - 1), default=0, help="the same seed gives the same text")
    add("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"], help="where to run (auto: cuda where that is, else cpu)")
    args = parser.parse_args()
    if not args.prompt:
        die("--prompt is empty: give at least one character to continue")
    with one_line():
        m = machine(args.device, "float32")
        ckpt = load_checkpoint(args.ckpt)
        model = model_of(ckpt).to(m.device)
    model = model.collapse() if ckpt["kind"] == "SHAQ" else model  # its value gates are constants by now
    prompt = args.prompt.encode(errors="surrogateescape").decode(errors="replace")  # what was typed may be no text
    print(sample_text(model, ckpt["data"]["tokenizer"], prompt, args.tokens, args.temperature, args.top_k, args.seed))


if __name__ == "__main__":
    from prepare_data import run
    run(main, memory="fewer --tokens, a shorter --prompt or, on a GPU, --device=cpu")
