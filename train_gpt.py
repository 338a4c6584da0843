"""
Train a GPT with a dense or a Hadamard output projection, or with Dynamic Value Attention.

    python train_gpt.py --attn_out=hadamard                               # without a GPU: nano, Python sources, 3 minutes
    torchrun --nproc_per_node=8 train_gpt.py --attn_out=hadamard --dataset=fineweb10B     # 8 GPUs: tiny, the paper's recipe
    python train_gpt.py --resume                                          # go on where out/gpt/ckpt.pt left off
    python train_gpt.py --init_from=out/gpt/ckpt.pt --dataset=notes --out_dir=out/tuned   # a new run, from its weights
    python model.py --ckpt=out/gpt/ckpt.pt --prompt="def "                # sample from it

The batch size is in tokens; however micro-batches, accumulation and processes divide it, the loss curve is the same up to rounding and
other dropout masks. Batches depend only on seed and step, dropout also on the process, so a resumed run continues exactly (on a GPU but for
the order of some sums); a schedule that --max_minutes has shortened stays shortened. Evaluations also save, spending at most a tenth of the
time on it; the last one always saves.
Ctrl-C or a signal, after the first step, saves before the run stops; torchrun kills a process that takes longer than 30 seconds, or, from
torch 2.12 on, than TORCH_ELASTIC_SHUTDOWN_TIMEOUT. Under nohup give torchrun --signals-to-handle=SIGTERM,SIGINT, or the run ends with its
terminal. In a step's line, norm is the gradient norm before clipping; MFU (model FLOP/s utilisation) is the FLOP/s of the model's matrix
products, by flops_per_token(), as a share of the device's peak, printed at the start.
"""
import argparse
import os
import time
from dataclasses import asdict, fields
from shlex import quote

import numpy as np
import torch

from kernels import hadamard_path, triton
from model import (CHOICES, GPT, SIZES, GPTConfig, Replayed, clip_, evaluating, fused_fits, inputs_and_targets, load_checkpoint, lr_at,
                   machine, param_groups, peak_flops, sample_text, schedule_notes)
from prepare_data import (Parser, StopSignal, check_source, die, dispensable, diverged, duration, end_progress, flag01, number, one_line,
                          origin, progress, report, run, same_model, shared_dataset, shorten, start_log, stopped, unchanged, write_or_warn)

# -----------------------------------------------------------------------------
# Settings. Defaults depend on the size; typed flags override them. [1] and [2] are the papers listed in model.py. In this file s holds all
# settings, c the model's, m is the machine (model.py), T a window's tokens, B the windows of a step

RECIPES = {  # batch_tokens and lr of tiny to large: [1, table 2]; v1 gives none for its larger sizes: large's. nano's are ours
    "nano": dict(batch_tokens=2048, micro_batch=8, lr=2e-3, min_lr=1e-4, warmup_steps=50, max_steps=3000, max_minutes=3.0,
                 eval_interval=250, eval_tokens=2**16),
    "tiny": dict(batch_tokens=2**18, micro_batch=32, lr=6e-4),
    "small": dict(batch_tokens=2**18, micro_batch=16, lr=3e-4),
    "base": dict(batch_tokens=2**19, micro_batch=8, lr=2.5e-4),
    "large": dict(batch_tokens=2**20, micro_batch=8, lr=2e-4),
    # DVA's experiment [2], by the recipe of the book it follows, as the paper gives none: 5 epochs of 1,512 steps of 2 windows (the paper's
    # table ends at 1,500); losses over 5 such batches of each split
    "dva_book": dict(dataset="warandpeace", batch_tokens=512, micro_batch=2, lr=4e-4, schedule="constant", warmup_steps=0,
                     betas=(0.9, 0.999), decay="all", grad_clip=0.0, max_steps=7560, eval_interval=100, eval_tokens=2560,
                     eval_windows="first", seed=123, dtype="float32"),
}
RECIPES["gpt2_book"] = RECIPES["dva_book"]


