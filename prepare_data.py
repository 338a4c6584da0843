"""Prepare a data set for train_gpt.py and train_shaq.py; the helpers that all scripts share live here too.

    python prepare_data.py                                        # pysource: no network, seconds
    python prepare_data.py enwik8                                 # download (a broken one resumes), verify, split
    python prepare_data.py enwik8 --from_file enwik8.zip          # the same from a local copy; --url URL for a mirror
    python prepare_data.py --input a.txt b.txt --name mine --tokenizer=gpt2
    python prepare_data.py fineweb10B --shards 10                 # 10 x 100M GPT-2 tokens

pysource      the running Python's standard library, *.py, as bytes; val = the last tenth of the bytes
shakespeare   tiny Shakespeare, 1.1 MB of plays; 90/10
warandpeace   Project Gutenberg 2600, GPT-2 tokens; first 90% of the characters train, last 10% val
enwik8        the first 10^8 bytes of a 2006 English Wikipedia dump: 90M train, 5M val, 5M test
fineweb10B    FineWeb, 103 shards already tokenised with GPT-2's tokenizer; --from_file takes a folder of shards
--input       any files, in the given order, as one stream; 90/10; UTF-8 is needed for --tokenizer=gpt2 only

DATA_DIR/NAME gets one .bin file per split (fineweb10B: per shard) and, last, meta.json, which marks it as complete.
A .bin file has llm.c's format: 256 int32 (magic 20240520, version 1, number of tokens, zeros), then the tokens as uint16,
all little-endian. Texts are held in memory while they are prepared; tokens are read through memmap.
"""
import argparse
import bisect
import codecs
import contextlib
import dataclasses
import difflib
import email.utils
import errno
import functools
import hashlib
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from shlex import quote

import numpy as np

# ---------------------------------------------------------------------------------------------------------------------
# Shared by every script: errors in one line, flags, atomic files, progress

def die(message, status=1):
    """Print one line on stderr and exit: for errors that users can cause and can fix."""
    after_the_first()
    # a half-finished progress line is ended first
    warn("\n" * progress.open + f"error: {' '.join(map(str.strip, str(message).splitlines()))}")
    raise SystemExit(status)


def after_the_first():
    """All of torchrun's processes make most mistakes alike: wait, so that a machine's first one reports it and torchrun ends the others."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # else StopSignal would take it, and the wait go on
        time.sleep(1)


def warn(text):
    """Print on stderr, unless nobody reads it any more: in `train_gpt.py 2>&1 | tee log`, Ctrl-C ends tee, too."""
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)  # a foreign checkpoint or server may send codes that clear a screen
    with contextlib.suppress(OSError):
        print(f"{text}\n", end="", file=sys.stderr, flush=True)  # in one write: torchrun's unbuffered processes may print at once


@contextlib.contextmanager
def one_line():
    """If the code inside raises a ValueError, whose message is one line for the user, print that line and exit."""
    try:
        yield
    except ValueError as e:
        die(e)


def run(main, again="", memory="a smaller model, batch, window or file"):
    """Call main(); Ctrl-C, a full disk and the like print one line. again, memory: advice if interrupted, if out of memory."""
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # None where it was closed
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # the terminal may lack a sample's characters
            stream.reconfigure(errors="backslashreplace")
    try:
        in_one_line(main, again, memory)
    except SystemExit as e:
        group = getattr(sys.modules.get("torch"), "distributed", None)
        if group and group.is_available() and group.is_initialized():  # gloo's threads could abort Python while it shuts down
            sys.stdout.flush()
            os._exit(e.code or 0)
        raise


def out_of_memory(e):
    "Whether this error says that memory ran out, on whatever system or device"
    too_much = "out of memory|(can't allocate|not enough) memory|can't start new thread|calculation overflowed"
    return isinstance(e, MemoryError) or re.search(too_much, str(e))


def in_one_line(main, again, memory):
    try:
        main()
    except KeyboardInterrupt:
        die("interrupted" + again, 130)
    except OSError as e:
        advice = {**dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "; free some space and type the same command again"),
                  **dict.fromkeys((errno.EACCES, errno.EPERM), "; choose what you may read, and write to, or start from a folder of yours, "
                                  "where out/ and data/ then are made"),  # EPERM: a Mac's Documents and Desktop, without leave
                  errno.ENOENT: ": is the folder that it is in there?", errno.EROFS: "; choose a place you may write to, or start from there",
                  errno.EEXIST: ", and is no folder; choose another place", errno.ENOTDIR: "; choose another place",
                  errno.EISDIR: ", where a file should be; move it away", errno.EPIPE: ": what reads the output has ended"}
        name = e.filename2 or e.filename  # a file that is moved has two
        where = "" if name is None else f"{name or '(no name)'}: "
        die(f"{where}{e.strerror or e}{advice.get(e.errno, '')}")
    except Exception as e:  # PyTorch's own are RuntimeErrors, Triton's are not
        for words, advice in (("ptxas fatal", "Triton's assembler may be older than this GPU: install a newer Triton, set "
                               "TRITON_PTXAS_BLACKWELL_PATH to a newer CUDA's ptxas, or uninstall triton and take --compile=0 "
                               f"({''.join(re.findall('ptxas.*(?:fatal|error) *:.*', str(e))[:1])})"),
                              ("C++ compiler", "torch.compile wants a C++ compiler: install g++, or take --compile=0"),
                              ("C compiler", "Triton wants a C compiler: install gcc, or uninstall triton and take --compile=0"),
                              ("too old to be", "this GPU is too old for Triton: uninstall that and take --compile=0"),
                              ("file too short", "torch.compile's cache holds a file that a kill cut short: delete the folder "
                               f"{os.environ.get('TORCHINDUCTOR_CACHE_DIR', 'that it is in')}, or take --compile=0"),
                              ("working triton", "torch.compile wants Triton on a GPU: install it, or take --compile=0")):
            if words in str(e):
                die(advice)
        if re.search("gloo.*Connection (closed by peer|reset)", str(e)):
            die("another process ended, so this one ends too; the error of that one, if it could print it, is above")
        if not out_of_memory(e):
            if "NCCL" in str(e):
                die(f"the processes' GPUs cannot talk ({str(e).splitlines()[0]}): if another process printed an error, that is why; else "
                    "NCCL_DEBUG=INFO tells more, and NCCL_IB_DISABLE=1 goes without InfiniBand")
            raise
        die(f"out of memory: take {memory} ({str(e).splitlines()[0] if str(e) else 'MemoryError'})")


def report(text):
    """Print on stdout; if that is a full disk or a closed pipe, the lines are lost, but the run goes on."""
    try:
        print(text, flush=True)
    except OSError as e:
        sys.stdout = open(os.devnull, "w")
        warn(f"warning: stdout: {e.strerror}; going on without it")


ELSEWHERE = {"--batch_size": "--batch_tokens", "--total_batch_size": "--batch_tokens", "--device_batch_size": "--micro_batch",
             "--gradient_accumulation_steps": "--micro_batch", "--sequence_length": "--block_size", "--context_length": "--block_size",
             "--learning_rate": "--lr", "--max_lr": "--lr", "--warmup_iters": "--warmup_steps", "--lr_decay_iters": "--max_steps",
             "--max_iters": "--max_steps", "--num_iterations": "--max_steps", "--eval_iters": "--eval_tokens",
             "--val_loss_every": "--eval_interval"}


def nearest(word, words):
    """'; did you mean X?', X being our name for another script's flag or the closest of words; '' if none."""
    other = ELSEWHERE.get(word.replace("-", "_").replace("__", "--", 1))
    close = [other] if other in words else difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def flag01(text):
    """argparse type for switches, since type=bool takes '0' and 'false' for True: --compile=0|1|false|true."""
    try:
        return {"0": False, "false": False, "1": True, "true": True}[text.lower()]
    except KeyError:
        raise argparse.ArgumentTypeError(f"expected 0 or 1, got {text!r}") from None


