"""
Train SHA-RNN, any of its ablations, or SHAQ, on parallel streams of text read in order.

    python train_shaq.py                                       # without a GPU: a small shaq, Python sources, 3 minutes
    python train_shaq.py --preset=sharnn                       # the baseline in the same size; every ablation is a preset
    python train_shaq.py --preset=shaq --dataset=enwik8        # the paper's run, for a GPU
    python train_shaq.py --resume                              # go on where out/shaq/ckpt.pt left off
    python model.py --ckpt=out/shaq/ckpt.pt --prompt="def "    # sample from it

The training split is cut into --batch streams of equal length, read side by side in windows of random length. Several processes share the
streams. Recurrent state and attention's memory carry over from window to window, without gradients, and are dropped when an epoch begins. A
resumed run continues exactly (on a GPU but for the order of some sums): the checkpoint holds state, memory and position, and all else depends
on seed, step and process only. A schedule that --max_minutes has shortened stays shortened. Evaluations also save, spending at most a tenth of
the time on it; the last one always saves. best.pt is the checkpoint with the best validation loss, saved whenever there is a better one.
Signals, nohup and torchrun: as in train_gpt.py.
"""
import argparse
import math
import os
import time
from dataclasses import asdict, fields
from shlex import quote

import numpy as np
import torch

from kernels import triton
from model import (LAMB, SHAQ, SHAQ_PRESETS, Replayed, SHAQConfig, clip_, detach_state, each, evaluating, inputs_and_targets, load_checkpoint,
                   lr_at, machine, peak_flops, sample_text, schedule_notes)
from prepare_data import (Parser, StopSignal, check_source, die, dispensable, diverged, duration, end_progress, flag01, number, one_line,
                          origin, progress, report, run, same_model, shared_dataset, shorten, start_log, stopped, unchanged, warn,
                          write_or_warn)

# -----------------------------------------------------------------------------
# Settings: the published ones, by default on CUDA, or a model that learns something in three minutes on a CPU. In this file s holds all
# settings, c the model's, m is the machine (model.py), T a window's tokens in each stream

SIZES = {
    "paper": dict(n_embd=1024, batch=16, bptt=1024, lr=2e-3, warmup_steps=800, epochs=32, mem_len=5000, dropout=0.1, schedule="constant"),
    "laptop": dict(n_embd=256, batch=16, bptt=128, lr=8e-3, warmup_steps=50, max_steps=1000, max_minutes=3.0, mem_len=512, dropout=0.0,
                   schedule="cosine", eval_interval=250, eval_tokens=2**17)}


def blocks(text):
    "argparse type: 4,2 -> (2, 4), none -> ()"
    return () if text == "none" else tuple(sorted(set(map(int, text.split(",")))))


blocks.__name__ = "N[,N]"  # argparse says "invalid N[,N] value"


