"""The families that go there and back, or both ways at once, as text."""

from __future__ import annotations

from expecttest import assert_expected_inline

from fxpipe.schedules import build
from fxpipe.text_grid import grid


def shown(name: str, stages: int, microbatches: int, ranks: int | None = None) -> str:
    schedule = build(name, stages=stages, microbatches=microbatches, ranks=ranks)
    assert schedule.name == name.partition(":")[0]
    return grid(schedule)


def test_zb_v_turns_on_the_last_rank() -> None:
    assert_expected_inline(
        shown("zb-v", 4, 3, 2),
        """\
step  rank 0  rank 1
   0  0F0     .
   1  0F1     1F0
   2  0F2     2F0
   3  3F0     1F1
   4  3I0     2F1
   5  3W0     2I0
   6  3F1     2W0
   7  3I1     1F2
   8  3W1     1I0
   9  0I0     1W0
  10  0W0     2F2
  11  3F2     2I1
  12  3I2     2W1
  13  3W2     1I1
  14  0I1     2I2
  15  0W1     1I2
  16  0I2     1W1
  17  0W2     2W2
  18  .       1W2""",
    )


def test_v_half_holds_half_as_much() -> None:
    assert_expected_inline(
        shown("v-half", 6, 4, 3),
        """\
step  rank 0  rank 1  rank 2
   0  0F0     .       .
   1  0F1     1F0     .
   2  0F2     1F1     2F0
   3  .       .       3F0
   4  .       4F0     2F1
   5  5F0     .       3F1
   6  5I0     4F1     .
   7  5W0     4I0     .
   8  5F1     4W0     3I0
   9  5I1     1F2     2I0
  10  5W1     1I0     3W0
  11  0I0     1W0     2W0
  12  0W0     4I1     2F2
  13  0F3     4W1     3F2
  14  .       4F2     3I1
  15  5F2     1F3     2I1
  16  5I2     1I1     3W1
  17  0I1     4I2     2F3
  18  5W2     1W1     2W1
  19  0W1     4W2     3F3
  20  .       4F3     3I2
  21  5F3     .       2I2
  22  5I3     1I2     3W2
  23  0I2     4I3     2W2
  24  5W3     1W2     3I3
  25  0W2     4W3     2I3
  26  .       1I3     3W3
  27  0I3     1W3     2W3
  28  0W3     .       .""",
    )


def test_v_min_holds_a_third() -> None:
    assert_expected_inline(
        shown("v-min", 6, 4, 3),
        """\
step  rank 0  rank 1  rank 2
   0  0F0     .       .
   1  0F1     1F0     .
   2  .       1F1     2F0
   3  .       .       3F0
   4  .       4F0     2F1
   5  5F0     .       3F1
   6  5I0     4F1     .
   7  5F1     4I0     .
   8  5W0     4W0     3I0
   9  0F2     .       2I0
  10  5I1     1I0     3W0
  11  0I0     1F2     2W0
  12  5W1     4I1     2F2
  13  0F3     1W0     3F2
  14  0W0     4F2     3I1
  15  5F2     4W1     2I1
  16  5I2     1I1     3W1
  17  0I1     1F3     2W1
  18  5W2     4I2     2F3
  19  0W1     1W1     3F3
  20  .       4F3     3I2
  21  5F3     4W2     2I2
  22  5I3     1I2     3W2
  23  0I2     4I3     2W2
  24  5W3     1W2     3I3
  25  0W2     4W3     2I3
  26  .       1I3     3W3
  27  0I3     1W3     2W3
  28  0W3     .       .""",
    )


def test_hanayo_goes_there_and_back_twice() -> None:
    assert_expected_inline(
        shown("hanayo", 8, 2, 2),
        """\
step  rank 0  rank 1
   0  0F0     .
   1  0F1     1F0
   2  .       2F0
   3  3F0     1F1
   4  4F0     2F1
   5  3F1     5F0
   6  4F1     6F0
   7  7F0     5F1
   8  7B0     6F1
   9  7F1     6B0
  10  7B1     5B0
  11  4B0     6B1
  12  3B0     5B1
  13  4B1     2B0
  14  3B1     1B0
  15  0B0     2B1
  16  .       1B1
  17  0B1     .""",
    )