def number(kind, low, high=None):
    """argparse type: an int or a float from low to high (None: to 2^62, or whatever is finite)."""
    most = high if high is not None else 2**62 if kind is int else sys.float_info.max

    def parse(text):
        value = kind(text)
        if not low <= value <= most:  # a nan, too
            bound = f"to {most}" if high is not None or value > most else "or more"
            raise argparse.ArgumentTypeError(f"expected {low} {bound}, got {text}")
        return value
    parse.__name__ = kind.__name__  # argparse says "invalid int value"
    return parse


class Parser(argparse.ArgumentParser):
    """argparse that takes --a_b and --a-b alike, abbreviates nothing, shows defaults beside help texts, and errs in one line, status 2."""

    class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
        def _get_help_string(self, action):
            return action.help if action.default in (None, "", "\n") else super()._get_help_string(action)  # no default to show

    def __init__(self, **kw):
        super().__init__(allow_abbrev=False, formatter_class=self.Help, **kw)

    def parse_known_args(self, args=None, namespace=None):
        args = list(sys.argv[1:] if args is None else args)
        flags = {s.replace("-", "_"): s for s in self._option_string_actions}
        for i, arg in enumerate(args):
            flag, equals, value = arg.partition("=")
            if flag.startswith("--") and " " not in flag:  # looked up before argparse sees it, so that a typo is reported as a typo
                known = flags.get(flag.replace("-", "_"))
                if known is None:
                    self.error(f"unknown flag {flag}{nearest(flag, flags.values())}")
                if equals and self._option_string_actions[known].nargs == 0:
                    self.error(f"{flag} takes no value, got {value!r}")
                if re.match("~(/|$)", value) and flag != "--prompt":  # shells keep ~ in --out_dir=~/x: a folder ~ is a trap
                    value = os.path.expanduser(value)
                args[i] = known + equals + value
        return super().parse_known_args(args, namespace)

    def error(self, message):
        after_the_first()
        self.exit(2, f"{self.prog}: {message} (--help lists all)\n")


def write_atomic(path, write):
    """write(f) fills a temporary binary file that then replaces path: all or nothing, even if the power fails. If a process is killed, the
    next overwrites its temporary file; claim() and alone() prevent two writers at once."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException as e:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        if isinstance(e, OSError):
            e.filename = path  # a full disk names no file
        raise


def write_or_warn(path, write):
    """write_atomic, but only warn if that fails (a full disk) -> whether the file was written."""
    try:
        write_atomic(path, write)
        return True
    except (OSError, RuntimeError) as e:
        if isinstance(e.__context__, KeyboardInterrupt):  # torch.save takes it for a failed write
            raise e.__context__ from None
        if isinstance(e, RuntimeError) and isinstance(e.__context__, OSError):
            e = e.__context__  # torch.save turns a full disk into a RuntimeError that does not name it
        full = getattr(e, "errno", None) in (None, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        warn(f"warning: could not write {path} ({getattr(e, 'strerror', None) or (str(e).splitlines() or [type(e).__name__])[0]}); "
             f"{'the one before it stays' if os.path.exists(path) else 'free some space' if full else 'there is none before it'}")
        return False


def duration(seconds):
    """3725 -> '1h02m', 125 -> '2m05s'"""
    s = int(seconds + 0.5)
    return f"{s // 3600}h{s // 60 % 60:02}m" if s >= 3600 else f"{s // 60}m{s % 60:02}s"


def progress(done, total, t0, what, start=0, unit="MB", scale=1e6, after=0):
    """Print on stderr that done of total (None: unknown) is reached, at most every 0.1 s on a terminal, else every 10 s; before `after` seconds
    have passed, only the end. It began with start, at time t0."""
    now, tty, end = time.perf_counter(), sys.stderr.isatty(), done == total
    if not end and (now - t0 < after or now - progress.last < (0.1 if tty else 10)):
        return
    rate = max(done - start, 1) / max(now - t0, 1e-9)
    digits = 1 if scale > 1 else 0
    line = f"{what}: {done / scale:,.{digits}f}"
    if total:
        line += f" of {total / scale:,.{digits}f} {unit} ({done / total:.0%})"
    line += f", {rate / scale:,.1f} {unit}/s"
    line += f", {duration((total - done) / rate)} left" if total and not end else ""
    progress.last, progress.open = now, tty and not end
    with contextlib.suppress(OSError):  # as in warn()
        print("\r" + line.ljust(79) if tty else line, end="" if progress.open else "\n", file=sys.stderr, flush=True)


progress.last, progress.open = -1e9, False


def end_progress():
    "On a terminal, the next line takes the place of an unfinished line of progress"
    if progress.open:
        progress.open = False
        with contextlib.suppress(OSError):
            print(end="\r" + 79 * " " + "\r", file=sys.stderr, flush=True)


def git_commit():
    """This checkout's commit, followed by '+' if files differ from it; '' outside a git checkout."""
    try:
        out = subprocess.run(["git", "describe", "--always", "--dirty=+", "--abbrev=12"], cwd=os.path.dirname(os.path.abspath(__file__)),
                             capture_output=True, text=True, timeout=10)
        return out.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