def parse(argv=None, prog="train_shaq.py"):
    parser = Parser(prog=prog, description=__doc__, argument_default=argparse.SUPPRESS)
    add = parser.add_argument
    add("--preset", choices=SHAQ_PRESETS, help="which of the paper's models (default shaq)")
    add("--size", choices=SIZES, help="the published settings, or a model that learns something in three minutes on a CPU; below, defaults "
                                      "on CUDA are those of paper, but for --compile's (default paper on CUDA, else laptop)")
    add("--rnn", choices=["lstm", "qrnn"], help="replaces the preset's, as do all down to --n_head")
    add("--ff", choices=["boom", "ffn", "none"], help="feed-forward part of a block")
    add("--memory", choices=["full", "mean", "none"], help="what attention sees of earlier windows")
    add("--gates", type=flag01, help="gates on queries, keys and values")
    add("--rnn_residual", type=flag01, help="a residual round the recurrence")
    add("--attn_layers", type=blocks, metavar="N[,N]", help="blocks that attend, counted from 1: 3 or 2,4, or none")
    for name in ("n_layer", "n_head"):
        add(f"--{name}", type=number(int, 1, 2**24), help="instead of the preset's")
    add("--n_embd", type=number(int, 1, 2**24), help="width (default 1024 on CUDA, else 256)")
    add("--mem_len", type=number(int, 0), help="positions of memory (default 5000 on CUDA, else 512)")
    add("--dropout", type=number(float, 0, 1), help="(default 0.1 on CUDA, else 0)")
    add("--dataset", help="a name that prepare_data.py knows or was given (default pysource, prepared at once if need be)")
    add("--data_dir", help="where prepared data lies (default data)")
    add("--out_dir", help="where ckpt.pt, best.pt and log.jsonl go (default out/shaq)")
    add("--batch", type=number(int, 1), help="parallel streams, over all processes (default 16)")
    add("--bptt", type=number(int, 5), help="longest window; 1 in 20 is about half as long (default 1024 on CUDA, else 128)")
    add("--max_steps", type=number(int, 0), help="(default 32 epochs on CUDA, else 1000)")
    add("--max_minutes", type=number(float, 0),
        help="if max_steps would take longer at the pace so far, take fewer; 0: never (default 0 on CUDA, else 3)")
    add("--optimizer", choices=["lamb", "adamw"], help="(default lamb)")
    add("--lr", type=number(float, 0), help="peak learning rate (default 2e-3 on CUDA, else 8e-3)")
    add("--min_lr", type=number(float, 0), help="at the end of a cosine (default lr / 10)")
    add("--schedule", choices=["cosine", "constant"], help="after the warm-up (default constant on CUDA, else cosine)")
    add("--warmup_steps", type=number(int, 0), help="linear warm-up (default 800 on CUDA, else 50)")
    add("--weight_decay", type=number(float, 0, 1e6), help="(default 1.2e-6)")
    add("--grad_clip", type=number(float, 0), help="largest gradient norm, 0: no clipping (default 0.25)")
    add("--eval_interval", type=number(int, 1),
        help="steps between evaluations (default an epoch, at most 1 in 20 of all, on CUDA, else 250)")
    add("--eval_tokens", type=number(int, 1),
        help="how much of the validation and of the test split to read, from its start (default all on CUDA, else 2^17)")
    add("--seed", type=number(int, 0, 2**63 - 1), help="of initial weights, window lengths and dropout (default 1337)")
    add("--device", choices=["auto", "cpu", "cuda", "mps"], help="(default auto: cuda where that is, else cpu)")
    add("--dtype", choices=["auto", "float32", "bfloat16"], help="of autocast (default auto: bfloat16 where that is faster)")
    add("--compile", type=flag01, help="torch.compile the blocks, for windows of any length, and, on one GPU with lamb, replay steps as CUDA "
                                       "graphs, but for rnn=lstm and memory=mean (default 1 on CUDA, where Triton is installed)")
    add("--stage2", metavar="CKPT",
        help="start from the weights of this checkpoint with a fresh optimiser at half the rate, 5 epochs: the published second stage")
    add("--resume", action="store_true", help="continue OUT_DIR/ckpt.pt with its settings")
    return vars(parser.parse_args(argv))


# what may change on --resume; not eval_tokens, as best.pt compares losses on the same text
FREE = {"data_dir", "out_dir", "eval_interval", "device", "dtype", "compile", "max_steps"}


def settle(typed, stored, m):
    "Defaults, overridden by the size's, the preset's, the checkpoint, then typed flags -> settings, model settings"
    unchanged(typed, stored, FREE)
    s = dict(preset="shaq", dataset="pysource", data_dir="data", out_dir="out/shaq", optimizer="lamb", weight_decay=1.2e-6, grad_clip=0.25,
             eval_tokens=2**62, seed=1337, max_minutes=0.0, paced=False,
             size="paper" if m.device.type == "cuda" else "laptop", compile=m.device.type == "cuda" and triton is not None)
    given = stored | typed
    s |= SIZES[given.get("size", s["size"])] | SHAQ_PRESETS[given.get("preset", s["preset"])] | given
    s["paced"] |= stored.get("max_steps") is not None and "max_steps" in typed  # max_steps is settled: --resume ignores max_minutes
    if s["schedule"] == "cosine" and s.get("min_lr", 0) > s["lr"]:
        die(f"--min_lr={s['min_lr']:g} is above --lr={s['lr']:g}, and the cosine falls from the one to the other: lower it")
    return s, {f.name: s[f.name] for f in fields(SHAQConfig) if f.name in s} | dict(mean_window=s["bptt"])


# -----------------------------------------------------------------------------
# Model, optimiser, step


