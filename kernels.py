"""
Operators of the three papers, each with its derivative, each with a fast path for GPUs (Triton) and one for everything else (PyTorch).

    hadamard_matrix(n)                        the matrix itself, entries +1 and -1
    hadamard_transform(x, scale)              scale * (x @ H), exact for every order n that hadamard_matrix knows
    hadamard_affine(x, alpha, beta)           alpha * (x @ H / sqrt(d)) + beta in one pass over memory  [1, eq. 1]

To copy an operator into another repository take its section whole: it needs torch, uses Triton where that is installed, and nothing else.

[1] Aggarwal and Kumar, Rethinking Attention Output Projection, arXiv:2603.08343v2
"""
import math
from functools import lru_cache

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # Windows, macOS, CPU-only installs: every operator below still works, through PyTorch
    triton = None

# -----------------------------------------------------------------------------
# Hadamard matrices: H_n = H_m (x) H_(2^k), the first factor by Paley's two constructions, always symmetric.
# Symmetric matters: H = H^T makes the backward pass the forward pass. (A widely used CUDA package takes that for granted with
# matrices of order 20, 28 and 40 that are not symmetric; its gradients there are wrong.)


def _is_prime(q):
    return q > 1 and all(q % p for p in range(2, math.isqrt(q) + 1))


