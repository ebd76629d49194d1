"""The programs of a user of the second release, whose runs the archives are; test_archives.py goes on with these runs.

They use the public interface of tiered alone, and describe what a run holds in words that JSON has. What is written
here belongs to the archives: a program that is changed resumes another run than the one that was packed. The script
that packed them, once, on a checkout of commit 2ca5acb, is in the history: git show f6a3dd0:tests/archives/make.py
"""

from __future__ import annotations

import hashlib
import random
import tarfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import tiered

__all__ = [
    "HERE", "LOOPS", "LOOP_STEP", "NAMES", "STORES", "TRAIN_STEP", "Counted", "LoraLoop", "Net", "Tokens", "TrainGPT",
    "described", "exported", "external_of", "new_trainer", "plain_gpt2", "read_store", "read_training", "snapshot",
    "train_batch", "training_arguments", "training_in_json", "unpack",
]  # fmt: skip

HERE = Path(__file__).parent
STORES = {
    "store": ("a", "b"), "train_exact": ("run",), "train_compact": ("a", "b"), "trainer": ("store",), "lora": ("run",),
    "loop": ("run",),
}  # fmt: skip
"""Of each archive: the directories of its store."""
NAMES = tuple(STORES)


def unpack(name: str, place: Path) -> list[Path]:
    """Put a copy of the archive ``name`` into ``place`` and return the directories of its store."""
    place.mkdir(exist_ok=True)
    with tarfile.open(HERE / f"{name}.tar.xz") as archive:
        archive.extraction_filter = lambda member, _: member  # with the modes that the release gave
        archive.extractall(place)
    return [place / directory for directory in STORES[name]]


def external_of(name: str, place: Path) -> list[Path]:
    """Return the user's own files that the store of the archive needs, unpacked in ``place``."""
    return [place / "base"] if name == "lora" else []


# -- words for JSON --------------------------------------------------------------------------------------------------


def described(tensor: Tensor) -> str:
    """Return dtype, shape and the sha256 of the bytes."""
    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest = hashlib.sha256(plain.numpy().tobytes()).hexdigest()
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {digest}"


