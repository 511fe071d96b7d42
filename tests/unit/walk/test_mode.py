"""Rows computed in `DeterministicMode`: the same bits beside any other rows, with any number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product as pairs

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from prefillcli.errors import ResourceError
from prefillcli.walk.determinism import DeterministicMode, RowProducts, is_uneven

ROWS, WIDTH = 700, 72
COUNTS = (1, 2, 33, 150, 670)
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rows_of(dtype: torch.dtype, width: int = WIDTH) -> Tensor:
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(3)).to(dtype)


def differing(function: Callable[[Tensor], Tensor], rows: Tensor) -> list[tuple[int, int, int]]:
    """Where some of the rows alone are not as among all: (threads, first row, rows)."""
    found = []
    torch.set_num_threads(1)
    wanted = function(rows)
    for threads, count, first in pairs((1, 2, 3), COUNTS, (0, 29)):
        torch.set_num_threads(threads)
        part = function(rows[first : first + count])
        if not torch.equal(part, wanted[first : first + count]):
            found.append((threads, first, count))
    return found


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "outputs"), [(torch.float32, 37), (torch.bfloat16, 37), (torch.bfloat16, 96)])
def test_products_give_a_row_the_same_bits_beside_any_others(dtype: torch.dtype, outputs: int) -> None:
    generator, mode = torch.Generator().manual_seed(4), DeterministicMode()
    weight = torch.randn(outputs, WIDTH, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    ends = torch.tensor([0.2, 0.25, 0.25, 1.0])
    experts = torch.randn(4, WIDTH, outputs, generator=generator).to(dtype)

    def grouped(rows: Tensor) -> Tensor:
        # Each row to the same expert, whatever rows are there.
        order = (rows[:, 0].float().abs() * 7 % 1).argsort(stable=True)
        places = (rows[:, 0].float().abs() * 7 % 1)[order].contiguous()
        offsets = torch.searchsorted(places, ends).int()
        return torch._grouped_mm(rows[order], experts, offs=offsets)[order.argsort()]

    def products(rows: Tensor) -> Tensor:
        batch = rows[None].expand(3, -1, -1)
        with mode:
            found = [
                functional.linear(rows, weight, bias),
                rows @ weight.T,
                torch.addmm(bias, rows, weight.T),
                torch.bmm(batch, experts[:3]).transpose(0, 1).flatten(1),
                torch.baddbmm(experts[:3, :1], batch, experts[:3]).transpose(0, 1).flatten(1),
                torch.einsum("nk,mk->nm", rows, weight),
                grouped(rows),
            ]
        return torch.cat(found, dim=1)

    assert differing(products, rows_of(dtype)) == []


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
def test_elementwise_operators_leave_no_element_over(dtype: torch.dtype) -> None:
    mode = DeterministicMode()
    functions: list[Callable[[Tensor], Tensor]] = [
        functional.silu, torch.sigmoid, functional.softplus, functional.gelu, functional.mish, functional.elu,
        torch.exp, torch.exp2, torch.tanh, torch.cos, torch.log1p, lambda x: functional.gelu(x, approximate="tanh"),
        lambda x: torch.rsqrt(x.abs()), lambda x: x.abs() ** -0.5, lambda x: x.abs() ** 1.7, functional.glu,
        lambda x: torch.add(x, x[:, :1], alpha=0.3), lambda x: x.clone().sigmoid_(), lambda x: torch.pow(2.0, x),
        lambda x: torch.sigmoid(x.T).T, lambda x: torch.special.expit(x, out=torch.empty_like(x)),
    ]  # fmt: skip

    def all_of_them(rows: Tensor) -> Tensor:
        with mode:
            return torch.cat([function(rows) for function in functions], dim=1).nan_to_num()

    assert differing(all_of_them, rows_of(dtype, 26)) == []
    assert differing(lambda rows: torch.cat([f(rows) for f in functions], dim=1).nan_to_num(), rows_of(dtype, 26))


@torch.inference_mode()
def test_values_are_those_of_torch() -> None:
    rows, mode = rows_of(torch.float32), DeterministicMode()
    layer = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 50), nn.SiLU(), nn.LayerNorm(50), nn.Linear(50, 8))
    with mode:
        found = layer(rows)
    torch.testing.assert_close(found, layer(rows))


@torch.inference_mode()
def test_a_sum_over_one_long_row_does_not_depend_on_threads() -> None:
    long = torch.randn(1, 70_001, generator=torch.Generator().manual_seed(5))
    found = set()
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        with DeterministicMode():
            sums = torch.cat([long.sum(-1), long.mean(-1), long.exp().mean(-1, keepdim=True)[0], long.logsumexp(-1)])
        found.add(sums.numpy().tobytes())
    assert len(found) == 1


def test_a_way_that_gives_other_bits_is_not_taken() -> None:
    """A product that adds up in another order for many rows, or with several threads."""
    weight = torch.randn(WIDTH, 40, generator=torch.Generator().manual_seed(6))

    def by_halves(rows: Tensor) -> Tensor:
        return rows[:, ::2] @ weight[::2] + rows[:, 1::2] @ weight[1::2]

    for differs in (lambda rows: len(rows) > 100, lambda rows: torch.get_num_threads() > 1):
        products = RowProducts()

        def product(rows: Tensor, differs: Callable[[Tensor], bool] = differs) -> Tensor:
            return by_halves(rows) if differs(rows) else rows @ weight

        def compute(rows: Tensor, products: RowProducts = products, way: Callable[..., Tensor] = product) -> Tensor:
            return products.compute("product", way, rows)

        assert differing(compute, rows_of(torch.float32)) == []
        assert differing(product, rows_of(torch.float32))


def test_a_product_that_depends_on_a_rows_place_is_refused() -> None:
    def product(rows: Tensor) -> Tensor:
        return rows * torch.arange(len(rows))[:, None]

    with pytest.raises(ResourceError, match="--deterministic: on this machine a matrix product"):
        RowProducts().compute("product", product, rows_of(torch.float32))


def test_exact_operators_pass() -> None:
    assert not is_uneven(torch.ops.aten.mul.Tensor)
    assert is_uneven(torch.ops.aten.silu_.default)


def test_a_single_row_is_enough_to_find_out_about_all_places() -> None:
    """The last rows of a tile go another way; the first call has one row."""
    products = RowProducts()

    def product(rows: Tensor) -> Tensor:
        return rows * torch.where(torch.arange(len(rows)) < 60, 1.0, 1.1)[:, None]

    with pytest.raises(ResourceError, match="at another place"):
        products.compute("product", product, rows_of(torch.float32)[:1])


def test_what_lies_below_rows_in_memory_changes_none_of_them() -> None:
    weight, rows = torch.randn(WIDTH, 40, generator=torch.Generator().manual_seed(8)), rows_of(torch.float32)
    products = RowProducts()

    def compute(given: Tensor) -> Tensor:
        return products.compute("product", lambda some: some @ weight, given)

    for count in (5, 33, 150):
        alone = rows[:count].clone()
        below = torch.cat([rows[:count], torch.full((ROWS, WIDTH), torch.nan)])[:count]
        assert torch.equal(compute(below), compute(alone))
        assert torch.equal(compute(below), compute(rows)[:count])


def test_rows_are_not_copied_where_there_is_room_below_them() -> None:
    taken = []

    def product(given: Tensor) -> Tensor:
        taken.append((given.shape[0], given.data_ptr()))
        return given * 2

    room = torch.zeros(128, WIDTH)
    RowProducts().compute("product", product, room[:100])
    assert taken[-1] == (128, room.data_ptr())
