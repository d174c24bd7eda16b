"""Every case of every kernel: what is compiled for each target, tested and timed."""

from __future__ import annotations

from pallas_kernels import attention_cases
from pallas_kernels.cache_write import cases as cache_write_cases
from pallas_kernels.case import Case
from pallas_kernels.compress import cases as compress_cases
from pallas_kernels.grouped_matmul import cases as grouped_matmul_cases
from pallas_kernels.indexer_topk import cases as indexer_cases
from pallas_kernels.mhc_mix import cases as mhc_cases

CACHE_FORMS = ("bfloat16", "int8", "fp8")  # of latents
FORMS = ("bf16", "fp8", "fp4")  # of experts' weights


def cases() -> list[Case]:
    """At the shapes of Flash and Pro, as one device of several has them."""
    return [
        *(case for form in CACHE_FORMS for kind in attention_cases.KINDS for case in attention_cases.cases(kind, form)),
        *indexer_cases.cases(),
        *compress_cases.cases(),
        *cache_write_cases.cases(),
        *mhc_cases.cases(),
        *(case for form in FORMS for case in grouped_matmul_cases.cases(form)),
    ]


def small_cases() -> list[Case]:
    """The same operations at sizes that a CPU can run."""
    return [
        *(
            case
            for kind in attention_cases.KINDS
            for form in ("float32", "int8", "fp8")
            for case in attention_cases.cases(kind, form, attention_cases.SMALL)
        ),
        *indexer_cases.cases(indexer_cases.SMALL),
        *compress_cases.cases(),
        *cache_write_cases.cases(cache_write_cases.SMALL_PAGES),
        *mhc_cases.cases(mhc_cases.SMALL),
        *(case for form in FORMS for case in grouped_matmul_cases.cases(form, grouped_matmul_cases.SMALL)),
    ]
