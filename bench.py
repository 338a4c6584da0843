"""
The papers' tables and figures, but for [2]'s losses, which train_gpt.py logs, from measurement, with the papers' numbers beside them.

    python bench.py params                                      parameter counts: seconds, no weights are made
    python bench.py compare --variant attn_out=dense --variant attn_out=identity --seeds=5
    python bench.py compare --model=shaq --variant preset=sharnn --variant preset=shaq --set dataset=enwik8,n_embd=256
    python bench.py kernels prefill decode train                speed; one command may name several
    python bench.py code --sm=90                                machine code of the Triton kernels, no GPU needed: instructions an element
    python bench.py scaling                                     loss against compute, 20 tokens per parameter
    python bench.py loss --ckpt out/gpt/ckpt.pt out/shaq/best.pt        trained models on a whole split, token by token
    python bench.py eval --ckpt=out/gpt/ckpt.pt --tasks=piqa,hellaswag,openbookqa,arc_easy,blimp
    python bench.py plot                                        figures from the records of compare, scaling, prefill, decode; or --logs

Each but plot prints Markdown tables and appends its records to out/bench/WHAT.jsonl, one JSON object a line. By default the sizes are
small on a CPU and the papers' on a GPU, except that compare and scaling, which train, take minutes there. python bench.py WHAT --help
lists a command's flags.

[1] Aggarwal and Kumar, arXiv:2603.08343v2 (v1 where said)   [2] Wang, Dynamic Value Attention   [3] Bharwani et al., SHAQ
"""
import argparse
import contextlib
import gc
import importlib
import inspect
import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, replace
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

import kernels
import train_gpt
import train_shaq
from kernels import (hadamard_affine, hadamard_affine_norm, hadamard_matrix, hadamard_norm_is_fused, hadamard_path, hadamard_transform,
                     qrnn_pool)
from model import (CHOICES, GPT, QRNN, SHAQ, SHAQ_PRESETS, SIZES, GPTConfig, SHAQConfig, attention, beside, captured, evaluating,
                   inputs_and_targets, load_checkpoint, lr_at, machine, model_of, peak_flops, plain_attention, processor)
from prepare_data import (Parser, die, encode, end_progress, flag01, git_commit, load_dataset, nearest, number, one_line, out_of_memory,
                          progress, run, warn)

# -----------------------------------------------------------------------------
# What the papers say

MILLIONS = {  # [1, table 2 and v1's table 3]: dense, Hadamard; the differences that v2 prints, in millions
    "tiny": ("124M", "117M", "-7.1M"), "small": ("354M", "329M", "-25.1M"), "base": ("757M", "701M", "-56.6M"),
    "large": ("1.3B", "1.2B", "-100.6M"), "medium_v1": ("1.7B", "1.6B"), "large_v1": ("2.6B", "2.4B"), "xl_v1": ("3.9B", "3.6B"),
    "xxl_v1": ("5.6B", "5.1B"),
}
BOOK = {"gpt2_book": 162_419_712, "dva_book": 112_800_768}  # [2]'s totals; -37.6% of the time, on Kaggle's "GPU-100", a P100
SHARNN_PUBLISHED, SHARNN_DEAD = 53_798_093, 24_576  # parameters of the published code, and how many of them nothing reads
ABLATIONS = {  # [3, tables 1 and 2]: hours an epoch on a V100, parameters, test bits per byte after 32 epochs of enwik8. The rows without
    # hours ran on another GPU, with a sharnn of 1.146 (attn3). mean_mem is 1.219 in the text and 1.208, sharnn's own figure, in the table.
    "sharnn": (2.16, "54M", 1.208), "no_boom": (1.84, "37M", 1.120), "ffn": (2.33, "71M", 1.158), "qrnn": (0.92, "45M", 1.126),
    "mean_mem": (2.03, "53M", 1.219), "no_gates": (2.12, "51M", 1.131), "attn1": (None, "54M", 5.07), "attn2": (None, "54M", 5.07),
    "attn3": (None, "54M", 1.146), "attn4": (None, "54M", 1.141), "layers3_heads2": (None, "41M", 1.16),
    "layers2_heads2": (None, "29M", 1.164), "layers2": (None, "29M", 1.135), "shaq": (18.5 / 32, "26M", 1.180),
}
# [1, table 3], one H100: ms, tokens/s and MB, dense then Hadamard. Except for tiny, each memory difference is about 4 bytes per removed
# weight (in MiB): those runs kept fp32 weights. The tokens/s contradict the latencies (65,536 tokens in 33 ms are 2.0M/s): both are shown.
PREFILL = {"tiny": ((33.157, 150126, 16264), (32.366, 156133, 16227)), "small": ((84.699, 53154, 21330), (83.204, 55956, 21233)),
           "base": ((129.595, 26921, 26504), (126.442, 28585, 26289)), "large": ((174.158, 16188, 32240), (169.501, 17318, 31857))}
DECODE = {  # tokens/s, by batch, prompt and new tokens. v2 names no prompt: one token here. v1's latencies are those of 16 new tokens
    # (272 ms * 60,238 / 1024 = 16.0)
    (2048, 1, 64): {"tiny": (52820, 53730), "small": (19978, 20409), "base": (10723, 11135), "large": (8025, 8312)},  # [1, table 4]
    (1024, 2, 16): {"tiny": (60238, 59478), "small": (24854, 25797), "base": (13417, 13974), "medium_v1": (7896, 8266),  # v1, table 3
                 "large_v1": (5353, 5683), "xl_v1": (3605, 3827), "xxl_v1": (2767, 2951)}}
PERPLEXITY = {"small": (1.55e19, 21.54, 21.39), "base": (6.61e19, 17.41, 17.35), "large": (2.06e20, 16.17, 15.70)}  # FLOPs, dense, Hadamard
ZERO_SHOT = {  # v1, table 4, in percent: dense, Hadamard. It does not say whether acc or acc_norm.
    "small": dict(piqa=(65.9, 64.3), hellaswag=(32.6, 31.6), openbookqa=(27.0, 29.8), arc_easy=(39.4, 38.1), blimp=(80.4, 80.0)),
    "base": dict(piqa=(68.1, 67.3), hellaswag=(38.7, 38.1), openbookqa=(30.0, 28.8), arc_easy=(43.5, 42.0), blimp=(80.5, 80.8)),
    "large": dict(piqa=(70.8, 70.9), hellaswag=(46.1, 44.6), openbookqa=(32.8, 31.5), arc_easy=(45.1, 45.9), blimp=(81.0, 81.6)),
}
OUTS = ["dense", "hadamard", "head_hadamard", "identity"]  # append your own: the papers' figures are for the first two
GPTS = [s for s in SIZES if s not in BOOK]  # the sizes of [1], and nano
HEADS = {SIZES[s]["n_embd"]: SIZES[s]["n_head"] for s in GPTS}  # of each width

# -----------------------------------------------------------------------------
# Shared: flags, tables, records, the clock

COMMANDS, BEGUN = {}, itertools.count(1)  # BEGUN numbers the commands, as two may begin in one second


def command(flags=lambda gpu: ()):
    """Registers bench_NAME(args) as the command NAME. flags(gpu) -> its own flags, each (name, arguments of add_argument); their defaults
    depend on gpu: whether it will run on one"""
    def add(f):
        COMMANDS[f.__name__.removeprefix("bench_")] = f, flags
        return f
    return add


def parse(what, argv, gpu):
    "Parse the flags of the command what. All commands but plot also take --out, --device, --dtype and --untried."
    f, flags = COMMANDS[what]
    parser = Parser(prog=f"bench.py {what}", description=inspect.getdoc(f))
    for name, kw in flags(gpu):
        parser.add_argument(f"--{name}", **kw)
    if f is not bench_plot:
        parser.set_defaults(what=what)
        parser.add_argument("--out", default=f"out/bench/{what}.jsonl", help="records are appended here")
        parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"],
                            help="where to measure (auto: cuda where that is, else cpu)")
        parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"],
                            help="auto: bfloat16 where that is faster (code: anyway)")
        parser.add_argument("--untried", type=flag01, default=False, help="1: also the kernels that no GPU has run yet, see kernels.UNTRIED")
    return parser.parse_args(argv)


def start(args):
    "Fill in what all tables and records say, check that the records can be written -> the machine to measure"
    with one_line():
        m = machine(args.device, args.dtype)
    if m.world > 1:
        die("bench.py measures one device: start it without torchrun")
    torch.use_deterministic_algorithms(False)  # an earlier compare may have left it on
    torch.backends.cuda.enable_cudnn_sdp(args.what not in ("decode", "eval"))  # cuDNN plans 0.1 s or more for each new number of keys
    args.run = time.strftime(f"%Y-%m-%d %H:%M:%S, process {os.getpid()}, command {next(BEGUN)}")
    args.gpu, kernels.UNTRIED = m.device.type == "cuda", args.untried
    args.hardware, args.git = hardware(m) + ", untried kernels" * (args.gpu and args.untried), git_commit()
    os.makedirs(os.path.dirname(args.out) or ".", exist_ok=True)
    open(args.out, "ab").close()  # if it cannot be written, fail now, not after the first run
    return m


def on_gpu(argv):
    "Whether the commands will run on a GPU: their flags' defaults depend on it"
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", nargs="?", default="auto")  # without a value: the command's own parser will say so
    return torch.cuda.is_available() and parser.parse_known_args(argv)[0].device in ("auto", "cuda")


def hardware(m):
    "The device, for a table's caption"
    name, dtype = processor(), str(m.dtype).removeprefix("torch.")
    if m.device.type == "cuda":
        name = torch.cuda.get_device_name(m.device)
        if m.dtype == torch.float32 and torch.cuda.is_bf16_supported(including_emulation=False):  # a GPU that has TF32, too
            dtype += " (products in TF32)"
    elif m.device.type == "mps":
        name += " (mps)"
    else:
        name += f", threads: {torch.get_num_threads()}"
    return f"{name}, {dtype}, torch {torch.__version__}"


def none_of(name, choices):
    return f"{name!r} is none of {', '.join(choices)}{nearest(name, choices)}"


def listed(kind, choices=None):
    "argparse type: 8,64,8 -> [8, 64]; choices: strings"
    def parse(text):
        values = list(dict.fromkeys(kind(part.strip()) for part in text.split(",")))
        for value in map(str, values):
            if choices and value not in choices:
                raise argparse.ArgumentTypeError(none_of(value, choices))
        return values
    parse.__name__ = kind.__name__  # argparse says "invalid int value"
    return parse


names, numbers = listed(str), listed(number(int, 1))


class Joined(argparse.Action):
    "--set a=1 --set b=2 is --set a=1,b=2"
    def __call__(self, parser, namespace, value, flag=None):
        setattr(namespace, self.dest, ",".join(filter(None, (getattr(namespace, self.dest), value))))


@contextlib.contextmanager
def fits(what):
    "If the code inside runs out of memory, leave its rows out of the table and go on with all else, later commands too"
    try:
        yield
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        end_progress()
        warn(f"note: no rows for {what}: {(str(e).splitlines() or [type(e).__name__])[0]}")


def table(args, title, rows):
    """Print a Markdown table, with hardware and date in its caption. rows: each {column: cell}, or pairs if two columns have one name. The
    name can end in the cells' format, in braces. None is printed as a dash; a column of only None is left out"""
    columns = []
    for pairs in zip(*(row.items() if isinstance(row, dict) else row for row in rows)):
        name, _, form = pairs[0][0].partition(" {")
        if any(v is not None for _, v in pairs):
            columns.append([name, *("–" if v is None else ("{" + (form or "}")).format(v) for _, v in pairs)])
    print(f"\n**{title}** ({args.hardware}, {args.run[:10]})\n")
    for i, cells in enumerate(zip(*columns)):
        print("| " + " | ".join(cells) + " |" + ("\n|" + "---|" * len(cells)) * (i == 0))
    sys.stdout.flush()


def record(args, **fields):
    """Append one object to the records; its "run" tells one command's records from the next one's. nan and inf, such as the loss of a
    diverged run, become null, as JSON has neither"""
    row = dict(what=args.what, run=args.run, hardware=args.hardware, git=args.git, **fields)
    row = json.loads(json.dumps(row), parse_constant=lambda text: None)
    try:
        with open(args.out, "ab+") as f:
            if f.tell():
                f.seek(-1, os.SEEK_END)
                f.write(b"" if f.read() == b"\n" else b"\n")  # a kill can have cut the last one short
            f.write(json.dumps(row).encode() + b"\n")
    except OSError as e:
        e.filename = args.out  # a full disk does not say where
        raise


def timed(work, m, rounds=7, least=0.02):
    """Seconds a call: {name: f} -> {name: (rounds,) array}. Rounds are interleaved, so that a machine that slows down slows all alike. Two calls
    warm up (compilation), or a whole turn of a ring, as on a CPU its first turn pays for untouched pages. A sample is as many calls as take
    `least` seconds, by one more call that is not counted, between two synchronisations. Calls are f(0), f(1), ..: by this number, f can take its
    inputs in turn from a ring that is larger than the cache."""
    wait = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(m.device.type, lambda: None)
    count, calls, samples = dict.fromkeys(work, 0), {}, {name: [] for name in work}

    def sample(name, n):
        wait()
        t0 = time.perf_counter()
        for i in range(count[name], count[name] + n):
            work[name](i)
        wait()
        count[name] += n
        return (time.perf_counter() - t0) / n

    for name in work:
        sample(name, max(2, getattr(work[name], "turn", 0)))
        calls[name] = max(1, math.ceil(least / sample(name, 1)))
    turn = list(work)
    for _ in range(rounds):
        for name in turn:
            samples[name].append(sample(name, calls[name]))
        turn = turn[1:] + turn[:1]  # so that none gains by its place in the round
    return {name: np.array(s) for name, s in samples.items()}


def spread(t):
    "median ± half the interquartile range, in ms, rounded to the latter's first digit; of one number, that alone"
    low, mid, high = np.percentile(t, [25, 50, 75]) * 1e3
    half = (high - low) / 2
    digits = max(0, -math.floor(math.log10(half or mid / 100)))
    return f"{mid:,.{digits}f}" + f" ± {half:,.{digits}f}" * (len(t) > 1)


def nats(bytes_per_token):
    "A loss's unit"
    return f"nats per {'byte' if bytes_per_token == 1 else 'token'}"


def standard_error(x):
    "Of the mean over the first dimension; None for a single sample"
    return np.std(x, axis=0, ddof=1) / len(x) ** 0.5 if len(x) > 1 else None


def with_error(value, error, form="+.4f"):
    return f"{value:{form}}" + ("" if error is None else f" ± {error:{form[1:]}}")


CACHE = 2**27  # bytes: more than most last-level caches hold; twice as many are more than a GPU's holds