# ---------------------------------------------------------------------------------------------------------------------
# Shared by train_gpt.py and train_shaq.py alone: the log, signals, where a run starts, what it may change, max_minutes, how it ends

def claim(file):
    """Lock an open file for this process; dies if another one has it."""
    try:
        import fcntl
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        die(f"another run writes {file.name}: wait for its end, or take another --out_dir")
    except (ImportError, OSError):  # Windows, some network file systems
        pass


class Log:
    """OUT/log.jsonl: one JSON object a line, the first says what ran. If the disk is full, records are lost, but the run goes on. A new run
    keeps the checkpoints and the log of the run before it as *.old, and dies where a full disk left that run best.pt alone."""

    def __init__(self, path, first, resume_step=None, evaluated=True, written=None):
        """resume_step: the checkpoint's step, if the run resumes. The earlier log is then kept up to there: the records of all earlier steps
        and, if evaluated, the evaluation at that step (if not, the resumed run will make it). written: the checkpoint's mtime, in ns."""
        self.path, self.file = path, open(path, "a+b", buffering=0)
        claim(self.file)
        folder = os.path.dirname(path) or "."
        there = lambda name: os.path.exists(os.path.join(folder, name))
        keep = 0  # bytes of the log that stay
        if resume_step is None:  # an earlier run makes way
            if there("best.pt") and there("ckpt.pt.old") and not there("ckpt.pt"):
                self.file.seek(0)
                if self.file.read().count(b'"val_loss"') > 1:  # it may be better than a start
                    die(f"{folder}/best.pt is all that the last run there could save: move it away, or take another --out_dir")
            # a run without ckpt.pt never replaces one that had it
            if there("ckpt.pt") or not there("ckpt.pt.old") and (there("best.pt") or os.path.getsize(path)):
                self.file.seek(0)  # copied, not moved: it is locked. By this handle: closing another one would end the lock
                write_atomic(f"{path}.old", lambda f: shutil.copyfileobj(self.file, f))
                kept = ["log.jsonl.old"]
                for name in ("best.pt", "ckpt.pt"):  # ckpt.pt last: if this is killed on the way, the next run does it again
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(os.path.join(folder, name), os.path.join(folder, f"{name}.old"))
                        kept.append(f"{name}.old")
                report(f"note: {folder} held an earlier run{', which --resume would have continued' * ('ckpt.pt.old' in kept)}; until the "
                       f"next one it is kept in {', '.join(kept)}")
        else:  # its own log, cut back to the checkpoint
            if written and os.stat(os.path.join(folder, "ckpt.pt")).st_mtime_ns != written:
                die(f"{folder}/ckpt.pt is newer than what this run has read: another has just ended. Type the same command again")
            self.file.seek(0)
            lines, reached = self.file.read().splitlines(True), -1  # reached: the last step that stays
            try:
                for i, line in enumerate(lines, 1):
                    record = json.loads(line)  # a loss at resume_step came after the checkpoint, a val_loss before it
                    if record.get("step", -1) >= resume_step + (evaluated and "val_loss" in record) or not line.endswith(b"\n"):
                        break
                    keep, reached = keep + len(line), record.get("step", reached)
            except (ValueError, TypeError, AttributeError, RecursionError):  # a crash can only cut the last line short
                if i < len(lines):
                    write_atomic(f"{path}.damaged", lambda f: f.writelines(lines))
                    warn(f"note: {path}, line {i} is damaged; it and all that follows is dropped, but kept in {path}.damaged")
            if reached < resume_step - 1:
                warn(f"note: {path} lacks the steps from {reached + 1} to {resume_step - 1}: a plot against time would be that much too early")
        self.file.truncate(keep)
        self(**first)

    def __call__(self, **record):
        line = json.dumps(record).encode() + b"\n"
        end = self.file.seek(0, os.SEEK_END)
        try:
            if self.file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if "val_loss" in record:  # then a checkpoint may follow, which will be on disk
                with contextlib.suppress(OSError):
                    os.fsync(self.file.fileno())
        except OSError as e:
            with contextlib.suppress(OSError):
                self.file.truncate(end)  # whole records only
            if self.path:
                warn(f"warning: {self.path}: {e.strerror}; training goes on, this record is lost")
            self.path = None  # said once


def start_log(m, s, c, model, data, ckpt):
    """-> (main()'s log function, a no-op except on rank 0; the software versions, for checkpoints). ckpt: what the run resumes, or None.
    Dies if the processes are not of one run: replicas would drift apart unseen."""
    done = [ckpt[k] for k in ("step", "evaluated", "written")] if ckpt else []
    for what, mine in dict(flags=[s | dict(data_dir="", out_dir=""), c], data=data.source, checkpoints=ckpt and ckpt["step"]).items():
        if not m.same(mine):
            die(f"the processes differ in their {what}: type the same command, with --compile, whose default hangs on what is installed, "
                "on each machine, with --data_dir and --out_dir that all share")
    found = {name: sys.modules.get(name) for name in ("torch", "numpy", "triton")}
    versions = dict(python=sys.version.split()[0], git=git_commit()) | {name: v and str(v.__version__) for name, v in found.items()}
    if m.rank > 0:
        return lambda **record: None, versions
    first = dict(settings=s, config=c, params=sum(p.numel() for p in model.parameters()), machine=m.note, versions=versions)
    files = 1 if ckpt else 3 if "preset" in s else 2  # still to come: ckpt.pt, SHAQ's best.pt, and what replaces one of them
    want, free = files * 12 * first["params"], shutil.disk_usage(s["out_dir"]).free  # weights and the optimiser's two means in fp32
    if free < want:
        warn(f"note: {s['out_dir']} has {free / 1e6:,.0f} MB free, checkpoints want {want / 1e6:,.0f}: free some space meanwhile")
    return Log(os.path.join(s["out_dir"], "log.jsonl"), first, *done), versions


