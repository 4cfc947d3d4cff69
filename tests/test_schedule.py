"""Reading compiled schedules: which transfers overlap with attention."""

import pytest

from striped_attention.runtime.schedule import traffic, transfers

PROGRAM = """HloModule jit_both, is_scheduled=true, entry_computation_layout={()}

%branch.1 (p: (bf16[1,8,2,4])) -> (bf16[1,8,2,4]) {
  %p.1 = (bf16[1,8,2,4]{3,2,1,0}) parameter(0)
  %attention.1 = (bf16[1,8,2,4]{3,2,1,0}, u8[0]{0}) custom-call(%p.1), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %tuple.1 = (bf16[1,8,2,4]{3,2,1,0}) tuple(%attention.1)
}

%branch.2 (p: (bf16[1,8,2,4])) -> (bf16[1,8,2,4]) {
  ROOT %p.2 = (bf16[1,8,2,4]{3,2,1,0}) parameter(0)
}

ENTRY %main (k: bf16[1,8,2,4]) -> bf16[1,8,2,4] {
  %k = bf16[1,8,2,4]{3,2,1,0} parameter(0)
  %start.1 = ((bf16[1,8,2,4]{3,2,1,0}), bf16[1,8,2,4]{3,2,1,0}) collective-permute-start(%k), channel_id=1
  %start.2 = ((f32[1,8,2,4]{3,2,1,0}), f32[1,8,2,4]{3,2,1,0}) collective-permute-start(%k), channel_id=2
  %done.2 = f32[1,8,2,4]{3,2,1,0} collective-permute-done(%start.2)
  %if = (bf16[1,8,2,4]{3,2,1,0}) conditional(%x, %k, %k), branch_computations={%branch.1, %branch.2}
  %done.1 = bf16[1,8,2,4]{3,2,1,0} collective-permute-done(%start.1)
  ROOT %plain = bf16[1,8,2,4]{3,2,1,0} collective-permute(%done.1), channel_id=3
}
"""


def test_a_transfer_is_hidden_if_attention_runs_before_it_is_awaited():
    found = [(t.name, t.dtype, t.bytes, t.hidden) for t in transfers(PROGRAM)]
    assert found == [("start.1", "bf16", 128, True), ("start.2", "f32", 256, False), ("plain", "bf16", 128, False)]


def test_attention_in_no_branch_hides_nothing():
    assert not any(t.hidden for t in transfers(PROGRAM.replace("__cudnn$fmhaSoftmax", "something_else")))


def test_a_program_without_a_schedule_is_refused():
    with pytest.raises(ValueError, match="has not been scheduled"):
        transfers(PROGRAM.replace("is_scheduled=true, ", ""))


GATHERED = """HloModule jit_both, is_scheduled=true, entry_computation_layout={()}

%on_a_sparse_core (p: bf16[1,8,2,4]) -> bf16[1,32,2,4] {
  %p.1 = bf16[1,8,2,4]{3,2,1,0} parameter(0)
  ROOT %gather.1 = bf16[1,32,2,4]{3,2,1,0} all-gather(%p.1), channel_id=1, dimensions={1}
}, execution_thread="sparsecore"

ENTRY %main (k: bf16[1,8,2,4]) -> bf16[1,32,2,4] {
  %k = bf16[1,8,2,4]{3,2,1,0} parameter(0)
  %begin.1 = (bf16[1,8,2,4]{3,2,1,0}, bf16[1,32,2,4]{3,2,1,0}) all-gather-start(%k), metadata={op_name="a/keys/gather"}
  %begin.2 = ((bf16[1,8,2,4]{3,2,1,0}, token[]), bf16[1,32,2,4]{3,2,1,0}) call-start(%k), to_apply=%on_a_sparse_core
  %end.1 = bf16[1,32,2,4]{3,2,1,0} all-gather-done(%begin.1)
  %attention.1 = (f32[1,8,2,4]{3,2,1,0}) custom-call(%end.1), custom_call_target="tpu_custom_call"
  ROOT %end.2 = bf16[1,32,2,4]{3,2,1,0} call-done(%begin.2)
}
"""


def test_what_another_core_gathers_is_a_transfer_where_it_begins():
    found = [(t.name, t.bytes, t.hidden, t.source) for t in transfers(GATHERED, "all-gather")]
    assert found == [("begin.1", 512, False, "a/keys/gather"), ("begin.2", 512, True, "")]
    assert transfers(GATHERED) == []


SENT = """HloModule jit_token, is_scheduled=true, entry_computation_layout={()}

ENTRY %main (x: f32[2,8]) -> f32[2,8] {
  %x = f32[2,8]{1,0} parameter(0)
  %gathered = f32[8,8]{1,0} all-gather(%x), channel_id=1, dimensions={0}
  %begun = (f32[2,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%x), channel_id=2, dimensions={0}
  %ended = f32[8,8]{1,0} all-gather-done(%begun)
  %summed = (bf16[4]{0}, bf16[12]{0}) all-reduce(%a, %b), channel_id=3, to_apply=%add
  %scattered = f32[1,8]{1,0} reduce-scatter(%gathered), channel_id=4, dimensions={0}
  %dealt = s32[4,8]{1,0} all-to-all(%c), channel_id=5, dimensions={0}
  ROOT %sent = f32[2,8]{1,0} collective-permute(%x), channel_id=6
}
"""


def test_what_a_device_sends_is_counted_by_operation():
    assert traffic(SENT, 4) == {
        "all-gather": 2 * 256 * 3 // 4,
        "all-reduce": 2 * 32 * 3 // 4,
        "reduce-scatter": 32 * 3,
        "all-to-all": 128 * 3 // 4,
        "collective-permute": 64,
    }
    assert sum(traffic(SENT, 1).values()) == 0