def parse(argv=None, prog="train_gpt.py"):
    parser = Parser(prog=prog, description=__doc__, argument_default=argparse.SUPPRESS)
    add = parser.add_argument
    add("--size", choices=SIZES, help="preset of n_layer, n_head, n_embd, block_size and the recipe (default tiny on "
        "CUDA with 20 GB, else nano); gpt2_book and dva_book have other defaults than those below: see SIZES and RECIPES")
    for name, what in dict(
            attn="multi-head attention, or Dynamic Value Attention, as trained in its paper (there with --n_head=1 --mlp=none), in its "
                 "outer form or, a control, without K_R",
            attn_out="in the place of mha's output projection: that itself, a Hadamard transform (n_embd = m * 2^k with m = 1, 12, 20, 28, "
                     "..), one over heads only (then n_head), a scale and bias alone, or nothing",
            mlp="feed-forward block", pos="how attention knows positions", norm="before each branch and at the end",
            init="initial weights: GPT-2's, or PyTorch's own, as in the experiment of gpt2_book and dva_book").items():
        add(f"--{name}", choices=CHOICES[name], help=f"{what} (default {getattr(GPTConfig, name)})")
    for name in ("n_layer", "n_head", "n_embd", "block_size"):
        add(f"--{name}", type=number(int, 1, 2**24), help="instead of the preset's")
    add("--bias", type=flag01, help="0: no bias in linear layers and LayerNorm (default 1)")
    add("--tie_weights", type=flag01, help="0: the head has its own matrix (default 1)")
    add("--dropout", type=number(float, 0, 1), help="(default 0)")
    add("--dataset", help="a name that prepare_data.py knows or was given (default pysource, prepared at once if need be)")
    add("--data_dir", help="where prepared data lies (default data)")
    add("--out_dir", help="where ckpt.pt and log.jsonl go (default out/gpt)")
    add("--batch_tokens", type=number(int, 1), help="tokens a step, over all processes (default by size: 2048 for nano, 2^18 for tiny)")
    add("--micro_batch", type=number(int, 1),
        help="sequences a process takes at a time; the rest is accumulated (default by size: 8 for nano, 32 for tiny)")
    add("--max_steps", type=number(int, 0), help="(default 3000 for nano, else 20 tokens per parameter, 16 epochs at most)")
    add("--max_minutes", type=number(float, 0),
        help="if max_steps would take longer at the pace so far, take fewer; 0: never (default 3 for nano, else 0)")
    add("--lr", type=number(float, 0), help="peak learning rate (default by size: 2e-3 for nano, 6e-4 for tiny)")
    add("--min_lr", type=number(float, 0), help="at the end of the cosine (default lr / 10; nano 1e-4, at most lr)")
    add("--schedule", choices=["cosine", "constant"], help="after the warm-up (default cosine)")
    add("--warmup_steps", type=number(int, 0), help="linear warm-up (default 1 in 50 steps, 50 for nano)")
    add("--weight_decay", type=number(float, 0, 1e6), help="of matrices (default 0.1)")
    add("--grad_clip", type=number(float, 0), help="largest gradient norm, 0: no clipping (default 1.0)")
    add("--eval_interval", type=number(int, 1), help="steps between evaluations (default 1 in 20 of all, 250 for nano)")
    add("--eval_tokens", type=number(int, 1), help="validation tokens an evaluation reads, always the same (default 2^20, 2^16 for nano)")
    add("--seed", type=number(int, 0, 2**63 - 1), help="of initial weights, data order and dropout (default 1337)")
    add("--device", choices=["auto", "cpu", "cuda", "mps"], help="(default auto: cuda where that is, else cpu)")
    add("--dtype", choices=["auto", "float32", "bfloat16"], help="of autocast (default auto: bfloat16 where that is faster)")
    add("--compile", type=flag01, help="torch.compile the model and, on one GPU, replay steps, or their micro-batches, as CUDA graphs "
                                       "(default 1 on CUDA, where Triton is installed; no graphs with dropout in heads whose values, "
                                       "2 x as wide in dva, are narrower than block_size and, but in dva_outer, wider than 256)")
    add("--init_from", metavar="CKPT", help="start from this checkpoint's weights, with a fresh optimiser, the recipe of its size and, unless "
                                            "--dataset is typed, its data; of its model only dropout and, with rope, block_size may change")
    add("--resume", action="store_true", help="continue OUT_DIR/ckpt.pt with its settings")
    return vars(parser.parse_args(argv))