class StopSignal:
    """Ctrl-C, SIGTERM or a closed terminal (unless nohup ignores it, which torchrun undoes) sets .number and the time .at, and the loop saves
    after its step, or in the middle of an evaluation, which --resume then repeats; not before the first step. A second signal ends the run at
    once, but not within the first second: batch systems signal every process, and torchrun passes its own signal on to each."""

    def __init__(self):
        self.number = self.at = 0
        signal.signal(signal.SIGINT, self.receive)
        signal.signal(signal.SIGTERM, self.receive)
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # Windows has none
            signal.signal(signal.SIGHUP, self.receive)

    def receive(self, number, frame):
        if not self.number:
            self.number, self.at = number, time.monotonic()
            with contextlib.suppress(OSError):  # stderr may be closed. Not print(): the signal may interrupt one
                os.write(sys.stderr.fileno(), b"\nstopping after this step; a second time: at once, without saving\n")
        elif time.monotonic() > self.at + 1:
            raise KeyboardInterrupt


def as_typed(value):
    """(2, 4) -> '2,4', () -> 'none', True -> '1': a setting as a flag takes it"""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return str(int(value) if isinstance(value, bool) else value)


def origin(typed, flag, path):
    """Pops --resume; --<flag> starts a new run from another's weights -> the checkpoint to start from (None: from new weights), whether to
    resume it. path: the run's own checkpoint"""
    resume, other = typed.pop("resume", False), typed.get(flag)
    if resume and other is not None:
        die(f"--{flag} starts a new run and --resume continues one: type one of the two")
    here = os.path.realpath(os.path.dirname(path))
    if other and here in (os.path.realpath(os.path.dirname(other)), os.path.dirname(os.path.realpath(other))):  # the latter is a link's
        die(f"--{flag}={other} lies in --out_dir, whose earlier run the new one would put aside: type another --out_dir")
    return path if resume else other, resume


def same_model(typed, stored, names, flag, path):
    "Die if a typed flag differs in one of these settings from path's model: a new run goes on with that"
    for k in names:
        if typed.get(k, stored[k]) != stored[k]:
            die(f"{path} is of --{k}={as_typed(stored[k])}, and --{flag} goes on with its model: drop --{k}={as_typed(typed[k])}")


def unchanged(typed, stored, free):
    """Die if a flag typed on --resume differs from the checkpoint's setting, unless it is one of those that are free to change."""
    for name, value in typed.items():
        if name in stored and name not in free and stored[name] != value:
            die(f"--{name}={as_typed(value)}: the checkpoint was trained with {as_typed(stored[name])}; "
                + "--max_steps=N goes on to step N, " * (name == "max_minutes")
                + "drop the flag, or start anew without --resume in another --out_dir")


def shorten(s, asked, step, pace, say):
    """Cut the schedule to the steps that fit into max_minutes at the pace so far, but to no more than asked (None: leave it as it is). Looks
    every 25 steps, and once the time is up before the first look. pace: seconds a step, averaged over processes so that all decide alike;
    0 while unknown. s["paced"]: max_steps was set by an earlier look, which later ones may move, or is one that a resumed run keeps, as found
    or as --resume --max_steps set it."""
    up = not s["paced"] and pace * (step - 4) > 60 * s["max_minutes"]
    if step % 25 and not up or not pace or not s["max_minutes"] or asked is None:
        return
    fits = max(step, int(min(asked, 60 * s["max_minutes"] / pace)))
    if s["paced"]:  # cut at most half of what is left at a time: a stall must not end the run while its learning rate is high
        fits = max(fits, (step + s["max_steps"]) // 2)
    if fits < asked == s["max_steps"]:
        say(f"note: {s['max_minutes']:g} minutes will do for {fits} steps here"
            + f", {min(s['warmup_steps'], fits)} of them warm-up" * (2 * s["warmup_steps"] > fits) + "; the schedule now ends there, sooner or "
            "later as the pace changes (a new run with --max_minutes=0 takes all, --resume --max_steps=N goes on to N)")
    s["paced"], s["max_steps"] = True, fits


def diverged(m, path, what):
    """End a run that diverged; called on every rank, as all have the same figures."""
    m.leave()
    kept = f"{path} stays as it was" if os.path.exists(path) else "there is no checkpoint yet"
    die(f"{what}. Start anew, with a lower --lr or more --warmup_steps; {kept}")


def stopped(m, path, step, save, say):
    """End a run that got a signal; called on every rank, as save(step) is, which says whether the file was written."""
    if not step:  # nothing is learnt: it would only take an earlier run's place
        kept = f" (the run before it is kept in {path}.old)" * os.path.exists(f"{path}.old")
        say(f"stopped before the first step, with nothing to save{kept}")
    elif save(step):
        say(f"stopped; saved step {step} in {path}; go on with --resume --out_dir={quote(os.path.dirname(path) or '.')}")
    m.leave()
    raise SystemExit(130)


def dispensable(show):
    """Call show(), which prints the sample at a run's end, when all is saved. A signal cuts it short, and it alone: later ones (torchrun passes
    its own on) change nothing. Without memory or a tokenizer there is none, which is said. The run goes on to its last lines each time."""
    def handle(how):
        for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):  # Windows has no SIGHUP
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, how)

    def cut(number, frame):
        handle(signal.SIG_IGN)
        raise KeyboardInterrupt

    try:
        try:
            handle(cut)
            show()
        finally:
            handle(signal.SIG_IGN)
    except (SystemExit, KeyboardInterrupt):
        pass
    except Exception as e:
        if not out_of_memory(e):
            raise
        warn("note: no memory is left for a sample")
    end_progress()


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers

VOCAB_SIZE = {"byte": 256, "gpt2": 50257}  # to add one of at most 65,536 tokens: its size here, its tiktoken encoding in bpe(); see safe_chunks


@functools.lru_cache(None)
def gpt2():
    """tiktoken's r50k_base: the same tokens as its "gpt2", from one hash-checked file, not two."""
    try:
        import tiktoken
    except ImportError:
        die("the gpt2 tokenizer needs tiktoken: pip install tiktoken (or take --tokenizer=byte)")
    try:
        return tiktoken.get_encoding("r50k_base")
    except Exception as e:  # whatever its HTTP library raises
        url = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
        die(f"tiktoken cannot load r50k_base ({type(e).__name__}); without a network: save {url} as "
            f"{hashlib.sha1(url.encode()).hexdigest()} in a folder and set TIKTOKEN_CACHE_DIR to that folder "
            f"(now {os.environ.get('TIKTOKEN_CACHE_DIR') or 'not set'})")


