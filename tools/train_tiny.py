"""Train the small chat model: `python -m pdmesh.tools.train_tiny --help`.

Stages: pretraining at a constant rate, annealing at the full context with the rate falling to
zero, fine-tuning on dialogues, and an optional polish on the hand-written ones. Every stage is
bounded by time, so a run always ends; a checkpoint with the optimizer's state is written along
the way and `--resume` goes on from it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from pdmesh.tools.tiny_batches import ANNEAL, POLISH, PRETRAIN, SFT, Batches, Mix
from pdmesh.tools.tiny_corpus import read_seed
from pdmesh.tools.tiny_eval import Scores, score
from pdmesh.tools.tiny_forward import Mode
from pdmesh.tools.tiny_model import build_model, load_quantised, network_of, save_quantised
from pdmesh.tools.tiny_network import Teacher
from pdmesh.tools.tiny_optim import MuonAdam, Rates
from pdmesh.tools.tiny_pack import Packed, build_packed, encode_documents, load_packed, save_packed


@dataclass(frozen=True)
class Stage:
    """One stretch of training. Rates are fractions of the peak, linear in time between the two."""

    name: str
    minutes: float
    context: int
    mix: Mix
    rate_from: float
    rate_to: float
    mtp_weight: float
    warmup_steps: int = 0


def stages(args: argparse.Namespace) -> list[Stage]:
    """The stages with their minutes from the command line."""
    full = args.context
    return [
        Stage("pretrain", args.pretrain_minutes, min(full, 1024), PRETRAIN, 1.0, 1.0, 0.3, 100),
        Stage("anneal", args.anneal_minutes, full, ANNEAL, 1.0, args.sft_rate, 0.2),
        Stage("sft", args.sft_minutes, full, SFT, args.sft_rate, 0.0, 0.1),
        Stage("polish", args.polish_minutes, full, POLISH, args.polish_rate, 0.0, 0.1),
    ]


class _StageClock:
    """Where a stage stands in time. The clock starts after two steps: compiling does not count."""

    def __init__(self, stage: Stage, max_steps: int, look_every: int) -> None:
        self.stage = stage
        self.max_steps = max_steps
        self.look_every = look_every
        self.steps = self.epochs = self.tokens = 0
        self.passed = 0.0
        self.began = time.monotonic()
        self.last = {"score": self.began, "save": self.began}

    def tick(self, tokens: int) -> bool:
        """Count a step; True when it is time to look at the clock and at the losses."""
        self.steps += 1
        self.tokens += tokens
        if self.max_steps and self.steps >= self.max_steps:
            self.passed = 1.0
        return self.steps == 2 or self.steps % self.look_every == 0

    def read(self) -> None:
        """Bring `passed` up to date; the device has just been waited for."""
        if self.steps == 2:
            self.began, self.tokens = time.monotonic(), 0
        elapsed = time.monotonic() - self.began
        self.passed = max(self.passed, elapsed / (60 * max(self.stage.minutes, 1e-9)))

    def due(self, what: str, seconds: float) -> bool:
        """Whether `seconds` have gone by since this last was True for `what`."""
        now = time.monotonic()
        if now - self.last[what] < seconds:
            return False
        self.last[what] = now
        return True

    def line(self, values: list[float], rate: float) -> str:
        """One progress line."""
        speed = self.tokens / max(time.monotonic() - self.began, 1e-6) / 1e6
        main, mtp, share = values
        return (
            f"{self.stage.name} step {self.steps} epoch {self.epochs} {100 * self.passed:.0f}% "
            f"loss {main:.3f} mtp {mtp:.3f} max/mean {share:.2f} rate {rate:.3f} "
            f"{speed:.2f} M tokens/s"
        )


class Trainer:
    """The state of a run: model, optimizer, averaged weights, position in the stages."""

    def __init__(self, args: argparse.Namespace, training: Packed, held_out: Packed) -> None:
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.held_out = held_out
        if args.init:
            self.model = load_quantised(args.init, self.device).requires_grad_(True)
        else:
            self.model = build_model(args.model_dir, self.device, args.seed)
        self.network = network_of(self.model)
        self.parameters: list[Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        rates = Rates(muon=args.muon_rate, adam=args.adam_rate, muon_decay=args.decay)
        self.optimizer = MuonAdam(
            ((n, p) for n, p in self.model.named_parameters() if p.requires_grad), rates
        )
        self.average = [p.detach().clone() for p in self.parameters]
        self.batches = Batches(training, self.device, args.seed)
        self.history: list[dict[str, float | str]] = []
        self.done: list[str] = []
        self.steps = 0
        self.losses = (
            torch.compile(self.network.losses, dynamic=False)
            if self.device.type == "cuda"
            else self.network.losses
        )
        self.teacher = self.load_teacher(args.teacher) if args.teacher else None

    @property
    def biases(self) -> list[Tensor]:
        """The gate biases, in the order of the expert counts."""
        layers = (*self.network.weights.layers, self.network.weights.mtp_layer)
        return [layer.moe.bias for layer in layers if layer.moe is not None]

    def step(self, tokens: Tensor, weights: Tensor, stage: Stage, rate: float) -> Tensor:
        """One update; returns the losses and the largest expert share, [3] on the device."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            main, mtp, load = self.losses(tokens, weights, self.teacher)
        torch.autograd.backward([main + stage.mtp_weight * mtp])
        if stage.warmup_steps and self.steps < stage.warmup_steps:
            rate *= (self.steps + 1) / stage.warmup_steps
        self.optimizer.step(rate)
        with torch.no_grad():
            # Auxiliary-loss-free balancing (report, section 2.1.2): each bias moves a fixed step.
            balancing = stage.name in ("pretrain", "anneal")
            speed = self.args.bias_speed * min(1.0, 2 * rate) if balancing else 0.0
            for bias, counts in zip(self.biases, load, strict=True):
                bias += speed * torch.sign(counts.mean() - counts)
            torch._foreach_lerp_(self.average, self.parameters, 1 - self.args.average)
        self.steps += 1
        share = (load.amax(-1) / load.mean(-1)).mean()
        return torch.stack([main.detach(), mtp.detach(), share])

    def run_stage(self, stage: Stage) -> None:
        """Train until the stage's minutes are over or the work folder has a file `next`."""
        sequences = max(1, self.args.batch_tokens // stage.context)
        self.network.mode = Mode(self.args.dropout, self.args.experts == "grouped")
        clock = _StageClock(stage, self.args.max_steps, self.args.look_every)
        while clock.passed < 1.0:
            clock.epochs += 1
            for tokens, weights in self.batches.batches(stage.mix, sequences, stage.context):
                rate = stage.rate_from + (stage.rate_to - stage.rate_from) * clock.passed
                values = self.step(tokens, weights, stage, rate)
                if clock.tick(tokens.numel()):
                    self.look(clock, values.tolist(), rate)
                if clock.passed >= 1.0:
                    break
        self.done.append(stage.name)

    def look(self, clock: _StageClock, values: list[float], rate: float) -> None:
        """Every few steps: stop on nonsense, print, score, save, and take `next` into account."""
        if not all(math.isfinite(value) for value in values):
            raise SystemExit(f"a loss is not a number at step {self.steps}")
        clock.read()
        if clock.steps % (5 * clock.look_every) == 0:
            print(clock.line(values, rate), flush=True)
        if clock.due("score", self.args.score_seconds):
            self.score(f"{clock.stage.name}-{clock.steps}", averaged=True)
        if clock.due("save", self.args.save_seconds):
            self.save("running")
        next_file = self.args.work / "next"
        if next_file.exists():
            next_file.unlink()
            clock.passed = 1.0

    def score(self, label: str, averaged: bool = False) -> Scores:
        """Held-out scores of the current (or averaged) weights, printed and kept."""
        mode = self.network.mode
        self.network.mode = replace(mode, dropout=0.0)
        context = self.args.context if "pretrain" not in label else min(self.args.context, 1024)
        documents = range(min(self.args.score_documents, len(self.held_out.raw_bytes)))
        if averaged:
            self.swap()
        scores = score(self.network.rows, self.held_out, context, documents)
        if averaged:
            self.swap()
        self.network.mode = mode
        self.history.append({"label": label, "steps": float(self.steps), **vars(scores)})
        print(
            f"held out after {label}: {scores.bits_per_byte:.4f} bits/byte, MTP "
            f"{scores.mtp_acceptance:.3f}, max/mean {scores.load_max_over_mean:.2f}",
            flush=True,
        )
        return scores

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights and their running average."""
        for average, parameter in zip(self.average, self.parameters, strict=True):
            held = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(held)

    def save(self, name: str) -> None:
        """Write the whole state into the work folder, under its name only when complete."""
        state = {
            "model": self.model.state_dict(),
            "biases": [bias.clone() for bias in self.biases],
            "optimizer": self.optimizer.state_dict(),
            "average": self.average,
            "history": self.history,
            "done": self.done,
            "steps": self.steps,
        }
        partial = self.args.work / f"{name}.partial"
        torch.save(state, partial)
        partial.rename(self.args.work / f"{name}.pt")

    def load_teacher(self, path: Path) -> Teacher:
        """The model of a finished run, as a teacher."""
        model = build_model(self.args.model_dir, self.device, seed=0)
        state = torch.load(path, map_location=self.device, weights_only=True)
        model.load_state_dict(state["model"])
        network = network_of(model.requires_grad_(False))
        network.mode = Mode(grouped=self.args.experts == "grouped")
        return Teacher(network, self.args.teacher_share)

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Go on from what `save` wrote."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for bias, value in zip(self.biases, state["biases"], strict=True):
            bias.copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        for average, value in zip(self.average, state["average"], strict=True):
            average.copy_(value)
        self.history, self.done, self.steps = state["history"], state["done"], state["steps"]


def finish(trainer: Trainer, out: Path) -> None:
    """Write the quantised checkpoint and the scores before and after quantisation."""
    out.mkdir(parents=True, exist_ok=True)
    save_quantised(trainer.model, out)
    quantised = load_quantised(out, trainer.device)
    trainer.network = network_of(quantised)
    trainer.score("quantised")
    report = {
        "history": trainer.history,
        "steps": trainer.steps,
        "arguments": {k: str(v) for k, v in vars(trainer.args).items()},
    }
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, help="packed corpus, written by pdmesh.tools.tiny_pack")
    add("--corpus", type=Path, help="corpus folder; packs it first when --data is not there yet")
    add("--model-dir", type=Path, required=True, help="folder with config.json and tokenizer.json")
    add("--work", type=Path, default=Path(".train/run"), help="checkpoints of the running training")
    add("--out", type=Path, default=Path(".train/out"), help="where the finished model is written")
    add("--resume", action="store_true", help="go on from the last checkpoint in --work")
    add("--pretrain-minutes", type=float, default=5.0)
    add("--anneal-minutes", type=float, default=5.3)
    add("--sft-minutes", type=float, default=1.2)
    add(
        "--polish-minutes",
        type=float,
        default=0.0,
        help="more on the seed dialogues; CPU is enough",
    )
    add("--polish-rate", type=float, default=0.03)
    add("--init", type=Path, help="model folder to start from instead of random weights")
    add("--batch-tokens", type=int, default=65536, help="tokens a step")
    add("--context", type=int, default=4096, help="context from annealing on (1,024 before)")
    add("--muon-rate", type=float, default=5e-3)
    add("--adam-rate", type=float, default=4e-3)
    add("--decay", type=float, default=0.2, help="weight decay of the matrices")
    add("--sft-rate", type=float, default=0.08, help="rate fine-tuning starts with, of the peak")
    add("--dropout", type=float, default=0.1)
    add("--average", type=float, default=0.998, help="decay of the averaged weights")
    add("--bias-speed", type=float, default=2e-3, help="step of the expert biases")
    add("--experts", choices=("all", "grouped"), default="all", help="how experts are multiplied")
    add("--teacher", type=Path, help="checkpoint of an earlier run to distil from")
    add("--teacher-share", type=float, default=0.5, help="share of the loss against the teacher")
    add("--seed", type=int, default=1)
    add("--max-steps", type=int, default=0, help="at most so many steps a stage (0: no limit)")
    add("--look-every", type=int, default=20, help="steps between looks at clock and losses")
    add("--score-seconds", type=float, default=60.0)
    add("--save-seconds", type=float, default=120.0)
    add("--score-documents", type=int, default=200)
    add("--smoke", action="store_true", help="a few tiny steps on the CPU, to see that it works")
    return parser.parse_args(argv)


def smoke_settings(args: argparse.Namespace) -> None:
    """Shrink everything so that all stages run on a CPU within a minute."""
    args.batch_tokens, args.context, args.max_steps = 256, 128, 2
    args.score_documents = 2


def main(argv: list[str] | None = None) -> None:
    """Run the stages that are left, then quantise and score."""
    args = parse(argv)
    if args.smoke:
        smoke_settings(args)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    args.work.mkdir(parents=True, exist_ok=True)
    training, held_out = packed_data(args)
    trainer = Trainer(args, training, held_out)
    checkpoint = args.work / "running.pt"
    if args.resume and checkpoint.exists():
        trainer.load(checkpoint)
        print(f"resumed after {trainer.steps} steps, done: {', '.join(trainer.done) or 'none'}")
    for stage in stages(args):
        if stage.name not in trainer.done and stage.minutes > 0:
            trainer.run_stage(stage)
            trainer.score(stage.name)
            trainer.save("running")
    finish(trainer, args.out)


def packed_data(args: argparse.Namespace) -> tuple[Packed, Packed]:
    """Read the packed corpus, or pack it."""
    if args.data is not None and args.data.exists():
        return load_packed(args.data)
    if args.corpus is None and not args.smoke:
        raise SystemExit("name a packed file that exists with --data, or a folder with --corpus")
    tokenizer = Tokenizer.from_file(str(args.model_dir / "tokenizer.json"))
    if args.corpus is None:
        seeds = [replace(document, source="dialogue") for document in read_seed()]
        return encode_documents(tokenizer, seeds[8:]), encode_documents(tokenizer, seeds[:8])
    training, held_out = build_packed(args.corpus, tokenizer)
    if args.data is not None:
        save_packed(args.data, training, held_out)
    return training, held_out


if __name__ == "__main__":
    main()