def test_chimera_fills_from_both_ends() -> None:
    assert_expected_inline(
        shown("chimera", 4, 4, 4),
        """\
step  rank 0  rank 1  rank 2  rank 3
   0  0F0     .       .       0F1
   1  0F2     1F0     1F1     0F3
   2  .       2F1     2F0     .
   3  3F1     1F2     1F3     3F0
   4  3B1     2F3     2F2     3B0
   5  3F3     2B1     2B0     3F2
   6  3B3     1B0     1B1     3B2
   7  0B0     2B3     2B2     0B1
   8  .       1B2     1B3     .
   9  0B2     .       .       0B3""",
    )


def test_chimera_with_two_pairs_of_pipes() -> None:
    assert_expected_inline(
        shown("chimera:f=2", 4, 4, 4),
        """\
step  rank 0  rank 1  rank 2  rank 3
   0  0F0     0F3     0F2     0F1
   1  1F3     1F0     1F1     1F2
   2  2F2     2F1     2F0     2F3
   3  3F1     3F2     3F3     3F0
   4  3B1     3B2     3B3     3B0
   5  2B2     2B1     2B0     2B3
   6  1B3     1B0     1B1     1B2
   7  0B0     0B3     0B2     0B1""",
    )


def test_chimera_zb_puts_weight_gradients_where_a_rank_would_wait() -> None:
    assert_expected_inline(
        shown("chimera-zb", 4, 4, 4),
        """\
step  rank 0  rank 1  rank 2  rank 3
   0  0F0     .       .       0F1
   1  0F2     1F0     1F1     0F3
   2  .       2F1     2F0     .
   3  3F1     1F2     1F3     3F0
   4  3I1     2F3     2F2     3I0
   5  3F3     2I1     2I0     3F2
   6  3I3     1I0     1I1     3I2
   7  0I0     2I3     2I2     0I1
   8  3W1     1I2     1I3     3W0
   9  0I2     2W1     2W0     0I3
  10  3W3     1W0     1W1     3W2
  11  0W0     2W3     2W2     0W1
  12  0W2     1W2     1W3     0W3""",
    )


def test_bitpipe_has_two_vs() -> None:
    assert_expected_inline(
        shown("bitpipe", 4, 4, 2),
        """\
step  rank 0  rank 1
   0  0F0     0F1
   1  1F1     1F0
   2  2F1     2F0
   3  3F0     3F1
   4  3B0     3B1
   5  2B1     2B0
   6  1B1     1B0
   7  0B0     0B1
   8  0F2     0F3
   9  1F3     1F2
  10  2F3     2F2
  11  3F2     3F3
  12  3B2     3B3
  13  2B3     2B2
  14  1B3     1B2
  15  0B2     0B3""",
    )


def test_dualpipe_pairs_opposite_directions() -> None:
    assert_expected_inline(
        shown("dualpipe", 4, 8, 4),
        """\
step  rank 0     rank 1     rank 2     rank 3
   0  0F0        .          .          0F1
   1  0F2        1F0        1F1        0F3
   2  0F4        2F1        2F0        0F5
   3  3F1        1F2        1F3        3F0
   4  3I1        2F3        2F2        3I0
   5  3W1        1F4        1F5        3W0
   6  3F3        2B1        2B0        3F2
   7  [0F6|3B3]  [2F5|1B0]  [2F4|1B1]  [0F7|3B2]
   8  [3F5|0B0]  [1F6|2B3]  [1F7|2B2]  [3F4|0B1]
   9  3B5        [2F7|1B2]  [2F6|1B3]  3B4
  10  [3F7|0B2]  2B5        2B4        [3F6|0B3]
  11  3B7        1B4        1B5        3B6
  12  0I4        2I7        2I6        0I5
  13  0W4        1I6        1I7        0W5
  14  0I6        2W7        2W6        0I7
  15  0W6        1W6        1W7        0W7""",
    )


def test_dualpipev_pairs_both_chunks() -> None:
    assert_expected_inline(
        shown("dualpipev", 4, 5, 2),
        """\
step  rank 0     rank 1
   0  0F0        .
   1  0F1        1F0
   2  0F2        2F0
   3  3F0        1F1
   4  3I0        2F1
   5  3W0        1F2
   6  3F1        2B0
   7  [0F3|3B1]  [2F2|1B0]
   8  [3F2|0B0]  [1F3|2B1]
   9  [0F4|3B2]  [2F3|1B1]
  10  [3F3|0B1]  [1F4|2B2]
  11  3B3        [2F4|1B2]
  12  [3F4|0B2]  2B3
  13  3B4        1B3
  14  0I3        2I4
  15  0W3        1I4
  16  0I4        2W4
  17  0W4        1W4""",
    )
