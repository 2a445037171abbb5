from jaxserve.server.proto.jaxserve.v1 import generation_pb2 as _generation_pb2
from jaxserve.server.proto.jaxserve.v1 import model_pb2 as _model_pb2
from jaxserve.server.proto.jaxserve.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Pooling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_UNSPECIFIED: _ClassVar[Pooling]
    POOLING_MEAN: _ClassVar[Pooling]
    POOLING_LAST: _ClassVar[Pooling]

class ErrorKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_KIND_UNSPECIFIED: _ClassVar[ErrorKind]
    ERROR_KIND_REQUEST: _ClassVar[ErrorKind]
    ERROR_KIND_INTERNAL: _ClassVar[ErrorKind]
    ERROR_KIND_OVERLOADED: _ClassVar[ErrorKind]
    ERROR_KIND_DEADLINE: _ClassVar[ErrorKind]
    ERROR_KIND_ENGINE_DEAD: _ClassVar[ErrorKind]
    ERROR_KIND_CONFIG: _ClassVar[ErrorKind]
POOLING_UNSPECIFIED: Pooling
POOLING_MEAN: Pooling
POOLING_LAST: Pooling
ERROR_KIND_UNSPECIFIED: ErrorKind
ERROR_KIND_REQUEST: ErrorKind
ERROR_KIND_INTERNAL: ErrorKind
ERROR_KIND_OVERLOADED: ErrorKind
ERROR_KIND_DEADLINE: ErrorKind
ERROR_KIND_ENGINE_DEAD: ErrorKind
ERROR_KIND_CONFIG: ErrorKind

class ToEngine(_message.Message):
    __slots__ = ("start", "submit", "cancel", "query", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: Start
    submit: Submit
    cancel: Cancel
    query: Query
    stop: Stop
    def __init__(self, start: _Optional[_Union[Start, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., query: _Optional[_Union[Query, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ...) -> None: ...

class FromEngine(_message.Message):
    __slots__ = ("ready", "failure", "outputs", "answer", "heartbeat")
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ready: Ready
    failure: Failure
    outputs: Outputs
    answer: Answer
    heartbeat: Heartbeat
    def __init__(self, ready: _Optional[_Union[Ready, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., outputs: _Optional[_Union[Outputs, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("engine_arguments_json", "max_num_queued_reqs", "max_num_queued_tokens", "watchdog_timeout_s", "chat_template_timeout_s", "chat_template_content_format")
    ENGINE_ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_QUEUED_REQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WATCHDOG_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_CONTENT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    engine_arguments_json: str
    max_num_queued_reqs: int
    max_num_queued_tokens: int
    watchdog_timeout_s: float
    chat_template_timeout_s: float
    chat_template_content_format: str
    def __init__(self, engine_arguments_json: _Optional[str] = ..., max_num_queued_reqs: _Optional[int] = ..., max_num_queued_tokens: _Optional[int] = ..., watchdog_timeout_s: _Optional[float] = ..., chat_template_timeout_s: _Optional[float] = ..., chat_template_content_format: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("id", "request_id", "text", "token_ids", "chat", "sampling_params", "is_final_only", "priority", "cache_salt", "timeout_s", "is_strict_length", "pooling", "truncate_prompt_tokens", "add_special_tokens", "is_normalized")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    IS_FINAL_ONLY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    IS_STRICT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_NORMALIZED_FIELD_NUMBER: _ClassVar[int]
    id: int
    request_id: str
    text: str
    token_ids: _sampling_pb2.TokenIds
    chat: Chat
    sampling_params: _sampling_pb2.SamplingParams
    is_final_only: bool
    priority: int
    cache_salt: str
    timeout_s: float
    is_strict_length: bool
    pooling: Pooling
    truncate_prompt_tokens: int
    add_special_tokens: bool
    is_normalized: bool
    def __init__(self, id: _Optional[int] = ..., request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_sampling_pb2.TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., sampling_params: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., is_final_only: _Optional[bool] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., timeout_s: _Optional[float] = ..., is_strict_length: _Optional[bool] = ..., pooling: _Optional[_Union[Pooling, str]] = ..., truncate_prompt_tokens: _Optional[int] = ..., add_special_tokens: _Optional[bool] = ..., is_normalized: _Optional[bool] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("arguments_json",)
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    arguments_json: str
    def __init__(self, arguments_json: _Optional[str] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Query(_message.Message):
    __slots__ = ("id", "method", "arguments_json")
    ID_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    id: int
    method: str
    arguments_json: str
    def __init__(self, id: _Optional[int] = ..., method: _Optional[str] = ..., arguments_json: _Optional[str] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("id", "value_json", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    VALUE_JSON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: int
    value_json: str
    error: Error
    def __init__(self, id: _Optional[int] = ..., value_json: _Optional[str] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("drain_s",)
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    drain_s: float
    def __init__(self, drain_s: _Optional[float] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("model", "default_sampling_params", "ledger", "extra_arguments")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    EXTRA_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    model: _model_pb2.Model
    default_sampling_params: _sampling_pb2.SamplingParams
    ledger: str
    extra_arguments: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[_Union[_model_pb2.Model, _Mapping]] = ..., default_sampling_params: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., ledger: _Optional[str] = ..., extra_arguments: _Optional[_Iterable[str]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: Error
    def __init__(self, error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Outputs(_message.Message):
    __slots__ = ("outputs",)
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[Output]
    def __init__(self, outputs: _Optional[_Iterable[_Union[Output, _Mapping]]] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("id", "prompt", "completions", "is_finished", "error", "times", "embedding")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    IS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    id: int
    prompt: _generation_pb2.PromptInfo
    completions: _containers.RepeatedCompositeFieldContainer[_generation_pb2.Completion]
    is_finished: bool
    error: Error
    times: Times
    embedding: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, id: _Optional[int] = ..., prompt: _Optional[_Union[_generation_pb2.PromptInfo, _Mapping]] = ..., completions: _Optional[_Iterable[_Union[_generation_pb2.Completion, _Mapping]]] = ..., is_finished: _Optional[bool] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., times: _Optional[_Union[Times, _Mapping]] = ..., embedding: _Optional[_Iterable[float]] = ...) -> None: ...

class Times(_message.Message):
    __slots__ = ("queued_s", "scheduled_s", "first_token_s", "finished_s")
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    FINISHED_S_FIELD_NUMBER: _ClassVar[int]
    queued_s: float
    scheduled_s: float
    first_token_s: float
    finished_s: float
    def __init__(self, queued_s: _Optional[float] = ..., scheduled_s: _Optional[float] = ..., first_token_s: _Optional[float] = ..., finished_s: _Optional[float] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("kind", "message", "parameter")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    kind: ErrorKind
    message: str
    parameter: str
    def __init__(self, kind: _Optional[_Union[ErrorKind, str]] = ..., message: _Optional[str] = ..., parameter: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