def ring(make):
    "Random tensors of one shape, together larger than the cache (at most 64 of them)"
    first = make()
    return [first] + [make() for _ in range(min(63, CACHE * (2 if first.is_cuda else 1) // first.nbytes + 1))]


def in_turn(f, *rings):
    """-> a function of i that calls f on the i-th tensor of each ring. On a GPU, results are kept for one turn, so that they rotate through
    memory, too. On a CPU, where untouched memory costs more than most of what is measured, each result is freed and the next call reuses
    its memory, as in training."""
    n, kept = len(rings[0]), {}

    def call(i):
        y = f(*(r[i % n] for r in rings))
        if rings[0][0].is_cuda:
            kept[i % n] = y
    call.turn = n
    return call


def bandwidth(m):
    "Bytes a second that a plain copy reads and writes, measured now"
    x = ring(lambda: torch.randn(2**28 if m.device.type == "cuda" else 2**23, device=m.device))
    y = torch.empty_like(x[0])
    return 2 * y.nbytes / np.median(timed(dict(copy=in_turn(y.copy_, x)), m)["copy"])


def replay(work, m):
    "work(), on a GPU as one CUDA graph, for timed()"
    graph = captured(work, m.device)
    return lambda i, keep=work: graph()  # a graph knows only the addresses of its tensors: keep holds on to them


def fresh_compiler():
    "Forget compiled code. Variants share functions: with the usual limit of 8 versions of each, the last would silently run eager."
    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = 256


class Peak:
    "Peak memory of a GPU since this was made, less what was in use then; None elsewhere, where PyTorch does not count it"

    def __init__(self, m):
        self.device = m.device if m.device.type == "cuda" else None
        if self.device:
            gc.collect()  # a compiled model refers to itself
            w = torch.ones(256, 256, device=m.device, dtype=m.dtype, requires_grad=True)
            # allocate cuBLAS's workspaces, tens of MiB a thread and a stream: else they count as the first variant's
            for stream in contextlib.nullcontext(), beside(m.device):
                with torch.enable_grad(), stream:
                    (F.linear(w, w, w[0]) @ w).sum().backward()
            del w
            self.before = torch.cuda.memory_allocated(self.device)
            torch.cuda.empty_cache()
            self.reserved = torch.cuda.memory_reserved(self.device)
            self.forget()

    def forget(self):
        if self.device:
            torch.cuda.reset_peak_memory_stats(self.device)

    def mib(self):
        return self.device and (torch.cuda.max_memory_allocated(self.device) - self.before) / 2**20

    def held(self):
        "MiB reserved on a GPU, which include what CUDA graphs work in: a replay allocates nothing"
        torch.cuda.empty_cache()
        return (torch.cuda.memory_reserved(self.device) - self.reserved) / 2**20


# -----------------------------------------------------------------------------
# params: [1, table 2], v1's table 3, [2]'s totals, [3, tables 1 and 2]


def count_params(kind, **config):
    with torch.device("meta"):
        model = GPT(GPTConfig(**config)) if kind == "gpt" else SHAQ(SHAQConfig(**config))
    return sum(p.numel() for p in model.parameters())


@command()
def bench_params(args):
    "Parameters of every model that the papers count, on the meta device: no weights are made."
    start(args)
    counts, rows = [], []  # counts: (model, the paper's figure, ours)
    for size, paper in MILLIONS.items():
        dense, hadamard = (count_params("gpt", **SIZES[size], attn_out=out) for out in OUTS[:2])
        counts += zip((f"{size}, dense", f"{size}, hadamard", f"{size}, saved"), paper, (dense, hadamard, hadamard - dense))
    counts += [(size, paper, count_params("gpt", **SIZES[size])) for size, paper in BOOK.items()]
    for preset, (_, paper, _) in ABLATIONS.items():
        n = count_params("shaq", **SHAQ_PRESETS[preset])
        counts.append((preset, paper, n))
        if preset == "sharnn":
            counts.append((f"sharnn with the {SHARNN_DEAD:,} parameters of the published code that nothing reads", SHARNN_PUBLISHED,
                           n + SHARNN_DEAD))
    for name, paper, n in counts:
        exact = isinstance(paper, int)
        value = paper if exact else float(paper[:-1]) * {"M": 1e6, "B": 1e9}[paper[-1]]  # '-7.1M' -> -7.1e6
        rows.append({"model": name, "paper": f"{paper:,}" if exact else paper, "measured {:,}": n,
                     "difference": f"{n - paper:+,}" if exact else f"{(n - value) / 1e6:+.2f}M"})
        record(args, name=name, paper=value, measured=n)
    table(args, "Parameters", rows)


# -----------------------------------------------------------------------------
# Variants: "attn_out=hadamard,lr=1e-3" -> settings; one model with its optimiser, as the training scripts run it

SCRIPT = dict(gpt=train_gpt, shaq=train_shaq)
OURS = {"out_dir", "max_minutes", "eval_interval", "seed", "device", "dtype", "compile", "init_from", "stage2", "resume"}  # bench.py decides
# equal in all variants and, but for batch_tokens, in scaling's sizes
SAME = "dataset", "data_dir", "block_size", "batch_tokens", "batch", "bptt", "eval_tokens", "eval_windows"


def settings(kind, text, what):
    "A variant string -> {name: value}, by the training script's own flags"
    parts = re.split(r",(?=\s*[\w-]+\s*=)", text) if text else []  # a comma before name=, so that attn_layers=2,4 stays whole
    if any("=" not in part for part in parts) or len(parts) > len({part.partition("=")[0].strip().replace("-", "_") for part in parts}):
        die(f"{what}={text!r}: expected name=value,.., each name once")
    typed = SCRIPT[kind].parse([f"--{part.strip()}" for part in parts], f"{what}, read by {SCRIPT[kind].__name__}.py")
    if OURS & set(typed) or typed.get("max_steps") == 0:
        die(f"{what}={text!r}: {', '.join(sorted(OURS & set(typed))) or 'max_steps=0'} is not for bench.py's runs")
    return typed


class Trainer:
    """Trains one variant with one seed, a step at a time, as train_gpt.py or train_shaq.py would (recipe, data order, dropout), without
    checkpoints, in m's precision even where a recipe names one. given: another model's parameters; those that both have start from them."""

    def __init__(self, kind, typed, data, m, seed, given=None, compiled=False):
        self.kind, self.data, self.m, self.seed, self.tokens = kind, data, m, seed, []  # tokens: of each step that was taken
        self.peak = Peak(m)
        self.s, c = SCRIPT[kind].settle(typed | dict(seed=seed, compile=compiled), {}, m)
        s = self.s
        s["dtype"] = str(m.dtype).removeprefix("torch.")
        self.model, self.optimizer = model, optimizer = SCRIPT[kind].build(s, c, data, m)
        if given:
            copy_shared(model, given)
        self.params = sum(p.numel() for p in model.parameters())
        if kind == "gpt":
            self.T = model.config.block_size
            self.B, extra = divmod(s["batch_tokens"], self.T)
            if extra:
                die(f"batch_tokens={s['batch_tokens']} is no multiple of block_size={self.T}")
            self.micro = max(i for i in range(1, min(s["micro_batch"], self.B) + 1) if self.B % i == 0)
            self.windows = train_gpt.Windows(data.train, self.T, self.B, seed, m.device)
            self.step_tokens = self.B * self.T
            self.update = train_gpt.stepper(model, optimizer, s, m, self.B // self.micro)
        else:
            self.T, self.B = s["bptt"], s["batch"]
            self.length, self.at, self.state = (len(data.train) - 1) // self.B, 0, None
            if self.length < self.T:
                die(f"bptt={self.T}: expected at most the {self.length:,} tokens of one of {self.B} streams")
            window = train_shaq.average_length(seed, self.T)
            self.step_tokens = self.B * window
            if s.get("max_steps") is None:
                s["max_steps"] = math.ceil(s["epochs"] * (self.length / window + 0.5))
            self.update = train_shaq.stepper(model, optimizer, s, m)
        self.flops = model.flops_per_token(self.T)
        if compiled:
            model.compile(dynamic=kind == "shaq")  # SHAQ's windows vary in length
        self.set_steps(s["max_steps"])

    def set_steps(self, n):
        "Set the schedule for n steps"
        self.steps = n
        self.min_lr, self.warmup = self.s.get("min_lr", self.s["lr"] / 10), self.s.get("warmup_steps", n // 50)

    def step(self, i):
        "Step i of the run: one update. Returns the loss, in nats per token."
        s, m = self.s, self.m
        torch.manual_seed(hash((self.seed, i, 0)) & 0x7FFFFFFF)
        lr, T = lr_at(i, s["lr"], self.min_lr, self.warmup, self.steps, s["schedule"]), self.T
        if self.kind == "gpt":
            batch = [self.windows(i, slice(a, a + self.micro)) for a in range(0, self.B, self.micro)]
            figures, _ = self.update(batch, None, lr)
        else:
            T = min(train_shaq.window_length(self.seed, i, self.T), self.length - self.at)
            batch = train_shaq.read(self.data.train, range(self.B), self.length, self.at, T, m.device)
            figures, self.state = self.update(batch, self.state, lr)
            self.at += T
            if self.at >= self.length:
                self.at, self.state = 0, None
        self.tokens.append(self.B * T)
        return figures[0].item()

    def validate(self):
        "Validation loss in nats per token, by the training script's own evaluation"
        if self.kind == "gpt":
            if len(self.data.val) <= self.T:
                die(f"the validation data has {len(self.data.val):,} tokens, one window takes {self.T + 1}: lower block_size")
            return train_gpt.evaluate(self.model, self.data.val, self.s["eval_tokens"], self.micro, self.m, self.s["eval_windows"])
        return train_shaq.evaluate(self.model, self.data.val, self.s["eval_tokens"], self.T, self.m)

    def run(self, what, points=10, whole=None):
        """All steps -> (curve, tokens/s). The curve's points: [step, training loss since the last point, validation loss, FLOPs, seconds in
        steps]. A run that diverges ends there, with a validation loss of inf. what: the run's name in the line of progress; whole, (steps
        before this run, steps of all runs, when the first began), makes that line count all runs."""
        before, total, start = whole or (0, self.steps, time.perf_counter())
        curve, losses, times = [[0, None, self.validate(), 0.0, 0.0]], [], []
        points = min(points, self.steps)
        marks = {round(self.steps * (k + 1) / points) for k in range(points)}
        for i in range(self.steps):
            t0 = time.perf_counter()
            losses.append(self.step(i))  # .item() in it waits for the device
            times.append(time.perf_counter() - t0)
            if i + 1 in marks or not math.isfinite(losses[-1]):
                val = self.validate() if math.isfinite(losses[-1]) else math.inf
                curve.append([i + 1, sum(losses) / len(losses), val if val < 700 else math.inf,  # as in the scripts: exp overflows
                              (i + 1) * self.step_tokens * self.flops, sum(times)])
                losses = []
            if curve[-1][2] == math.inf:
                break
            if i + 1 < self.steps:
                progress(before + i + 1, total, start, what, unit="steps", scale=1)
        end_progress()
        return curve, float(np.median(np.divide(self.tokens[-len(times):], times)))


def graphed(t):
    "Whether CUDA graphs hold a Trainer's steps or, of a GPT, its micro-batches"
    return t.update.on or getattr(t.update, "part", t.update).on


@torch.no_grad()
def copy_shared(model, given):
    """Copy from given {name: tensor} each parameter of the same name and shape and, of c_attn (W_Q W_K W_V in mha, then W_KR and W_QR in dva,
    W_QR alone in dva_gate), as many rows as both have (dva_gate's W_QR starts as dva's W_KR). A branch's last layer, whose initial scale
    depends on n_layer, is copied only if both have as many."""
    own = dict(model.named_parameters())
    theirs, ours = ({n for n in names if n.startswith("h.") and n.endswith("ln_1.weight")} for names in (given, own))
    branch_ends = () if ours == theirs else ("c_proj.weight", "alpha")
    for name, p in own.items():
        q = None if name.endswith(branch_ends) else given.get(name)
        if q is not None and p.shape[1:] == q.shape[1:] and (len(p) == len(q) or "c_attn" in name):
            n = min(len(p), len(q))
            p[:n] = q[:n]


def reproducible(m):
    "Make the same seed give the same figures on a GPU too, where some gradients are otherwise summed in any order"
    if m.device.type == "cuda":
        torch.use_deterministic_algorithms(True)  # not warn_only, which leaves the fused attentions as they are
        torch.utils.deterministic.fill_uninitialized_memory = False


# -----------------------------------------------------------------------------
# compare: is one variant better than another?


def paired(a, b):
    "Mean over seeds of a - b and its standard error (None for one seed)"
    d = np.array(a) - np.array(b)
    return d.mean(), standard_error(d)


def paper_quality(t):
    """The papers' figure for this Trainer's model, on any data: perplexity or, for SHAQ's presets at any width, bits per byte. None if the
    model is not theirs"""
    if t.kind == "shaq":
        papers, figure = SHAQ_PRESETS[t.s["preset"]], ABLATIONS.get(t.s["preset"], (None,) * 3)[2]
    else:
        papers, (_, dense, hadamard) = SIZES[t.s["size"]], PERPLEXITY.get(t.s["size"], (None,) * 3)
        figure = dict(dense=dense, hadamard=hadamard).get(t.model.config.attn_out)
    return figure if is_papers(t.model.config, papers) else None


def is_papers(config, papers):
    "Whether a model's configuration is the paper's, but for vocabulary and dropout, a GPT's context and W_O, SHAQ's width and memory"
    free = {"vocab_size", "dropout", *(("block_size", "attn_out") if type(config) is GPTConfig else ("n_embd", "mem_len", "mean_window"))}
    return all(getattr(config, k) == v for k, v in asdict(type(config)(**papers)).items() if k not in free)


QUICK = {  # what compare takes without --set: seconds on a CPU, minutes elsewhere
    "gpt": ("n_layer=2,n_head=4,n_embd=64,block_size=128,batch_tokens=1024,lr=4e-3,max_steps=100,warmup_steps=10,eval_tokens=8192",
            "size=nano,eval_tokens=65536"),
    "shaq": ("n_embd=64,bptt=64,max_steps=100,warmup_steps=10,eval_tokens=8192",
             "size=laptop,eval_tokens=65536")}


@command(lambda gpu: (
    ("model", dict(choices=["gpt", "shaq"], default="gpt", help="train_gpt.py's recipe and model, or train_shaq.py's")),
    ("variant", dict(action="append", help='name=value,.. of the model or its recipe; repeat the flag. "" is the default model. '
                                           "Without any: the four output projections, or sharnn and shaq")),
    ("set", dict(action=Joined, help="name=value,.. for all variants (where not given, runs of seconds on a CPU, minutes on a GPU)")),
    ("seeds", dict(type=number(int, 1), default=5, help="how many")),
    ("seed", dict(type=number(int, 0, 2**62), default=1, help="the first of them")),
    ("equal", dict(choices=["steps", "flops", "time"], default="steps", help="what all variants get as much of")),
    ("points", dict(type=number(int, 1), default=10, help="evaluations a run, after the one at its start")),
    ("compile", dict(type=flag01, default=gpu and kernels.triton is not None, help="torch.compile"))))
def bench_compare(args):
    """Variants on the same data in the same order, from the same initial values of the weights they share, if init is the same, with k
    seeds. The first is the baseline: the other variants' losses minus its own, seed by seed, are averaged, with a standard error over
    seeds. --equal=flops and --equal=time give each variant as many steps as the baseline's FLOPs or seconds allow; the cosine is
    stretched, a warm-up that is set is not. Peak MiB, on a GPU: those allocated in the run, evaluations too, or, where CUDA graphs hold its
    steps, reserved at its end."""
    m, kind = start(args), args.model
    texts = args.variant or ([f"attn_out={o}" for o in OUTS] if kind == "gpt" else ["preset=sharnn", "preset=shaq"])
    default = QUICK[kind][m.device.type != "cpu"]
    common = settings(kind, default if args.set is None else args.set, "--set")
    if args.set and "size" not in common:
        print(f"note: --set takes the place of what runs without it, --set={default}; what it does not name is as the script has it", flush=True)
    variants = [settings(kind, t, "--variant") for t in texts]
    if args.set is None and "size" not in common and any("size" in v for v in variants):
        die(f"--variant names a size, which --set={default} would override, as that is taken where no --set is typed: type one, such as --set=")
    unset = asdict(GPTConfig() if kind == "gpt" else SHAQConfig())
    settled = [unset | s | c for s, c in (SCRIPT[kind].settle(common | v, {}, m) for v in variants)]
    for text, v, s in zip(texts, variants, settled):
        if other := [k for k in SAME if s.get(k) != settled[0].get(k)]:
            die(f"--variant {text!r} has another {', '.join(other)} than the first, so it would not read the same data: "
                "give one to all in --set")
        if "max_steps" in v:
            die(f"--variant {text!r} sets max_steps, which --equal={args.equal} decides: give it in --set")
    reproducible(m)
    if any(16 * s["dropout"] % 1 for s in settled):  # now, for all runs: build() would turn it off only from the first such run on
        torch.backends.cuda.enable_cudnn_sdp(False)
    if args.compile:
        fresh_compiler()
    variants, inits = [common | v for v in variants], [s.get("init") for s in settled]
    data = load_dataset(settled[0]["dataset"], settled[0]["data_dir"])

    def make(v, seed, given=None):
        return Trainer(kind, v, data, m, seed, given, args.compile)

    trainers = [make(v, args.seed) for v in variants]
    if args.equal == "time":
        for t in trainers if kind == "shaq" else ():
            for i in range(math.ceil(t.model.config.mem_len / t.T)):  # fill the memory: most of a run sees it full
                t.step(i)
            for i in [*range(8)] * 2 * t.update.on:  # record the graphs of the steps to be timed
                t.step(i)
        costs = [np.median(s) for s in timed({i: t.step for i, t in enumerate(trainers)}, m, rounds=5, least=0.0).values()]
    else:
        costs = [t.flops if args.equal == "flops" else 1 for t in trainers]
    steps = [max(1, round(trainers[0].steps * costs[0] / cost)) for cost in costs]
    trainers = t = None  # t still refers to one: what it holds now would be subtracted from the first run's peak

    runs, done, total, began = [], 0, sum(steps) * args.seeds, time.perf_counter()
    for seed in range(args.seed, args.seed + args.seeds):
        given = dict(make(variants[0], seed).model.named_parameters())
        for k in range(len(variants)):
            i = (seed - args.seed + k) % len(variants)  # rotated by seed, so that warming up favours none
            t = make(variants[i], seed, given if inits[i] == inits[0] else None)  # or init would do nothing
            t.set_steps(steps[i])
            curve, tokens_per_s = t.run(f"run {len(runs) + 1} of {len(variants) * args.seeds}", args.points, (done, total, began))
            done += t.steps
            loss = curve[-1][2]
            if loss == math.inf:
                die(f"{texts[i] or 'default'}, seed {seed}: diverged at step {curve[-1][0]}, lr {t.s['lr']:g}: "
                    "lower lr or raise warmup_steps")
            runs.append(dict(
                model=kind, variant=texts[i], index=i, set=args.set, seed=seed, equal=args.equal, steps=steps[i], params=t.params,
                tokens=sum(t.tokens), val_loss=loss, bits_per_byte=loss / math.log(2) / data.bytes_per_token, tokens_per_s=tokens_per_s,
                peak_mib=t.peak.held() if graphed(t) else t.peak.mib(), graph=graphed(t), compiled=args.compile, dataset=data.name,
                settings=t.s | asdict(t.model.config), bytes_per_token=data.bytes_per_token, preset=t.s.get("preset"), paper=paper_quality(t),
                curve=curve))
            warn(f"seed {seed}  {texts[i] or 'default'}: {loss:.4f} {nats(data.bytes_per_token)}, {tokens_per_s:,.0f} tokens/s")
            record(args, **runs[-1])  # which a full disk ends
            del t
    rows = []
    for i, text in enumerate(texts):
        mine = [r for r in runs if r["index"] == i]
        r, loss, base = mine[0], [r["val_loss"] for r in mine], [r["val_loss"] for r in runs if r["index"] == 0]
        rows.append({
            "variant": f"`{text or 'default'}`", "parameters {:,}": r["params"], "steps {:,}": r["steps"],
            "paper, its data and size": r["paper"] and (f"{r['paper']} bpc" if kind == "shaq" else f"ppl {r['paper']}"),
            "validation loss, nats {:.4f}": np.mean(loss), "bits per byte {:.4f}": np.mean([r["bits_per_byte"] for r in mine]),
            "difference ± standard error": "baseline" if i == 0 else with_error(*paired(loss, base)),
            "tokens/s {:,.0f}": np.median([r["tokens_per_s"] for r in mine]),
            "CUDA graph": "yes" if r["graph"] else None, "peak MiB {:,.0f}": r["peak_mib"] and max(r["peak_mib"] for r in mine)})
    table(args, f"Equal {args.equal}, {args.seeds} seed{'s' * (args.seeds > 1)}, {data.name}, "
          f"{'compiled' if args.compile else 'not compiled'}{', sums in a fixed order, which takes time' * args.gpu}", rows)


# -----------------------------------------------------------------------------
# kernels: the bytes that must move are the floor; a plain copy shows what they cost here


@command(lambda gpu: (
    ("widths", dict(type=numbers, default="768,1024,1536,2048,2560,3072" if gpu else "768,1024,2048", help="d, one or a list")),
    ("rows", dict(type=number(int, 1), default=65536 if gpu else 4096, help="rows of d numbers")),
    ("pool", dict(type=names, default="16x1024x1024,1x16384x1024" if gpu else "16x128x256", help="fo-pool's shapes, BxTxH")),
    ("heads", dict(type=names, default="2x256x768,16x1024x768" if gpu else "2x256x192", help="one wide head's shapes, BxTxd")),
    ("rounds", dict(type=number(int, 1), default=7, help="interleaved measurements of each"))))
def bench_kernels(args):
    """hadamard_affine and hadamard_transform against a dense product, alpha * x + beta and a copy, the first also with the residual and
    LayerNorm that follow it, the second, on a GPU, against fast-hadamard-transform's where that is installed; fo-pool against an LSTM,
    a copy and, on a GPU, fla-core's kernels; attention with one wide head against 12. hadamard_affine is first checked against its formula in
    fp64, on a GPU the kernels of norm and fo-pool against PyTorch's path in fp64. On random tensors, in turn from rings larger than the cache;
    ms: median ± half the interquartile range of --rounds samples, interleaved. Share of a copy's rate: the bytes a second of those that must
    move, over a copy's in the same run. One read and one write at its speed would be 1. Backward alone: bytes and median time of both passes,
    less those of forward. MFU: FLOPs a second of the products that must be, backward twice forward's, causal ones by half, over the peak."""
    m = start(args)
    args.peak, args.peak_from = peak_flops(m)
    for d in args.widths:
        with one_line():
            kernels._check_order(d)
    for flag, shape in [("pool", s) for s in args.pool] + [("heads", s) for s in args.heads]:
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", shape) or flag == "heads" and int(shape.split("x")[2]) % 12:
            die(f"--{flag}: {shape!r}: expected {'BxTxH, such as 16x1024x1024' if flag == 'pool' else 'BxTxd, d a multiple of 12'}")
    for rows_of, sizes in ((affine_rows, args.widths), (pool_rows, args.pool), (attention_rows, args.heads)):
        for size in sizes:
            with fits(size):
                rows_of(args, m, *map(int, str(size).split("x")))


def both(f, weights, n):
    "A function of n inputs and the gradients of f's outputs that runs f and returns the gradients of inputs and weights"
    def call(*tensors):
        x = [t.detach().requires_grad_() for t in tensors[:n]]
        return torch.autograd.grad(f(*x), (*x, *weights), tensors[n:])
    return call


def time_layers(args, m, title, fields, layers, compare_with, copy=None, flops={}):
    """Time forward and forward + backward, print both. layers: {name: (function, its weights, rings of its inputs, rings of its outputs'
    gradients, elements that must move in (forward, both) or None)}; copy: a ring of tensors to copy; flops: {name: FLOPs of its
    products forward}"""
    forward = {k: in_turn(torch.no_grad()(f), *x) for k, (f, _, x, _, _) in layers.items()}
    training = {k: in_turn(both(f, w, len(x)), *x, *dy) for k, (f, w, x, dy, _) in layers.items()}
    floors = {k: floor for k, (*_, floor) in layers.items() if floor}
    if copy:
        forward = dict(copy=in_turn(torch.clone, copy)) | forward  # clone: results placed like the layers'
        floors["copy"] = (2 * copy[0].numel(),)

    def measure(work):
        turn = dict.fromkeys(work, 1)
        if args.gpu:  # a turn as one CUDA graph, to time the device, not Python. cuDNN's LSTM is slow enough without.
            turn = {k: 1 if k.startswith("LSTM") else f.turn for k, f in work.items()}
            work = {k: f if turn[k] == 1 else replay(lambda f=f: [f(i) for i in range(f.turn)], m) for k, f in work.items()}
        return {k: v / turn[k] for k, v in timed(work, m, args.rounds).items()}

    t = [measure(work) for work in (forward, training)]
    median = [{k: np.median(v) for k, v in s.items()} for s in t]

    def of_copy(elements, seconds):
        return elements / floors["copy"][0] * median[0]["copy"] / seconds if elements and seconds > 0 else None

    rows, rate, speedup = [], "share of a copy's rate {:.2f}", f"times as fast as {compare_with} {{:.2f}}"
    head = "", "forward, ms", rate, "MFU {:.2f}", speedup, "forward + backward, ms", rate, f"backward alone, {rate}", "MFU {:.2f}", speedup
    for name in forward:
        row = [name if name != "copy" else f"copy, {2 * copy[0].nbytes / median[0][name] / 1e9:,.0f} GB/s"]
        for i in range(1 if name == "copy" else 2):
            floor, took = floors.get(name, (0, 0)), median[i][name]
            found = dict(share_of_copy=of_copy(floor[i], took))
            if i:
                found["share_of_copy_backward"] = of_copy(floor[1] - floor[0], took - median[0][name])
            found["mfu"] = flops[name] * (1 + 2 * i) / took / args.peak if name in flops else None
            row += [spread(t[i][name]), *found.values(), median[i][compare_with] / took]
            record(args, kernel=name, both=bool(i), seconds=t[i][name].tolist(), **found, **fields)
        rows.append(itertools.zip_longest(head, row))
    title += (", by CUDA graphs" + " but for LSTM" * any(k.startswith("LSTM") for k in forward)) * args.gpu
    if flops:
        title += f"; MFU against {args.peak / 1e12:.3g} TFLOP/s, {args.peak_from}"
    table(args, title, rows)


def check(what, f, inputs, dy, exact=None):
    """Die unless f's results and gradients are those of exact (None: of f's own PyTorch path) in fp64 on the CPU: a wrong kernel would only
    look fast"""
    found, programs = [], kernels._programs
    kernels._programs = lambda *how: 2  # so few that each, summing over rows, takes several blocks, as when it is timed
    try:
        for g, cast in ((f, torch.Tensor.detach), (exact or f, lambda t: t.detach().cpu().double())):
            leaf = [cast(t).requires_grad_() for t in inputs]
            y = g(*leaf)
            y = y if isinstance(y, tuple) else (y,)
            found.append([*y, *torch.autograd.grad(y, leaf, [cast(dy)] * len(y))])
    finally:
        kernels._programs = programs
    off = max(((a.cpu().double() - b).norm() / (b.norm() or 1)).nan_to_num(math.inf).item() for a, b in zip(*found))
    if off > 0.02:  # rounding in 16 bits: some 0.003
        die(f"{what} is wrong here, by {off:.2g} of its size, so it is not timed: please report this, with your GPU and the versions of torch "
            "and Triton")


warn_once = cache(warn)  # a note that would come again for each width, shape, seed or rate


def affine_rows(args, m, d):
    h = HEADS.get(d, 1)
    random = lambda *shape, dtype=m.dtype: torch.randn(shape, device=m.device).to(dtype)
    x, dy, y = (ring(lambda: random(args.rows, d)) for _ in range(3))
    alpha, beta, weight, shift = (random(d, dtype=torch.float32).requires_grad_() for _ in range(4))  # as in training, beside 16-bit rows
    low = [t.detach().to(m.dtype).requires_grad_() for t in (alpha, beta)]
    W, b = (random(d, d) * d ** -0.5).requires_grad_(), random(d).requires_grad_()
    layers = {"dense": (lambda x: F.linear(x, W, b), (W, b)), "identity": (lambda x: torch.addcmul(low[1], x, low[0]), low)}
    one_pass, few = {}, [t[0][:256] for t in (x, dy, y)]
    for out, only in [("hadamard", False)] + [("head_hadamard", True)] * (h > 1):
        layers[out] = lambda x, only=only: hadamard_affine(x, alpha, beta, h, only), (alpha, beta)
        H = [hadamard_matrix(n, torch.float64, "cpu") / n ** 0.5 for n in (h, d // h)]
        H = torch.kron(H[0], torch.eye(d // h, dtype=torch.float64) if only else H[1])
        check(f"{out}, d = {d},", lambda *t: hadamard_affine(*t, h, only), (few[0], alpha, beta), few[1], lambda x, a, b: a * (x @ H) + b)
        norm = partial(hadamard_affine_norm, n_head=h, heads_only=only)
        if d >= 8:  # the deviation of fewer numbers may be near 0
            check(f"{out} with norm, d = {d},", norm, (few[0], alpha, beta, few[2], weight, shift), few[1])
        if not args.gpu or hadamard_norm_is_fused(d, h, only):
            one_pass[f"{out}, by hadamard_affine_norm"] = ((lambda x, r, f=norm: f(x, alpha, beta, r, weight, shift)),
                                                           (alpha, beta, weight, shift))
    N = args.rows * d  # forward: x read, y written; backward: x and dy read, dx written
    alone = {"transform alone, H_d": (lambda x: hadamard_transform(x, d ** -0.5), (), [x], [dy], (2 * N, 4 * N))}  # backward: without x
    if args.gpu and kernels._split_order(d)[0] in (1, 12):  # the CUDA package's matrices of other orders have wrong gradients
        try:
            from fast_hadamard_transform import fast_hadamard_transform_interface as package
            theirs = package.hadamard_transform if kernels._split_order(d)[0] == 1 else package.hadamard_transform_12N
            off = (theirs(few[0], d ** -0.5) - hadamard_transform(few[0], d ** -0.5)).abs().max()
            if not off < 0.1:
                raise ValueError(f"its result is off by {off:.2g}")
            alone["fast-hadamard-transform's, H_d"] = lambda x: theirs(x, d ** -0.5), (), [x], [dy], (2 * N, 4 * N)
        except Exception as e:  # not there, or not for this torch, which shows in many ways
            brings = ": pip install fast-hadamard-transform brings it" * isinstance(e, ModuleNotFoundError)
            warn_once(f"note: no row for fast-hadamard-transform ({' '.join(str(e).split())}){brings}")
    compiled = args.gpu and kernels.triton is not None  # as train's steps are: sum and norm, or identity's gradients, are one kernel then
    if compiled:
        fresh_compiler()
    compiler = partial(torch.compile, dynamic=False) if compiled else lambda f: f
    time_layers(args, m, f"alpha * (x H) + beta, {args.rows:,} rows of {d}, H = H_{h} (x) H_{d // h}, {hadamard_path(d, m.device, h)}"
                + "; identity compiled" * compiled,
                dict(op="affine", d=d, rows=args.rows, n_head=h),
                {k: (compiler(f) if k == "identity" else f, w, [x], [dy], (2 * N, 5 * N)) for k, (f, w) in layers.items()} | alone,
                "dense", copy=x)

    def two_steps(f):
        def call(x, r):
            r = r + f(x)
            return r, F.layer_norm(r, (d,), *low)
        return compiler(call)

    after = {k: (two_steps(f), (*w, *low)) for k, (f, w) in layers.items()} | one_pass
    # x and residual read, their sum and its norm written; backward: x, the sum and two gradients read, two written
    time_layers(args, m, f"The same with the residual and the next LayerNorm, {args.rows:,} rows of {d}"
                + compiled * (", compiled" + " but for hadamard_affine_norm" * bool(one_pass)),
                dict(op="affine_norm", d=d, rows=args.rows, n_head=h),
                {k: (f, w, [x, y], [dy, dy[::-1]], (4 * N, 10 * N)) for k, (f, w) in after.items()}, "dense", copy=x)


def pool_rows(args, m, B, T, H):
    torch.manual_seed(0)
    qrnn = QRNN(SHAQConfig(n_embd=H)).to(m.device, m.dtype)
    half = torch.float16 if args.gpu and m.dtype == torch.bfloat16 else m.dtype  # the only 16-bit type of old versions of cuDNN
    lstm = torch.nn.LSTM(H, H, batch_first=True).to(m.device, half)
    gates, x, dh = (ring(lambda n=n: torch.randn(B, T, n, device=m.device).to(m.dtype)) for n in (3 * H, H, H))
    lstm_layer = "LSTM layer" + (f" (cuDNN, {str(half)[6:]})" if args.gpu else "")
    check(f"fo-pool, B {B}, T {T}, H {H},", lambda g: qrnn_pool(g)[0], gates[:1], dh[0])
    floor = 4 * B * T * H, 11 * B * T * H  # three logits read, h written; backward: logits and dh read, three gradients written
    layers = {"fo-pool": (lambda g: qrnn_pool(g)[0], (), [gates], [dh], floor),
              "QRNN layer (product and fo-pool)": (lambda x: qrnn(x)[0], tuple(qrnn.parameters()), [x], [dh], None),
              lstm_layer: (lambda x: lstm(x.to(half))[0].to(x.dtype), tuple(lstm.parameters()), [x], [dh], None)}
    # on a GPU the linear-attention library's kernels: h_t = exp(g_t) h_(t-1) + x_t; backward: g, h and dh read, two gradients written
    for name in ("fused_recurrent_hgrn", "chunk_hgrn") if args.gpu else ():
        try:
            theirs = getattr(importlib.import_module("fla.ops.hgrn"), name)
            inputs = [((-f).sigmoid() * z.tanh(), F.logsigmoid(f)) for z, f, _ in (g.chunk(3, -1) for g in gates)]  # (1 - f) z and log f
            theirs(*inputs[0])
            layers[f"fla's {name} (recurrence alone, on (1 - f) z and log f)"] = (
                lambda x, g, f=theirs: f(x, g)[0], (), list(zip(*inputs)), [dh], (3 * B * T * H, 8 * B * T * H))
        except Exception as e:  # not there, or not for this Triton, which shows in many ways
            brings = ": pip install fla-core brings it" * isinstance(e, ModuleNotFoundError)
            warn_once(f"note: no row for fla's {name} ({' '.join(str(e).split())}){brings}")
    time_layers(args, m, f"fo-pool, B {B}, T {T}, H {H}; an LSTM does its products too, as the QRNN layer does",
                dict(op="fo_pool", B=B, T=T, H=H), layers, lstm_layer, copy=x,
                flops={k: n * B * T * H * H for k, n in (("QRNN layer (product and fo-pool)", 12), (lstm_layer, 16))})


def attention_rows(args, m, B, T, d):
    "12 heads, as in an ordinary layer, against dva (one head of width d, values [V, K_R]) in each way to compute it, and its outer form"
    def split(f, h, *widths):
        return lambda x: f(*(t.unflatten(-1, (h, -1)).transpose(1, 2) for t in x.split(widths, -1))).transpose(1, 2).flatten(2)

    def dva(f):  # S V + Q_R * (S K_R)
        def call(q, k, v, q_r):
            y, y_r = f(q, k, v).chunk(2, -1)
            return torch.addcmul(y, q_r, y_r)
        return split(call, 1, d, d, 2 * d, d)

    sdpa = partial(F.scaled_dot_product_attention, is_causal=True)
    layers = {"12 heads": split(attention, 12, d, d, d), "12 heads, PyTorch's operator": split(sdpa, 12, d, d, d),
              "dva": dva(attention), "dva, PyTorch's operator": dva(sdpa), "dva, all T x T in memory": dva(plain_attention),
              "dva_outer": split(attention, 1, d, d, d, d, d)}
    three, five, dy = (ring(lambda n=n: torch.randn(B, T, n * d, device=m.device).to(m.dtype)) for n in (3, 5, 1))
    time_layers(args, m, f"causal attention, B {B}, T {T}, d {d}, as model.py does it but where said", dict(op="attention", B=B, T=T, d=d),
                {k: (f, (), [three if "12" in k else five], [dy], None) for k, f in layers.items()}, "12 heads",
                flops={k: (2 if "12" in k else 3) * d * B * T * (T + 1) for k in layers})


# -----------------------------------------------------------------------------
# code: what Triton makes of kernels.py for a GPU that need not be there

ISSUE = 132 * 128 * 1.755e9 / (0.9 * 4.8e12)  # instructions that an H200's threads together can issue while its memory, at nine tenths of
# its rate, moves one byte: 132 multiprocessors of 4 x 32 lanes


def code_of(kind, sm, dtype, d=0, n_head=1, heads_only=False, residual="", **flags):
    """Compile one of kernels.py's kernels for sm_<sm> and read its machine code. kind: one of kernels._plan's ("pre": pre for alpha and
    beta), "dots forward", "dots pre" or "dots backward" (on tensor cores), "pool", "pool backward", or, for n_head heads of d,
    "rope backward" and "one query" (n_head: its programs; counted per element of k and v, for one round); flags: the kernel's;
    residual: "fp32" beside rows of 16 bits. -> registers and bytes of stack a thread, bytes of shared memory; ops: the opcodes with their
    modifiers, in order; each and loop: instructions an element in all and in the longest loop (0 if none); far: how many addresses, or tensors
    of them, have 64-bit offsets; plan. Not for a process with TRITON_INTERPRET=1."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def type_of(name):
        if re.fullmatch("pre|stats|d?(alpha|beta|weight|shift)|(d?c0|d?c_last|edge|sum|cos|sin)_ptr", name):
            return "*fp32"
        if name in ("residual", "out", "dout", "dresidual", "dy"):
            return f"*{residual or dtype}"
        if name in ("x", "dx", "normed", "dnormed") or name.endswith("_ptr"):
            return f"*{dtype}"
        return dict(signs="*i16", scale="fp32", eps="fp32").get(name, "i32")

    if kind.startswith("pool"):
        fn = kernels._fo_backward_kernel if kind == "pool backward" else kernels._fo_forward_kernel
        warps = kernels.FO_WARPS
        plan = dict(ACT=True, SUMMARY=False, SEGMENTED=False, PTX=True, U=kernels.FO_CHUNK, S=warps, D=kernels.FO_CHANNELS, H=1024, ST=3072,
                    DT=3072) | flags
        elements = plan["U"] * plan["S"] * plan["D"]
    elif kind.startswith("dots"):
        fn = kernels._hadamard_dot_grads_kernel if kind == "dots backward" else kernels._hadamard_dot_kernel
        warps, plan = 1, kernels._dot_plan(d, n_head, kind.removeprefix("dots ")) | dict(EXACT=False)
        elements = d * plan["R"] * plan.get("G", 1)
    elif kind == "rope backward":
        fn, warps, plan = kernels._rope_backward_kernel, 4, kernels._rope_tile(n_head, d) | flags
        elements = plan["R"] * plan["U"] * d
    elif kind == "one query":
        fn, (plan, warps) = kernels._one_query_kernel, kernels._one_query_plan(n_head, d, d)
        plan |= flags
        elements = plan["N"] * 2 * d
    else:
        plan, warps = kernels._plan(d, n_head, heads_only, 32 if dtype == "fp32" else 16, kind)
        plan = plan | dict(RMS=False) | flags
        fn = {"grads": kernels._hadamard_grads_kernel, "backward": kernels._hadamard_grads_kernel, "norm": kernels._hadamard_norm_kernel,
              "norm backward": kernels._hadamard_norm_backward_kernel}.get(kind.removesuffix(" few"), kernels._hadamard_kernel)
        elements = plan["R"] * min(d, plan["M"] * plan["P"] * plan["W"])  # of d, not of wider tiles
    absent = ["alpha", "beta"] if kind.endswith("pre") else ["pre"]
    absent += ["dx", "alpha"] * (kind == "grads") + ["shift", "dshift"] * plan.get("RMS", False)
    signature, constexprs, attrs = {}, {}, {}
    for i, name in enumerate(fn.arg_names):
        if name in plan or name in absent:
            signature[name], constexprs[(i,)] = "constexpr", plan.get(name)
        else:
            signature[name] = type_of(name)
            if signature[name] != "fp32" and not fn.params[i].do_not_specialize:
                attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=fn, signature=signature, constexprs=constexprs, attrs=attrs)
    compiled = kernels.triton.compile(source, target=GPUTarget("cuda", sm, 32), options=dict(num_warps=warps, enable_fp_fusion=True))
    tool = os.path.join(os.path.dirname(kernels.triton.__file__), "backends/nvidia/bin/cuobjdump")
    with tempfile.NamedTemporaryFile() as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        text = subprocess.run([tool, "-res-usage", "-sass", f.name], capture_output=True, text=True, check=True).stdout
    found = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    lines = [(int(at, 16), op, rest) for at, op, rest in
             re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", text) if op != "NOP"]
    jumps = [(int(to[1], 16), at) for at, op, rest in lines if op.startswith("BRA") and (to := re.search(r"0x([0-9a-f]+)", rest))]
    loop = max((sum(to <= at <= end for at, _, _ in lines) for to, end in jumps if to <= end), default=0)
    each = 32 * warps / elements
    return SimpleNamespace(registers=found["REG"], stack=found["STACK"] + found["LOCAL"], plan=plan,
                           shared=compiled.metadata.shared,  # not in the cubin: the launch asks for it
                           ops=[op for _, op, _ in lines], each=len(lines) * each, loop=loop * each,
                           far=len(re.findall(r"tt\.addptr .*(?:xi64>|, i64)", compiled.asm["ttir"])))


def follow_parent():
    "Run first in each process of compilers(): ignore Ctrl-C, which the parent gets too and handles, and end when the parent ends"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=lambda: os._exit(multiprocessing.parent_process().join() or 1), daemon=True).start()


@contextlib.contextmanager
def compilers(workers):
    "Processes for code_of with Triton's compiler, even if TRITON_INTERPRET is set here"
    before = os.environ.copy()
    os.environ["TRITON_INTERPRET"] = "0"
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), follow_parent)
    try:
        yield pool
    except BaseException:  # Ctrl-C or a failure: else the pool would finish all its jobs, for minutes
        for process in multiprocessing.active_children():
            process.kill()
        raise
    finally:
        pool.shutdown()
        os.environ.clear()
        os.environ.update(before)


@command(lambda gpu: (
    ("sm", dict(type=int, choices=[75, 80, 86, 89, 90, 100, 120], default=90, help="compute capability")),
    ("widths", dict(type=listed(int, [str(d) for d in sorted(HEADS)]), default="768,1024,1536,2048,2560,3072",
                    help="d, one or a list, of model.py's SIZES"))))
def bench_code(args):
    """Instructions an element in the machine code of the Triton kernels, compiled for a GPU that need not be there, beside what an H200 can
    issue while the bytes that must move do so at nine tenths of its memory's rate: a bound, no forecast. Waiting can take twice as long."""
    start(args)
    dtype = "fp32" if args.dtype == "float32" else "bf16"
    if kernels.triton is None:
        die("code needs Triton: pip install triton")
    untried = args.untried and dtype == "bf16" and args.sm >= 80
    args.hardware = f"sm_{args.sm}, {dtype}, Triton {kernels.triton.__version__}, torch {torch.__version__}" + ", untried kernels" * untried
    kinds = [  # the row's name, code_of's kind, whether heads only are mixed, numbers that must move, whether the loop alone is counted
        ("hadamard_affine", "forward", False, 2, 0), ("its three gradients, the loop", "backward", False, 3, 1),
        ("that of x by itself", "pre", False, 2, 0), ("those of alpha and beta, the loop", "grads", False, 2, 1),
        ("hadamard_affine, mixing heads only", "forward", True, 2, 0), ("its three gradients, the loop", "backward", True, 3, 1),
        ("hadamard_affine_norm", "norm", False, 4, 0), ("the same, mixing heads only", "norm", True, 4, 0),
        ("its gradients, the loop", "norm backward", False, 6, 1), ("the same, mixing heads only", "norm backward", True, 6, 1),
        ("fo-pool, the loop", "pool", None, 4, 1), ("its gradients, the loop", "pool backward", None, 7, 1)]
    rows, jobs, size, began, done = [], {}, 4 if dtype == "fp32" else 2, time.perf_counter(), 0  # size: bytes of a number
    with compilers(min(8, os.cpu_count() or 1)) as pool:
        for (_, kind, only, _, _), d in itertools.product(kinds, args.widths):
            if "pool" in kind:  # of any width: one, in the first column
                if d == args.widths[0]:
                    jobs[kind, only, d] = pool.submit(code_of, kind, args.sm, dtype)
                continue
            dots = untried and not only and kind in ("forward", "pre", "backward") and kernels._dot_plan(d, HEADS[d], kind)
            if dots or kernels._plan(d, HEADS[d], only, 8 * size, kind):
                jobs[kind, only, d] = pool.submit(code_of, f"dots {kind}" if dots else kind, args.sm, dtype, d, HEADS[d], only)
        for name, kind, only, moved, of_loop in kinds:
            row = {"kernel": name, "bytes an element": moved * size, "an H200's budget": round(moved * size * ISSUE)}
            for d in args.widths:
                if (kind, only, d) not in jobs:
                    row[str(d)] = "" if "pool" in kind else "–"  # –: not one kernel
                    continue
                try:
                    c = jobs[kind, only, d].result()
                except Exception as e:
                    die(f"Triton could not compile {name} for sm_{args.sm} ({(str(e).strip() or type(e).__name__).splitlines()[0]})")
                done += 1
                progress(done, len(jobs), began, "compiling", unit="kernels", scale=1)
                row[str(d)] = f"{c.loop if of_loop else c.each:.1f}" + f", {c.stack} bytes spilled" * (c.stack > 0)
                record(args, kernel=kind, heads_only=only, d=None if "pool" in kind else d, sm=args.sm, dtype=dtype, each=c.each,
                       loop=c.loop, registers=c.registers, stack=c.stack, shared=c.shared)
            rows.append(row)
    table(args, "Instructions an element", rows)


# -----------------------------------------------------------------------------
# prefill and decode: [1, tables 3 and 4]


def inference_model(size, out, m, length, compiled):
    "A GPT with random weights in m.dtype, made on the device: 5.6e9 of them would take minutes on a CPU"
    torch.manual_seed(0)
    with torch.device(m.device):
        model = GPT(GPTConfig(**SIZES[size] | dict(attn_out=out, block_size=max(length, SIZES[size].get("block_size", 1024)))))
    model.to(m.dtype).requires_grad_(False)
    for block in model.h if compiled else ():  # all share compiled code; the whole, unrolled, would take many minutes
        block.compile()
    torch.cuda.empty_cache()
    return model.eval()


def deviation(t):
    "Standard deviation of a sample, None of one number"
    return np.std(t, ddof=1) if len(t) > 1 else None


def gains(t, average=np.mean):
    """{variant: seconds in each round (rounds,)} -> {variant: gain in throughput over dense, its standard error over rounds, share of the
    time that identity saves (of the two Hadamards; None if identity's gain is not above its error)}"""
    mean = {k: average(v) for k, v in t.items()}
    gain = {k: mean["dense"] / v - 1 for k, v in mean.items()}
    error = {k: standard_error(t["dense"] / v) for k, v in t.items()}
    best = mean["dense"] - mean["identity"] if gain["identity"] > (error["identity"] or 0) else None
    return {k: dict(gain=gain[k], gain_error=error[k], share=(mean["dense"] - mean[k]) / best if best and "hadamard" in k else None)
            for k in t}


def gain_columns(variant, papers, gain, gain_error, share):
    "papers: the paper's tokens/s of dense and hadamard, {} if it has none"
    return {"paper's gain {:+.1%}": papers["hadamard"] / papers["dense"] - 1 if papers and variant == "hadamard" else None,
            "gain ± standard error": None if variant == "dense" else with_error(gain, gain_error, "+.1%"),
            "share of identity's gain {:.2f}": share}


def speed_flags(gpu, batch, T):
    return (("sizes", dict(type=listed(str, GPTS), default="tiny,small,base,large" if gpu else "nano", help=", ".join(GPTS))),
            ("batch", dict(type=numbers, default=batch, help="sequences, one or a list")),
            ("T", dict(type=numbers, default=T, help="tokens of the prompt, one or a list")),
            ("compile", dict(type=listed(flag01), default="0,1" if gpu and kernels.triton else "0",
                             help="torch.compile of the blocks: 0, 1 or 0,1")),
            ("runs", dict(type=number(int, 1), default=10 if gpu else 3, help="calls of each: latency is their mean and deviation")))


def cases(args, m, measure):
    """The rows of measure(size, compiled, idx) for every combination that the flags name; idx: (B, T) random tokens. What does not fit in a
    GPU's memory has none"""
    rows, todo, start = [], list(itertools.product(args.sizes, args.compile, args.batch, args.T)), time.perf_counter()
    for n, (size, compiled, B, T) in enumerate(todo, 1):
        with fits(f"{size}, {B} x {T}{', compiled' * compiled}"):
            if compiled:
                fresh_compiler()
            rows += measure(size, compiled, torch.randint(GPTConfig.vocab_size, (B, T), device=m.device))
        progress(n, len(todo), start, args.what, unit="cases", scale=1)
    return rows


@command(lambda gpu: speed_flags(gpu, "1024" if gpu else "8", "64" if gpu else "128"))
@torch.no_grad()
def bench_prefill(args):
    """A prompt of random tokens through the model, with logits for every position, as the paper did by the memory in its table 3. The
    variants take turns, --runs times: ms are mean ± standard deviation, gains those of the means, with standard errors over the turns.
    Share of identity's gain: the time that a Hadamard saves, over that which identity, without any mixing, saves."""
    m = start(args)

    def measure(size, compiled, idx):
        (B, T), rows, work, peak = idx.shape, [], {}, {}
        for out in OUTS:
            p = Peak(m)
            model = inference_model(size, out, m, T, compiled)
            work[out] = lambda i, model=model: model(idx)
            work[out](0)
            p.forget()  # making the model and compiling it took more than running it does
            work[out](1)
            peak[out] = p.mib()
        t = timed(work, m, args.runs, least=0.0)
        gain = gains(t)
        papers = dict(zip(OUTS, PREFILL.get(size, ()) if (B, T) == (1024, 64) else ()))  # dense, hadamard
        for out, v in t.items():
            ms, rate = v.mean() * 1e3, B * T / v.mean()
            paper_ms, paper_rate, paper_mb = papers.get(out, (None, None, None))
            rows.append({
                "size": size, "batch x T": f"{B} x {T}", "mode": "compiled" if compiled else "eager", "variant": out,
                "paper (H100), ms": paper_ms, "measured, ms": with_error(ms, deviation(v * 1e3), "-.3f"),
                "difference {:+.2f} ms": paper_ms and ms - paper_ms, "tokens/s {:,.0f}": rate,
                "paper, tokens/s (at odds with its ms) {:,}": paper_rate,
                **gain_columns(out, {k: rate for k, (_, rate, _) in papers.items()}, **gain[out]),
                "paper, MB {:,}": paper_mb, "peak MiB {:,.0f}": peak[out]})
            record(args, size=size, batch=B, T=T, compiled=compiled, variant=out, seconds=v.tolist(), tokens_per_s=rate,
                   peak_mib=peak[out], **gain[out])
        return rows

    table(args, "Prefill", cases(args, m, measure))


@command(lambda gpu: (
    *speed_flags(gpu, "2048" if gpu else "8", "1" if gpu else "32"),
    ("new_tokens", dict(type=number(int, 1), default=64 if gpu else 16, help="steps after the first token")),
    ("presets", dict(type=listed(str, SHAQ_PRESETS), default="sharnn,shaq", help="of SHAQ, byte by byte"))))
@torch.no_grad()
def bench_decode(args):
    """Greedy decoding with a static KV cache, timed as prefill is. First token: the prompt through the model. Then --new_tokens steps; on a
    GPU both with kernels launched one by one (eager) and all as one CUDA graph; graphs and compiled code have cuDNN's attention. Floor: all
    weights and cached keys and values are read once a step, at the bandwidth of a copy in this run. Peak MiB: of prompt and steps, not as a
    graph. Last, SHAQ byte by byte, medians."""
    m, n = start(args), args.new_tokens
    copy = bandwidth(m)

    def measure(size, compiled, idx):
        (B, T), rows, first, eager, graph, peak, models, cache = idx.shape, [], {}, {}, {}, {}, {}, None
        for out in OUTS:
            p = Peak(m)
            models[out] = model = inference_model(size, out, m, T + n, compiled)
            if cache is None:  # one for all variants: its shape is the same, and four would not fit
                cache = model.new_cache(B, T + n)
                cached = sum(t.nbytes for layer in cache for t in layer)

            @torch.inference_mode()  # as in any program that only decodes: in eager mode, it speeds up calls of operators in Python
            def prompt(i=0, model=model, cache=cache):
                return model.lm_head(model.hidden(idx, cache)[:, -1]).argmax(-1, keepdim=True)        # (B, 1)

            @torch.inference_mode()
            def steps(i=0, model=model, cache=cache, token=idx[:, -1:].clone()):
                for pos in range(T, T + n):
                    token = model.lm_head(model.hidden(token, cache, pos)[:, 0]).argmax(-1, keepdim=True)  # (B, 1)

            torch.backends.cuda.enable_cudnn_sdp(bool(args.gpu and compiled))  # compiled code keeps what its first call chose
            prompt(), steps()
            p.forget()
            prompt(), steps()
            peak[out] = p.mib() and p.mib() + (0 if out == "dense" else cached / 2**20)  # dense's peak includes the cache
            first[out], eager[out] = prompt, steps
            if args.gpu:
                torch.backends.cuda.enable_cudnn_sdp(True)  # half the time of PyTorch's others for one query; a graph plans only once
                try:
                    graph[out] = replay(steps, m)
                finally:  # out of memory, the next case goes on
                    torch.backends.cuda.enable_cudnn_sdp(False)
        t_first = timed(first, m, args.runs, least=0.0)
        kv = cached * (T + (n + 1) / 2) / (T + n)  # read in a step, on average
        for mode, work in [("eager", eager)] + [("graph", graph)] * args.gpu:
            t = {k: v / n for k, v in timed(work, m, args.runs, least=0.0).items()}
            gain, papers = gains(t), dict(zip(OUTS, DECODE.get((B, T, n), {}).get(size, ())))  # dense, hadamard
            for out, v in t.items():
                step, paper_rate, mib = v.mean(), papers.get(out), peak[out] if mode == "eager" else None  # a graph's is not measured
                rate, floor = B / step, (sum(q.nbytes for q in models[out].parameters()) + kv) / copy
                rows.append({
                    "size": size, "batch x prompt + new": f"{B} x {T} + {n}", "mode": f"{'compiled, ' if compiled else ''}{mode}",
                    "variant": out, "paper, tokens/s {:,}": paper_rate, "tokens/s {:,.0f}": rate,
                    "difference {:.2f} times": paper_rate and rate / paper_rate, "first token, ms {:.3f}": t_first[out].mean() * 1e3,
                    "then ms a step": with_error(step * 1e3, deviation(v * 1e3), "-.3f"), "floor of bytes, ms {:.3f}": floor * 1e3,
                    "floor / measured {:.2f}": floor / step, **gain_columns(out, papers, **gain[out]),
                    "peak MiB {:,.0f}": mib})
                record(args, size=size, batch=B, T=T, new_tokens=n, compiled=compiled, mode=mode, variant=out, seconds_a_step=v.tolist(),
                       tokens_per_s=rate, seconds_first=t_first[out].tolist(), floor=floor, peak_mib=mib, **gain[out])
        return rows

    table(args, f"Decode; a copy moves {copy / 1e9:,.0f} GB/s", cases(args, m, measure))
    with fits("SHAQ, byte by byte"):
        generate_rows(args, m, copy)


def generate_rows(args, m, copy):
    "Time a step of SHAQ's greedy generation, behind 5,000 bytes, which fill its memory; on a CPU 256 wide, behind 512"
    n = 5000 if args.gpu else 512
    # makes PyTorch lay an LSTM's weights side by side in bf16, too: else cuDNN would copy them, with a warning
    torch.backends.cudnn.CUDNN_TENSOR_DTYPES.add(torch.bfloat16)
    work, models = {}, {}
    for preset in args.presets:
        torch.manual_seed(0)
        models[preset] = model = SHAQ(SHAQConfig(**SHAQ_PRESETS[preset] | dict(n_embd=1024 if args.gpu else 256))).collapse().eval()
        model.to(m.device, m.dtype)
        _, state = model(torch.randint(205, (1, n), device=m.device))

        @torch.inference_mode()
        def step(model=model, state=model.rings(state, 0), token=torch.zeros(1, 1, dtype=torch.int64, device=m.device)):
            token.copy_(model.advance(token, state).argmax(-1, keepdim=True))

        work[preset] = replay(step, m)
    t, rows = timed(work, m, max(7, args.runs)), []
    for preset, model in models.items():
        c, s = model.config, np.median(t[preset])
        rows_of = dict(full=min(c.mem_len, n), mean=(n >= c.mean_window) + n % c.mean_window, none=0)  # of mean: W, the open block's
        memory = len(c.attn_layers) * rows_of[c.memory] * c.n_embd
        floor = (sum(p.nbytes for p in model.parameters()) + memory * m.dtype.itemsize) / copy
        rows.append({"preset": preset, "ms a byte": spread(t[preset]), "bytes/s {:,.0f}": 1 / s, "floor of bytes, ms {:.3f}": floor * 1e3,
                     "floor / measured {:.2f}": floor / s})
        record(args, preset=preset, seconds_a_byte=t[preset].tolist(), floor=floor)
    table(args, f"SHAQ, one byte at a time, {model.config.n_embd} wide behind {n} bytes, "
          f"{'each a CUDA graph' if args.gpu else 'not compiled'}", rows)


# -----------------------------------------------------------------------------
# train: speed of whole steps


@command(lambda gpu: (
    ("sizes", dict(type=listed(str, GPTS), default="tiny" if gpu else "nano", help="of the four output projections")),
    ("models", dict(type=listed(str, ["gpt", "book", "shaq"]), default="gpt,book,shaq", help="which of the papers")),
    ("presets", dict(type=listed(str, SHAQ_PRESETS), help="of SHAQ",
                     default="sharnn,no_boom,ffn,qrnn,mean_mem,no_gates,shaq" if gpu else "sharnn,qrnn,shaq")),
    ("set", dict(action=Joined, help="name=value,.. for the GPTs (without it, on a CPU, the two books are 4 layers of 256), "
                                     "or, with --models=shaq, for SHAQ")),
    ("compile", dict(type=flag01, default=gpu and kernels.triton is not None, help="torch.compile")),
    ("rounds", dict(type=number(int, 1), default=5 if gpu else 3, help="steps of each that are timed")),
    ("profile", dict(type=flag01, default=False, help="then where one more step's time goes: by operators, on a GPU by kernels"))))
def bench_train(args):
    """Forward, backward and update on random tokens; models of one size, of paper 2 or of SHAQ take turns, so other load slows all alike.
    ms: median ± half the interquartile range of --rounds steps; tokens/s by the median or, for SHAQ, whose steps vary in length, the mean.
    On a GPU, peak MiB are those allocated or, where CUDA graphs hold steps or micro-batches, reserved; all models of a size share its memory."""
    m = start(args)
    peak, source = peak_flops(m)
    alone = args.models == ["shaq"]
    common = settings("shaq" if alone else "gpt", args.set or "", "--set")
    if own := {"dataset", "data_dir", *(["preset"] if alone else ["size", "attn", "attn_out"])} & set(common):
        die(f"train chooses {', '.join(sorted(own))} itself: drop it from --set, and name what to time in --sizes, --presets")
    groups = []  # (kind, vocabulary, {name: settings}); the others of a group are compared with its first
    if "gpt" in args.models:
        groups += [("gpt", 256 if s == "nano" else 50257, {f"{s}, {o}": dict(size=s, attn_out=o) | common for o in OUTS})
                   for s in args.sizes]
    if "book" in args.models:
        # a book's recipe names fp32; here it runs in the precision of the table. Four heads keep [2]'s head width in the smaller model.
        book = ({} if args.gpu or args.set is not None else dict(n_layer=4, n_embd=256, n_head=4)) | common
        one_head = dict(size="dva_book") | {k: v for k, v in book.items() if k != "n_head"}
        groups.append(("gpt", 50257, {"gpt2_book": dict(size="gpt2_book") | book, "dva_book": one_head,
                                      "dva_book, outer form": one_head | dict(attn="dva_outer")}))
    if "shaq" in args.models:
        groups.append(("shaq", 205, {p: dict(preset=p) | (common if alone else {}) for p in args.presets}))
    rows, ratios, profiles, began = [], [], {}, time.perf_counter()

    def measure(kind, vocabulary, variants):
        if args.compile:
            fresh_compiler()
        data = SimpleNamespace(train=np.random.default_rng(0).integers(0, vocabulary, 2**24), vocab_size=vocabulary)
        trainers, graphs, memory, rates = {}, {}, {}, {}
        for name, v in variants.items():
            trainers[name] = t = Trainer(kind, v, data, m, 1, compiled=args.compile)
            for i in range(1 + (math.ceil(t.model.config.mem_len / t.T) if kind == "shaq" else 0)):  # fill the memory, as in a long run
                t.step(i)
            for i in [*range(args.rounds + 3)] * 2 * t.update.on:  # record the graphs of the steps to be timed
                t.step(i)
            t.peak.forget()
            t.step(i + 1)
            graphs[name] = graphed(t)
            memory[name] = t.peak.held() if graphs[name] else t.peak.mib()
            progress(len(rows) + len(trainers), sum(len(v) for *_, v in groups), began, "train", unit="models", scale=1)
        papers = {}
        if kind == "shaq":  # tokens/s of the paper's model, at any width: enwik8's 90e6 training bytes in its hours an epoch
            papers = {n: 90e6 / (ABLATIONS[n][0] * 3600) for n, t in trainers.items() if ABLATIONS.get(n, (0,))[0] and paper_quality(t)}
        elif all(replace(t.model.config, attn="mha") == GPTConfig(**SIZES[t.s["size"]] | dict(attn="mha")) for t in trainers.values()):
            papers = dict(gpt2_book=1, dva_book=1 / (1 - 0.376))  # 15 min 47 s -> 9 min 51 s
        seconds = timed({n: t.step for n, t in trainers.items()}, m, args.rounds, least=0.0)
        for name, s in seconds.items():
            t, tokens = trainers[name], np.mean(trainers[name].tokens[-args.rounds:])
            paper = papers.get(name) if kind == "shaq" and t.model.config.n_embd == SHAQConfig.n_embd else None
            # SHAQ's windows vary in length, but step i's is the same in all variants
            rates[name] = rate = tokens / (np.median(s) if kind == "gpt" else s.mean())
            rows.append({"model": name, "parameters {:,}": t.params, "tokens a step {:,.0f}": tokens, "ms": spread(s),
                         "paper (V100), tokens/s {:,.0f}": paper, "tokens/s {:,.0f}": rate, "difference {:.2f} times": paper and rate / paper,
                         "MFU {:.1%}": rate * t.flops / peak, "CUDA graph": "yes" if graphs[name] else None, "peak MiB {:,.0f}": memory[name]})
            record(args, model=kind, variant=name, seconds=s.tolist(), tokens=tokens, tokens_per_s=rate, mfu=rate * t.flops / peak,
                   peak_mib=memory[name], params=t.params, compiled=args.compile, graph=graphs[name])
        base, *others = rates
        by_out = {name.rpartition(", ")[2]: s for name, s in seconds.items()}
        gain = gains(by_out, np.median) if set(OUTS) == set(by_out) else {}
        for name in others:
            paper = papers[name] / papers[base] if name in papers and base in papers else None
            x = rates[name] / rates[base]
            ratios.append({"": f"{name} against {base}" + ", one of them without a CUDA graph" * (graphs[name] != graphs[base]),
                           "paper, times as fast {:.2f}": paper, "measured {:.2f}": x,
                           "difference {:+.2f}": paper and x - paper, "time a token {:+.1%}": 1 / x - 1,
                           "share of identity's gain {:.2f}": gain.get(name.rpartition(", ")[2], {}).get("share")})
        for name in trainers if args.profile else ():
            with fits(f"{name}'s profile"):
                # the profiler's own allocations leave a CPU fresh memory to write to, so its first step is not counted
                with torch.profiler.profile(schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)) as p:
                    for _ in range(2):
                        trainers[name].step(len(trainers[name].tokens))
                        p.step()
                events = [e for e in p.key_averages() if (e.device_type.name == "CUDA") == args.gpu and not e.is_user_annotation]
                own = {e.key: e.self_device_time_total if args.gpu else e.self_cpu_time_total for e in events}
                profiles[name] = {op: t / sum(own.values()) for op, t in own.items()}
                record(args, model=kind, variant=name, profile=profiles[name])

    for kind, vocabulary, variants in groups:
        with fits(", ".join(variants)):
            measure(kind, vocabulary, variants)
    table(args, f"Training steps, {'compiled' if args.compile else 'eager'}; MFU against {peak / 1e12:.3g} TFLOP/s, {source}", rows)
    if ratios:
        table(args, "Speed ratios of the same run", ratios)
    if profiles:
        most = {op: max(p.get(op, 0) for p in profiles.values()) for p in profiles.values() for op in p}
        most = sorted((op for op in most if most[op] > 0.02), key=most.get, reverse=True)
        table(args, f"Where a step's time goes: {'kernels' if args.gpu else 'operators, without what they call'}",
              [{"": op} | {f"{name} {{:.1%}}": p.get(op, 0) for name, p in profiles.items()} for op in most])


# -----------------------------------------------------------------------------
# scaling: [1, figures 4 and 5]


def slope(x, y):
    "Fit log y = s log x + a -> s, its standard error from the residuals (None for fewer than four points), a"
    x, y = np.log(x), np.log(y)
    s, a = np.polyfit(x, y, 1)
    error = np.polyfit(x, y, 1, cov=True)[1][0, 0] ** 0.5 if len(x) > 3 else None
    return s, error, a


def paper_points(out):
    "The paper's [(FLOPs, nats per token)] of dense or hadamard"
    return [(flops, math.log(perplexity[OUTS.index(out)])) for flops, *perplexity in PERPLEXITY.values()]


def at_best_rate(runs):
    "Records of one variant's runs -> {size: the records at the learning rate whose mean loss is the lowest}"
    sizes = {}
    for r in runs:
        sizes.setdefault(r["size"], {}).setdefault(r.get("lr"), []).append(r)
    return {size: min(rates.values(), key=lambda mine: np.mean([r["val_loss"] for r in mine])) for size, rates in sizes.items()}


def loss_against_compute(runs):
    "{size: records of one variant's runs at one rate} -> mean FLOPs, mean loss, each (sizes,)"
    return tuple(np.array([np.mean([r[key] for r in mine]) for mine in runs.values()]) for key in ("compute", "val_loss"))


@command(lambda gpu: (
    ("sizes", dict(type=names, default="2x64,3x96,4x128,4x192" if gpu else "1x16,2x16,2x24,2x32", help="names, or layers x width")),
    ("variants", dict(type=listed(str, CHOICES["attn_out"]), default="dense,hadamard", help="of attn_out; the first is the baseline")),
    ("lr", dict(type=listed(number(float, 0)), help="learning rates, each falling to a tenth: of each size and variant the best counts "
                f"(default {'2e-3,4e-3,8e-3' if gpu else '8e-3,16e-3,32e-3'}; for sizes by name their recipe's)")),
    ("set", dict(action=Joined, help="name=value,.. for all (without it, on a CPU: batches of 2048 tokens, T 128)")),
    ("tokens_per_param", dict(type=number(float, 0), default=20.0, help="of the baseline; compute-optimal: 20")),
    ("seeds", dict(type=number(int, 1), default=1, help="how many")),
    ("seed", dict(type=number(int, 0, 2**62), default=1, help="the first")),
    ("compile", dict(type=flag01, default=gpu and kernels.triton is not None, help="torch.compile"))))
def bench_scaling(args):
    """For each size, the baseline is trained on --tokens_per_param, the others for as many FLOPs, each at its best learning rate. Shows
    loss against compute, and the exponent of loss ~ C^s with two errors: from the residuals of the fit, and over seeds, each with its own
    fit (runs of one seed share data and initial values, so differences are paired)."""
    m = start(args)
    small = "" if args.gpu else "block_size=128,batch_tokens=2048,eval_tokens=65536"
    common = settings("gpt", small if args.set is None else args.set, "--set")
    if own := {"size", "n_layer", "n_embd", "attn_out", "max_steps", "lr", "min_lr"} & set(common):
        die(f"scaling chooses {', '.join(sorted(own))} itself: drop it from --set, and name shapes in --sizes, projections in --variants, "
            "rates in --lr")
    sizes = {}  # name: settings, learning rates (None: the recipe's)
    for name in args.sizes:
        if shape := re.fullmatch(r"(\d+)x(\d+)", name):
            sizes[name] = (dict(size="nano", n_layer=int(shape[1]), n_embd=int(shape[2]), n_head=4) | common,
                           args.lr or ([2e-3, 4e-3, 8e-3] if args.gpu else [8e-3, 16e-3, 32e-3]))
        elif name in SIZES:
            sizes[name] = dict(size=name) | common, args.lr or [None]
        else:
            die(f"--sizes: {none_of(name, SIZES)}")
    if len(sizes) < 2:
        die("scaling needs two sizes or more")
    if args.compile:
        fresh_compiler()
    settled = [asdict(GPTConfig()) | s | c for s, c in (train_gpt.settle(model, {}, m) for model, _ in sizes.values())]
    if other := [k for k in SAME if k != "batch_tokens" and len({s.get(k) for s in settled}) > 1]:
        die(f"these sizes' recipes differ in {', '.join(other)}, so their losses are not of the same text: "
            "name other --sizes" + ", or give one to all in --set" * ("eval_windows" not in other))
    for (model, _), out in itertools.product(sizes.values(), args.variants):  # invalid models end it here, not hours later
        with one_line(), torch.device("meta"):
            GPT(GPTConfig(**train_gpt.settle(model | dict(attn_out=out), {}, m)[1]))
    data = load_dataset(settled[0]["dataset"], settled[0]["data_dir"])
    runs, rows, base = {out: [] for out in args.variants}, [], args.variants[0]
    seeds, total = range(args.seed, args.seed + args.seeds), sum(len(r) for _, r in sizes.values()) * len(args.variants) * args.seeds
    for size, (model, rates) in sizes.items():
        papers = {}
        for seed, lr in itertools.product(seeds, rates):
            typed = model | (dict(lr=lr, min_lr=lr / 10) if lr is not None else {})
            first = Trainer("gpt", typed | dict(attn_out=base), data, m, seed, None, args.compile)
            steps = max(1, round(args.tokens_per_param * first.params / first.step_tokens))
            given = dict(first.model.named_parameters())
            for out in args.variants:
                t = Trainer("gpt", typed | dict(attn_out=out), data, m, seed, given, args.compile)
                t.set_steps(max(1, round(steps * first.flops / t.flops)))
                if "warmup_steps" not in common:  # nano's 50 can be most of a small model's run
                    t.warmup = min(t.warmup, t.steps // 10)
                if t.steps * t.step_tokens > 4 * len(data.train):
                    warn_once(f"note: {size} reads {data.name}'s {len(data.train):,} tokens "
                              f"{t.steps * t.step_tokens / len(data.train):.1f} times")
                curve, pace = t.run(f"run {sum(map(len, runs.values())) + 1} of {total}")
                taken, _, loss, compute = curve[-1][:4]
                papers[out] = paper_quality(t)
                runs[out].append(dict(
                    size=size, variant=out, seed=seed, lr=t.s["lr"], params=t.params, tokens=taken * t.step_tokens, compute=compute,
                    val_loss=loss, tokens_per_s=pace, compiled=args.compile, dataset=data.name, bytes_per_token=data.bytes_per_token,
                    curve=curve))
                warn(f"{size} {out} seed {seed}, lr {t.s['lr']:g}: {t.params:,} parameters, {taken:,} of {t.steps:,} steps, "
                     f"{loss:.4f} {nats(data.bytes_per_token)}")
                record(args, **runs[out][-1])  # which a full disk ends
                del t  # before the next one is made
            del first, given
        for out in args.variants:
            mine, others = at_best_rate(runs[out])[size], at_best_rate(runs[base])[size]
            best, loss = mine[0]["lr"], [r["val_loss"] for r in mine]
            if math.inf in loss:
                die(f"{size} {out}: at every learning rate a run diverged; give lower ones in --lr")
            if len(rates) > 1 and best in (min(rates), max(rates)):
                warn(f"note: {size} {out} is best at lr {best:g}, at an end of those that were tried: give --lr more there")
            ours, paper = np.mean(loss), papers[out]
            by = math.exp(ours) - paper if paper and data.tokenizer == "gpt2" else None  # the paper's is per token of GPT-2's
            rows.append({
                "size": size, "variant": out, "FLOPs {:.3g}": mine[0]["compute"], "best learning rate {:g}": best,
                "paper's perplexity {:.2f}": paper, "perplexity {:.2f}": math.exp(ours), "difference {:+.2f}": by,
                f"loss, {nats(data.bytes_per_token)} {{:.4f}}": ours,
                f"against {base}": None if out == base else with_error(*paired(loss, [r["val_loss"] for r in others]))})
    table(args, f"Runs of equal FLOPs, {args.tokens_per_param:g} tokens per parameter of {base}, {data.name}, "
          f"{args.seeds} seed{'s' * (args.seeds > 1)}, {'compiled' if args.compile else 'not compiled'}", rows)
    rows, slopes, of_base = [], {}, loss_against_compute(at_best_rate(runs[base]))[1]
    for out in args.variants:
        best = at_best_rate(runs[out])
        slopes[out] = [slope(*loss_against_compute({z: [r for r in mine if r["seed"] == k] for z, mine in best.items()}))[0] for k in seeds]
        compute, loss = loss_against_compute(best)
        s, error, _ = slope(compute, loss)
        over_seeds = standard_error(slopes[out])
        paper = slope(*zip(*paper_points(out)))[0] if out in OUTS[:2] else None
        rows.append({
            "variant": out, "paper {:.4f}": paper, "measured {:.4f}": s, "difference {:+.4f}": paper and s - paper,
            "standard error of the fit {:.4f}": error, "over seeds {:.4f}": over_seeds,
            f"against {base} ± of the fit": None if out == base else with_error(*slope(compute, loss / of_base)[:2]),  # curvature cancels
            f"against {base}, over seeds": None if out == base else with_error(*paired(slopes[out], slopes[base]))})
        record(args, variant=out, exponent=s, error=error, over_seeds=over_seeds, sizes=list(sizes))
    table(args, "Exponent s of loss ~ FLOPs^s; the paper's from its three printed perplexities and 6 N D, on other data", rows)


# -----------------------------------------------------------------------------
# loss: trained models' loss on a whole split


def token_losses(model, tokens, m, context=0, streams=16):
    """-> each token's loss in nats, but the first's, on the CPU: (len(tokens) - 1,). A SHAQ reads `streams` equal parts side by side, each from
    an empty state, as in train_shaq.py's evaluation, and drops what is left over. A GPT reads windows of its
    block_size, in which at least `context` tokens (but in the first) precede those that count; with 0, they lie side by side, as in
    train_gpt.py's evaluation. The last ends where the text does."""
    def losses(logits, y):
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="none").view(y.shape).cpu()

    n, began, state = len(tokens) - 1, time.perf_counter(), None
    with evaluating(model), m.autocast():
        if type(model) is SHAQ:
            streams, length = train_shaq.eval_streams(tokens, n, streams)
            T, out = model.config.mean_window, torch.empty(streams, length)  # mean_window: its --bptt
            for at in range(0, length, T):
                x, y = train_shaq.read(tokens, range(streams), length, at, min(T, length - at), m.device)
                logits, state = model(x, state=state)
                out[:, at:at + T] = losses(logits, y)
                progress(at * streams, n, began, "loss", unit="tokens", scale=1, after=5)
            end_progress()
            return out.flatten().numpy()
        T, out = min(model.config.block_size, n), torch.empty(n)
        context = min(context, T - 1)
        starts = [min(at, n - T) for at in range(0, max(1, n - context), T - context)][::-1]  # where two overlap, the earlier sees more
        rows = max(1, min(2**14 // T, 2**26 // (T * model.config.vocab_size)))
        for i in range(0, len(starts), rows):
            x, y = inputs_and_targets(np.stack([tokens[at:at + T + 1] for at in starts[i:i + rows]]), m.device)
            for at, loss in zip(starts[i:i + rows], losses(model(x), y)):
                out[at:at + T] = loss
            progress(i, len(starts), began, "loss", unit="windows", scale=1, after=5)
    end_progress()
    return out.numpy()


@command(lambda gpu: (
    ("ckpt", dict(nargs="+", action="extend", metavar="FILE",
                  help="checkpoints of either script (where not given, out/gpt/ckpt.pt); the first is the baseline")),
    ("dataset", dict(help="text to read (where not given, the first checkpoint's)")),
    ("data_dir", dict(default="data", help="where prepared data lies")),
    ("split", dict(choices=["train", "val", "test"], default="val", help="the part of it to read, from end to end")),
    ("context", dict(type=number(int, 0), default=0, help="at least so many tokens precede those on which a GPT is scored; 0: its windows lie "
                                                          "side by side. A SHAQ carries its state along"))))
def bench_loss(args):
    """Loss of trained models on a whole split, token by token, and the difference from the first model's. Standard errors are over 64 equal
    parts of the text: they hold for text like it, and are too small if it is short, as neighbours are alike. They say nothing of other
    seeds."""
    m, paths = start(args), args.ckpt or ["out/gpt/ckpt.pt"]
    with one_line():
        ckpts = [{k: v for k, v in load_checkpoint(path).items() if k not in ("optimizer", "state")} for path in paths]  # most of it
    data, rows, base = load_dataset(args.dataset or ckpts[0]["data"]["name"], args.data_dir), [], None
    tokens = getattr(data, args.split)
    if tokens is None or len(tokens) < 129:
        die(f"{data.name} has {'no' if tokens is None else 'too short a'} {args.split} split: take another --split or --dataset")
    to_bits = len(tokens) / data.meta["bytes"][args.split] / math.log(2)  # times nats per token: bits per byte
    for path, ckpt in zip(paths, ckpts):
        c = ckpt["config"]
        if ckpt["data"]["tokenizer"] != data.tokenizer or c["vocab_size"] < data.vocab_size:
            die(f"{path} reads {c['vocab_size']} {ckpt['data']['tokenizer']} tokens, {data.name} holds {data.vocab_size} {data.tokenizer} "
                "tokens: take another --ckpt or --dataset")
        if args.context >= c.get("block_size", math.inf):
            die(f"--context={args.context}: expected less than the {c['block_size']} tokens that {path} can see")
    for i, (path, ckpt) in enumerate(zip(paths, ckpts)):
        if ckpt["data"]["name"] == data.name and data.source | ckpt["data"] != data.source:  # old ones say less
            warn(f"note: {path} was trained on another {data.name}, which may hold some of this text")
        model = model_of(ckpt).to(m.device)
        found = token_losses(model, tokens, m, args.context, 8 if args.split == "test" else 16).astype(np.float64)  # as train_shaq.py
        base = found if i == 0 else base
        lead = found[:len(base)] - base[:len(found)]  # a SHAQ drops what its streams leave over
        mean_error = lambda x: standard_error(x[:len(x) // 64 * 64].reshape(64, -1).mean(1))
        loss, error, difference, difference_error = found.mean(), mean_error(found), lead.mean(), mean_error(lead)
        rows.append({
            "checkpoint": f"`{path}`", "parameters {:,}": sum(p.numel() for p in model.parameters()), "steps {:,}": ckpt.get("step"),
            f"{data.unit}s {{:,}}": len(found), f"loss, nats per {data.unit}": with_error(loss, error, "-.4f"),
            "perplexity {:.4g}": math.exp(loss) if loss < 700 else math.inf, "bits per byte {:.4f}": loss * to_bits,
            "difference ± standard error": None if len(paths) == 1 else "baseline" if i == 0 else with_error(difference, difference_error)})
        record(args, ckpt=path, dataset=data.name, split=args.split, context=args.context, step=ckpt.get("step"), tokens=len(found), loss=loss,
               error=error, bits_per_byte=loss * to_bits, difference=difference, difference_error=difference_error)
    table(args, f"Loss on {data.name}, {args.split} split; ± over 64 parts of it", rows)


# -----------------------------------------------------------------------------
# eval: log-likelihoods for EleutherAI's lm_eval, which has prompts, data and scores


class Scorer:
    """The part of lm_eval.api.model.LM that multiple choice needs; a request carries its strings in .args. The token self.prefix
    stands in for an empty context."""

    def __init__(self, model, tokenizer, m, batch=16):
        super().__init__()
        self.gpt, self.tokenizer, self.m, self.batch = model.to(m.device).eval(), tokenizer, m, batch
        self.prefix = 50256 if tokenizer == "gpt2" else encode(tokenizer, "\n")[0]  # <|endoftext|> or a line break
        self.length = model.config.block_size

    def pair(self, context, continuation):
        """Strings -> tokens of both, encoded together. White space at the context's end goes to the continuation, as GPT-2's tokens begin with
        them."""
        n = len(context.rstrip())
        context, continuation = context[:n], context[n:] + continuation
        c = encode(self.tokenizer, context)
        t = encode(self.tokenizer, context + continuation)[len(c):]
        if not t:  # GPT-2's "The" and "There" are one token each: a sum over none would be 0, the best of all
            die(f"--tasks: the answer {continuation!r} adds no token to what is before it ({context[-20:]!r}); take another task, or in "
                "one of your own leave a space between them")
        return c or [self.prefix], t

    @torch.no_grad()
    def score(self, pairs):
        "[(context tokens, continuation tokens)] -> [(log-likelihood, whether each token is the likeliest)], batched by length"
        out, t0 = [None] * len(pairs), time.perf_counter()
        order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
        for a in range(0, len(order), self.batch):
            rows = []
            for i in order[a:a + self.batch]:
                c, t = pairs[i]
                if len(t) > self.length:
                    die(f"a continuation of {len(t)} tokens does not fit this model's block_size of {self.length}")
                rows.append((c + t)[:-1][-self.length:])
            x = torch.tensor([r + [self.prefix] * (len(rows[0]) - len(r)) for r in rows], device=self.m.device)  # padded right: causal
            with self.m.autocast():
                logits = self.gpt(x)                                                         # (B, T, V)
            for i, r, z in zip(order[a:a + self.batch], rows, logits):
                t = torch.tensor(pairs[i][1], device=self.m.device)
                lp = z[len(r) - len(t):len(r)].float().log_softmax(-1)
                out[i] = lp.gather(1, t[:, None]).sum().item(), bool((lp.argmax(-1) == t).all())
            progress(min(a + self.batch, len(order)), len(order), t0, "eval", unit="answers", scale=1)
        return out

    def loglikelihood(self, requests):
        return self.score([self.pair(*r.args) for r in requests])


@command(lambda gpu: (
    ("ckpt", dict(default="out/gpt/ckpt.pt", help="checkpoint of train_gpt.py")),
    ("tasks", dict(type=names, default="piqa,hellaswag,openbookqa,arc_easy,blimp", help="names that lm_eval knows, of multiple choice")),
    ("include_path", dict(help="folder with task files (YAML) of your own, offline")),
    ("limit", dict(type=number(int, 1), help="only so many questions of each")),
    ("batch", dict(type=number(int, 1), default=16, help="sequences at a time"))))
def bench_eval(args):
    "Zero-shot tasks by EleutherAI's lm_eval (pip install lm_eval): its prompts, its data, its scores."
    m = start(args)
    try:
        from lm_eval import simple_evaluate
        from lm_eval.api.model import LM
        from lm_eval.tasks import TaskManager
    except ImportError as e:
        die(f"eval needs EleutherAI's harness ({e.name or e} is missing): pip install lm_eval")
    with one_line():
        ckpt = load_checkpoint(args.ckpt)
    if ckpt["kind"] != "GPT":
        die(f"{args.ckpt} is a checkpoint of train_shaq.py: eval takes one of train_gpt.py")

    class Harness(Scorer, LM):
        def generate_until(self, requests):
            die("--tasks: eval scores multiple choice, and one of these tasks asks for whole texts: take another")

        loglikelihood_rolling = generate_until

    if args.include_path and not os.path.isdir(args.include_path):
        die(f"--include_path={args.include_path} is no folder")
    tasks = TaskManager(include_path=args.include_path)
    if unknown := [t for t in args.tasks if t not in tasks.all_tasks]:
        die(f"--tasks: lm_eval knows no {unknown[0]!r}{nearest(unknown[0], tasks.all_tasks)}; tasks of your own: --include_path=FOLDER")
    try:
        model = model_of(ckpt)
        found = simple_evaluate(Harness(model, ckpt["data"]["tokenizer"], m, args.batch), tasks=args.tasks, task_manager=tasks,
                                limit=args.limit, bootstrap_iters=0, log_samples=False)
    except OSError as e:
        die(f"lm_eval could not load its data ({(str(e).strip() or type(e).__name__).splitlines()[0]}): "
            "download it once where there is a network, or give --include_path")
    except ValueError as e:  # mostly lm_eval's: a task named twice, or data of which it finds no copy
        die(f"eval: {e}")
    out, size, rows = model.config.attn_out, ckpt.get("settings", {}).get("size"), []
    papers = ZERO_SHOT[size] if size in ZERO_SHOT and out in OUTS[:2] and is_papers(model.config, SIZES[size]) else {}
    scores = {task: {key: v for key, v in sorted(values.items()) if isinstance(v, float) and "stderr" not in key}
              for task, values in (found["results"] | found.get("groups", {})).items()}
    # A group with a score of its own hides its tasks; if a name in --tasks has none (a tag, a group without a mean), its tasks show
    below = {t for group, children in found.get("group_subtasks", {}).items() if scores.get(group) for t in children}
    for task in args.tasks if all(scores.get(t) for t in args.tasks) else [t for t in scores if t in args.tasks or t not in below]:
        for key, value in scores[task].items():
            metric = key.removesuffix(",none")
            paper = papers[task][OUTS.index(out)] if task in papers and metric.startswith("acc") else None
            n = found.get("n-samples", {}).get(task, {}).get("effective")
            rows.append({"task": task, "metric": metric, "questions": n, "paper, %": paper,
                         "measured": f"{100 * value:.1f}" if metric.startswith("acc") else f"{value:.4f}",
                         "difference {:+.1f}": paper and 100 * value - paper})
            record(args, ckpt=args.ckpt, size=size, variant=out, task=task, metric=metric, value=value, n=n)
    table(args, f"Zero-shot, {args.ckpt}; the paper's percentages are of its own training runs", rows)


# -----------------------------------------------------------------------------
# plot: figures from the records

COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255"]  # Okabe and Ito's, for all eyes, with
# one of Tol's in place of their yellow, which is faint on white
PAPER = dict(marker="*", ms=12, mfc="none", ls="")


def style(i):
    "The look of the i-th variant: after eight, colours and marks begin anew with other lines and fillings"
    again = i // 8 % 3
    return dict(color=COLORS[i % 8], marker="osD^vPX*"[i % 8], ls=("-", "--", ":")[again], fillstyle=("full", "left", "none")[again])


def records(folder, what):
    "Records of one command's last run; [] if there are none"
    rows = []
    with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, f"{what}.jsonl"), encoding="utf-8",
                                                         errors="replace") as f:
        for i, line in enumerate(f, 1):
            try:
                row = json.loads(line)
                if row["run"] and row.get("what", what) == what:  # not another command's, given the same --out
                    diverged = "val_loss" in row and row["val_loss"] is None
                    rows.append(row | dict(val_loss=math.inf) if diverged else row)
            except (ValueError, LookupError, TypeError, RecursionError):
                warn(f"note: {f.name}, line {i} is cut short, or no record; left out")
    return [r for r in rows if r["run"] == rows[-1]["run"]]


@command(lambda gpu: (
    ("records", dict(default="out/bench", help="folder of the JSONL files")),
    ("assets", dict(default="out/bench", help="folder for the figures (README's lie in assets)")),
    ("logs", dict(nargs="+", action="extend", metavar="FILE",
                  help="log.jsonl files of the training scripts instead: bits per byte against training time")),
    ("format", dict(choices=["png", "svg"], default="png", help="of the figures' files"))))
def bench_plot(args):
    """The papers' figures from --records' *.jsonl, or curves of --logs: loss against steps, FLOPs and time; loss against compute with fits, and
    relative to the first variant's; speed-up over batch and length; decoding throughput against batch; bits per byte against time for SHA-RNN's
    ablations. The papers' points are hollow. Needs matplotlib."""
    figures = dict(compare=plot_compare, scaling=plot_scaling, prefill=plot_heatmap, decode=plot_decode)
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        die("plot needs matplotlib: pip install matplotlib")
    plt.rcParams |= {"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False,
                     "legend.frameon": False}
    os.makedirs(args.assets, exist_ok=True)
    made = 0
    for draw, rows in ([(plot_logs, read_logs(args.logs))] if args.logs else
                       [(draw, records(args.records, what)) for what, draw in figures.items()]):
        for name, fig in draw(plt, rows) if rows else ():
            machines = "\n".join(dict.fromkeys(r["hardware"] for r in rows))  # logs can be of several
            fig.text(0, -0.01, f"{machines}, {rows[0]['run'][:10]}".rstrip(", "), fontsize=6, color="0.4", va="top")
            path = os.path.join(args.assets, f"{name}.{args.format}")
            fig.savefig(path, dpi=150, bbox_inches="tight")
            print(path)
            plt.close(fig)
            made += 1
    if not made:
        die(f"{args.records} holds nothing to plot of {', '.join(figures)}: run one of them first, prefill with two --T or --batch")


NO_OTHER_MODEL = {"out_dir", "data_dir", "seed", "device", "eval_interval", "eval_tokens", "micro_batch", "max_steps", "max_minutes",
                  "paced", "min_lr", "warmup_steps", "mean_window"}  # settings that do not tell two models apart, or follow from others


def read_logs(paths):
    "Each log.jsonl -> a row with its name, hardware and curve [(minutes in steps, steps, bits per byte)]"
    rows = []
    for path in paths:
        try:
            with open(path, encoding="utf-8") as f:
                first, *lines = (json.loads(line) for line in f if line.endswith("\n"))  # the last may be cut short
            c, config, minutes = first["settings"], first["config"], itertools.accumulate(r.get("ms", 0.0) / 60e3 for r in lines)
            curve = [(t, r["step"], r["bits_per_byte"]) for t, r in zip(minutes, lines) if "bits_per_byte" in r]
            curve[0]  # IndexError, a LookupError
            name = c.get("preset") or config["attn_out" if config.get("attn", "mha") == "mha" else "attn"]
            hidden = NO_OTHER_MODEL | {"size"} if "preset" in c else NO_OTHER_MODEL  # SHAQ's older logs name no size
            made = {k: v for k, v in (c | config).items() if k not in hidden}
            machines = [re.sub(", as products in bfloat16 are .* times as fast", "", r["machine"])  # measured anew in each run
                        for r in (first, *lines) if "machine" in r]                           # one more where a run was resumed
            rows.append(dict(name=name, made=made, hardware=", then ".join(dict.fromkeys(machines)), run="", curve=curve))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            die(f"{path} is no log.jsonl of train_gpt.py or train_shaq.py, or holds no evaluation yet")
    for row in rows:  # runs of one name: add the size if that differs, and what else does in runs of one size
        size, others = row["made"].get("size"), [other["made"] for other in rows if other["name"] == row["name"]]
        alike = [o for o in others if o.get("size") == size]
        unlike = [f"size={size}"] * (len(alike) < len(others))
        unlike += [f"{k}={v}" for k, v in row["made"].items() if any(o.get(k) != v for o in alike)]
        row["title"] = ", ".join([row["name"], *unlike])
    return rows


def plot_logs(plt, rows):
    "Bits per byte of the validation split against the time spent in training steps; runs of one name in one colour"
    fig, ax = plt.subplots(figsize=(9, 4.2), layout="constrained")
    rows = sorted(rows, key=lambda row: -row["curve"][-1][2])  # the legend's order is that of the curves' ends
    for i, name in enumerate(dict.fromkeys(row["title"] for row in rows)):
        for k, row in enumerate(row for row in rows if row["title"] == name):
            minutes, _, bits = zip(*[p for p in row["curve"] if p[1]] or row["curve"])  # without step 0, far above the rest
            ax.plot(minutes, bits, **style(i), ms=4, lw=1, label=None if k else name)
    ax.set(xlabel="minutes in training steps", ylabel="validation, bits per byte")
    fig.legend(loc="outside right upper", fontsize=8)
    yield "training", fig


def plot_compare(plt, rows):
    "Validation loss of each variant, mean over seeds with its standard error, against three measures of cost; SHAQ's ablations once more"
    base = {r["seed"]: r["val_loss"] for r in rows if r["index"] == 0}
    whole = {s for s in base if sum(r["seed"] == s for r in rows) == len({r["index"] for r in rows})}
    rows = sorted((r for r in rows if r["seed"] in whole), key=lambda r: r["seed"])  # the rest is of a seed that was interrupted
    if not rows:  # the baseline's may be damaged
        return warn("note: compare's last run holds no whole seed with its baseline, so there is no figure of it")
    variants = dict(sorted({r["index"]: r["variant"] or "default" for r in rows}.items()))
    fig, axes = plt.subplots(1, 4, figsize=(17, 4), layout="constrained")
    for i, name in variants.items():
        mine = [r for r in rows if r["index"] == i]
        pace = np.median([r["tokens"] / r["steps"] / r["tokens_per_s"] for r in mine])  # median seconds a step: other work slows some
        curves = np.array([[[step, flops, step * pace, val] for step, _, val, flops, _ in r["curve"][1:]]  # without the start
                           for r in mine])                                                     # (seeds, points, 4)
        mean, error = curves.mean(0), standard_error(curves[..., 3])
        for ax, x in zip(axes, mean.T[:3]):
            ax.plot(x, mean[:, 3], **style(i), ms=4, label=name)
            if error is not None:
                ax.fill_between(x, mean[:, 3] - error, mean[:, 3] + error, color=COLORS[i % 8], alpha=0.2, lw=0)
        if i:
            d, e = paired([r["val_loss"] for r in mine], [base[r["seed"]] for r in mine])
            axes[3].errorbar(d, len(variants) - i, xerr=e, **style(i), capsize=4)
    for ax, label in zip(axes, ("steps", "FLOPs", "seconds at the median pace")):
        ax.set(xlabel=label, ylabel=f"validation loss, {nats(rows[0].get('bytes_per_token'))}")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    axes[3].axvline(0, color=COLORS[0])
    axes[3].set(xlabel=f"final loss minus that of {variants[0]}, nats\n(mean and standard error over seeds)",
                yticks=[len(variants) - i for i in variants if i], yticklabels=[name for i, name in variants.items() if i])
    yield "compare" if rows[0]["model"] == "gpt" else "compare_shaq", fig
    if rows[0]["model"] == "shaq":
        fig, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
        for i, name in variants.items():
            mine = [r for r in rows if r["index"] == i]
            hours, paper = ABLATIONS.get(mine[0]["preset"], (None,))[0], mine[0]["paper"]  # None where the paper has no such model
            points = style(i) | dict(ls="", label=name)
            axes[0].plot([r["tokens"] / r["tokens_per_s"] / 60 for r in mine], [r["bits_per_byte"] for r in mine], **points)
            if hours and paper:
                axes[1].plot(hours * 32, paper, **points, mfc="none")
        axes[0].set(xlabel="minutes of training, at the median pace", ylabel="bits per byte", title=f"measured, {rows[0]['dataset']}")
        axes[1].set(xlabel="hours of training (V100)", ylabel="bits per byte", title="paper, enwik8 test, 32 epochs")
        axes[0].legend()
        yield "ablations", fig


def plot_scaling(plt, rows):
    "Loss against compute, log-log, with fits; the paper's three sizes, on their own data; ours, and theirs, relative to the first variant's"
    if not any("exponent" in r for r in rows):  # interrupted: its last size may lack rates or seeds
        rows = [r for r in rows if r["size"] != rows[-1]["size"]]
    rows = [r for r in rows if "val_loss" in r]
    if not rows:
        return
    fig, axes = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    best = {out: at_best_rate([r for r in rows if r["variant"] == out]) for out in dict.fromkeys(r["variant"] for r in rows)}
    base = next(iter(best))
    for i, (out, runs) in enumerate(best.items()):
        paper = tuple(zip(*paper_points(out))) if out in OUTS[:2] else ((), ())
        for ax, (x, y), fill in ((axes[0], loss_against_compute(runs), COLORS[i]), (axes[1], paper, "none")):
            if len(x) > 1:
                s, _, a = slope(x, y)
                ax.loglog(x, y, **style(i) | dict(mfc=fill, ls="", label=f"{out}, loss ~ FLOPs^{s:.3f}"))
                ax.loglog(x, np.exp(s * np.log(x) + a), color=COLORS[i], lw=1)
        if i:
            of_base = {z: np.array([r["val_loss"] for r in mine]) / [r["val_loss"] for r in best[base][z]] for z, mine in runs.items()}
            axes[2].errorbar(loss_against_compute(runs)[0], [100 * (r.mean() - 1) for r in of_base.values()], label=out, capsize=4, lw=1,
                             yerr=[100 * (standard_error(r) or 0) for r in of_base.values()], **style(i))
            if paper[0] and base == "dense":
                axes[2].plot(paper[0], [100 * (y / b - 1) for y, (_, b) in zip(paper[1], paper_points(base))], label=f"{out}, paper",
                             **style(i) | dict(mfc="none"), lw=1)
    for ax, title, flops, b in ((axes[0], f"measured, {rows[0]['dataset']}", "FLOPs", rows[0].get("bytes_per_token")),
                                (axes[1], "paper", "FLOPs (6 N D)", None)):
        ax.set(xlabel=flops, ylabel=f"validation loss, {nats(b)}", title=title)
        ax.yaxis.set(major_locator=plt.MaxNLocator(6), major_formatter="{x:.2f}", minor_formatter="")  # else from 1 to 2 only the ends
        ax.xaxis.set_minor_formatter("")
        ax.legend()
    axes[2].axhline(0, color=COLORS[0])
    axes[2].set(xscale="log", xlabel="FLOPs", ylabel=f"loss relative to {base}'s, %\n(mean and standard error over seeds)",
                title="both, " * (base == "dense" and "hadamard" in best) + f"relative to {base}")
    if len(best) > 1:
        axes[2].legend()
    yield "scaling", fig


def plot_heatmap(plt, rows):
    "Gain in throughput over dense, batch by length (v1's figure); of one batch or one length latency and tokens/s against the other"
    for size, compiled in dict.fromkeys((r["size"], r["compiled"]) for r in rows):
        mine = [r for r in rows if (r["size"], r["compiled"]) == (size, compiled)]
        batches, lengths = (sorted({r[k] for r in mine}) for k in ("batch", "T"))
        title, name = f"{size}, {'compiled' if compiled else 'eager'}", f"prefill_{size}{'_compiled' if compiled else ''}"
        if len(batches) > 1 and len(lengths) > 1:
            fig, axes = plt.subplots(1, len(OUTS) - 1, figsize=(5 * len(OUTS) - 5, 4), layout="constrained")
            limit = max(abs(r["gain"]) for r in mine) * 100 or 1
            for ax, out in zip(axes, OUTS[1:]):
                gain = {(r["batch"], r["T"]): r["gain"] * 100 for r in mine if r["variant"] == out}
                grid = np.array([[gain.get((b, t), np.nan) for t in lengths] for b in batches])
                image = ax.imshow(grid, cmap="PuOr", vmin=-limit, vmax=limit, origin="lower", aspect="auto")
                ax.grid(False)
                for (y, x), v in np.ndenumerate(grid):
                    ax.text(x, y, "" if np.isnan(v) else f"{v:+.1f}", ha="center", va="center",
                            color="white" if abs(v) > 0.6 * limit else "black")
                ax.set(xlabel="sequence length, tokens", ylabel="batch, sequences", title=f"{out}, {title}", xticks=range(len(lengths)),
                       xticklabels=lengths, yticks=range(len(batches)), yticklabels=batches)
            fig.colorbar(image, ax=axes, label="gain in throughput over dense, %")
            yield name + "_heatmap", fig
        elif len(lengths) > 1 or len(batches) > 1:
            key, label = ("T", "sequence length, tokens") if len(lengths) > 1 else ("batch", "batch, sequences")
            fig, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
            for i, out in enumerate(OUTS):
                r = sorted((r for r in mine if r["variant"] == out), key=lambda r: r[key])
                x, ms = [v[key] for v in r], [np.array(v["seconds"]) * 1e3 for v in r]
                axes[0].errorbar(x, [t.mean() for t in ms], [deviation(t) or 0 for t in ms], **style(i), label=out)
                axes[1].plot(x, [v["tokens_per_s"] for v in r], **style(i))
                if size in PREFILL and i < 2 and any((v["batch"], v["T"]) == (1024, 64) for v in r):
                    axes[0].plot(64 if key == "T" else 1024, PREFILL[size][i][0], **PAPER, color=COLORS[i], label=f"paper, {out}")
            axes[0].set(xlabel=label, ylabel="latency, ms", title=title)
            axes[1].set(xlabel=label, ylabel="tokens/s", title=title)
            axes[0].legend()
            yield name, fig


def plot_decode(plt, rows):
    "Decoding throughput against batch, a panel for each prompt length, by the fastest launch mode that was measured"
    rows = [r for r in rows if "size" in r]  # SHAQ's are one number each
    for size in dict.fromkeys(r["size"] for r in rows):
        lengths = sorted({r["T"] for r in rows if r["size"] == size})
        fig, axes = plt.subplots(1, len(lengths), figsize=(5.5 * len(lengths), 4), layout="constrained", squeeze=False)
        for ax, T in zip(axes[0], lengths):
            for i, out in enumerate(OUTS):
                mine = [r for r in rows if (r["size"], r["T"], r["variant"]) == (size, T, out)]
                batches = sorted({r["batch"] for r in mine})
                ax.plot(batches, [max(r["tokens_per_s"] for r in mine if r["batch"] == b) for b in batches], **style(i), label=out)
                for (B, prompt, n), papers in DECODE.items() if i < 2 else ():
                    if prompt == T and size in papers and any((r["batch"], r["new_tokens"]) == (B, n) for r in mine):
                        ax.plot(B, papers[size][i], **PAPER, color=COLORS[i], label=f"paper, {out}")
            ax.set(xlabel="batch, sequences", ylabel="tokens/s", title=f"{size}, prompt of {T}")
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter("{x:g}")
            ax.set_yscale("log")
        axes[0][0].legend()
        yield f"decode_{size}", fig


def main(argv=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    what = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    argv = argv[len(what):]
    if not what:
        if set(argv) & {"-h", "--help"}:
            return print(__doc__.strip())
        die(f"say what to measure: python bench.py {' | '.join(COMMANDS)}")
    for name in what:
        if name not in COMMANDS:
            die(none_of(name, COMMANDS))
    gpu = on_gpu(argv)
    if "compare" in what:  # cuBLAS reads it once per process, so set what reproducible() needs before any command
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for name, args in [(name, parse(name, argv, gpu)) for name in what]:  # parse all first, so that a bad flag ends this now
        COMMANDS[name][0](args)


if __name__ == "__main__":
    run(main)