def bpe(tokenizer):
    return {"gpt2": gpt2}[tokenizer]()


def encode(tokenizer, text):
    """str -> list of int; 'byte' gives the UTF-8 bytes. No special tokens: '<|endoftext|>' is ordinary text."""
    return list(text.encode()) if tokenizer == "byte" else bpe(tokenizer).encode_ordinary(text)


def decode(tokenizer, ids):
    """Sequence of int -> str; bytes that are no UTF-8 become U+FFFD."""
    ids = list(ids)  # bytes(an array) would be its raw memory
    return bytes(ids).decode(errors="replace") if tokenizer == "byte" else bpe(tokenizer).decode(ids)


def safe_chunks(text, size):
    """Cut text into pieces of about size characters whose tokens, joined, are those of the whole text. Each cut is between a visible
    character and a space or line break: GPT-2's pattern always splits there, whatever follows, as it looks ahead only from runs of spaces."""
    boundary, start = re.compile(r"\S(?=[ \n])"), 0
    while start < len(text):
        match = boundary.search(text, start + size - 1)
        end = match.end() if match else len(text)
        yield text[start:end]
        start = end


def tokenize(raw, tokenizer, what, size=1 << 20):
    """bytes -> uint16 array of tokens; gpt2 takes pieces of about size characters on all cores."""
    if tokenizer == "byte":
        return np.frombuffer(raw, np.uint8).astype(np.uint16)
    tokens_of, chunks = bpe(tokenizer).encode_ordinary, list(safe_chunks(raw.decode(), size))
    done, total, t0, tokens = 0, sum(map(len, chunks)), time.perf_counter(), []
    pool = ThreadPoolExecutor(os.cpu_count())  # threads suffice, as tiktoken releases the GIL
    try:
        for chunk, ids in zip(chunks, pool.map(lambda text: np.array(tokens_of(text), np.uint16), chunks)):
            tokens.append(ids)
            done += len(chunk)
            progress(done, total, t0, f"tokenising {what}", unit="Mchar")
    finally:
        pool.shutdown(cancel_futures=True)
    return np.concatenate(tokens)


# ---------------------------------------------------------------------------------------------------------------------
# Reading

MAGIC, VERSION, HEADER = 20240520, 1, 256 * 4


def open_bin(path, hint):
    """The tokens of one .bin file as a read-only uint16 array over a memory map; dies on a missing or damaged file."""
    if not os.path.isfile(path):
        die(f"{path} does not exist; type: {hint}")
    size = os.path.getsize(path)
    head = np.fromfile(path, "<i4", 3)
    if size < HEADER or head[0] != MAGIC or head[1] != VERSION:
        die(f"{path} is no token file (magic {MAGIC}, version {VERSION} expected); type: {hint}")
    if size != HEADER + 2 * head[2].item() or size == HEADER:
        die(f"{path} is truncated or damaged: its header says {head[2]:,} tokens, the file holds "
            f"{(size - HEADER) / 2:,.10g}; type: {hint}")
    return np.asarray(np.memmap(path, "<u2", "r", HEADER))  # plain ndarray: slices cost far less than a memmap's


class Tokens:
    """The tokens of one or several .bin files as one sequence: len(t), and t[a:b] -> int64 array (b - a,)."""

    def __init__(self, paths, vocab_size, hint="python prepare_data.py --help"):
        self.paths, self.vocab_size, self.hint = list(paths), vocab_size, hint
        self.maps = [open_bin(path, hint) for path in self.paths]
        self.starts = np.cumsum([0] + [len(m) for m in self.maps]).tolist()

    def __len__(self):
        return self.starts[-1]

    def __getitem__(self, s):
        a, b, step = s.indices(len(self))
        if step != 1:
            raise IndexError("Tokens are read as t[a:b]")
        parts = []
        while a < b:
            i = bisect.bisect_right(self.starts, a) - 1
            parts.append(self.maps[i][a - self.starts[i]:b - self.starts[i]])
            if parts[-1].max() >= self.vocab_size:  # on a GPU this would be a device-side assert far from its cause
                die(f"{self.paths[i]} holds token {parts[-1].max()}, outside the vocabulary of {self.vocab_size}; type: {self.hint}")
            a += len(parts[-1])
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)


@dataclasses.dataclass
class Dataset:
    """A prepared data set; meta is meta.json as a dict. bits/byte = nats/token / ln 2 / bytes_per_token."""
    name: str
    tokenizer: str
    vocab_size: int
    bytes_per_token: float  # of the validation split
    train: Tokens
    val: Tokens
    test: Tokens | None
    meta: dict

    @property
    def source(self):
        "What checkpoints record of it, with one SHA-256 for however many files"
        known = self.meta.get("sha256")
        known = known if isinstance(known, str) else hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
        return dict(name=self.name, tokenizer=self.tokenizer, sha256=known, tokens=len(self.train))

    @property
    def unit(self):
        return "byte" if self.tokenizer == "byte" else "token"


NAME = r"\w[\w.-]*"


@contextlib.contextmanager
def alone(folder):
    """While inside, others that would prepare folder wait."""
    os.makedirs(folder, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):  # Windows, some network file systems
            import fcntl
            lock = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                warn(f"waiting for another process, which prepares {folder}")
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def load_dataset(name, data_dir="data"):
    """Open DATA_DIR/NAME -> Dataset. If it is not there, pysource is prepared; for any other, die with the command to type."""
    folder = os.path.join(data_dir, name)
    place = "" if data_dir == "data" else f" --data_dir={quote(data_dir)}"
    own = f"--input FILE... --name {name if re.fullmatch(NAME, name) else 'NAME'}"
    hint = f"python prepare_data.py {name if name in DATASETS else own}{place}"
    path = os.path.join(folder, "meta.json")
    if name == "pysource" and not os.path.isfile(path):
        with alone(folder):
            if not os.path.isfile(path):
                prepare(folder, name, "byte", *pysource())
    if not os.path.isfile(path):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(path)  # report a folder that we may not read as just that: preparing the data again would fail, too
        prepared = [meta.parent.name for meta in pathlib.Path(data_dir).glob("*/meta.json")]
        close = "" if name in DATASETS else nearest(name, prepared) or nearest(name.lower(), DATASETS)
        die(f"data set {name!r} is not prepared in {data_dir}{close}; type: {hint}")
    try:
        with open(path, "rb") as f:
            meta = json.load(f)
        if meta["tokenizer"] != DATASETS.get(name, Source()).tokenizer and meta["tokenizer"] in VOCAB_SIZE:
            hint += f" --tokenizer={meta['tokenizer']}"
        if name == "fineweb10B":
            hint += f" --shards={len(meta['files']['train'])}"
        splits = {s: Tokens([os.path.join(folder, n) for n in names], meta["vocab_size"], hint)
                  for s, names in meta["files"].items()}
        counts = {s: len(t) for s, t in splits.items()}
        if counts != meta["tokens"] or meta["vocab_size"] != VOCAB_SIZE[meta["tokenizer"]] or not min(meta["bytes"][s] for s in splits) > 0:
            raise ValueError
        return Dataset(name, meta["tokenizer"], meta["vocab_size"], meta["bytes"]["val"] / len(splits["val"]),
                       splits["train"], splits["val"], splits.get("test"), meta)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        die(f"{path} does not describe the .bin files beside it; type: {hint}")


