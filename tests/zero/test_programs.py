"""Programs as people write them, by plain PyTorch and through tiered: the same bits, or an error that says why.

Each program is a function of the model, its optimizer and a list to which it adds what it sees.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import tiered
from tests.zero.training import ROOMY_NBYTES, debug_store
from tiered.errors import UsageError

WIDTH = 8
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.05}
UPDATES = ("step", "backward")
WORDS = ("keep", "recompute", "swap")

Program = Callable[[nn.Module, torch.optim.Optimizer, list[Any]], None]

every_update = pytest.mark.parametrize("update", UPDATES)
every_word = pytest.mark.parametrize("word", WORDS)


class Affine(torch.autograd.Function):
    """x w + b with a backward of its own, which keeps both parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return x * weight + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0), gradient.sum(0)


class Block(nn.Module):
    """A unit of several parameters, so that all but one begin somewhere in the middle of its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.weight = nn.Parameter(torch.rand(WIDTH))
        self.square = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.weight + self.bias + x @ self.square


class AffineBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return Affine.apply(torch.tanh(self.linear(x)), self.weight, self.bias) + x @ self.square


class CheckpointBlock(Block):
    """A reentrant checkpoint is a function that saves the parameters it is given."""

    def forward(self, x: Tensor) -> Tensor:
        mixed = checkpoint(lambda x, square: torch.tanh(x @ square), x, self.square, use_reentrant=True)
        return mixed * self.weight + self.bias + self.linear(x)


class StridedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        diagonal = torch.as_strided(self.square, (WIDTH,), (WIDTH + 1,), 0)
        above = self.square.as_strided((WIDTH - 1,), (WIDTH + 1,), storage_offset=1).sum()
        own = self.square.as_strided((WIDTH,), (WIDTH + 1,), self.square.storage_offset())
        inner = self.square[2:].as_strided((4,), (WIDTH + 1,), self.square[2:].storage_offset()).sum()
        return super().forward(x) * (diagonal + own) + above + inner


class Net(nn.Module):
    """Two blocks; methods as users write them beside ``forward``."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()

    def matrices(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.dim() > 1]

    def groups(self) -> dict[str, Any]:
        return {"decay": self.matrices(), "others": tuple(p for p in self.parameters() if p.dim() < 2)}

    def num_params(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def batch(number: int, num_rows: int = 3) -> Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(number)).requires_grad_()


def plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
    for number in range(3):
        loss = model(batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach().clone())


def in_memory(build: Callable[[], nn.Module], program: Program) -> list[Any]:
    torch.manual_seed(3)
    model, seen = build(), list[Any]()
    program(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), seen)
    return seen + [value.clone() for value in model.state_dict().values()]


def through_tiered(
    directory: Path, build: Callable[[], nn.Module], program: Program, update: str = "step", word: str = "auto"
) -> list[Any]:
    with debug_store(directory, ROOMY_NBYTES, durable=False) as store:
        torch.manual_seed(3)
        model, seen = tiered.shard(build(), store, activations=word), list[Any]()
        program(model, tiered.AdamW(model.parameters(), update=update, **ADAMW), seen)
        return seen + list(model.state_dict().values())


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))


@every_word
@every_update
@pytest.mark.parametrize("block", [AffineBlock, CheckpointBlock, StridedBlock])
@pytest.mark.usefixtures("swap_all")
def test_parameters_that_functions_keep_are_themselves_in_backward(
    block: type[nn.Module], update: str, word: str, tmp_path: Path
) -> None:
    def build() -> nn.Module:
        return Net(block)

    assert_same(through_tiered(tmp_path, build, plain_steps, update, word), in_memory(build, plain_steps))


class Squares(nn.Module):
    """Of which each saved tensor, with a batch of ``WIDTH`` rows, could be taken for another: weights are like them."""

    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.think, x, use_reentrant=False) if self.is_checkpointed else self.think(x)

    def think(self, x: Tensor) -> Tensor:
        y = x
        for linear in self.linears:
            y = linear(y)
        return torch.tanh(y) * x


