"""The committed generated code is that of the committed .proto."""

import dataclasses
import importlib.metadata
from pathlib import Path

import pytest

from dsjax.errors import ErrorCode
from dsjax.request import FinishReason, SamplingParams, TokenEvent
from servers import convert
from servers.proto.dsjax.v1 import inference_pb2 as pb

ROOT = Path(__file__).parents[2]
PROTO = "servers/proto/dsjax/v1/inference.proto"
MADE_WITH = "1.85.1"  # as BUILD.md says


def test_generated_code_is_up_to_date(tmp_path):
    protoc = pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools is in the extra dev")
    if importlib.metadata.version("grpcio-tools") != MADE_WITH:
        pytest.skip(f"grpcio-tools is not {MADE_WITH}, so its output differs")
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    assert protoc.main(["protoc", f"-I{ROOT}", *outputs, str(ROOT / PROTO)]) == 0
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*"))
    assert [path.name for path in made] == ["inference_pb2.py", "inference_pb2.pyi", "inference_pb2_grpc.py"]
    for path in made:
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), f"{path} is stale: see BUILD.md"


def test_every_sampling_parameter_is_in_the_protocol():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(pb.SamplingParams.DESCRIPTOR.fields_by_name) == fields


def test_absent_sampling_parameters_are_the_defaults():
    assert convert.sampling_params(pb.SamplingParams()) == SamplingParams()


def test_sampling_parameters_come_back_equal():
    params = SamplingParams(
        n=2, temperature=0.7, top_p=0.9, top_k=-1, min_p=0.1, presence_penalty=-1.5, frequency_penalty=0.3,
        repetition_penalty=1.1, logit_bias={3: -100.0}, seed=-5, stop=("a", "é"), stop_token_ids=(7, 9), min_tokens=1,
        max_tokens=8, ignore_eos=True, include_stop_str_in_output=True, skip_special_tokens=False, logprobs=0,
        prompt_logprobs=3,
    )  # fmt: skip
    assert convert.sampling_params(convert.sampling_params_message(params)) == params


def test_every_code_and_reason_has_its_number():
    assert {code.value for code in ErrorCode} == {status.name for status in convert.STATUS.values()}
    finish = [convert.output(TokenEvent(request_id="", finish_reason=reason)).finish_reason for reason in FinishReason]
    assert finish == [pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_ABORT]
