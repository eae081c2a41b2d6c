"""Long lists of tensors go to the compiled operators by address: the same bits, the same checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_cases import assert_same_bits, native, needs_native
from torch import Tensor

from zero_shard import ops

pytestmark = needs_native
_NUM_TENSORS = 40


def _gradients(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[int], int]:
    """Return tensors of many lengths, an empty one among them, and where each begins in how many elements."""
    random = torch.Generator().manual_seed(7)
    tensors, offsets, end = [], [], 0
    for number in range(_NUM_TENSORS):
        numel = number * 37 % 101
        tensors.append(torch.randn(numel, generator=random).to(dtype))
        offsets.append(end)
        end += numel + number % 3
    return tensors, offsets, end


def _adamw_arguments(tensors: list[Tensor], offsets: list[int], numel: int) -> list[Any]:
    random = torch.Generator().manual_seed(8)
    rows = [[offset, each.numel(), slot, 0] for slot, (each, offset) in enumerate(zip(tensors, offsets, strict=True))]
    count = len(tensors)
    return [
        torch.randn(numel, generator=random),
        None,
        tensors,
        offsets,
        torch.randn(numel, generator=random),
        torch.rand(numel, generator=random),
        *(None, None, None),
        torch.tensor([row for row in rows if row[1]], dtype=torch.int64),
        torch.ones(count),
        torch.ones(count, dtype=torch.uint8),
        torch.zeros(count, dtype=torch.int32),
        torch.arange(count),
        torch.tensor([[1e-3, 0.9, 0.999, 1e-8, 1e-2, 0.0, 0.0]], dtype=torch.float64),
        *(None, None, False),
    ]


def _sums_arguments(tensors: list[Tensor], offsets: list[int], numel: int) -> list[Any]:
    return [torch.zeros(1, 2, dtype=torch.float64), tensors, offsets, numel, torch.tensor([[0, numel, 0, 0]])]


def _flatten_arguments(tensors: list[Tensor], offsets: list[int], numel: int) -> list[Any]:
    return [torch.full((numel,), torch.nan), tensors, offsets, None]


_ARGUMENTS: dict[str, Callable[..., list[Any]]] = {
    "adamw_": _adamw_arguments,
    "sum_squares_": _sums_arguments,
    "flatten_": _flatten_arguments,
}
each_op = pytest.mark.parametrize("name", list(_ARGUMENTS))


@pytest.fixture
def packed_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors went by address, call by call."""
    calls: list[int] = []
    pack = ops._packed

    def counted(tensors: Any, offsets: Any) -> Any:
        packed = pack(tensors, offsets)
        calls.append(packed[0][0].shape[1] if packed[0] is not tensors else 0)
        return packed

    monkeypatch.setattr(ops, "_packed", counted)
    return calls


@each_op
def test_addresses_give_the_bits_of_lists(name: str, packed_calls: list[int]) -> None:
    expected, actual = (_ARGUMENTS[name](*_gradients()) for _ in range(2))
    getattr(native(), name)(*expected)
    getattr(ops.select("native"), name)(*actual)
    assert packed_calls == [_NUM_TENSORS]
    for number, (left, right) in enumerate(zip(actual, expected, strict=True)):
        if isinstance(left, Tensor):
            assert_same_bits(left, right, f"argument {number}")


@each_op
@pytest.mark.parametrize("fault", ["dtype", "strides", "offsets", "length", "meta"])
def test_addresses_are_checked_as_lists_are(name: str, fault: str, packed_calls: list[int]) -> None:
    def arguments() -> list[Any]:
        tensors, offsets, numel = _gradients()
        made: list[Any] = _ARGUMENTS[name](tensors, offsets, numel)
        if fault == "dtype":
            tensors[5] = tensors[5].int()
        elif fault == "strides":
            tensors[5] = torch.zeros(tensors[5].numel(), 2)[:, 0]
        elif fault == "offsets":
            offsets[5] = offsets[4]
        elif fault == "length":
            tensors[5].data = torch.zeros(500)  # behind torch's back
        else:
            tensors[5] = tensors[5].to("meta")
        return made

    texts = []
    for operator in (getattr(native(), name), getattr(ops.select("native"), name)):
        try:
            operator(*arguments())
            texts.append("")
        except (RuntimeError, NotImplementedError) as error:
            texts.append(str(error).splitlines()[0])
    assert packed_calls == [_NUM_TENSORS]
    if fault == "meta":  # in a list it makes torch call the operator's fake, which does nothing
        assert "tensors[5]" in texts[1] or "grads[5]" in texts[1], texts
    elif fault == "strides" and name == "flatten_":
        assert texts == ["", ""]
    else:
        assert texts[0] == texts[1] != "", texts


def test_rows_that_are_no_addresses_are_refused() -> None:
    for rows in (torch.zeros(3, 4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)):
        with pytest.raises(RuntimeError, match=r"contiguous int64 \[2, R\] on cpu"):
            native().flatten_(torch.zeros(8), [rows], [], None)
    with pytest.raises(RuntimeError, match="one entry for each of the 1"):
        native().flatten_(torch.zeros(8), [torch.zeros(4)], [], None)


def test_other_types_short_lists_and_wrong_counts_stay_lists() -> None:
    class Own(torch.Tensor):
        pass

    tensors = [torch.zeros(1) for _ in range(_NUM_TENSORS)]
    offsets = list(range(_NUM_TENSORS))
    assert len(ops._packed(tensors, offsets)[0]) == 1
    for given in (tensors[:3], [*tensors[:-1], torch.zeros(1).as_subclass(Own)]):
        assert ops._packed(given, offsets[: len(given)])[0] is given
    assert ops._packed(tensors, offsets[:-1])[0] is tensors
