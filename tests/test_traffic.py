"""How often a collective runs, from the texts of different compilers."""

from __future__ import annotations

import textwrap

import pytest

from dsjax.traffic import collectives

PROGRAM = """
    HloModule step

    %condition (p: (s32[], f32[8])) -> pred[] {
      %limit = s32[]{:T(128)} constant(20), metadata={op_name="x"}
      %p = (s32[]{:T(128)}, f32[8]{0}) parameter(0)
      %i = s32[]{:T(128)} get-tuple-element(%p), index=0
      %n = s32[]{:T(128)} get-tuple-element(%p), index=1
      ROOT %lt = pred[]{:T(512)} compare(%i, %LIMIT), direction=LT, metadata={op_name="x"}
    }

    %body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
      %p.1 = (s32[], f32[8]{0}) parameter(0)
      %x = f32[8]{0:T(128)} all-reduce(%y), replica_groups={{0,1,2,3}}, to_apply=%add, metadata={op_name="a/layer"}
    }

    ENTRY %main (x: f32[8]) -> f32[8] {
      %w = (s32[], f32[8]{0}) while(%t), condition=%condition, body=%bodyKNOWN
    }
"""


@pytest.mark.parametrize(
    ("limit", "known", "times"),
    [
        ("limit", "", 20),  # TPU: a loop of fixed length compares with a constant
        ("n", "", 1),  # of a length that only the run knows
        ("limit", ', backend_config={"known_trip_count":{"n":"7"}}', 7),  # CPU and GPU write it down
    ],
)
def test_what_is_in_a_loop_counts_as_often_as_it_runs(limit, known, times):
    text = textwrap.dedent(PROGRAM).replace("%LIMIT", f"%{limit}").replace("KNOWN", known)
    (found,) = collectives(text)
    assert (found.kind, found.group, found.times, found.result_bytes) == ("all-reduce", 4, times, 32)
    assert found.sent_bytes == times * 48  # a ring: twice three quarters of 32 bytes


@pytest.mark.parametrize(
    ("op", "shape", "group"),
    [
        ("f32[8]{0} all-reduce(%y), replica_groups={{0,1},{2,3}}", (8,), 2),
        ("f32[8]{0} all-reduce(%y), replica_groups=[2,4]<=[8]", (8,), 4),
        # JAX 0.12 names axes; an asynchronous start gives back its operands too
        ("((f32[8]{0}), f32[8]{0}) all-reduce-start(%y), replica_groups=mesh['a'=2,'b'=4,'c'=3] {'a','c'}", (8,), 6),
        (
            "(f32[8]{0}, f32[32]{0}) all-gather-start(%y), replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}",
            (32,),
            4,
        ),
    ],
)
def test_results_and_groups_as_compilers_write_them(op, shape, group):
    (found,) = collectives(f"ENTRY %main (x: f32[8]) -> f32[8] {{\n  %x = {op}\n}}\n")
    assert (found.shapes, found.group) == ((("f32", shape),), group)