def default_size(m):
    """-> (the --size if none is typed, a note if the GPU has too little memory for tiny, whose micro-batches take some 20 GB). On a T4, with
    16 GB and no bf16, tiny's 16 epochs would last four hours at its peak rate"""
    if m.device.type != "cuda":
        return "nano", ""
    memory = torch.cuda.get_device_properties(m.device).total_memory
    if memory > 20e9:
        return "tiny", ""
    return "nano", f"; nano, as tiny's batches take 20 GB and this GPU has {memory / 1e9:.0f}: --size=tiny --micro_batch=4 takes less"


# what may change on --resume
FREE = {"data_dir", "out_dir", "micro_batch", "eval_interval", "eval_tokens", "device", "dtype", "compile", "max_steps"}


def settle(typed, stored, m):
    "Defaults, overridden by the recipe, then by the checkpoint (configuration and settings), then by typed flags -> settings, model settings"
    # betas, decay, eval_windows and paced have no flags
    s = dict(size="tiny" if m.device.type == "cuda" else "nano", dataset="pysource", data_dir="data", out_dir="out/gpt", weight_decay=0.1,
             max_minutes=0.0, paced=False, grad_clip=1.0, schedule="cosine", betas=(0.9, 0.95), decay="matrices", eval_tokens=2**20,
             eval_windows="spread", seed=1337, compile=m.device.type == "cuda" and triton is not None)
    unchanged(typed, stored, FREE)
    given = stored | typed
    s |= RECIPES.get(given.get("size", s["size"]), RECIPES["large"]) | given
    if "min_lr" in s and "min_lr" not in given:
        s["min_lr"] = min(s["min_lr"], s["lr"])  # nano's could be above a low --lr: the cosine would climb
    if s["schedule"] == "cosine" and s.get("min_lr", 0) > s["lr"]:
        die(f"--min_lr={s['min_lr']:g} is above --lr={s['lr']:g}, and the cosine falls from the one to the other: lower it")
    s["paced"] |= stored.get("max_steps") is not None and "max_steps" in typed  # max_steps is settled: --resume ignores max_minutes
    model = {f.name: s[f.name] for f in fields(GPTConfig) if f.name in s}
    return s, SIZES[s["size"]] | model


# -----------------------------------------------------------------------------
# Model, optimiser, step


