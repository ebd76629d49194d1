"""Programs as people write them, by plain PyTorch and through tiered: the same bits, or an error that says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

import tiered
from tests.zero.programs import (
    ADAMW,
    WIDTH,
    Block,
    Mean,
    Net,
    assert_same,
    batch,
    every_update,
    every_word,
    in_memory,
    plain_steps,
    through_tiered,
)
from tests.zero.training import debug_store
from tiered.errors import UsageError


@every_update
def test_a_hook_on_several_gradients_may_be_put_before_the_forward(update: str, tmp_path: Path) -> None:
    """It asks for the parameters' places in the graph, which need no values."""

    def program(model: Any, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
        parameters = [block.weight for block in model.blocks]
        hook = register_multi_grad_hook(parameters, lambda gradients: seen.extend(each.clone() for each in gradients))
        plain_steps(model, optimizer, seen)
        hook.remove()
        plain_steps(model, optimizer, seen)

    assert_same(through_tiered(tmp_path, Net, program, update), in_memory(Net, program))


def test_a_view_of_a_whole_parameter_between_steps_has_no_values(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        model: Any = tiered.shard(Net(), store)
        view = model.head.weight.view_as(model.head.weight)
        for use in (torch.Tensor.sum, torch.Tensor.tolist, torch.Tensor.data_ptr, lambda view: torch.stack([view])):
            with pytest.raises(UsageError, match=r"head\.weight: view_as outside a forward"):
                use(view)


def test_a_term_of_the_weights_before_the_forward_is_refused_and_told_where_it_belongs(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(Net(), store)
        with pytest.raises(UsageError, match="or between the two, as for a term of the loss"):
            sum(parameter.pow(2).sum() for parameter in model.parameters())


@pytest.mark.parametrize("is_padded", [False, True])
def test_an_encoder_is_evaluated_to_the_bits_without_the_fast_path(is_padded: bool, tmp_path: Path) -> None:
    """torch takes that path for plain parameters only."""

    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)
        return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.MultiheadAttention(WIDTH, 2, batch_first=True))

    def program(model: Any, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
        model.eval()
        x = torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(0))
        padding = torch.arange(5) >= torch.tensor([[5], [3], [4], [5]]) if is_padded else None
        with torch.no_grad():
            y = model[0](x, src_key_padding_mask=padding)
            seen += [y, model[1](y, y, y, key_padding_mask=padding)[0]]

    try:
        torch.backends.mha.set_fastpath_enabled(False)
        expected = in_memory(build, program)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert_same(through_tiered(tmp_path, build, program), expected)


def test_a_method_that_returns_parameters_returns_them_and_not_copies(tmp_path: Path) -> None:
    def program(model: Any, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
        clip = tiered.clip_grad_norm_ if hasattr(model.head.weight, "segment") else torch.nn.utils.clip_grad_norm_
        assert all(any(p is q for q in model.parameters()) for p in model.matrices() + model.groups()["decay"])
        for number in range(3):
            model(batch(number)).backward()
            seen.append(clip(model.matrices(), 0.05).clone())
            optimizer.step()
            optimizer.zero_grad()
            model(batch(number)).backward()
            for parameter in model.matrices():
                parameter.grad = None
            optimizer.step()
            optimizer.zero_grad()

    assert_same(through_tiered(tmp_path, Net, program), in_memory(Net, program))


def test_a_method_is_no_forward(tmp_path: Path) -> None:
    """What it returns says nothing of activations, and nothing that the next call may rely on."""
    with debug_store(tmp_path, durable=False) as store:
        model: Any = tiered.shard(Net(), store)
        engine = model.head.weight.segment.unit.engine
        for method in (model.num_params, model.matrices, model.groups):
            method()
            assert not engine.phase.is_between and engine.activations.swapping is None
        with pytest.raises(UsageError, match="outside a forward"):
            model.matrices()[0].sum()


@pytest.mark.parametrize("is_constructed", [False, True])
def test_parameters_that_share_memory_are_refused(is_constructed: bool, tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.head = nn.Embedding(4, WIDTH), nn.Linear(WIDTH, 4)
            self.head.weight.data = self.emb.weight.data

    with debug_store(tmp_path, durable=False) as store:
        with pytest.raises(UsageError, match=r"head\.weight = emb\.weight"):
            if is_constructed:
                with tiered.construct(store):
                    Tied()
            else:
                tiered.shard(Tied(), store)


def resize(embedding: nn.Embedding, num_rows: int) -> None:
    """As transformers does it: the new weight's memory becomes the old one's, and the new module is dropped."""
    larger = nn.Embedding(num_rows, embedding.embedding_dim)
    larger.weight.data[: embedding.num_embeddings] = embedding.weight.data
    embedding.weight.data = larger.weight.data
    embedding.num_embeddings = num_rows


def test_an_embedding_is_resized_outside_construct(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        with tiered.construct(store):
            embedding = nn.Embedding(4, WIDTH)
            with pytest.raises(UsageError, match=r"resize_token_embeddings.*built outside `with tiered\.construct"):
                resize(embedding, 6)
        embedding = nn.Embedding(4, WIDTH)
        resize(embedding, 6)
        weight = embedding.weight.detach().clone()
        assert torch.equal(tiered.shard(embedding, store).state_dict()["weight"], weight)


def test_parameters_in_one_flat_tensor_are_taken(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
        flat = torch.randn(sum(parameter.numel() for parameter in model.parameters()))
        for parameter, part in zip(
            model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True
        ):
            parameter.data = part.view(parameter.shape)
        return nn.Sequential(model, Mean())

    assert_same(through_tiered(tmp_path, build, plain_steps), in_memory(build, plain_steps))


def test_columns_of_one_matrix_are_taken(tmp_path: Path) -> None:
    """They lie between each other, and have no element in common; in the store each is contiguous."""

    def build(are_copies: bool = False) -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
        both = torch.randn(WIDTH, 2 * WIDTH)
        for linear, part in zip(model, (both[:, :WIDTH], both[:, WIDTH:]), strict=True):
            linear.weight.data = part.contiguous() if are_copies else part
        return nn.Sequential(model, Mean())

    assert_same(through_tiered(tmp_path, build, plain_steps), in_memory(lambda: build(True), plain_steps))


class Interrupting(Block):
    """Ctrl-C in the middle of a forward."""

    is_due = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_due:
            raise KeyboardInterrupt
        return super().forward(x)


@every_update
@pytest.mark.parametrize("is_durable", [False, True])
def test_an_interrupted_forward_leaves_the_model_as_it_was(is_durable: bool, update: str, tmp_path: Path) -> None:
    """As in a notebook: torch calls no hook for Ctrl-C."""

    def interrupted(model: Any, number: int) -> None:
        model.blocks[1].is_due = True
        with pytest.raises(KeyboardInterrupt):
            model(batch(number))
        model.blocks[1].is_due = False

    def build() -> nn.Module:
        return Net(Interrupting)

    with debug_store(tmp_path, durable=is_durable) as store:
        torch.manual_seed(3)
        model = tiered.shard(build(), store)
        optimizer = tiered.AdamW(model.parameters(), update=update, **ADAMW)
        seen: list[Any] = []
        for number in range(3):
            interrupted(model, number)
            loss = model(batch(number))
            loss.backward()
            interrupted(model, number) if update == "step" else None
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach().clone())
            interrupted(model, number)
            model.state_dict()
            store.commit() if is_durable else None
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        seen += list(model.state_dict().values())
    assert_same(seen, in_memory(build, plain_steps))


def test_a_state_dict_that_failed_in_a_hook_is_over(tmp_path: Path) -> None:
    """The next one is an outermost one again, and between steps nothing may be read."""

    def fail(*_: Any) -> None:
        raise ValueError("no room on the disk")

    with debug_store(tmp_path, durable=False) as store:
        model: Any = tiered.shard(Net(), store)
        hook = model.blocks[0].linear.register_state_dict_post_hook(fail)
        with pytest.raises(ValueError, match="no room"):
            model.state_dict()
        hook.remove()
        model.state_dict()
        with pytest.raises(UsageError, match="outside a forward"):
            model.head.weight.sum()


ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "AdamW": ((1e-2, (0.8, 0.9), 1e-6, 0.1, False), {"fused": True, "capturable": False, "maximize": True}),
    "SGD": ((1e-2, 0.9, 0.1, 0.2, False), {"fused": True, "foreach": None, "differentiable": False}),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_those_of_torch(name: str, tmp_path: Path) -> None:
    theirs = nn.Parameter(torch.linspace(-1, 1, WIDTH))
    ours = nn.Parameter(theirs.detach().clone())
    positional, switches = ARGUMENTS[name]
    with debug_store(tmp_path, durable=False) as store:
        in_torch = getattr(torch.optim, name)([theirs], *positional, **switches)
        in_tiered = getattr(tiered, name)([ours], *positional, **switches, store=store)
        for number in range(2):
            theirs.grad, ours.grad = batch(number)[0].detach(), batch(number)[0].detach()
            norm = nn.utils.clip_grad_norm_(theirs, 0.1, 2, True, None)
            assert torch.equal(tiered.clip_grad_norm_([ours] if number else ours, 0.1, 2, True, None), norm)
            in_torch.step()
            in_tiered.step()
            assert torch.equal(theirs, ours)


# -- regions without gradients: what they leave open is of use to autograd afterwards ----------------------------------

REGIONS = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


class Borrowing(Net):
    """Uses a weight of a block beside the block's forward, first as of a teacher, then to learn."""

    def __init__(self, region: str) -> None:
        super().__init__(Block)
        self.region = region

    def teach(self, x: Tensor) -> Tensor:
        with REGIONS[self.region]():
            return torch.tanh(x @ self.blocks[1].square)

    def forward(self, x: Tensor) -> Tensor:
        taught = self.teach(x)
        return self.head(x @ self.blocks[1].square[:, ::1] + taught).square().mean() + super().forward(x)


@every_word
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.usefixtures("swap_all")
def test_a_weight_used_without_gradients_first_is_learnt_afterwards(region: str, word: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return Borrowing(region)

    def program(model: Any, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
        for number in range(2):
            with REGIONS[region]():
                seen.append(model(batch(number)).clone())
            loss = model(batch(number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach().clone())

    assert_same(through_tiered(tmp_path, build, program, "step", word), in_memory(build, program))


@pytest.mark.parametrize("word", ["keep", "swap"])  # nothing can be recorded again in inference_mode
@pytest.mark.parametrize("region", REGIONS)
def test_gradients_may_be_asked_for_where_no_graph_is_made(region: str, word: str, tmp_path: Path) -> None:
    def program(model: Any, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
        loss = model(batch(0))
        with REGIONS[region]():
            seen.extend(each.clone() for each in torch.autograd.grad(loss, list(model.parameters())))

    assert_same(through_tiered(tmp_path, Net, program, "step", word), in_memory(Net, program))