def described_all(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    return {name: described(tensor) for name, tensor in dict(tensors).items()}


def in_json(value: Any) -> Any:
    """Return committed state as JSON has it: no two values that differ look alike."""
    if isinstance(value, Tensor):
        return {"tensor": described(value)}
    if isinstance(value, Mapping):
        return {"mapping": [[in_json(key), in_json(each)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [in_json(each) for each in value]}
    return value if value is None or isinstance(value, str | bool) else {type(value).__name__: repr(value)}


def draws(*, normals: bool = False) -> dict[str, list[float]]:
    """Draw the next random numbers of torch, Python and NumPy; before them the second normal ones of two pairs."""
    found = {"normals": [random.gauss(0.0, 1.0), float(np.random.standard_normal())]} if normals else {}
    return found | {
        "torch": torch.rand(4, dtype=torch.float64).tolist(),
        "python": [random.random() for _ in range(4)],
        "numpy": np.random.random_sample(4).tolist(),
    }


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return copies of the parameters and buffers, and the optimizer's state of each parameter, by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    state = optimizer.state_dict()["state"]
    return {
        "parameters": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": {order[index]: dict(values) for index, values in state.items()},
    }


# -- a store ---------------------------------------------------------------------------------------------------------


class Counted:
    """Registered as "counted"."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "tensor": torch.full((3,), self.count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def _bytes(nbytes: int, seed: int) -> Tensor:
    """Return (nbytes,) uint8 that no library's random numbers decide; they repeat after 8 KiB."""
    words = (hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(-(-min(nbytes, 8192) // 32)))
    some = torch.frombuffer(bytearray(b"".join(words)), dtype=torch.uint8)
    return some.repeat(-(-nbytes // some.numel()))[:nbytes].clone()


# -- tiered train ----------------------------------------------------------------------------------------------------

TEXT = "".join(f"{number} of {number % 7} words, each of one meaning; " for number in range(200)).encode()
TRAIN_STEP = 3


class _TrainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.fc, self.out = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.ln1(x)).view(*x.shape[:2], 3, 2, 8)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.out(F.gelu(self.fc(self.ln2(x))))


class TrainGPT(nn.Module):
    """The model of `tiered train` at the archives' sizes, in plain PyTorch: it is the run's, not the product's."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(256, 16), nn.Embedding(16, 16)
        self.blocks = nn.ModuleList(_TrainBlock() for _ in range(2))
        self.ln, self.head = nn.LayerNorm(16), nn.Linear(16, 256, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.emb(tokens) + self.pos(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.ln(x)).float().flatten(0, 1), targets.flatten())


def train_batch(position: int) -> tuple[Tensor, Tensor]:
    """Return the tokens and targets of this number, which the seed 7 draws from the archives' text."""
    rows = []
    for row in range(2):
        digest = hashlib.blake2b(f"7 {position} {row}".encode(), digest_size=8).digest()
        offset = int.from_bytes(digest, "little") % (len(TEXT) - 16)
        rows.append(list(TEXT[offset : offset + 17]))
    window = torch.tensor(rows)
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def open_train(name: str, store: tiered.Store) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return model and optimizer of the run that `tiered train` left in ``store``, resumed by a program of a user's."""
    with tiered.construct(store):
        model: nn.Module = TrainGPT()
    model = tiered.shard(model, store, param_dtype=torch.bfloat16)
    state = "compact" if name == "train_compact" else "exact"
    optimizer = tiered.AdamW(model.parameters(), lr=0.002, state=state)
    store.resume()
    return model, optimizer


# -- transformers' Trainer -------------------------------------------------------------------------------------------

VOCAB = 64


class Tokens(Dataset[dict[str, Tensor]]):
    """Sequences of 12 tokens that no library's random numbers decide."""

    def __len__(self) -> int:
        return 22  # by twos, and two of these a step: six steps in a pass, the last one of a single batch

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = _bytes(12, 1000 + index).long() % VOCAB
        return {"input_ids": tokens, "labels": tokens, "index": torch.tensor(index)}


def plain_gpt2(**options: Any) -> Any:
    """Return a tiny GPT-2 with dropout and a head that is tied to the embedding, in memory."""
    sizes = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    config = transformers.GPT2Config(bos_token_id=0, eos_token_id=0, **sizes, **options)
    return transformers.GPT2LMHeadModel(config)


def training_arguments(output_dir: Path) -> transformers.TrainingArguments:
    """Return arguments with accumulation, clipping, and a scheduler with warm-up; a commit each third step."""
    return transformers.TrainingArguments(
        output_dir=str(output_dir), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_grad_norm=1.0,
        max_steps=9, learning_rate=1e-2, weight_decay=0.1, lr_scheduler_type="cosine", warmup_steps=2, logging_steps=1,
        save_strategy="steps", save_steps=3, report_to="none", use_cpu=True, disable_tqdm=True, seed=5,
        dataloader_pin_memory=False,
    )  # fmt: skip


def new_trainer(place: Path, *callbacks: transformers.TrainerCallback, **options: Any) -> Any:
    """Return the Trainer of the run in ``place``; what ``options`` leave out are the defaults of Arguments."""
    torch.manual_seed(3)
    return tiered.hf.Trainer(
        model=plain_gpt2(), args=training_arguments(place / "out"), train_dataset=Tokens(), callbacks=list(callbacks),
        tiered=tiered.hf.Arguments(store=place / "store", **options),
    )  # fmt: skip


# -- loops of a user's own -------------------------------------------------------------------------------------------


@dataclass
class Loop:
    """The README's loop over a resumable loader, with a scheduler, two micro-steps a step, and a commit after each."""

    store: tiered.Store
    model: Any = None
    optimizer: Any = None
    scheduler: Any = None
    loader: Any = None
    losses: list[Tensor] = field(default_factory=list)
    used: list[Any] = field(default_factory=list)  # what the loader gave, as JSON has it

    num_micro_steps = 2

    @classmethod
    def open(cls, place: Path, store: tiered.Store) -> Loop:
        """Build the model, or what was committed of it, in ``store``."""
        loop = cls(store)
        torch.manual_seed(11)
        random.seed(11)
        np.random.seed(11)
        loop._build(place)
        loop.scheduler = cls.scheduler_of(loop.optimizer)
        loop.loader = tiered.resumable(cls.batches())
        store.register("scheduler", loop.scheduler)
        store.register("loader", loop.loader)
        store.resume()
        return loop

    def _build(self, place: Path) -> None:
        with tiered.construct(self.store):
            model = Net()
        self.model = tiered.shard(model, self.store)
        self.optimizer = tiered.SGD(self.groups(self.model), lr=0.05, momentum=0.9, update="backward")

    @staticmethod
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        """Return two groups: matrices decay, vectors do not."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]

    @staticmethod
    def scheduler_of(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)

    @staticmethod
    def batches() -> Any:
        """Return batches that are no DataLoader's: seven in a pass."""
        return [(index, _bytes(4 * 12, 2000 + index).view(4, 12) / 64.0 - 2.0) for index in range(7)]

    @staticmethod
    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(batch[1]).square().mean()
        return loss

    @staticmethod
    def named(batch: Any) -> Any:
        return batch[0]

    def run(self, until: int) -> None:
        """Train to step ``until``."""
        step = self.store.state.get("step", 0)
        while step < until:
            for batch in self.loader:
                self.used.append(self.named(batch))
                is_last = len(self.used) % self.num_micro_steps == 0
                with nullcontext() if is_last else tiered.accumulate(self.model):
                    loss = self.loss_of(self.model, batch)
                    (loss / self.num_micro_steps).backward()
                self.losses.append(loss.detach().clone())
                if not is_last:
                    continue
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                random.gauss(0.0, 1.0)  # as below, the second of a pair is kept for the next call
                np.random.standard_normal()
                step += 1
                self.store.commit({"step": step}, wait=False)
                if step == until:
                    break


class Net(nn.Module):
    """Buffers, dropout, a frozen layer, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.dropout = nn.Linear(12, 17), nn.BatchNorm1d(17), nn.Dropout(0.2)
        self.frozen, self.last = nn.Linear(17, 17).requires_grad_(False), nn.Linear(17, 5)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(torch.tanh(self.norm(self.first(x))))
        out: Tensor = self.last(y + self.frozen(y)) * self.scale
        return out


class LoraLoop(Loop):
    """Adapters of PEFT over a base that is read in its own files; the loader is a shuffled DataLoader."""

    num_micro_steps = 1

    def _build(self, place: Path) -> None:
        base = tiered.hf.from_pretrained(
            transformers.AutoModelForCausalLM, place / "base", self.store, frozen="in place", dtype=torch.bfloat16
        )
        self.model = self.adapted(base).train()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = tiered.AdamW(trained, lr=1e-2, store=self.store)

    @staticmethod
    def adapted(base: Any) -> Any:
        """Return ``base`` under adapters."""
        lora = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
        return peft.get_peft_model(base, lora)

    @staticmethod
    def batches() -> Any:
        return DataLoader(Tokens(), batch_size=2, shuffle=True)

    @staticmethod
    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        return loss

    @staticmethod
    def named(batch: Any) -> Any:
        return batch["index"].tolist()


LOOPS: Mapping[str, type[Loop]] = {"loop": Loop, "lora": LoraLoop}
LOOP_STEP = 5
"""An odd number: each step draws one of a pair of normal numbers, and the commit has the other."""


# -- what an archive holds -------------------------------------------------------------------------------------------


def read_store(directories: list[Path], external: list[Path], mode: str) -> dict[str, Any]:
    """Return what the last commit holds, by key, and the state that rides along."""
    with tiered.Store(*directories, dram="64MiB", mode=mode, external=external) as store:
        return {
            "generation": store.generation,
            "state": in_json(store.state),
            "keys": {key: described(store[key]) for key in store},
        }


def exported(folder: Path) -> dict[str, str]:
    """Return the tensors that `tiered export` wrote to ``folder``."""
    return described_all(pair for file in sorted(folder.glob("*.safetensors")) for pair in load_file(file).items())


class _Looked(Exception):
    """Ends a Trainer that was only to be looked into."""


class Look(transformers.TrainerCallback):
    """Calls ``look`` with model, optimizer and scheduler when a resumed training begins, and ends it there."""

    def __init__(self, look: Callable[..., object]) -> None:
        self._look = look

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self._look(objects["model"], objects["optimizer"], objects["lr_scheduler"])
        raise _Looked


def read_training(name: str, place: Path) -> dict[str, Any]:
    """Resume the run unpacked in ``place`` and return its tensors, scheduler, and the draws that come next.

    ``random`` are the states that these draws came from.
    """
    if name == "trainer":
        return _read_trainer(place)
    directories = [place / directory for directory in STORES[name]]
    with tiered.Store(*directories, dram="32MiB", external=external_of(name, place)) as store:
        if name in LOOPS:
            loop = LOOPS[name].open(place, store)
            model, optimizer, scheduler = loop.model, loop.optimizer, loop.scheduler.state_dict()
        else:
            (model, optimizer), scheduler = open_train(name, store), None
        states = random_states()
        found = snapshot(model, optimizer)
        return found | {"scheduler": scheduler, "random": states, "draws": draws(normals=name in LOOPS)}


def _read_trainer(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def look(model: Any, optimizer: Any, scheduler: Any) -> None:
        found.update(snapshot(model, optimizer))
        found["scheduler"] = scheduler.state_dict()

    trainer = new_trainer(place, Look(look), dram="32MiB")
    trainer.store.resume()
    found["random"], found["draws"] = random_states(), draws()
    try:
        trainer.train(resume_from_checkpoint=True)
    except _Looked:
        pass
    trainer.close()
    return found


def random_states() -> dict[str, Any]:
    """Return the states of all generators, as a checkpoint of transformers has them."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}


def training_in_json(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``read_training`` found as JSON has it."""
    optimizer = {
        parameter: {
            name: described(value) if isinstance(value, Tensor) and value.ndim else float(value)
            for name, value in values.items()
        }
        for parameter, values in found["optimizer"].items()
    }
    return {
        "parameters": described_all(found["parameters"]),
        "optimizer": optimizer,
        "scheduler": in_json(found["scheduler"]),
        "draws": found["draws"],
    }