def build(s, c, data, m):
    "-> a new model on its device, its optimiser. Sets s['max_steps'], where nothing has: it hangs on the number of parameters"
    vocab = dict(vocab_size=-(-data.vocab_size // 64) * 64)  # a multiple of 64 is faster on a GPU: 50257 -> 50304
    torch.manual_seed(s["seed"])
    with one_line():
        model = GPT(GPTConfig(**vocab | c)).to(m.device)
    tokens = min(20 * model.num_params(), 16 * len(data.train))  # further epochs teach next to nothing: Muennighoff et al., arXiv 2305.16264
    s.setdefault("max_steps", -(-tokens // s["batch_tokens"]))
    if m.device.type == "cuda" and 16 * model.config.dropout % 1:
        torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's attention, up to torch 2.11, rounds dropout to 1/16ths (pytorch/pytorch#174245)
    return model, torch.optim.AdamW(param_groups(model, s["weight_decay"], s["decay"]), lr=s["lr"], betas=s["betas"], fused=True)


def stepper(model, optimizer, s, m, accumulate):
    "-> step([(x, y), ..], None, lr): updates the weights once, returns (loss, gradient norm before clipping), None"
    # With one micro-batch, a CUDA graph holds the whole step; with several, it holds one and is replayed for each, as the optimiser's
    # launches are few beside theirs. Compiled attention by blocks seeds dropout on the CPU: a graph would freeze the seed
    c = model.config
    values = c.n_embd // c.n_head * (1 if c.attn in ("mha", "dva_gate", "dva_outer") else 2)
    by_blocks = not fused_fits(c.n_embd // c.n_head, values, c.attn == "dva_outer") and c.block_size > values  # attention()'s way 1 on a GPU
    graphs = s["compile"] and m.device.type == "cuda" and m.world == 1 and not (by_blocks and c.dropout)

    def add(micro_batch, loss):
        "Accumulate a micro-batch's gradients and its share of the loss"
        with m.autocast():
            share = (m.net or model)(*micro_batch) / accumulate  # as each has as many targets
        share.backward()
        loss = loss + share.detach()
        return loss, loss  # Replayed's figures, which nobody reads here, and its state, which the next micro-batch adds to

    part = Replayed(add, optimizer, graphs and accumulate > 1, whole=False)

    def update(batch, _):
        loss = torch.zeros((), device=m.device)
        for i, micro_batch in enumerate(batch):
            if m.world > 1:
                m.net.require_backward_grad_sync = i == accumulate - 1
            _, loss = part(micro_batch, loss)
        norm = clip_(model, s["grad_clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=not part.on)
        return torch.stack((loss, norm)), None

    step = Replayed(update, optimizer, graphs and accumulate == 1)
    step.part = part
    return step


# -----------------------------------------------------------------------------
# Data: an epoch reads each window of block_size tokens once, in an order drawn from (seed, epoch), and drops an incomplete last batch


class Windows:
    "windows(step, part): a step's batch, or a part of it"

    def __init__(self, tokens, block_size, batch, seed, device=torch.device("cpu")):
        self.tokens, self.block_size, self.batch, self.seed, self.device = tokens, block_size, batch, seed, device
        self.count = (len(tokens) - 1) // block_size  # each also needs the token after its last, as a target
        if self.count < batch:
            die(f"the training data has {len(tokens):,} tokens, a step takes {batch} windows of {block_size}: "
                "lower --batch_tokens")
        self.per_epoch, self.epoch = self.count // batch, None  # steps an epoch; the epoch whose order is drawn

    def __call__(self, step, part):
        "The step's batch[part], part being a slice: inputs and targets, (n, block_size) int64 each"
        epoch, i = divmod(step, self.per_epoch)
        if epoch != self.epoch:
            self.epoch, self.order = epoch, np.random.default_rng((self.seed, epoch)).permutation(self.count)
        return read(self.tokens, self.order[i * self.batch:(i + 1) * self.batch][part], self.block_size, self.device)


def read(tokens, windows, T, device):
    "These windows' inputs and targets, (n, T) int64 each, on device"
    return inputs_and_targets(np.stack([tokens[i * T:i * T + T + 1] for i in windows.tolist()]), device)


def evaluate(model, tokens, eval_tokens, micro_batch, m, which="spread", stop=None):
    """Mean loss in nats per token over eval_tokens of the split. which: windows "spread" evenly, the "first" ones, or a numpy generator
    to draw them. All ranks share the work, without DDP. A signal in stop, a StopSignal, ends it: the value then means nothing."""
    T = model.config.block_size
    count = (len(tokens) - 1) // T
    n = min(count, max(1, eval_tokens // T))
    if isinstance(which, str):
        windows = np.arange(n) * count // n if which == "spread" else np.arange(n)
    else:
        windows = which.permutation(count)[:n]
    total, began = torch.zeros((), dtype=torch.float64), time.perf_counter()
    with evaluating(model), m.autocast():
        for i in range(m.rank * micro_batch, n, m.world * micro_batch):
            if stop and stop.at:
                break
            if m.rank == 0:
                progress(i, n, began, "evaluation", unit="windows", scale=1, after=5)
            x, y = read(tokens, windows[i:i + micro_batch], T, m.device)
            total += model(x, y).item() * len(x)
    end_progress()
    total = m.mean(total.to(m.device) if m.device.type == "cuda" else total)  # NCCL reduces on the GPU; Apple's GPUs have no fp64
    return total.item() * m.world / n


# -----------------------------------------------------------------------------
# Training


def main():
    typed = parse()
    path = os.path.join(typed.get("out_dir", "out/gpt"), "ckpt.pt")
    start, resume = origin(typed, "init_from", path)
    with one_line():
        loaded = load_checkpoint(start, "GPT") if start is not None else None
        ckpt = loaded if resume else None
        size = loaded["settings"]["size"] if loaded else typed.get("size")
        # a resumed run keeps its arithmetic, even if this machine would choose another
        dtype = ckpt["settings"]["dtype"] if ckpt else RECIPES.get(size, {}).get("dtype", "auto")
        m = machine(typed.get("device", "auto"), typed.get("dtype", dtype))
    if ckpt and ckpt["settings"]["device"] != m.device.type:
        m.note += f"; --dtype and --compile stay as on {ckpt['settings']['device']}, where the checkpoint was made, unless typed"
    say = report if m.rank == 0 else lambda text: None
    if not loaded and "size" not in typed:
        typed["size"], note = default_size(m)
        m.note += note

    # set-up: settings, data
    stored = loaded["settings"] | loaded["config"] if loaded else {}
    if loaded and not resume:  # a new run takes its size, model and data; the latter may be others, dropout and, with rope, the window, too
        free = {"data_dir", "dropout"} | ({"block_size"} if stored["pos"] == "rope" else set())
        text = () if "dataset" in typed else ("dataset", "data_dir")
        stored = {k: stored[k] for k in ("size", *text, *loaded["config"]) if k not in free & set(typed)}
        same_model(typed, stored, stored, "init_from", start)
        del loaded["optimizer"]  # 8 bytes a parameter
    s, c = settle(typed, stored, m)
    s["out_dir"] = os.path.dirname(path) or "."  # the folder may have been moved since
    s["dtype"], s["device"] = str(m.dtype).removeprefix("torch."), m.device.type
    os.makedirs(s["out_dir"], exist_ok=True)
    data = shared_dataset(s, m)
    check_source(loaded, start, data, resume)

    # divide the batch: before the model is made, which may take minutes, as this can fail
    T = GPTConfig(**c).block_size
    B, extra = divmod(s["batch_tokens"], T)
    micro = min(s["micro_batch"], max(1, B // m.world))
    if "micro_batch" not in typed and B % m.world == 0:  # not typed: take the largest divisor
        micro = max(i for i in range(1, micro + 1) if B // m.world % i == 0)
    if extra or B % (micro * m.world):
        micro = micro if "micro_batch" in typed else 1
        least = T * micro * m.world
        ways = [] if ckpt else [f"{max(1, round(s['batch_tokens'] / least)) * least}"]  # a resumed run keeps its batch
        ways += [] if extra else [f"another {'--micro_batch or ' * (B % m.world == 0)}number of processes"]
        die(f"--batch_tokens={s['batch_tokens']} is no multiple of block_size {T} x micro_batch {micro} x {m.world} processes = {least}: "
            f"take {', or '.join(ways)}")
    accumulate = B // (micro * m.world)
    if len(data.val) <= T:
        die(f"the validation data has {len(data.val):,} tokens, one window takes {T + 1}: prepare more text"
            + ", or lower --block_size" * (not loaded or not resume and stored["pos"] == "rope"))
    windows = Windows(data.train, T, B, s["seed"], m.device)

    # model, optimiser
    model, optimizer = build(s, c, data, m)
    c = asdict(model.config)
    if "hadamard" in c["attn_out"]:
        m.note += "; transform: " + hadamard_path(c["n_embd"], m.device, model.h[0].attn.order, c["attn_out"] == "head_hadamard")
    s.setdefault("min_lr", s["lr"] / 10)  # [1] names neither this nor the warm-up
    s.setdefault("warmup_steps", s["max_steps"] // 50)
    s.setdefault("eval_interval", max(1, s["max_steps"] // 20))

    first, evaluated = 0, None  # the next step; the last one evaluated
    if loaded:
        model.load_state_dict(loaded.pop("model"))  # pop, to free 12 bytes a parameter, with the optimiser's
    if ckpt:
        for group in ckpt["optimizer"]["param_groups"]:
            group |= dict(capturable=False, lr=0.0)  # plain numbers: a run with CUDA graphs saves lr as a tensor
        optimizer.load_state_dict(ckpt.pop("optimizer"))
        first = ckpt["step"]
        evaluated = first if ckpt["evaluated"] else None  # a signal can have come just before an evaluation
        if first > s["max_steps"]:
            die(f"--max_steps={s['max_steps']}: {path} is at step {first} already; take more, or sample from it with model.py")
    if s["compile"]:
        # in place, which keeps the checkpoint's keys. A smaller last batch in an evaluation is no reason for symbolic shapes
        model.compile(dynamic=False)

    flops = model.flops_per_token()
    peak, peak_from = peak_flops(m)
    log, versions = start_log(m, s, c, model, data, ckpt)
    # Other ranks wait here for rank 0, which may have died above. StopSignal comes later: with it, torchrun's SIGTERM would not end them
    m.parallel(model)
    update = stepper(model, optimizer, s, m, accumulate)
    say(m.note)
    out = f", {c['attn_out']}" if c["attn"] == "mha" else ""
    say(f"{s['size']}, {c['attn']}{out}: {model.num_params():,} parameters ("
        + ", ".join(f"{n} {v:,}" for n, v in model.param_breakdown().items()) + ")" + f"; weights from {start}" * (loaded is not ckpt))
    missing = [f"--{k}={v}" for k, v in (("n_head", 1), ("mlp", "none")) if k not in typed and c[k] != v]
    if c["attn"] in ("dva", "dva_outer") and missing and not loaded:
        say(f"note: in its paper DVA has one head and no feed-forward block; for that add {' '.join(missing)}")
    shares = f"{m.world} processes x " if m.world > 1 else ""
    say(f"{data.name}: {len(data.train):,} training tokens ({data.tokenizer}), {windows.per_epoch:,} steps an epoch; "
        f"a step: {B} x {T} tokens = {shares}{accumulate} micro-batch{'es' * (accumulate > 1)} x {micro} sequences")
    epochs = s["max_steps"] / windows.per_epoch
    falls = "" if s["schedule"] == "constant" else f" -> {s['min_lr']:g}"
    say(f"{s['max_steps']} steps, {epochs:.3g} epochs, lr {s['lr']:g}{falls}, "
        f"{'compiled (the first steps wait for that)' if s['compile'] else 'not compiled'}{', steps as CUDA graphs' * update.on}"
        f"{', micro-batches as CUDA graphs' * update.part.on}; "
        f"MFU against {peak / 1e12:.3g} TFLOP/s, {peak_from}")
    schedule_notes(s, typed, first, ckpt and ckpt["settings"]["max_steps"], say)
    if epochs > 50 and not ckpt:
        say(f"note: {epochs:.0f} epochs of so little text: validation loss will rise again; --max_steps={16 * windows.per_epoch} takes 16")
    if s["size"] == "tiny" and data.name == "pysource" and not loaded:
        say("note: Python's sources are too little text for tiny: take --size=nano, or --dataset=fineweb10B")

    def save(step):
        "To be called on every rank: all wait until the file is written"
        state = dict(kind="GPT", config=c, model=model.state_dict(), optimizer=optimizer.state_dict(), step=step,
                     evaluated=evaluated == step, settings=s, data=data.source, versions=versions)
        return m.all(m.rank > 0 or write_or_warn(path, lambda f: torch.save(state, f)))

    # loop
    stop = StopSignal()
    saved = True
    clock = due = time.perf_counter()  # due: the next save. gpt2_book's 2 GB take as long as 1,000 of its steps on a GPU
    spent, counted = 0.0, 0  # seconds and number of timed steps, evaluation and saving apart
    asked = None if s["paced"] else s["max_steps"]  # None: a resumed run keeps its schedule
    about = "about " * (data.tokenizer != "byte" and s["eval_tokens"] < len(data.val) - 1)  # as bytes per token are the whole split's
    lowest, step = (np.inf, 0), first  # validation loss since this start, its step
    while True:
        last = step >= s["max_steps"]
        if step != evaluated and (last or step % s["eval_interval"] == 0):
            val = evaluate(model, data.val, s["eval_tokens"], micro, m, s["eval_windows"], stop)
            if not m.all(not stop.at):
                stopped(m, path, step, save, say)
            if not val < 700:  # too much for exp, or nan
                diverged(m, path, f"step {step}: validation loss {val}")
            bits = val / np.log(2) / data.bytes_per_token
            say(f"step {step}/{s['max_steps']}  validation: {val:.4f} nats per {data.unit}, perplexity {np.exp(val):.2f}, "
                f"{about}{bits:.4f} bits per byte")
            more = {}
            if s["eval_windows"] == "first":  # [2]'s table has both splits; the book draws new training windows each time
                drawn = np.random.default_rng((s["seed"], step))
                more["train_loss"] = evaluate(model, data.train, s["eval_tokens"], micro, m, drawn, stop)
                if not m.all(not stop.at):
                    stopped(m, path, step, save, say)
                say(f"step {step}/{s['max_steps']}  training split: {more['train_loss']:.4f} nats per {data.unit}")
            evaluated, lowest = step, min(lowest, (val, step))
            log(step=step, val_loss=val, perplexity=float(np.exp(val)), bits_per_byte=bits, **more)
            if last or step and m.all(time.perf_counter() >= due):
                began = time.perf_counter()
                saved = save(step)
                due = time.perf_counter() + 10 * (time.perf_counter() - began)
            clock = time.perf_counter()
        if last:
            break

        torch.manual_seed(hash((s["seed"], step, m.rank)) & 0x7FFFFFFF)  # so dropout needs no saved state
        lr = lr_at(step, s["lr"], s["min_lr"], s["warmup_steps"], s["max_steps"], s["schedule"])
        starts = [(i * m.world + m.rank) * micro for i in range(accumulate)]
        figures, _ = update([windows(step, slice(i, i + micro)) for i in starts], None, lr)
        # the host waits for the device only here, and a step that went wrong is never saved. One reduction serves four figures: stopping
        # is above 0 if any process got a signal, so all stop at the same step
        figures = torch.cat((figures, torch.tensor([stop.number, spent / max(1, counted)], device=m.device)))
        loss, norm, stopping, pace = m.mean(figures).tolist()
        if not np.isfinite(loss + norm):
            diverged(m, path, f"step {step}: loss {loss}, gradient norm {norm}, at lr {lr:.2g}")

        now = time.perf_counter()
        dt, clock = now - clock, now
        if step >= first + 3:  # the first steps warm up
            spent, counted = spent + dt, counted + 1
        rate = s["batch_tokens"] / dt
        mfu = rate * flops / (peak * m.world)
        # compiling tells nothing of later steps
        left = None if s["compile"] and not pace else (pace or dt) * (s["max_steps"] - step - 1)
        say(f"step {step}/{s['max_steps']}  loss {loss:.4f}  lr {lr:.2e}  norm {norm:.2f}  {dt * 1e3:.0f} ms  {rate:,.0f} tokens/s  "
            f"MFU {mfu:.1%}" + ("" if left is None else f"  {duration(left)} left"))
        log(step=step, loss=loss, lr=lr, norm=norm, ms=dt * 1e3, tokens_per_s=rate, mfu=mfu, seconds_left=left)
        if stopping:
            stopped(m, path, step + 1, save, say)
        step += 1
        shorten(s, asked, step, pace, say)

    # at the end: a sample, and where everything lies
    if lowest[0] < np.inf and val > 1.02 * lowest[0]:
        say(f"note: validation loss was lowest at step {lowest[1]}, {lowest[0]:.4f}, and has risen since: take fewer steps, "
            f"{'a lower --lr' if loaded is not ckpt else 'a smaller model'} or more text")
    if m.device.type == "cuda":
        say(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB, {torch.cuda.max_memory_reserved() / 2**30:.2f} reserved")
    m.leave()
    if m.rank == 0:
        dispensable(lambda: say("sample:" + sample_text(model, data.tokenizer, "\n", min(400, 4 * T), seed=s["seed"])))
        if not saved:
            die(f"the last checkpoint could not be written to {path}")
        say(f"{path}: the model (python model.py --ckpt={quote(path)} --prompt=...); "
            f"{os.path.join(s['out_dir'], 'log.jsonl')}: each step's and evaluation's figures")


if __name__ == "__main__":
    run(main, memory="a smaller --micro_batch, which changes no loss, then, for a new model, a smaller --size or --block_size")