def shared_dataset(s, m):
    "load_dataset() in every process; the others wait while the first prepares pysource, if it is missing"
    if m.rank == 0:
        load_dataset(s["dataset"], s["data_dir"])
    m.all(True)
    data = load_dataset(s["dataset"], s["data_dir"])
    for split in filter(None, (data.train, data.val, data.test)):
        split[:2**20]  # finds most cases of tokens outside the vocabulary before an earlier run's files are moved
    return data


def check_source(ckpt, path, data, same=True):
    "Die if the checkpoint (None: there is none) was trained on other data or, unless same, on data of another tokenizer"
    now = data.source
    was = now | ckpt["data"] if ckpt else now  # old checkpoints say less
    if was["tokenizer"] != now["tokenizer"] or same and was != now:
        text = "{name} ({tokens:,} {tokenizer} tokens, SHA-256 {sha256})".format
        die(f"{path} was trained on {text(**was)}, and --dataset is {text(**now)}: "
            + ("prepare the same data, or start anew without --resume" if same else f"take data in {was['tokenizer']} tokens"))


# ---------------------------------------------------------------------------------------------------------------------
# Sources. Size and digest are those of the unpacked text (a book's with plain line ends), so that a mirror may pack it differently. For a book
# that Gutenberg revises, they only tell whether it is the edition behind our figures. enwik8's SHA-1: Large Text Compression Benchmark

@dataclasses.dataclass
class Source:
    url: str = ""  # of the text, of a zip whose member has the data set's name, or of the folder of the shards
    tokenizer: str = "byte"
    size: int = 0
    digest: tuple = ("sha256", "")  # leave it out of a new entry: the error then prints the digest to enter
    revised: bytes = b""  # for texts whose size and digest change: a pattern in every whole copy, but in no part, other text or web page
    percent: tuple = (90,)  # where train ends and val starts, where val ends and test starts


DATASETS = {
    "pysource": Source(),
    "shakespeare": Source("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
                          size=1_115_394,
                          digest=("sha256", "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed")),
    "warandpeace": Source("https://www.gutenberg.org/cache/epub/2600/pg2600.txt", "gpt2", 3_292_505,
                          ("sha256", "3bb73e3f3bdc6b5e46f8ad49f750cc84883d96701d1057e2446b1d27cf8d974c"),
                          revised=rb"(?s)\A(?!(\xef\xbb\xbf)?\s*<).*END OF TH(E|IS) PROJECT GUTENBERG EBOOK WAR AND PEACE"),
    "enwik8": Source("https://mattmahoney.net/dc/enwik8.zip", size=100_000_000,
                     digest=("sha1", "57b8363b814821dc9d47aa4d41f58733519076b2"), percent=(90, 95)),
    "fineweb10B": Source("https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main", "gpt2"),
}


def pysource():
    """-> (bytes, description). Ordered by a hash of the path: fixed, and its last tenth is a fair sample."""
    root = sysconfig.get_path("stdlib")
    skip = {"site-packages", "dist-packages", "test", "tests"}  # not every distribution ships the tests
    files = {}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in skip]
        paths = [os.path.join(folder, n) for n in names if n.endswith(".py")]
        files |= {os.path.relpath(p, root).replace(os.sep, "/"): p for p in paths if os.path.isfile(p)}
    order = sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest())
    about = f"the standard library of Python {sys.version.split()[0]}, {len(files):,} files"
    return b"".join(pathlib.Path(files[name]).read_bytes() for name in order), about


def text_of(raw, name, must=True):
    """UTF-8 bytes -> str; others: one line that names the first bad byte, and the end or, unless they must be UTF-8, None."""
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        if must:
            die(f"{name} is not UTF-8 (byte {e.start:,}): convert it, or take --tokenizer=byte")
        warn(f"note: {name} is no UTF-8 text (byte {e.start:,}), so its bytes are taken as they are: if it is packed, unpack it; if it "
             "holds tokens, prepare their text")


def read(path, utf8=None):
    """The bytes of a file; dies if it is missing or empty. utf8: True to die, False to say so, if it is no UTF-8."""
    if not os.path.isfile(path):
        die(f"{path or '(no name)'} does not exist or is not a file")
    raw = pathlib.Path(path).read_bytes()
    if not raw:
        die(f"{path} is empty")
    if raw[:8] == np.array([MAGIC, VERSION], "<i4").tobytes():
        die(f"{path} is a file of tokens, expected text: a folder of such files wants only a meta.json, like those that this script writes")
    if utf8 is not None:
        text_of(raw, path, must=utf8)
    return raw