def _paley_order(m):
    "2 or 1 if Paley's second or first construction over a prime gives a Hadamard matrix of order m, else 0"
    if m % 4:
        return 0
    if (m // 2 - 1) % 4 == 1 and _is_prime(m // 2 - 1):
        return 2
    return int(_is_prime(m - 1))  # m % 4 == 0, so m - 1 = 3 mod 4 as the first construction wants


@lru_cache(None)
def _split_order(n):
    "n -> (m, 2^k) with n = m * 2^k, m the smallest order of Paley's (or 1); None if there is no such m"
    if not isinstance(n, int) or n < 1:
        return None
    c = n & -n  # the largest power of two in n
    if n == c:
        return 1, n
    while c >= 1:
        if _paley_order(n // c):
            return n // c, c
        c //= 2
    return None


def _check_order(n, what="n"):
    if _split_order(n) is None:
        near = [v for v in range(max(1, n // 2), 2 * max(n, 2) + 1) if _split_order(v)] if isinstance(n, int) and n > 0 else [1, 2, 4]
        low, high = [v for v in near if v < n][-1:], [v for v in near if v > n][:1]
        raise ValueError(f"no Hadamard matrix of order {what}={n} is built here (orders are m * 2^k, m = 1, 12, 20, 28, 36, 44, 60, ...): "
                         f"the nearest that work are {' and '.join(map(str, low + high))}")


@lru_cache(None)
def _paley(m):
    "Symmetric Hadamard matrix of order m by Paley's constructions, int8"
    second = _paley_order(m) == 2
    q = m // 2 - 1 if second else m - 1
    chi = torch.full((q,), -1, dtype=torch.int8)  # quadratic character mod q: 0 at 0, +1 at squares, -1 elsewhere
    chi[torch.arange(1, q) ** 2 % q] = 1
    chi[0] = 0
    i = torch.arange(q)
    if second:  # q = 1 mod 4: C = [[0, 1], [1, chi(i-j)]] is symmetric, and so is H = C (x) [[1,1],[1,-1]] + I (x) [[1,-1],[-1,-1]]
        C = torch.ones(q + 1, q + 1, dtype=torch.int8)
        C[0, 0], C[1:, 1:] = 0, chi[(i[:, None] - i) % q]
        return (torch.kron(C, torch.tensor([[1, 1], [1, -1]], dtype=torch.int8))
                + torch.kron(torch.eye(q + 1, dtype=torch.int8), torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8)))
    # q = 3 mod 4: the textbook core chi(i-j) is skew. Columns taken in the order -j give chi(i+j), which is symmetric.
    H = torch.ones(q + 1, q + 1, dtype=torch.int8)
    H[1:, 1:] = -chi[(i[:, None] + i) % q] - ((i[:, None] + i) % q == 0).to(torch.int8)
    return H


def hadamard_matrix(n, dtype=torch.float32, device=None):
    """
    Symmetric Hadamard matrix of order n, (n, n), entries +1 and -1: H = H^T, H @ H = n * I.

    H_n = H_m (x) H_(2^k), H_m by Paley's first or second construction over a prime, H_(2^k) Sylvester's in natural order, so that
    H_n (x) H_p is again hadamard_matrix(n * p) when p is a power of two. ValueError for any other n, naming the nearest orders that work.
    """
    _check_order(n)
    m, c = _split_order(n)
    H = _paley(m) if m > 1 else torch.ones(1, 1, dtype=torch.int8)
    while len(H) < n:
        H = torch.kron(H, torch.tensor([[1, 1], [1, -1]], dtype=torch.int8))
    return H.to(device=device, dtype=dtype)


# -----------------------------------------------------------------------------
# PyTorch path. H_d = A (x) B with A and B near sqrt(d): each row, seen as a matrix X of shape (a, b), becomes A X B, two small dense
# products instead of log2(d) sweeps of slices. On two AVX-512 cores, 4096 rows of 1024 in fp32: 4.5 ms so, 20 ms by butterflies, 65 ms
# dense. Rows go through in blocks of 512, so that everything between the first read and the last write stays in the L2 cache and
# no temporary of full size is ever paged in (a fresh 32 MiB costs more than the whole transform).

_ROWS = 512


@lru_cache(64)
def _factors(d, n_head, heads_only, dtype, device):
    """
    The dense factors (A, B) of the layer's matrix. heads_only: H_h (x) I, B = None. Else H_h (x) H_(d/h), h = 1 being the plain H_d.
    """
    if heads_only:
        return hadamard_matrix(n_head, dtype, device), None
    orders = [f for n in (n_head, d // n_head) for f in (_split_order(n)[0], *[2] * (_split_order(n)[1].bit_length() - 1)) if f > 1]
    cut = min(range(len(orders) + 1), key=lambda i: (max(math.prod(orders[:i]), math.prod(orders[i:])), i))  # the wider factor last
    pair = []
    for part in (orders[:cut], orders[cut:]):
        F = torch.ones(1, 1, dtype=torch.int8)
        for n in part:
            F = torch.kron(F, hadamard_matrix(n, torch.int8))
        pair.append(F.to(device=device, dtype=dtype))
    return tuple(pair)


def _blocks(x, n_head, heads_only):
    "-> (rows a block, function block (r, d) -> its unnormalised transform (r, d), in buffers that the next call overwrites)"
    N, d = x.shape
    A, B = _factors(d, n_head, heads_only, x.dtype, x.device)
    a = len(A)
    b = d // a
    r = min(_ROWS, max(N, 1)) if x.device.type == "cpu" else max(N, 1)  # elsewhere a launch costs more than a cache miss
    t, u = x.new_empty(r * a, b), x.new_empty(r, a, b)
    A = A.expand(r, a, a)

    def transform(block, out=None):
        n = len(block)
        out = u[:n] if out is None else out.view(n, a, b)
        X = block.reshape(n * a, b) if B is None else torch.mm(block.reshape(n * a, b), B, out=t[:n * a])  # X B
        return torch.bmm(A[:n], X.view(n, a, b), out=out).view(n, d)                                      # A (X B)

    return r, transform


def _transform_torch(x, alpha, beta, pre, scale, n_head, heads_only):
    r, transform = _blocks(x, n_head, heads_only)
    out = torch.empty_like(x)
    alpha = None if alpha is None else alpha * scale
    for i in range(0, len(x), r):
        block, o = x[i:i + r], out[i:i + r]
        if pre is not None:
            block = (block * pre).to(x.dtype)
        if alpha is None and beta is None:
            transform(block, o)
            if scale != 1.0:
                o.mul_(scale)
        else:  # mixed types (bf16 rows, fp32 alpha) are computed in fp32 and rounded once, on the way out
            u = transform(block)
            o.copy_(u.mul(alpha) if beta is None else torch.addcmul(beta, u, alpha if alpha is not None else u.new_tensor(scale)))
    return out


def _grads_torch(x, dy, scale, n_head, heads_only):
    r, transform = _blocks(x, n_head, heads_only)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    dalpha, dbeta = x.new_zeros(x.shape[1], dtype=wide), x.new_zeros(x.shape[1], dtype=wide)
    ones = x.new_ones(1, r)
    for i in range(0, len(x), r):
        g = dy[i:i + r]
        dalpha += (ones[:, :len(g)] @ (g * transform(x[i:i + r]))).squeeze(0)  # a product with ones sums rows faster than sum(0)
        dbeta += (ones[:, :len(g)] @ g).squeeze(0)
    return dalpha * scale, dbeta


# -----------------------------------------------------------------------------
# Triton path. A row of d numbers is cut into NT tiles of W; a program holds R rows of all NT tiles in registers.
#     inside a tile    H_W, by one tensor-core product with a matrix of +-1 made in registers (16-bit input, 16 rows or more) or by
#                      butterflies (fp32, or few rows). 16-bit times +-1 is exact and sums are fp32, so nothing is rounded to 16 bits
#                      before the very end, which a second tensor-core product would need.
#     across tiles     H_NT, plain additions of whole tiles in fp32: no shuffles, no shared memory, and no padding for orders like 12.
# A tile gathers the elements (a, :, c) of a row seen as (A, NT, C), so A > 1 puts the factor across tiles in the middle:
# H_A (x) H_NT (x) H_C. That is the layer's H for 16 heads of 96 = 12 * 8. A mix over heads alone is NT = h, H_W = I.
# Floor in 16 bits: 4 bytes an element. Instructions an element on sm_90 (a budget of about 25 keeps up with an H200's memory), from
# ahead-of-time compilation: 12.7 for d = 1024, 16.1 for 768, and butterflies 26 in fp32, where the budget is twice that.

if triton is not None:

    @triton.jit
    def _butterfly(x, R: tl.constexpr, W: tl.constexpr, LOG_W: tl.constexpr):
        "x @ H_W, (R, W) -> (R, W)"
        for s in tl.static_range(LOG_W):
            y = tl.permute(tl.reshape(x, (R, W // (2 << s), 2, 1 << s)), (0, 1, 3, 2))
            a, b = tl.split(y)
            x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (R, W))
        return x

    @triton.jit
    def _across(t, M: tl.constexpr, P: tl.constexpr, LOG_P: tl.constexpr, SIGNS: tl.constexpr, PAIRS: tl.constexpr):
        "H_M (x) H_P over the tuple of M * P tiles; bit i*M+j of SIGNS is set where H_M[i, j] = -1"
        for s in tl.static_range(LOG_P):
            n = ()
            for i in tl.static_range(M * P):
                if (i >> s) & 1:
                    n = n + (t[i ^ (1 << s)] - t[i],)
                else:
                    n = n + (t[i] + t[i ^ (1 << s)],)
            t = n
        if PAIRS:  # Paley's second: C (x) [[1,1],[1,-1]] + I (x) [[1,-1],[-1,-1]], half the additions: sums and differences of pairs, then C
            n = ()
            for i in tl.static_range(M * P):
                if (i // P) & 1:
                    n = n + (t[i - P] - t[i],)
                else:
                    n = n + (t[i] + t[i + P],)
            t = n
            n = ()
            for i in tl.static_range(M * P):
                if (i // P) & 1:  # the diagonal block of C is zero; its place takes +-(the other of the pair)
                    acc = 0.0 - t[i - P]
                else:
                    acc = t[i + P]
                for k in tl.static_range(M // 2):
                    if k != i // P // 2:
                        if (SIGNS >> ((i // P // 2 * 2) * M + 2 * k)) & 1:
                            acc = acc - t[(2 * k + (i // P) % 2) * P + i % P]
                        else:
                            acc = acc + t[(2 * k + (i // P) % 2) * P + i % P]
                n = n + (acc,)
            t = n
        elif M > 1:
            n = ()
            for i in tl.static_range(M * P):
                acc = t[i % P]  # column 0 of H_M is all ones
                for k in tl.static_range(1, M):
                    if (SIGNS >> ((i // P) * M + k)) & 1:
                        acc = acc - t[k * P + i % P]
                    else:
                        acc = acc + t[k * P + i % P]
                n = n + (acc,)
            t = n
        return t

    @triton.jit
    def _load_transform(x, pre, base, col, ok, M: tl.constexpr, P: tl.constexpr, LOG_P: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
                        LOG_W: tl.constexpr, SIGNS: tl.constexpr, PAIRS: tl.constexpr, R: tl.constexpr, INNER: tl.constexpr):
        "R rows of x (times pre), transformed, unnormalised: a tuple of M * P tiles (R, W), fp32"
        loaded = ()  # all loads first: they are then in flight together
        for i in tl.static_range(M * P):
            loaded = loaded + (tl.load(x + base + i * C, mask=ok, other=0.0),)
        t = ()
        if INNER == 2:
            j = tl.arange(0, W)
            k = j[:, None] & j[None, :]  # H_W[i, j] = (-1)^popcount(i & j)
            k = k ^ (k >> 4)
            k = k ^ (k >> 2)
            k = k ^ (k >> 1)
            H = (1 - 2 * (k & 1)).to(x.dtype.element_ty)
        for i in tl.static_range(M * P):
            v = loaded[i]
            if pre is not None:  # never with INNER == 2: rounding the product to 16 bits would double the error
                v = v.to(tl.float32) * tl.load(pre + col + i * C).to(tl.float32)[None, :]
            if INNER == 2:
                y = tl.dot(v, H, out_dtype=tl.float32)
            elif INNER == 1:
                y = _butterfly(v.to(tl.float32), R, W, LOG_W)
            else:
                y = v.to(tl.float32)
            t = t + (y,)
        return _across(t, M, P, LOG_P, SIGNS, PAIRS)

    @triton.jit
    def _hadamard_kernel(x, out, alpha, beta, pre, N, scale, D: tl.constexpr, M: tl.constexpr, P: tl.constexpr, LOG_P: tl.constexpr,
                         C: tl.constexpr, CW: tl.constexpr, W: tl.constexpr, LOG_W: tl.constexpr, SIGNS: tl.constexpr,
                         PAIRS: tl.constexpr, R: tl.constexpr, INNER: tl.constexpr):
        "out = alpha * scale * ((pre * x) @ H) + beta, each of alpha, beta, pre optional; one read, one write"
        row = tl.program_id(0) * R + tl.arange(0, R).to(tl.int64)
        j = tl.arange(0, W)
        col = (j // CW) * (M * P * C) + j % CW + tl.program_id(1) * CW
        base = row[:, None] * D + col[None, :]
        ok = (row < N)[:, None]
        t = _load_transform(x, pre, base, col, ok, M, P, LOG_P, C, W, LOG_W, SIGNS, PAIRS, R, INNER)
        for i in tl.static_range(M * P):
            y = t[i] * scale
            if alpha is not None:
                y = y * tl.load(alpha + col + i * C).to(tl.float32)[None, :]
            if beta is not None:
                y = y + tl.load(beta + col + i * C).to(tl.float32)[None, :]
            tl.store(out + base + i * C, y.to(out.dtype.element_ty), mask=ok)

    @triton.jit
    def _hadamard_grads_kernel(x, dy, dalpha, dbeta, N, scale, D: tl.constexpr, M: tl.constexpr, P: tl.constexpr, LOG_P: tl.constexpr,
                               C: tl.constexpr, CW: tl.constexpr, W: tl.constexpr, LOG_W: tl.constexpr, SIGNS: tl.constexpr,
                               PAIRS: tl.constexpr, R: tl.constexpr, INNER: tl.constexpr):
        """
        Partial sums over this program's rows of dy * scale * (x @ H) and of dy: row program_id(0) of dalpha and dbeta, (G, D) fp32.
        x @ H is computed again, not saved: attention keeps x anyway. No atomics, so the sums come out the same every time.
        """
        j = tl.arange(0, W)
        col = (j // CW) * (M * P * C) + j % CW + tl.program_id(1) * CW
        da = ()
        db = ()
        for i in tl.static_range(M * P):
            da = da + (tl.zeros((R, W), tl.float32),)  # summed over rows once, at the end
            db = db + (tl.zeros((R, W), tl.float32),)
        for block in tl.range(tl.program_id(0), tl.cdiv(N, R), tl.num_programs(0), num_stages=1):
            row = block * R + tl.arange(0, R).to(tl.int64)  # 64 bits: row * D passes 2^31
            base = row[:, None] * D + col[None, :]
            ok = (row < N)[:, None]
            t = _load_transform(x, None, base, col, ok, M, P, LOG_P, C, W, LOG_W, SIGNS, PAIRS, R, INNER)
            na = ()
            nb = ()
            for i in tl.static_range(M * P):
                g = tl.load(dy + base + i * C, mask=ok, other=0.0).to(tl.float32)
                na = na + (da[i] + g * t[i],)
                nb = nb + (db[i] + g,)
            da = na
            db = nb
        out = tl.program_id(0).to(tl.int64) * D + col
        for i in tl.static_range(M * P):
            tl.store(dalpha + out + i * C, tl.sum(da[i], 0) * scale)
            tl.store(dbeta + out + i * C, tl.sum(db[i], 0))


@lru_cache(256)
def _plan(d, n_head, heads_only, bits, kind="forward"):
    """
    Shapes for the kernels above: (constexprs, num_warps), or None where they do not apply and the PyTorch path is taken: a factor m
    above 28, two factors that are no power of two, or heads of fewer than 8 channels. bits: 16 or 32, of one element. kind: "forward",
    "pre" (the input is scaled first, so it is fp32 by then), "few" (under 16 rows), "grads".
    """
    (mh, ch), (mi, ci) = _split_order(n_head), (1, 1) if heads_only else _split_order(d // n_head)
    M = mh * mi
    if triton is None or M > 28 or (mh > 1 and mi > 1) or (heads_only and d // n_head % 8):
        return None
    inner, warps = 0 if heads_only else 1, 4
    if heads_only:
        A, P, C = 1, ch, d // n_head
        CW = W = min(C & -C, 128)
        each = (4 if M * P <= 12 else 2) if kind == "grads" else 8 if bits == 16 and M * P <= 16 else 4  # numbers a thread and tile
        R = 1 if kind == "few" else max(1, each * 128 // W)
    else:
        A, C = (ch, ci) if mi > 1 else (1, ch * ci)
        if bits == 16 and kind == "forward" and A * C >= 64 and d <= 2560:
            inner, R, warps = 2, 16, 4 if d <= 1024 else 8
            W = min(A * C, 64 if d <= 1024 else 128)  # 16 bytes a thread and load
        else:
            warps = 4 if d <= 4096 else 8 if d <= 8192 else 16
            R = 1 if kind == "few" else max(1, (4096 if kind == "grads" else 8192) // d)  # 32 or 64 numbers a thread
            R = 1 << (R.bit_length() - 1)
            W = min(A * C, max(A, 1 << (max(1, warps * 128 // R) - 1).bit_length()))  # 4 numbers a thread and tile
        P = A * C // W
        C = CW = C // P
    signs = sum(1 << i for i, v in enumerate(_paley(M).flatten().tolist()) if v < 0) if M > 1 else 0
    log = lambda n: n.bit_length() - 1
    return dict(D=d, M=M, P=P, LOG_P=log(P), C=C, CW=CW, W=W, LOG_W=log(W), SIGNS=signs, PAIRS=M > 1 and _paley_order(M) == 2, R=R,
                INNER=inner), warps


def _columns(plan):  # programs along a row: one, but for a mix over heads, where each takes W of a head's channels
    return plan["C"] // plan["CW"]


def _transform_triton(x, alpha, beta, pre, scale, n_head, heads_only):
    N, d = x.shape
    plan, warps = _plan(d, n_head, heads_only, x.element_size() * 8, "few" if N < 16 else "forward" if pre is None else "pre")
    out = torch.empty_like(x)
    if N:
        _hadamard_kernel[(triton.cdiv(N, plan["R"]), _columns(plan))](x, out, alpha, beta, pre, N, scale, **plan, num_warps=warps)
    return out


def _grads_triton(x, dy, scale, n_head, heads_only):
    N, d = x.shape
    plan, warps = _plan(d, n_head, heads_only, x.element_size() * 8, "grads")
    programs = min(triton.cdiv(max(N, 1), plan["R"]), 264)  # two for each of 132 multiprocessors
    partial = torch.empty(2, programs, d, dtype=torch.float32, device=x.device)
    _hadamard_grads_kernel[(programs, _columns(plan))](x, dy, partial[0], partial[1], N, scale, **plan, num_warps=warps)
    return partial[0].sum(0), partial[1].sum(0)


# -----------------------------------------------------------------------------
# The operators. Two suffice for every derivative of any order, because H is its own transpose: the gradient of each is written with the
# two themselves.


def _on_triton(x, n_head, heads_only):
    return x.is_cuda and x.dtype != torch.float64 and _plan(x.shape[1], n_head, heads_only, x.element_size() * 8) is not None


@torch.library.custom_op("kernels::hadamard", mutates_args=())
def _hadamard(x: torch.Tensor, alpha: torch.Tensor | None, beta: torch.Tensor | None, pre: torch.Tensor | None, scale: float,
              n_head: int, heads_only: bool) -> torch.Tensor:
    "alpha * scale * ((pre * x) @ H) + beta, x (N, d) contiguous; alpha, beta, pre (d,) or None"
    run = _transform_triton if _on_triton(x, n_head, heads_only) else _transform_torch
    return run(x, alpha, beta, pre, scale, n_head, heads_only)


@torch.library.custom_op("kernels::hadamard_grads", mutates_args=())
def _hadamard_grads(x: torch.Tensor, dy: torch.Tensor, scale: float, n_head: int, heads_only: bool) -> tuple[torch.Tensor, torch.Tensor]:
    "(sum over rows of dy * scale * (x @ H), sum over rows of dy), both (d,) in fp32 (fp64 for fp64)"
    run = _grads_triton if _on_triton(x, n_head, heads_only) else _grads_torch
    return run(x, dy, scale, n_head, heads_only)


@_hadamard.register_fake
def _(x, alpha, beta, pre, scale, n_head, heads_only):
    return torch.empty_like(x)


@_hadamard_grads.register_fake
def _(x, dy, scale, n_head, heads_only):
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape[1], dtype=wide), x.new_empty(x.shape[1], dtype=wide)


def _save(ctx, inputs, output):
    x, alpha, beta, pre, *ctx.how = inputs
    ctx.save_for_backward(x, alpha, beta, pre)


def _backward(ctx, dy):  # y = alpha * scale * ((pre * x) H) + beta
    x, alpha, beta, pre = ctx.saved_tensors
    dy = dy.to(x.dtype).contiguous()
    dx = dalpha = dbeta = dpre = None
    if ctx.needs_input_grad[0]:
        dx = _hadamard(dy, pre, None, alpha, *ctx.how)                                     # pre * scale * ((alpha * dy) H)
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        dalpha, dbeta = _hadamard_grads(x if pre is None else (pre * x).to(x.dtype), dy, *ctx.how)
    if ctx.needs_input_grad[3]:
        dpre = _hadamard_grads(dy if alpha is None else (alpha * dy).to(x.dtype), x, *ctx.how)[0].to(pre.dtype)
    return (dx, dalpha.to(alpha.dtype) if ctx.needs_input_grad[1] else None, dbeta.to(beta.dtype) if ctx.needs_input_grad[2] else None, dpre,
            None, None, None)


def _save_grads(ctx, inputs, output):
    x, dy, *ctx.how = inputs
    ctx.save_for_backward(x, dy)


def _backward_grads(ctx, ga, gb):  # dalpha = sum dy * scale * (x H), dbeta = sum dy
    x, dy = ctx.saved_tensors
    return _hadamard(dy, None, None, ga, *ctx.how), _hadamard(x, ga, gb, None, *ctx.how), None, None, None


_hadamard.register_autograd(_backward, setup_context=_save)
_hadamard_grads.register_autograd(_backward_grads, setup_context=_save_grads)


def hadamard_path(d, device, n_head=1, heads_only=False):
    "In words, which path hadamard_affine takes there, for the log of whoever uses it"
    if torch.device(device).type != "cuda":
        return "PyTorch, two small dense factors"
    if triton is None:
        return "PyTorch, as Triton is not installed"
    return "PyTorch, as the Triton kernel has no plan for this width" if _plan(d, n_head, heads_only, 16) is None else "Triton kernel"


def hadamard_transform(x, scale=1.0):
    """
    scale * (x @ H) over the last dimension, H = hadamard_matrix(x.shape[-1]).

    x: (..., d), fp32, bf16, fp16 (or fp64 off the Triton path), any strides. Returns the same shape and dtype; sums are fp32 or wider on
    the Triton path. Differentiable to any order. Unnormalised by default, as in the usual CUDA package of this name; scale = d**-0.5
    makes it orthogonal. Unlike there, d = 768 is the true H_768 and not a cut-off H_1024. ValueError for an order that does not exist.
    """
    _check_order(x.shape[-1], "d")
    return _hadamard(x.reshape(-1, x.shape[-1]).contiguous(), None, None, None, float(scale), 1, False).view(x.shape)


def hadamard_affine(x, alpha, beta, n_head=1, heads_only=False):
    """
    alpha * (x @ H / sqrt(d)) + beta [1, eq. 1], in one pass over memory, with gradients of any order for x, alpha and beta.

    x: (..., d), any float dtype and strides; alpha, beta: (d,), float (typically fp32 beside bf16 rows). Returns x's shape and dtype.
    n_head = h takes H = H_h (x) H_(d/h) instead of H_d: the same matrix for most sizes, and the one whose inner factor can be folded into
    the value projection for all. heads_only = True drops that factor: H_h (x) I / sqrt(h), a mix over heads alone.
    """
    d = x.shape[-1]
    if d % n_head or alpha.shape != (d,) or beta.shape != (d,):
        raise ValueError(f"hadamard_affine: x (..., d) with d a multiple of n_head, alpha (d,) and beta (d,); got x {tuple(x.shape)}, "
                         f"alpha {tuple(alpha.shape)}, beta {tuple(beta.shape)}, n_head {n_head}")
    _check_order(n_head, "n_head")
    if not heads_only:
        _check_order(d // n_head, "d" if n_head == 1 else "d / n_head")
    scale = (n_head if heads_only else d) ** -0.5
    return _hadamard(x.reshape(-1, d).contiguous(), alpha, beta, None, scale, n_head, heads_only).view(x.shape)