def over_the_model(model: Any, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(model, x, use_reentrant=False)
    return y.square().mean()


def over_the_loss(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = checkpoint(lambda x: (model(x) @ model[0].linears[0].weight).square().mean(), x, use_reentrant=False)
    return loss


def over_each_block(model: Any, x: Tensor) -> Tensor:
    for block in model:
        x = checkpoint(block, x, use_reentrant=False)
    return x.square().mean()


def over_all_and_over_each(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = checkpoint(over_each_block, model, x, use_reentrant=False)
    return loss


@every_update
@every_word
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("loss_of", [over_the_model, over_the_loss, over_each_block, over_all_and_over_each])
@pytest.mark.usefixtures("swap_all")
def test_a_checkpoint_that_the_training_loop_puts_around_a_model(
    loss_of: Callable[[Any, Tensor], Tensor], is_nested: bool, word: str, update: str, tmp_path: Path
) -> None:
    """It knows saved tensors by their number, which counts weights too."""

    def program(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
        for number in range(2):
            x = batch(number, num_rows=WIDTH)
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach().clone())

    def build() -> nn.Module:
        return nn.Sequential(*(Squares(is_nested) for _ in range(3)))

    assert_same(through_tiered(tmp_path, build, program, update, word), in_memory(build, program))


PAIRS: dict[str, Callable[[], Any]] = {
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "identity": lambda: saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    "nested": lambda: saved_tensors_hooks(
        lambda tensor: {"all": [tensor, tensor.t()]}, lambda packed: packed["all"][0]
    ),
    "rounded": lambda: saved_tensors_hooks(lambda tensor: tensor.bfloat16(), lambda packed: packed.float()),
}


@every_update
@every_word
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.usefixtures("swap_all")
def test_saved_tensor_hooks_in_a_forward_may_hand_back_the_weights_they_see(
    name: str, word: str, update: str, tmp_path: Path
) -> None:
    class Hooked(Block):
        def forward(self, x: Tensor) -> Tensor:
            with PAIRS[name]():
                return super().forward(x)

    class HookedNet(Net):
        def forward(self, x: Tensor) -> Tensor:
            with PAIRS[name]():
                x = self.blocks[0](x)
            return self.head(self.blocks[1](x)).square().mean()

    def build() -> nn.Module:
        return HookedNet(Hooked)

    assert_same(through_tiered(tmp_path, build, plain_steps, update, word), in_memory(build, plain_steps))


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


class Attending(nn.Module):
    """nn.MultiheadAttention asks whether query, key and value are one tensor, and goes another way where they are."""

    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(3, -1, WIDTH)
        for layer in self.layers:
            x = x + (checkpoint(layer, x, x, x, use_reentrant=False) if self.is_checkpointed else layer(x, x, x))[0]
        return x.float().square().mean()


@every_update
@pytest.mark.parametrize("word", [*WORDS, "auto"])
@pytest.mark.parametrize("is_cast", [False, True])
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.usefixtures("swap_all")
def test_arguments_that_are_one_tensor_are_one_where_they_are_computed_again(
    is_checkpointed: bool, is_cast: bool, word: str, update: str, tmp_path: Path
) -> None:
    def program(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
        for number in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
                loss = model(batch(number, num_rows=6))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach().clone())

    def build() -> nn.Module:
        return Attending(is_checkpointed)

    assert_same(through_tiered(tmp_path, build, program, update, word), in_memory(build, program))


def test_a_checkpoint_of_a_plain_model_keeps_its_arguments_in_their_order(tmp_path: Path) -> None:
    """Also beside a sharded model, which has it keep none of them twice."""

    def gradients() -> list[Any]:
        first, second = batch(0), batch(1)
        given: list[Any] = []

        def product(a: Tensor, power: int, b: Tensor, c: Tensor, *, bias: Tensor) -> Tensor:
            given.append((a is c, a is b, power, bias is second))
            return (a**power * b.sin() + c * bias).cos()

        checkpoint(product, first, 3, second, first, use_reentrant=False, bias=second).sum().backward()
        assert given == [(True, False, 3, True)] * 2
        return [first.grad, second.grad]

    expected = gradients()
    with debug_store(tmp_path, durable=False) as store:
        tiered.shard(Net(), store)
        assert_same(gradients(), expected)


@every_word
def test_a_functional_call_is_computed_again_with_its_own_tensors(word: str, tmp_path: Path) -> None:
    assert_same(through_tiered(tmp_path, Net, meta_steps, "step", word), in_memory(Net, meta_steps))


def meta_steps(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
    """The second loss is that of parameters that were changed, as in meta-learning."""
    for number in range(3):
        first = model(batch(number))
        changed = {name: parameter * 1.5 for name, parameter in model.named_parameters()}
        second = functional_call(model, changed, (batch(9),))
        (first + second).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(second.detach().clone())


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
            assert not engine.is_between and engine.activations.planned is None
        with pytest.raises(UsageError, match="outside a forward"):
            model.matrices()[0].sum()


def test_gradients_that_are_dropped_after_an_adding_backward_are_not_used(tmp_path: Path) -> None:
    def program(model: Any, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
        is_ours = hasattr(model.head.weight, "segment")
        for number in range(3):
            if is_ours:
                with tiered.accumulate(model):
                    model(batch(number)).backward()
            else:
                model(batch(number)).backward()
            if number == 0:
                model.zero_grad()
            else:
                model.blocks[0].weight.grad = torch.ones(WIDTH)
            model.blocks[1](batch(number)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_same(through_tiered(tmp_path, Net, program, "backward"), in_memory(Net, program))


def test_a_step_that_the_backward_has_made_cannot_be_skipped(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(Net(), store)
        optimizer = tiered.AdamW(model.parameters(), update="backward")
        for drop in (optimizer.zero_grad, model.zero_grad):
            model(batch(0)).backward()
            with pytest.raises(UsageError, match="cannot be skipped"):
                drop()
                optimizer.step()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("by_model", [False, True])
def test_a_step_that_is_skipped_after_clipping_leaves_nothing(by_model: bool, tmp_path: Path) -> None:
    def program(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
        clip = tiered.clip_grad_norm_ if hasattr(model.head.weight, "segment") else torch.nn.utils.clip_grad_norm_
        for number in range(4):
            model(batch(number)).backward()
            seen.append(clip(model.parameters(), 0.5).clone())
            if number % 2:
                (model if by_model else optimizer).zero_grad()
                model.state_dict()
                continue
            optimizer.step()
            optimizer.zero_grad()

    assert_same(through_tiered(tmp_path, Net, program), in_memory(Net, program))


def test_gradients_with_a_graph_of_their_own_are_refused(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(Net(), store)
        loss = model(batch(0).detach())  # an input's gradient would keep its graph, and that the input
        with pytest.raises(UsageError, match=r"torch\.autograd\.grad\(loss, parameters, create_graph=True\)"):
            loss.backward(create_graph=True)


def test_a_plain_parameter_that_is_unfrozen_later_is_refused_like_a_sharded_one(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))
        second.requires_grad_(False)
        optimizer = tiered.AdamW([first, second], store=store)
        second.requires_grad_(True)
        (first * second).sum().backward()
        with pytest.raises(UsageError, match=r"frozen when tiered\.AdamW was made"):
            optimizer.step()


@pytest.mark.parametrize("fault", ["unfrozen", "written after clipping"])
def test_a_step_that_is_refused_for_its_gradients_has_changed_nothing(fault: str, tmp_path: Path) -> None:
    """A store without commits could not go back."""
    with debug_store(tmp_path, durable=False) as store:
        torch.manual_seed(3)
        model = Net(Block)
        last = model.blocks[-1]
        last.requires_grad_(fault != "unfrozen")
        model = tiered.shard(model, store)
        optimizer = tiered.AdamW(model.parameters(), **ADAMW)
        model(batch(0)).backward()
        optimizer.step()
        before = model.state_dict()
        last.requires_grad_(True)
        model(batch(1)).backward()
        if fault != "unfrozen":
            tiered.clip_grad_norm_(model.parameters(), 1e-3)
            last.bias.grad.zero_()
        with pytest.raises(UsageError, match=r"frozen when|written in place"):
            optimizer.step()
        optimizer.zero_grad()
        last.requires_grad_(fault != "unfrozen")
        after = model.state_dict()
        assert all(torch.equal(after[name], before[name]) for name in before)
        model(batch(1)).backward()
        optimizer.step()
        assert optimizer.state_dict()["state"][0]["step"] == 2


def test_a_plain_parameter_keeps_the_order_of_its_elements(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        convolution = nn.Conv2d(3, 4, 2)
        optimizer = tiered.AdamW(convolution.parameters(), store=store)
        convolution.to(memory_format=torch.channels_last)
        convolution(torch.randn(1, 3, 5, 5)).sum().backward()
        with pytest.raises(UsageError, match="expected the memory format to stay"):
            optimizer.step()


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


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


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
            norm = nn.utils.clip_grad_norm_([theirs], 0.1, 2, True, None)
            assert torch.equal(tiered.clip_grad_norm_([ours], 0.1, 2, True, None), norm)
            in_torch.step()
            in_tiered.step()
            assert torch.equal(theirs, ours)


@pytest.mark.parametrize("switch", ["amsgrad", "capturable", "differentiable"])
def test_what_torch_has_and_tiered_lacks_is_refused_by_name(switch: str, tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store, pytest.raises(TypeError, match=f"{switch}=True"):
        tiered.AdamW([nn.Parameter(torch.ones(3))], store=store, **{switch: True})


def test_the_profiler_records_shapes_without_complaint(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)
    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(nn.Linear(WIDTH, WIDTH), store)
        optimizer = tiered.AdamW(model.parameters())
        with profile:
            model(batch(0)).sum().backward()
            optimizer.step()
    assert "RecordFunction" not in capfd.readouterr().err
    assert any(event.key == "aten::addmm" for event in profile.key_averages())
