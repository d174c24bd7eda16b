"""Sampling parameters of wrong types, and beyond what float32 holds: refused in one sentence."""

import math
import re

import numpy as np
import pytest

from dsjax import ErrorCode, RequestError, SamplingParams


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 3.5}, "max_tokens=3.5 is not allowed: it must be a whole number"),
        ({"max_tokens": "3"}, "max_tokens='3' is not allowed: it must be a whole number"),
        ({"max_tokens": "3" * 5000}, "3' is not allowed: it must be a whole number"),
        ({"top_k": 10**5000}, "top_k=an integer of 16610 bits is not allowed: it must be at most 2147483647"),
        ({"max_tokens": True}, "max_tokens=True is not allowed: it must be a whole number"),
        ({"n": None}, "n=None is not allowed: it must be a whole number"),
        ({"seed": 1.0}, "seed=1.0 is not allowed: it must be a whole number"),
        ({"logprobs": [1]}, "logprobs=[1] is not allowed: it must be a whole number"),
        ({"top_k": 1 << 31}, "top_k=2147483648 is not allowed: it must be at most 2147483647"),
        ({"temperature": "hot"}, "temperature='hot' is not allowed: it must be a number"),
        ({"temperature": None}, "temperature=None is not allowed: it must be a number"),
        ({"temperature": math.nan}, "temperature=nan is not allowed: it must be a finite number"),
        ({"temperature": 10**400}, "temperature=inf is not allowed: it must be a finite number"),
        ({"temperature": 1e308}, "temperature=1e+308 is not allowed: it must be in [0, 1e+06]"),
        ({"top_p": 1.5}, "top_p=1.5 is not allowed: it must be in (0, 1]"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty=1e-39 is not allowed: it must be in [0.001, 1000]"),
        ({"repetition_penalty": 1e39}, "repetition_penalty=1e+39 is not allowed: it must be in [0.001, 1000]"),
        ({"ignore_eos": "no"}, "ignore_eos='no' is not allowed: it must be true or false"),
        ({"stop": 5}, "stop=5 is not allowed: it must be a string or a list of strings"),
        ({"stop": ["a", b"b"]}, "stop=['a', b'b'] is not allowed: it must be a string or a list of strings"),
        ({"stop": ["ab" * 2000] * 17}, "...) is not allowed: it must have at most 16 strings"),
        ({"stop_token_ids": 5}, "stop_token_ids=5 is not allowed: it must be a list of whole numbers"),
        ({"stop_token_ids": [5, 6.5]}, "stop_token_ids[1]=6.5 is not allowed: it must be a whole number"),
        ({"logit_bias": [5]}, "logit_bias=[5] is not allowed: it must map token ids to numbers"),
        ({"logit_bias": {"5": 1.0}}, "a token of logit_bias='5' is not allowed: it must be a whole number"),
        ({"logit_bias": {-5: 1.0}}, "logit_bias[-5]=1.0 is not allowed: the token must be an id and the bias a number"),
        ({"logit_bias": {5: "1"}}, "logit_bias[5]='1' is not allowed: it must be a number"),
        *(
            ({"logit_bias": {5: bias}}, f"logit_bias[5]={bias} is not allowed: the token must be an id and the bias a ")
            for bias in (math.nan, math.inf, 1e308, 3.5e38, 1.1e6)
        ),
    ],
)
def test_what_is_no_value_of_a_field_is_refused_with_field_value_and_limit(fields, message):
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        SamplingParams(**fields)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT and len(caught.value.message) < 400


def test_numbers_of_other_types_are_taken():
    params = SamplingParams(
        max_tokens=np.int64(3), temperature=1, top_p=np.float32(0.5), stop="a", stop_token_ids=np.array([7, 9]),
        logit_bias={np.int32(5): 2, 6: -1e6}, ignore_eos=np.bool_(True),
    )  # fmt: skip
    assert params == SamplingParams(
        max_tokens=3, temperature=1.0, top_p=0.5, stop=("a",), stop_token_ids=(7, 9), logit_bias={5: 2.0, 6: -1e6},
        ignore_eos=True,
    )  # fmt: skip
    assert [type(v) for v in (params.max_tokens, params.temperature, params.top_p, *params.stop_token_ids)] == [
        int, float, float, int, int
    ]  # fmt: skip


def test_a_bias_that_float32_cannot_add_to_a_logit_bans_its_token():
    assert SamplingParams(logit_bias={5: -1e308, 6: -1.1e6, 7: -math.inf}).logit_bias == dict.fromkeys(
        (5, 6, 7), -math.inf
    )
