"""
Operators of papers [1] and 3, SHAQ, and two helpers of attention, each with a fast path for GPUs (Triton) and one for everything else
(PyTorch). Paper 2's operator is attention() in model.py, in PyTorch. plain_hadamard_affine and plain_fo_pool are the definitions.

    hadamard_matrix(n)                        the matrix itself, entries +1 and -1
    hadamard_transform(x, scale)              scale * (x @ H), a true H for every order that hadamard_matrix knows
    hadamard_affine(x, alpha, beta)           alpha * (x @ H / sqrt(d)) + beta in one pass over memory  [1, eq. 1]
    hadamard_affine_norm(x, .., residual, ..) the same, added to a residual, and the LayerNorm of the sum; for some sizes in one pass
    fo_pool(z, f, o, c0), qrnn_pool(gates)    c_t = f_t c_(t-1) + (1 - f_t) z_t, h_t = o_t c_t  [QRNN, eq. 4], on gates or on their logits
    rope_backward([dq, dk, dv], cos, sin)     the gradient of a joint projection to q, k, v where q and k took rotary positions
    one_query_attention(q, k, v, mask)        softmax(q k^T / sqrt(w) + mask) v of a single query a head, for decoding

README, section 4, says which lines to copy for one of them. Each needs torch (2.11 to 2.13 were tried), uses Triton (3.6 to 3.9) where that is
installed, and nothing else. Right after the import kernels.triton = None takes PyTorch on a GPU, too.

[1] Aggarwal and Kumar, Rethinking Attention Output Projection, arXiv:2603.08343v2
[QRNN] Bradbury et al., Quasi-Recurrent Neural Networks, arXiv:1611.01576
"""
import math
import operator
from functools import lru_cache, reduce

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # Windows, macOS, CPU-only installs: every operator below still works, through PyTorch
    triton = None

# True: take also two kinds of kernel that no GPU has run, only the compiler and Triton's interpreter: tensor cores for most 16-bit rows of
# the Hadamard operators, and attention of one query. To time them: python bench.py kernels decode, without and with --untried=1. Steps
# captured as CUDA graphs before keep their path
UNTRIED = False


def _operator(name, fake):
    """Registers a function as a PyTorch operator; fake takes the same arguments and returns empty results of the same form, for tracing. The
    namespace is the function's module's name, made an identifier: a copy of the file that registered the same names would replace these"""
    def register(f):
        module = f.__module__
        namespace = "_" * module[0].isdigit() + "".join(c if c.isascii() and c.isalnum() else f"_{ord(c):x}" for c in module)
        op = torch.library.custom_op(f"{namespace}::{name}", f, mutates_args=())
        op.register_fake(fake)
        return op
    return register


def _check_devices(name, *tensors):
    # else PyTorch, given meta and real tensors, would return unwritten memory, and Triton would read another GPU's, perhaps too early
    if any(t.device != tensors[0].device for t in tensors):
        raise ValueError(f"{name}: its tensors are on {', '.join(str(t.device) for t in tensors)}: expected all on one device")


def _launch(kernel, grid, x, *args, **how):
    "Runs a Triton kernel on the GPU of x, its first argument: Triton itself takes the current one. CUDA refuses an empty grid: nothing to do"
    if math.prod(grid):
        with torch.cuda.device_of(x):
            kernel[grid](x, *args, **how, enable_fp_fusion=True)  # a * b + c in one instruction; unset, Triton 3.9 warns, 3.10 takes two


def _once(name):
    "-> a function that raises in place of the derivative an operator lacks"
    def refuse(ctx, *grads):
        raise NotImplementedError(f"{name} is differentiable once: the loss must not hold a gradient that went through it")
    return refuse


def _reverse_mode_only(name):
    if torch.autograd.forward_ad._current_level >= 0:  # torch.library would silently return zero tangents
        raise NotImplementedError(f"{name} has derivatives in reverse mode only: take torch.autograd.grad, not jvp or jacfwd")


# -----------------------------------------------------------------------------
# Hadamard matrices: H_n = H_m (x) H_(2^k), a Kronecker product, the first factor by one of Paley's two constructions, always symmetric.
# Symmetry matters: with H = H^T the backward pass is the forward pass. (A widely used CUDA package takes that for granted, but its
# matrices of order 20, 28 and 40 are not symmetric, so its gradients there are wrong.)


def _is_prime(q):
    return q > 1 and all(q % p for p in range(2, math.isqrt(q) + 1))


