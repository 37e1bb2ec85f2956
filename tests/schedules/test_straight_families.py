"""The families of one pass over the ranks as text, at a size that can be read."""

from __future__ import annotations

from expecttest import assert_expected_inline

from fxpipe.schedules import build
from fxpipe.text_grid import grid


def shown(name: str, stages: int, microbatches: int, ranks: int | None = None) -> str:
    schedule = build(name, stages=stages, microbatches=microbatches, ranks=ranks)
    assert schedule.name == name.partition(":")[0]
    return grid(schedule)


def test_gpipe_runs_all_forwards_first() -> None:
    assert_expected_inline(
        shown("gpipe", 2, 3),
        """\
step  rank 0  rank 1
   0  0F0     .
   1  0F1     1F0
   2  0F2     1F1
   3  .       1F2
   4  .       1B0
   5  0B0     1B1
   6  0B1     1B2
   7  0B2     .""",
    )


def test_one_f_one_b_alternates_once_the_pipeline_is_full() -> None:
    assert_expected_inline(
        shown("1f1b", 3, 4),
        """\
step  rank 0  rank 1  rank 2
   0  0F0     .       .
   1  0F1     1F0     .
   2  0F2     1F1     2F0
   3  .       .       2B0
   4  .       1B0     2F1
   5  0B0     1F2     2B1
   6  0F3     1B1     2F2
   7  0B1     1F3     2B2
   8  .       1B2     2F3
   9  0B2     .       2B3
  10  .       1B3     .
  11  0B3     .       .""",
    )


def test_eager_1f1b_has_twice_the_forwards_in_flight() -> None:
    assert_expected_inline(
        shown("eager-1f1b", 3, 6),
        """\
step  rank 0  rank 1  rank 2
   0  0F0     .       .
   1  0F1     1F0     .
   2  0F2     1F1     2F0
   3  0F3     1F2     2F1
   4  0F4     1F3     2B0
   5  0F5     1B0     2F2
   6  0B0     1F4     2B1
   7  .       1B1     2F3
   8  0B1     1F5     2B2
   9  .       1B2     2F4
  10  0B2     .       2B3
  11  .       1B3     2F5
  12  0B3     .       2B4
  13  .       1B4     2B5
  14  0B4     1B5     .
  15  0B5     .       .""",
    )


def test_zb_h1_fills_the_bubble_with_weight_gradients() -> None:
    assert_expected_inline(
        shown("zb-h1", 3, 4),
        """\
step  rank 0  rank 1  rank 2
   0  0F0     .       .
   1  0F1     1F0     .
   2  0F2     1F1     2F0
   3  .       .       2I0
   4  .       1I0     2F1
   5  0I0     1F2     2I1
   6  0W0     1I1     2F2
   7  0F3     1W0     2I2
   8  0I1     1F3     2W0
   9  0W1     1I2     2F3
  10  0I2     1W1     2I3
  11  0W2     1I3     2W1
  12  0I3     1W2     2W2
  13  0W3     1W3     2W3""",
    )


def test_zb_h2_warms_up_twice_as_far() -> None:
    assert_expected_inline(
        shown("zb-h2", 3, 5),
        """\
step  rank 0  rank 1  rank 2
   0  0F0     .       .
   1  0F1     1F0     .
   2  0F2     1F1     2F0
   3  0F3     1F2     2I0
   4  0F4     1I0     2F1
   5  0I0     1F3     2I1
   6  0W0     1I1     2F2
   7  0I1     1F4     2I2
   8  0W1     1I2     2F3
   9  0I2     1W0     2I3
  10  0W2     1I3     2F4
  11  0I3     1W1     2I4
  12  0W3     1I4     2W0
  13  0I4     1W2     2W1
  14  0W4     1W3     2W2
  15  .       1W4     2W3
  16  .       .       2W4""",
    )


def test_interleaved_1f1b_runs_chunks_in_turn() -> None:
    assert_expected_inline(
        shown("interleaved-1f1b", 4, 4, 2),
        """\
step  rank 0  rank 1
   0  0F0     .
   1  0F1     1F0
   2  2F0     1F1
   3  2F1     3F0
   4  0F2     3B0
   5  2B0     3F1
   6  0F3     3B1
   7  2B1     1F2
   8  2F2     1B0
   9  0B0     1F3
  10  2F3     1B1
  11  0B1     3F2
  12  .       3B2
  13  2B2     3F3
  14  .       3B3
  15  2B3     1B2
  16  0B2     1B3
  17  0B3     .""",
    )


def test_interleaved_zb_splits_the_backward() -> None:
    assert_expected_inline(
        shown("interleaved-zb", 4, 4, 2),
        """\
step  rank 0  rank 1
   0  0F0     .
   1  0F1     1F0
   2  2F0     1F1
   3  2F1     3F0
   4  .       3I0
   5  2I0     3F1
   6  2W0     3I1
   7  0F2     3W0
   8  2I1     1F2
   9  2W1     1I0
  10  0F3     3W1
  11  0I0     1F3
  12  0W0     1I1
  13  2F2     1W0
  14  0I1     3F2
  15  0W1     3I2
  16  2F3     1W1
  17  2I2     3F3
  18  2W2     3I3
  19  2I3     3W2
  20  2W3     1I2
  21  0I2     3W3
  22  0W2     1I3
  23  0I3     1W2
  24  0W3     1W3""",
    )


def test_combined_1f1b_pairs_once_the_pipeline_is_full() -> None:
    assert_expected_inline(
        shown("combined-1f1b", 4, 4, 2),
        """\
step  rank 0     rank 1
   0  0F0        .
   1  0F1        1F0
   2  2F0        1F1
   3  2F1        3F0
   4  0F2        [3F1|3B0]
   5  [0F3|2B0]  [1F2|3B1]
   6  [2F2|2B1]  [1F3|1B0]
   7  [2F3|0B0]  [3F2|1B1]
   8  0B1        [3F3|3B2]
   9  2B2        3B3
  10  2B3        1B2
  11  0B2        1B3
  12  0B3        .""",
    )


def test_looped_bfs_finishes_a_chunk_before_the_next() -> None:
    assert_expected_inline(
        shown("looped-bfs", 4, 3, 2),
        """\
step  rank 0  rank 1
   0  0F0     .
   1  0F1     1F0
   2  0F2     1F1
   3  2F0     1F2
   4  2F1     3F0
   5  2F2     3F1
   6  .       3F2
   7  .       3B0
   8  2B0     3B1
   9  2B1     3B2
  10  2B2     1B0
  11  0B0     1B1
  12  0B1     1B2
  13  0B2     .""",
    )
