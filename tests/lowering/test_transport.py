"""A message is one dense block per tensor: packed as it lies, received with the same strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxpipe.lowering.packing import Spec, buffer_for, order_in_memory, pack, unpack
from fxpipe.lowering.rank_program import Message, RankProgram
from fxpipe.lowering.transport import LocalTransport


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    count = 1
    for size in shape:
        count *= size
    return torch.arange(count).reshape(shape).to(dtype)


DENSE = {
    "contiguous": numbers(2, 3),
    "transposed": numbers(2, 3).t(),
    "permuted": numbers(2, 3, 4).permute(2, 0, 1),
    "channels last": numbers(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "with sizes of one": numbers(3, 1, 2, 1).permute(3, 2, 1, 0),
    "expanded size of one": numbers(2, 1).expand(2, 1),
    "no dimension": torch.tensor(3.0),
    "one element": torch.tensor([[7]]),
    "empty": torch.empty(0, 3),
    "empty inside": torch.empty(2, 0, 3).permute(1, 2, 0),
    "bool": numbers(2, 3).t() > 2,
    "bfloat16": numbers(3, 2, dtype=torch.bfloat16).t(),
    "int64": numbers(2, 3, dtype=torch.int64),
    "complex": numbers(2, 2).t() * 1j,
}


@pytest.mark.parametrize("name", DENSE)
def test_what_is_packed_comes_out_with_values_and_strides(name: str) -> None:
    value = DENSE[name]
    spec = Spec.of(value)
    packed, buffer = pack(value, spec), buffer_for(spec)
    assert packed.is_contiguous() and buffer.is_contiguous()
    assert (packed.shape, packed.dtype) == (buffer.shape, buffer.dtype)
    buffer.copy_(packed)
    received = unpack(buffer, spec)
    assert torch.equal(received, value)
    assert received.dtype == value.dtype
    assert_same_strides(received, value)


def assert_same_strides(received: Tensor, value: Tensor) -> None:
    """Strides of dimensions of one element, and of empty tensors, are never used."""
    used = [d for d, size in enumerate(value.shape) if size > 1 and value.numel()]
    assert [received.stride(d) for d in used] == [value.stride(d) for d in used]


@pytest.mark.parametrize("name", ["contiguous", "transposed", "permuted", "channels last", "bool"])
def test_dense_tensor_is_sent_without_a_copy(name: str) -> None:
    value = DENSE[name]
    assert pack(value, Spec.of(value)).data_ptr() == value.data_ptr()


def test_value_that_lies_otherwise_than_described_is_copied_right() -> None:
    """The receiver goes by the trace's strides; the sender's tensor may differ from them."""
    spec = Spec.of(torch.empty(2, 3).t())
    value = numbers(3, 2)
    buffer = buffer_for(spec).to(value.dtype)
    buffer.copy_(pack(value, spec))
    assert torch.equal(unpack(buffer, spec), value)


def test_order_in_memory_is_by_stride_then_by_size() -> None:
    assert order_in_memory(Spec.of(torch.empty(2, 3, 4).permute(2, 0, 1))) == [1, 2, 0]
    assert order_in_memory(Spec.of(torch.empty(3, 1))) == [0, 1]


def test_message_waits_in_its_box_until_it_is_taken() -> None:
    boxes: dict[str, tuple[Tensor, ...]] = {}
    sender, receiver = LocalTransport(boxes), LocalTransport(boxes)
    receiver.post("0SEND_F0")
    assert not receiver.ready("0SEND_F0")
    sent = (numbers(2), numbers(3))
    sender.send("0SEND_F0", sent)
    assert receiver.ready("0SEND_F0")
    assert receiver.wait("0SEND_F0") == sent
    assert boxes == {}


def test_tags_number_the_tensors_of_each_pair_of_ranks() -> None:
    spec = Spec.of(numbers(2))
    messages = {
        "0SEND_F0": Message(0, 1, (spec, spec)),
        "0SEND_F1": Message(0, 1, (spec, spec)),
        "1SEND_B0": Message(1, 0, (spec,)),
        "OUTPUT 0 1>0": Message(1, 0, (spec,)),
    }
    program = RankProgram(0, torch.fx.GraphModule({}, torch.fx.Graph()), (), (), (), messages)
    tags = {"0SEND_F0": 0, "0SEND_F1": 2, "1SEND_B0": 0, "OUTPUT 0 1>0": 1}
    assert program.tags == tags
