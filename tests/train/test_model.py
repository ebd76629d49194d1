"""The GPT and its shapes."""

from __future__ import annotations

import pytest
import torch

from tiered.tools.train.task import GPT, VOCAB, Shape


@pytest.mark.parametrize("shape", [Shape(1, 16, 1, 8), Shape(3, 48, 4, 32)])
def test_num_params_is_that_of_the_model(shape: Shape) -> None:
    assert shape.num_params == sum(param.numel() for param in GPT(shape).parameters())


def test_the_default_has_0_4_b_parameters() -> None:
    assert Shape().num_params == 404_443_136
    assert Shape.of_size(400_000_000) == Shape()


@pytest.mark.parametrize("num_params", [10**5, 10**6, 10**7, 10**8, 1_210_000_000, 7 * 10**9, 70 * 10**9, 10**12])
def test_a_shape_of_a_size_comes_near_it(num_params: int) -> None:
    shape = Shape.of_size(num_params)
    assert abs(shape.num_params / num_params - 1) < 0.03
    assert shape.layers == 1 or 64 <= shape.width / shape.layers <= 512


def test_a_size_that_no_shape_has_is_refused() -> None:
    with pytest.raises(ValueError, match="no shape has about 10 parameters"):
        Shape.of_size(10)


def test_sizes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match="width 100 is not a multiple of heads 16: use width 96"):
        Shape(2, 100, 16, 8)
    with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
        Shape(layers=0)


def test_the_loss_starts_near_that_of_a_guess_and_is_fp32() -> None:
    torch.manual_seed(0)
    model = GPT(Shape(2, 64, 4, 32)).bfloat16()
    tokens = torch.randint(0, VOCAB, (4, 32))
    loss = model(tokens, tokens.roll(-1, 1))
    assert loss.dtype == torch.float32
    assert abs(loss.item() - 5.55) < 1


def test_no_token_sees_the_future() -> None:
    torch.manual_seed(0)
    model = GPT(Shape(2, 32, 2, 16))
    tokens = torch.randint(0, VOCAB, (1, 16))
    changed = tokens.clone()
    changed[:, 8:] = 0
    seen: list[torch.Tensor] = []
    model.ln.register_forward_hook(lambda module, inputs, output: seen.append(output))
    for given in (tokens, changed):
        model(given, given)
    whole, other = seen
    assert torch.equal(whole[:, :8], other[:, :8])
    assert not torch.equal(whole[:, 8:], other[:, 8:])
