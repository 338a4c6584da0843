"""
The models of the three papers, every variant behind a flag that stands beside its mathematics.

    GPT     decoder-only transformer; attn_out = dense | hadamard | head_hadamard | identity   [1]
                                      attn     = mha | dva | dva_outer                         [2]

Needs torch and kernels.py beside it, nothing else.
    python model.py --ckpt=out/gpt/ckpt.pt --prompt="def "        samples from a trained model

[1] Aggarwal and Kumar, Rethinking Attention Output Projection, arXiv:2603.08343v2 (and v1)
[2] Dynamic Value Attention, the text in the paper's section 3; model sizes after Raschka's Build a Large Language Model (From Scratch)
"""
import contextlib
import ctypes
import math
import os
import pickle
import sys
import time
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import hadamard_affine, hadamard_matrix

# -----------------------------------------------------------------------------
# GPT: settings


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304       # GPT-2's 50257, padded to a multiple of 64
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    attn: str = "mha"             # mha | dva | dva_outer [2]; the two without output projection
    attn_out: str = "dense"       # dense | hadamard | head_hadamard | identity: what stands in W_O's place, for mha
    mlp: str = "swiglu"           # swiglu | gelu | none
    pos: str = "rope"             # rope | learned
    norm: str = "layernorm"       # layernorm | rmsnorm
    bias: bool = True             # in linear layers and LayerNorm
    qkv_bias: bool = True         # in W_Q, W_K, W_V, if bias; dva's five matrices have none
    dropout: float = 0.0          # on the embedding sum, the attention weights and each branch's output
    tie_weights: bool = True      # the head is the token embedding
    init: str = "gpt2"            # gpt2 | torch: PyTorch's own defaults, embeddings N(0, 1), as in the book that [2] follows


CHOICES = dict(attn=["mha", "dva", "dva_outer"], attn_out=["dense", "hadamard", "head_hadamard", "identity"],
               mlp=["swiglu", "gelu", "none"], pos=["rope", "learned"], norm=["layernorm", "rmsnorm"],
               init=["gpt2", "torch"])

