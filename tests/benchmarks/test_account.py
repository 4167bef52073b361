"""The account of a trace, on traces made by hand: microseconds go in, milliseconds come out."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.account import Account, account, kernel_class, read_trace


class Trace:
    """Builds the events of a trace: annotations of the host, and kernels with the call that launched them."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]

    def span(self, category: str, name: str, start: float, end: float, **args: Any) -> None:
        self.events.append({"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "args": args})

    def kernel(self, name: str, launched: float, start: float, end: float, category: str = "kernel") -> None:
        number = len(self.events)
        self.span("cuda_runtime", "cudaLaunchKernel", launched, launched + 1, correlation=number)
        self.span(category, name, start, end, correlation=number)


def steps() -> Trace:
    """Three steps of 1000 us on the host; the GPU is 500 us behind."""
    trace = Trace()
    for index in range(3):
        at = 1000.0 * index
        trace.span("user_annotation", "step", at, at + 1000)
        trace.kernel("nvjet_tst_128x256", at + 10, at + 500, at + 900)
        trace.kernel("ncclDevKernel_AllGather_RING_LL", at + 20, at + 800, at + 1000)
        trace.kernel("void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>", at + 30, at + 1000, at + 1100)
        trace.kernel("Memcpy DtoD", at + 40, at + 1050, at + 1150, category="gpu_memcpy")
        trace.span("user_annotation", "optimizer", at + 700, at + 900)
        trace.kernel("void at::native::vectorized_elementwise_kernel", at + 750, at + 1200, at + 1300)
    return trace


def accounted(trace: Trace) -> Account:
    found = account(trace.events)
    assert found is not None
    return found


def test_a_step_is_split_by_class_with_exposed_communication_and_idle_time() -> None:
    found = accounted(steps())
    assert found.window == 1.0
    assert found.by_class == {
        "gemm": 0.4,
        "attention": 0.1,
        "nccl": 0.2,
        "copies": 0.1,
        "elementwise": 0.0,
        "optimizer": 0.1,
    }
    # 100 of NCCL's 200 us lie under the matrix product; 50 of the copy's 100 us under attention.
    assert found.exposed_nccl == pytest.approx(0.1)
    assert found.busy == pytest.approx(0.4 + 0.1 + 0.15 + 0.1)
    assert found.idle == pytest.approx(0.25)
    assert found.host == 1.0
    assert found.kernels == 5
    assert found.synchronizing == {}


def test_only_the_synchronizing_calls_of_the_step_are_counted() -> None:
    trace = steps()
    trace.span("cuda_runtime", "cudaStreamSynchronize", 1100, 1150)
    trace.span("cuda_runtime", "cudaStreamSynchronize", 1200, 1250)
    trace.span("cuda_runtime", "cudaMemcpyAsync", 1300, 1310)
    trace.span("cuda_driver", "cuCtxSynchronize", 2100, 2900)
    found = accounted(trace)
    assert found.synchronizing == {"cudaStreamSynchronize": 2}
    assert found.waiting == pytest.approx(0.1)
    assert any("cudaStreamSynchronize 2" in line for line in found.lines())


def test_kernels_outside_of_the_optimizer_go_by_their_name() -> None:
    assert kernel_class("sm90_xmma_gemm_bf16bf16_bf16f32") == "gemm"
    assert kernel_class("cudnn_generated_fort_native_sdpa_sm90_flash_fprop") == "attention"
    assert kernel_class("void at::native::chunk_cat_cuda_kernel<float>") == "copies"
    assert kernel_class("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL") == "nccl"
    assert kernel_class("multi_tensor_apply_kernel<FusedAdamMathFunctor>") == "optimizer"
    assert kernel_class("triton_poi_fused_mul_silu_0") == "elementwise"
    assert kernel_class("Memset (Device)", "gpu_memset") == "copies"


def test_a_trace_without_gpu_or_with_one_step_gives_no_account() -> None:
    trace = Trace()
    trace.span("user_annotation", "step", 0, 10)
    with pytest.raises(ValueError, match="an account needs two or more"):
        account(trace.events)
    trace.span("user_annotation", "step", 10, 20)
    assert account(trace.events) is None


def test_traces_are_read_plain_and_zipped(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": steps().events}).encode()
    (tmp_path / "a.json").write_bytes(text)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(text))
    assert read_trace(tmp_path / "a.json") == read_trace(tmp_path / "a.json.gz") == steps().events
