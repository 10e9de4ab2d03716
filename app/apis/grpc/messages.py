"""The messages and methods of SGLang's gRPC service, ``sglang.grpc.scheduler.SglangScheduler``.

Names and numbers are those of its public definition, so that its clients work. They are declared here, in a pool of
their own: another package that brings the same definition can be imported in this process, too.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2, timestamp_pb2

__all__ = ["METHODS", "POOL", "SERVICE", "message"]

PACKAGE = "sglang.grpc.scheduler"
SERVICE = f"{PACKAGE}.SglangScheduler"

METHODS: dict[str, tuple[str, str, bool]] = {
    "Generate": ("GenerateRequest", "GenerateResponse", True),
    "Embed": ("EmbedRequest", "EmbedResponse", False),
    "HealthCheck": ("HealthCheckRequest", "HealthCheckResponse", False),
    "Abort": ("AbortRequest", "AbortResponse", False),
    "GetModelInfo": ("GetModelInfoRequest", "GetModelInfoResponse", False),
    "GetServerInfo": ("GetServerInfoRequest", "GetServerInfoResponse", False),
    "GetLoads": ("GetLoadsRequest", "GetLoadsResponse", False),
}
"""The request, the response, and whether responses are a stream."""

_FIELDS = {
    "SamplingParams": """
        1 optional float temperature
        2 optional float top_p
        3 optional int32 top_k
        4 optional float min_p
        5 optional float frequency_penalty
        6 optional float presence_penalty
        7 optional float repetition_penalty
        8 optional uint32 max_new_tokens
        9 repeated string stop
        10 repeated uint32 stop_token_ids
        11 bool skip_special_tokens
        12 bool spaces_between_special_tokens
        13 constraint string regex
        14 constraint string json_schema
        15 constraint string ebnf_grammar
        16 constraint string structural_tag
        17 uint32 n
        18 uint32 min_new_tokens
        19 bool ignore_eos
        20 bool no_stop_trim
        21 optional int32 stream_interval
        22 map float logit_bias
        23 Struct custom_params
    """,
    "DisaggregatedParams": "1 string bootstrap_host\n 2 int32 bootstrap_port\n 3 int32 bootstrap_room",
    "MultimodalInputs": "1 repeated string image_urls\n 2 repeated string video_urls\n 3 repeated string audio_urls",
    "TokenizedInput": "1 string original_text\n 2 repeated uint32 input_ids",
    "GenerateRequest": """
        1 string request_id
        2 TokenizedInput tokenized
        3 MultimodalInputs mm_inputs
        4 SamplingParams sampling_params
        5 bool return_logprob
        6 int32 logprob_start_len
        7 int32 top_logprobs_num
        8 repeated uint32 token_ids_logprob
        9 bool return_hidden_states
        10 DisaggregatedParams disaggregated_params
        11 string custom_logit_processor
        12 Timestamp timestamp
        13 bool log_metrics
        14 repeated float input_embeds
        15 string lora_id
        16 int32 data_parallel_rank
        17 bool stream
    """,
    "TopLogProbs": "1 repeated float values\n 2 repeated uint32 token_ids",
    "OutputLogProbs": """
        1 repeated float token_logprobs
        2 repeated uint32 token_ids
        3 repeated TopLogProbs top_logprobs
    """,
    "InputTokenLogProb": "1 optional float value",
    "InputLogProbs": """
        1 repeated InputTokenLogProb token_logprobs
        2 repeated uint32 token_ids
        3 repeated TopLogProbs top_logprobs
    """,
    "GenerateStreamChunk": """
        1 repeated uint32 token_ids
        2 uint32 prompt_tokens
        3 uint32 completion_tokens
        4 uint32 cached_tokens
        5 OutputLogProbs output_logprobs
        7 InputLogProbs input_logprobs
        8 uint32 index
    """,
    "GenerateComplete": """
        1 repeated uint32 output_ids
        2 string finish_reason
        3 uint32 prompt_tokens
        4 uint32 completion_tokens
        5 uint32 cached_tokens
        6 OutputLogProbs output_logprobs
        8 matched_stop uint32 matched_token_id
        9 matched_stop string matched_stop_str
        10 InputLogProbs input_logprobs
        11 uint32 index
    """,
    "GenerateResponse": """
        1 string request_id
        2 response GenerateStreamChunk chunk
        3 response GenerateComplete complete
    """,
    "EmbedRequest": """
        1 string request_id
        2 TokenizedInput tokenized
        4 MultimodalInputs mm_inputs
        5 SamplingParams sampling_params
        7 repeated int32 token_type_ids
        8 int32 data_parallel_rank
        9 bool is_cross_encoder
        10 repeated string texts
    """,
    "EmbedResponse": "4 uint32 embedding_dim\n 5 repeated float embedding\n 6 uint32 prompt_tokens",
    "HealthCheckRequest": "",
    "HealthCheckResponse": "1 bool healthy\n 2 string message",
    "AbortRequest": "1 string request_id\n 2 string reason",
    "AbortResponse": "1 bool success\n 2 string message",
    "GetModelInfoRequest": "",
    "GetModelInfoResponse": """
        1 string model_path
        2 string tokenizer_path
        3 bool is_generation
        4 string preferred_sampling_params
        5 string weight_version
        6 string served_model_name
        7 int32 max_context_length
        8 int32 vocab_size
        9 bool supports_vision
        10 string model_type
        11 repeated int32 eos_token_ids
        12 int32 pad_token_id
        13 int32 bos_token_id
        14 int32 max_req_input_len
        15 repeated string architectures
        16 string id2label_json
        17 int32 num_labels
    """,
    "GetServerInfoRequest": "",
    "GetServerInfoResponse": """
        1 Struct server_args
        2 Struct scheduler_info
        3 int32 active_requests
        4 bool is_paused
        5 double last_receive_timestamp
        6 double uptime_seconds
        7 string sglang_version
        8 string server_type
        9 Timestamp start_time
        10 int32 max_total_num_tokens
    """,
    "GetLoadsRequest": "1 optional int32 dp_rank\n 2 repeated string include",
    "SchedulerLoad": """
        1 int32 dp_rank
        2 int32 num_running_reqs
        3 int32 num_waiting_reqs
        4 int32 num_total_reqs
        5 int32 num_used_tokens
        6 int32 max_total_num_tokens
        7 double token_usage
        8 double gen_throughput
        9 double cache_hit_rate
        10 double utilization
        11 int32 max_running_requests
    """,
    "AggregateMetrics": """
        1 int32 total_running_reqs
        2 int32 total_waiting_reqs
        3 int32 total_reqs
        4 double avg_token_usage
        5 double avg_throughput
        6 double avg_utilization
    """,
    "GetLoadsResponse": """
        1 string timestamp
        2 string version
        3 int32 dp_rank_count
        4 repeated SchedulerLoad loads
        5 AggregateMetrics aggregate
    """,
}
"""The fields of each message: number, kind, type and name. Kind: ``optional``, ``repeated``, ``map`` (from text), or
the name of the group of which one field is set; left out, the field has a value always."""

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS: dict[str, Any] = {
    "float": _Field.TYPE_FLOAT,
    "double": _Field.TYPE_DOUBLE,
    "int32": _Field.TYPE_INT32,
    "uint32": _Field.TYPE_UINT32,
    "bool": _Field.TYPE_BOOL,
    "string": _Field.TYPE_STRING,
}


def _declare(name: str, text: str) -> descriptor_pb2.DescriptorProto:
    """The message of a row of ``_FIELDS``."""
    result = descriptor_pb2.DescriptorProto(name=name)
    lines = [line.split() for line in text.strip().splitlines()]
    groups = list(dict.fromkeys(kind for _, kind, *rest in lines if len(rest) == 2 and kind not in _KINDS))
    for group in groups:
        result.oneof_decl.add(name=group)
    for number, *kinds, kind, field in lines:
        label = kinds[0] if kinds else ""
        made = result.field.add(name=field, number=int(number), label=_Field.LABEL_OPTIONAL)
        if label == "map":
            entry = result.nested_type.add(name="".join(part.title() for part in field.split("_")) + "Entry")
            entry.options.map_entry = True
            for place, (part, scalar) in enumerate((("key", "string"), ("value", kind)), 1):
                entry.field.add(name=part, number=place, label=_Field.LABEL_OPTIONAL, type=_SCALARS[scalar])
            made.label, made.type = _Field.LABEL_REPEATED, _Field.TYPE_MESSAGE
            made.type_name = f".{PACKAGE}.{name}.{entry.name}"
            continue
        if kind in _SCALARS:
            made.type = _SCALARS[kind]
        else:
            made.type = _Field.TYPE_MESSAGE
            made.type_name = f".google.protobuf.{kind}" if kind in ("Struct", "Timestamp") else f".{PACKAGE}.{kind}"
        if label == "repeated":
            made.label = _Field.LABEL_REPEATED
        elif label == "optional":  # a group of its own, after all others
            made.proto3_optional, made.oneof_index = True, len(result.oneof_decl)
            result.oneof_decl.add(name=f"_{field}")
        elif label:
            made.oneof_index = groups.index(label)
    return result


_KINDS = ("optional", "repeated", "map")


def _pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(
        name="sglang_scheduler.proto",
        package=PACKAGE,
        syntax="proto3",
        dependency=["google/protobuf/struct.proto", "google/protobuf/timestamp.proto"],
        message_type=[_declare(name, text) for name, text in _FIELDS.items()],
    )
    service = file.service.add(name="SglangScheduler")
    for name, (request, response, streams) in METHODS.items():
        service.method.add(
            name=name,
            input_type=f".{PACKAGE}.{request}",
            output_type=f".{PACKAGE}.{response}",
            server_streaming=streams,
        )
    pool = descriptor_pool.DescriptorPool()
    for module in (struct_pb2, timestamp_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    return pool


POOL = _pool()


def message(name: str) -> Any:
    """The class of a message."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