SIZES = {  # [1, table 2 and v1's sizes]: these reproduce every published parameter count
    "nano": dict(n_layer=4, n_head=4, n_embd=256, block_size=256),  # ours: for a CPU and a few minutes
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
    """
    The h of the layer's H = H_h (x) H_(d/h): n_head where both factors exist, which makes the inner one foldable into W_V; else 1, the
    plain H_d. The order of the factors is a free choice of H: for 16 heads of 96 it is not that of H_12 (x) H_128, else it is the same.
    """
    try:
        hadamard_matrix(config.n_head), hadamard_matrix(config.n_embd // config.n_head)
        return config.n_head
    except ValueError:
        hadamard_matrix(config.n_embd)  # raises, naming the nearest widths, where that does not exist either
        return 1


# -----------------------------------------------------------------------------
# GPT: parts


def make_norm(config):
    return nn.RMSNorm(config.n_embd, eps=1e-5) if config.norm == "rmsnorm" else nn.LayerNorm(config.n_embd, eps=1e-5, bias=config.bias)


def rope_table(block_size, width):
    "cos and sin of position * 10000^(-2i/width): (block_size, 1, width / 2) each, fp32; RoFormer, arXiv:2104.09864"
    angle = torch.arange(block_size)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
    return angle.cos()[:, None, :], angle.sin()[:, None, :]


def rope(x, cos, sin):
    "Rotate each pair (x_i, x_(i + width/2)) of x (B, T, heads, width) by its position's angle, in fp32"
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


class BlockedAttention(torch.autograd.Function):
    """
    Causal attention by blocks of query rows, each against the keys up to its own last: half the products of a full T x T, and memory
    linear in T, as the backward pass computes each block's weights again. With P = softmax(q k^T / sqrt(w)), causal, and its dropout:
        r is None    out = P v                       v of any width
        else         out = (P * (r v^T)) u           the outer form of [2]: one more T x T product, and nothing larger
    q, k (N, T, w); v (N, T, any), or r, v, u (N, T, w). On a CPU in bf16 this is 1.4 times faster than PyTorch's fused operator,
    forward and backward (48 heads of 64, T = 256), level with it in fp32, and it takes heads of any width, dropout included.
    """
    ROWS = 64

    @staticmethod
    def weights(q, k, i, e, dropout, seed):
        "P of query rows i to e (N, e - i, e), and what dropout multiplies it with"
        S = torch.bmm(q[:, i:e], k[:, :e].mT)
        S[:, :, i:].masked_fill_(torch.ones(e - i, e - i, dtype=torch.bool, device=q.device).triu_(1), -math.inf)
        P = S.softmax(-1)
        if dropout == 0.0:
            return P, None
        noise = torch.rand(P.shape, device=q.device, generator=torch.Generator(q.device).manual_seed(seed + i))  # drawn again in backward
        return P, (noise >= dropout).to(P.dtype).mul_(1 / (1 - dropout))

    @staticmethod
    def forward(ctx, q, k, r, v, u, dropout):
        q = q * q.size(-1) ** -0.5
        ctx.dropout, ctx.seed = dropout, int(torch.randint(2**40, ())) if dropout else 0
        out = torch.empty_like(v if r is None else u)
        for i in range(0, q.size(1), BlockedAttention.ROWS):
            e = min(i + BlockedAttention.ROWS, q.size(1))
            P, keep = BlockedAttention.weights(q, k, i, e, dropout, ctx.seed)
            P = P if keep is None else P.mul_(keep)
            out[:, i:e] = torch.bmm(P, v[:, :e]) if r is None else torch.bmm(P.mul_(torch.bmm(r[:, i:e], v[:, :e].mT)), u[:, :e])
        ctx.save_for_backward(q, k, r, v, u, out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        q, k, r, v, u, out = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dr, du = (None, None) if r is None else (torch.empty_like(r), torch.zeros_like(u))
        delta = (g * out).sum(-1, keepdim=True)  # sum over keys of P * dP, in both forms, with or without dropout
        for i in range(0, q.size(1), BlockedAttention.ROWS):
            e = min(i + BlockedAttention.ROWS, q.size(1))
            P, keep = BlockedAttention.weights(q, k, i, e, ctx.dropout, ctx.seed)
            W = P if keep is None else P * keep
            if r is None:
                dv[:, :e].baddbmm_(W.mT, g[:, i:e])
                dP = torch.bmm(g[:, i:e], v[:, :e].mT)
            else:
                G = torch.bmm(r[:, i:e], v[:, :e].mT)                       # r v^T
                dW = torch.bmm(g[:, i:e], u[:, :e].mT)
                du[:, :e].baddbmm_((W * G).mT, g[:, i:e])
                dG = dW * W
                dr[:, i:e] = torch.bmm(dG, v[:, :e])
                dv[:, :e].baddbmm_(dG.mT, r[:, i:e])
                dP = dW.mul_(G)
            if keep is not None:
                dP.mul_(keep)
            dS = dP.sub_(delta[:, i:e]).mul_(P)
            dq[:, i:e] = torch.bmm(dS, k[:, :e])
            dk[:, :e].baddbmm_(dS.mT, q[:, i:e])
        return dq.mul_(q.size(-1) ** -0.5), dk, dr, dv, du, None


def attention(q, k, v, r=None, u=None, dropout=0.0):
    """
    softmax(q k^T / sqrt(w)) v, or with r and u the outer form (softmax(..) * (r v^T)) u. All (B, h, T, w), v of any width where r is None;
    k, v, u may hold S >= T positions, the last T of them the queries' own. Returns (B, h, T, width of v or u).
    """
    T, S = q.size(2), k.size(2)
    if T == S > 1 and (q.device.type == "cpu" or r is not None):
        flat = [None if t is None else t.flatten(0, 1) for t in (q, k, r, v, u)]
        return BlockedAttention.apply(*flat, dropout).unflatten(0, q.shape[:2])
    mask = None  # a square one needs no tensor, a single query sees all; several queries behind a cache see what is before them
    if 1 < T < S:
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    if r is not None:
        P = (q @ k.mT * q.size(-1) ** -0.5).masked_fill(~mask if mask is not None else torch.zeros((), dtype=torch.bool, device=q.device), -math.inf).softmax(-1)
        return F.dropout(P, dropout) * (r @ v.mT) @ u
    # On a GPU heads up to 256 wide with v as wide as q take flash kernels; wider ones, and dva's v of twice the width, the memory-efficient
    # kernel, whose memory is linear in T too. Not measured here: no GPU was at hand when this was written.
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=T == S)


class Attention(nn.Module):
    """
    Multi-head attention with four choices in the place of its output projection [1], or Dynamic Value Attention [2], whose value depends
    on the query: v_R(B, A) = v(A) + r(B, A) with r made of q_R(B) and k_R(A).

        dva        r(B, A) = q_R(B) * k_R(A), elementwise [2, eq. 6-8]. q_R(B) does not depend on A, so it leaves the sum over A:
                   sum_A S(B, A) (v(A) + q_R(B) * k_R(A)) = S V + Q_R * (S K_R)               one attention with values [V, K_R]
        dva_outer  v_R(B, A) = v(A) r(B, A), r(B, A) = q_R(B)^T k_R(A), a d x d matrix of rank one [2, eq. 3-5], so that
                   v(A) r(B, A) = (v(A) . q_R(B)) k_R(A), and the sum is (S * (Q_R V^T)) K_R   no d x d matrix for any pair
    """

    def __init__(self, config):
        super().__init__()
        d, self.n_head = config.n_embd, config.n_head
        self.attn, self.attn_out, self.dropout = config.attn, config.attn_out, config.dropout
        if self.attn == "mha":
            self.c_attn = nn.Linear(d, 3 * d, bias=config.bias and config.qkv_bias)  # W_Q, W_K, W_V
        else:
            self.c_attn = nn.Linear(d, 5 * d, bias=False)    # W_Q, W_K, W_V, W_KR, W_QR
        if self.attn == "mha" and self.attn_out == "dense":
            self.c_proj = nn.Linear(d, d, bias=config.bias)  # W_O
        elif self.attn == "mha":
            self.alpha = nn.Parameter(torch.empty(d))
            self.beta = nn.Parameter(torch.empty(d))
            self.heads = hadamard_heads(config) if self.attn_out == "hadamard" else config.n_head
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x, table=None, cache=None, pos=0):
        B, T, d = x.shape
        qkv = self.c_attn(x).view(B, T, -1, d // self.n_head)                            # (B, T, 3h or 5h, d_h)
        if table is not None:
            qk, rest = qkv.split((2 * self.n_head, qkv.size(2) - 2 * self.n_head), 2)
            qkv = torch.cat((rope(qk, *table), rest), 2)
        q, k, v, *more = qkv.transpose(1, 2).split(self.n_head, 1)                       # (B, h, T, d_h) each
        k_r, q_r = more or (None, None)
        if cache is not None:  # keys and values of all tokens so far; cache is (2 or 3, B, h, positions, d_h)
            for i, t in enumerate((k, v, k_r)[:len(cache)]):
                cache[i, :, :, pos:pos + T] = t
            k, v, k_r = [t[:, :, :pos + T].to(q.dtype) for t in cache] + [k_r] * (3 - len(cache))
        p = self.dropout if self.training else 0.0
        if self.attn == "mha":
            y = attention(q, k, v, dropout=p)                                            # S V
        elif self.attn == "dva":
            y, y_r = attention(q, k, torch.cat((v, k_r), -1), dropout=p).chunk(2, -1)    # S [V, K_R]
            y = torch.addcmul(y, q_r, y_r)                                               # S V + Q_R * (S K_R)
        else:
            y = attention(q, k, v, q_r, k_r, dropout=p)                                  # (S * (Q_R V^T)) K_R
        y = y.transpose(1, 2).reshape(B, T, d)                                           # Concat(heads)
        if self.attn != "mha":
            pass                                                                         # [2] has no output projection
        elif self.attn_out == "dense":
            y = self.c_proj(y)                                                           # Y W_O
        elif self.attn_out == "hadamard":
            y = hadamard_affine(y, self.alpha, self.beta, self.heads)                    # alpha * (Y H) + beta, [1, eq. 1]
        elif self.attn_out == "head_hadamard":
            y = hadamard_affine(y, self.alpha, self.beta, self.heads, heads_only=True)   # alpha * (Y (H_h (x) I)) + beta
        else:
            y = torch.addcmul(self.beta.to(y.dtype), y, self.alpha.to(y.dtype))          # alpha * Y + beta: the control without a mix
        return self.resid_dropout(y)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        d, self.kind = config.n_embd, config.mlp
        hidden = 16 * math.ceil(8 * d / 3 / 16) if self.kind == "swiglu" else 4 * d
        self.c_fc = nn.Linear(d, 2 * hidden if self.kind == "swiglu" else hidden, bias=config.bias)
        self.c_proj = nn.Linear(hidden, d, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = self.c_fc(x)
        if self.kind == "swiglu":
            gate, up = x.chunk(2, -1)
            x = F.silu(gate) * up
        else:
            x = F.gelu(x, approximate="tanh")
        return self.dropout(self.c_proj(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = Attention(config)
        self.ln_2 = make_norm(config) if config.mlp != "none" else None
        self.mlp = MLP(config) if config.mlp != "none" else None

    def forward(self, x, table=None, cache=None, pos=0):
        x = x + self.attn(self.ln_1(x), table, cache, pos)
        if self.mlp is not None:
            x = x + self.mlp(self.ln_2(x))
        return x


# -----------------------------------------------------------------------------
# GPT


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        c = self.config = config
        for name, known in CHOICES.items():
            if getattr(c, name) not in known:
                raise ValueError(f"{name}={getattr(c, name)!r}: expected one of {', '.join(known)}")
        if c.n_embd % c.n_head or (c.pos == "rope" and c.n_embd // c.n_head % 2):
            raise ValueError(f"n_embd={c.n_embd} must be a multiple of n_head={c.n_head}, by an even number where pos is rope")
        if c.attn != "mha" and c.attn_out != "dense":
            raise ValueError(f"attn={c.attn} has no output projection for attn_out={c.attn_out} to replace: drop one of the two")
        if c.init == "torch" and c.attn_out != "dense":
            raise ValueError(f"init=torch says nothing of attn_out={c.attn_out}'s alpha: take init=gpt2")
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.wpe = nn.Embedding(c.block_size, c.n_embd) if c.pos == "learned" else None
        self.drop = nn.Dropout(c.dropout)
        self.h = nn.ModuleList([Block(c) for _ in range(c.n_layer)])
        self.ln_f = make_norm(c)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        if c.tie_weights:
            self.lm_head.weight = self.wte.weight
        if c.pos == "rope":
            cos, sin = rope_table(c.block_size, c.n_embd // c.n_head)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """All initialisation, in one place: GPT-2's. A parameter that no line below names is an error."""
        if self.config.init == "torch":  # every module has initialised itself
            return
        branch = (2 * self.config.n_layer) ** -0.5  # 2L branches add to the residual stream: each starts smaller
        for name, p in self.named_parameters():
            if name.endswith(("beta", ".bias")):
                p.zero_()
            elif name.endswith("c_proj.weight"):
                p.normal_(0.0, 0.02 * branch)
            elif name.endswith("alpha"):
                # The papers do not say. H keeps norms, so alpha = branch starts the residual stream as the dense layer's c_proj does.
                p.fill_(branch)
            elif name.startswith(("wte", "wpe", "lm_head")) or name.endswith(("c_attn.weight", "c_fc.weight")):
                p.normal_(0.0, 0.02)
            elif ".ln_" in name or name.startswith("ln_f"):
                p.fill_(1.0)
            else:
                raise RuntimeError(f"nothing initialises {name}")

    def hidden(self, idx, cache=None, pos=0):
        "idx (B, T) of tokens at positions pos.. -> final normalised states (B, T, d)"
        T = idx.size(1)
        if pos + T > self.config.block_size:
            raise ValueError(f"{pos + T} tokens, but block_size is {self.config.block_size}")
        x = self.wte(idx)                                                                # (B, T, d)
        if self.wpe is not None:
            x = x + self.wpe.weight[pos:pos + T]
        table = (self.cos[pos:pos + T], self.sin[pos:pos + T]) if self.config.pos == "rope" else None
        x = self.drop(x)
        for i, block in enumerate(self.h):
            x = block(x, table, cache[i] if cache is not None else None, pos)
        return self.ln_f(x)

    def forward(self, idx, targets=None, cache=None, pos=0):
        """
        idx: (B, T) int64. Without targets: logits (B, T, vocab_size). With targets (B, T): mean cross entropy in nats, fp32.
        cache (from new_cache) holds what attention needs of earlier tokens; idx then starts at position pos.
        """
        logits = self.lm_head(self.hidden(idx, cache, pos))
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.size(-1)).float(), targets.reshape(-1))

    def new_cache(self, batch, length=None, dtype=None):
        "Empty KV cache: one (2, B, h, length, d_h) tensor a layer, k and v; 3 for dva: k, v, k_R"
        c, w = self.config, self.wte.weight
        shape = (2 if c.attn == "mha" else 3, batch, c.n_head, length or c.block_size, c.n_embd // c.n_head)
        return [torch.zeros(shape, device=w.device, dtype=dtype or w.dtype) for _ in range(c.n_layer)]

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None, use_cache=True):
        """
        Append max_new_tokens sampled tokens to idx (B, T): (B, T + max_new_tokens). temperature 0 takes the likeliest token.
        The window: past block_size tokens it is cut to its last half and filled again, so that one pass over half a block serves half a
        block of new tokens. use_cache = False computes every window afresh, in the same way: the same tokens, slowly.
        """
        training, size = self.training, self.config.block_size
        self.eval()
        start = max(0, idx.size(1) - size)  # the window is idx[:, start:]
        cache, done = self.new_cache(len(idx), min(size, idx.size(1) + max_new_tokens)) if use_cache else None, start
        for _ in range(max_new_tokens):
            if idx.size(1) - start > size:
                start = idx.size(1) - size // 2
                done = start
            if use_cache:
                x = self.hidden(idx[:, done:], cache, done - start)
            else:
                x = self.hidden(idx[:, start:])
            done = idx.size(1)
            idx = torch.cat((idx, sample(self.lm_head(x[:, -1]), temperature, top_k, generator)), 1)
        self.train(training)
        return idx

    def param_breakdown(self):
        "{part: parameters}; the parts sum to the total, shared ones counted once"
        parts = dict.fromkeys(("token embedding", "position embedding", "attention in", "attention out", "feed-forward", "norms", "head"), 0)
        for name, p in self.named_parameters():  # a tied head is named wte
            parts["token embedding" if name.startswith("wte") else "position embedding" if name.startswith("wpe") else
                  "attention in" if "c_attn" in name else "attention out" if ".attn." in name else
                  "feed-forward" if ".mlp." in name else "head" if name.startswith("lm_head") else "norms"] += p.numel()
        assert sum(parts.values()) == self.num_params()
        return parts

    def num_params(self):
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, T=None):
        """
        Floating-point operations of forward and backward for one token: 6 for every weight of a matrix product (the head included, table
        look-ups, vectors and the Hadamard transform's additions not), 6 T d for each T x T product of attention (two, dva has three, each again for its gradients), unmasked as is customary.
        """
        c, T = self.config, T or self.config.block_size
        weights = sum(p.numel() for n, p in self.named_parameters() if p.dim() == 2 and not n.startswith(("wte", "wpe")))
        return 6 * (weights + (c.vocab_size * c.n_embd if c.tie_weights else 0)) + 6 * T * c.n_embd * (2 if c.attn == "mha" else 3) * c.n_layer


def sample(logits, temperature=1.0, top_k=None, generator=None):
    "One token for each row of logits (B, V): (B, 1). The draw is made in fp64, so that it does not hang on the last bits of a sum."
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits.double() / temperature
    if top_k:
        logits[logits < logits.topk(min(top_k, logits.size(-1))).values[:, -1:]] = -math.inf
    cdf = logits.softmax(-1).cumsum(-1)
    u = torch.rand(len(logits), 1, dtype=torch.float64, generator=generator, device=generator.device if generator else logits.device)
    return torch.searchsorted(cdf, u.to(cdf.device) * cdf[:, -1:], right=True).clamp_(max=logits.size(-1) - 1)


@torch.no_grad()
def fold_hadamard(model):
    """
    A trained `hadamard` model -> an equal `head_hadamard` model (a new GPT on the same device).

    H_d = (H_h (x) I)(I (x) H_(d_h)), and the second factor acts inside each head. Attention weights mix over time only, so
    A_h (X W_V,h) H_(d_h) = A_h (X (W_V,h H_(d_h))): multiplied into W_V and its bias once, it costs nothing any more.
    """
    c = model.config
    if c.attn_out != "hadamard" or hadamard_heads(c) != c.n_head:
        raise ValueError(f"fold_hadamard takes attn_out='hadamard' with a head count and head width that are Hadamard orders; got "
                         f"attn_out={c.attn_out!r}, {c.n_head} heads of {c.n_embd // c.n_head}")
    folded = GPT(replace(c, attn_out="head_hadamard")).to(model.wte.weight.device, model.wte.weight.dtype)
    folded.load_state_dict(model.state_dict())
    d_h = c.n_embd // c.n_head
    H = hadamard_matrix(d_h, torch.float64, model.wte.weight.device) * d_h ** -0.5
    for block in folded.h:
        for p in block.attn.c_attn.parameters():  # weight (3d, d) and bias (3d,); the last d rows are V's
            v = p[2 * c.n_embd:]
            v.copy_((H @ v.double().view(c.n_head, d_h, -1)).view_as(v))
    return folded.train(model.training)


# -----------------------------------------------------------------------------
# Running a model, which both training scripts and bench.py do: the device, its precision, its speed, the learning rate


@dataclass
class Machine:
    device: torch.device
    dtype: torch.dtype   # of autocast; parameters are fp32
    rank: int            # this process among the world of torchrun's
    world: int
    note: str            # what was chosen and why

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def mean(self, x):
        "Mean over all processes of a tensor, in place; a no-op for one process"
        if self.world > 1:
            torch.distributed.all_reduce(x)
            x /= self.world
        return x


def machine(device="auto", dtype="auto"):
    "Choose device (auto | cpu | cuda | mps) and dtype (auto | float32 | bfloat16), join torchrun's processes. ValueError: not to be had."
    rank, world, local = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    note = f"{device}, as asked"
    if sys.platform == "linux":
        # glibc gives every freed block above 32 MiB back to the kernel, which must zero it again at the next step. Keeping them makes a
        # training step on two cores 1.1 times faster, several times where the machine is a small virtual one. M_MMAP_THRESHOLD, M_TRIM_THRESHOLD:
        with contextlib.suppress(Exception):  # another libc
            ctypes.CDLL(None).mallopt(-3, 1 << 30), ctypes.CDLL(None).mallopt(-1, 2**31 - 1)
    if device == "auto":
        device, note = ("cuda", "a GPU") if torch.cuda.is_available() else ("mps", "Apple's GPU") if torch.backends.mps.is_available() else ("cpu", "no GPU found")
    device = torch.device(device)
    if (device.type == "cuda" and not torch.cuda.is_available()) or (device.type == "mps" and not torch.backends.mps.is_available()):
        raise ValueError(f"--device={device}: this PyTorch ({torch.__version__}) sees no such device; take --device=cpu")
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", local)
        if device.index >= torch.cuda.device_count():
            raise ValueError(f"process {local} of this machine wants {device}, which has {torch.cuda.device_count()} GPUs: lower --nproc_per_node")
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
        has_bf16, note = torch.cuda.is_bf16_supported(including_emulation=False), f"{torch.cuda.get_device_name(device)}"
    else:
        known = getattr(torch.cpu, "get_capabilities", dict)()
        has_bf16 = device.type == "cpu" and any(known.get(k) for k in ("avx512_bf16", "amx_bf16", "bf16"))
        note += f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    if dtype == "auto":
        dtype = "bfloat16" if has_bf16 else "float32"
        note += "; bfloat16 autocast" if has_bf16 else "; float32, as there are no bfloat16 instructions"
    else:
        note += f"; {dtype}, as asked"
    if world > 1:
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        note += f"; {world} processes"
    return Machine(device, getattr(torch, dtype), rank, world, note)


PEAK = {  # dense bf16 FLOP/s with fp32 accumulation, from the makers' data sheets; the first name contained in the device's counts
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10G": 70e12,
    "A6000": 155e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "MI300X": 1307e12,
}


def peak_flops(m):
    "-> (FLOP/s, where the figure is from): the data sheet's for a known GPU in bf16, else a matrix product measured here and now"
    if m.device.type == "cuda" and m.dtype == torch.bfloat16:
        for name, peak in PEAK.items():
            if name in torch.cuda.get_device_name(m.device):
                return peak, f"{name} data sheet"
    n = 1024 if m.device.type == "cpu" else 4096
    a, b = (torch.randn(n, n, device=m.device, dtype=m.dtype) for _ in range(2))
    best = math.inf
    for _ in range(6):
        t0 = time.perf_counter()
        (a @ b)[0, 0].item()
        best = min(best, time.perf_counter() - t0)
    return 2 * n ** 3 / best, f"a {n}^3 product measured at the start"


def lr_at(step, lr, min_lr, warmup_steps, max_steps, schedule="cosine"):
    "Linear warm-up, then a cosine down to min_lr at max_steps, or constant"
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    t = (step - warmup_steps) / max(1, max_steps - 1 - warmup_steps)
    return min_lr + 0.5 * (1 + math.cos(math.pi * min(1.0, t))) * (lr - min_lr)


def param_groups(model, weight_decay):
    "Every parameter in exactly one group: matrices decay, vectors (biases, norms, alpha, beta) do not"
    params = list(model.parameters())
    groups = [dict(params=[p for p in params if p.dim() >= 2], weight_decay=weight_decay),
              dict(params=[p for p in params if p.dim() < 2], weight_decay=0.0)]
    assert sum(len(g["params"]) for g in groups) == len(params)
    return groups


def load_checkpoint(path):
    "-> (model on the CPU, the checkpoint). ValueError in one line for a file that is no checkpoint of ours."
    try:
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        kind = {"GPT": (GPT, GPTConfig)}[ckpt["kind"]]
        model = kind[0](kind[1](**ckpt["config"]))
        model.load_state_dict(ckpt["model"])
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: train a model first, or name its checkpoint") from None
    except (KeyError, TypeError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as e:
        raise ValueError(f"{path} is no checkpoint of these scripts, or a damaged one ({str(e).strip().splitlines()[0] if str(e) else type(e).__name__})") from None
    return model, ckpt


def main():
    from prepare_data import VOCAB_SIZE, Parser, decode, die, encode

    parser = Parser(prog="model.py", description="Sample from a checkpoint of train_gpt.py or train_shaq.py.")
    parser.add_argument("--ckpt", default="out/gpt/ckpt.pt", help="checkpoint file")
    parser.add_argument("--prompt", default="\n", help="text to continue")
    parser.add_argument("--tokens", type=int, default=500, help="how many tokens to add")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token each time")
    parser.add_argument("--top_k", type=int, default=50, help="draw from the k likeliest tokens only; 0: from all")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    args = parser.parse_args()
    try:
        m = machine(args.device, "float32")
        model, ckpt = load_checkpoint(args.ckpt)
    except ValueError as e:
        die(e)
    ids = encode(ckpt["data"]["tokenizer"], args.prompt)
    if not ids:
        die("--prompt is empty: give at least one character to continue")
    model.to(m.device)
    out = model.generate(torch.tensor([ids], device=m.device), args.tokens, args.temperature, args.top_k,
                         torch.Generator().manual_seed(args.seed))[0].tolist()
    print(decode(ckpt["data"]["tokenizer"], [i for i in out if i < VOCAB_SIZE[ckpt["data"]["tokenizer"]]]))


if __name__ == "__main__":
    from prepare_data import run
    run(main)