def _paley_construction(m):
    "2 if Paley's second construction, over a prime or GF(9), gives order m; 1 if only the first, over a prime, does; else 0"
    if m % 4:
        return 0
    if (m // 2 - 1) % 4 == 1 and (_is_prime(m // 2 - 1) or m == 20):  # the first gives 20, too, at twice the additions
        return 2
    return int(_is_prime(m - 1))  # m % 4 == 0, so m - 1 = 3 mod 4 as the first construction wants


@lru_cache(None)
def _split_order(n):
    "n -> (m, 2^k) with n = m * 2^k, where m is 1 or else the smallest order that Paley's constructions give; None if there is no such m"
    n = operator.index(n)  # numpy's are fine, but the cached result is Python's
    c = n & -n  # the largest power of two in n
    while c and n != c and not _paley_construction(n // c):
        c //= 2
    return (n // c, c) if c else None


def _check_order(n, what="n"):
    if _split_order(n) is None:
        low = [next(v for v in range(n - 1, 0, -1) if _split_order(v))] if n > 1 else []
        high = [next(v for v in range(max(n, 0) + 1, 2 * max(n, 1) + 1) if _split_order(v))]  # a power of two at the latest
        raise ValueError(f"no Hadamard matrix of order {what}={n} is built here (orders are m * 2^k, m = 1, 12, 20, 28, 36, 44, 60, ...): "
                         f"the nearest that work are {' and '.join(map(str, low + high))}")


def _paley(m):
    "Symmetric Hadamard matrix of order m by Paley's constructions, int8, on the CPU"
    second = _paley_construction(m) == 2
    q = m // 2 - 1 if second else m - 1
    chi = torch.full((q,), -1, dtype=torch.int8, device="cpu")  # quadratic character mod q: 0 at 0, +1 at squares, -1 elsewhere
    chi[torch.arange(1, q, device="cpu") ** 2 % q] = 1
    chi[0] = 0
    sums = lambda v: v.repeat(2).unfold(0, q, 1)[:q]  # (q, q), v(i+j): a view, ten times as fast as by indices
    if second:  # q = 1 mod 4: C = [[0, 1], [1, chi(i-j)]] is symmetric, and so is H = C (x) [[1,1],[1,-1]] + I (x) [[1,-1],[-1,-1]]
        C = chi.new_ones(q + 1, q + 1)
        C[0, 0] = 0
        if q == 9:  # GF(9) = {a + bi}, a, b mod 3; x is a square where x^4 = a^2 + b^2 is 1
            a, b = torch.arange(9, device="cpu") // 3, torch.arange(9, device="cpu") % 3
            n = ((a[:, None] - a) ** 2 + (b[:, None] - b) ** 2) % 3
            C[1:, 1:] = torch.where(n == 2, -1, n)
        else:
            C[1:, 1:] = sums(chi.roll(-1)).flip(0)  # row i: chi(q-1-i + 1 + j) = chi(j-i) = chi(i-j)
        I = torch.eye(q + 1, dtype=torch.int8, device="cpu")
        return torch.kron(C, chi.new_tensor([[1, 1], [1, -1]])) + torch.kron(I, chi.new_tensor([[1, -1], [-1, -1]]))
    # q = 3 mod 4: in the textbook's [[1, 1], [-1, chi(i-j) + I]] chi(i-j) is skew. Taking column -j for column j makes it chi(i+j), which is
    # symmetric. Then all rows but the first change sign: they are 1, then -chi(i+j), but -1 where that is 0
    H = chi.new_ones(q + 1, q + 1)
    H[1:, 1:] = sums(torch.where(chi == 0, -1, -chi))
    return H


def hadamard_matrix(n, dtype=torch.float32, device=None):
    """Symmetric Hadamard matrix of order n, (n, n), entries +1 and -1, of any signed dtype: H = H^T, H @ H = n * I.

    H_n = H_m (x) H_(2^k), H_m by Paley's first or second construction over a prime (H_20: over GF(9)), H_(2^k) Sylvester's in natural
    order, so that H_n (x) H_p is again hadamard_matrix(n * p) when p is a power of two. An n that is no such product raises ValueError,
    which names the nearest orders that work; an n that is no integer raises TypeError.
    """
    n = operator.index(n)
    _check_order(n)
    m, _ = _split_order(n)
    H = _paley(m) if m > 1 else torch.ones(1, 1, dtype=torch.int8, device="cpu")
    while len(H) < n:
        H = torch.kron(H, H.new_tensor([[1, 1], [1, -1]]))
    return H.to(device=torch.get_default_device() if device is None else device, dtype=dtype)  # 0 is a device, too


def plain_hadamard_affine(x, alpha, beta, n_head=1, heads_only=False):
    """The definition of hadamard_affine: x (..., d), alpha and beta (d,) of its dtype -> (..., d). It takes a dense product's time, and that of
    making H; in fp16 x @ H may overflow"""
    d = x.shape[-1]
    H_h, rest = hadamard_matrix(n_head), torch.eye(d // n_head) if heads_only else hadamard_matrix(d // n_head)
    H = torch.kron(H_h, rest).to(x)                                                       # (d, d)
    return alpha * (x @ H / (n_head if heads_only else d) ** 0.5) + beta


# -----------------------------------------------------------------------------
# PyTorch path. H_d = A (x) B, A (a, a) and B (b, b), with a and b near sqrt(d): each row, seen as a matrix X (a, b), becomes A X B, two
# small dense products instead of log2(d) sweeps over slices. 4096 rows of 1024 in fp32 on two AVX-512 cores take 4.5 ms this way, 20 ms
# by butterflies, 65 ms as one dense product, which only narrow rows take. A CPU takes blocks of rows, of 1 MB in fp32, or 1 MB a thread in
# 16 bits, where call overhead weighs more (see _blocks). So all between the first read and the last write stays in cache, and but for fp16
# no full-size temporary is paged in (32 MiB of fresh memory cost more than the whole transform).


@lru_cache(None)  # never freed: a CUDA graph may hold their addresses
def _factors(d, n_head, heads_only, dtype, device):
    """-> A (a, a), B (b, b), dense: A (x) B is the layer's H_h (x) H_(d/h), or H_h (x) I if heads_only. None is an identity: B if heads_only;
    A for narrow rows, whose one product takes 0.44 to 0.86 of the time of two, forward and backward, on two cores of Zen 5"""
    if heads_only:  # never one product with H_h (x) I: its zeros times NaN would be NaN
        return hadamard_matrix(n_head, dtype, device), None
    if d <= (192 if dtype.itemsize == 2 else 96):
        return None, torch.kron(*(hadamard_matrix(n, torch.int8, "cpu") for n in (n_head, d // n_head))).to(device=device, dtype=dtype)
    orders = []
    for n in (n_head, d // n_head):
        m, c = _split_order(n)
        orders += [m] + [2] * (c.bit_length() - 1)
    cut = min(range(len(orders) + 1), key=lambda i: max(math.prod(orders[:i]), math.prod(orders[i:])))  # most evenly; on a tie the wider last
    A, B = (reduce(torch.kron, [hadamard_matrix(n, torch.int8, "cpu") for n in (1, *part)]) for part in (orders[:cut], orders[cut:]))
    return A.to(device=device, dtype=dtype), B.to(device=device, dtype=dtype)


@lru_cache(4)
def _copies(r, *key):
    "_factors' A, r times in memory, (r, a, a): every 16-bit product would copy an expanded A anew. 1 MB a thread at d = 1024"
    return _factors(*key)[0].repeat(r, 1, 1)


def _blocks(x, n_head, heads_only):
    "-> r, the rows of a block; a function that transforms a block (up to r, d), unnormalised, into out, which must not overlap it"
    N, d = x.shape
    A, B = _factors(d, n_head, heads_only, x.dtype, x.device)
    r = max(N, 1)
    if x.device.type == "cpu":  # elsewhere a launch costs more than a cache miss
        most = max(128, 2 ** 18 // d) if x.element_size() > 2 else max(256, 2 ** 19 * torch.get_num_threads() // d)
        blocks = -(-r // min(most, 2048))
        r = -(-r // blocks)  # blocks of about one size: no last one of a few rows
    if A is None:
        return r, lambda block, out: torch.mm(block, B, out=out)                              # X H
    a, b = len(A), d // len(A)
    t, A = x.new_empty(r, a, b), A.expand(r, a, a)
    if x.device.type == "cpu" and x.element_size() == 2:
        A = _copies(r, d, n_head, heads_only, x.dtype, x.device)

    def transform(block, out):
        n = len(block)
        T, A_n = (t, A) if n == r else (t[:n], A[:n])
        X = block.reshape(n, a, b)
        if B is not None:
            X = torch.mm(X.reshape(n * a, b), B, out=T.view(n * a, b)).view(n, a, b)          # X B
        return torch.bmm(A_n, X, out=out.view(n, a, b)).view(n, d)                            # A (X B)

    return r, transform


def _few_rows_torch(x, alpha, beta, scale, n_head, heads_only):
    "_transform_torch in as few calls as possible, in fp32 or wider: for a few rows (generation), where calls cost more than the work"
    dtype = torch.promote_types(x.dtype, torch.float32)
    N, d = x.shape
    A, B = _factors(d, n_head, heads_only, dtype, x.device)
    a, y = 1 if A is None else len(A), x.to(dtype)
    b = d // a
    if B is not None:
        y = torch.mm(y.view(N * a, b), B, out=y.new_empty(N * a, b))  # without out= autocast would round it to 16 bits
    if A is not None:
        y = torch.bmm(A.expand(N, a, a), y.view(N, a, b), out=y.new_empty(N, a, b))
    y = y.view(N, d)
    return torch.addcmul(beta, y, alpha, value=scale, out=y).to(x.dtype)  # out= here, too, as autocast would refuse bf16 beside fp16


def _affine_rows(x, weight, shift, out):
    """-> out = weight * x + shift, rounded once. x and out (n, d) share a dtype; weight (d,) and shift, (d,) or None, are in it or in fp32. For
    16-bit rows and fp32 vectors a CPU has one operator that needs no copy: BatchNorm of mean 0, variance 1, 2.4 times as fast as two copies"""
    if x.dtype == weight.dtype:
        torch.mul(x, weight, out=out) if shift is None else torch.addcmul(shift, x, weight, out=out)
    elif x.device.type == "cpu":
        mean, var, stat = torch.zeros_like(weight), torch.ones_like(weight), weight.new_empty(0)
        torch.ops.aten.native_batch_norm.out(x, weight, shift, mean, var, False, 0.0, 0.0, out=out, save_mean=stat, save_invstd=stat.clone())
    else:
        y = x.to(weight.dtype)
        out.copy_(y.mul_(weight) if shift is None else torch.addcmul(shift, y, weight))
    return out


def _affine_grads(u, g, weight, of_u, scratch):
    """Derivatives of y = weight * u + shift; u, g = dL/dy (n, d) -> weight * g (None unless of_u), sums over rows of u * g and of g. On a CPU
    the derivative of BatchNorm (see above) is just that, in 16 bits 2.6 times as fast as plain passes. scratch is (n, d) in u's dtype, and
    may be u itself"""
    if u.dtype != g.dtype:  # a residual's gradient may be of any dtype
        u, g = (t.to(torch.promote_types(u.dtype, g.dtype)) for t in (u, g))
        weight, scratch = weight.to(torch.promote_types(u.dtype, weight.dtype)), torch.empty_like(u)
    # ones @ g is g.sum(0), up to 2.5 times faster on one thread; out= keeps it in fp32 under autocast. Not on a GPU, where it may be TF32 (a
    # CPU may use bf16 if torch.set_float32_matmul_precision("medium") asks for that)
    if u.dtype == weight.dtype and not u.is_cuda:
        ones, sums = u.new_ones(1, len(u)), u.new_empty(2, 1, u.shape[1])
        torch.mm(ones, torch.mul(u, g, out=scratch), out=sums[0])
        torch.mm(ones, g, out=sums[1])
        return torch.mul(g, weight, out=scratch) if of_u else None, *sums[:, 0]
    if u.device.type == "cpu" and len(u):  # without rows this operator divides by 0, which ends the process
        mean, var = torch.zeros_like(weight), torch.ones_like(weight)
        return torch.ops.aten.native_batch_norm_backward(g, u, weight, mean, var, None, None, False, 0.0, [of_u, True, True])
    g = g.to(weight.dtype)
    return (g * weight).to(u.dtype) if of_u else None, (g * u).sum(0), g.sum(0)


def _transform_torch(x, alpha, beta, pre, scale, n_head, heads_only, kept=None):
    "alpha * scale * ((pre * x) @ H) + beta; alpha, beta, pre may be None; beta and kept want alpha. kept (N, d) is filled with x @ H"
    if x.numel() <= 2 ** 15 and beta is not None and pre is None and kept is None:
        return _few_rows_torch(x, alpha, beta, scale, n_head, heads_only)
    if x.dtype == torch.float16:  # x H may pass 65504 where the result does not, so kept is None; on a CPU fp32 products are faster, too
        return _transform_torch(x.float(), alpha, beta, pre, scale, n_head, heads_only).to(x.dtype)
    r, transform = _blocks(x, n_head, heads_only)
    out = x.new_empty(x.shape)  # not empty_like: it would keep a transposed row's strides (d = 1), which views below may refuse
    wide = torch.promote_types(x.dtype, torch.float32)
    alpha, beta, pre = (v if v is None else v.to(wide) for v in (alpha, beta, pre))
    scaled = None if pre is None else x.new_empty(r, x.shape[1])
    if alpha is not None:
        alpha = alpha * scale
    elif pre is not None:  # saves a pass
        pre, scale = pre * scale, 1.0
    for X, o, u in zip(x.split(r), out.split(r), (out if kept is None else kept).split(r)):  # (r, d) each, the last may be shorter
        if pre is not None:
            X = _affine_rows(X, pre, None, scaled[:len(o)])
        transform(X, u)                                                                   # u = X H; u is o if not kept
        if alpha is not None:
            _affine_rows(u, alpha, beta, o)
        elif scale != 1.0:
            o.mul_(scale)
    return out


def _grads_torch(x, dy, scale, n_head, heads_only, alpha=None):
    "-> (dalpha, dbeta). Given alpha, x is the x @ H that forward kept -> (dx, dalpha, dbeta), for which dy is read only once"
    if x.dtype == torch.float16:  # as in _transform_torch; nothing was kept, so alpha is None
        return _grads_torch(x.float(), dy.float(), scale, n_head, heads_only)
    r, transform = _blocks(x, n_head, heads_only)
    wide = torch.promote_types(x.dtype, torch.float32)
    dalpha, dbeta = (x.new_zeros(x.shape[1], dtype=wide) for _ in range(2))
    weight, scratch = torch.ones_like(dalpha) if alpha is None else alpha.to(wide) * scale, x.new_empty(r, x.shape[1])
    dx = x if alpha is None else torch.empty_like(x)  # without alpha only a stand-in: nothing is written
    for X, g, o in reversed(list(zip(x.split(r), dy.split(r), dx.split(r)))):  # last first: it may still be in cache
        v, da, db = _affine_grads(transform(X, scratch[:len(g)]) if alpha is None else X, g, weight, alpha is not None, scratch[:len(g)])
        if alpha is not None:
            transform(v, o)                                                               # (alpha * scale * g) H
        dalpha.add_(da)  # by blocks: added row by row, the sum of 65,536 equal gradients was 6e-4 off
        dbeta.add_(db)
    return (dalpha * scale, dbeta) if alpha is None else (dx, dalpha * scale, dbeta)


# -----------------------------------------------------------------------------
# Triton path. A row of d numbers is cut into NT = M * P tiles of W. A program holds R rows, all their tiles, in registers. H is applied:
#     inside a tile    H_W, by butterflies in fp32, rounded to 16 bits only at the end; not at all if INNER = 0 (a mix over heads).
#                      With UNTRIED most 16-bit rows take products on tensor cores instead: see _dots.
#     across tiles     H_M (x) H_P, plain additions of whole tiles in fp32: no shuffles, no shared memory, no padding for orders like 12.
# The kernels' constexprs, chosen by _plan:
#     D        d, the distance in memory from one row to the next
#     M, P     NT = M * P tiles a row: M is m (1, 12, 20 or 28), P a power of two. In a mix over heads each head is a tile: NT = h
#     C, CW    a row is seen as (A, NT, C), and tile n holds its elements (a, n, c), all a and c: H = H_A (x) H_NT (x) H_C, of which H_NT goes
#              across tiles, H_A and H_C, together H_W, inside one. CW is the width of C in a tile: C itself, except in a mix over heads, where
#              a program takes CW of every head's C channels, or pads C below 128 to a power of two (96 to CW = 128)
#     W, R     a tile is (R, W), W = A * CW. A > 1 makes this the layer's H for, say, 16 heads of 96 = 12 * 8
#     V        how many neighbours in a row a thread holds
#     TURN     by how many places the numbers that a program loads are turned already: see _inner. 1 if A > 1: for 16 heads of 96, whose
#              tiles are pieces of 16 bytes, each load then takes two neighbouring pieces, a sector of the cache
# The plans were chosen by timing on an H200 (README: "Tried in vain, or not taken"). Counting instructions in compiled code misleads, as many
# small programs hide one another's waits: at d = 1024 one row in one warp of 64 registers takes 76 us (65,536 rows in bf16; a copy 65), a
# loop over rows that copies ahead into shared memory 188. With pre alone 1024 runs at 0.98 of a copy's rate: what remains are mostly loads
# of alpha and beta.

if triton is not None:

    @triton.jit
    def _levels(t, NT: tl.constexpr, LEAST: tl.constexpr, END: tl.constexpr):
        "Butterflies over the tuple of NT tiles: between tiles LEAST apart, then 2 LEAST, and so on below END"
        for s in tl.static_range(16):
            if LEAST <= 1 << s and 1 << s < END:
                n = ()
                for i in tl.static_range(NT):
                    n = n + (t[i ^ (1 << s)] - t[i] if (i >> s) & 1 else t[i] + t[i ^ (1 << s)],)
                t = n
        return t

    @triton.jit
    def _grid(t, P: tl.constexpr):
        """_across's C u + v and C v - u for H_20, in 6 additions an element, the butterfly included, instead of 10. GF(9) is a 3 x 3 grid
        in which chi(x - y) is 1 along y's row and column, 0 at y and -1 elsewhere, so (C x)_y = x_0 - sum + 2 (row + column) - 3 x_y and
        (C x)_0 = sum; all sums are over the grid, without x_0. The tiles are ten groups of 2 P: x_0, then the grid by rows."""
        Q: tl.constexpr = 2 * P
        lines = ()  # sums of 3 rows, then of 3 columns, each for Q tiles
        for row in tl.static_range(3):
            for j in tl.static_range(Q):
                lines = lines + (t[(3 * row + 1) * Q + j] + t[(3 * row + 2) * Q + j] + t[(3 * row + 3) * Q + j],)
        for i in tl.static_range(3 * Q):
            lines = lines + (t[i + Q] + t[i + 4 * Q] + t[i + 7 * Q],)
        n = ()
        for y in tl.static_range(10):
            for j in tl.static_range(Q):
                acc = lines[j] + lines[Q + j] + lines[2 * Q + j]
                if y > 0:
                    acc = (t[j] - acc) - 3 * t[y * Q + j] + 2 * (lines[(y - 1) // 3 * Q + j] + lines[(3 + (y - 1) % 3) * Q + j])
                n = n + (acc - t[y * Q + j - P] if j >= P else acc + t[y * Q + j + P],)
        return n

    @triton.jit
    def _across(t, M: tl.constexpr, P: tl.constexpr, LEAST: tl.constexpr):
        """H_M (x) H_(P / LEAST) (x) I over the tuple of M * P tiles. M is 1, 12, 20 or 28. The last three are Paley's second construction:
        after one more butterfly, u = x_0 + x_1 and v = x_0 - x_1 of each pair, H_M x is (C u + v, C v - u), in half of the additions."""
        t = _levels(t, M * P, LEAST, P * (1 + (M > 1)))
        if M == 20:
            t = _grid(t, P)
        elif M > 1:
            Q: tl.constexpr = 2 * P
            n = ()
            for y in tl.static_range(M // 2):
                for j in tl.static_range(Q):
                    acc = 0.0 - t[y * Q + j - P] if j >= P else t[y * Q + j + P]
                    for x in tl.static_range(M // 2):
                        if x != y:  # C: 1 in row and column 0, else chi(y - x), 1 if (y - x)^((q - 1) / 2) = 1 mod q = M / 2 - 1 (Euler)
                            if x * y == 0 or (y - x) ** (M // 4 - 1) % (M // 2 - 1) == 1:
                                acc = acc + t[x * Q + j]
                            else:
                                acc = acc - t[x * Q + j]
                    n = n + (acc,)
            t = n
        return t

    # _inner applies H_W. Plainly, each level between a warp's lanes would shuffle every number. Turning a ring, it shuffles half: the ring's six
    # places are the five bits of the lane (a thread's number in its warp) and one bit of the register (the lowest bit of the tile's number);
    # fewer if a row has fewer than 32 threads. Two threads whose lanes differ in one bit exchange one register of every two. Then that bit is in
    # the registers, where a level of the butterfly is plain additions, and the former register bit is in the lane. After all lane bits
    # everything has moved on by one place in the ring, and results are stored by other threads than those that loaded the inputs: after TURN
    # calls, tiles 2i and 2i + 1 of a thread are the numbers that _places names.
    # No selections are needed: of tiles (0, 1) a thread holds (b, 1 - b), b being its lane's next bit, so it always keeps the first and
    # sends the second. Of (x, y), x + y and x - y are put in the next level's order by a factor of +-1 on y. x - y may come out
    # negated: that sign depends on the thread alone and does not change any more, so _signs corrects all of them at the end.
    # The smallest case, d = 4: two threads (L = 2), two tiles (P = 2), TURN = 0, so lane l loads places l and 2 + l. At s = 0 the sign swaps
    # sum and difference in odd lanes, at s = 1 both lanes keep the first number and send the second:
    #     lane 0    x0, x2    x0+x2, x0-x2    x0+x2, x1+x3    y0, y1
    #     lane 1    x1, x3    x1-x3, x1+x3    x1-x3, x0-x2    y2, -y3
    # Now lane l has places 2l and 2l + 1 (_places with TURN + 1), and _signs turns -y3 round.
    # K: the warps that share a row. L: the threads of each. T: TURN modulo the number of places in the ring.

    @triton.jit
    def _places(M: tl.constexpr, P: tl.constexpr, C: tl.constexpr, CW: tl.constexpr, W: tl.constexpr, INNER: tl.constexpr, V: tl.constexpr,
                TURN: tl.constexpr):
        "The places in a row of a thread's numbers of each tile, after TURN calls of _inner: a tuple of M * P, (W,) each"
        L: tl.constexpr = W // V if W < 32 * V else 32
        T: tl.constexpr = TURN % (1 + (L > 1) + (L > 2) + (L > 4) + (L > 8) + (L > 16)) if INNER else 0
        j, tile, S = tl.arange(0, W), 0, 0
        if T > 0:
            lane = j // V % L
            tile = lane >> (T - 1) & 1
            j = j // (L * V) * (L * V) + ((lane >> T) + (lane & ((1 << (T - 1)) - 1)) * (L >> (T - 1))) * V + j % V
            S = (L >> T) * V
        first = tl.max_contiguous(tl.multiple_of(j // CW * (M * P * C) + j % CW + tile * C, V), V)
        at = ()
        for i in tl.static_range(M * P):
            at = at + (first + (i * C if T == 0 else i // 2 * 2 * C + i % 2 * (S // CW * (M * P * C) + S % CW)),)
        return at

    @triton.jit
    def _signs(scale, P: tl.constexpr, W: tl.constexpr, INNER: tl.constexpr, V: tl.constexpr, TURN: tl.constexpr):
        "The factors, +-scale, for a thread's numbers of even and of odd tiles after _inner: (1, W) each, or scale where no sign changes"
        L: tl.constexpr = W // V if W < 32 * V else 32
        T: tl.constexpr = TURN % (1 + (L > 1) + (L > 2) + (L > 4) + (L > 8) + (L > 16)) if P == 1 else 0
        unit = scale, scale
        if INNER and L > 1:
            lane = (tl.arange(0, W) // V % L)[None, :]
            x = lane & lane >> 1                           # a sign for each pair of adjacent bits that are both 1
            if T > 0:
                x = x & ~(1 << (T - 1))                    # except where H_M's bit came between
            x = x ^ x >> 2
            x = (x ^ x >> 1) & 1
            even = scale * (1 - 2 * x).to(tl.float32)
            unit = even, even
            if 1 << T != L:
                unit = even, even * (1 - 2 * (lane // (L // 2))).to(tl.float32)
        return unit

    @triton.jit
    def _swap(t, by, NT: tl.constexpr, V: tl.constexpr):
        "Tiles 2i and 2i + 1 change places where by is 1"
        n = ()
        for i in tl.static_range(NT * V):
            n = n + (tl.where(by == 1, t[i - V] if i // V % 2 else t[i + V], t[i]),)
        return n

    @triton.jit
    def _inner(t, R: tl.constexpr, M: tl.constexpr, P: tl.constexpr, W: tl.constexpr, V: tl.constexpr, TURN: tl.constexpr):
        """The tuple of M * P tiles (R, W), fp32, times H_M (x) H_P (x) H_W. For TURN, places and signs see above. Only rows spread over
        K > 1 warps need shared memory and barriers."""
        L: tl.constexpr = W // V if W < 32 * V else 32
        K: tl.constexpr = W // (L * V)
        T: tl.constexpr = TURN % (1 + (L > 1) + (L > 2) + (L > 4) + (L > 8) + (L > 16))
        n = ()
        for i in tl.static_range(M * P):
            x = tl.reshape(t[i], (R * K, L * V))
            warp = tl.broadcast_to(tl.arange(0, R * K)[:, None], (R * K, L * V))
            for s in tl.static_range(11):
                if 1 << s < K:
                    x = tl.gather(x, warp ^ (1 << s), 0) + (1 - 2 * (warp >> s & 1)).to(tl.float32) * x  # x_i + x_j, or x_j - x_i where i > j
            u = (x,)
            for s in tl.static_range(3):
                if 1 << s < V:
                    w = ()
                    for v in tl.static_range(1 << s):
                        a, b = tl.split(tl.reshape(u[v], (R * K, L * V >> (s + 1), 2)))
                        w = w + (a + b, a - b)
                    u = w
            n = n + u
        t = n                                              # M * P * V of (R * K, L)
        if P > 1:
            t = _across(t, M, P * V, 2 * V)
        lane = tl.broadcast_to(tl.arange(0, L)[None, :], (R * K, L))
        for s in tl.static_range(6):                       # on bit s - 1 of the lane, moved to the registers; 0: on the bit already there
            if 1 << s <= L and M * P > 1:
                if s > 0:
                    n = ()
                    for i in tl.static_range(M * P * V):
                        n = n + (tl.gather(t[i], lane ^ (1 << (s - 1)), 1) if i // V % 2 else t[i],)
                    t = n
                if P == 1 and s == T:                      # H_M's bit is in registers
                    if s > 0:
                        t = _swap(t, lane >> (s - 1) & 1, M * P, V)
                    t = _across(t, M, V, V)
                    if 1 << s < L:
                        t = _swap(t, lane >> s & 1, M * P, V)
                else:
                    sign = (1 - 2 * (lane >> s & 1)).to(tl.float32)
                    n = ()
                    for i in tl.static_range(M * P * V):
                        if i // V % 2:
                            n = n + (t[i - V] - sign * t[i] if 1 << s < L else t[i - V] - t[i],)
                        else:
                            n = n + (t[i] + sign * t[i + V] if 1 << s < L else t[i] + t[i + V],)
                    t = n
        n = ()
        for i in tl.static_range(M * P):
            u = ()
            for v in tl.static_range(V):
                u = u + (t[i * V + v],)
            for s in tl.static_range(3):
                if 1 << s < V:
                    w = ()
                    for v in tl.static_range(V >> (s + 1)):
                        w = w + (tl.reshape(tl.join(u[2 * v], u[2 * v + 1]), (R * K, 2 * L << s)),)
                    u = w
            n = n + (tl.reshape(u[0], (R, W)),)
        return n

    @triton.jit
    def _load_tiles(rows, at, ok, NT: tl.constexpr):
        "-> NT tiles (R, W), from pointers rows (R, 1). All loads come before the first use, so all are in flight at once."
        t = ()
        for i in tl.static_range(NT):
            t = t + (tl.load(rows + at[i][None, :], mask=ok, other=0.0),)
        return t

    @triton.jit
    def _load_vector(v, at, live, R: tl.constexpr, W: tl.constexpr):
        """W numbers of vector v, repeated for each of R rows: (R, W), fp32, 0 where not live. Loaded as a single row, they would be spread
        over all threads by Triton and then passed round through shared memory."""
        at = tl.broadcast_to(v + at[None, :], (R, W))
        return (tl.load(at) if live is None else tl.load(at, mask=tl.broadcast_to(live[None, :], (R, W)), other=0.0)).to(tl.float32)

    @triton.jit
    def _transform(tiles, R: tl.constexpr, M: tl.constexpr, P: tl.constexpr, W: tl.constexpr, INNER: tl.constexpr, V: tl.constexpr,
                   TURN: tl.constexpr):
        "R rows, as a tuple of M * P tiles (R, W), times H, unnormalised, in fp32; without _signs, and one turn further on"
        t = ()
        for i in tl.static_range(M * P):
            t = t + (tiles[i].to(tl.float32),)
        return _inner(t, R, M, P, W, V, TURN) if INNER else _across(t, M, P, 1)

    # N is not specialised, here or below: that would improve no instruction, and Triton would compile separate kernels for N = 1, for
    # multiples of 16 and for all other N, in the middle of a run
    @triton.jit(do_not_specialize=["N"])
    def _hadamard_kernel(x, out, alpha, beta, pre, N, scale, D: tl.constexpr, M: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
                         CW: tl.constexpr, W: tl.constexpr, R: tl.constexpr, INNER: tl.constexpr, V: tl.constexpr, TURN: tl.constexpr):
        "out = alpha * scale * ((pre * x) @ H) + beta, each of alpha, beta, pre optional; one read, one write"
        row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
        part = tl.program_id(1) * CW  # this program's channels of every head: see _columns
        rows = row[:, None] * D + part
        at, to = _places(M, P, C, CW, W, INNER, V, TURN), _places(M, P, C, CW, W, INNER, V, TURN + 1)
        live = tl.arange(0, W) < C if CW > C else None
        ok = (row < N)[:, None] & live[None, :] if CW > C else (row < N)[:, None]
        t = _load_tiles(x + rows, at, ok, M * P)
        if pre is not None:
            n = ()
            for i in tl.static_range(M * P):
                n = n + (t[i].to(tl.float32) * _load_vector(pre + part, at[i], live, R, W),)
            t = n
        t = _transform(t, R, M, P, W, INNER, V, TURN)
        unit = _signs(scale, P, W, INNER, V, TURN)
        for i in tl.static_range(M * P):
            y = t[i] * unit[i % 2]
            if alpha is not None:
                y = y * _load_vector(alpha + part, to[i], live, R, W)
            if beta is not None:
                y = y + _load_vector(beta + part, to[i], live, R, W)
            tl.store(out + rows + to[i][None, :], y.to(out.dtype.element_ty), mask=ok)

    # The same on tensor cores, if UNTRIED, for 16-bit rows of most widths from 256 to 4096 (_dot_plan). A program is one warp. A tile is
    # 512 numbers, indexed by nine bits of their place in the row: a s c, eight neighbours in memory (strides 1 2 4); l0 l1 l2; n0 n1 n2.
    # H_2 acts on each bit by itself, in any order:
    #     a l0 l1 l2   H_16 from the left, on the tile as a matrix of rows (l2 l1 l0 a)
    #     c n0 n1 n2   H_16 from the right, on columns (c n2 n1 n0)
    #     s            a plain sum and difference
    # Where d has a factor m of 12 or 20, M = m / 4 tiles and two of l0 l1 l2 together index it, and the left H_16 becomes H_m (x) H_4, in
    # M x M blocks of 16 x 16. The bits left over in a wide row make P tiles (or P times M), combined by plain additions of whole tiles.
    # A row that is a bit short shares its tile with a second (R = 2): s tells them apart, and c has stride 2.
    #
    # The bits are dealt out so that each product finds its operand in the registers where mma wants it (its fragments). So nothing is
    # shuffled, and loads and stores take 16 bytes (R = 2: 8). A thread loads the 16 numbers that differ in a s c l2; its lane is
    # (n2 n1 n0 l1 l0). The left product leaves l2 l1 l0 and two of n in the lane, the right one (l2 l1 l0 n1 n0), and a s c n2 in registers.
    # The way back, for gradients, goes from there to the order as loaded, with l and a in the roles of n and c. If Triton chose other
    # layouts, that would cost time but not change a result.
    #
    # Products of 16-bit numbers with +-1 are exact, sums are fp32. An fp32 operand is split into two bf16, which hold 16 bits of it (the
    # result keeps 8 or 11); an infinite number makes its row NaN. Constexprs besides D, M, P and R, and forward G, a program's rows over R:
    #     IN, OUT   strides in memory of the bits of a number's place in a tile, lowest bit first, as loaded and as stored
    #     TILES     where each of the M * P tiles begins in a row
    #     K         the matrices' signs: see _sign_bits
    #     EXACT     products in fp32, for the interpreter, which multiplies bf16 wrongly (triton-lang/triton, issue 11584)

    @triton.jit
    def _spread(STRIDES: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr):
        "A tile's offsets in memory, (512,): the bits of a number's place in the tile have these STRIDES. Not ROWS: all in the first row"
        SIDE: tl.constexpr = 8 // R  # neighbours in memory
        q = tl.arange(0, 512)
        at = q % SIDE
        for i in tl.static_range(4 - R, 9 if ROWS or R == 1 else 8):
            at = at + (q >> i & 1) * STRIDES[i]
        return tl.max_contiguous(tl.multiple_of(at, SIDE), SIDE)

    @triton.jit
    def _load_pieces(x, row, at, N, D: tl.constexpr, NT: tl.constexpr, R: tl.constexpr, TILES: tl.constexpr):
        "The NT tiles (512,) of R rows, 0 from row N on"
        ok = at < tl.minimum(tl.maximum(N - row, 0), R).to(tl.int32) * D
        t = ()
        for i in tl.static_range(NT):
            t = t + (tl.load(x + row * D + TILES[i] + at, mask=ok, other=0.0),)
        return t

    @triton.jit
    def _sign_bits(K: tl.constexpr, I: tl.constexpr, M: tl.constexpr, ONE: tl.constexpr):
        """Matrix I's 256 entries, +-1 in 16 bits (ONE: the bits of +1), eight a thread, as mma wants them. There are 2 M^2 + 2 matrices:
        for the way forward M^2 left blocks, then one right matrix; for the way back one left matrix, then M^2 right blocks. K[I]: two
        words, a bit for each lane: the signs of two of its eight entries. The others follow by H_2: negated where e = e' = 1"""
        q = tl.arange(0, 256)
        if I == M * M or I > M * M + 1:  # right, bits (1' 0' 2' 2 1, e' e 0): primes are the result's, e is a or c, digits are n's or l's
            sign = tl.where((q & 1) == 1, K[I][1], K[I][0]) >> (q >> 3) ^ q >> 2 & q >> 1
        else:  # left, (2' 1' 0' 1 0, 2 e' e)
            sign = tl.where((q >> 2 & 1) == 1, K[I][1], K[I][0]) >> (q >> 3) ^ q >> 1 & q
        return (ONE | (sign & 1) << 15).to(tl.int16)

    @triton.jit
    def _sign_matrix(signs, K: tl.constexpr, I: tl.constexpr, M: tl.constexpr, T: tl.constexpr, EXACT: tl.constexpr):
        "Matrix I, (16, 16), in T: made by _sign_bits or, in a loop, loaded from signs, stored before"
        if signs is None:
            a = _sign_bits(K, I, M, 0x3F80 if T == tl.bfloat16 else 0x3C00)
        else:
            a = tl.load(signs + I * 256 + tl.arange(0, 256))
        a = tl.reshape(a.to(T, bitcast=True), (2, 2, 2, 2, 2, 2, 2, 2))
        a = tl.permute(a, (6, 3, 4, 7, 5, 0, 1, 2) if I == M * M or I > M * M + 1 else (6, 0, 1, 2, 5, 3, 4, 7))
        return tl.reshape(a, (16, 16)).to(tl.float32 if EXACT else T)

    @triton.jit
    def _halves(y, EXACT: tl.constexpr):
        "fp32 as a sum of two bf16, to 16 bits. The first is truncated: rounding takes one more instruction, of six"
        high = y.to(tl.int32, bitcast=True) & -65536  # the upper half of an fp32 is a bf16
        low = (y - high.to(tl.float32, bitcast=True)).to(tl.bfloat16)
        if EXACT:
            return high.to(tl.float32, bitcast=True), low.to(tl.float32)
        else:
            return (high >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), low

    @triton.jit
    def _dots(t, signs, K: tl.constexpr, M: tl.constexpr, P: tl.constexpr, R: tl.constexpr, BACK: tl.constexpr, EXACT: tl.constexpr):
        "A tuple of M * P tiles (512,), in 16 bits or fp32, in IN's order, times H: in fp32, in OUT's order. BACK, if R = 1: from OUT's to IN's"
        WIDE: tl.constexpr = t[0].dtype == tl.float32
        T: tl.constexpr = tl.bfloat16 if WIDE else t[0].dtype
        LEFT: tl.constexpr = M * M + 1 if BACK else 0      # the first matrix
        ML: tl.constexpr = 1 if BACK else M                # blocks a side
        MR: tl.constexpr = M if BACK else 1
        if BACK:
            t = _levels(t, M * P, 1, P)
        high, low = (), ()
        for i in tl.static_range(M * P):
            y = tl.reshape(t[i], (2, 2, 2, 2, 2, 2, 2, 2, 2))
            if R == 1:                                     # l2 n2 n1 n0 l1 l0 c s a, back n2 l2 l1 l0 n1 n0 c s a
                y = tl.permute(y, (0, 4, 5, 6, 7, 8, 1, 2, 3) if BACK else (0, 4, 5, 8, 7, 6, 1, 2, 3))
            else:                                          # s l2 n2 n1 n0 l1 l0 c a
                y = tl.permute(y, (1, 5, 6, 8, 0, 7, 2, 3, 4))
            y = tl.reshape(y, (16, 32))
            if WIDE:
                h, l = _halves(y, EXACT)
                high, low = high + (h,), low + (l,)
            else:
                high = high + (y.to(tl.float32 if EXACT else T),)
        h, l = (), ()
        for i in tl.static_range(M * P):
            y = tl.zeros((16, 32), tl.float32)             # (a l2 l1 l0, s c n2 n1 n0), back (c n2 n1 n0, s a l2 l1 l0)
            for k in tl.static_range(ML):
                S = _sign_matrix(signs, K, LEFT + (i // P * M + k if ML > 1 else 0), M, T, EXACT)
                y = tl.dot(S, high[k * P + i % P if ML > 1 else i], y, input_precision="ieee")
                if WIDE:
                    y = tl.dot(S, low[k * P + i % P if ML > 1 else i], y, input_precision="ieee")
            a, b = _halves(tl.reshape(tl.permute(tl.reshape(y, (16, 2, 16)), (1, 0, 2)), (32, 16)), EXACT)
            h, l = h + (a,), l + (b,)
        n = ()
        for i in tl.static_range(M * P):
            y = tl.zeros((32, 16), tl.float32)             # (s a l2 l1 l0, c n1 n0 n2), back (s c n2 n1 n0, a l1 l0 l2)
            for k in tl.static_range(MR):
                S = _sign_matrix(signs, K, LEFT + ML * ML + (i // P * M + k if MR > 1 else 0), M, tl.bfloat16, EXACT)
                y = tl.dot(h[k * P + i % P if MR > 1 else i], S, y, input_precision="ieee")
                y = tl.dot(l[k * P + i % P if MR > 1 else i], S, y, input_precision="ieee")
            if R == 1:
                a, b = tl.split(tl.permute(tl.reshape(y, (2, 256)), (1, 0)))
                y = tl.reshape(tl.join(a + b, a - b), (2, 2, 2, 2, 2, 2, 2, 2, 2))  # a l2 l1 l0 c n1 n0 n2 s, back c n2 n1 n0 a l1 l0 l2 s
                y = tl.permute(y, (7, 1, 2, 3, 5, 6, 0, 8, 4) if BACK else (7, 1, 2, 3, 5, 6, 4, 8, 0))
            else:
                y = tl.reshape(y, (2, 2, 2, 2, 2, 2, 2, 2, 2))
                y = tl.permute(y, (0, 8, 2, 3, 4, 6, 7, 5, 1))
            n = n + (tl.reshape(y, (512,)),)
        return n if BACK else _levels(n, M * P, 1, P)

    @triton.jit(do_not_specialize=["N"])
    def _hadamard_dot_kernel(x, out, alpha, beta, pre, N, scale, D: tl.constexpr, M: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
                             G: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, TILES: tl.constexpr, K: tl.constexpr, EXACT: tl.constexpr):
        "_hadamard_kernel on tensor cores; a program takes G times R rows"
        row = tl.program_id(0).to(tl.int64) * (R * G)
        at, to, channel = _spread(IN, R, True), _spread(OUT, R, True), _spread(IN, R, False)
        t = ()
        for g in tl.static_range(G):  # all loads first
            t = t + _load_pieces(x, row + g * R, at, N, D, M * P, R, TILES)
        n = ()
        for g in tl.static_range(G):
            u = ()
            for i in tl.static_range(M * P):
                y = t[g * M * P + i]
                if pre is not None:
                    y = y.to(tl.float32) * tl.load(pre + TILES[i] + channel).to(tl.float32)
                u = u + (y,)
            n = n + _dots(u, None, K, M, P, R, False, EXACT)
        channel = _spread(OUT, R, False)
        for i in tl.static_range(M * P):
            weight = scale
            if alpha is not None:
                weight = tl.load(alpha + TILES[i] + channel).to(tl.float32) * scale
            if beta is not None:
                shift = tl.load(beta + TILES[i] + channel).to(tl.float32)
            for g in tl.static_range(G):
                y = n[g * M * P + i] * weight
                if beta is not None:
                    y = y + shift
                ok = to < tl.minimum(tl.maximum(N - row - g * R, 0), R).to(tl.int32) * D
                tl.store(out + (row + g * R) * D + TILES[i] + to, y.to(out.dtype.element_ty), mask=ok)

    @triton.jit(do_not_specialize=["N"])
    def _hadamard_norm_kernel(x, residual, out, normed, stats, alpha, beta, weight, shift, N, scale, eps, D: tl.constexpr, M: tl.constexpr,
                              P: tl.constexpr, C: tl.constexpr, CW: tl.constexpr, W: tl.constexpr, R: tl.constexpr, INNER: tl.constexpr,
                              V: tl.constexpr, TURN: tl.constexpr, RMS: tl.constexpr):
        """out = residual + alpha * scale * (x @ H) + beta and normed = LayerNorm(out), or RMSNorm; stats (2, N): each row's mean and
        1 / deviation. A program holds whole rows, so the norm's sums cost no memory traffic: two reads and two writes, where a transform
        followed by a fused addition and norm takes three of each. Heads of 96 are in tiles of 128 (CW > C), whose lanes beyond C idle."""
        row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
        rows = row[:, None] * D
        at, to = _places(M, P, C, CW, W, INNER, V, TURN), _places(M, P, C, CW, W, INNER, V, TURN + 1)
        live = tl.arange(0, W) < C if CW > C else None
        ok = (row < N)[:, None] & live[None, :] if CW > C else (row < N)[:, None]
        ahead = _load_tiles(residual + rows, to, ok, M * P)  # before any store, which it would wait for, as addresses might be equal
        t = _transform(_load_tiles(x + rows, at, ok, M * P), R, M, P, W, INNER, V, TURN)
        unit = _signs(scale, P, W, INNER, V, TURN)
        y = ()
        total = tl.zeros((R, W), tl.float32)  # over tiles first, across threads once
        for i in tl.static_range(M * P):
            v = t[i] * unit[i % 2] * _load_vector(alpha, to[i], live, R, W) + _load_vector(beta, to[i], live, R, W)
            v = (v + ahead[i].to(tl.float32)).to(out.dtype.element_ty)
            tl.store(out + rows + to[i][None, :], v, mask=ok)
            v = v.to(tl.float32)  # the norm is of what was stored
            y = y + (v,)
            total = total + v
        mean = tl.zeros((R,), tl.float32) if RMS else tl.sum(total, 1) / D  # RMSNorm has none; 0 * mean would be nan for inf
        total = tl.zeros((R, W), tl.float32)
        for i in tl.static_range(M * P):
            v = y[i] - mean[:, None]
            total = total + v * v
        if CW > C:
            total = tl.where(live[None, :], total, 0.0)
        rstd = 1 / tl.sqrt(tl.sum(total, 1) / D + eps)
        for i in tl.static_range(M * P):
            v = (y[i] - mean[:, None]) * rstd[:, None] * _load_vector(weight, to[i], live, R, W)
            if shift is not None:
                v = v + _load_vector(shift, to[i], live, R, W)
            tl.store(normed + rows + to[i][None, :], v.to(normed.dtype.element_ty), mask=ok)
        tl.store(stats + row, mean, mask=row < N)
        tl.store(stats + N + row, rstd, mask=row < N)

    @triton.jit(do_not_specialize=["N"])
    def _hadamard_norm_backward_kernel(x, out, stats, dout, dnormed, dresidual, dx, dalpha, dbeta, dweight, dshift, alpha, weight, N, scale,
                                       D: tl.constexpr, M: tl.constexpr, P: tl.constexpr, C: tl.constexpr, CW: tl.constexpr, W: tl.constexpr,
                                       R: tl.constexpr, INNER: tl.constexpr, V: tl.constexpr, TURN: tl.constexpr, RMS: tl.constexpr):
        """All gradients of the kernel above: dresidual = dout + the norm's gradient, dx = scale * ((alpha * dresidual) @ H), and partial
        sums over this program's rows of the gradients of alpha (dresidual * scale * (x @ H)), beta, weight and shift, each in row
        program_id(0) of a (G, D). In bf16 with an fp32 residual it moves 18 bytes an element (compiled, the formula and two transforms 34). On
        an H200 it runs at 0.6 to 0.8 of a copy's rate, mixing heads at 0.8 to 1.0: besides its sums a thread's registers hold few rows."""
        at, to = _places(M, P, C, CW, W, INNER, V, TURN), _places(M, P, C, CW, W, INNER, V, TURN + 1)
        back = _places(M, P, C, CW, W, INNER, V, TURN + 2)
        unit, unit_back = _signs(scale, P, W, INNER, V, TURN), _signs(scale, P, W, INNER, V, TURN + 1)
        live = tl.arange(0, W) < C if CW > C else None
        dw = (tl.zeros((R, W), tl.float32),) * (M * P)
        ds, da, db = dw, dw, dw  # of shift, alpha, beta; dw: of weight
        for block in tl.range(tl.program_id(0), tl.cdiv(N, R), tl.num_programs(0), num_stages=1):
            row = block * R + tl.arange(0, R).to(tl.int64)
            rows = row[:, None] * D
            ok = (row < N)[:, None] & live[None, :] if CW > C else (row < N)[:, None]
            mean = tl.load(stats + row, mask=row < N, other=0.0)[:, None]
            rstd = tl.load(stats + N + row, mask=row < N, other=0.0)[:, None]
            xs, ys = _load_tiles(x + rows, at, ok, M * P), _load_tiles(out + rows, to, ok, M * P)  # all loads first, as above
            gs, rs = _load_tiles(dnormed + rows, to, ok, M * P), _load_tiles(dout + rows, to, ok, M * P)
            nw, ns, a, b = (), (), tl.zeros((R, W), tl.float32), tl.zeros((R, W), tl.float32)
            for i in tl.static_range(M * P):
                g = gs[i].to(tl.float32)
                y = (ys[i].to(tl.float32) - mean) * rstd
                nw, ns = nw + (dw[i] + g * y,), ns + (ds[i] + g,)
                g = g * _load_vector(weight, to[i], live, R, W)
                a, b = a + g, b + g * y
            dw, ds = nw, ns
            a, b = tl.zeros((R, 1), tl.float32) if RMS else tl.sum(a, 1)[:, None] / D, tl.sum(b, 1)[:, None] / D  # RMSNorm has no mean
            u = _transform(xs, R, M, P, W, INNER, V, TURN)
            t, na, nb = (), (), ()
            for i in tl.static_range(M * P):
                y = (ys[i].to(tl.float32) - mean) * rstd
                g = gs[i].to(tl.float32) * _load_vector(weight, to[i], live, R, W)
                g = rstd * (g - a - y * b) + rs[i].to(tl.float32)
                tl.store(dresidual + rows + to[i][None, :], g.to(dresidual.dtype.element_ty), mask=ok)
                na, nb = na + (da[i] + g * u[i],), nb + (db[i] + g,)
                t = t + (g * _load_vector(alpha, to[i], live, R, W),)
            da, db = na, nb
            t = _transform(t, R, M, P, W, INNER, V, TURN + 1)
            for i in tl.static_range(M * P):
                tl.store(dx + rows + back[i][None, :], (t[i] * unit_back[i % 2]).to(dx.dtype.element_ty), mask=ok)
        part = tl.program_id(0).to(tl.int64) * D
        for i in tl.static_range(M * P):
            tl.store(dalpha + part + to[i], tl.sum(da[i] * unit[i % 2], 0), mask=live)
            tl.store(dbeta + part + to[i], tl.sum(db[i], 0), mask=live)
            tl.store(dweight + part + to[i], tl.sum(dw[i], 0), mask=live)
            if dshift is not None:
                tl.store(dshift + part + to[i], tl.sum(ds[i], 0), mask=live)

    @triton.jit(do_not_specialize=["N"])
    def _hadamard_grads_kernel(x, dy, dx, alpha, dalpha, dbeta, N, scale, D: tl.constexpr, M: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
                               CW: tl.constexpr, W: tl.constexpr, R: tl.constexpr, INNER: tl.constexpr, V: tl.constexpr, TURN: tl.constexpr):
        """Partial sums over this program's rows of dy * scale * (x @ H) and of dy, in row program_id(0) of dalpha and dbeta, (G, D) fp32.
        Given alpha and dx, also dx = scale * ((alpha * dy) @ H), while dy is at hand: all three gradients at 6 bytes an element in bf16. On
        an H200 that takes 112 us for d = 768 (two kernels: 129), but 446 for 2048 (two: 309). x @ H is recomputed, not saved, as fused
        attention keeps x anyway. There are no atomics, so the sums come out the same every time."""
        part = tl.program_id(1) * CW
        at, to = _places(M, P, C, CW, W, INNER, V, TURN), _places(M, P, C, CW, W, INNER, V, TURN + 1)
        back = _places(M, P, C, CW, W, INNER, V, TURN + 2)
        unit, unit_back = _signs(scale, P, W, INNER, V, TURN), _signs(1.0, P, W, INNER, V, TURN + 1)
        live = tl.arange(0, W) < C if CW > C else None
        da = (tl.zeros((R, W), tl.float32),) * (M * P)  # summed over rows once, at the end
        db = da
        by = ()
        if dx is not None:
            for i in tl.static_range(M * P):
                by = by + (_load_vector(alpha + part, to[i], live, R, W) * scale,)
        # With two stages the next rows are copied into shared memory meanwhile, if a thread's share of a row is 4 bytes or more. One stage
        # if those of x and dy, which may be wider, would not fit into the 99 KiB of the smallest cards (before Ampere nothing is copied)
        BITS: tl.constexpr = x.dtype.element_ty.primitive_bitwidth + dy.dtype.element_ty.primitive_bitwidth
        STAGES: tl.constexpr = 2 if R * M * P * W * BITS <= 90 * 8192 else 1
        for block in tl.range(tl.program_id(0), tl.cdiv(N, R), tl.num_programs(0), num_stages=STAGES):
            row = block * R + tl.arange(0, R).to(tl.int64)  # 64 bits: row * D passes 2^31
            rows = row[:, None] * D + part
            ok = (row < N)[:, None] & live[None, :] if CW > C else (row < N)[:, None]
            gs = _load_tiles(dy + rows, to, ok, M * P)
            t = _transform(_load_tiles(x + rows, at, ok, M * P), R, M, P, W, INNER, V, TURN)
            na, nb = (), ()
            for i in tl.static_range(M * P):
                g = gs[i].to(tl.float32)
                na, nb = na + (da[i] + g * t[i],), nb + (db[i] + g,)
            da, db = na, nb
            if dx is not None:
                t = ()
                for i in tl.static_range(M * P):
                    t = t + (gs[i].to(tl.float32) * by[i],)
                t = _transform(t, R, M, P, W, INNER, V, TURN + 1)
                for i in tl.static_range(M * P):
                    tl.store(dx + rows + back[i][None, :], (t[i] * unit_back[i % 2]).to(dx.dtype.element_ty), mask=ok)
        part += tl.program_id(0).to(tl.int64) * D
        for i in tl.static_range(M * P):
            tl.store(dalpha + part + to[i], tl.sum(da[i] * unit[i % 2], 0), mask=live)
            tl.store(dbeta + part + to[i], tl.sum(db[i], 0), mask=live)

    @triton.jit(do_not_specialize=["N"])
    def _hadamard_dot_grads_kernel(x, dy, dx, alpha, dalpha, dbeta, signs, N, scale, D: tl.constexpr, M: tl.constexpr, P: tl.constexpr,
                                   R: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, TILES: tl.constexpr, K: tl.constexpr,
                                   EXACT: tl.constexpr):
        """All three gradients, as above, on tensor cores, a row (R = 1) at a time. Every program writes the bits of the same matrices to signs,
        (2 M^2 + 2, 256), and reads them back, by then from its cache: registers have no room for them, and making them anew takes longer."""
        at, to = _spread(IN, R, True), _spread(OUT, R, True)
        first: tl.constexpr = 0x3C00 if x.dtype.element_ty == tl.float16 else 0x3F80
        for i in tl.static_range(2 * M * M + 2):
            tl.store(signs + i * 256 + tl.arange(0, 256), _sign_bits(K, i, M, first if i < M * M else 0x3F80))
        tl.debug_barrier()
        da = (tl.zeros((512,), tl.float32),) * (M * P)
        db = da
        for r in tl.range(tl.program_id(0), N, tl.num_programs(0), num_stages=1):
            row = r * tl.full((), 1, tl.int64)
            xs, gs = _load_pieces(x, row, at, N, D, M * P, R, TILES), _load_pieces(dy, row, to, N, D, M * P, R, TILES)
            u = _dots(xs, signs, K, M, P, R, False, EXACT)
            na, nb = (), ()
            for i in tl.static_range(M * P):
                g = gs[i].to(tl.float32)
                na, nb = na + (da[i] + g * u[i],), nb + (db[i] + g,)
            da, db = na, nb
            if P > 2:  # keeps alpha's loads below, as earlier ones make more spill
                tl.debug_barrier()
            t = ()
            for i in tl.static_range(M * P):
                weight = tl.load(alpha + TILES[i] + to).to(tl.float32) * scale
                t = t + (gs[i].to(tl.float32) * weight,)
            t = _dots(t, signs, K, M, P, R, True, EXACT)
            for i in tl.static_range(M * P):
                tl.store(dx + row * D + TILES[i] + at, t[i].to(dx.dtype.element_ty))
        to += tl.program_id(0).to(tl.int64) * D
        for i in tl.static_range(M * P):
            tl.store(dalpha + TILES[i] + to, da[i] * scale)
            tl.store(dbeta + TILES[i] + to, db[i])


_FEW = 132  # up to so many rows (an H200's multiprocessors) cannot fill a GPU: kind "few" of _plan gives each a program of half the
# instructions a warp. Not timed


@lru_cache(256)
def _plan(d, n_head, heads_only, bits, kind="forward"):
    """-> (constexprs, num_warps) of a kernel above, or None. bits: an element's, 16 or 32. kind:
        "forward", "pre", "few"                _hadamard_kernel without pre, with it, for at most _FEW rows
        "grads", "backward"                    _hadamard_grads_kernel of alpha and beta, of x as well
        "norm", "norm few", "norm backward"    _hadamard_norm_kernel, for at most _FEW rows, its gradients
    None for every kind: without Triton; m above 28; d above 65536, which would spill; neither n_head nor d / n_head a power of two (a mix over
    heads takes any); a mix over more than 64 heads, or of heads whose width is no multiple of 8. PyTorch computes these. "backward" and the
    norm's are None also where two kernels are better."""
    d, n_head, forward = operator.index(d), operator.index(n_head), kind in ("forward", "pre")
    mh, ch = _split_order(n_head)
    mi, ci = (1, 1) if heads_only else _split_order(d // n_head)
    M = mh * mi
    if triton is None or M > 28 or d > 65536 or (heads_only and (d // n_head % 8 or n_head > 64)):
        return None
    if kind == "backward" and (n_head > 48 if heads_only else d > (1024 if bits == 16 else 8192)):
        return None  # two kernels move 8 bytes an element, not 6, but one would spill or is slower
    if "norm" in kind and (n_head > 28 or d > 128 * n_head if heads_only else d > 768):
        return None  # the same: more heads spill, wider ones no program holds whole; from d = 1024 on an H200 is faster in two
    if heads_only:
        inner, P, C = 0, ch, d // n_head
        # whole heads up to 128, those of 96 padded: with 32 channels each, three programs would read 64 bytes of a head at a time
        CW = W = min(C & -C, 128) if C > 128 else 1 << (C - 1).bit_length()
        each, warps = 4 if n_head <= (12 if kind == "backward" else 16) and CW <= C else 2, 4  # each: a thread's numbers of a tile
        if kind == "norm" or "few" in kind:  # more warps would repeat a narrow tile's work
            each, warps = 2, max(1, W // (64 if kind == "norm" else 32))
        elif kind == "norm backward":
            each = 1
        elif not forward:  # sums over rows: more would spill, or take minutes to compile
            each = each if n_head <= (16 if kind == "backward" else 32) else 1
            warps = 2 if n_head <= (24 if kind == "backward" else 32) else 4
        R = 1 if "few" in kind else max(1, each * 32 * warps // W)
    else:
        A, C = (ch, ci) if mi > 1 else (1, ch * ci)
        inner, warps, each, numbers = 1, 4 if d <= 4096 else 8 if d <= 8192 else 16, 4, 64  # a thread's numbers: of a tile, of all
        if "few" in kind and M > 1 and d <= 2560:  # several warps would need up to four barriers for each of M narrow tiles, 47 at d = 768
            warps = 1
        elif kind == "norm" or forward and d <= 4096:  # a warp holds whole rows: only shuffles pass between its threads
            warps, numbers, each = 1, 48, 8 if kind == "forward" and d == 2048 and bits == 16 else 4
        elif forward and bits == 16:  # the more a thread holds, the fewer shuffles; above 8192, 128 would spill
            each, numbers = 8, 128 if d <= 8192 else 64
        elif kind == "grads":  # a thread has three such sets
            warps = 1 if d <= 2048 else 2 if d <= 3072 else 4 if d <= 6144 and bits == 16 else warps
            numbers = 48 if d <= 3072 or bits == 16 else 32
        elif kind == "backward":  # four
            warps, numbers = 1 if d <= 1024 else warps, 48 if bits == 16 else 32
        elif kind == "norm backward":  # six; with M tiles, M numbers at least, one of each
            warps, numbers = 1, max(24, M)
        R = 1 if "few" in kind else max(1, numbers * 32 * warps // d)
        R = min(1 << R.bit_length() - 1, each * 32 * warps // min(64, A * C))  # a tile has 64 numbers or more of a row
        W = min(A * C, max(A, each * 32 * warps // R))
        if M == 1 and W == d > 1:  # _inner wants two tiles at least
            W //= 2
        P = A * C // W
        C = CW = C // P
    V = min(max(1, R * W // (32 * warps)), 128 // bits, CW & -CW)  # as Triton lays tiles out: what a thread loads at once
    return dict(D=d, M=M, P=P, C=C, CW=CW, W=W, R=R, INNER=inner, V=V, TURN=int(inner and W > CW)), warps


@lru_cache(256)
def _dot_plan(d, n_head, kind="forward"):
    """-> constexprs of the kernels on tensor cores. None unless m is 1, 12 or 20, and a tile's nine bits are found in one row or two, of at
    most 128 numbers a thread. For all gradients at once (kind "backward"), which hold five sets in registers, at most 64 numbers, and m up to
    12; up to d = 1024 butterflies take one kernel, too, which copies the next rows meanwhile"""
    d, n_head = operator.index(d), operator.index(n_head)
    (mh, ch), (mi, ci) = _split_order(n_head), _split_order(d // n_head)
    m, A, C = max(mh, mi), *((ch, ci) if mi > 1 else (1, ch * ci))  # H_A (x) H_m (x) H_C
    bits = [1 << i for i in range(C.bit_length() - 1)] + [C * m << i for i in range(A.bit_length() - 1)]  # their strides
    if m == 1:
        M, MS, of_m, bits = 1, 0, bits[-2:], bits[:-2]
    else:
        M, MS, of_m = m // 4, 4 * C, [C, 2 * C]
    R = 1 + (len(bits) == 6)
    most, m_most = (2048, 12) if kind == "backward" else (4096, 20)
    if len(bits) < 6 or C < 8 or m > m_most or R * d > most or kind == "backward" and d <= 1024:
        return None
    if R == 1:
        (a, s, c), l, n, tiles = bits[:3], sorted([*of_m, bits[3]]), bits[4:7], bits[7:]
        IN, OUT = (a, s, c, *l[:2], *n, l[2]), (a, s, c, *n[:2], *l, n[2])
    else:
        (a, c), l, n, tiles = bits[:2], sorted([*of_m, bits[2]]), bits[3:], []
        IN, OUT = (a, c, *l[:2], *n, l[2], d), (a, c, *n[:2], *l, n[2], d)
    # Each matrix's signs at e = e' = 0: the layer's own, at the places that its bits name
    w, q = d // n_head, torch.arange(256, device="cpu")
    H, G = hadamard_matrix(n_head, torch.int8, "cpu"), hadamard_matrix(w, torch.int8, "cpu")
    place = lambda *strides: sum((q[:16] >> i & 1) * s for i, s in enumerate(strides))
    outer, inner = place(a, *l) + MS * q[:M, None], place(c, *n)[None]
    left = q >> 5 << 1 | q >> 1 & 1, (q >> 2 & 1) << 3 | (q >> 3 & 3) << 1 | q & 1  # row and column of _sign_bits' numbers
    right = (q >> 5 & 1) << 3 | q >> 6 << 1 | q >> 2 & 1, (q >> 3 & 3) << 2 | (q & 1) << 1 | q >> 1 & 1
    K = []
    for at, (i, j), second in ((outer, left, 4), (inner, right, 1), (inner, left, 4), (outer, right, 1)):
        i, j = at[:, None, i], at[None, :, j]                                              # (M, 1, 256), (1, M, 256)
        for signs in (H[i // w, j // w] * G[i % w, j % w] < 0).view(-1, 32, 8):
            masks = [sum(1 << lane for lane, s in enumerate(signs[:, e].tolist()) if s) for e in (0, second)]
            K.append(tuple(v - (v >> 31 << 32) for v in masks))  # of 32 bits, signed
    TILES = tuple(m * MS + p * (tiles or [0])[0] for m in range(M) for p in range(1 << len(tiles)))
    plan = dict(D=d, M=M, P=1 << len(tiles), R=R, IN=IN, OUT=OUT, TILES=TILES, K=tuple(K))
    return plan if kind == "backward" else plan | dict(G=1 << max(1, 3072 // (R * d)).bit_length() - 1)


@lru_cache(None)
def _capability(device):  # of an NVIDIA GPU; AMD's have (0, 0), and a CPU, where only the interpreter runs the kernels, an H200's
    if device.type != "cuda":
        return 9, 0
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


def _has_dots(device, heads_only):
    "Whether 16-bit rows may take the kernels on tensor cores, whose products in bf16 NVIDIA has from Ampere on"
    return UNTRIED and not heads_only and _capability(device) >= (8, 0)


def _by_dots(x, n_head, heads_only, kind="forward"):
    "-> _dot_plan's constexprs if x (N, d) is one for the kernels on tensor cores, else None"
    return _dot_plan(x.shape[1], n_head, kind) if x.element_size() == 2 and _has_dots(x.device, heads_only) else None


def _columns(plan):  # programs along a row: one, except in a mix over heads, where each takes CW of every head's C channels
    return triton.cdiv(plan["C"], plan["CW"])


def _row_major(*tensors):
    "The tensors row-major, as the kernels read them: gradients may not be, and a vector may be a slice or an expanded number."
    return [t if t is None else t.contiguous() for t in tensors]


def _transform_triton(x, alpha, beta, pre, scale, n_head, heads_only):
    (N, d), (x, alpha, beta, pre) = x.shape, _row_major(x, alpha, beta, pre)
    out, plan = torch.empty_like(x), _by_dots(x, n_head, heads_only) if N > _FEW else None
    if plan:
        _launch(_hadamard_dot_kernel, (triton.cdiv(N, plan["R"] * plan["G"]),), x, out, alpha, beta, pre, N, scale, **plan,
                EXACT=not x.is_cuda, num_warps=1)
    else:
        kind = "few" if N <= _FEW else "forward" if pre is None else "pre"
        plan, warps = _plan(d, n_head, heads_only, x.element_size() * 8, kind)
        _launch(_hadamard_kernel, (triton.cdiv(N, plan["R"]), _columns(plan)), x, out, alpha, beta, pre, N, scale, **plan, num_warps=warps)
    return out


def _norm_triton(x, residual, alpha, beta, weight, shift, scale, eps, rms, n_head, heads_only):
    (N, d), (x, residual, alpha, beta, weight, shift) = x.shape, _row_major(x, residual, alpha, beta, weight, shift)
    plan, warps = _plan(d, n_head, heads_only, x.element_size() * 8, "norm few" if N <= _FEW else "norm")
    out, normed, stats = torch.empty_like(residual), torch.empty_like(x), torch.empty(2, N, dtype=torch.float32, device=x.device)
    _launch(_hadamard_norm_kernel, (triton.cdiv(N, plan["R"]),), x, residual, out, normed, stats, alpha, beta, weight, shift, N, scale, eps,
            **plan, RMS=rms, num_warps=warps)
    return out, normed, stats


@lru_cache(None)
def _multiprocessors(device):  # the interpreter has as many as an H200
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _programs(N, plan, warps, device, kind):
    """How many programs of a kernel that sums over rows to launch for each of the plan's columns: over all columns as many as run at once,
    since more would run later, alone. A multiprocessor has registers for 8 warps of 255 a thread, 12 of 168 or 16 of 128. Which of these a
    kernel takes follows from how many numbers of one tensor a thread holds, by its compiled code (Triton 3.9): with more than `most` it takes
    255"""
    numbers = plan["R"] * plan.get("W", 512) * plan["M"] * plan["P"] // (32 * warps)
    if kind == "norm backward":
        most = 0 if plan["INNER"] else 16 if plan["W"] > 64 else 12  # 16 heads of 64 take 188 registers
    elif _capability(device)[0] >= 10:  # Blackwell: 32 take up to 255
        most = 16
    elif kind == "grads":
        most = 32 if plan["INNER"] else 48
    else:
        most = 31 if warps > 1 and plan["INNER"] else 32  # fp32 rows of 2048 and 4096: 32 take 255
    held = 8 if numbers > most else 16 if kind == "grads" and plan["INNER"] and warps == 1 else 12  # several warps a row: up to 168
    columns = _columns(plan) if "CW" in plan else 1
    return min(triton.cdiv(max(N, 1), plan["R"]), max(1, _multiprocessors(device) * max(1, held // warps) // columns))


def _norm_backward_triton(x, out, stats, dout, dnormed, alpha, weight, has_shift, scale, rms, n_head, heads_only):
    (N, d), (x, out, dout, dnormed, alpha, weight) = x.shape, _row_major(x, out, dout, dnormed, alpha, weight)
    plan, warps = _plan(d, n_head, heads_only, x.element_size() * 8, "norm backward")
    dresidual, dx, programs = torch.empty_like(out), torch.empty_like(x), _programs(N, plan, warps, x.device, "norm backward")
    partial = torch.empty(3 + has_shift, programs, d, dtype=torch.float32, device=x.device)
    _launch(_hadamard_norm_backward_kernel, (programs,), x, out, stats, dout, dnormed, dresidual, dx, *partial, *[None] * (not has_shift),
            alpha, weight, N, scale, **plan, RMS=rms, num_warps=warps)
    # sums one by one, as outputs of an operator may not share memory
    return dx, dresidual, *(p.sum(0) for p in partial), *[partial.new_empty(0)] * (not has_shift)


def _grads_triton(x, dy, scale, n_head, heads_only, alpha=None):
    "-> (dalpha, dbeta); given alpha, dx before them"
    (N, d), (x, dy, alpha) = x.shape, _row_major(x, dy, alpha)
    kind = "grads" if alpha is None else "backward"
    dots, dx = (None, None) if alpha is None else (_by_dots(x, n_head, heads_only, kind), torch.empty_like(x))
    plan, warps = (dots, 1) if dots else _plan(d, n_head, heads_only, x.element_size() * 8, kind)
    programs = _programs(N, plan, warps, x.device, kind)
    partial = torch.empty(2, programs, d, dtype=torch.float32, device=x.device)
    if dots:
        signs = torch.empty(2 * dots["M"] ** 2 + 2, 256, dtype=torch.int16, device=x.device)
        _launch(_hadamard_dot_grads_kernel, (programs,), x, dy, dx, alpha, *partial, signs, N, scale, **dots, EXACT=not x.is_cuda, num_warps=1)
    else:
        _launch(_hadamard_grads_kernel, (programs, _columns(plan)), x, dy, dx, alpha, *partial, N, scale, **plan, num_warps=warps)
    sums = partial[0].sum(0), partial[1].sum(0)
    return sums if alpha is None else (dx, *sums)


# -----------------------------------------------------------------------------
# The operators. As H is its own transpose, the gradients of hadamard and of hadamard_grads are made of these two again, so they suffice
# for derivatives of any order. hadamard_backward gives all first derivatives of hadamard at once, if they are not differentiated again: on a
# GPU in one kernel, where one has a plan; on a CPU, where products cost more than bytes, from x H, which hadamard_kept saves instead of x.
# That takes no more memory, unless what made x keeps x, too (tanh does, blocked attention does not). hadamard_norm adds residual and norm.
# Names that end in _torch and _triton are an operator's two implementations, _derive_X is autograd's formula for X, made of operators.


def _check_orders(d, n_head, heads_only):  # called inside operators: elsewhere torch.compile would trace it
    _check_order(n_head, "n_head")
    if not heads_only:
        _check_order(d // n_head, "d" if n_head == 1 else "d / n_head")


def _on_triton(x, n_head, heads_only, kind="forward"):
    return x.is_cuda and x.dtype != torch.float64 and _plan(x.shape[1], n_head, heads_only, x.element_size() * 8, kind) is not None


def _empty_sums(x):
    "Two empty (d,), in fp32 or wider, for sums over the rows of x (N, d)"
    return tuple(x.new_empty(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32)) for _ in range(2))


@_operator("hadamard", lambda x, *_: torch.empty_like(x))
def _hadamard(x: torch.Tensor, alpha: torch.Tensor | None, beta: torch.Tensor | None, pre: torch.Tensor | None, scale: float,
              n_head: int, heads_only: bool) -> torch.Tensor:
    "alpha * scale * ((pre * x) @ H) + beta, x (N, d) contiguous; alpha, beta, pre (d,) or None. Backward alpha and pre change places"
    assert alpha is not None or beta is None, "beta without alpha"
    _check_orders(x.shape[1], n_head, heads_only)
    run = _transform_triton if _on_triton(x, n_head, heads_only) else _transform_torch
    return run(x, alpha, beta, pre, scale, n_head, heads_only)


@_operator("hadamard_grads", lambda x, *_: _empty_sums(x))
def _hadamard_grads(x: torch.Tensor, dy: torch.Tensor, scale: float, n_head: int, heads_only: bool) -> tuple[torch.Tensor, torch.Tensor]:
    "(sum over rows of dy * scale * (x @ H), sum over rows of dy), both (d,) in fp32 (fp64 for fp64)"
    run = _grads_triton if _on_triton(x, n_head, heads_only) else _grads_torch
    return run(x, dy, scale, n_head, heads_only)


@_operator("hadamard_kept", lambda x, *_: (torch.empty_like(x), torch.empty_like(x)))
def _hadamard_kept(x: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, scale: float, n_head: int,
                   heads_only: bool) -> tuple[torch.Tensor, torch.Tensor]:
    "-> (alpha * scale * u + beta, u), u = x @ H"
    _check_orders(x.shape[1], n_head, heads_only)
    u = x.new_empty(x.shape)
    return _transform_torch(x, alpha, beta, None, scale, n_head, heads_only, u), u


@_operator("hadamard_backward", lambda x, *_: (torch.empty_like(x), *_empty_sums(x)))
def _hadamard_backward(x: torch.Tensor, dy: torch.Tensor, alpha: torch.Tensor, scale: float, n_head: int, heads_only: bool,
                       kept: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    "-> (scale * ((alpha * dy) @ H), sum over rows of dy * scale * u, sum over rows of dy), u = x @ H; if kept, x is already u"
    if kept:
        return _grads_torch(x, dy, scale, n_head, heads_only, alpha)
    if _on_triton(x, n_head, heads_only, "backward") or _on_triton(x, n_head, heads_only) and _by_dots(x, n_head, heads_only, "backward"):
        return _grads_triton(x, dy, scale, n_head, heads_only, alpha)
    return (_hadamard(dy, None, None, alpha, scale, n_head, heads_only), *_hadamard_grads(x, dy, scale, n_head, heads_only))


def _save_hadamard(ctx, inputs, output):
    x, alpha, _, pre, *ctx.how = inputs
    ctx.dtype = x.dtype
    of_x, of_alpha, _, of_pre, *_ = ctx.needs_input_grad
    ctx.save_for_backward(x if of_alpha or of_pre else None, alpha if of_x or of_pre else None, pre)  # all that the gradients depend on


def _derive_hadamard(ctx, dy):  # y = alpha * scale * ((pre * x) H) + beta. Here as below autograd casts the vectors' gradients to their dtypes
    x, alpha, pre = ctx.saved_tensors
    dy = dy.to(ctx.dtype).contiguous()
    of_x, of_alpha, of_beta, of_pre, *_ = ctx.needs_input_grad
    dx = dalpha = dbeta = dpre = None
    if of_x and of_alpha and pre is None and not torch.is_grad_enabled():
        dx, dalpha, dbeta = _hadamard_backward(x, dy, alpha, *ctx.how, kept=False)
        return dx, dalpha, dbeta if of_beta else None, None, None, None, None
    if of_x:
        dx = _hadamard(dy, pre, None, alpha, *ctx.how)                                     # pre * scale * ((alpha * dy) H)
    if of_alpha:
        dalpha, dbeta = _hadamard_grads(x if pre is None else (pre * x).to(ctx.dtype), dy, *ctx.how)
    elif of_beta:
        dbeta = dy.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32))
    if of_pre:
        dpre = _hadamard_grads(dy if alpha is None else (alpha * dy).to(ctx.dtype), x, *ctx.how)[0]
    return dx, dalpha, dbeta if of_beta else None, dpre, None, None, None


def _save_hadamard_grads(ctx, inputs, output):
    x, dy, *ctx.how = inputs
    ctx.save_for_backward(x, dy)


def _derive_hadamard_grads(ctx, ga, gb):  # the gradients of dalpha = sum dy * scale * (x H), dbeta = sum dy
    x, dy = ctx.saved_tensors
    return _hadamard(dy, None, None, ga, *ctx.how), _hadamard(x, ga, gb, None, *ctx.how), None, None, None


def _save_hadamard_kept(ctx, inputs, output):
    _, alpha, _, *ctx.how = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], alpha if ctx.needs_input_grad[0] else None)


def _derive_hadamard_kept(ctx, dy, du):  # y = alpha * scale * u + beta, u = x H
    u, alpha = ctx.saved_tensors
    scale, *heads = ctx.how
    dx = None if du is None else _hadamard(du.contiguous(), None, None, None, 1.0, *heads)  # du: only if a derivative is differentiated
    if dy is None:
        return dx, None, None, None, None, None
    dy = dy.to(u.dtype).contiguous()
    if ctx.needs_input_grad[0] and du is None and not torch.is_grad_enabled():
        dx, dalpha, dbeta = _hadamard_backward(u, dy, alpha, *ctx.how, kept=True)
    else:
        if ctx.needs_input_grad[0]:
            by_y = _hadamard(dy, None, None, alpha, *ctx.how)
            dx = by_y if dx is None else by_y + dx
        wide = dy.to(torch.promote_types(u.dtype, torch.float32))
        dalpha, dbeta = scale * (wide * u).sum(0), wide.sum(0)
    return dx, dalpha, dbeta, None, None, None


_hadamard.register_autograd(_derive_hadamard, setup_context=_save_hadamard)
_hadamard_kept.register_autograd(_derive_hadamard_kept, setup_context=_save_hadamard_kept)
_hadamard_grads.register_autograd(_derive_hadamard_grads, setup_context=_save_hadamard_grads)


@_operator("hadamard_norm", lambda x, residual, *_: (  # not len(x), which would fix the number of rows in compiled code
    torch.empty_like(residual), torch.empty_like(x), x.new_empty(2, x.shape[0], dtype=torch.promote_types(residual.dtype, torch.float32))))
def _hadamard_norm(x: torch.Tensor, residual: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, weight: torch.Tensor,
                   shift: torch.Tensor | None, scale: float, eps: float, rms: bool, n_head: int,
                   heads_only: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    "-> out (N, d) in residual's dtype, its norm (N, d) in x's, mean and 1 / deviation of each row (2, N)"
    _check_orders(x.shape[1], n_head, heads_only)
    run = _norm_triton if _norm_on_triton(x, residual, n_head, heads_only) else _norm_torch
    return run(x, residual, alpha, beta, weight, shift, scale, eps, rms, n_head, heads_only)


def _norm_on_triton(x, residual, n_head, heads_only):
    return residual.dtype != torch.float64 and _on_triton(x, n_head, heads_only, "norm")


def _norm_torch(x, residual, alpha, beta, weight, shift, scale, eps, rms, n_head, heads_only):
    wide = torch.promote_types(residual.dtype, torch.float32)
    wider = x.float() if x.dtype == torch.float16 else x  # so that only the sum is rounded, to residual's dtype
    out = (residual + _hadamard(wider, alpha, beta, None, scale, n_head, heads_only)).to(residual.dtype)
    # a CPU's LayerNorm takes 16-bit rows beside fp32 vectors, but returns 16 bits: too few if x, whose dtype normed gets, is wider
    as_it_is = not rms and out.device.type == "cpu" and torch.promote_types(x.dtype, out.dtype) == out.dtype
    y = out if as_it_is else out.to(wide)
    weight, shift = (v if v is None else v.to(wide) for v in (weight, shift))
    if not rms:
        normed, *stats = torch.native_layer_norm(y, y.shape[1:], weight, shift, eps)
        return out, normed.to(x.dtype), torch.stack([s[:, 0] for s in stats])
    rstd = (y.square().mean(-1) + eps).rsqrt()
    normed = y * rstd[:, None] * weight
    return out, (normed if shift is None else normed.add_(shift)).to(x.dtype), torch.stack((torch.zeros_like(rstd), rstd))


def _norm_backward_torch(x, out, stats, dout, dnormed, alpha, weight, has_shift, scale, rms, n_head, heads_only, dstats=None):
    mean, rstd = stats[:, :, None]                                                         # (N, 1)
    weight = weight.to(torch.promote_types(weight.dtype, stats.dtype))                     # a 16-bit product would round, fp16 overflow
    if rms or dstats is not None or torch.is_grad_enabled():  # PyTorch's derivative takes stats for constants if differentiated again
        unit = (out - mean) * rstd                                                         # (N, d)
        g = dnormed * weight
        dy = g - unit * (g * unit).mean(-1, keepdim=True)
        dy = rstd * (dy if rms else dy - g.mean(-1, keepdim=True)) + dout
        dweight, dshift = (dnormed * unit).sum(0, dtype=stats.dtype), dnormed.sum(0, dtype=stats.dtype) if has_shift else None
        if dstats is not None:  # if this formula was itself differentiated
            dmean, drstd = dstats[:, :, None] / out.shape[1]
            dy = dy - unit * rstd ** 2 * drstd + (0 if rms else dmean)
    else:
        g, y, weight = (t.to(stats.dtype) for t in (dnormed, out, weight))  # all of one dtype, even if weight is fp64 and y is not
        dy, dweight, dshift = torch.ops.aten.native_layer_norm_backward(g, y, y.shape[1:], mean, rstd, weight, weight, [True, True, has_shift])
        dy = dy + dout
    dx = _hadamard(dy if x.dtype == torch.float16 else dy.to(x.dtype), None, None, alpha, scale, n_head, heads_only).to(x.dtype)
    dy = dy.to(out.dtype)
    return dx, dy, *_hadamard_grads(x, dy, scale, n_head, heads_only), dweight, dshift if has_shift else stats.new_empty(0)


@_operator("hadamard_norm_backward", lambda x, out, stats, dout, dnormed, alpha, weight, has_shift, *_: (
    torch.empty_like(x), torch.empty_like(out), *_empty_sums(x), stats.new_empty(x.shape[1]), stats.new_empty(x.shape[1] if has_shift else 0)))
def _hadamard_norm_backward(
        x: torch.Tensor, out: torch.Tensor, stats: torch.Tensor, dout: torch.Tensor, dnormed: torch.Tensor, alpha: torch.Tensor,
        weight: torch.Tensor, has_shift: bool, scale: float, rms: bool, n_head: int, heads_only: bool
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    "-> gradients of x, residual, alpha and beta (these two fp32 or wider), weight and shift (in stats' dtype; empty without shift)"
    run = _norm_backward_triton if _norm_on_triton(x, out, n_head, heads_only) else _norm_backward_torch
    return run(x, out, stats, dout, dnormed, alpha, weight, has_shift, scale, rms, n_head, heads_only)


def _save_hadamard_norm(ctx, inputs, output):
    x, _, alpha, _, weight, shift, scale, _, rms, *how = inputs
    ctx.how = (shift is not None, scale, rms, *how)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, alpha, weight, output[0], output[2])


def _derive_hadamard_norm(ctx, dout, dnormed, dstats):
    x, alpha, weight, out, stats = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout.contiguous()
    dnormed = torch.zeros_like(x) if dnormed is None else dnormed.contiguous()
    args = x, out, stats, dout, dnormed, alpha, weight, *ctx.how
    again = torch.is_grad_enabled() or dstats is not None  # to be differentiated again, or the gradient of such a derivative
    dx, dy, dalpha, dbeta, dweight, dshift = _norm_backward_torch(*args, dstats) if again else _hadamard_norm_backward(*args)
    return dx, dy, dalpha, dbeta, dweight, dshift if ctx.how[0] else None, None, None, None, None, None


_hadamard_norm.register_autograd(_derive_hadamard_norm, setup_context=_save_hadamard_norm)


def hadamard_norm_is_fused(d, n_head=1, heads_only=False):
    "Whether hadamard_affine_norm is one kernel on a GPU (not in fp64): up to d = 768, and mixing up to 28 heads of 8, 16 .. 128 channels"
    if n_head < 1 or d % n_head:
        return False
    orders = (n_head,) if heads_only else (n_head, d // n_head)
    return all(map(_split_order, orders)) and _plan(d, n_head, heads_only, 16, "norm") is not None


def hadamard_path(d, device, n_head=1, heads_only=False):
    """The path hadamard_affine takes on this device, in words, for a log; "cuda" where no GPU is stands for an H200. It leaves out that fp64
    is always PyTorch's, that forward up to 132 rows never takes tensor cores and that a CPU computes few rows in fp32. ValueError for
    sizes that hadamard_affine refuses."""
    if n_head < 1 or d % n_head:
        raise ValueError(f"hadamard_path: d={d} is no multiple of n_head={n_head}")
    _check_orders(d, n_head, heads_only)
    if torch.device(device).type != "cuda":
        one = 0 if heads_only or d > 192 else 1 if d > 96 else 2  # see _factors
        return "PyTorch, by " + ("small dense products", "small dense products, in bf16 by one", "one dense product")[one]
    if triton is None:
        return "PyTorch, as Triton is not installed"
    if _plan(d, n_head, heads_only, 16) is None:
        return "PyTorch, as the Triton kernel has no plan for this width"
    dots = _has_dots(torch.device(device if torch.cuda.is_available() else "cpu"), heads_only) and _dot_plan(d, n_head)
    return "Triton kernel" + ", in 16 bits on tensor cores" * bool(dots)


def _check_floats(name, **tensors):
    for what, t in tensors.items():
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}: {what} is a {type(t).__name__}, expected a tensor")
        if not t.is_floating_point() or t.dtype.itemsize == 1:
            raise TypeError(f"{name}: {what} is in {t.dtype}, expected float16, bfloat16, float32 or float64; cast it first, e.g. with .float()")


def _as_rows(name, x, what="x"):
    "x (..., d) as rows (N, d), contiguous"
    _check_floats(name, **{what: x})
    if not x.dim() or not x.shape[-1]:
        raise ValueError(f"{name}: {what} has shape {tuple(x.shape)}, expected (..., d) with d of 1 or more")
    return x.reshape(-1, x.shape[-1]).contiguous()


def hadamard_transform(x, scale=1.0):
    """scale * (x @ H) over the last dimension, H = hadamard_matrix(x.shape[-1]).

    x: (..., d), fp16, bf16, fp32 or fp64, any strides. scale: a number; d**-0.5 makes the transform orthogonal. Without it x H may reach d
    times the largest |x|, where fp16 holds up to 65504. Returns x's shape and dtype. Differentiable to any order in x.
    ValueError for an order that does not exist (not on meta), TypeError for another dtype or a scale that wants a gradient,
    NotImplementedError under forward-mode differentiation.
    The usual CUDA package of this name has the same H for d = 2^k and, in its hadamard_transform_12N, for 12 * 2^k (d = 768 is no cut-off 1024
    here). Its 20N, 28N and 40N have other matrices: do not swap them for these in a trained model.
    Triton's path sums in fp32 and rounds once (on tensor cores, if UNTRIED, also to 16 binary digits between products). PyTorch's, which fp64
    always takes, may also round bf16 rows wider than 192 between its two products (1.4 times the error), and bf16 rows before a scale that is
    no power of two (with both 1.7 times). On a GPU it takes TF32 for fp32 and fp16 where torch.set_float32_matmul_precision allows it.
    """
    _reverse_mode_only("hadamard_transform")
    if isinstance(scale, torch.Tensor) and scale.requires_grad:
        raise TypeError("hadamard_transform: scale is a number and gets no gradient; for one that is trained multiply the result by it")
    return _hadamard(_as_rows("hadamard_transform", x), None, None, None, float(scale), 1, False).view(x.shape)


def hadamard_affine(x, alpha, beta, n_head=1, heads_only=False):
    """alpha * (x @ H / sqrt(d)) + beta [1, eq. 1], in one pass over memory.

    x (..., d), alpha (d,), beta (d,): fp16, bf16, fp32 or fp64 each, any strides, often fp32 vectors beside bf16 rows. Returns x's shape and
    dtype. Differentiable to any order in all three; each gradient has its tensor's dtype. Rounding: see hadamard_transform.
    n_head = h takes H = H_h (x) H_(d/h) instead of H_d: for most sizes the same matrix; for all, H_(d/h) can be folded into the value
    projection. heads_only = True drops that factor: H_h (x) I / sqrt(h), a mix over heads alone.
    ValueError for other shapes, an n_head not dividing d, an order that does not exist (not on meta) or several devices, TypeError for other
    dtypes or what is no tensor, NotImplementedError under forward-mode differentiation.
    If UNTRIED, 16-bit rows of most widths from 256 to 4096 go through tensor cores: a transform of more than 132, also backward, and all
    gradients together at 1536 and 2048. There a row with an infinite number comes out all NaN, one with a sum beyond fp32's range partly; of
    the gradients together alpha's has x @ H to 16 binary digits, an error of some 5e-6.
    """
    _reverse_mode_only("hadamard_affine")
    rows = _as_rows("hadamard_affine", x)
    d, n_head = x.shape[-1], operator.index(n_head)
    _check_floats("hadamard_affine", alpha=alpha, beta=beta)
    if n_head < 1 or d % n_head or alpha.shape != (d,) or beta.shape != (d,):
        raise ValueError(f"hadamard_affine: x (..., d) with d a multiple of n_head, alpha (d,) and beta (d,); got x {tuple(x.shape)}, "
                         f"alpha {tuple(alpha.shape)}, beta {tuple(beta.shape)}, n_head {n_head}")
    _check_devices("hadamard_affine", x, alpha, beta)
    scale = (n_head if heads_only else d) ** -0.5
    if alpha.requires_grad and torch.is_grad_enabled() and not x.is_cuda and x.dtype != torch.float16:  # x H may not fit fp16
        return _hadamard_kept(rows, alpha, beta, scale, n_head, heads_only)[0].view(x.shape)
    return _hadamard(rows, alpha, beta, None, scale, n_head, heads_only).view(x.shape)


def hadamard_affine_norm(x, alpha, beta, residual, weight, shift=None, eps=1e-5, rms=False, n_head=1, heads_only=False):
    """y = residual + hadamard_affine(x, alpha, beta, n_head, heads_only), and LayerNorm(y) * weight + shift, or RMSNorm if rms: the end of an
    attention block and the start of what follows.

    x, residual (..., d), residual often wider; alpha, beta, weight, shift (d,), shift may be None: fp16, bf16, fp32 or fp64 each. Returns y in
    residual's dtype and its norm in x's, both (..., d). Differentiable to any order in all six. Errors as for hadamard_affine, and TypeError
    if eps is None. Where hadamard_norm_is_fused, on a GPU with Triton and not in fp64, it is one pass, in bf16 of 8 bytes an element. Elsewhere
    plain PyTorch moves 14 or more: there compile hadamard_affine, sum and norm, which move 12.
    """
    _reverse_mode_only("hadamard_affine_norm")
    rows, before = _as_rows("hadamard_affine_norm", x), _as_rows("hadamard_affine_norm", residual, "residual")
    d, n_head, vectors = x.shape[-1], operator.index(n_head), [t for t in (alpha, beta, weight, shift) if t is not None]
    _check_floats("hadamard_affine_norm", alpha=alpha, beta=beta, weight=weight, **{} if shift is None else dict(shift=shift))
    if eps is None:
        raise TypeError("hadamard_affine_norm: eps is None, expected a number (nn.RMSNorm's own None stands for torch.finfo(dtype).eps)")
    if n_head < 1 or d % n_head or residual.shape != x.shape or any(t.shape != (d,) for t in vectors):
        raise ValueError("hadamard_affine_norm: x (..., d) with d a multiple of n_head, residual of its shape, vectors (d,); got "
                         f"{tuple(x.shape)}, {tuple(residual.shape)}, n_head {n_head}, vectors of {[tuple(t.shape) for t in vectors]}")
    _check_devices("hadamard_affine_norm", x, residual, *vectors)
    scale = (n_head if heads_only else d) ** -0.5
    y, normed, _ = _hadamard_norm(rows, before, alpha, beta, weight, shift, scale, eps, rms, n_head, heads_only)
    return y.view(x.shape), normed.view(x.shape)


# -----------------------------------------------------------------------------
# fo-pooling: the recurrence of the QRNN [QRNN, eq. 4]
#
#     c_t = f_t c_(t-1) + (1 - f_t) z_t          h_t = o_t c_t
#
# Backward, with dh_t = dL/dh_t and e_t = f_t dc_t, which is what step t hands to step t - 1:
#
#     dc_t = o_t dh_t + e_(t+1)    do_t = dh_t c_t    dz_t = (1 - f_t) dc_t    df_t = (c_(t-1) - z_t) dc_t    dc_0 = e_1
#
# Besides the inputs both paths keep only the state before each chunk of FO_CHUNK steps (in PyTorch CPU_CHUNK): `edges`, (T / FO_CHUNK rounded
# up, B, H). From these the backward pass recomputes the steps in between. It never inverts the recurrence: c_(t-1) = (c_t - ..) / f_t is
# lost as soon as f is small. Least traffic for N = B*T*H elements in bf16, gates fused: forward 8 N bytes (3 logits in, h out), backward
# 14 N (3 logits and dh in, 3 gradients out), and 4 N / FO_CHUNK = N / 4 more each way for the edges.
FO_CHUNK, CPU_CHUNK = 16, 8


def plain_fo_pool(z, f, o, c0=None):
    """The definition of fo_pool, T of 1 or more, fp32 or wider: z, f, o (B, T, H), activated, c0 (B, H) -> h (B, T, H), the last c (B, H). On a
    CPU it takes 3 times as long"""
    c, h = torch.zeros_like(z[:, 0]) if c0 is None else c0, []
    for z_t, f_t, o_t in zip(z.unbind(1), f.unbind(1), o.unbind(1)):
        c = f_t * c + (1 - f_t) * z_t
        h.append(o_t * c)
    return torch.stack(h, 1), c


def _fo_spans(B, T, H):
    """How the CPU cuts time: a list of spans (t, K, L), each K chunks of L steps from step t on, walked side by side.

    One call does one step of all K chunks, K * B * H numbers. If B * H is small, a call costs more than its work: then chunks are CPU_CHUNK
    steps long, and a span takes only that many calls; otherwise, and for the last steps if they make no two chunks, K = 1. A span of z (as
    of f and o) takes up to 1 MB in fp32 (or CPU_CHUNK steps), so that all stay in cache; if B * H is small 2 MB, as only calls of 32,768 or
    more numbers use several threads."""
    few = B * H <= 2 ** 13
    most = max(1, (2 ** 19 if few else 2 ** 18) // max(1, CPU_CHUNK * B * H)) * CPU_CHUNK  # steps
    spans, t = [], 0
    while t < T:
        n = min(most, T - t)
        K = max(1, n // CPU_CHUNK) if few else 1
        L = n if K == 1 else CPU_CHUNK
        spans.append((t, K, L))
        t += K * L
    return spans


def _fo_scratch(memory, banks, n, t, K, L, act):
    "-> n tensors (B, K, L, H) of scratch, the first three with z, f, o from step t on, activated if act; c (B, K, L + 1, H)"
    B, _, H = banks[0].shape
    size = K * L * B * H
    rows, c = memory[:n * size].view(n, B, K * L, H), memory[n * size:][:size + K * B * H].view(B, K, L + 1, H)
    for row, bank in zip(rows, banks):
        row.copy_(bank[:, t:t + K * L])
    if act:
        # tanh x = 2 sigmoid(2x) - 1 takes 1/4 of torch.tanh's time on an EPYC, 3 times it on a Xeon; absolute error at most 2e-7 in fp32
        rows[0].mul_(2)
        rows[:3].sigmoid_()
        torch.add(rows.new_full((), -1.0), rows[0], alpha=2, out=rows[0])
    return *rows.unflatten(2, (K, L)), c


def _fo_walk(z, f, c):
    "z, f (B, K, L, H); fills all steps of c (B, K, L + 1, H) but its first -> f's slices (B, K, H), one for each step"
    fs, cs = f.unbind(2), c.unbind(2)
    for z_t, f_t, c_prev, c_t in zip(z.unbind(2), fs, cs, cs[1:]):
        torch.lerp(z_t, c_prev, f_t, out=c_t)  # z + f (c - z), exact at f = 0 and f = 1
    return fs


def _fo_forward_torch(z, f, o, c0, act):
    """(h, c_last, edges) by a walk in place over time.

    What counts on a CPU is fresh memory: with a page fault every 4 KB, writing 33 MB never touched before costs more than activating three
    times as much. So all spans are worked on in the same scratch, which stays in cache, and only h and the edges are new memory. Scratch
    has the inputs' layout: gathering each step's rows from B places made the copies, half of the time, twice as slow.

    Of K > 1 chunks walked side by side, only the first has a known starting state. So all start from 0: the true state is c + p * (the
    state before the chunk), p the product of the chunk's f so far. The states before chunks are then found one by one.
    """
    B, T, H = z.shape
    state, spans = torch.promote_types(z.dtype, torch.float32), _fo_spans(B, T, H)
    most = max([K * (L + 1) for _, K, L in spans], default=0) * B * H
    h = z.new_empty(B, T, H)
    edges = z.new_empty(-(-T // CPU_CHUNK), B, H, dtype=state)
    memory = z.new_empty(4 * most, dtype=state)
    last = z.new_zeros(B, H, dtype=state) if c0 is None else c0.clone(memory_format=torch.contiguous_format)
    for t, K, L in spans:
        z_, f_, o_, c = _fo_scratch(memory, (z, f, o), 3, t, K, L, act)  # c[:, :, j]: the state before step j
        start, end = c[:, :, 0], c[:, :, L]  # (B, K, H), the states before and after each chunk
        start[:] = last[:, None] if K == 1 else 0  # of several chunks all from 0, see above
        fs = _fo_walk(z_, f_, c)
        if K > 1:
            for p_prev, p in zip(fs, fs[1:]):
                p.mul_(p_prev)  # in place: f_ becomes p, see above
            start[:, 0] = last
            before, after, p = start.unbind(1), end.unbind(1), fs[-1].unbind(1)
            for k in range(1, K):
                torch.addcmul(after[k - 1], p[k - 1], before[k - 1], out=before[k])
            c[:, :, 1:].addcmul_(f_, start[:, :, None])
        last.copy_(end[:, -1])
        m = -(-L // CPU_CHUNK)  # edges of a chunk: one, unless the span is one long chunk; below (K, m, B, H)
        edges[t // CPU_CHUNK:t // CPU_CHUNK + K * m].unflatten(0, (K, m)).copy_(c[:, :, :L:CPU_CHUNK].permute(1, 2, 0, 3))
        h[:, t:t + K * L].copy_(o_.mul_(c[:, :, 1:]).flatten(1, 2))
    return h, last, edges


def _fo_backward_torch(z, f, o, edges, dh, dc_last, dz, df, do, act):
    """Fills dz, df, do (B, T, H) and returns dc0 (B, H): the spans in reverse, each redone from its edges."""
    B, T, H = z.shape
    state, spans = edges.dtype, _fo_spans(B, T, H)
    most = max([K * (L + 1) for _, K, L in spans], default=0) * B * H
    memory = z.new_empty(6 * most, dtype=state)
    # e_(t+1) = f dc of the step after the span, (B, H)
    e = z.new_zeros(B, H, dtype=state) if dc_last is None else dc_last.clone(memory_format=torch.contiguous_format)
    sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input  # g y (1 - y) in one pass
    for t, K, L in reversed(spans):
        z_, f_, o_, dc, w, c = _fo_scratch(memory, (z, f, o), 5, t, K, L, act)
        m = -(-L // CPU_CHUNK)
        c[:, :, 0] = edges[t // CPU_CHUNK:t // CPU_CHUNK + K * m:m].transpose(0, 1)  # every chunk starts on an edge
        fs = _fo_walk(z_, f_, c)
        span = slice(t, t + K * L)
        w.flatten(1, 2).copy_(dh[:, span])
        torch.mul(w, o_, out=dc)
        w.mul_(c[:, :, 1:])  # do_t = dh_t c_t
        if act:
            sigmoid_backward(w, o_, grad_input=w)
        do[:, span].copy_(w.flatten(1, 2))
        dc[:, -1, -1] += e
        dcs = dc.unbind(2)
        for j in reversed(range(L - 1)):
            dcs[j].addcmul_(fs[j + 1], dcs[j + 1])  # dc_t = o_t dh_t + f_(t+1) dc_(t+1)
        if K > 1:  # dc_t gains the next chunk's e times w, the product of f from step t + 1 to the chunk's end
            w[:, :, -1] = 1
            ws = w.unbind(2)
            for j in reversed(range(L - 1)):
                torch.mul(fs[j + 1], ws[j + 1], out=ws[j])
            E = torch.zeros_like(dcs[0])  # (B, K, H), each chunk's e from the chunk after it
            Es, dc_0, w_0, f_0 = (x.unbind(1) for x in (E, dcs[0], ws[0], fs[0]))
            for k in reversed(range(K - 1)):
                torch.addcmul(dc_0[k + 1], w_0[k + 1], Es[k + 1], out=Es[k]).mul_(f_0[k + 1])
            dc.addcmul_(w, E[:, :, None])
        torch.mul(f_[:, 0, 0], dc[:, 0, 0], out=e)
        torch.sub(c[:, :, :L], z_, out=w).mul_(dc)  # df_t = (c_(t-1) - z_t) dc_t
        if act:
            sigmoid_backward(w, f_, grad_input=w)
        df[:, span].copy_(w.flatten(1, 2))
        torch.addcmul(dc, dc, f_, value=-1, out=w)  # dz_t = (1 - f_t) dc_t
        if act:
            torch.ops.aten.tanh_backward.grad_input(w, z_, grad_input=w)  # g (1 - z^2)
        dz[:, span].copy_(w.flatten(1, 2))
    return e


if triton is not None:

    @triton.jit
    def _fo_sigmoid(x, ACT: tl.constexpr, PTX: tl.constexpr):
        "sigmoid(x) of a logit, if ACT; else x is activated already"
        # e^-x overflows to inf below -88, and 1 / inf is the right 0. Triton guards exp and division against denormals
        # that cannot matter here: 8 of the 12 instructions. In PTX the same formula takes 4.
        if not ACT:
            return x
        elif PTX:
            return tl.inline_asm_elementwise(
                "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; "  # -log2(e)
                "add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }", "=f,f", [x], tl.float32, True, 1)
        else:
            return 1 / (1 + tl.exp(-x))

    @triton.jit
    def _fo_tanh(x, ACT: tl.constexpr, PTX: tl.constexpr):
        "tanh(x) of a logit, likewise"
        return 2 * _fo_sigmoid(2 * x, True, PTX) - 1 if ACT else x

    @triton.jit
    def _fo_compose(c, at, step, parts, n, live, U: tl.constexpr):
        "c passed through n maps c -> prod(f) c + part. The prods are at `at`, at + step, .., each part is `parts` after its prod"
        for k in range(0, n, U):
            ps, qs = (), ()
            for u in tl.static_range(U):  # all loads first, as in the kernels below
                m = k + u < n * live.to(tl.int32)
                ps = ps + (tl.load(at + (k + u) * step, m, 1.0),)
                qs = qs + (tl.load(at + (k + u) * step + parts, m, 0.0),)
            for u in tl.static_range(U):
                c = ps[u] * c + qs[u]
        return c

    @triton.jit
    def _fo_rows(x, S: tl.constexpr, D: tl.constexpr):
        "(D, S), spread over the warps -> its S columns, (D,) each, all in every warp"
        if S == 1:
            return (tl.reshape(x, (D,)),)
        else:
            x, y = tl.split(tl.permute(tl.reshape(x, (D, 2, S // 2)), (0, 2, 1)))
            return _fo_rows(x, S // 2, D) + _fo_rows(y, S // 2, D)

    @triton.jit
    def _fo_hand_on(c, p, q, s, S: tl.constexpr, D: tl.constexpr, BACK: tl.constexpr):
        "Takes c through the warps' maps c -> p c + q (BACK: last warp first) -> what each gets, (S, D); what the last hands on; p's product"
        pq = _fo_rows(tl.reshape(tl.permute(tl.join(p, q), (1, 0, 2)), (D, 2 * S)), 2 * S, D)  # in one trip through shared memory
        got, prod = tl.zeros_like(p), tl.zeros_like(c) + 1
        for k in tl.static_range(S - 1 if BACK else 0, -1 if BACK else S, -1 if BACK else 1):
            got = tl.where(s == k, c[None, :], got)
            c, prod = pq[2 * k] * c + pq[2 * k + 1], prod * pq[2 * k]
        return got, c, prod

    @triton.jit
    def _fo_load(f_ptr, z_ptr, at, m, ACT: tl.constexpr, Z: tl.constexpr):
        "One step's f, and z if Z. Steps past the end get f = 1, z = 0 and leave c alone."
        f = tl.load(f_ptr + at, m, float("inf") if ACT else 1.0)
        return (f, tl.load(z_ptr + at, m, 0.0)) if Z else (f,)

    @triton.jit(do_not_specialize=["B", "T"])
    def _fo_forward_kernel(z_ptr, f_ptr, o_ptr, c0_ptr, h_ptr, c_last_ptr, edge_ptr, sum_ptr, B, T, sb, L, H: tl.constexpr,
                           ST: tl.constexpr, ACT: tl.constexpr, SUMMARY: tl.constexpr, SEGMENTED: tl.constexpr, PTX: tl.constexpr,
                           U: tl.constexpr, S: tl.constexpr, D: tl.constexpr):
        """One program: D channels of one batch row, L steps from seg * L on. SUMMARY: it only computes the segment's map c -> prod(f) c + part,
        into sum (2, segments, B, H). SEGMENTED: it gets the state before its segment by composing the maps of the segments before it.
        ACT: inputs are logits. PTX: see _fo_sigmoid. Strides H and ST are constants: a step's address is then part of its instruction.

        All S warps have the same channels and split each round of S * U steps. Warp s is row s of a tile (S, D): it finds the map of its
        own U steps, gets its starting state from the warps before it, and walks its steps again, two instructions each."""
        dtype: tl.constexpr = edge_ptr.dtype.element_ty
        W: tl.constexpr = S * U
        seg, segs = tl.program_id(1), tl.num_programs(1)
        if SEGMENTED:
            seg = segs - 1 - seg  # last first: the launch before read the end last, and some may still be in the cache
        b = (tl.program_id(0) // tl.cdiv(H, D)).to(tl.int64)
        i = tl.program_id(0) % tl.cdiv(H, D) * D + tl.arange(0, D)
        s = tl.arange(0, S)[:, None]
        live = i < H
        row = b * H + i  # in a (B, H) tensor; row n of (N, B, H) is (n * B + b) * H + i
        c = tl.zeros((D,), dtype)
        prod = c + 1
        if c0_ptr is not None and not SUMMARY:
            c = tl.load(c0_ptr + row, live, 0.0).to(dtype)
        if SEGMENTED:
            c = _fo_compose(c, sum_ptr + row, B * H, segs * B * H, seg, live, U)
        n = tl.minimum(T - seg * L, L)
        if SUMMARY:
            n *= (seg < segs - 1).to(tl.int32)  # nobody reads the last segment's map
        t, left = (seg * L).to(tl.int64) + s * U, (n - s * U) * live[None, :].to(tl.int32)  # (S, D): the interpreter cannot broadcast masks
        at, to, edge = b * sb + t * ST + i[None, :], (b * T + t) * H + i[None, :], (t // U * B + b) * H + i[None, :]
        # With one step in flight at a time, latency would hold it to 1/20 of the memory's rate. So each step is loaded a round ahead: f and z
        # while this round's are activated, o while h is written.
        fz, os = (), ()
        for u in tl.static_range(U):
            fz = fz + _fo_load(f_ptr, z_ptr, at + u * ST, u < left, ACT, True)
            if not SUMMARY:
                os = os + (tl.load(o_ptr + at + u * ST, u < left, 0.0),)
        for k in range(0, tl.cdiv(n, W)):
            fs, gs, fz_ahead, os_ahead = (), (), (), ()
            p, q = tl.full((S, D), 1, dtype), tl.zeros((S, D), dtype)
            for u in tl.static_range(U):
                f, z = _fo_sigmoid(fz[2 * u].to(dtype), ACT, PTX), _fo_tanh(fz[2 * u + 1].to(dtype), ACT, PTX)
                fs, gs = fs + (f,), gs + ((1 - f) * z,)
                p, q = p * f, f * q + gs[u]
                fz_ahead = fz_ahead + _fo_load(f_ptr, z_ptr, at + (u + W) * ST, u + W < left, ACT, True)
            x, c, p = _fo_hand_on(c, p, q, s, S, D, False)
            prod *= p
            if not SUMMARY:
                tl.store(edge_ptr + edge, x, left > 0)
                for u in tl.static_range(U):
                    x = fs[u] * x + gs[u]
                    tl.store(h_ptr + to + u * H, (_fo_sigmoid(os[u].to(dtype), ACT, PTX) * x).to(h_ptr.dtype.element_ty), u < left)
                    os_ahead = os_ahead + (tl.load(o_ptr + at + (u + W) * ST, u + W < left, 0.0),)
            at, to, edge, left, fz, os = at + W * ST, to + W * H, edge + S * B * H, left - W, fz_ahead, os_ahead
        if SUMMARY:
            tl.store(sum_ptr + (seg * B + b) * H + i, prod, live)
            tl.store(sum_ptr + ((segs + seg) * B + b) * H + i, c, live)
        elif seg == segs - 1:
            tl.store(c_last_ptr + row, c, live)

    @triton.jit(do_not_specialize=["B", "T"])
    def _fo_backward_kernel(z_ptr, f_ptr, o_ptr, edge_ptr, dh_ptr, dc_last_ptr, dz_ptr, df_ptr, do_ptr, dc0_ptr, sum_ptr, B, T, sb, db, L,
                            H: tl.constexpr, ST: tl.constexpr, DT: tl.constexpr, ACT: tl.constexpr, SUMMARY: tl.constexpr,
                            SEGMENTED: tl.constexpr, PTX: tl.constexpr, U: tl.constexpr, S: tl.constexpr, D: tl.constexpr):
        """As the forward kernel, with rounds and warps in reverse order; what is carried is e = f dc, a map is e -> prod(f) e + part. A
        warp walks its U steps forward, from its edge, for c, do and its map, and then back for dz and df."""
        dtype: tl.constexpr = edge_ptr.dtype.element_ty
        G: tl.constexpr = dz_ptr.dtype.element_ty
        N: tl.constexpr = 1 if SUMMARY else 2
        W: tl.constexpr = S * U
        seg, segs = tl.program_id(1), tl.num_programs(1)
        if not SEGMENTED:
            seg = segs - 1 - seg
        b = (tl.program_id(0) // tl.cdiv(H, D)).to(tl.int64)
        i = tl.program_id(0) % tl.cdiv(H, D) * D + tl.arange(0, D)
        s = tl.arange(0, S)[:, None]
        live = i < H
        row = b * H + i
        e = tl.zeros((D,), dtype)
        prod = e + 1
        if dc_last_ptr is not None and not SUMMARY:
            e = tl.load(dc_last_ptr + row, live, 0.0).to(dtype)
        if SEGMENTED:
            e = _fo_compose(e, sum_ptr + (segs - 1) * B * H + row, -B * H, segs * B * H, segs - 1 - seg, live, U)
        n = tl.minimum(T - seg * L, L)
        if SUMMARY:
            n *= (seg > 0).to(tl.int32)  # nobody reads the first's
        chunks = tl.cdiv(n, W)
        t = (seg * L + (chunks - 1) * W).to(tl.int64) + s * U
        at, to, out = b * sb + t * ST + i[None, :], (b * T + t) * H + i[None, :], b * db + t * DT + i[None, :]  # z, f, o; dh; dz, df, do
        edge = (t // U * B + b) * H + i[None, :]
        left = (tl.minimum(n - (chunks - 1) * W, n) - s * U) * live[None, :].to(tl.int32)  # a warp has its steps u < left, none if T = 0
        fz, og, c = (), (), tl.zeros((S, D), dtype)  # for the next round: f and z; o and dh; the states before the warps' steps
        if not SUMMARY:
            c = tl.load(edge_ptr + edge, left > 0, 0.0)
        for u in tl.static_range(U):
            fz = fz + _fo_load(f_ptr, z_ptr, at + u * ST, u < left, ACT, not SUMMARY)
            og = og + (tl.load(o_ptr + at + u * ST, u < left, 0.0), tl.load(dh_ptr + to + u * H, u < left, 0.0))
        for k in range(0, chunks):
            fs, gs, dzs, dfs, fz_ahead, og_ahead = (), (), (), (), (), ()
            more = (chunks - 1 - k) * (s + 1) * live[None, :].to(tl.int32) > 0
            p, q = tl.full((S, D), 1, dtype), tl.zeros((S, D), dtype)
            for u in tl.static_range(U):
                f, o, dh = _fo_sigmoid(fz[N * u].to(dtype), ACT, PTX), _fo_sigmoid(og[2 * u].to(dtype), ACT, PTX), og[2 * u + 1].to(dtype)
                g = o * dh
                p *= f
                q += p * g
                if not SUMMARY:
                    z = _fo_tanh(fz[2 * u + 1].to(dtype), ACT, PTX)
                    dz, df = 1 - f, c - z  # times dc, once that is known
                    c = f * c + dz * z
                    do = dh * c
                    if ACT:
                        df = df * (f * dz)
                        dz = dz * (1 - z * z)
                        do = do * (o * (1 - o))
                    tl.store(do_ptr + out + u * DT, do.to(G), u < left)
                    fs, gs, dzs, dfs = fs + (f,), gs + (g,), dzs + (dz,), dfs + (df,)
            x, e, p = _fo_hand_on(e, p, q, s, S, D, True)
            prod *= p
            if not SUMMARY:
                c = tl.load(edge_ptr + edge - S * B * H, more, 0.0)
            for u in tl.static_range(U):
                if not SUMMARY:
                    dc = gs[U - 1 - u] + x
                    x = fs[U - 1 - u] * dc
                    tl.store(dz_ptr + out + (U - 1 - u) * DT, (dzs[U - 1 - u] * dc).to(G), U - 1 - u < left)
                    tl.store(df_ptr + out + (U - 1 - u) * DT, (dfs[U - 1 - u] * dc).to(G), U - 1 - u < left)
                fz_ahead = fz_ahead + _fo_load(f_ptr, z_ptr, at + (u - W) * ST, more, ACT, not SUMMARY)
                og_ahead = og_ahead + (tl.load(o_ptr + at + (u - W) * ST, more, 0.0), tl.load(dh_ptr + to + (u - W) * H, more, 0.0))
            at, to, out, edge, fz, og = at - W * ST, to - W * H, out - W * DT, edge - S * B * H, fz_ahead, og_ahead
            left = U * (s + 1) * live[None, :].to(tl.int32)  # U or more: only the last round is cut short; s + 1 just gives the shape (S, D)
        if SUMMARY:
            tl.store(sum_ptr + (seg * B + b) * H + i, prod, live)
            tl.store(sum_ptr + ((segs + seg) * B + b) * H + i, e, live)
        elif seg == 0:
            tl.store(dc0_ptr + row, e, live)

    FO_WARPS, FO_CHANNELS = 4, 32  # of a program; 8 or 64 were not clearly faster on an H200

    def _fo_plan(z, f, o):
        """-> banks with equal strides and channels side by side (copies if need be), grid, steps of a segment, settings.

        With one warp to 32 channels an H200 (B 16, T 1024, H 1024 in bf16) took 80 us forward, a warp on each scheduler waiting for itself,
        with four that share them 46, the traffic alone 33. If B * H is 16384 or more, programs walk all of T. Otherwise T is cut into at most
        128 segments, up to some 131072 (channel, warp) pairs (by calculation); a first launch then reads z and f (backward f, o and dh) for
        the maps of all segments but one, in bf16 up to 4 N (6 N) bytes more."""
        B, T, H = z.shape
        if z.stride(2) != 1 or not z.stride() == f.stride() == o.stride():
            z, f, o = z.contiguous(), f.contiguous(), o.contiguous()
        T, S, D = max(T, 1), FO_WARPS, FO_CHANNELS  # no steps are one segment, too: c_last = c0 has to be written
        segments = 1 if B * H >= 16384 else min(128, triton.cdiv(131072, max(1, B * H * S)), triton.cdiv(T, 4 * FO_CHUNK))
        length = triton.cdiv(T, segments)
        whole = FO_CHUNK * S if length > FO_CHUNK * S else FO_CHUNK  # a round, all warps having steps
        length = triton.cdiv(length, whole) * whole
        segments = triton.cdiv(T, length)  # rounding length up can leave fewer
        ptx = z.is_cuda and torch.version.hip is None and z.dtype != torch.float64
        return z, f, o, (triton.cdiv(H, D) * B, segments), length, dict(H=H, ST=z.stride(1), PTX=ptx, U=FO_CHUNK, S=S, D=D, num_warps=S)

    def _fo_forward_triton(z, f, o, c0, act):
        """_fo_forward_torch on a GPU; on a CPU too, if TRITON_INTERPRET=1 was set before the import."""
        (B, T, H), state = z.shape, torch.promote_types(z.dtype, torch.float32)
        h, c_last = z.new_empty(B, T, H), z.new_empty(B, H, dtype=state)
        edges = z.new_empty(triton.cdiv(T, FO_CHUNK), B, H, dtype=state)
        z, f, o, grid, length, settings = _fo_plan(z, f, o)
        maps = edges.new_empty(2, grid[1], B, H) if grid[1] > 1 else edges
        c0 = c0 if c0 is None else c0.contiguous()
        args = z, f, o, c0, h, c_last, edges, maps, B, T, z.stride(0), length
        for summary in (True, False) if grid[1] > 1 else (False,):
            _launch(_fo_forward_kernel, grid, *args, ACT=act, SUMMARY=summary, SEGMENTED=grid[1] > 1 and not summary, **settings)
        return h, c_last, edges

    def _fo_backward_triton(z, f, o, edges, dh, dc_last, dz, df, do, act):
        """_fo_backward_torch on a GPU, or in the interpreter; dz, df, do share their strides."""
        B, T, H = z.shape
        dc0 = edges.new_empty(B, H)
        z, f, o, grid, length, settings = _fo_plan(z, f, o)
        maps = edges.new_empty(2, grid[1], B, H) if grid[1] > 1 else edges
        dc_last = dc_last if dc_last is None else dc_last.contiguous()
        args = z, f, o, edges, dh.contiguous(), dc_last, dz, df, do, dc0, maps, B, T, z.stride(0), dz.stride(0), length
        for summary in (True, False) if grid[1] > 1 else (False,):
            _launch(_fo_backward_kernel, grid, *args, ACT=act, SUMMARY=summary, SEGMENTED=grid[1] > 1 and not summary, DT=dz.stride(1),
                    **settings)
        return dc0


def _fo_edges(x):
    "How many edges there are for x (B, T, any)"
    chunk = FO_CHUNK if x.is_cuda and triton is not None else CPU_CHUNK
    return (x.shape[1] + chunk - 1) // chunk


def _fo_fake(banks, c0):
    B, T, H = banks[0].shape
    H = H // 3 if len(banks) == 1 else H
    x, state = banks[0], torch.promote_types(banks[0].dtype, torch.float32)
    return x.new_empty(B, T, H), x.new_empty(B, H, dtype=state), x.new_empty(_fo_edges(x) * B * H, dtype=state)


# One operator for both forms, told apart by the number of banks: [gates] are logits (B, T, 3H), [z, f, o] are activated, (B, T, H) each. So
# gates come in, and their gradient goes out, as one tensor: with chunk() outside, autograd would have to join the three gradients again, at
# nearly half of the backward pass's traffic. The third output, edges, is only for the backward pass.
@_operator("fo_pool", _fo_fake)
def _fo_op(banks: list[torch.Tensor], c0: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    act = len(banks) == 1
    z, f, o = banks[0].chunk(3, dim=-1) if act else banks
    forward = _fo_forward_triton if z.is_cuda and triton is not None else _fo_forward_torch
    h, c_last, edges = forward(z, f, o, c0, act)
    return h, c_last, edges.flatten()  # flat: else compiled code would depend on whether there is just one chunk


@_operator("fo_pool_backward", lambda banks, edges, dh, _: (
    [torch.empty_like(x, memory_format=torch.contiguous_format) for x in banks], edges.new_empty(dh.shape[0], dh.shape[2])))
def _fo_backward_op(banks: list[torch.Tensor], edges: torch.Tensor, dh: torch.Tensor,
                    dc_last: torch.Tensor | None) -> tuple[list[torch.Tensor], torch.Tensor]:
    act = len(banks) == 1
    z, f, o = banks[0].chunk(3, dim=-1) if act else banks
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in banks]
    dz, df, do = grads[0].chunk(3, dim=-1) if act else grads
    backward = _fo_backward_triton if z.is_cuda and triton is not None else _fo_backward_torch
    return grads, backward(z, f, o, edges.view(_fo_edges(z), len(z), z.size(2)), dh, dc_last, dz, df, do, act)


def _fo_setup_context(ctx, inputs, output):
    banks, _ = inputs
    ctx.set_materialize_grads(False)  # an unused c_last costs nothing, nor do edges
    ctx.save_for_backward(*banks, output[2])


def _fo_autograd(ctx, dh, dc_last, _):
    *banks, edges = ctx.saved_tensors
    if dh is None:  # a loss of c_last alone
        dh = torch.zeros_like(banks[0].chunk(3, dim=-1)[0] if len(banks) == 1 else banks[0])
    grads, dc0 = _fo_backward_op(banks, edges, dh, dc_last)
    return grads, dc0 if ctx.needs_input_grad[1] else None


_fo_op.register_autograd(_fo_autograd, setup_context=_fo_setup_context)
_fo_backward_op.register_autograd(_once("fo_pool"))


def _fo_pool(name, banks, H, c0):
    _reverse_mode_only(name)
    x = banks[0]
    if not x.is_floating_point() or x.dtype.itemsize == 1 or any(b.dtype != x.dtype for b in banks):
        raise TypeError(f"{name}: inputs must share one of float16, bfloat16, float32, float64, "
                        f"got {', '.join(str(b.dtype) for b in banks)}; cast them first, e.g. with .to(torch.float32)")
    state = torch.promote_types(x.dtype, torch.float32)
    if c0 is not None and (c0.shape != (x.size(0), H) or c0.dtype != state):
        raise ValueError(f"{name}: c0 must be {state} of shape ({x.size(0)}, {H}), got {c0.dtype} of shape "
                         f"{tuple(c0.shape)}; pass the c_last of the window before, or None for zeros (FSDP casts it, but with "
                         "MixedPrecisionPolicy(cast_forward_inputs=False))")
    _check_devices(name, *banks, *([] if c0 is None else [c0]))
    h, c_last, _ = _fo_op(banks, c0)
    return h, c_last


def fo_pool(z, f, o, c0=None):
    """fo-pooling of activated inputs: c_t = f_t c_(t-1) + (1 - f_t) z_t, h_t = o_t c_t [QRNN, eq. 4].

    z, f, o (B, T, H), one dtype of float16, bfloat16, float32, float64; c0 (B, H), None for zeros. Returns h (B, T, H) in their dtype and
    c_last (B, H), the c0 of the next window. The state (c0, c_last) is float32 for 16-bit inputs, else in their dtype. f_t = 0 (a logit of
    -inf) forgets all before t, say at the start of a document, but not a NaN or an infinity. Differentiable once in all inputs, through h and
    c_last. Raises ValueError for shapes that do not fit, c0 in another dtype, or several devices, TypeError for other dtypes,
    NotImplementedError under forward-mode differentiation.
    """
    if z.dim() != 3 or not z.shape == f.shape == o.shape:
        raise ValueError(f"fo_pool: z, f, o must share one shape (B, T, H), got {tuple(z.shape)}, {tuple(f.shape)}, "
                         f"{tuple(o.shape)}; add the missing dimension, e.g. with z[None]")
    return _fo_pool("fo_pool", [z, f, o], z.size(2), c0)


def qrnn_pool(gates, c0=None):
    """fo_pool(tanh(z), sigmoid(f), sigmoid(o), c0) for gates (B, T, 3H) = logits [z, f, o], activations fused.

    Prefer it in 16-bit: from a logit of about 6.2 on, f rounds to exactly 1 in bf16, and the channel is stuck. Here f is computed from the
    logit in fp32, and stays below 1 up to a logit of about 16. In fp32 tanh and sigmoid are right to about 2e-7, absolute: tanh(z) below
    3e-8 counts as 0, and 1 - f is off by 1% at a logit of 12, by a fifth at 15. Dtypes, results and errors as for fo_pool.
    """
    if gates.dim() != 3 or gates.size(2) % 3:
        raise ValueError(f"qrnn_pool: gates must be (B, T, 3H), the logits of z, f, o side by side, got "
                         f"{tuple(gates.shape)}; join them with torch.cat([z, f, o], dim=-1)")
    return _fo_pool("qrnn_pool", [gates], gates.size(2) // 3, c0)


# -----------------------------------------------------------------------------
# Rotary positions backward: from the gradients of q, k, v, in heads, that of the projection they were cut from. torch.compile makes one
# kernel of the rotation, the transpose and the join, however they are written, but one whose threads fetch all numbers, even those only
# copied, two bytes at a time: on an H200 (B 32, T 1024, 12 heads of 64, bf16) it takes 390 us, where the traffic alone takes 75.


def _rope_backward_torch(grads, cos, sin, out):
    "Fills out (B, T, parts, h, w)"
    for i, dx in enumerate(grads):
        dx = dx.transpose(1, 2)                                                          # (B, T, h, w)
        if i < 2:
            even, odd = dx.to(torch.promote_types(dx.dtype, torch.float32)).unflatten(-1, (-1, 2)).unbind(-1)
            dx = torch.stack((even * cos + odd * sin, odd * cos - even * sin), -1).flatten(-2)
        out[:, :, i] = dx


if triton is not None:

    @triton.jit(do_not_specialize=["T", "h"])
    def _rope_backward_kernel(dx_ptr, cos_ptr, sin_ptr, out_ptr, T, h, sb, sh, st, C, w: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
                              U: tl.constexpr):
        """One program: R positions of one batch row in U heads, of dx (B, h, T, w), strides sb, sh, st, 1, into rows of out, C apart.
        Without cos and sin (T, w / 2) it copies. A head is a tile (R, W). In 16 bits a thread then has 8 neighbouring numbers and just
        the 4 of cos and sin that they need, and nothing goes through shared memory."""
        b, t, u = tl.program_id(2).to(tl.int64), tl.program_id(0).to(tl.int64) * R, tl.program_id(1).to(tl.int64) * U
        r, i, p = tl.arange(0, R)[:, None], tl.arange(0, W)[None, :], tl.arange(0, W // 2)[None, :]
        rows = tl.minimum(T - t, R).to(tl.int32)
        dx_ptr += b * sb + t * st
        out_ptr += (b * T + t) * C
        if cos_ptr is not None:
            at, there = (t + r) * (w // 2) + p, (r < rows) & (p < w // 2)
            cos, sin = tl.load(cos_ptr + at, there), tl.load(sin_ptr + at, there)                       # (R, W / 2)
        xs, live = (), ()
        for n in tl.static_range(U):  # all loads first
            live = live + ((r < rows * (u + n < h).to(tl.int32)) & (i < w),)
            xs = xs + (tl.load(dx_ptr + (u + n) * sh + r.to(tl.int64) * st + i, live[n]),)                           # (R, W) each
        for n in tl.static_range(U):
            x = xs[n]
            if cos_ptr is not None:
                even, odd = tl.split(tl.reshape(x.to(tl.float32), (R, W // 2, 2)))
                x = tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), (R, W))
            tl.store(out_ptr + (u + n) * w + r * C + i, x.to(out_ptr.dtype.element_ty), live[n])

    def _rope_tile(h, w):
        "The kernel's constexprs: in 16 bits each of 128 threads has up to four loads of 16 bytes in flight"
        W = max(2, triton.next_power_of_2(w))
        return dict(w=w, W=W, R=max(1, 1024 // W), U=min(4, h))

    def _rope_backward_triton(grads, cos, sin, out):
        "_rope_backward_torch on a GPU, or in the interpreter"
        (B, T, _, h, w), angles = out.shape, (cos.contiguous(), sin.contiguous())
        tile = _rope_tile(h, w)
        for i, dx in enumerate(grads if out.numel() else ()):
            dx = dx if dx.stride(3) == 1 else dx.contiguous()
            _launch(_rope_backward_kernel, (triton.cdiv(T, tile["R"]), triton.cdiv(h, tile["U"]), B), dx,
                    *(angles if i < 2 else (None, None)), out[:, :, i], T, h, *dx.stride()[:3], out.stride(1), **tile, num_warps=4)


def _rope_fake(grads, cos, sin):
    _check_devices("rope_backward", *grads, cos, sin)
    B, h, T, w = grads[0].shape
    return grads[0].new_empty(B, T, len(grads) * h * w)


@_operator("rope_backward", _rope_fake)
def rope_backward(grads: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """From the gradients of q, k and more parts that of the projection they were cut from: (B, T, parts * h * w), the parts side by side.

    grads: (B, h, T, w) each, q's and k's first, any strides. cos, sin: (T, 1, w / 2), fp32, the angles by which pairs (x_2i, x_2i+1) of q and
    k were turned: their gradients are turned back, in fp32 or wider, the others copied. Other shapes that broadcast, such as tables for each
    sequence, take the PyTorch path. The result has the first's dtype and is not differentiable.
    ValueError if the parts' shapes differ (as with grouped queries), w is odd, or for several devices; NotImplementedError in forward mode."""
    _reverse_mode_only("rope_backward")
    _check_devices("rope_backward", *grads, cos, sin)
    if any(g.dim() != 4 or g.shape != grads[0].shape or g.size(-1) % 2 for g in grads):
        raise ValueError(f"rope_backward: expected gradients of one shape (B, h, T, w), w even, got {[tuple(g.shape) for g in grads]}")
    B, h, T, w = grads[0].shape
    out = grads[0].new_empty(B, T, len(grads), h, w)
    by_triton = (out.is_cuda and triton is not None and out.dtype in (torch.float32, torch.bfloat16, torch.float16)
                 and cos.shape == sin.shape == (T, 1, w // 2) and B <= 65535)  # the most that a grid's third axis may count
    (_rope_backward_triton if by_triton else _rope_backward_torch)(grads, cos, sin, out)
    return out.flatten(2)


# -----------------------------------------------------------------------------
# Attention of one query, as in decoding: all work is to read keys and values once. PyTorch's kernels are made for many queries: on an H200
# (2,048 sequences of up to 66 positions, 12 heads of 64, bf16) they take 129 to 194 us, where reading what is there would take some 45. It
# is for many sequences: each head is one program's, so with few sequences multiprocessors idle.
# No GPU has run this kernel (UNTRIED).

if triton is not None:

    @triton.jit(do_not_specialize=["S", "h"])
    def _one_query_kernel(q_ptr, k_ptr, v_ptr, mask_ptr, out_ptr, S, h, scale, qb, qh, kb, kh, ks, vb, vh, vs, w: tl.constexpr,
                          W: tl.constexpr, u: tl.constexpr, U: tl.constexpr, N: tl.constexpr):
        """One program: one head of one sequence, q (w,), k (S, w), v (S, u), N positions at a time; strides of batch, heads and positions.
        p = exp(score - most), most being the largest so far; what came before is scaled down when it grows. Row r of y sums position r of
        each round; the rows are added up only at the end, so that until then threads wait for one another just for scores, their maximum
        and the sum of p."""
        n = tl.program_id(0)
        b, a = (n // h).to(tl.int64), (n % h).to(tl.int64)
        i, j, r = tl.arange(0, W)[None, :], tl.arange(0, U)[None, :], tl.arange(0, N)
        k_ptr += b * kb + a * kh
        v_ptr += b * vb + a * vh
        q = tl.load(q_ptr + b * qb + a * qh + i, i < w, 0.0).to(tl.float32) * scale                     # (1, W); scale holds log2(e), for exp2
        end = S if mask_ptr is None else 0  # of the positions to be read
        if mask_ptr is not None:
            for s in range(0, S, 256):
                to = s + tl.arange(0, 256)
                m = tl.load(mask_ptr + to, to < S, float("-inf")).to(tl.float32)
                end = tl.maximum(end, tl.max(tl.where(m > float("-inf"), to + 1, 0), 0))
        most, total, y = -3e38, 0.0, tl.zeros((N, U), tl.float32)
        for s in range(0, end, N):
            if mask_ptr is None:
                m = tl.where(s + r < end, 0.0, float("-inf"))
            else:
                m = tl.load(mask_ptr + s + r, s + r < end, float("-inf")).to(tl.float32)                # (N,)
                m = tl.where(m > float("-inf"), tl.maximum(m, -1e38), m)  # or log2(e) times a dtype's least number would be -inf
            seen, at = (m > float("-inf"))[:, None], (s + r).to(tl.int64)[:, None]
            k = tl.load(k_ptr + at * ks + i, seen & (i < w), 0.0)                                       # (N, W)
            v = tl.load(v_ptr + at * vs + j, seen & (j < u), 0.0)                                       # (N, U)
            scores = tl.sum(k.to(tl.float32) * q, 1) + m * 1.4426950408889634                           # log2(e)
            top = tl.maximum(most, tl.max(scores, 0))
            p, fade = tl.exp2(scores - top), tl.exp2(most - top)
            total = total * fade + tl.sum(p, 0)
            y = y * fade + p[:, None] * v.to(tl.float32)
            most = top
        tl.store(out_ptr + n.to(tl.int64) * u + j, (tl.sum(y, 0) / total).to(out_ptr.dtype.element_ty)[None, :], j < u)

    def _one_query_plan(programs, w, u):
        """The kernel's constexprs, and its warps: one from 2,049 programs on (an H200 holds some 3,300 of 80 registers at once), up to 8
        for few. In 16 bits a thread loads four pieces of 16 bytes of k, and of v, at a time"""
        W, U, warps = triton.next_power_of_2(w), triton.next_power_of_2(u), min(8, triton.next_power_of_2(max(1, 4096 // programs)))
        return dict(w=w, W=W, u=u, U=U, N=warps * max(1, 1024 // max(W, U))), warps

    def _one_query_triton(q, k, v, mask, out):
        "Fills out (B, h, 1, u)"
        (B, h, _, w), u = q.shape, v.shape[3]
        plan, warps = _one_query_plan(max(1, B * h), w, u)
        q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
        _launch(_one_query_kernel, (B * h,), q, k, v, None if mask is None else mask.contiguous(), out, k.shape[2], h,
                w ** -0.5 / math.log(2), *q.stride()[:2], *k.stride()[:3], *v.stride()[:3], **plan, num_warps=warps)


@_operator("one_query_attention", lambda q, k, v, mask: q.new_empty(*q.shape[:3], v.shape[3]))
def _one_query(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    _one_query_triton(q, k, v, mask, out := q.new_empty(*q.shape[:3], v.shape[3]))
    return out


def one_query_attention(q, k, v, mask=None):
    """softmax(q k^T / sqrt(w) + mask) v for one query a head, as in decoding.

    q (B, h, 1, w), k (B, h, S, w), v (B, h, S, u), of one dtype, any strides; mask (1, S) of floats, or None. Returns (B, h, 1, u).
    By PyTorch's operator, but if UNTRIED, on a GPU, in fp32, bf16 and fp16, for heads up to 256, by a Triton kernel: without a gradient, in
    fp32 in between. The kernel does not read positions at -inf, so that not even a NaN there counts (if all are, it returns NaN, PyTorch's
    operator 0; numbers of an fp64 mask below fp32's range count as -inf).
    ValueError for other shapes (as with grouped queries), a mask of another kind, or several devices; NotImplementedError in forward mode."""
    _reverse_mode_only("one_query_attention")
    _check_devices("one_query_attention", *(t for t in (q, k, v, mask) if t is not None))
    fits = (q.dim() == k.dim() == v.dim() == 4 and q.size(2) == 1 and (q.shape[:2], q.size(3)) == (k.shape[:2], k.size(3))
            and k.shape[:3] == v.shape[:3] and (mask is None or mask.shape == (1, k.size(2)) and mask.is_floating_point()))
    if not fits:
        raise ValueError("one_query_attention: expected q (B, h, 1, w), k (B, h, S, w), v (B, h, S, u) and a mask (1, S) of floats or None; "
                         f"got {', '.join(f'{tuple(t.shape)} in {t.dtype}' for t in (q, k, v, mask) if t is not None)}")
    if (UNTRIED and q.is_cuda and triton is not None and q.dtype in (torch.float32, torch.bfloat16, torch.float16)
            and max(q.size(3), v.size(3)) <= 256):
        return _one_query(q, k, v, mask)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask if mask is None else mask.to(q.dtype))  # or it may refuse it
