"""What a row of the batch is: where rows lie joined, numbered or sorted, and where they mix."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxpipe.errors import ModelError
from fxpipe.passes import SplitLoss
from tests.helpers import Captured, captured
from tests.passes.losses import AS_NUMBER, BEFORE, MIXES, PARTS_OF_ROWS, Formula, Formulas, batch
from tests.passes.parts import program_of, whole_and_parts

NOT_ITS_ORDER = r"along the batch dimension mixes microbatches, at .*test_rows.py:\d+.* at .*:\d+"
UNKNOWN = "is not known to keep the rows of the batch apart"
SIZE_INSIDE = "the batch size is used as a number inside of a checkpoint or another nested graph"
OTHER_ORDER = "takes values whose rows lie in different orders"


def experts(h: Tensor, k: int = 2) -> Tensor:
    """The numbers of the k experts of each row, in one dimension."""
    return torch.topk(h, k, dim=-1).indices.reshape(-1)


def inverse(entries: Tensor) -> Tensor:
    made = torch.empty_like(entries)
    made[entries] = torch.arange(entries.size(0))
    return made


def routed(s: nn.Module, h: Tensor, k: int = 2) -> tuple[Tensor, Tensor]:
    """Rows in the order of their experts, each computed with its expert's weights."""
    keys, entries = torch.sort(experts(h, k))
    return (h[entries // k] * s.table[keys]).tanh(), entries


def added_to_own_rows(s: nn.Module, h: Tensor) -> Tensor:
    rows, entries = routed(s, h)
    return torch.zeros_like(h).index_add_(0, entries // 2, rows).square().mean()


def changed_keys(s: nn.Module, h: Tensor) -> Tensor:
    keys, entries = torch.sort(experts(h))
    counts = torch.histc(keys.neg_().float(), bins=4, min=0, max=3)
    return (h * counts).mean()


def blank_written_twice(s: nn.Module, h: Tensor) -> Tensor:
    rows, entries = routed(s, h)
    places = inverse(entries)
    places[0] = 0
    return rows[places].mean()


def written_over(h: Tensor) -> Tensor:
    z = torch.zeros(2 * h.shape[0], 4, dtype=h.dtype)
    z[: h.shape[0]] = h
    z[h.shape[0] :] = h
    return (z * h.repeat_interleave(2, 0)).mean()


def written_by_mask(h: Tensor, mask: Tensor, values: Tensor | float) -> Tensor:
    z = h.clone()
    z[mask] = values
    return z.square().mean()


class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / gradient.shape[0]


def cell(h: Tensor) -> Tensor:
    """A step of an LSTM, of which h is the input, the state and, in parts, the weights' size."""
    table = torch.linspace(-1, 1, 64, dtype=h.dtype).view(16, 4)
    state, memory = torch.lstm_cell(h, (h, h.tanh()), table, table.flip(0))
    return state.square().mean() + memory.mean()


# s: the model (with weights and a table of 16 rows), h: [rows, 4], y: [rows, 4], t, u: labels, m: a
# mask.
KEPT: dict[str, Formula] = {
    "and of masks": lambda s, h, y, t, u, m: (
        h.sum(1) * operator.and_(m > 0, operator.or_(u > 0, u < 3))
    ).mean(),
    "mask by numbers of rows and columns": lambda s, h, y, t, u, m: (
        h * y[torch.arange(h.shape[0])[:, None, None], torch.arange(4)[None, None]][:, 0]
    ).mean(),
    "numbers in another shape": lambda s, h, y, t, u, m: h[
        torch.arange(h.shape[0])[:, None].expand(-1, 3).reshape(-1), 1
    ].square().mean(),
    "labels of one dimension, flattened": lambda s, h, y, t, u, m: F.cross_entropy(
        h.view(-1, 4), t.view(-1)
    ),
    "each row three times": lambda s, h, y, t, u, m: (
        h.repeat_interleave(3, 0).view(-1, 3, 4) * y[:, None]
    ).mean(),
    "all rows, and again": lambda s, h, y, t, u, m: (
        torch.cat([h, h.tanh()]).chunk(2)[1] * torch.cat([h, h])[h.shape[0] :]
    ).mean(),
    "all rows, and again, cut apart": lambda s, h, y, t, u, m: (
        h.repeat(2, 1).view(2, -1, 4)[0] * y
    ).mean(),
    "a table for every row": lambda s, h, y, t, u, m: (
        s.table[:3].repeat(h.shape[0], 1).view(-1, 3, 4) * h[:, None]
    ).mean(),
    "tokens in halves": lambda s, h, y, t, u, m: (
        (lambda a, b: a.sigmoid() * b)(*h.view(-1, 2, 2).reshape(-1, 2).chunk(2, -1))
    ).view(h.shape[0], -1).sum(-1).mean(),
    "a written copy of all rows": lambda s, h, y, t, u, m: (
        lambda z: (z.__setitem__(slice(0, h.shape[0]), h), z.square().mean())[1]
    )(torch.zeros(2 * h.shape[0], 4, dtype=h.dtype)),
    "experts, order undone by writing": lambda s, h, y, t, u, m: (
        lambda rows, entries: rows[inverse(entries)].view(-1, 2, 4).sum(1) * y
    )(*routed(s, h)).mean(),
    "experts, order undone by sorting": lambda s, h, y, t, u, m: (
        lambda rows, entries: rows[entries.argsort()].view(-1, 2, 4).sum(1) * y
    )(*routed(s, h)).mean(),
    "experts, added to their rows": lambda s, h, y, t, u, m: added_to_own_rows(s, h),
    "experts of a softmax": lambda s, h, y, t, u, m: (
        lambda rows, entries: rows.softmax(-1)[:, :2][inverse(entries)]
    )(*routed(s, h)).square().mean(),
    "joined rows of a checkpoint": lambda s, h, y, t, u, m: checkpoint(
        lambda z: (z.view(-1, 2).tanh(), z), h, use_reentrant=False
    )[0].view(-1, 4).softmax(-1)[:, 0].mean(),
    "a cell of a recurrent network": lambda s, h, y, t, u, m: cell(h),
    "one value by a mask": lambda s, h, y, t, u, m: written_by_mask(h, m > 0, 0.0),
    "one row by a mask": lambda s, h, y, t, u, m: written_by_mask(h, m > 0, s.table[0]),
    "size as a size in a checkpoint": lambda s, h, y, t, u, m: checkpoint(
        lambda z: z.view(z.shape[0], 2, 2).sum(1), h, use_reentrant=False
    ).square().mean(),
    "checkpoint of joined rows": lambda s, h, y, t, u, m: checkpoint(
        lambda z: z.tanh().view(-1, 4), h.view(-1, 2), use_reentrant=False
    ).softmax(-1)[:, 0].mean(),
}  # fmt: skip

MIXED: dict[str, tuple[str, Formula]] = {
    "sorted rows": (
        NOT_ITS_ORDER,
        lambda s, h, y, t, u, m: h[:, 0].sort().values.mean(),
    ),
    "sorted rows against their own": (
        NOT_ITS_ORDER,
        lambda s, h, y, t, u, m: (h[:, 0].sort().values - h[:, 0]).square().mean(),
    ),
    "ranks as numbers": (
        NOT_ITS_ORDER,
        lambda s, h, y, t, u, m: (h[:, 0] * h[:, 0].argsort()).mean(),
    ),
    "descending": (
        f"sort {MIXES}",
        lambda s, h, y, t, u, m: h[:, 0].sort(descending=True).values.mean(),
    ),
    "sort along rows of a matrix": (
        f"sort {MIXES}",
        lambda s, h, y, t, u, m: h.sort(0).values.mean(),
    ),
    "rows in the order of experts": (
        NOT_ITS_ORDER,
        lambda s, h, y, t, u, m: (routed(s, h, 1)[0] * y).mean(),
    ),
    "order undone by another": (
        NOT_ITS_ORDER,
        lambda s, h, y, t, u, m: routed(s, h)[0][inverse(torch.sort(experts(y)).indices)].mean(),
    ),
    "order undone by itself": (
        NOT_ITS_ORDER,
        lambda s, h, y, t, u, m: (lambda rows, entries: rows[entries])(*routed(s, h)).mean(),
    ),
    "two orders": (
        NOT_ITS_ORDER,
        lambda s, h, y, t, u, m: (routed(s, h)[0] * routed(s, y)[0]).mean(),
    ),
    "sum before a row among its group": (
        NOT_ITS_ORDER,
        lambda s, h, y, t, u, m: (
            lambda rows, entries: rows.cumsum(0)[inverse(entries)]
        )(*routed(s, h)).mean(),
    ),
    "group's softmax": (
        NOT_ITS_ORDER,
        lambda s, h, y, t, u, m: (
            lambda rows, entries: rows.softmax(0)[inverse(entries)]
        )(*routed(s, h)).mean(),
    ),
    "group's mean": (
        NOT_ITS_ORDER,
        lambda s, h, y, t, u, m: (
            lambda rows, entries: (rows - rows.mean(0))[inverse(entries)]
        )(*routed(s, h)).mean(),
    ),
    "next row of a group": (
        NOT_ITS_ORDER,
        lambda s, h, y, t, u, m: (
            lambda rows, entries: rows.roll(1, 0)[inverse(entries)]
        )(*routed(s, h)).mean(),
    ),
    "group's neighbours": (
        NOT_ITS_ORDER,
        lambda s, h, y, t, u, m: (
            lambda rows, entries: rows.view(-1, 2, 4)
        )(*routed(s, h)).sum(1).mean(),
    ),
    "wrong number of experts": (
        NOT_ITS_ORDER,
        lambda s, h, y, t, u, m: (
            lambda e: h.repeat(2, 1)[e][inverse(e)].view(-1, 2, 4)
        )(torch.sort(experts(h)).indices).mean(),
    ),
    "a table in the order of rows": (
        NOT_ITS_ORDER,
        lambda s, h, y, t, u, m: (h + s.table[torch.sort(experts(h, 1)).indices]).mean(),
    ),
    "load of experts": (
        NOT_ITS_ORDER,
        lambda s, h, y, t, u, m: (
            h * torch.histc(torch.sort(experts(h)).values.float(), bins=4, min=0, max=3)
        ).mean(),
    ),
    "load of other groups": (
        NOT_ITS_ORDER,
        lambda s, h, y, t, u, m: (
            h.sum() * torch.histc(torch.sort(experts(h)).values.float(), bins=2, min=0, max=1)
        ).sum(),
    ),
    "keys changed in place": (NOT_ITS_ORDER, lambda s, h, y, t, u, m: changed_keys(s, h)),
    "places changed in place": (NOT_ITS_ORDER, lambda s, h, y, t, u, m: blank_written_twice(s, h)),
    "sorted in a checkpoint": (
        NOT_ITS_ORDER,
        lambda s, h, y, t, u, m: checkpoint(
            lambda z: z.sort().values, h[:, 0], use_reentrant=False
        ).mean(),
    ),
    "view that cuts rows in a checkpoint": (
        f"view {PARTS_OF_ROWS}",
        lambda s, h, y, t, u, m: checkpoint(
            lambda z: z.view(2, -1, 2)[0], h, use_reentrant=False
        ).mean(),
    ),
    "first half of repeated rows": (
        f"an index or slice {MIXES}",
        lambda s, h, y, t, u, m: (h.repeat_interleave(2, 0)[: h.shape[0]] * y).mean(),
    ),
    "pieces of repeated rows": (
        f"chunk {MIXES}",
        lambda s, h, y, t, u, m: (h.repeat_interleave(2, 0).chunk(2)[0] * y).mean(),
    ),
    "repeated rows by number": (
        f"an index tensor {MIXES}",
        lambda s, h, y, t, u, m: (
            h.repeat_interleave(2, 0)[torch.arange(h.shape[0])] * y
        ).mean(),
    ),
    "repeated rows cut apart": (
        f"view {PARTS_OF_ROWS}",
        lambda s, h, y, t, u, m: (h.repeat_interleave(2, 0).view(2, -1, 4)[0] * y).mean(),
    ),
    "rows repeated in two ways": (
        OTHER_ORDER,
        lambda s, h, y, t, u, m: (h.repeat_interleave(2, 0) * h.repeat(2, 1)).mean(),
    ),
    "written in another order": (OTHER_ORDER, lambda s, h, y, t, u, m: written_over(h)),
    "a table's first rows, picked": (
        AS_NUMBER,
        lambda s, h, y, t, u, m: (h[:, :1] * s.table.gather(1, u[:, None])).mean(),
    ),
    "a table's first rows, narrow": (
        AS_NUMBER,
        lambda s, h, y, t, u, m: (h * s.table.narrow(0, 0, h.shape[0])).mean(),
    ),
    "shifted by padding": (
        f"pad {MIXES}",
        lambda s, h, y, t, u, m: (h * F.pad(h.t(), (1, -1)).t()).mean(),
    ),
    "cumulative sum of tokens": (
        f"cumsum {MIXES}",
        lambda s, h, y, t, u, m: h.view(-1, 2).cumsum(0).mean(),
    ),
    "mean of all subtracted": (
        BEFORE,
        lambda s, h, y, t, u, m: (h.view(-1, 2) - h.view(-1, 2).mean(0)).square().mean(),
    ),
    "scattered to a few rows": (
        f"scatter of only so many rows {MIXES}",
        lambda s, h, y, t, u, m: h.scatter(1, torch.tensor([[0, 2]]), 0.5).square().mean(),
    ),
    "added to a few rows": (
        f"scatter_add of only so many rows {MIXES}",
        lambda s, h, y, t, u, m: h.scatter_add(1, u[:, None], s.table[:, :1]).square().mean(),
    ),
    "values dealt out by a mask": (
        f"a mask that deals values out {MIXES}",
        lambda s, h, y, t, u, m: written_by_mask(h, m > 0, s.table[:3]),
    ),
    "triplet of columns": (
        f"triplet_margin_loss {MIXES}",
        lambda s, h, y, t, u, m: F.triplet_margin_loss(h[:, 0], y[:, 0], y[:, 1]),
    ),
    "cosine of columns": (
        f"cosine_embedding_loss {MIXES}",
        lambda s, h, y, t, u, m: F.cosine_embedding_loss(h[:, 0], y[:, 0], torch.ones(())),
    ),
    "embedding that counts": (
        "an embedding with scale_grad_by_freq depends on all rows of the batch",
        lambda s, h, y, t, u, m: (h * F.embedding(u, s.table, scale_grad_by_freq=True)).mean(),
    ),
    "embedding that shortens its rows": (
        "an embedding with max_norm depends on all rows of the batch",
        lambda s, h, y, t, u, m: (h * F.embedding(u, s.table, max_norm=0.5)).mean(),
    ),
    "size in a checkpoint": (
        SIZE_INSIDE,
        lambda s, h, y, t, u, m: checkpoint(
            lambda z: z / z.shape[0], h, use_reentrant=False
        ).square().mean(),
    ),
    "size that fills in a checkpoint": (
        SIZE_INSIDE,
        lambda s, h, y, t, u, m: checkpoint(
            lambda z: z * torch.full((4,), 1 / z.shape[0], dtype=z.dtype), h, use_reentrant=False
        ).square().mean(),
    ),
    "size in an own backward": (
        SIZE_INSIDE,
        lambda s, h, y, t, u, m: Counted.apply(h).square().mean(),
    ),
    "msort": (f"msort.*{UNKNOWN}", lambda s, h, y, t, u, m: torch.msort(h).mean()),
    "membership": (
        f"isin.*{UNKNOWN}",
        lambda s, h, y, t, u, m: (h * torch.isin(u, t)[:, None]).mean(),
    ),
    "inverse": (f"pinv.*{UNKNOWN}", lambda s, h, y, t, u, m: torch.linalg.pinv(h).mean()),
    "rank among rows": (
        f"searchsorted.*{UNKNOWN}",
        lambda s, h, y, t, u, m: (h[:, 0] * torch.searchsorted(m, m)).mean(),
    ),
    "a library's own operator": (
        f"reversed_rows.*{UNKNOWN}",
        lambda s, h, y, t, u, m: (h * torch.ops.fxpipe_tests.reversed_rows(y)).mean(),
    ),
}  # fmt: skip


@torch.library.custom_op("fxpipe_tests::reversed_rows", mutates_args=())
def reversed_rows(x: Tensor) -> Tensor:
    return x.flip(0)


@reversed_rows.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.fixture(scope="module")
def formulas() -> Captured:
    return captured(Formulas(KEPT, MIXED), *batch(), loss=0)


@pytest.mark.parametrize("name", KEPT)
def test_rows_stay_apart(formulas: Captured, name: str) -> None:
    whole, parts = whole_and_parts(formulas, program_of(formulas, [*KEPT].index(name)))
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", MIXED)
def test_mixed_rows_are_refused_with_their_line(formulas: Captured, name: str) -> None:
    program = program_of(formulas, len(KEPT) + [*MIXED].index(name))
    with pytest.raises(ModelError, match=MIXED[name][0]) as caught:
        SplitLoss()(program)
    assert "test_rows.py" in str(caught.value)


class Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x).mean(), torch.arange(x.shape[0])


def test_numbers_of_rows_are_not_returned() -> None:
    with pytest.raises(ModelError, match=AS_NUMBER):
        SplitLoss()(captured(Numbered(), batch()[0]).program(rows=2))