def build(s, c, data, m):
    "-> a new model on its device, its optimiser"
    torch.manual_seed(s["seed"])
    with one_line():
        model = SHAQ(SHAQConfig(**c | dict(vocab_size=data.vocab_size))).to(m.device)
    if m.device.type == "cuda" and 16 * model.config.dropout % 1:
        torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's attention, up to torch 2.11, rounds dropout to 1/16ths (pytorch/pytorch#174245)
    if s["optimizer"] == "lamb":
        return model, LAMB(model.parameters(), lr=s["lr"], weight_decay=s["weight_decay"])
    return model, torch.optim.AdamW(model.parameters(), lr=s["lr"], weight_decay=s["weight_decay"], fused=True)


def stepper(model, optimizer, s, m):
    "-> step((x, y), state, lr): updates the weights once, returns (loss, gradient norm before clipping), state"
    # No CUDA graphs for memory=mean: its open window has any of 1,000 lengths, each a graph of its own. Nor for LSTMs: by cuDNN's sources a
    # graph would hold some 16,000 kernels at full size (untried)
    c = model.config
    graphs = (s["compile"] and m.device.type == "cuda" and m.world == 1 and s["optimizer"] == "lamb" and c.memory != "mean"
              and c.rnn != "lstm")

    def update(batch, state):
        with m.autocast():
            loss, state = (m.net or model)(*batch, state)
        loss.backward()
        norm = clip_(model, s["grad_clip"])
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack((loss.detach(), norm)), detach_state(state)

    return Replayed(update, optimizer, graphs)


# -----------------------------------------------------------------------------
# Data: streams read in order, windows of random length