def download(url, part, resume=True):
    """Download url to the file part -> part; continue an earlier attempt if the server can, else start afresh."""
    what = os.path.basename(url)
    furthest = os.path.getsize(part) if resume and os.path.exists(part) else 0
    remedy = f"give a mirror with --url or {'another' if url.startswith('file:') else 'a local copy'} with --from_file"
    with open(part, "ab" if resume else "wb") as f:
        while True:
            have = start = f.seek(0, os.SEEK_END)
            headers = {"User-Agent": "prepare_data.py"}
            if have:
                headers |= {"Range": f"bytes={have}-", "If-Unmodified-Since": email.utils.formatdate(os.path.getmtime(part), usegmt=True)}
            try:
                with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as reply:
                    given, length = reply.headers["Content-Range"] or "", reply.headers["Content-Length"]  # such as bytes 100-999/1000
                    if have and reply.status != 206:
                        have = start = f.truncate(f.seek(0))  # the server ignored the Range and sends all of it
                    elif given and not given.lower().startswith(f"bytes {have}-"):
                        raise ValueError(f"asked for bytes from {have:,} on, the server sent {given}")
                    whole, t0 = given.rpartition("/")[2], time.perf_counter()  # a server may send less than was asked for
                    total = int(whole) if whole.isdigit() else have + int(length) if length else None
                    while block := reply.read(1 << 18):
                        f.write(block)
                        have += len(block)
                        progress(have, total, t0, what, start)
                if have and total in (None, have):
                    end_progress()  # where no total is known, nothing else has
                    f.flush()
                    os.fsync(f.fileno())
                    return part
                problem = f"the transfer stopped at {have:,} of {total:,} bytes" if total else "the server sent nothing"
            except urllib.error.HTTPError as e:
                if e.code == 416 and have and e.headers["Content-Range"] == f"bytes */{have}":  # it was all there
                    return part
                if e.code in (412, 416) and have:  # another file by now, or less than we have: start afresh
                    f.truncate(0)
                    continue
                problem = f"{e.code} {e.reason}"
            except (OSError, http.client.HTTPException, ValueError) as e:
                if getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    e.filename = part
                    raise
                problem = getattr(e, "reason", None) or e
            if have <= furthest:  # no further than before: give up; otherwise ask for the rest at once
                break
            furthest = have
    if not have:
        os.remove(part)  # closed by now: Windows removes no open file
    die(f"cannot download {url} ({problem}); {'type the same command to resume, or ' * bool(have and resume)}{remedy}")


def fetch(name, folder, url, copy=None):
    """-> (the verified bytes of a one-file data set, their origin): a local copy, an earlier download (unless the text is one that is revised
    and url is another), or url."""
    source = DATASETS[name]
    path = os.path.join(folder, os.path.basename(source.url))  # the same name whatever a mirror calls it
    if copy:
        used = came_from = copy
    elif os.path.exists(path) and not (source.revised and url != source.url):
        used = came_from = path
    else:
        used, came_from = download(url, f"{path}.part", resume=not source.revised), url
    raw = read(used)
    if zipfile.is_zipfile(used):
        try:
            with zipfile.ZipFile(used) as z:
                raw = z.read(name)
        except MemoryError:
            raise
        except Exception:  # each way of packing has errors of its own: a damaged or a foreign one fails the check below
            pass
    if source.revised:  # today's War and Peace has DOS line ends, which open(...).read() would turn into \n
        raw = raw.replace(b"\r\n", b"\n")
    algorithm, expected = source.digest
    found = hashlib.new(algorithm, raw).hexdigest()
    if (len(raw), found) != (source.size, expected):
        problem = f"{len(raw):,} bytes, {algorithm} {found}; expected {source.size:,} bytes, {expected}"
        if not (source.revised and re.search(source.revised, raw)):
            downloaded = used not in (copy, path)
            if downloaded:
                os.remove(used)
            die(f"{came_from} is not {name} ({problem}); " + (
                "name another file" if copy else f"removed {used}: download it again or name another file" if downloaded else
                "move it away, or name another file with --from_file"))
        warn(f"note: {came_from} is not the edition that our figures are for ({problem})")
    if not copy:
        os.replace(used, path)
    return raw, came_from


# ---------------------------------------------------------------------------------------------------------------------
# Writing

