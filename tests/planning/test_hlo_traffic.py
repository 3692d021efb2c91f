"""What the benchmark of compiled programs reads off a program's text."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "hlo_traffic.py"
SPEC = importlib.util.spec_from_file_location("hlo_traffic", SCRIPT)
hlo = importlib.util.module_from_spec(SPEC)
sys.modules["hlo_traffic"] = hlo
SPEC.loader.exec_module(hlo)

TEXT = """\
HloModule jit_step, is_scheduled=true

%taken (p0: f32[100,8], p1: s32[]) -> f32[4,8] {
  %p0 = f32[100,8]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[4,8]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={4,8}
}

%written (p0: bf16[100,8], p1: bf16[1,8], p2: s32[]) -> bf16[100,8] {
  %p0 = bf16[100,8]{1,0} parameter(0)
  %p1 = bf16[1,8]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %put = bf16[100,8]{1,0} dynamic-update-slice(%p0, %p1, %p2, %zero)
}

%body (state: (s32[], bf16[100,8], bf16[8,16])) -> (s32[], bf16[100,8], bf16[8,16]) {
  %state = (s32[], bf16[100,8]{1,0}, bf16[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %cache = bf16[100,8]{1,0} get-tuple-element(%state), index=1
  %weights = bf16[8,16]{1,0} get-tuple-element(%state), index=2
  %row = bf16[1,8]{1,0} copy(%cache)
  %put = bf16[100,8]{1,0} fusion(%cache, %row, %i), kind=kLoop, calls=%written
  %all-gather-start.1 = (bf16[8,2]{1,0}, bf16[8,16]{1,0}) all-gather-start(%weights), dimensions={1}
  %whole = bf16[8,16]{1,0} all-gather-done(%all-gather-start.1)
  %product = (f32[100,16]{1,0}, s8[4194304]{0}) custom-call(%put, %whole), custom_call_target=\
"__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":\
{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  ROOT %next = (s32[], bf16[100,8]{1,0}, bf16[8,16]{1,0}) tuple(%i, %put, %weights)
}

%condition (state: (s32[], bf16[100,8], bf16[8,16])) -> pred[] {
  %state = (s32[], bf16[100,8]{1,0}, bf16[8,16]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (a: f32[100,8], b: bf16[100,8], c: bf16[8,16], at: s32[]) -> f32[4,8] {
  %a = f32[100,8]{1,0} parameter(0)
  %b = bf16[100,8]{1,0} parameter(1)
  %c = bf16[8,16]{1,0} parameter(2)
  %at = s32[] parameter(3)
  %start = (s32[], bf16[100,8]{1,0}, bf16[8,16]{1,0}) tuple(%at, %b, %c)
  %loop = (s32[], bf16[100,8]{1,0}, bf16[8,16]{1,0}) while(%start), condition=%condition, \
body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %some = f32[4,8]{1,0} fusion(%a, %at), kind=kLoop, calls=%taken
}
"""


@pytest.fixture(scope="module")
def kernels():
    return hlo.Program(TEXT).kernels


def test_every_launch_counts_as_often_as_its_loop_runs(kernels):
    # A copy, an update and a product five times, and a slice once.
    assert hlo.launches(kernels) == 3 * 5 + 1
    assert {one.loop for one in kernels} == {(), (5,)}


def test_what_is_sliced_counts_what_is_taken(kernels):
    (last,) = [one for one in kernels if not one.loop]
    # Four rows read and written, and the place.
    assert last.bytes == 2 * 4 * 8 * 4 + 4


def test_what_is_updated_in_place_counts_the_update(kernels):
    update = next(one for one in kernels if one.opcode == "fusion" and one.loop)
    assert update.bytes == 2 * 8 * 2 + 4


def test_a_product_counts_its_operations_and_not_the_librarys_workspace(kernels):
    (product,) = [one for one in kernels if one.kind == "product"]
    assert product.flops == 2 * 100 * 16 * 8
    assert product.bytes == 100 * 8 * 2 + 8 * 16 * 2 + 100 * 16 * 4
    assert hlo.bfloat16_flops(kernels) == 5 * product.flops
    slow = [one.__class__(**{**vars(one), "half_rate": True}) for one in kernels]
    assert hlo.bfloat16_flops(slow) == 10 * product.flops


def test_collectives_stand_by_the_loop_they_are_in(kernels):
    assert hlo.collectives(kernels, least=0) == {
        "x 5": [{"what": "all-gather", "shape": "bf16[8,16]", "bytes": 256, "times": 5}]
    }
    assert hlo.collectives(kernels) == {}