def window_lengths(rng, bptt, n):
    "As published: 95% of the windows are about bptt long, the others half that; at least 5, at most bptt. A stream's end cuts its last one"
    mean = np.where(rng.random(n) < 0.95, bptt, bptt // 2)
    return np.clip(rng.normal(mean, 5).astype(int), 5, bptt)


def window_length(seed, step, bptt):
    "Tokens that this step takes from each stream, were none of them to end"
    return int(window_lengths(np.random.default_rng((seed, step)), bptt, 1)[0])


def average_length(seed, bptt):
    "Mean tokens a step takes from each stream. Over just 1,000 windows it could be 1% off: a third of an epoch in 32"
    return float(window_lengths(np.random.default_rng(seed), bptt, 100_000).mean())


def read(tokens, streams, length, at, T, device):
    "A window of T at position `at` of each stream (i starts at i * length): inputs and targets, (len(streams), T) int64"
    return inputs_and_targets(np.stack([tokens[i * length + at:i * length + at + T + 1] for i in streams]), device)


def eval_streams(tokens, eval_tokens, streams):
    "-> (number of streams, at most the given, in which evaluate() reads a split; their length)"
    total = min(len(tokens) - 1, eval_tokens)
    if total < max(1, min(64, len(tokens) - 1)):  # streams shorter than 64 tokens say little
        die(f"{total:,} tokens are too few to evaluate on: raise --eval_tokens to 64 or more, or prepare more text")
    streams = min(streams, max(1, total // 64))
    return streams, total // streams


def evaluate(model, tokens, eval_tokens, bptt, m, streams=16, stop=None):
    """The published evaluation: loss in nats per token over the split's first eval_tokens, cut into streams (16; 8 of the test split) that are
    read in order side by side, each from an empty state; state and memory are carried over. A signal in stop, a StopSignal, ends it: the value
    then means nothing."""
    streams, length = eval_streams(tokens, eval_tokens, streams)
    mine = range(m.rank, streams, m.world)  # empty, if there are more processes than streams
    state, nats = None, torch.zeros((), dtype=torch.float32 if m.device.type == "mps" else torch.float64, device=m.device)  # mps has no fp64
    began = time.perf_counter()
    with evaluating(model), m.autocast():
        for at in range(0, length if mine else 0, bptt):
            if stop and stop.at:
                break
            if m.rank == 0:
                progress(at * streams, length * streams, began, "evaluation", unit="tokens", scale=1, after=5)
            T = min(bptt, length - at)
            x, y = read(tokens, mine, length, at, T, m.device)
            loss, state = model(x, y, state)
            nats += loss.to(nats.dtype) * (T * len(mine))
    end_progress()
    return (m.mean(nats) * m.world / (streams * length)).item()


# -----------------------------------------------------------------------------
# Training


def main():
    typed = parse()
    path = os.path.join(typed.get("out_dir", "out/shaq"), "ckpt.pt")
    best_path = os.path.join(os.path.dirname(path), "best.pt")
    start, resume = origin(typed, "stage2", path)
    stage2 = start is not None and not resume
    with one_line():
        ckpt = load_checkpoint(start, "SHAQ") if start is not None else None
        # keep the checkpoint's arithmetic, even if this machine would choose another
        m = machine(typed.get("device", "auto"), typed.get("dtype", ckpt["settings"]["dtype"] if ckpt else "auto"))
    if ckpt and ckpt["settings"]["device"] != m.device.type:
        m.note += f"; --dtype and --compile stay as on {ckpt['settings']['device']}, where the checkpoint was made, unless typed"
    say = report if m.rank == 0 else lambda text: None

    # set-up: settings, data
    stored = ckpt["settings"] | ckpt["config"] if ckpt else {}
    if ckpt:  # older ones name no size; of the two only paper has epochs
        stored.setdefault("size", "paper" if "epochs" in stored else "laptop")
    if stage2:
        names = "preset", "size", "rnn", "ff", "memory", "gates", "rnn_residual", "attn_layers", "n_layer", "n_head", "n_embd"
        same_model(typed, stored, names, "stage2", start)
        # the warm-up stays as it was
        stored |= dict(epochs=5, lr=stored["lr"] / 2, schedule="constant", max_steps=None, max_minutes=0.0, paced=False)
        drop = {"min_lr", "eval_interval", *typed} | ({"data_dir"} if "dataset" in typed else set())
        stored = {k: v for k, v in stored.items() if k not in drop}  # a new run: any other flag may be typed
    s, c = settle(typed, stored, m)
    s["out_dir"] = os.path.dirname(path) or "."  # the folder may have been moved since
    s["dtype"], s["device"] = str(m.dtype).removeprefix("torch."), m.device.type
    os.makedirs(s["out_dir"], exist_ok=True)
    data = shared_dataset(s, m)
    check_source(ckpt, start, data, resume)
    if s["batch"] % m.world:
        die(f"--batch={s['batch']} streams do not divide among {m.world} processes: take "
            + ("" if resume else f"a multiple of {m.world}, or ") + "another number of processes")
    streams = range(m.rank * s["batch"] // m.world, (m.rank + 1) * s["batch"] // m.world)
    length = (len(data.train) - 1) // s["batch"]
    if length < s["bptt"]:
        die(f"--bptt={s['bptt']}: expected at most the {length:,} tokens of a stream ({len(data.train):,} in {s['batch']} streams): "
            "prepare more text, or lower --bptt or --batch")
    for split, most in ((data.val, 16), (data.test, 8)):
        if split is not None:
            eval_streams(split, s["eval_tokens"], most)  # if too few, die before an earlier run's files are moved

    # model, optimiser
    model, optimizer = build(s, c, data, m)
    c = asdict(model.config)
    first, epoch, at, state = 0, 0, 0, None  # the next step: its number, epoch, position in the streams and incoming state
    best, minutes, evaluated = math.inf, 0.0, None
    if ckpt:
        model.load_state_dict(ckpt.pop("model"))  # pop, to free 12 bytes a parameter, the optimiser's included
    if resume:
        for group in ckpt["optimizer"]["param_groups"]:
            group["lr"] = 0.0  # CUDA graphs make it a tensor
        optimizer.load_state_dict(ckpt.pop("optimizer"))
        first, at, epoch, best, minutes = (ckpt[k] for k in ("step", "at", "epoch", "best", "minutes"))
        state = each(ckpt.pop("state"), lambda t: t[streams.start:streams.stop].to(m.device))  # this process's streams
        evaluated = first if ckpt["evaluated"] else None  # a signal can have come just before an evaluation
    if not resume:
        ckpt = None  # frees stage 2 of the old optimiser's state
    if s["compile"]:
        model.compile()
    per_epoch = length / average_length(s["seed"], s["bptt"]) + 0.5  # + 0.5: on average half of the last is cut off
    if s.get("max_steps") is None:  # not set, or reset by stage 2
        s["max_steps"] = math.ceil(s["epochs"] * per_epoch)
    if first > s["max_steps"]:
        die(f"--max_steps={s['max_steps']}: {path} is at step {first} already; take more, or sample from it with model.py")
    s.setdefault("min_lr", s["lr"] / 10)
    s.setdefault("eval_interval", max(1, round(min(per_epoch, s["max_steps"] / 20))))

    parts, flops = model.param_breakdown(), model.flops_per_token(s["bptt"])
    peak, peak_from = peak_flops(m)
    log, versions = start_log(m, s, c, model, data, ckpt)
    # Other ranks wait here for rank 0, which may have died above. StopSignal comes later: with it, torchrun's SIGTERM would not end them
    m.parallel(model)
    update = stepper(model, optimizer, s, m)
    say(m.note)
    say(f"{s['preset']}: {c['n_layer']} blocks of width {c['n_embd']}, {sum(parts.values()):,} parameters ("
        + ", ".join(f"{n} {v:,}" for n, v in parts.items()) + ")")
    say(f"{data.name}: {len(data.train):,} training tokens ({data.tokenizer}) in {s['batch']} streams of {length:,}, "
        f"about {per_epoch:,.0f} steps an epoch")
    say(f"{s['max_steps']} steps, {s['optimizer']}, lr {s['lr']:g} {s['schedule']}, "
        f"{'compiled (the first steps wait for that)' if s['compile'] else 'not compiled'}"
        f"{', steps as CUDA graphs' * update.on}; MFU against {peak / 1e12:.3g} TFLOP/s, {peak_from}")
    schedule_notes(s, typed, first, ckpt and ckpt["settings"]["max_steps"], say)

    def save(step, where=path):
        "To be called on every rank: each holds its own streams' state, and all wait until the file is written"
        content = dict(kind="SHAQ", config=c, model=model.state_dict(), optimizer=optimizer.state_dict(), step=step, at=at, epoch=epoch,
                       best=best, minutes=minutes, evaluated=evaluated == step, state=each(state, m.gather), settings=s, data=data.source,
                       versions=versions)
        return m.all(m.rank > 0 or write_or_warn(where, lambda f: torch.save(content, f)))

    # loop
    stop = StopSignal()
    saved = best_saved = True
    clock = due = time.perf_counter()  # due: the next save of ckpt.pt
    spent, counted = 0.0, 0  # seconds and number of timed steps, evaluation and saving apart
    asked = None if s["paced"] else s["max_steps"]  # None: a resumed run keeps its schedule
    train_bytes = data.meta["bytes"]["train"] / len(data.train)  # a token; data.bytes_per_token is the validation split's
    about = "about " * (data.tokenizer != "byte" and s["eval_tokens"] < len(data.val) - 1)  # as bytes per token are the whole split's
    step = first
    while True:
        last = step >= s["max_steps"]
        if step != evaluated and (last or step % s["eval_interval"] == 0):
            val = evaluate(model, data.val, s["eval_tokens"], s["bptt"], m, stop=stop)
            if not m.all(not stop.at):
                stopped(m, path, step, save, say)
            if not val < 700:  # too much for exp, or nan
                diverged(m, path, f"step {step}: validation loss {val}")
            bpc = val / math.log(2) / data.bytes_per_token
            say(f"step {step}/{s['max_steps']}  validation: {val:.4f} nats per {data.unit}, perplexity {math.exp(val):.2f}, "
                f"{about}{bpc:.4f} bits per byte (bpc)")
            log(step=step, val_loss=val, perplexity=math.exp(val), bits_per_byte=bpc, minutes=minutes)
            evaluated = step
            if val < best:
                best = val
                best_saved = save(step, best_path)
            if last or step and m.all(time.perf_counter() >= due):
                began = time.perf_counter()
                saved = save(step)
                due = time.perf_counter() + 10 * (time.perf_counter() - began)
            clock = time.perf_counter()
        if last:
            break

        T = min(window_length(s["seed"], step, s["bptt"]), length - at)
        torch.manual_seed(hash((s["seed"], step, m.rank)) & 0x7FFFFFFF)  # so dropout needs no saved generator
        lr = lr_at(step, s["lr"], s["min_lr"], s["warmup_steps"], s["max_steps"], s["schedule"])
        figures, state = update(read(data.train, streams, length, at, T, m.device), state, lr)
        # the host waits for the device only here, and a step that went wrong is never saved. One reduction serves four figures: stopping
        # is above 0 if any process got a signal, so all stop at the same step
        figures = torch.cat((figures, torch.tensor([stop.number, spent / max(1, counted)], device=m.device)))
        loss, norm, stopping, pace = m.mean(figures).tolist()
        if not math.isfinite(loss + norm):
            diverged(m, path, f"step {step}: loss {loss}, gradient norm {norm}, at lr {lr:.2g}")

        now = time.perf_counter()
        dt, clock = now - clock, now
        if step >= first + 3:  # the first steps warm up
            spent, counted = spent + dt, counted + 1
        rate = T * s["batch"] / dt
        mfu = rate * flops / (peak * m.world)
        # compiling tells nothing of later steps
        left = None if s["compile"] and not pace else (pace or dt) * (s["max_steps"] - step - 1)
        say(f"step {step}/{s['max_steps']}  loss {loss:.4f}  bpc {loss / math.log(2) / train_bytes:.3f}  lr {lr:.2e}  "
            f"norm {norm:.2f}  {dt * 1e3:.0f} ms  {rate:,.0f} tokens/s  MFU {mfu:.1%}"
            + ("" if left is None else f"  {duration(left)} left"))
        log(step=step, epoch=epoch, loss=loss, lr=lr, norm=norm, tokens=T * s["batch"], ms=dt * 1e3, tokens_per_s=rate, mfu=mfu,
            seconds_left=left, minutes=minutes)
        minutes += dt / 60
        at += T
        if at >= length:  # the next epoch starts without state
            at, epoch, state = 0, epoch + 1, None
        if stopping:
            stopped(m, path, step + 1, save, say)
        step += 1
        shorten(s, asked, step, pace, say)

    # at the end: the best checkpoint on the test split, a sample, and where everything lies
    if m.device.type == "cuda":
        say(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB, {torch.cuda.max_memory_reserved() / 2**30:.2f} reserved")
    try:
        chosen = load_checkpoint(best_path, "SHAQ")
    except ValueError:
        chosen = dict(best=None)
        if m.rank == 0 and os.path.exists(best_path):
            warn(f"note: {best_path} is damaged, or of another version: what follows is of the last step")
    best_there = m.all(chosen["best"] == best)  # a full disk may have left best.pt outdated
    if m.rank == 0 and chosen["best"] == best and not best_there:
        warn(f"note: not every process can read {best_path}, as --out_dir is not shared: what follows is of the last step")
    if best_there:
        model.load_state_dict(chosen.pop("model"))
    if data.test is not None:
        test = evaluate(model, data.test, s["eval_tokens"], s["bptt"], m, streams=8, stop=stop)
        if not m.all(not stop.at):
            say("stopped before the test split's end" + ": --resume reads it again" * saved)
            m.leave()
            raise SystemExit(130)
        bpc = test / math.log(2) * len(data.test) / data.meta["bytes"]["test"]
        partly = s["eval_tokens"] < len(data.test) - 1
        say(f"test, {'best checkpoint' if best_there else 'last step'}: {'about ' * (partly and data.tokenizer != 'byte')}{bpc:.4f} bits per "
            "byte" + f", of its first {s['eval_tokens']:,} {data.unit}s alone" * partly)
        log(step=step, test_loss=test, test_bits_per_byte=bpc)
    else:
        say(f"{data.name} has no test split: the best validation loss is the last word")
    m.leave()
    if m.rank == 0:
        dispensable(lambda: say("sample:" + sample_text(model, data.tokenizer, "\n", 400, seed=s["seed"])))
        show = best_path if best_there else path
        if saved or best_there:
            say(f"{show}: the model{' at its best validation loss' * best_there} (python model.py --ckpt={quote(show)} --prompt=...); "
                + f"{path}: at its last step; " * (best_there and saved)
                + f"{os.path.join(s['out_dir'], 'log.jsonl')}: each step's and evaluation's figures")
        if not (saved and best_saved):
            die(f"the last checkpoint could not be written to {best_path if saved else path}")


if __name__ == "__main__":
    run(main, memory="--compile=0 where it is on, as recorded steps keep memory of their own; for a new run a smaller --bptt, --batch, "
                     "--mem_len or, but for stage 2, --n_embd; for a resumed one, which keeps these, more processes")