def write_bin(path, tokens, vocab_size):
    """Write a uint16 array, of fewer than 2^31 tokens, as one .bin file."""
    if tokens.max() >= vocab_size:
        die(f"{path}: a token has the id {tokens.max()}, expected ids below {vocab_size}")
    header = np.zeros(256, "<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    write_atomic(path, lambda f: f.writelines((header.data, tokens.astype("<u2", copy=False).data)))


def write_meta(folder, **meta):
    """Write meta.json, the last file of a data set, and report what it describes."""
    meta["source"] = re.sub(r"^(\w+://)(?:[^/?#]*@)?([^?#]*).*", r"\1\2", meta["source"])  # without passwords and keys
    write_atomic(os.path.join(folder, "meta.json"), lambda f: f.write(json.dumps(meta, indent=1).encode() + b"\n"))
    report(f"{folder}: {meta['source']}; {meta['tokenizer']} tokens; {meta['split']}")
    for split, count in meta["tokens"].items():
        report(f"  {split:5} {count:13,} tokens, {meta['bytes'][split]:,} bytes of text")


def prepare(folder, name, tokenizer, raw, source, percent=(90,)):
    """Split the bytes raw at the given percentages, tokenise each split by itself, write the folder."""
    sha256 = hashlib.sha256(raw).hexdigest()
    raw = raw.removeprefix(codecs.BOM_UTF8)
    # a cut inside a character would leave two broken halves; War and Peace as bytes is split where its GPT-2 tokens are
    by_characters = tokenizer != "byte" or name == "warandpeace"
    text = text_of(raw, source) if by_characters else raw
    cuts = [0, *(len(text) * p // 100 for p in percent), len(text)]
    parts = [text[a:b] for a, b in zip(cuts, cuts[1:])]
    parts = {s: p.encode() if by_characters else p for s, p in zip(("train", "val", "test"), parts)}
    if not all(parts.values()):
        die(f"{source}: {len(raw)} bytes are too few to split into {', '.join(parts)}")
    tokens = {s: tokenize(p, tokenizer, f"{name} {s}") for s, p in parts.items()}
    if len(tokens["val"]) <= 256:
        warn(f"note: {len(tokens['val'])} tokens to validate on, fewer than a window of nano takes, 257: from some 10 KB of text on there are "
             "enough (tiny's windows take 1,025)")
    if too_long := [f"{s} has {len(t):,}" for s, t in tokens.items() if len(t) >= 2**31]:
        die(f"{source}: {too_long[0]} tokens, and one .bin file has room for 2^31 - 1: take less text"
            + ", or --tokenizer=gpt2" * (tokenizer == "byte"))
    pathlib.Path(folder, "meta.json").unlink(missing_ok=True)  # never beside .bin files that it does not describe
    for s, t in tokens.items():
        write_bin(os.path.join(folder, f"{s}.bin"), t, VOCAB_SIZE[tokenizer])
    sizes = " / ".join(f"{b - a:,}" for a, b in zip(cuts, cuts[1:]))
    write_meta(folder, name=name, tokenizer=tokenizer, vocab_size=VOCAB_SIZE[tokenizer],
               files={s: [f"{s}.bin"] for s in parts}, tokens={s: len(t) for s, t in tokens.items()},
               bytes={s: len(p) for s, p in parts.items()}, source=source, sha256=sha256,
               split=f"split in order, {sizes} {'characters' if by_characters else 'bytes'}")


def prepare_fineweb(folder, name, url, shards):
    """Collect tokenised shards. No checksum of theirs is known: header, size and every token are checked."""
    vocab = VOCAB_SIZE["gpt2"]
    lengths = np.array([len(gpt2().decode_single_token_bytes(i)) for i in range(vocab - 1)] + [0])  # <|endoftext|>: 0
    files = {"train": [f"fineweb_train_{i:06d}.bin" for i in range(1, shards + 1)], "val": ["fineweb_val_000000.bin"]}
    tokens, size, sha256 = dict.fromkeys(files, 0), dict.fromkeys(files, 0), {}
    mirror = hashlib.sha256(url.encode()).hexdigest()[:8]  # separate .part files for each mirror: a shard mixed from two would go unnoticed
    for split, names in files.items():
        for shard in names:
            path = used = os.path.join(folder, shard)
            if url.startswith("file:") or not os.path.exists(path):
                used = download(f"{url}/{shard}", f"{path}.{mirror}.part")
            again = (f"another folder: --from_file FOLDER, whose {shard} is whole" if url.startswith("file:") else
                     "the same command again" + ", once you have moved it away" * (used == path))
            t, count = None, 0
            with contextlib.suppress(SystemExit):  # the reason is printed
                t = Tokens([used], vocab, again)
                size[split] += sum(int(lengths[t[i:i + 2**22]].sum()) for i in range(0, len(t), 2**22))
                count = len(t)
            del t  # Windows neither removes nor renames a file that is mapped
            if not count:
                if used != path:
                    os.remove(used)
                raise SystemExit(1)
            tokens[split] += count
            sha256[shard] = hashlib.sha256(np.memmap(used, np.uint8, "r")).hexdigest()
            if used != path:
                if os.path.exists(path):
                    pathlib.Path(folder, "meta.json").unlink(missing_ok=True)  # never beside .bin files that it does not describe
                os.replace(used, path)
    write_meta(folder, name=name, tokenizer="gpt2", vocab_size=vocab, files=files, tokens=tokens, bytes=size,
               source=url, sha256=sha256, split=f"{shards} + 1 shards, verified without a checksum (none is known)")


def main(argv=None):
    parser = Parser(prog="prepare_data.py", description=__doc__)
    parser.add_argument("dataset", nargs="?", help=f"{', '.join(DATASETS)}; without any: pysource")
    parser.add_argument("--input", nargs="+", action="extend", metavar="FILE", help="your own files instead of a named data set")
    parser.add_argument("--name", help="of your own files: folder to write in DATA_DIR, the name to train with")
    parser.add_argument("--tokenizer", choices=VOCAB_SIZE, help="(default byte; gpt2 for warandpeace and fineweb10B)")
    parser.add_argument("--data_dir", default="data", help="where data sets lie")
    parser.add_argument("--url", help="mirror to download from (fineweb10B: the folder that holds the shards)")
    parser.add_argument("--from_file", help="local copy instead of a download (fineweb10B: the folder of the shards)")
    parser.add_argument("--shards", type=number(int, 1, 103), help="fineweb10B: training shards of 100M tokens, 1 to 103 (default 1)")
    args = parser.parse_args(argv)

    dataset = "pysource" if args.dataset is None else args.dataset
    name = args.name or dataset
    if dataset not in DATASETS:
        die(f"unknown data set {dataset!r}{nearest(dataset, DATASETS)} (known: {', '.join(DATASETS)}, --input FILE...)")
    if bool(args.input) != bool(args.name) or args.dataset and args.input:
        die("--input FILE... goes with a --name of your own and without a named data set")
    if args.input and name.lower() in map(str.lower, DATASETS):  # most Macs and Windows ignore case
        die(f"--name={name} is another data set's: take a --name of your own")
    if not re.fullmatch(NAME, name):
        die(f"--name {name!r} is no folder name: take letters, digits, _ - .")
    source = DATASETS[dataset]
    if args.url == "":
        die("--url is empty: type an address, or leave it out")
    if (args.url or args.from_file) and not source.url:
        die("--url and --from_file are for data sets that are downloaded; your own text: --input FILE... --name NAME")
    if args.url and args.from_file:
        die("--url and --from_file name two sources: type one of the two")
    if args.from_file is not None and not (os.path.isdir if dataset == "fineweb10B" else os.path.isfile)(args.from_file):
        die(f"--from_file={args.from_file} does not exist or is no {'folder' if dataset == 'fineweb10B' else 'file'}")
    if args.shards and dataset != "fineweb10B":
        die("--shards is for fineweb10B")
    url = pathlib.Path(args.from_file).absolute().as_uri() if args.from_file else (args.url or source.url).rstrip("/")
    tokenizer, folder = args.tokenizer or source.tokenizer, os.path.join(args.data_dir, name)
    if dataset == "fineweb10B" and tokenizer != "gpt2":
        die("fineweb10B is tokenised with gpt2 already")
    for path in args.input or ():
        if os.path.realpath(path) in [os.path.realpath(os.path.join(folder, n)) for n in ("train.bin", "val.bin", "meta.json")]:
            die(f"{path} would be written over: the prepared data goes there; take another --name")
    raw = b"".join(read(path, utf8=tokenizer != "byte").removeprefix(codecs.BOM_UTF8) for path in args.input or ())
    with alone(folder):
        if args.input:
            prepare(folder, name, tokenizer, raw, ", ".join(args.input))
        elif dataset == "pysource":
            prepare(folder, name, tokenizer, *pysource())
        elif dataset == "fineweb10B":
            prepare_fineweb(folder, name, url, args.shards or 1)
        else:
            prepare(folder, name, tokenizer, *fetch(dataset, folder, url, args.from_file), source.percent)
    place = "" if args.data_dir == "data" else f" --data_dir={quote(args.data_dir)}"
    report(f"next: python train_gpt.py --dataset={name}{place}" + f" --out_dir=out/{name}" * bool(args.input))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing half-written stays but *.part
    run(main, again="; type the same command again to go on")
